# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze intrinsic`: a planted dimension is recovered, with its interval, and odd runs are refused."""

import math
import random
from types import SimpleNamespace

import pytest

from evoalign.analysis.compare import runs
from evoalign.analysis.intrinsic import Intrinsic, Settings, d90
from evoalign.config import from_dict
from evoalign.errors import ConfigError

TARGETS = 8
"""Numbers that a planted task needs: d dimensions reach the share min(1, d / TARGETS) of the gain."""


def planted(dimensions=(1, 2, 4, 8, 16, 32), seeds=8, noise=0.02):
    draw = random.Random(1)
    return {d: [min(1.0, d / TARGETS) + draw.gauss(0, noise) for _ in range(seeds)] for d in dimensions}


def test_a_planted_dimension_is_recovered():
    gains = planted()
    assert d90(gains, gains[32]) == (8, 8, 8)
    assert d90(gains, gains[32], share=0.45) == (4, 4, 4)
    found, low, high = d90(planted(noise=0.3, seeds=4), [1.0, 1.1, 0.9])
    assert low <= found <= high and low < high
    assert d90(planted((1, 2, 4)), [1.0] * 3) == (math.inf, math.inf, math.inf)
    assert [math.isnan(end) for end in d90(planted(seeds=2), [1.0] * 2)] == [False, True, True]


@pytest.fixture
def read(monkeypatch):
    """Runs by name, such as `subspace 8 0.5`: the space, the dimension and the gain."""

    def of(path):
        space, dimension, gain, *questions = str(path).split()
        tree = {"name": space} | ({} if dimension == "-" else {"dimension": int(dimension)})
        config = from_dict({"es": {"sigma": 0.1}, "space": tree})
        points = [SimpleNamespace(measures={"reward": value}) for value in (-2.0, -2.0 + float(gain))]
        return SimpleNamespace(config=config, points=points, finished=True, questions=" ".join(questions))

    monkeypatch.setattr(runs, "read", of)


def test_the_reference_is_a_whole_space_or_the_largest_dimension(read, tmp_path):
    own = [f"subspace {d} {gain + seed / 1000}" for d, gain in ((2, 0.3), (8, 0.93), (32, 0.95)) for seed in range(3)]
    with_lora = Intrinsic().run([*own, "lora - 1.0", "lora - 1.001", "lora - 1.002"], Settings())
    assert (with_lora.numbers["dimension"], with_lora.numbers["reference"]) == (8, "space lora")
    assert with_lora.sentences[-1].endswith("is reached with 8 dimensions (95 %: 8 to 8)")
    least = Intrinsic().run([*own, "lora - 0.3"], Settings())
    assert least.sentences[-1].endswith("is reached with at most 2 dimensions (no interval: fewer than 3 runs)")
    strict = Intrinsic().run([*own, "lora - 1.1"], Settings())
    assert strict.numbers["dimension"] is None and strict.sentences[-1].endswith(
        "is reached with more than 32 dimensions (no interval: fewer than 3 runs)"
    )
    alone = Intrinsic().run(own, Settings(share=0.99))
    assert (alone.numbers["dimension"], alone.numbers["reference"]) == (32, "dimension 32")
    assert {path.suffix for path in with_lora.write(tmp_path, "intrinsic")} == {".json", ".png", ".svg"}


@pytest.mark.parametrize(("targets", "settings", "said"), [
    (["subspace 8 0.5", "lora - 1"], {}, "1 values of space.dimension"),
    (["subspace 8 0.5 a", "subspace 9 0.5 b"], {}, "2 test splits"),
    (["subspace 8 0.5", "lora - 1", "full - 1"], {}, "are of full, lora; name those of one"),
    (["subspace 8 0.5", "subspace 9 0.6", "lora - -1"], {}, "train the runs longer"),
    (["subspace 8 0.5", "subspace 9 0.6"], {"share": 2.0}, "share: 2 is no share"),
    (["subspace 8 0.5", "subspace 9 0.6"], {"measure": "exact"}, "no exact before and after"),
])  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused(read, targets, settings, said):
    with pytest.raises(ConfigError, match=said):
        Intrinsic().run(targets, Settings(**settings))
