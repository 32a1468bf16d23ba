# SPDX-License-Identifier: Apache-2.0
"""Objectives that need what the unperturbed model says: it is asked too, before it moves, and counted."""

import io
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from math_rows import written
from rich.console import Console
from small_runs import UNCHECKED

import evoalign
from evoalign import setup
from evoalign.config import from_dict
from evoalign.cost import flops
from evoalign.cost.flops import Adapted
from evoalign.models.origin import model_config
from evoalign.rewards.objective import Group, Objective, grouped, score
from evoalign.rollouts import Encoded, collect, requests_of, scores_of
from evoalign.training.train import dry_run
from evoalign.types import MEAN_PLAN

HERE = "test_asking_the_mean"
GENERATIONS, MEMBERS, PROMPTS = 3, 4, 2


def vowels(text, example):
    return float(sum(c in "aeiou" for c in text))


def blanks(text, example):
    return text.count(" ") / 10


class Priced(Objective):
    """vowels - price * blanks, where the price follows the unperturbed model's blanks."""

    name = "priced"
    asks_mean = True
    seen: Sequence[Group] = ()

    def __init__(self, rate=1.0):
        self.rate, self.state = rate, {"price": 1.0}

    def scores(self, group):
        return group.columns_MP["vowels"] - self.state["price"] * group.columns_MP["blanks"]

    def update(self, group):
        assert group.mean is not None and group.mean.mean is None
        Priced.seen = [*Priced.seen, group]
        self.state = {"price": self.state["price"] + self.rate * float(group.mean.columns_MP["blanks"].mean())}


class Fixed(Priced):
    """The same without the mean: its price stays."""

    name = "fixed"
    asks_mean = False

    def update(self, group):
        assert group.mean is None


def config(output, objective=f"{HERE}:Priced", rows=None, **changes):
    if rows is None:
        rows = written(
            output.parent / "rows.jsonl", [{"prompt": f"Tell me about the {w}:"} for w in ("sea", "sky", "sun")]
        )
    return {
        "output_dir": str(output), "seed": 5, "deterministic": True,
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": GENERATIONS, "population_size": MEMBERS},
        "task": {"name": "custom", "train_data": str(rows), "test_data": str(rows), "batch_size": PROMPTS,
                 "rewards": [f"{HERE}:vowels", f"{HERE}:blanks"], "reward_weights": [1.0, -1.0],
                 "objective": objective},
        "evaluation": {"max_tokens": 8, "temperature": 0.8}, "checkpoint": {"every": 1}, "checks": UNCHECKED,
        "tracking": {"completions_every": 0}, "grader": {"isolated": False}, **changes,
    }  # fmt: skip


def train(tree, **arguments):
    return evoalign.train(tree, console=Console(file=io.StringIO(), width=200), **arguments)


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that never stopped, its generations, and the groups that its objective saw."""
    run, seen = tmp_path_factory.mktemp("asked") / "run", []
    Priced.seen = ()
    train(config(run), on_generation=seen.append)
    return run, seen, [*Priced.seen]


def test_the_group_has_what_the_unperturbed_model_said_before_it_moved(straight, tmp_path):
    _, seen, groups = straight
    read = setup.with_form(from_dict(config(tmp_path / "run")))
    with closing(setup.assemble(read)) as parts:
        for generation, group in zip(seen, groups, strict=True):
            prompts, mean = Encoded(parts.task, parts.tokens, parts.data.train), group.mean
            assert [prompts[row] for row in generation.rows] == list(generation.prompts)
            said = collect(parts.engine, MEAN_PLAN, requests_of(read, generation.rows, prompts, generation.index))
            assert [r.text for r in said] == [r.text for r in generation.mean]
            parts.engine.apply(generation.update)
            assert mean.texts_MP == [[r.text for r in said]]
            assert mean.columns_MP["blanks"].tolist() == [[blanks(r.text.strip(), {}) for r in said]]
            assert mean.columns_MP["vowels"].shape == (1, PROMPTS) and mean.generation == generation.index
            assert group.columns_MP["vowels"].shape == (MEMBERS, PROMPTS)
            assert [e["prompt"] for e in mean.examples] == [e["prompt"] for e in group.examples]
    assert len({tuple(r.text for r in g.mean) for g in seen}) > 1


def test_its_state_follows_the_mean_and_its_tokens_count(straight):
    run, seen, groups = straight
    price, rows = 1.0, lines(run / "metrics.jsonl")
    for generation, group, row in zip(seen, groups, rows, strict=True):
        assert group.mean is not None
        price += float(np.mean(group.mean.columns_MP["blanks"]))
        assert generation.objective == row["objective"] == {"price": price}
        tokens_ = [len(r.token_ids) for r in (*generation.rollouts, *generation.mean)]
        assert len(tokens_) == (MEMBERS + 1) * PROMPTS
        assert generation.tokens == row["tokens"] == row["budget"]["generated_tokens"] == sum(tokens_)
        assert row["budget"]["completions"] == len(tokens_) and row["budget"]["prompts"] == PROMPTS
        assert row["budget"]["prompt_tokens"] == (MEMBERS + 1) * sum(map(len, generation.prompts))
        assert len(generation.scores_MP) == len(generation.fitness_M) == MEMBERS
    assert price > 1.0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Make two runs whose price stays, by space: with the mean and without it."""

    @cache
    def pair(space):
        folder, seen = tmp_path_factory.mktemp(space), []
        for name in ("Priced", "Fixed"):
            tree = config(folder / name, {"name": f"{HERE}:{name}", "rate": 0.0}, space=space)
            tree["es"]["num_generations"] = 2
            train(tree, on_generation=seen.append)
        return folder, from_dict(tree), seen[0]

    return pair


@pytest.mark.first("lora")
@pytest.mark.parametrize("space", ["lora", "full"])
def test_the_means_flops_are_those_of_its_answers(space, pairs):
    """Of `lora` with the adapter that the mean is, of `full` without any."""
    folder, read, first = pairs(space)
    priced, fixed = (
        lines(folder / name / "metrics.jsonl")[0]["budget"]["forward_flops"] for name in ("Priced", "Fixed")
    )
    with closing(setup.assemble(read)) as parts:
        shape, layout = flops.shape_of(model_config(read.model), parts.engine.specs()), parts.layout
    adapted = Adapted(layout.rank, frozenset(t.module for t in layout.tensors)) if space == "lora" else None
    prompts, asked = list(first.prompts), [len(r.token_ids) for r in first.mean]
    room = max(map(len, prompts)) + read.sampling.max_tokens
    assert priced - fixed == flops.rollout_flops(shape, prompts, asked, adapted, room)


def test_the_run_is_the_one_without_the_mean_where_that_moves_nothing(pairs):
    """The mean is asked beside the members: scores, updates and weights are the same to the bit."""
    ours, theirs = (lines(pairs("lora")[0] / name / "journal.jsonl")[1:] for name in ("Priced", "Fixed"))
    assert len(ours) == 2 * 2
    for one, other in zip(ours, theirs, strict=True):
        assert {**one, "hash": "", "previous": ""} == {**other, "hash": "", "previous": ""}


def test_killed_before_a_seal_it_ends_with_the_same_bits(straight, tmp_path):
    run = straight[0]
    whole = (run / "journal.jsonl").read_bytes()
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "journal.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    train(config(copy, rows=run.parent / "rows.jsonl"), resume=True)
    assert (copy / "journal.jsonl").read_bytes() == whole


def test_what_is_told_before_a_run_counts_the_mean(tmp_path):
    told, without = ("\n".join(dry_run(config(tmp_path / "run", f"{HERE}:{name}"))) for name in ("Priced", "Fixed"))
    assert f"rollouts {(MEMBERS + 1) * PROMPTS} a generation ({MEMBERS} members and the mean x 2 prompts)" in told
    assert f"generations of {(MEMBERS + 1) * PROMPTS} completions ({MEMBERS} members and the mean x 2 prompts)" in told
    assert f"rollouts {MEMBERS * PROMPTS} a generation ({MEMBERS} members x 2 prompts)" in without


def test_doctor_asks_the_mean(tmp_path):
    found = {finding.name: finding for finding in evoalign.doctor(config(tmp_path / "run"))}
    assert found["generation"].status == "ok", found["generation"].detail
    assert f"a generation of {(MEMBERS + 1) * PROMPTS}" in found["generation"].detail


def test_of_a_policy_alone_the_answers_are_the_means():
    class Sees(Objective):
        name = "sees"
        per_completion = asks_mean = True

        def scores(self, group):
            assert group.mean is not None
            return group.columns_MP["a"] - group.mean.columns_MP["a"].mean()

    assert scores_of(Sees(), {"a": [1.0, 3.0]}, ["x", "y"], [{}, {}]) == [-1.0, 1.0]
    assert scores_of(Sees(), {"a": []}, [], []) == []


def test_what_an_objective_changes_of_the_mean_is_gone():
    class Spoils(Objective):
        name = "spoils"

        def scores(self, group):
            assert group.mean is not None
            group.mean.columns_MP["a"][:] = 7.0
            return group.columns_MP["a"]

    mean = grouped({"a": [5.0]}, ["z"], [{}], 0)
    group = grouped({"a": [1.0, 2.0]}, ["x", "y"], [{}], 0)
    score(Spoils(), replace(group, mean=mean))
    assert mean.columns_MP["a"].tolist() == [[5.0]]
