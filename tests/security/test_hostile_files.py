# SPDX-License-Identifier: Apache-2.0
"""Every file of a run in every odd form: each command refuses it in one line, or does without it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from rich.console import Console

import evoalign
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import saved_folders

COMMANDS = {
    "eval": ["eval", "run"], "export": ["export", "run", "--to", "to"], "journal": ["journal", "run"],
    "replay": ["replay", "run"], "compare": ["compare", "run", "other"], "analyze": ["analyze", "distance", "run"],
    "resume": ["train", "run", "--resume"],
}  # fmt: skip
BYTES: dict[str, bytes] = {
    "600 levels": b"[" * 600 + b"]" * 600, "objects 600 levels deep": b'{"a":' * 600 + b"1" + b"}" * 600,
    "5,000 digits": b'{"generation": ' + b"9" * 5_000 + b"}\n", "no UTF-8": b'{"a": "\xff"}\n', "a list": b"[1, 2]\n",
    "a text": b'"x"\n', "null": b"null\n", "NaN": b'{"generation": NaN}\n', "nothing": b"",
}  # fmt: skip
VALUES: tuple[Any, ...] = (None, [], {}, "x", "\ud800\x1b[2J", -1, 1.5, True, 2**63, [[]], {"x": []})
"""In turn in the place of every value of a JSON file."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for name, seed in (("run", 1), ("other", 2)):
        tree = {"output_dir": str(folder / name), "seed": seed, "evaluation": {"max_tokens": 1},
                "es": {"sigma": 0.02, "num_generations": 1, "population_size": 2},
                "checks": {"control_every": 0, "canary_every": 0},
                "task": {"name": "conciseness", "batch_size": 1}}  # fmt: skip
        evoalign.train(tree, console=Console(quiet=True))
        shutil.rmtree(folder / name / "figures")
    return folder


@pytest.fixture
def sound(run) -> Run:
    """The command line, which ends with 0 or 2, and neither with a traceback nor with control characters."""

    def fresh(*words: object) -> Any:
        done = run(*words)
        assert done.code in (0, 2), done.err
        assert "Traceback" not in done.err + done.out and "\x1b[2J" not in done.err + done.out
        shutil.rmtree("to", ignore_errors=True)

    return fresh


def lay(whole: Path, name: str, change: Callable[[Path], object]) -> Path:
    """A run with one of its files changed, its record made right where that is of the saved mean."""
    for copy in ("run", "other"):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole / copy, copy)
    (folder,) = saved_folders(Path("run"))
    mark = checkpoint.verify(folder)
    file = folder / name if name in ("adapter_config.json", "evoalign.json") else Path("run") / name
    if name not in ("SHA256SUMS", "journal.jsonl"):
        Path("run/SHA256SUMS").unlink()
    change(file)
    if name == "adapter_config.json" and file.is_file():
        (folder / "evoalign.json").unlink()
        checkpoint.seal(folder, mark)
    return file


READERS = {
    "manifest.json": ("export", "compare", "resume", "eval"), "metrics.jsonl": ("compare", "resume"),
    "results/evaluation.json": ("export", "compare"), "results/budget.json": ("resume", "compare"),
    "SHA256SUMS": ("export", "compare", "resume"), "journal.jsonl": ("journal", "replay", "eval", "resume"),
    "adapter_config.json": ("export", "eval", "analyze"), "evoalign.json": ("export", "eval", "resume"),
    "results/completions/after.parquet": ("compare",), "results/placebo.json": ("compare", "export"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_file_in_an_odd_form(name, whole, sound):
    for text in BYTES.values():
        for command in READERS[name]:
            lay(whole, name, lambda file, text=text: file.write_bytes(text))
            sound(*COMMANDS[command])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.first("journal.jsonl")
@pytest.mark.last("metrics", "budget", "SHA256SUMS", "manifest", "evoalign", "placebo")
@pytest.mark.parametrize("name", [*READERS, ".lock"])
def test_what_is_no_file_is_not_waited_for(name, whole, sound):
    lay(whole, name, lambda file: (file.unlink(missing_ok=True), os.mkfifo(file)))
    sound(*COMMANDS[READERS.get(name, ("resume",))[0]])


@pytest.mark.long
@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl", "results/evaluation.json", "adapter_config.json"])
def test_a_value_of_another_type(name, whole, sound):
    text = lay(whole, name, lambda _: None).read_text()
    places = places_of(json.loads(text.splitlines()[0] if name == "metrics.jsonl" else text))
    for number, place in enumerate(places):
        value = VALUES[number % len(VALUES)]
        command = READERS[name][number % len(READERS[name])]
        lay(whole, name, lambda file, place=place, value=value: put(file, place, value))
        sound(*COMMANDS[command])


def places_of(tree: Any, at: tuple[Any, ...] = ()) -> list[Any]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in [(*at, key), *places_of(value, (*at, key))]]


def put(file: Path, place: tuple[Any, ...], value: Any) -> None:
    tree = json.loads(file.read_text())
    node = tree
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    file.write_text(json.dumps(tree) + "\n")
