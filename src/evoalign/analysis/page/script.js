"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);

  // --- theme: the system's, until the button says otherwise ---
  const store = (value) => {
    try {
      if (value === undefined) return localStorage.getItem("evoalign-theme");
      localStorage.setItem("evoalign-theme", value);
    } catch {
      // of a page that may keep nothing
    }
    return null;
  };
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = byId("theme");
  const nameTheme = () => {
    theme.textContent = isDark() ? "Light theme" : "Dark theme";
  };
  const kept = store();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  theme.hidden = false;
  nameTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    store(root.dataset.theme);
    nameTheme();
  });

  // --- completions: data, set as text and never as markup ---
  const PAGE = 20;
  let rows = [];
  let several = false;
  let shown = PAGE;

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const read = () => {
    const runs = JSON.parse(byId("completions-data").textContent);
    several = runs.length > 1;
    rows = runs.flatMap((run, i) =>
      run.rows.map((row) => ({
        ...row,
        run: String(i),
        name: run.name,
        words: [row.p, row.g, row.b && row.b.t, row.a && row.a.t].filter(Boolean).join("\n").toLowerCase(),
      })),
    );
    rows.forEach((row, i) => {
      row.at = i;
    });
    if (several) {
      const order = (a, b) => a.k[0] - b.k[0] || a.k[1] - b.k[1] || a.k[2] - b.k[2] || a.at - b.at;
      rows.sort(order).forEach((row, i) => {
        row.at = i;
      });
    }
  };

  const last = (row) => row.a || row.b;
  const gain = (row) => (row.a && row.b ? row.a.r - row.b.r : undefined);
  const right = (answer) => (answer && "k" in answer ? answer.k === 1 : undefined);
  const TESTS = {
    run: { default: (row, value) => row.run === value },
    right: {
      gained: (row) => right(row.b) === false && right(row.a) === true,
      lost: (row) => right(row.b) === true && right(row.a) === false,
      right: (row) => right(row.a) === true,
      wrong: (row) => right(row.a) === false,
    },
    changed: {
      changed: (row) => row.a && row.b && row.a.t !== row.b.t,
      same: (row) => row.a && row.b && row.a.t === row.b.t,
    },
    reward: { rose: (row) => gain(row) > 0, fell: (row) => gain(row) < 0, equal: (row) => gain(row) === 0 },
    end: {
      length: (row) => row.a && row.a.f === "length",
      empty: (row) => row.a && row.a.t.trim() === "",
    },
  };
  const up = (key) => (a, b) => key(a) - key(b) || a.at - b.at;
  const rise = (row) => (gain(row) === undefined ? 0 : gain(row));
  const ORDERS = {
    "": (a, b) => a.at - b.at,
    worst: up((row) => last(row).r),
    best: up((row) => -last(row).r),
    gain: up((row) => -rise(row)),
    loss: up(rise),
    long: up((row) => -last(row).t.length),
  };

  const chosen = () => {
    const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const tests = [];
    let order = ORDERS[""];
    for (const select of document.querySelectorAll("select[data-by]")) {
      const { value } = select;
      if (select.dataset.by === "order") order = ORDERS[value];
      else if (value !== "") {
        const known = TESTS[select.dataset.by];
        tests.push(known[value] || known.default);
        tests[tests.length - 1] = ((test) => (row) => test(row, value))(tests[tests.length - 1]);
      }
    }
    return rows
      .filter((row) => words.every((word) => row.words.includes(word)) && tests.every((test) => test(row)))
      .sort(order);
  };

  const number = (value) => (Number.isInteger(value) ? String(value) : Number(value.toPrecision(4)).toString());
  const said = (title, answer) => {
    const box = element("div", "said");
    const head = element("p", "what");
    head.append(element("strong", "", title));
    if (!answer) {
      box.append(head, element("p", "none", "not there"));
      return box;
    }
    head.append(` reward ${number(answer.r)}`);
    const is = right(answer);
    if (is !== undefined) head.append(" ", element("span", is ? "right" : "wrong", is ? "right" : "wrong"));
    head.append(`, ${answer.n} tokens${answer.f === "length" ? ", cut off" : ""}`);
    box.append(head, answer.t === "" ? element("p", "none", "(empty)") : element("pre", "", answer.t));
    return box;
  };
  // one card for the same question to several runs
  const cards = (found) => {
    const made = new Map();
    for (const row of found) {
      const key = several ? JSON.stringify([row.k, row.p, row.g]) : row.at;
      if (made.has(key)) made.get(key).push(row);
      else made.set(key, [row]);
    }
    return [...made.values()];
  };
  const isSame = (a, b) => Boolean(a && b) && a.t === b.t && a.r === b.r && a.f === b.f && a.k === b.k;
  const shownCard = (asked) => {
    const item = element("li");
    const [row] = asked;
    const seeds = row.k[1] || row.k[2] ? `, seed ${row.k[1]}, sample ${row.k[2]}` : "";
    item.append(element("p", "where", `example ${row.k[0]}${seeds}`));
    item.append(element("pre", "prompt", row.p));
    if (row.g !== undefined) {
      const gold = element("p", "gold", "gold: ");
      gold.append(element("span", "", row.g));
      item.append(gold);
    }
    const both = element("div", "both");
    const whose = (one, when) => (several ? `${one.name}, ${when}` : when);
    if (asked.length > 1 && asked.every((one) => isSame(one.b, row.b))) {
      both.append(said("before, all alike", row.b), ...asked.map((one) => said(whose(one, "after"), one.a)));
    } else {
      both.append(...asked.flatMap((one) => [said(whose(one, "before"), one.b), said(whose(one, "after"), one.a)]));
    }
    item.append(both);
    return item;
  };

  const list = () => {
    if (!byId("find")) return;
    const found = chosen();
    const all = cards(found);
    byId("answers").replaceChildren(...all.slice(0, shown).map(shownCard));
    byId("found").textContent =
      `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} completions` +
      (several ? ` to ${all.length.toLocaleString("en")} questions` : "") +
      (all.length > shown ? `, the first ${shown} shown` : "");
    byId("more").hidden = all.length <= shown;
  };
  const again = (event) => {
    if (!event.target.closest(".controls")) return;
    shown = PAGE;
    list();
  };
  document.addEventListener("input", again);
  document.addEventListener("click", (event) => {
    if (event.target.id !== "more") return;
    const first = shown;
    shown += 3 * PAGE;
    list();
    const next = byId("answers").children[first];
    if (next) {
      next.tabIndex = -1;
      next.focus({ preventScroll: true });
    }
  });
  read();
  list();

  // --- live: the same page again, whenever it has changed; each part that did takes the place of the old one ---
  if (!root.dataset.tag) return;
  const state = byId("live");
  const take = (page) => {
    const fresh = new DOMParser().parseFromString(page, "text/html");
    const open = [...document.querySelectorAll("details[id]")].filter((one) => one.open).map((one) => one.id);
    const focused = document.activeElement && document.activeElement.id;
    const held = new Map([...document.querySelectorAll(".controls [id]")].map((one) => [one.id, one.value]));
    const parts = (page) => new Map([...page.querySelectorAll("[data-part]")].map((one) => [one.dataset.part, one]));
    const [old, now] = [parts(document), parts(fresh)];
    let above = null;
    for (const [name, part] of now) {
      let here = old.get(name);
      if (!here || here.dataset.hash !== part.dataset.hash) {
        const made = document.importNode(part, true);
        if (here) here.replaceWith(made);
        else above.after(made);
        here = made;
      }
      above = here;
    }
    for (const [name, part] of old) if (!now.has(name)) part.remove();
    for (const id of open) if (byId(id)) byId(id).open = true;
    for (const [id, value] of held) if (byId(id)) byId(id).value = value;
    if (focused && document.activeElement === document.body && byId(focused)) byId(focused).focus();
    document.title = fresh.title;
    byId("completions-data").textContent = fresh.getElementById("completions-data").textContent;
    root.dataset.tag = fresh.documentElement.dataset.tag;
    read();
    list();
  };
  const told = (words) => {
    if (state.textContent !== words) state.textContent = words;
  };
  const ask = async () => {
    try {
      const answer = await fetch("/", { headers: { "If-None-Match": root.dataset.tag }, cache: "no-store" });
      if (answer.status === 200) take(await answer.text());
      told(answer.ok || answer.status === 304 ? "Follows the run." : "The run cannot be read now; asks again.");
      failed = 0;
    } catch {
      failed += 1;
      told("No answer from evoalign report --serve; this is what it showed last.");
    }
    if (failed < 5) setTimeout(ask, 2000);
  };
  let failed = 0;
  setTimeout(ask, 2000);
})();
