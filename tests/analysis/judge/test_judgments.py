# SPDX-License-Identifier: Apache-2.0
"""Files of judgments: what is read, that a bad line is named with what to do, and `evoalign judge rate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run, caller
from tournaments import one, planted, row, written

from evoalign.analysis.judge.judgments import read
from evoalign.errors import DataError

GOOD = row(one("a", "b", "won"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


def test_read_keeps_the_fields_of_a_line(tmp_path: Path) -> None:
    lines = [{**GOOD, "question": 7, "raw": "said", "more": [1]}, {**GOOD, "scores": None, "order_ab": False}]
    del lines[1]["raw"]
    file = written(tmp_path / "j.jsonl", lines)
    file.write_text(file.read_text() + "\n  \n")
    first, second = read(file)
    assert (first.question, first.raw, first.scores, first.outcome) == ("7", "said", (8.0, 3.0), 1.0)
    assert (second.scores, second.outcome, second.order_ab, second.raw) == (None, None, False, "")


def test_read_takes_the_order_as_the_two_names_shown(tmp_path: Path) -> None:
    """As in published files, whose model_a is the one shown first."""
    orders = [["a", "b"], ["b", "a"]]
    rows = read(written(tmp_path / "j.jsonl", [{**GOOD, "order_ab": order} for order in orders]))
    assert [one.order_ab for one in rows] == [True, False] and {one.outcome for one in rows} == {1.0}


def test_rate_draws_helpfulness_over_harmlessness(run: Run, tmp_path: Path) -> None:
    games = planted([0.0, 0.5], 0.4, 30, np.random.default_rng(0))
    both = [{**row(game), "dimension": name} for game in games for name in ("helpfulness", "harmlessness")]
    done = run("judge", "rate", written(tmp_path / "j.jsonl", both), "--to", "out", "--ties", "half", "--elo", "1")
    assert done.code == 0, done.err
    tree = json.loads(Path("out/ratings.json").read_text())
    assert {"plane.png", "plane.svg"} <= {*tree["figures"]} and tree["settings"]["ties"] == "half"
    assert all(set(one["elo"]) == {"m0", "m1"} for one in tree["dimensions"])
    run("judge", "rate", written(tmp_path / "k.jsonl", [row(game) for game in games]), "--to", "other")
    assert not any("plane" in name for name in json.loads(Path("other/ratings.json").read_text())["figures"])


TWO = "scores are .*; give two finite numbers"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"scores": [1]}, r"scores are \[1\]; give two finite numbers"),
    *(({"scores": scores}, TWO) for scores in ([1, 2, 3], [1, "2"], [True, 2], {"a": 1, "b": 2})),
    ({"model_b": "a"}, "compares 'a' with itself"),
    ({"model_a": " "}, "model_a is ' '"),
    ({"dimension": 3}, "dimension is 3"),
    ({"order_ab": 1}, "order_ab is 1"),
    *(({"order_ab": order}, "order_ab is .*both names in the order") for order in (["a"], ["a", "c"], [1, 2])),
    ({"question": ["q"]}, "question is .*; give a string or an integer"),
    ({"raw": {"said": "x"}}, "raw is "),
]
FIELDS = ("model_a", "model_b", "dimension", "question", "scores", "order_ab")
LINE = json.dumps(GOOD)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((f"{LINE}\n{json.dumps({**GOOD, **changed})}", rf"j\.jsonl, line 2, {said}") for changed, said in BAD),
        *((json.dumps({k: v for k, v in GOOD.items() if k != f}), f"line 1, has no {f}; add it") for f in FIELDS),
        ("{not json}", "line 1, is damaged"),
        ("[1, 2]", "line 1, is .*not a JSON object"),
        (LINE.replace("8.0", "NaN"), "line 1, is damaged .*not finite"),
        (LINE.replace("8.0", "1e999"), "line 1, is damaged .*not finite"),
        (LINE[:40], "line 1, is damaged"),
        ("\n", "has no judgments; `evoalign judge ask"),
    ],
)
def test_read_raises_for_a_bad_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_text(text)
    with pytest.raises(DataError, match=said):
        read(tmp_path / "j.jsonl")


def test_rate_prints_and_writes_ratings(run: Run, tmp_path: Path) -> None:
    games = planted([0.0, 1.0, 0.4], 0.5, 40, np.random.default_rng(0))
    file = written(tmp_path / "j.jsonl", [*map(row, games), row(one("m0", "m1", "none", "q1"))])
    done = run("judge", "rate", file, "--to", "out", "--anchor", "m0")
    assert (done.code, "error" in done.err) == (0, False)
    tree = json.loads((tmp_path / "out/ratings.json").read_text())
    (dimension,) = tree["dimensions"]
    assert [m["model"] for m in dimension["models"]] == ["m1", "m2", "m0"] and dimension["unparsed"] == 1
    for model in dimension["models"]:
        assert f"{model['rating']:.0f}" in done.out
        assert model["low"] is None or f"{model['low']:.0f} to {model['high']:.0f}" in done.out
    assert dimension["models"][2] == {
        "model": "m0", "rating": 1000.0, "low": None, "high": None, "why": "reference, fixed at 1000",
        **{way: sum(p[way] for p in dimension["pairs"][:2]) for way in ("won", "lost", "tied")},
    }  # fmt: skip
    assert tree["settings"]["anchor"] == "m0" and tree["figures"] == ["ratings.png", "ratings.svg"]
    assert all((tmp_path / "out" / name).stat().st_size for name in tree["figures"])
    for sentence in tree["sentences"]:
        assert sentence in done.out


def test_dimension_option_selects_dimensions(run: Run, tmp_path: Path) -> None:
    names = ("helpfulness", "harmlessness")
    games = [one("a", "b", "tied", str(q), dimension=name) for q in range(3) for name in names]
    file = written(tmp_path / "j.jsonl", map(row, games))
    done = run("judge", "rate", file, "--dimension", "harmlessness")
    assert done.code == 0 and "harmlessness" in done.out and "helpfulness" not in done.out
    written(tmp_path / "j.jsonl", [row(game) for game in games if game.dimension == "helpfulness"])
    done = run("judge", "rate", "j.jsonl", "--dimension", "harmlessness")
    assert done.code == 2 and "no judgments of harmlessness in j.jsonl; it has helpfulness\n" in done.err


def test_ratings_that_are_not_finite_are_written_and_drawn(run: Run, tmp_path: Path) -> None:
    games = [one("a", "b", "won", str(q)) for q in range(5)]
    games += [one("a", "b", "none", str(q), dimension="harm\x1b[31m") for q in range(3)]
    file = written(tmp_path / "j.jsonl", map(row, games))
    done = run("judge", "rate", file, "--to", "out")
    assert done.code == 0 and "\x1b" not in done.out and "nan" not in done.out
    first, second = json.loads((tmp_path / "out/ratings.json").read_text())["dimensions"]
    assert [m["rating"] is None for m in first["models"]] == [True, False]
    assert [m["rating"] for m in second["models"]] == [None, None]
    assert "no finite rating of a" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["j.jsonl", "--anchor", "z"], "--anchor z: helpfulness has a, b;"),
        (["j.jsonl", "--ratings", "elo"], "--ratings elo was removed: leave it out"),
        (["j.jsonl", "--to", "j.jsonl"], "--to j.jsonl is a file"),
        (["nowhere.jsonl"], "nowhere.jsonl is missing"),
    ],
)
def test_rate_raises_for_a_wrong_option_or_file(words: list[str], said: str, run: Run, tmp_path: Path) -> None:
    written(tmp_path / "j.jsonl", [GOOD])
    done = run("judge", "rate", *words)
    assert (done.code, done.out) == (2, "") and said in done.err
