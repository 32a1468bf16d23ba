# SPDX-License-Identifier: Apache-2.0
"""Corruptions of a run that is done: its journal, saved means and results are the original's, shorter, or refused."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import corruption
from fuzzing import DAMAGES, REFUSED, FaultError, check, judged

from evoalign.analysis.compare import runs
from evoalign.analysis.compare.runs import Run
from evoalign.errors import CheckpointError
from evoalign.rundir import checkpoint, checksums, journal
from evoalign.rundir.directory import saved_folders

RESULTS = (*checksums.RESULTS[:4], "results/completions/after.parquet", checksums.CHECKSUMS)


class _Bench(corruption.Bench):
    def _refused_by_name(self, file: Path) -> None:
        """A record of another saved mean is whole itself: what does not fit it is named."""
        if file.name != checkpoint.RECORD:
            super()._refused_by_name(file)
        elif checkpoint_is_whole(self.copy / file.parent):
            raise AssertionError(f"{file} was exchanged and believed")


def checkpoint_is_whole(folder: Path) -> bool:
    try:
        checkpoint.verify(folder)
    except CheckpointError:
        return False
    return True


class Corruptions:
    """A case: one file cut, flipped, zeroed, reordered, gone or exchanged; the run is gone on with and read."""

    aim = ""

    def __init__(self, folder: Path) -> None:
        self.bench = _Bench("lora", folder)
        self.run, self.copy = self.bench.run, self.bench.copy
        (self.run / ".lock").unlink(missing_ok=True)
        self.original: Run = runs.read(self.run)
        self.journal = (self.run / "journal.jsonl").read_bytes().splitlines(keepends=True)

    def attempt(self, draw: random.Random) -> bool:
        kind = self.aim or draw.choice(["journal", "journal", "mean", "mean", "results"])
        if kind == "results":
            return self._results(draw)
        if kind == "mean":
            folders = saved_folders(self.run)
            file = draw.choice(sorted(draw.choice(folders).iterdir())).relative_to(self.run)
            raw = self._damaged(
                draw, file, [f.relative_to(self.run) for f in sorted(folders[0].parent.rglob("*")) if f.is_file()]
            )
        else:
            file = Path("journal.jsonl")
            raw = self._ended(draw) if draw.choice([True, False]) else self._damaged(draw, file, [])
        if raw == (self.run / file).read_bytes():
            return True
        outcome = judged(lambda: self._gone_on_with(file, raw))
        if raw is not None and file.name == "journal.jsonl" and outcome not in (REFUSED, "refused"):
            self._is_a_beginning(raw)
        return outcome is not REFUSED and outcome != "refused"

    def _is_a_beginning(self, raw: bytes) -> None:
        """Only a last line that was not written to its end may be missing, and what is there is the original's."""
        lines = raw[: raw.rfind(b"\n") + 1]
        check(b"".join(self.journal).startswith(lines), "damage before the end was believed")
        found = journal.read(self.copy / "journal.jsonl").generations
        known = self.bench.log.generations
        same = all(
            replace(a, hash=b.hash, weights_hash=b.weights_hash) == b for a, b in zip(found, known, strict=False)
        )
        check(same, "other generations were believed")

    def _gone_on_with(self, file: Path, raw: bytes | None) -> str:
        """As `corrupting` tries it, which compares every hash of the weights. Raises FaultError."""
        try:
            return self.bench.attempt(file, lambda _, __: raw, random.Random(0))
        except AssertionError as error:
            raise FaultError("silent", str(error)) from error

    def _damaged(self, draw: random.Random, file: Path, others: list[Path]) -> bytes | None:
        raw = (self.run / file).read_bytes()
        kind = draw.randrange(len(DAMAGES) + 2)
        if kind < len(DAMAGES):
            return DAMAGES[kind](draw, raw)
        if kind == len(DAMAGES) or not others:
            return None
        return (self.run / draw.choice(others)).read_bytes()  # exchanged

    def _ended(self, draw: random.Random) -> bytes:
        """The journal of a run that was killed: whole generations, and at times the beginning of the next line."""
        count = 1 + 2 * draw.randint(1, (len(self.journal) - 1) // 2)
        torn = self.journal[count][: draw.randrange(50)] if count < len(self.journal) else b""
        return b"".join(self.journal[:count]) + torn

    def _results(self, draw: random.Random) -> bool:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.run, self.copy)
        file = Path(draw.choice(RESULTS))
        raw = self._damaged(draw, file, [Path(name) for name in RESULTS])
        if raw is None:
            (self.copy / file).unlink()
        else:
            (self.copy / file).write_bytes(raw)
        same = raw == (self.run / file).read_bytes()
        # Only without checksums may a run have other numbers, and then it is marked.
        found: Any = judged(lambda: runs.read(self.copy), valid=True if same else None)
        if found is REFUSED:
            return False
        check(found.verified == (self.copy / checksums.CHECKSUMS).is_file(), f"{file} was damaged, and it is not said")
        # The shares compare the completions of the two files.
        lost = ("shares_before", "shares_after") if raw is None and file.suffix == ".parquet" else ()
        for name in ("points", "steps", "cost", "shares_before", "shares_after", "questions"):
            gone = name in lost or (raw is None and file.name == "evaluation.json") or name == "questions"
            check(gone or getattr(found, name) == getattr(self.original, name), f"{name} was believed of {file}")
        return True
