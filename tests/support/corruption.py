# SPDX-License-Identifier: Apache-2.0
"""Damage done at random to the journal and the saved means of a run: refused by name, or recovered, never believed.

OMP_NUM_THREADS=1 python tests/support/corruption.py --count 1000
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import kill_points

from evoalign.config import from_dict
from evoalign.errors import CheckpointError, JournalError
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.setup import Served, serve
from evoalign.training import saving
from evoalign.training import train as training

Damage = Callable[[random.Random, bytes], bytes | None]


def truncate(draw: random.Random, raw: bytes) -> bytes:
    return raw[: draw.randrange(len(raw))]


def flip(draw: random.Random, raw: bytes) -> bytes:
    place = draw.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ (1 << draw.randrange(8))]) + raw[place + 1 :]


def delete(draw: random.Random, raw: bytes) -> bytes | None:
    """A line, a stretch of bytes, or all of the file."""
    kind = draw.randrange(3)
    if kind == 0:
        return None
    lines = raw.splitlines(keepends=True)
    if kind == 1 and len(lines) > 1:
        del lines[draw.randrange(len(lines))]
        return b"".join(lines)
    start = draw.randrange(len(raw))
    return raw[:start] + raw[start + 1 + draw.randrange(200) :]


def reorder(draw: random.Random, raw: bytes) -> bytes:
    """Two lines, or two blocks of bytes, change places."""
    parts = raw.splitlines(keepends=True)
    if len(parts) < 3:
        size = max(1, len(raw) // 8)
        parts = [raw[i : i + size] for i in range(0, len(raw), size)]
    if len(parts) < 2:
        return raw
    i, j = draw.sample(range(len(parts)), 2)
    parts[i], parts[j] = parts[j], parts[i]
    return b"".join(parts)


DAMAGES: dict[str, Damage] = {"truncate": truncate, "flip": flip, "delete": delete, "reorder": reorder}


class Bench:
    """A finished run of one space and an engine that tries to resume from damaged copies of it."""

    def __init__(self, space: str, folder: Path) -> None:
        self.run, self.copy = folder / space, folder / f"{space}-copy"
        kill_points.train(space, self.run)
        self.log = journal.read(self.run / "journal.jsonl")
        self.hashes = [self.log.header.weights_hash, *(g.weights_hash for g in self.log.generations)]
        self.served: Served = serve(from_dict(kill_points.config(space, self.run)))
        self.start = dict(self.served.engine.state())

    def files(self) -> list[Path]:
        """The journal as often as all saved files together."""
        saved = [f.relative_to(self.run) for folder in saved_folders(self.run) for f in sorted(folder.iterdir())]
        return [*saved, *[Path("journal.jsonl")] * len(saved)]

    def attempt(self, file: Path, damage: Damage, draw: random.Random) -> str:
        """What came of it. Raises AssertionError where something else than the run was believed."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.run, self.copy)
        raw = (self.run / file).read_bytes()
        after = damage(draw, raw)
        if after == raw:
            return "unchanged"
        if after is None:
            (self.copy / file).unlink()
        else:
            (self.copy / file).write_bytes(after)
        self._refused_by_name(file)
        return self._go_on()

    def _refused_by_name(self, file: Path) -> None:
        """A damaged saved mean never verifies, and the error names the file or the record that lists it."""
        if file.name == "journal.jsonl":
            return
        try:
            checkpoint.verify((self.copy / file).parent)
        except CheckpointError as error:
            assert file.name in str(error), f"{file}: {error}"
        else:
            raise AssertionError(f"{file} was damaged and believed")

    def _go_on(self) -> str:
        path, run = self.copy / "journal.jsonl", RunDir(self.copy)
        try:
            log = training.log_to_resume(run, self.served.config, None)
            assert log is not None, "a run with generations is begun anew"
        except JournalError as error:
            assert str(path) in str(error) and "line" in str(error), str(error)
            return "refused"
        told: list[str] = []
        sealed: list[str] = []
        self.served.engine.load(self.start)
        saving.check_start(self.served, log.header)
        saving.restore(self.served, run, log, lambda i, h: sealed.append(h), told.append)
        count = len(log.generations)
        assert self.served.engine.fingerprint() == self.hashes[count], "other weights than the run's"
        assert not sealed or sealed == [self.hashes[count]]
        for recorded in self.log.generations[count:]:  # the optimizer's state is right too
            self.served.engine.apply(recorded.update)
            assert self.served.engine.fingerprint() == recorded.weights_hash, "another optimizer's state than the run's"
        shorter = count < len(self.log.generations)
        return "a shorter run" if shorter else "an older checkpoint" if told else "whole"


def outcomes(bench: Bench, count: int, seed: int) -> Counter[tuple[str, str, str]]:
    """Counts by (file, damage, outcome)."""
    draw, found = random.Random(seed), Counter[tuple[str, str, str]]()
    files = bench.files()
    while found.total() < count:
        file, name = draw.choice(files), draw.choice(list(DAMAGES))
        outcome = bench.attempt(file, DAMAGES[name], draw)
        if outcome != "unchanged":
            found[("journal" if file.name == "journal.jsonl" else "saved mean", name, outcome)] += 1
    return found


def main() -> None:
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    total = Counter[tuple[str, str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for index, space in enumerate(kill_points.SPACES):
            share = arguments.count // 3 + (index < arguments.count % 3)
            total += outcomes(Bench(space, Path(folder)), share, index)
    for (file, damage, outcome), number in sorted(total.items()):
        print(f"{file:12} {damage:10} {outcome:20} {number:5}")
    print(f"{total.total()} corruptions, 0 believed")


if __name__ == "__main__":
    main()
