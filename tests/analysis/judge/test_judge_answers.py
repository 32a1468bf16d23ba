# SPDX-License-Identifier: Apache-2.0
"""What models answered, from each form of file, and which of it is compared."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from tournaments import written

from calling import caller
from evoalign.analysis.judge.answers import Answers, asked, read
from evoalign.errors import ConfigError, DataError
from evoalign.models import tiny
from evoalign.rundir import parquet
from evoalign.rundir.checksums import recorded

ROWS = [{"prompt": "P1", "response": "R1", "reward": 2.0}, {"prompt": "P2", "response": ""}]
SAID = {"P1": "R1", "P2": ""}
TABLE = [{"example": 0, "prompt": "P1", "text": "R1"}, {"example": 1, "prompt": "P2", "text": ""}]


def a_run(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("")
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {}))
    parquet.write(folder / "results/completions/after.parquet", TABLE)
    return folder


def test_lines_of_prompts_and_responses(tmp_path: Path) -> None:
    assert read(str(written(tmp_path / "es.jsonl", ROWS))) == Answers("es", SAID)


def test_messages_count_by_their_text_as_in_a_run(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "P1"}]
    file = written(tmp_path / "es.jsonl", [{"prompt": messages, "response": "R1"}])
    assert read(str(file)).by_prompt == {"S\nP1": "R1"}


def test_a_run_has_its_completions_and_scorers(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs/es_1", {"scorer": {"reward": "org/reward", "cost": "org/cost", "max_tokens": 9}})
    assert read(str(run)) == Answers("es_1", SAID, scorers=("org/reward", "org/cost"))
    assert read(f"mine={run}").name == "mine"
    assert read(f"base={run / 'results/completions/after.parquet'}") == Answers("base", SAID)


def test_a_run_that_was_altered_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with recorded(run):
        pass
    assert read(str(run)).by_prompt == SAID
    parquet.write(run / "results/completions/after.parquet", [{**TABLE[0], "text": "better"}])
    with pytest.raises(DataError, match=r"after\.parquet"):
        read(str(run))


def test_what_eval_wrote(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(json.dumps({"completions": TABLE, "measures": {}}))
    assert read(str(tmp_path / "base.json")) == Answers("base", SAID)


def test_further_answers_to_a_prompt_are_counted(tmp_path: Path) -> None:
    file = written(tmp_path / "es.jsonl", [*ROWS, {"prompt": "P1", "response": "another"}])
    assert read(str(file)) == Answers("es", SAID, further=1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "P"}, r"line 2, response is None; write what the model answered \(there is: prompt\)"),
        ({"prompt": "P", "response": 3}, "line 2, response is 3"),
        ({"response": "R"}, "line 2, prompt is None; write a text, or messages"),
        ({"prompt": " ", "response": "R"}, "line 2, prompt is ' '"),
        ({"prompt": [], "response": "R"}, r"line 2, prompt is \[\]"),
        ({"prompt": [{"content": 1}], "response": "R"}, "line 2, prompt is"),
        (["P", "R"], "line 2, is .*a prompt and a response in each line"),
    ],
)
def test_a_bad_line_is_named(row: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"es\.jsonl, {said}"):
        read(str(written(tmp_path / "es.jsonl", [ROWS[0], row])))


def test_what_is_no_answers_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "eval.json").write_text("{}")
    begun = a_run(tmp_path / "begun")
    (begun / "results/completions/after.parquet").unlink()
    for target, said in (
        (f"{tmp_path}/none", "does not exist; give a finished run, or a file of answers"),
        ("our org/a-1.5b", "`evoalign eval 'our org/a-1.5b' --config CONFIG --output a-1.5b.json` write its answers"),
        (f"a={tmp_path}/none", f"{tmp_path}/none does not exist"),
        (str(tiny()), f"is a folder and no run; of a model or an adapter, let `evoalign eval {tiny()} --config CONFIG"),
        (f"base={tiny()}", "--output base.json` write its answers, and give base.json in its place"),
        (f"{tmp_path}/empty.jsonl", "has no answers"),
        (f"{tmp_path}/eval.json", "has no completions"),
        (
            str(begun),
            f"after.parquet; let it end, or let `evoalign eval {begun} --output begun.json` write its answers",
        ),
        (f"a\x1b[1m={tmp_path}/eval.json", "is no name of a model"),
    ):
        with pytest.raises((ConfigError, DataError)) as error:
            read(target)
        assert said in str(error.value)
    with pytest.raises(ConfigError) as error:
        read("answers.jsonl")
    assert "hub" not in str(error.value)


def test_a_model_is_judged_by_the_command_that_the_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = caller(monkeypatch, capsys)
    data = str(written(tmp_path / "asked.jsonl", [{"prompt": f"Spell {i}", "target": "x"} for i in range(4)]))
    task = {"name": "conciseness", "train_data": data, "test_data": data}
    (tmp_path / "CONFIG").write_text(json.dumps({"task": task, "evaluation": {"max_tokens": 4}}))
    rows = [{"prompt": f"Spell {i}", "response": "no"} for i in range(4)]
    judged = ["--judge-model", "tiny", "--dry-run"]
    refused = run("judge", f"start={tiny()}", written(tmp_path / "other.jsonl", rows), *judged)
    assert refused.code == 2
    command = shlex.split(re.findall("`evoalign (.*?)`", refused.err)[0])
    assert run(*command).code == 0
    done = run("judge", command[-1], tmp_path / "other.jsonl", *judged)
    assert done.code == 0 and "tiny judges start, other on 4 prompts, each pair in both orders" in done.out


def test_prompts_that_not_all_answered_are_counted_and_left_out() -> None:
    a, b = Answers("a", {"1": "x", "2": "x", "3": "x"}), Answers("b", {"3": "y", "2": "y", "4": "y", "5": "y"})
    found = asked([a, b])
    assert found.prompts == ("2", "3") and found.alone == {"a": 1, "b": 2}
    assert asked([a, b], 1).prompts == ("2",) and asked([a, b], 1).alone == {"a": 1, "b": 2}
    assert asked([a, b, Answers("c", {"3": "z"})]).prompts == ("3",)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([Answers("a", SAID)], "one model has nothing beside it"),
        ([Answers("a", SAID), Answers("a", SAID)], "two targets are called a; name them: evoalign judge NAME=PATH"),
        (
            [Answers("a", SAID), Answers("b", {"P1 ": "R"})],
            "a and b have no prompt in common.* give RUN/results/points",
        ),
    ],
)
def test_what_cannot_be_compared_says_why(models: list[Answers], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked(models)
