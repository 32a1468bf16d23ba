# SPDX-License-Identifier: Apache-2.0
"""The page in headless Chromium: filters and search, hostile completions, both themes, a phone, and a run followed."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from browser import Visit, chromium
from small_runs import UNCHECKED
from test_page import HOSTILE, row, view

from evoalign.analysis.compare.runs import Completion
from evoalign.analysis.page import page
from evoalign.analysis.page.view import Measure, Pair, View

pytestmark = pytest.mark.slow
PHONE, DESKTOP = {"width": 400, "height": 844}, {"width": 1200, "height": 900}
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a tab, and the page of these runs or of this source in it, if one is given."""
    made: list[Visit] = []

    def make(*source: View | str, **settings: Any) -> Visit:
        made.append(Visit(browser, **{"viewport": DESKTOP, **settings}))
        if source:
            file = tmp_path / "report.html"
            text = source[0] if isinstance(source[0], str) else page.render([v for v in source if isinstance(v, View)])
            file.write_text(text, encoding="utf-8")
            made[-1].page.goto(file.as_uri())
        return made[-1]

    yield make
    for tab in made:
        tab.context.close()


def answer(text: str, reward: float, right: bool | None, reason: str, tokens: int) -> Completion:
    return Completion(
        example=0, prompt="", target=None, text=text, reward=reward, right=right, finish_reason=reason, tokens=tokens
    )


def asked(count: int = 250) -> list[Pair]:
    """Of every fifth the answer became right; every seventh was cut off."""
    return [
        Pair((i, 0, 0), f"Question {i}?", f"gold {i}", answer(f"long answer {i}", -5.0, i % 5 != 0, "stop", 9),
             answer(f"brief {i}", float(-(i % 10)), True, "length" if i % 7 == 0 else "stop", 2))
        for i in range(count)
    ]  # fmt: skip


def texts(tab: Visit, where: str) -> list[str]:
    return tab.page.locator(where).all_inner_texts()


def found(tab: Visit) -> str:
    return str(tab.page.locator("#found").inner_text())


def is_quiet(tab: Visit) -> None:
    """No message, and nothing asked for but the page itself."""
    assert not tab.errors
    assert [url for url in tab.asked if not url.startswith("data:")] == tab.asked[:1]


def test_search_filters_and_order(visit: Open) -> None:
    tab = visit(view(said="run", completions=asked()))
    assert found(tab).startswith("250 of 250")
    assert tab.page.locator("#answers > li").count() == 20
    tab.page.get_by_role("button", name="Show more").click()
    assert tab.page.locator("#answers > li").count() == 80
    search, right, ended = (tab.page.get_by_label(label) for label in ("Search", "Right by gold", "Ended"))
    search.fill("ANSWER 24")  # both words: 24, 124, 224, and 240 to 249
    assert found(tab) == "13 of 250 completions"
    right.select_option("became right")
    assert found(tab) == "2 of 250 completions"  # 240, 245
    search.fill("")
    assert found(tab).startswith("50 of 250")
    ended.select_option("cut off after")
    assert found(tab) == "8 of 250 completions"  # every 35th
    right.select_option("any")
    ended.select_option("any")
    tab.page.get_by_label("Order").select_option("lowest reward first")
    assert "Question 9?" in tab.page.locator("#answers > li").first.inner_text()
    tab.page.get_by_label("Order").select_option("as asked")
    tab.page.locator("#by-reward").select_option("fell")
    assert found(tab).startswith("100 of 250")  # below -5
    is_quiet(tab)


def test_runs_side_by_side_can_be_chosen(visit: Open) -> None:
    tab = visit(view("one", "x", completions=asked(30)), view("two", "x", completions=asked(20)))
    assert found(tab) == "50 of 50 completions to 30 questions, the first 20 shown"
    assert texts(tab, "#answers > li .where")[:2] == ["example 0", "example 1"]
    card = tab.page.locator("#answers > li").first
    assert card.locator(".prompt").count() == 1, "asked once, of all runs"
    assert card.locator(".what strong").all_inner_texts() == ["before, all alike", "one, after", "two, after"]
    tab.page.locator("#by-run").select_option("two")
    assert found(tab) == "20 of 50 completions to 20 questions"
    assert card.locator(".what strong").all_inner_texts() == ["two, before", "two, after"]


def test_runs_that_were_asked_something_else_have_cards_of_their_own(visit: Open) -> None:
    one, x = view("one", "x", completions=asked(1)), answer("x", 0.0, None, "stop", 1)
    tab = visit(one, view("two", "x", completions=[Pair((0, 0, 0), "Another question?", None, x, None)]))
    assert texts(tab, "#answers .prompt") == ["Question 0?", "Another question?"]
    tab = visit(one, view("two", "x", completions=[Pair((0, 0, 0), "Question 0?", "gold 0", x, None)]))
    labels = ["one, before", "one, after", "two, before", "two, after"]
    assert texts(tab, "#answers .what strong") == labels, "of another start"
    is_quiet(tab)


def test_what_a_model_said_is_text(visit: Open, tmp_path: Path) -> None:
    (tmp_path / "hostile.html").write_text(page.render([view(name=HOSTILE, said=HOSTILE)]), encoding="utf-8")
    tab = visit()
    tab.page.add_init_script("window.alert = () => { window.owned = true; };")
    tab.page.goto((tmp_path / "hostile.html").as_uri())
    said = tab.page.locator("#answers pre").first.inner_text()
    script, image = "</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>"
    assert said.startswith(f"{script}{image}\\u2028\\u2029\\u202e\\u2066\\x00")
    assert tab.page.locator("img[src=x]").count() == 0 and tab.page.evaluate("window.owned") is None
    is_quiet(tab)


def test_the_policy_holds_a_script_that_came_in_all_the_same(visit: Open) -> None:
    """If ever something were to slip through: neither a script nor a request comes of it."""
    evil = '<main><script>window.owned = 1</script><img src="http://127.0.0.1:9/x" onerror="window.owned = 2">'
    tab = visit(page.render([view()]).replace("<main", evil + "<main", 1))
    assert tab.page.evaluate("window.owned") is None
    assert len([e for e in tab.errors if "Content Security Policy" in e]) >= 2
    tab.page.evaluate("fetch('http://127.0.0.1:9/').catch(() => {})")
    tab.page.wait_for_timeout(200)
    assert not [url for url in tab.asked if url.startswith("http") and not any("ontent" in e for e in tab.errors)]


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb(colour).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "white";
  };
  let least = [99, ""];
  for (const node of document.querySelectorAll("body *:not(svg *):not(script):not(option)")) {
    if (![...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !node.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least[0]) least = [ratio, node.outerHTML.slice(0, 80)];
  }
  return least;
}"""


def width(tab: Visit) -> int:
    return tab.page.evaluate("document.documentElement.scrollWidth")


def background(tab: Visit) -> str:
    return tab.page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize(("scheme", "colour"), [("light", LIGHT), ("dark", DARK)])
def test_both_themes_on_a_phone_and_a_desktop(visit: Open, scheme: str, colour: str) -> None:
    long = view("a_name_without_any_space_" * 6, "w" * 300, rows=[row(i) for i in range(300)], completions=asked())
    for views in ([view(said="words of a run", completions=asked())], [long, view("two")]):
        tab = visit(*views, color_scheme=scheme)
        for size in (DESKTOP, PHONE):
            tab.page.set_viewport_size(size)
            assert width(tab) <= size["width"]
            shown = tab.page.locator("figure.chart").first.locator("svg:visible")
            assert shown.nth(0).get_attribute("class") in ("wide", "narrow")
        ratio, where = tab.page.evaluate(CONTRAST)
        assert ratio >= 4.5, where
        assert background(tab) == colour
        is_quiet(tab)


def test_charts_of_what_objectives_keep_fit_whatever_they_are_called(visit: Open) -> None:
    """One drawing of each is seen, in its size; lines of two runs in one chart have colours of their own."""
    rows = [row(i, objective={"lambda": 1.0 + 0.1 * i, "a_name_without_any_space_" * 9: -1e-9 * i}) for i in range(30)]
    tab = visit(view("one", rows=rows), view("two", rows=rows))
    charts = tab.page.locator("figure.chart", has=tab.page.locator("figcaption", has_text="Kept by the objective"))
    for size, kind in ((DESKTOP, "wide"), (PHONE, "narrow")):
        tab.page.set_viewport_size(size)
        seen = charts.locator("svg[role=img]:visible")
        kinds = seen.evaluate_all("(all) => all.map((one) => one.getAttribute('class'))")
        assert kinds == [*[kind] * 2, *["narrow"] * 4], "two names: together, and of each run beside the other"
        assert width(tab) <= size["width"]
    lines = charts.first.locator("svg[role=img]:visible path.line")
    assert len(set(lines.evaluate_all("(all) => all.map((one) => getComputedStyle(one).stroke)"))) == 2
    is_quiet(tab)


def test_the_tables_of_four_runs_fit_a_desktop(visit: Open) -> None:
    share, reward = (0.0812345, 0.0123456, 0.1512345), (0.0812345, -0.0001234, 0.1612345)
    found = [Measure("reward", 0.336123, 0.396123, reward, 0.330412), Measure("right", 0.236, 0.296, share, 0.23)]
    tab = visit(*(view(f"a_run_of_{i}", "run", measures=found) for i in range(4)))
    tables = tab.page.locator("#summary .wide-table, #results .wide-table")
    assert tables.count() == 5
    assert max(tables.evaluate_all("(all) => all.map((one) => one.scrollWidth - one.clientWidth)")) <= 0


def test_the_theme_can_be_switched_and_is_kept(visit: Open) -> None:
    tab = visit(view(), color_scheme="light")
    tab.page.get_by_role("button", name="Dark theme").click()
    assert background(tab) == DARK
    until = time.monotonic() + 20.0
    tab.page.reload()
    while background(tab) != DARK and time.monotonic() < until:  # a busy browser writes its store after a while
        tab.page.reload()
    assert background(tab) == DARK
    tab.page.get_by_role("button", name="Light theme").click()
    assert background(tab) == LIGHT
    tab.page.emulate_media(media="print", color_scheme="dark")
    assert background(tab) == LIGHT


def test_landmarks_labels_and_focus(visit: Open) -> None:
    tab = visit(view(completions=asked()))
    for role in ("banner", "main", "navigation", "contentinfo", "search"):
        assert tab.page.get_by_role(role).count() == 1, role
    bare = "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length).length"
    assert tab.page.evaluate(bare) == 0
    assert tab.page.evaluate("[...document.images].every((one) => one.alt)")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "skip"
    assert tab.page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    ids = tab.page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(set(ids)) == len(ids)


def test_the_live_page_follows_a_run(visit: Open, tmp_path: Path) -> None:
    """A real run in a process of its own; what was typed and opened stays while the page goes on."""
    config = {
        "output_dir": str(tmp_path / "run"),
        "es": {"num_generations": 2, "population_size": 4, "sigma": 0.05, "learning_rate": 0.02},
        "lora": {"rank": 1, "target_layers": [3], "target_modules": ["down_proj"]},
        "evaluation": {"max_tokens": 8}, "engine": {"threads": 1},
        "checks": {**UNCHECKED, "placebo": 1},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    training = forked.Popen([sys.executable, "-m", "followed", str(tmp_path / "config.yaml"), str(tmp_path / "open")])
    serving, out = None, tmp_path / "out"
    try:
        wait_for(lambda: (tmp_path / "run/metrics.jsonl").is_file())
        words = ["report", str(tmp_path / "run"), "--serve", "--port", "0"]
        with out.open("wb") as file:
            serving = forked.Popen([sys.executable, "-m", "evoalign.cli", *words], stdout=file)
        wait_for(lambda: "\n" in out.read_text())
        url = out.read_text().split()[0]
        tab = visit()
        tab.page.goto(url)
        assert "not finished" in tab.page.locator("#summary").inner_text()
        tab.page.get_by_label("Search").fill("what")
        tab.page.locator("#made-0 summary").click()
        (tmp_path / "open").touch()
        tab.page.get_by_text("generation 2 of 2").wait_for(timeout=120_000)
        tab.page.locator("#placebo").wait_for(timeout=120_000)
        tab.page.get_by_text("done; generation 2 of 2").wait_for(timeout=120_000)
        assert training.wait(timeout=120) == 0
        assert tab.page.get_by_label("Search").input_value() == "what"
        assert tab.page.evaluate("document.getElementById('made-0').open")
        assert "after" in tab.page.locator("#answers > li").first.inner_text()
        assert tab.page.locator("#answers .none").count() == 0  # the answers after training have come
        assert not tab.errors and all(address.startswith((url, "data:")) for address in tab.asked)
        assert len(tab.asked) > 2
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=30) == 0 and "ended" in out.read_text()
        assert (tmp_path / "run/report.html").is_file()
    finally:
        for process in (training, serving):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_live_page_without_a_run_that_goes_on_stays_as_it_is(visit: Open) -> None:
    """A part that comes, and one that goes, each in its place."""
    states = {"a": View("run", "run"), "b": view("run", "x"), "c": View("run", "run", warnings=["came late"])}
    pages = {tag: page.render([state], live=tag) for tag, state in states.items()}
    tab = visit(pages["a"].replace("setTimeout(ask, 2000)", "setTimeout(ask, 50)"))
    assert tab.page.locator("#placebo").count() == 0  # its script is not the allowed one, and does not run
    tags, current = iter("bc"), ["a"]

    def answer(route: Any) -> None:
        if route.request.headers.get("if-none-match"):
            if (tag := next(tags, None)) is None:
                route.fulfill(status=304)
                return
            current[0] = tag
        route.fulfill(status=200, content_type="text/html", body=pages[current[0]])

    tab = visit()
    tab.page.route("**/*", answer)
    tab.page.goto("http://report.test/")
    order = "[...document.querySelectorAll('main > section')].map((one) => one.id)"
    few = ["warnings", "summary", "completions"]
    assert tab.page.evaluate(order) == few
    tab.page.locator("#placebo").wait_for(timeout=20_000)
    assert tab.page.evaluate(order) == list(page.PARTS)
    assert tab.page.locator("nav a").count() == len(page.PARTS)
    tab.page.get_by_text("came late").wait_for(timeout=20_000)
    assert tab.page.evaluate(order) == few
    assert not tab.errors
