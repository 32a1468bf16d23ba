# SPDX-License-Identifier: Apache-2.0
"""Results that were altered after the run wrote them are refused by name; without checksums, tables say so."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest
from kill_points import VALIDATION
from rich.console import Console

import evoalign
from evoalign.analysis.compare import runs, tables
from evoalign.analysis.compare.comparison import compare
from evoalign.errors import DataError
from evoalign.rundir import checksums, parquet


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("whole") / "run", 1)


def train(output: Path, generations: int, *, resume: bool = False, file: io.StringIO | None = None) -> Path:
    tree = {"output_dir": str(output), "es": {"sigma": 0.02, "num_generations": generations, "population_size": 2},
            "evaluation": {"max_tokens": 2},
            "task": {"name": "conciseness", "batch_size": 1, **VALIDATION}}  # fmt: skip
    evoalign.train(tree, resume=resume, console=Console(file=file or io.StringIO(), width=500))
    return output


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def edit(run: Path, name: str) -> None:
    file = run / name
    if name.endswith(".parquet"):
        parquet.write(file, [{**row, "reward": 1.0} for row in parquet.read(file)])
    elif name == "journal.jsonl":
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    elif name == "metrics.jsonl":
        file.write_text(file.read_text().replace('"mean": ', '"mean": 1'))
    elif name.endswith(".jsonl"):  # a file that this run does not have
        file.write_text('{"prompt": "a", "response": "b", "reward": 9.0, "cost": -9.0}\n')
    else:
        tree = json.loads(file.read_text())
        tree["after" if "after" in tree else "evaluation"] = {"reward": 1.0}
        file.write_text(json.dumps(tree))


@pytest.mark.parametrize("name", checksums.RESULTS)
def test_verify_refuses_an_altered_result_by_name(name, run, tmp_path):
    assert checksums.verify(run) and runs.read(run).verified
    edit(run, name)
    with pytest.raises(DataError, match=rf"{name} was altered.*SHA256SUMS") as error:
        runs.read(run)
    assert "\n" not in str(error.value)
    if name == checksums.EVALUATION:
        with pytest.raises(DataError, match=r"evaluation\.json was altered"):
            evoalign.export(run, tmp_path / "to")
        assert not (tmp_path / "to").exists()


def test_checksums_are_those_of_sha256sum(run):
    lines = [line.split("  ", 1) for line in (run / "SHA256SUMS").read_text().splitlines()]
    assert [name for _, name in lines] == sorted(name for name in checksums.RESULTS if (run / name).is_file())
    assert all(digest == hashlib.sha256((run / name).read_bytes()).hexdigest() for digest, name in lines)


@pytest.mark.parametrize(
    "change", ["", "\n", "[]", "0" * 64, "\xff", "lower", "renamed", "other digest", "cut", "zeros"]
)
def test_verify_refuses_damaged_checksums(change, run):
    file = run / "SHA256SUMS"
    text = file.read_text()
    changes = {"lower": text.upper(), "cut": text[:75], "zeros": text[:66] + "\0" * len(text[67:]) + "\n",
               "renamed": text.replace("metrics.jsonl", "metrics.json"),
               "other digest": ("1" if text[0] == "0" else "0") + text[1:]}  # fmt: skip
    file.write_text(changes.get(change, change), encoding="latin-1")
    with pytest.raises(DataError, match="SHA256SUMS"):
        checksums.verify(run)


def test_tables_mark_results_without_checksums(run):
    assert ("not verified", "1") not in tables.end_grid(compare(run)).rows
    (run / "SHA256SUMS").unlink()
    edit(run, "results/budget.json")
    assert ("not verified", "1") in tables.end_grid(compare(run)).rows


def test_results_of_an_earlier_release_are_not_verified(run):
    (run / "SHA256SUMS").unlink()
    (run / checksums.EARLIER).write_text("{}")
    assert checksums.verify(run) is False and runs.read(run).finished
    train(run, 1, resume=True)
    assert checksums.verify(run) and not (run / checksums.EARLIER).exists()


def test_resume_warns_of_an_altered_result_and_records_the_new_ones(run):
    before = (run / "SHA256SUMS").read_text()
    edit(run, checksums.EVALUATION)
    train(run, 2, resume=True, file=(said := io.StringIO()))
    assert "evaluation.json was altered" in " ".join(said.getvalue().split())
    assert checksums.verify(run) and (run / "SHA256SUMS").read_text() != before


def test_results_are_unverified_while_they_are_written(run):
    with checksums.recorded(run):
        assert checksums.verify(run) is False
        edit(run, checksums.EVALUATION)
    assert checksums.verify(run)
