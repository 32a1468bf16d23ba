"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const rows = [...document.querySelectorAll("tbody tr")];
  const of = (row) => row.dataset.solved.split(" ");
  const show = () => {
    const by = find("by").value, not = find("not").value, text = find("text").value.toLowerCase();
    let count = 0;
    for (const row of rows) {
      const solved = of(row), none = solved.length === 1 && solved[0] === "";
      const fits = (by === "any" || (by === "none" ? none : solved.includes(by)))
        && (not === "any" || !solved.includes(not))
        && row.querySelector("th").textContent.toLowerCase().includes(text);
      row.hidden = !fits;
      count += fits ? 1 : 0;
    }
    find("count").textContent = `${count} of ${rows.length} problems`;
  };
  for (const id of ["by", "not", "text"]) find(id).addEventListener("input", show);
  find("filter").addEventListener("submit", (event) => event.preventDefault());
  show();
})();
