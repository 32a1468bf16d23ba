# SPDX-License-Identifier: Apache-2.0
"""Random mutations of valid inputs: accepted as they were written, or refused in a line; faults put in are found."""

from pathlib import Path

import pytest
from fuzz_configs import Configs
from fuzz_damage import Corruptions
from fuzz_data import DataFiles
from fuzz_models import ModelFolders
from fuzz_runs import RunDirs
from fuzzing import Bench, FaultError, sweep
from planted import FAULTS

KINDS: dict[str, type[Bench]] = {
    "configs": Configs, "data files": DataFiles, "model folders": ModelFolders, "run directories": RunDirs,
    "corruptions": Corruptions,
}  # fmt: skip
SHORT = {"configs": 25, "data files": 60, "model folders": 8, "run directories": 10, "corruptions": 12}
LONG = {"configs": 2000, "data files": 1000, "model folders": 500, "run directories": 500, "corruptions": 1000}
ACCEPTED = 0.5
"""Of all cases at least: else what is tried is refused at once, and nothing behind it is."""


AIMED = 400
"""Cases, at most, that show a fault."""


@pytest.fixture(scope="module")
def benches(tmp_path_factory) -> dict[str, Bench]:
    """Of each kind that a test has asked for, one."""
    return {}


def bench(kind: str, benches: dict[str, Bench], folder: Path) -> Bench:
    if kind not in benches:
        benches[kind] = KINDS[kind](folder)  # pyright: ignore[reportCallIssue]
    return benches[kind]


@pytest.mark.first("configs", "data files", others="slow")
@pytest.mark.parametrize("kind", KINDS)
def test_few_mutations_of(kind, benches, tmp_path_factory):
    sweep(bench(kind, benches, tmp_path_factory.mktemp("few")), SHORT[kind])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations_of(kind, benches, tmp_path_factory):
    tally = sweep(bench(kind, benches, tmp_path_factory.mktemp("many")), LONG[kind])
    print(f"\n{kind}: {tally.cases} cases, {tally.share:.1%} accepted")
    assert tally.cases >= LONG[kind]
    assert tally.share >= ACCEPTED, f"{tally.share:.1%} of the {kind} were accepted"


@pytest.mark.first("a key twice", "a bound", "line breaks", "rows shared", "checksums")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_put_in_is_found(name, benches, tmp_path_factory, monkeypatch):
    fault = FAULTS[name]
    whole = bench(fault.kind, benches, tmp_path_factory.mktemp("whole"))
    monkeypatch.setattr(whole, "aim", fault.aim)
    with fault.put(monkeypatch), pytest.raises(FaultError) as found:
        sweep(whole, AIMED, shrink=False)
    assert found.value.what in fault.shows
