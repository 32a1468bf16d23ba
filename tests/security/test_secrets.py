# SPDX-License-Identifier: Apache-2.0
"""Real short runs with recognisable secrets in every place where people have them: none is written, none is shown."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import evoalign
from evoalign.cli.options import say
from evoalign.errors import RewardError

NAMES = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "JUDGE_PASSWORD")
SECRETS = {name: f"Zq7rT2wX9bK4mN8vP1cL6{i}" for i, name in enumerate(NAMES)}
TYPED = "Hj3kLp8sDf6gQw1eRt5y"
QUOTED = f"no answer from https://me:{TYPED}@host/v1?api_key={TYPED} with {SECRETS['OPENAI_API_KEY']}"


@pytest.fixture(autouse=True)
def given(monkeypatch) -> None:
    """In the environment, and on the command line of a script of one's own."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    said = ["--api-key", TYPED, f"--set=judge.token={TYPED}", f"https://me:{TYPED}@host/data?access_token={TYPED}"]
    monkeypatch.setattr(sys, "argv", ["mine.py", *said, SECRETS["OPENAI_API_KEY"], "--max-tokens", "64"])


def settings(folder: Path, seed: int = 0, **more: Any) -> dict[str, Any]:
    es = {"sigma": 0.05, "learning_rate": 0.01, "num_generations": 1, "population_size": 2}
    tree = {"output_dir": str(folder), "seed": seed, "es": es, "evaluation": {"max_tokens": 2}}
    tree["task"] = {"train_size": 2, "test_size": 2}
    return {**tree, "tracking": {"backends": ["tensorboard"]}, "checkpoint": {"every": 1}, **more}


def found_in(folder: Path, *texts: str) -> Iterator[str]:
    """Where a secret stands: in files, their names, and what was printed."""
    places = {f"what was printed, {i}": text.encode() for i, text in enumerate(texts)}
    places |= {str(file): str(file).encode() + file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert len(places) > 10, "a run leaves files"
    for place, content in places.items():
        yield from (f"{value} in {place}" for value in (*SECRETS.values(), TYPED) if value.encode() in content)


@pytest.mark.slow
def test_a_run_of_es_and_what_is_made_of_it_hold_no_secret(run, tmp_path):
    pytest.importorskip("tensorboard")
    told, out = io.StringIO(), tmp_path / "out"
    for seed in (0, 1):
        evoalign.train(settings(out / str(seed), seed), console=Console(file=told, width=200))
    command = json.loads((out / "0/manifest.json").read_text())["command"]
    assert command[-2:] == ["--max-tokens", "64"] and "[redacted]" in command
    made = [run("export", out / "0", "--to", out / "exported"),
            run("compare", out / "0", out / "1", "--to", out / "compared")]  # fmt: skip
    assert [done.code for done in made] == [0, 0], made
    assert list(found_in(out, told.getvalue(), *(text for done in made for text in (done.out, done.err)))) == []


@pytest.mark.slow
def test_a_run_of_grpo_holds_no_secret(run, tmp_path):
    pytest.importorskip("trl")
    told = io.StringIO()
    grpo = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
            "rollouts": "engine"}  # fmt: skip
    path = evoalign.grpo(settings(tmp_path / "out/run", grpo=grpo), console=Console(file=told, width=200)).path
    assert list(path.rglob("training_args.bin")), "the trainer's state has its arguments"
    exported = run("export", path, "--to", tmp_path / "out/exported")
    assert exported.code == 0, exported.err
    assert list(found_in(tmp_path / "out", told.getvalue(), exported.out, exported.err)) == []


@pytest.mark.parametrize(
    "words",
    [
        f"grpo.trl.hub_token={TYPED}", f"tracking.wandb_api_key={TYPED}", f"engine.password={TYPED}",
        f"task.train_data=https://me:{TYPED}@host/data", f"model.name=https://host/model?token={TYPED}",
        f"tracking.name={SECRETS['HF_TOKEN']}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "grpo", "doctor"])
def test_what_is_refused_leaves_and_says_nothing(command, words, run, tmp_path):
    (tmp_path / "c.yaml").write_text("es: {sigma: 0.1}\ngrpo: {}\n")
    done = run(command, tmp_path / "c.yaml", "--set", f"output_dir={tmp_path / 'run'}", "--set", words)
    assert done.code in (1, 2) and "looks like a secret" in done.out + done.err
    assert not any(value in done.out + done.err for value in (*SECRETS.values(), TYPED))
    assert not (tmp_path / "run").exists()


def test_what_is_said_of_any_error_is_said_without_secrets(capsys):
    """A library's words may quote an address that was typed, or a key that it was given."""
    say(QUOTED)
    said = capsys.readouterr().err
    assert "no answer from https://[redacted]@host" in said
    assert not any(value in said for value in (SECRETS["OPENAI_API_KEY"], TYPED))


def failing(completions: list[str], **_: Any) -> list[float]:
    raise ConnectionError(QUOTED)


def test_a_reward_that_fails_on_an_address_keeps_it_to_itself(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say a word:"}\n' * 4)
    task = {"name": "custom", "train_data": str(tmp_path / "rows.jsonl")}
    tree = settings(tmp_path / "run", task=task, grader={"isolated": False})
    with pytest.raises(RewardError) as caught:
        evoalign.train(tree, reward=failing, console=Console(quiet=True))
    kept = (tmp_path / "run/failed_completion.json").read_text()
    assert "no answer from https://[redacted]@host" in kept and "ConnectionError" in str(caught.value)
    assert not any(value in kept + str(caught.value) for value in (SECRETS["OPENAI_API_KEY"], TYPED))
