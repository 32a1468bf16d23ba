# SPDX-License-Identifier: Apache-2.0
"""The page as text: what is in it, what escapes, what a browser may run of it, and how large it is."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
import time
from html.parser import HTMLParser
from typing import Any

import pytest

from evoalign.analysis.compare.runs import Completion
from evoalign.analysis.page import charts, curves, page
from evoalign.analysis.page.charts import Chart, Series
from evoalign.analysis.page.view import Analysed, Measure, Pair, Picture, Placebos, View
from evoalign.report.figures import ES_WORDS, GRPO_WORDS, Ends, Words
from evoalign.statistics import Estimate

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\u2029\u202e\u2066\0\x1b[2J\ud800"
    "\"' onmouseover=alert(3) x=' <!-- ]]> &lt;b&gt; {{7*7}} javascript:alert(4)"
)


def row(generation: int, **more: Any) -> dict[str, Any]:
    mean = math.sin(generation) + 0.1234567 * generation
    return {
        "generation": generation, "mean": mean, "best": mean + 1.03, "worst": mean - 1.07, "p20": mean - 0.5123,
        "p80": mean + 0.5456, "std": 0.4321, "zero_variance": generation % 50 == 3,
        "seconds": {"rollout": 2.123456, "score": 0.01234, "update": 0.0456, "other": 0.1}, **more,
    }  # fmt: skip


def pair(i: int, before: str = "long", after: str = "short", prompt: str = "What?") -> Pair:
    asked = {"example": i, "prompt": prompt, "target": "gold"}
    first = Completion(**asked, text=before, reward=-3.0, right=False, finish_reason="stop", tokens=9)
    last = Completion(**asked, text=after, reward=1.0, right=True, finish_reason="length", tokens=2)
    return Pair((i, 0, 0), prompt, "gold", first, last)


def view(name: str = "run", said: str = "plain", **more: Any) -> View:
    whole: dict[str, Any] = {
        "name": name, "path": said, "about": {"task": said}, "made": {"command": said}, "state": "done", "steps": 3,
        "total": 3, "headline": said, "beside": [said], "alarms": [said], "warnings": [said], "diagnosis": [said],
        "rows": [row(i, rewards={said: 1.0, "b": None}, objective={said: 0.5 * i}, divergence={"exact": 0.1 * i},
                     evaluation={"reward": 1.0}) for i in range(3)],
        "ends": {"test": Ends(Estimate(0.0, 9, -1.0, 1.0), Estimate(1.0, 9, 0.5, 1.5))},
        "measures": [Measure("reward", 0.0, 1.0, (1.0, 0.5, 1.5), 0.2), Measure(said, 0.1, 0.2)],
        "placebos": Placebos(said, 0.0, 1.0, (0.1, 0.2), 0.05, [said]),
        "settings": {"es.sigma": said, "seed": "0"}, "defaults": {"es.sigma": "none", "seed": "0"},
        "budget": {"training": {"wall_seconds": 1.5, "peak_memory_bytes": None}},
        "completions": [pair(i, said, said, said) for i in range(3)],
        "analyses": [Analysed(said, [said], json.dumps({"x": said}), [Picture("f", "png", b"\x89PNG")], [said])],
    }  # fmt: skip
    return View(**{**whole, **more})


class Read(HTMLParser):
    """Elements and attributes as a browser sees them, and the text of each script."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.scripts, self.words = list[str](), list[str](), list[str]()
        self.attributes = list[tuple[str, str, str]]()
        self._within = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._within == "script" else self.words).append(data)


def embedded(source: str) -> list[dict[str, Any]]:
    """The completions of the first run, as the script reads them."""
    return json.loads(Read(source).scripts[0])[0]["rows"]


def part(source: str, name: str) -> str:
    return source.split(f'id="{name}"', 1)[1].split("</section>", 1)[0]


def test_nothing_hostile_becomes_markup() -> None:
    plain, hostile = Read(page.render([view()])), Read(page.render([view(name=HOSTILE, said=HOSTILE)]))
    assert sorted(set(hostile.tags)) == sorted(set(plain.tags))
    assert hostile.tags.count("script") == plain.tags.count("script") == 2
    assert not [name for _, name, _ in hostile.attributes if name.startswith("on")]
    links = [value for _, name, value in hostile.attributes if name == "href"]
    assert all(value.startswith(("#", "data:,")) for value in links) and "alert(1)" in "".join(hostile.words)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u202e", "\u2066", "\0", "\x1b", "\ud800", "\r"])
def test_what_is_not_seen_is_written_out(character: str) -> None:
    source = page.render([view(name=f"a{character}b", said=f"a{character}b")])
    assert character not in source
    source.encode("utf-8")
    shown = character.encode("unicode_escape", "backslashreplace").decode()
    assert f"a{shown}b" in source
    assert embedded(source)[0]["a"]["t"] == f"a{shown}b"
    found = embedded(page.render([view(completions=[pair(0, after="one\ntwo\tthree")])]))
    assert found[0]["a"]["t"] == "one\ntwo\\tthree", "lines stay lines"


def test_the_policy_allows_the_page_s_own_script_and_style_alone() -> None:
    source = page.render([view()])
    said = dict(part.split(" ", 1) for part in page.policy(live=False).split("; "))
    assert said["default-src"] == "'none'" and said["img-src"] == "data:" and "connect-src" not in said
    assert "connect-src 'self'" in page.policy(live=True)
    for kind, element in (("script", "<script>"), ("style", "<style>")):
        inside = source.split(element, 1)[1].split(f"</{kind}>", 1)[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert said[f"{kind}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in page.policy(live=True)
    assert not re.search(r"<[^>]+ style=", source.replace("<style>", ""))


def test_warnings_come_first_and_alarms_before_them() -> None:
    source = page.render([view(alarms=["it is hacked"], warnings=["not sealed"])])
    places = [source.index(f'id="{name}"') for name in page.PARTS]
    assert places == sorted(places) and next(iter(page.PARTS)) == "warnings"
    assert source.index("it is hacked") < source.index("not sealed") < source.index('id="summary"')
    fine = page.render([view(alarms=[], warnings=[])])
    assert "No alarms and no warnings" in fine and 'class="alarm"' not in fine


def test_settings_that_differ_come_first() -> None:
    defaults = {"es.sigma": "1", "es.shaping": "zscore", "seed": "0"}
    settings = [{**defaults, "es.sigma": sigma, "es.shaping": "ranks"} for sigma in "23"]
    views = [view(f"run{i}", settings=own, defaults=defaults) for i, own in enumerate(settings)]
    found = part(page.render(views), "settings")
    places = [found.index(text) for text in ("es.sigma", "not the default", "es.shaping", "<details", "seed")]
    assert places == sorted(places)


def test_parts_without_anything_are_left_out_and_names_of_several_runs_are_over_each() -> None:
    source = page.render([View("empty", "empty")])
    assert 'id="placebo"' not in source and 'id="time"' not in source and 'id="warnings"' in source
    assert "No completions" in source
    source = page.render([view("one"), view("two"), view("three"), view("four")])
    assert "<h3>one</h3>" in source and "one and 3 more runs" in source and "run by run" in source


def test_a_run_without_placebos_beside_one_that_has_some_says_why() -> None:
    views = [view("one"), view("two", method="GRPO", placebos=None), view("four", placebos=None),
             view("three", state="unfinished", placebos=None)]  # fmt: skip
    said = part(page.render(views), "placebo")
    assert "GRPO keeps no journal" in said and "the run has not ended" in said and "evoalign placebo plain" in said
    assert "Nothing." not in page.render([*views, View("five", "five")])


def test_the_test_split_has_three_digits_and_heads() -> None:
    found = [Measure("reward", 0.123456, 0.234567, (0.111111, 0.0012345, 0.221333)), Measure("tokens", 1234.56, 999.7)]
    said = part(page.render([view(measures=found)]), "results")
    for cell in ("0.123", "0.235", "+0.111", "+0.00123 to +0.221", "1,235", "1,000", "-235"):
        assert f">{cell}</td>" in said, cell
    said = part(page.render([view(measures=[Measure("<i>", 1.0, 2.0)])]), "results")
    assert "<i>" not in said and 'scope="col"' in said and 'scope="row"' in said and "<caption>" in said


def test_the_moving_mean_is_the_strong_line_of_a_long_run() -> None:
    rows = [row(i, mean=float(i % 2)) for i in range(40)]
    said = part(page.render([view(rows=rows)]), "curves")
    assert "moving mean over 5" in said and said.index('class="faint c0"') < said.index('class="line c0"')
    points = [(float(i), float(i % 2)) for i in range(40)]
    smooth = [y for _, y in curves.moving(points)]
    windows = [points[max(0, i - 2) : i + 3] for i in range(40)]
    assert smooth == pytest.approx([sum(y for _, y in window) / len(window) for window in windows])
    gaps = [(float(i), None if i < 30 else math.nan if i < 35 else 1.0) for i in range(40)]
    assert [y for _, y in curves.moving(gaps)] == [None] * 33 + [1.0] * 7
    assert curves.moving(points[:19]) == points[:19]
    assert "moving mean" not in part(page.render([view()]), "curves")


def path_of(source: str, title: str) -> list[tuple[float, float]]:
    """Where the wide drawing with this title has its first line."""
    wide = source.split(f'aria-label="{title}"', 1)[1].split("</svg>", 1)[0]
    (found,) = re.findall(r'<path d="M([^"]+)" class="line c0"', wide)
    return [(float(x), float(y)) for x, _, y in (place.partition(" ") for place in found.split("L"))]


@pytest.mark.parametrize(("words", "unit"), [(ES_WORDS, "generation"), (GRPO_WORDS, "step")])
def test_what_an_objective_keeps_has_a_chart_a_name(words: Words, unit: str) -> None:
    """Of scales of their own: the price is around 1, the average around 0. A rebuilt row may have none."""
    kept = [{"lambda": 1.0 + 0.25 * i, "cost_average": -0.001 * i} for i in range(5)]
    rows = [row(i, objective=state) for i, state in enumerate(kept)] + [row(5), row(6, objective=None)]
    said = part(page.render([view(rows=rows, words=words)]), "curves")
    up = path_of(said, f"Kept by the objective: lambda, by {unit}")
    down = path_of(said, f"Kept by the objective: cost_average, by {unit}")
    assert len(up) == len(down) == 5
    for one in (up, down):
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(one)]
        assert all(step == pytest.approx(steps[0], abs=0.2) for step in steps)
    assert up[0][1] - up[-1][1] == pytest.approx(down[-1][1] - down[0][1], abs=0.2) and up[0][1] > up[-1][1]
    assert f"lambda, after the {unit}" in said
    assert "Kept by the objective" not in page.render([view(rows=[row(i) for i in range(3)])])


def test_what_the_objectives_of_several_runs_keep_is_drawn_together() -> None:
    def one(name: str, words: Words = ES_WORDS, **kept: float) -> View:
        return view(name, about={"task": "safety"}, rows=[row(i, objective=kept) for i in range(3)], words=words)

    views = [one("first", price=1.0), one("second", GRPO_WORDS, price=2.0, own=0.0), one("third")]
    said = part(page.render(views), "curves")
    assert "mean reward while training" in said and "fitness while training" not in said, "they share an axis"
    assert "may take more completions than another" in said
    title = "Kept by the objective: price, run by run, of safety"
    together = said.split(f"<figcaption>{title}", 1)[1].split("</figure>", 1)[0]
    assert "generation or step" in together
    legend = together.split('class="legend"', 1)[1]
    assert re.findall(r'class="line (c\d)".*?</svg>(\w+)</li>', legend) == [("c0", "first"), ("c1", "second")]
    assert said.count("<figcaption>Kept by the objective: price,") == 3, "together, and of each run that has it"
    assert said.count("<figcaption>Kept by the objective: own,") == 1, "of one run alone"
    other = View("other", "other", about={"task": "countdown"}, rows=[row(0, objective={"price": 1.0})])
    assert "run by run, of" not in part(page.render([views[0], other]), "curves")


def test_headings_go_down_by_one() -> None:
    for views in ([view()], [view("a"), view("b")]):
        levels = [int(t[1]) for t in Read(page.render(views)).tags if re.fullmatch(r"h[1-6]", t)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_300_generations_and_500_examples_are_under_5_mb() -> None:
    said = [pair(i, before="word " * 200, after="word " * 150, prompt="ask " * 60) for i in range(500)]
    source = page.render([view(rows=[row(i) for i in range(300)], completions=said, analyses=[])])
    assert len(source.encode()) < 5_000_000 and len(embedded(source)) == 500


@pytest.mark.parametrize(
    ("room", "count", "text", "kept", "note"),
    [(None, 250, "x" * 25_000, 250, "cut to"), (300_000, 500, "<" * 2_000, 200, "200 of the 500")],
)
def test_all_completions_are_in_it_and_at_least_200_however_long(
    room: int | None, count: int, text: str, kept: int, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_BYTES", room or page.MOST_BYTES)
    source, notes = page.embedded([view(completions=[pair(i, after=text) for i in range(count)])])
    assert len(embedded(source)) == kept and note in notes[0]


def test_analyses_that_say_much_are_folded_and_have_ids_of_their_own() -> None:
    many = Analysed("many", [f"sentence {i}." for i in range(12)], "{}")
    shown, _, folded = part(page.render([view(analyses=[])], shared=[many]), "analyses").partition("<details")
    assert "sentence 7." in shown and "sentence 8." not in shown
    assert "4 more sentences" in folded and "sentence 11." in folded
    source = Read(page.render([view(analyses=[many, many])], shared=[many, many]))
    ids = [value for _, name, value in source.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and "numbers-0-1" in ids


@pytest.mark.slow
def test_a_run_of_100000_generations_takes_seconds() -> None:
    rows = [row(i) for i in range(100_000)]
    start = time.process_time()
    source = page.render([view(rows=rows)])
    assert time.process_time() - start < 20, "and not the square of its rows"
    assert len(source.encode()) < 2_000_000


def test_phases_and_rewards_without_end_are_not_all_drawn() -> None:
    many = {f"name{i}": 1.0 for i in range(5_000)}
    source = page.render([view(rows=[row(i, rewards=many, seconds=many, objective=many) for i in range(3)])])
    assert len(source.encode()) < 1_000_000 and "name19" in source and "name20" not in source


def svg(*points: tuple[float, float | None]) -> str:
    """The page's markup of a chart with one series."""
    macros: Any = page.environment().get_template("charts.html.jinja").module
    return str(macros.chart(charts.drawn(Chart("t", "x", "y", [Series("s", points)]))))


def test_a_number_that_no_chart_holds_leaves_a_gap() -> None:
    drawn = svg(*enumerate([1.0, math.nan, None, math.inf, -1e308, 2.0, 3.0]))
    path = re.search(r'<path d="(M[^"]+)" class="line', drawn)
    assert path and path[1].count("M") == 1 and path[1].count("L") == 1  # 2 to 3; the 1 is a dot
    assert 'class="mark c0"' in drawn and "nan" not in drawn.lower() and "inf" not in drawn
    assert svg((0, None)) == "" and svg((10**18, 5.0), (10**18 + 1, 5.0))


def test_a_chart_is_where_its_numbers_are() -> None:
    drawn = svg((0, 0.0), (10, 5.0), (20, 10.0))
    first, *_ = re.findall(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" class="line', drawn)
    x0, y0, x1, y1, x2, y2 = map(float, first)
    assert (x1, y1) == pytest.approx(((x0 + x2) / 2, (y0 + y2) / 2), abs=0.1)
    assert y0 > y1 > y2  # upwards
    assert 'role="img"' in drawn and 'aria-label="t"' in drawn


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-80.0, 0.3), (1e-9, 2e-9), (1e9, 1e9 + 1), (-1e200, 1e200)])
def test_ticks_and_points_of_long_lines_are_few(low: float, high: float) -> None:
    series = charts.thinned(Series("s", [(i, float(i)) for i in range(5000)]))
    assert len(series.points) <= charts.MOST_POINTS + 1 and series.points[-1] == (4999, 4999.0)
    found = charts.ticks(low, high, 6)
    assert 1 <= len(found) <= 8 and all(low - 1e-6 * (high - low) <= t <= high + 1e-6 * (high - low) for t in found)
