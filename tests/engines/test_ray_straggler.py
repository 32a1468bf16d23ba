# SPDX-License-Identifier: Apache-2.0
"""Four replicas of which one is four times as slow, in virtual time: no generation takes much longer than it must.

The clock is counted, so that the bound depends on the rules alone; benchmarks/ray_straggler.py measures real seconds.
"""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

EVENTS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "ray_events.py"))
MEMBERS, MEMBER, SLOWNESS, GENERATIONS, JITTER = 256, 0.020, 4.0, 20, 0.1


def ratios(chunk: int, slow: int, seed: int, rules: str = "Deal") -> list[float]:
    """Each generation's seconds over work / (sum of speeds). Each chunk takes up to a tenth more or less."""
    draw = random.Random(seed)
    workers = [EVENTS["Worker"](place, SLOWNESS if place == slow else 1.0) for place in range(4)]

    def seconds(worker: Any, members: int) -> float:
        return members * MEMBER * worker.slowness * draw.uniform(1 - JITTER, 1 + JITTER)

    cluster = EVENTS["Cluster"](workers, seconds, EVENTS["Costs"](), rules=EVENTS[rules])
    least = MEMBERS * MEMBER / sum(1 / worker.slowness for worker in workers)
    return [cluster.rollout(EVENTS["sizes_of"](MEMBERS, chunk)) / least for _ in range(GENERATIONS)]


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
def test_no_generation_takes_more_than_1_15_times_what_it_must(chunk: int) -> None:
    found = [max(ratios(chunk, slow, seed)) for slow in (0, 3) for seed in range(10)]
    assert max(found) <= 1.15
    assert min(found) >= 1 - JITTER  # as fast as can be and no faster: the clock is not wrong


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_it_is_the_rule_of_who_declines_that_holds_it(chunk: int) -> None:
    assert max(max(ratios(chunk, 0, seed, "Undeclined")) for seed in range(10)) > 1.15
