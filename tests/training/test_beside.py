# SPDX-License-Identifier: Apache-2.0
"""Evaluations of the mean beside the members of the next generation, against evaluations of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import evoalign
from evoalign.config import from_dict
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rundir.journal import read
from evoalign.types import MEAN, MEAN_PLAN, Plan, Request, Rollout

VALIDATION = "data/tasks/conciseness/conciseness_test.json"


def config(output: Path, space: str = "lowrank", *, beside: bool, **tree: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "space": space,
        "es": {"sigma": 0.02, "learning_rate": 0.01, "population_size": 4, "num_generations": 6},
        "task": {
            "test_size": 5,
            "validation_data": "data/tasks/conciseness/conciseness_test.json",
            "validation_size": 3,
        },
        "sampling": {"max_tokens": 8, "temperature": 0.7},
        "evaluation": {"every": 2, **({"beside_members": True} if beside else {})},
        **tree,
    }


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("decoder", ["library", "static"])
@pytest.mark.parametrize("space", ["lowrank", "full"])
def test_the_run_is_the_same(space: str, decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[int] = []
    own = TransformersEngine.rollout

    def counted(self: Any, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        of_mean = sum(r.member == MEAN for r in requests)
        alone.append(len(requests) if plan == MEAN_PLAN else 0)
        assert of_mean in (0, 5)
        return own(self, plan, requests)

    monkeypatch.setattr(TransformersEngine, "rollout", counted)
    found = {}
    for beside in (False, True):
        alone.clear()
        output = tmp_path / str(beside)
        evoalign.train(config(output, space, beside=beside, engine={"decoder": decoder}))
        rows = rows_of(output)
        known = ("generation", "mean", "std", "rms_c", "tokens", "evaluation", "validation", "empty_share")
        assert [row["evaluation"] is not None for row in rows] == [False, True, False, True, False, False]
        budget = json.loads((output / "results" / "budget.json").read_text())["evaluation"]
        found[beside] = (
            [{k: row[k] for k in known if k in row} for row in rows],
            [(g.update.coefficients, g.weights_hash) for g in read(output / "journal.jsonl").generations],
            {k: n for k, n in budget.items() if "seconds" not in k and "memory" not in k},
            alone.count(5),
        )
    assert found[True][:3] == found[False][:3]
    assert found[False][3] - found[True][3] == 2, "the test split is asked in no rollout of its own on the way"


def test_a_run_that_died_with_an_evaluation_under_way_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation that waited for it is in the journal; its row is made again, with an evaluation of its own."""
    whole, died = tmp_path / "whole", tmp_path / "died"
    evoalign.train(config(whole, beside=True))
    own = TransformersEngine.rollout

    def dies(self: Any, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        for count, rollout in enumerate(own(self, plan, requests)):
            if MEAN in plan.members and plan.generation == 2 and count == 9:
                raise EvoalignError("the machine is gone")
            yield rollout

    with monkeypatch.context() as patched, pytest.raises(EvoalignError, match="gone; 1 generation"):
        patched.setattr(TransformersEngine, "rollout", dies)
        evoalign.train(config(died, beside=True))
    evoalign.train(config(died, beside=True), resume=True)
    wanted, got = (
        [(row["evaluation"], row.get("validation"), row["mean"]) for row in rows_of(o)] for o in (whole, died)
    )
    assert got == wanted
    hashes = [[g.weights_hash for g in read(o / "journal.jsonl").generations] for o in (whole, died)]
    assert hashes[0] == hashes[1]


def test_answers_that_are_still_being_scored_are_not_called_off(tmp_path: Path) -> None:
    """By the evaluation, whose scoring ends while that of the members would go on."""
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef length(completions, **columns):\n    time.sleep(0.1)\n"
        "    return [-float(len(c)) for c in completions]\n"
    )
    rows = [{"prompt": f"Say {word}."} for word in ("one", "two", "three", "four")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    task = {"name": "custom", "train_data": str(tmp_path / "rows.json"), "test_data": str(tmp_path / "rows.json")}
    task |= {"rewards": [f"{tmp_path / 'slow.py'}:length"]}
    tree = config(tmp_path / "run", beside=True, grader={"batch": 2}, checks={"placebo": 0})
    evoalign.train({**tree, "task": task, "sampling": {"max_tokens": 2}})
    assert [row["evaluation"] is not None for row in rows_of(tmp_path / "run")] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]


def test_the_first_generation_is_kept_whatever_comes_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = TransformersEngine.rollout

    def dies(self: Any, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        if plan.generation == 1:
            raise EvoalignError("the machine is gone")
        yield from own(self, plan, requests)

    monkeypatch.setattr(TransformersEngine, "rollout", dies)
    with pytest.raises(EvoalignError, match="gone; 1 generation"):
        evoalign.train(config(tmp_path / "run", beside=True, evaluation={"every": 1, "beside_members": True}))
    assert len(read(tmp_path / "run" / "journal.jsonl").generations) == len(rows_of(tmp_path / "run")) == 1


def test_noise_that_follows_a_plateau_cannot_wait(tmp_path: Path) -> None:
    es = {"sigma": 0.1, "sigma_schedule": {"name": "plateau", "patience": 2}}
    with pytest.raises(ConfigError, match=r"beside_members: where .* is plateau"):
        from_dict({**config(tmp_path, beside=True), "es": es})


def test_a_config_without_it_is_written_as_before(tmp_path: Path) -> None:
    assert "beside_members" not in from_dict(config(tmp_path, beside=False)).model_dump()["evaluation"]
    assert from_dict(config(tmp_path, beside=True)).model_dump()["evaluation"]["beside_members"] is True
