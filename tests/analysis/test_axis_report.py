# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze axes`: shares from the rows of a run, and runs whose rows have none."""

import json
import shutil

import pytest

from evoalign.analysis.axes import AxisReport, Settings
from evoalign.errors import ConfigError, EvoalignError

NAMES = ["format", "accuracy", "tokens", "truncated"]


def copied(trained, folder):
    shutil.copytree(trained / "lora", folder / "run")
    return folder / "run"


def rows_of(run, change, count=None):
    """Rewrite the rows of a run's metrics.jsonl; `count` repeats the first one."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = rows if count is None else [{**rows[0], "generation": i} for i in range(count)]
    file.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))


def planted(form, right):
    """Axes of a generation whose coefficients are the sum of two independent columns of these variances."""
    whole = form + right
    covariance = [[whole, form, right, 0.0, 0.0], [form, form, 0.0, 0.0, 0.0], [right, 0.0, right, 0.0, 0.0],
                  [0.0] * 3 + [1.0, 0.0], [0.0] * 5]  # fmt: skip
    held = [[form, 0.0, 0.0, 0.0], [0.0, right / 10, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0] * 4]
    return {"columns": NAMES, "correctness": "accuracy", "means": dict.fromkeys(NAMES, 0.5), "covariance": covariance,
            "lasting_covariance": held, "shares": None, "lasting_share": None, "lasting": None}  # fmt: skip


def with_axes(row, found):
    return {**row, "diagnosis": {**(row["diagnosis"] or {}), "axes": found}}


def test_shares_of_windows_are_those_of_their_generations(trained, tmp_path):
    run = copied(trained, tmp_path)
    rows_of(run, lambda row: with_axes(row, planted(1.0, 3.0 if row["generation"] >= 4 else 0.0)), 8)
    finding = AxisReport().run([str(run)], Settings(window=8))
    (window,) = finding.numbers["runs"][0]["windows"]
    assert window["shares"] == pytest.approx(
        {"format": 8 / 20, "accuracy": 12 / 20, "tokens": 0, "truncated": 0, "unexplained": 0}, abs=1e-5
    )
    assert window["lasting"] == pytest.approx({"format": 8 / 9.2, "accuracy": 1.2 / 9.2})
    assert window["lasting_share"] == pytest.approx(9.2 / 20)
    each = AxisReport().run([str(run)], Settings(window=4))
    assert [one["shares"]["format"] for one in each.numbers["runs"][0]["windows"]] == pytest.approx([1, 0.25])
    assert [(one["first"], one["last"]) for one in each.numbers["runs"][0]["windows"]] == [(0, 3), (4, 7)]
    assert "accuracy 75%, format 25%" in each.sentences[-1] and finding.draw(tmp_path)
    few = AxisReport().run([str(run)], Settings(window=1))
    assert few.numbers["runs"][0]["windows"][0]["shares"] is None and "too few members" in few.sentences[0]


@pytest.mark.parametrize(
    ("count", "changes", "words"),
    [
        (8, {}, "; 32% of what the reward's columns explain generalises to other prompts: format 77%, accuracy 23%"),
        (4, {}, "; what generalises to other prompts is not known: this needs 5 generations in which scores differ, "
         "not 4"),
        (8, {"lasting_covariance": [[0.0] * 4] * 4}, "what generalises to other prompts is not shown to be more than"),
        (8, {"lasting_covariance": None}, "is not known: this needs columns of the reward, and two prompts"),
    ],
)  # fmt: skip
def test_line_says_what_generalises_or_why_it_is_not_known(count, changes, words, trained, tmp_path):
    run = copied(trained, tmp_path)
    rows_of(run, lambda row: with_axes(row, {**planted(1.0, 3.0), **changes}), count)
    (line,) = AxisReport().run([str(run)], Settings()).sentences
    assert f"generations 0 to {count - 1}: the coefficients follow these columns: accuracy 75%, format 25%; " in line
    assert words in line


def test_a_run_of_an_earlier_release_is_not_known(trained, tmp_path):
    run = copied(trained, tmp_path)
    rows_of(run, lambda row: {**row, "diagnosis": {k: v for k, v in row["diagnosis"].items() if k != "axes"}})
    finding = AxisReport().run([str(run)], Settings())
    assert finding.numbers["runs"][0]["windows"] == [] and "not known" in finding.sentences[0]
    assert finding.draw(tmp_path) == []


def test_a_run_whose_members_always_earned_the_same_says_so(trained, tmp_path):
    run = copied(trained, tmp_path)
    rows_of(run, lambda row: {**with_axes(row, None), "zero_variance": True})
    finding = AxisReport().run([str(run)], Settings())
    assert finding.sentences == [f"{run}: all members earned the same in every generation, so nothing selected"]
    rows_of(run, lambda row: {**row, "zero_variance": row["generation"] > 0})
    assert "not known" in AxisReport().run([str(run)], Settings()).sentences[0]


@pytest.mark.parametrize(("target", "window"), [("nothing", 10), ("grpo", 10), ("lora", 0)])
def test_what_is_no_run_of_es_is_refused(target, window, trained, tmp_path):
    folder = tmp_path / "run" if target == "grpo" else trained / target
    if target == "grpo":
        copied(trained, tmp_path)
        (folder / "journal.jsonl").unlink()
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "method": "grpo"}))
    with pytest.raises(EvoalignError) as refused:
        AxisReport().run([str(folder)], Settings(window))
    assert isinstance(refused.value, ConfigError) and (str(folder) if window else "window: 0") in str(refused.value)
