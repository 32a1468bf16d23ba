# SPDX-License-Identifier: Apache-2.0
"""What a run that ends in garbage says of itself, whatever its reward does."""

import html
import io
import json
from dataclasses import replace

import pytest
from own_task import Vowels
from rich.console import Console
from small_runs import UNCHECKED, read_rows, told_by, write_rows

import evoalign
from evoalign.checks import divergence
from evoalign.checks.hacking import judge
from evoalign.errors import ModelError
from evoalign.evaluation import Scored, summarise
from evoalign.rundir.directory import RunDir
from evoalign.training.result import judged_again, show


def short(prompts, completions, **columns):
    return [-float(len(text.strip())) for text in completions]


def settings(folder, **changes):
    rows = [{"prompt": f"What is {a} + {b}?", "sum": str(a + b)} for a in range(4) for b in range(3)]
    data = write_rows(folder / "rows.jsonl", rows)
    return {"task": {"name": "custom", "train_data": data, "test_data": data}, "lora": {"rank": 1},
            "grader": {"isolated": False}, "engine": {"device": "cpu", "threads": 1},
            "output_dir": str(folder / "run"), **changes}  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Noise far too wide, steps far too long, and a reward that an empty text earns."""
    told = Console(file=io.StringIO(), width=120)
    es = {"num_generations": 4, "population_size": 4, "sigma": 2.0, "learning_rate": 4.0}
    tree = settings(tmp_path_factory.mktemp("broken"), es=es, evaluation={"max_tokens": 24},
                    checks={"control_every": 2, "placebo": 0})  # fmt: skip
    return evoalign.train(tree, reward=short, console=told), told.file.getvalue()


def test_what_alarms_stands_above_the_table_with_completions(broken):
    result, told = broken
    assert result.verdict is not None and result.verdict.word is not None
    word = result.verdict.word
    above, below = told.split("\ntest split", 1)
    assert f"{word.upper()}, judging by the test completions" in above
    assert "of the test completions are broken" in above and "for example" in above
    assert len(result.verdict.shown) == 2
    assert f"{word}, judging by the completions; " in below  # and not the bare word learning
    assert not any(line.startswith("learning") for line in told.splitlines())


def test_a_result_is_a_few_lines_and_its_completions_are_a_frame(broken):
    result, _ = broken
    assert result.verdict is not None
    first, last = (e.measures["reward"] for e in (result.before, result.after))
    head, alarm, saved = repr(result).splitlines()
    assert head.startswith(
        f"{result.path}: reward {first:.4g} -> {last:.4g} on 12 test examples ({last - first:+.4g}, 95 %"
    )
    assert alarm.startswith(f"{result.verdict.word}:") and saved == f"saved {result.saved}"
    said = result.completions()
    assert len(said) == 12 and list(said["prompt"]) == [s.prompt for s in result.before.completions]
    assert list(said["text_after"]) == [s.text for s in result.after.completions]
    assert said["reward_after"].mean() == pytest.approx(last)
    table = result.measures()
    assert table.loc["reward", "change"] == pytest.approx(last - first)
    assert table.loc["reward", "low"] < table.loc["reward", "change"] < table.loc["reward", "high"]


def test_what_a_notebook_shows_is_escaped(broken):
    result, _ = broken
    bad = "<script>alert('x')</script>"
    after = replace(result.after, completions=tuple(replace(s, text=bad) for s in result.after.completions))
    page = replace(result, after=after)._repr_html_()
    assert bad not in page and "&lt;script&gt;" in page and "data:image/png;base64," in page
    assert all(html.escape(reason) in page for reason in result.verdict.reasons)


def test_the_verdict_is_written_down_or_made_again(broken, tmp_path):
    result, _ = broken
    assert result.verdict is not None
    written = json.loads((result.path / "results/evaluation.json").read_text())["alarms"]
    assert written == json.loads(json.dumps(result.verdict.as_dict()))
    assert written["verdict"] == result.verdict.word and written["reasons"]
    assert written["shares"]["after"]["degenerate"] > 0.5
    assert written["nats_a_token"]["before"] > 0
    again = judged_again(RunDir(result.path), result.before, result.after)
    assert (again.word, again.reasons) == (result.verdict.word, result.verdict.reasons)
    by_texts = judge(result.before.completions, result.after.completions)
    assert judged_again(RunDir(tmp_path), result.before, result.after) == by_texts, "there are no alarms to read"


def test_the_table_says_how_many_answers_are_right_by_gold(tmp_path):
    """Whatever the reward is; before, after, and of the mean placebo, counted here again from the completions."""
    told = Console(file=io.StringIO(), width=120)
    es = {"num_generations": 2, "population_size": 4, "sigma": 0.05, "learning_rate": 0.025}
    tree = settings(tmp_path, es=es, evaluation={"max_tokens": 8}, checks=UNCHECKED | {"placebo": 1})
    tree["task"]["gold"] = "sum"
    result = evoalign.train(tree, reward=short, console=told)
    before, after = (sum(c.right is True for c in found.completions) / 12 for found in (result.before, result.after))
    assert before > 0
    (row,) = [line for line in told.file.getvalue().splitlines() if "right by gold" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:4] == [f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f} points"]
    assert " to " in cells[4] and cells[5].endswith("%")
    written = json.loads((result.path / "results/evaluation.json").read_text())
    assert written["after"]["right"] == after and 0 <= written["placebo"]["measures"]["right"] <= 1
    assert all("right" not in line for line in read_rows(result.path / "journal.jsonl"))


def test_a_share_of_right_answers_is_over_those_whose_gold_is_known():
    def said(example, text, right):
        return Scored(example, 0, 0, "q", None, text, 1.0, "stop", 1, right=right)

    found = summarise(Vowels(), [{}] * 3, [said(0, "a", True), said(1, "b", False), said(2, "c", None)])
    assert found.measures["right"] == 0.5
    assert "right" not in summarise(Vowels(), [{}], [said(0, "a", None)]).measures


def test_a_hacked_share_that_no_alarm_tells_of_is_said(broken):
    result, said = broken
    assert result.verdict is not None and "hacked share" not in said
    quiet, told = replace(result.verdict, word=None, alarms=(), reasons=(), shown=()), list[str]()
    show(result.before, result.after, quiet, Console(file=io.StringIO()), told.append)
    assert told[0].startswith("hacked share of the test completions: ") and "broken: " in told[0]


def test_nats_that_cannot_be_measured_lose_nothing(tmp_path, monkeypatch):
    def refuse(*args):
        raise ModelError("it does not fit")

    monkeypatch.setattr(divergence, "fluency", refuse)
    es = {"num_generations": 1, "population_size": 2, "sigma": 0.01, "learning_rate": 0.005}
    tree = settings(tmp_path, es=es, evaluation={"max_tokens": 4}, checks=UNCHECKED | {"perplexity": True})
    (line,) = [line for line in told_by(tree, reward=short).splitlines() if "(it does not fit)" in line]
    assert line.startswith("warning: nats per token ") and "resume with train(..., reward=..., resume=True)" in line
    written = json.loads((tmp_path / "run/results/evaluation.json").read_text())["alarms"]
    assert written["nats_a_token"] is None and written["verdict"] is None
