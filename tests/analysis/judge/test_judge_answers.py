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
from command_line import caller
from tournaments import written

from evoalign.analysis.judge.answers import Answers, read, share
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


def test_read_parses_each_form_of_file(tmp_path: Path) -> None:
    assert read(str(written(tmp_path / "es.jsonl", ROWS))) == Answers("es", SAID)
    more = written(tmp_path / "more.jsonl", [*ROWS, {"prompt": "P1", "response": "another"}])
    assert read(str(more)) == Answers("more", SAID, further=1)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "P1"}]
    file = written(tmp_path / "chat.jsonl", [{"prompt": messages, "response": "R1"}])
    assert read(str(file)).by_prompt == {"S\nP1": "R1"}
    (tmp_path / "base.json").write_text(json.dumps({"completions": TABLE, "measures": {}}))
    assert read(str(tmp_path / "base.json")) == Answers("base", SAID), "the output of eval"


def test_read_returns_completions_and_scorers_of_a_run_as_sealed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs/es_1", {"scorer": {"reward": "org/reward", "cost": "org/cost", "max_tokens": 9}})
    assert read(str(run)) == Answers("es_1", SAID, scorers=("org/reward", "org/cost"))
    assert read(f"mine={run}").name == "mine"
    assert read(f"base={run / 'results/completions/after.parquet'}") == Answers("base", SAID)
    with recorded(run):
        pass
    assert read(str(run)).by_prompt == SAID
    parquet.write(run / "results/completions/after.parquet", [{**TABLE[0], "text": "better"}])
    with pytest.raises(DataError, match=r"after\.parquet"):
        read(str(run))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "P"}, "line 2, response is None; .*prompt"),
        ({"prompt": "P", "response": 3}, "line 2, response is 3"),
        ({"response": "R"}, "line 2, prompt is None"),
        ({"prompt": " ", "response": "R"}, "line 2, prompt is ' '"),
        ({"prompt": [], "response": "R"}, r"line 2, prompt is \[\]"),
        ({"prompt": [{"content": 1}], "response": "R"}, "line 2, prompt is"),
        (["P", "R"], "line 2, is .*a prompt and a response in each line"),
    ],
)
def test_read_raises_for_a_bad_line(row: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"es\.jsonl, {said}"):
        read(str(written(tmp_path / "es.jsonl", [ROWS[0], row])))


def test_read_raises_for_targets_without_answers(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "eval.json").write_text("{}")
    (tmp_path / "odd.json").write_text('{"completions": [7]}')
    begun = a_run(tmp_path / "begun")
    (begun / "results/completions/after.parquet").unlink()
    for target, said in (
        (f"{tmp_path}/none", "does not exist"),
        ("our org/a-1.5b", "`evoalign eval 'our org/a-1.5b' --config CONFIG --output a-1.5b.json`"),
        (f"a={tmp_path}/none", f"{tmp_path}/none does not exist"),
        (str(tiny()), f"`evoalign eval {tiny()} --config CONFIG"),
        (f"base={tiny()}", "--output base.json` and give base.json instead"),
        (f"{tmp_path}/empty.jsonl", "has no answers"),
        (f"{tmp_path}/eval.json", "has no completions"),
        (f"{tmp_path}/odd.json", "completion 1, is 7; write the file with `evoalign eval"),
        (str(begun), f"`evoalign eval {begun} --output begun.json`"),
        (f"a\x1b[1m={tmp_path}/eval.json", "is not a valid model name"),
    ):
        with pytest.raises((ConfigError, DataError)) as error:
            read(target)
        assert said in str(error.value)
    with pytest.raises(ConfigError) as error:
        read("answers.jsonl")
    assert "hub" not in str(error.value)


def test_error_names_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = caller(monkeypatch, capsys)
    data = str(written(tmp_path / "asked.jsonl", [{"prompt": f"Spell {i}", "target": "x"} for i in range(4)]))
    task = {"name": "conciseness", "train_data": data, "test_data": data}
    (tmp_path / "CONFIG").write_text(json.dumps({"task": task, "evaluation": {"max_tokens": 4}}))
    rows = [{"prompt": f"Spell {i}", "response": "no"} for i in range(4)]
    judged = ["--judge-model", "tiny", "--dry-run"]
    refused = run("judge", "ask", f"start={tiny()}", written(tmp_path / "other.jsonl", rows), *judged)
    assert refused.code == 2
    command = shlex.split(re.findall("`evoalign (.*?)`", refused.err)[0])
    assert run(*command).code == 0
    done = run("judge", "ask", command[-1], tmp_path / "other.jsonl", *judged)
    assert done.code == 0 and "tiny judges start, other on 4 prompts, each pair in both orders" in done.out


def test_share_counts_unshared_prompts() -> None:
    a, b = Answers("a", {"1": "x", "2": "x", "3": "x"}), Answers("b", {"3": "y", "2": "y", "4": "y", "5": "y"})
    found = share([a, b])
    assert found.prompts == ("2", "3") and found.alone == {"a": 1, "b": 2}
    assert share([a, b], 1).prompts == ("2",) and share([a, b], 1).alone == {"a": 1, "b": 2}
    assert share([a, b, Answers("c", {"3": "z"})]).prompts == ("3",)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([("a", SAID)], "two or more"),
        ([("a", SAID), ("a", SAID)], "two targets have the name a"),
        ([("a", SAID), ("b", {"P1 ": "R"})], "a and b have no prompt in common.* give RUN/results/points"),
    ],
)
def test_share_raises_for_answers_that_cannot_be_compared(models: list[tuple[str, dict[str, str]]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        share([Answers(*model) for model in models])
