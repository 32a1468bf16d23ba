# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of a finished run's results, in `SHA256SUMS` as `sha256sum` writes it: `cd RUN; sha256sum -c SHA256SUMS`.

The file finds accidents and careless edits. It is not a signature: a person who edits a result can also edit it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from evoalign.config.reading import MissingError, read_bytes
from evoalign.errors import DataError
from evoalign.rundir.directory import AFTER_VALIDATION, BEFORE_VALIDATION, CHECKSUMS
from evoalign.rundir.files import digest_of, write_text
from evoalign.rundir.method import JOURNAL

EVALUATION = "results/evaluation.json"
RESULTS = (
    EVALUATION,
    "results/budget.json",
    "metrics.jsonl",
    "results/completions/before.parquet",
    "results/completions/after.parquet",
    f"results/completions/{BEFORE_VALIDATION}.parquet",
    f"results/completions/{AFTER_VALIDATION}.parquet",
    "results/points.jsonl",
    "results/points_before.jsonl",
    JOURNAL,
)
"""The files recorded when a run ends, as far as it has them."""
EARLIER = "results/sealed.json"
"""The record of earlier releases. It is not read."""
LINE = re.compile(r"([0-9a-f]{64})  ([\w./-]+)")
MOST_BYTES = 2**20
FIX = f"put it back from a copy; if the change is intended, delete {CHECKSUMS}: the results then count as not verified"


@contextmanager
def recorded(run: Path, *names: str) -> Generator[None]:
    """Record the checksums of these files, by default `RESULTS`, after the body has written them.

    The old checksums are removed first: a run killed in the body has unverified results, not damaged ones.
    """
    forget(run, *names)
    yield
    found = {name: digest_of(run / name) for name in names or RESULTS if (run / name).is_file()}
    _write(run, _read(run) | found)


def verify(run: Path, *names: str, fix: str = FIX) -> bool:
    """Compare files, by default `RESULTS`, with their checksums. Return False where none of them is recorded.

    Raises DataError naming the file that was altered or added since, and how to `fix` that.
    """
    found = _read(run)
    if found.keys().isdisjoint(names or RESULTS):
        return False
    for name in names or RESULTS:
        if (run / name).is_file() and digest_of(run / name) != found.get(name):
            raise DataError(f"{run / name} was altered after the run wrote it; {fix}")
    return True


def forget(run: Path, *names: str) -> None:
    """Remove the checksums of files, by default `RESULTS`, which are about to change; all of them where damaged."""
    (run / EARLIER).unlink(missing_ok=True)
    try:
        found = _read(run)
    except DataError:
        found = {}
    _write(run, {name: digest for name, digest in found.items() if name not in (names or RESULTS)})


def _read(run: Path) -> dict[str, str]:
    file = run / CHECKSUMS
    try:
        text = read_bytes(file, MOST_BYTES).decode()
    except MissingError:
        return {}
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text; {FIX}") from None
    if not text:
        raise DataError(f"{file} is empty; {FIX}")
    if not text.endswith("\n"):
        raise DataError(f"{file} is cut off; {FIX}")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if (match := LINE.fullmatch(line)) is None:
            raise DataError(f"{file}, line {number} is not a SHA-256, two spaces and a file; {FIX}")
        found[match[2]] = match[1]
    return found


def _write(run: Path, digests: Mapping[str, str]) -> None:
    if digests:
        write_text(run / CHECKSUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))
    else:
        (run / CHECKSUMS).unlink(missing_ok=True)
