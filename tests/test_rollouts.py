# SPDX-License-Identifier: Apache-2.0
"""The one door to an engine, requests that name their member, and how training and evaluation draw."""

import dataclasses

import pytest
from families import PROMPTS, Bench, build, make_config, requests

import evoalign
from evoalign.config import Config, from_dict
from evoalign.engines.transformers import TransformersEngine
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rollouts import LostError, collect
from evoalign.testing import engines as contract
from evoalign.types import MEAN, MEAN_PLAN, Plan, Request, Rollout, Sampling, population

ES = {"es": {"sigma": 0.01}}
SPACES = ["lora", "lowrank", "full"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("qwen2", tmp_path_factory.mktemp("rollouts") / "qwen2")


class Saying:
    """An engine that answers what it is told to."""

    def __init__(self, cells):
        self.cells = cells

    def rollout(self, plan, asked):
        return (Rollout(m, r, (1,), "a", "stop") for m, r in self.cells)


def test_collect_has_an_order_of_its_own():
    members = population(2)
    asked = [Request(i, (1,), Sampling(1)) for i in range(2)]
    engine = Saying([(members[1], 1), (members[0], 1), (members[1], 0), (members[0], 0)])
    found = collect(engine, Plan(0, 0.1, members), asked)
    assert [(r.member.index, r.request) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("cells", "message", "who"),
    [
        ([(MEAN, 0)], r"no completion for \(member, request\) \(-1, 1\); nothing was scored", -1),
        ([(MEAN, 0), (MEAN, 1), (MEAN, 1)], r"\(-1, 1\)", -1),
        ([(MEAN, 0), (MEAN, 1), (population(1)[0], 0)], r"\(0, 0\)", 0),
    ],
)
def test_collect_raises_lost_error_for_missing_or_unrequested_completions(cells, message, who):
    engine = Saying(cells)
    with pytest.raises(LostError, match=message) as caught:
        collect(engine, MEAN_PLAN, [Request(i, (1,), Sampling(1)) for i in range(2)])
    assert caught.value.member.index == who


def test_collect_refuses_a_request_of_a_member_outside_the_plan(folder):
    with Bench(make_config(folder)) as bench:
        asked = dataclasses.replace(requests(PROMPTS["apart"][:1], Sampling(2))[0], member=population(40)[39])
        with pytest.raises(EvoalignError, match=r"request 0 .*member 39"):
            collect(bench.engine, bench.plan(), [asked])


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("rows", [None, 4])
def test_requests_that_name_their_member_repeat_to_the_bit(folder, space, rows):
    """Chunks follow from the population and the requests, so what is done again is done in the same batches."""
    config = make_config(folder, space, es={"population_size": 6}, engine={"max_rows": rows}, deterministic=True)
    with Bench(config) as bench:
        base = requests(PROMPTS["shared"], Sampling(6, temperature=1.0), logprobs=True)
        named = [
            dataclasses.replace(r, index=i * 3 + r.index, member=m)
            for i, m in enumerate(bench.members)
            for r in base[: 1 + i % 3]
        ]
        first, second = (collect(bench.engine, bench.plan(), named) for _ in range(2))
        assert first == second
        assert [(r.member, r.request) for r in first] == [(r.member, r.index) for r in named]
        everyone = {(r.member.index, r.request): r for r in collect(bench.engine, bench.plan(), base)}
        same = [r.token_ids == everyone[r.member.index, r.request % 3].token_ids for r in first]
        assert all(same), "members draw otherwise where each has requests of its own"


@pytest.mark.parametrize("space", SPACES)
def test_the_contract_holds_requests_and_stops(folder, space):
    for check in (contract.check_requests_of_one_member, contract.check_stop_strings):
        with contract.started(TransformersEngine, make_config(folder, space)) as bench:
            check(bench)


# --- the sections sampling and evaluation ---


def drawn(**tree):
    config = from_dict({**ES, **tree})
    return config.sampling, config.evaluation


def test_training_draws_as_the_evaluation_where_it_says_nothing():
    sampling, evaluation = drawn(evaluation={"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "stop": ["\n"]})
    assert sampling.model_dump() == {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "stop": ["\n"]}
    assert evaluation.max_tokens == 9


def test_each_has_its_own():
    tree = {"temperature": 0.7, "samples": 20, "max_tokens": 32}
    sampling, evaluation = drawn(sampling={"max_tokens": 64}, evaluation=tree)
    assert (sampling.max_tokens, sampling.temperature) == (64, 0.7)
    assert (evaluation.max_tokens, evaluation.samples) == (32, 20)


def test_lengths_and_stops_of_training_hold_for_the_evaluation_and_its_temperature_does_not():
    sampling, evaluation = drawn(sampling={"max_tokens": 64, "stop": ["END"], "temperature": 1.0})
    assert (evaluation.max_tokens, evaluation.stop, evaluation.temperature) == (64, ["END"], 0.0)
    assert sampling.temperature == 1.0


def test_a_resolved_config_reads_as_itself():
    config = from_dict({**ES, "sampling": {"temperature": 0.0}, "evaluation": {"temperature": 0.7, "samples": 2}})
    assert from_dict(config.model_dump(by_alias=True)) == config
    assert Config.model_validate(config.model_dump()) == config


def test_a_wrong_section_is_named():
    with pytest.raises(ConfigError, match="sampling"):
        from_dict({**ES, "sampling": 3})
    with pytest.raises(ConfigError, match=r"unknown setting sampling\.samples; did you mean task\.samples"):
        from_dict({**ES, "sampling": {"samples": 3}})


def test_a_run_trains_greedily_and_is_tested_with_twenty_samples(tmp_path):
    """As the published protocol has it: temperature 0 in training, 20 samples at 0.7 on the test split."""

    def run(name, **tree):
        seen = []
        base = {
            "output_dir": str(tmp_path / name),
            "es": {"sigma": 0.01, "learning_rate": 0.005, "num_generations": 1, "population_size": 2},
            "checks": {"control_every": 0},
        }
        return evoalign.train({**base, **tree}, on_generation=seen.append), seen[0]

    protocol = {"temperature": 0.7, "samples": 20, "max_tokens": 6}
    result, generation = run("protocol", sampling={"temperature": 0.0, "max_tokens": 4}, evaluation=protocol)
    completions = result.before.completions
    assert len(completions) == 20 * 8 and {c.sample for c in completions} == set(range(20))
    assert max(c.tokens for c in completions) == 6 and len({c.text for c in completions if c.example == 0}) > 1
    _, greedy = run("greedy", evaluation={"max_tokens": 4})
    assert generation.rollouts == greedy.rollouts and generation.update == greedy.update
