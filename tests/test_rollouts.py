# SPDX-License-Identifier: Apache-2.0
"""The one door to an engine, requests that name their member, and how training and evaluation draw."""

import dataclasses
from types import SimpleNamespace

import pytest
from families import PROMPTS, Bench, build, make_config, requests

import evoalign
from evoalign import setup
from evoalign.config import Config, from_dict
from evoalign.errors import ConfigError, EvoalignError
from evoalign.rollouts import LostError, collect, sampling_of
from evoalign.tokens import before_stop
from evoalign.types import MEAN, Plan, Request, Rollout, Sampling, population

ES = {"es": {"sigma": 0.01}}
SPACES = ["lora", "lowrank", "full"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("qwen2", tmp_path_factory.mktemp("rollouts") / "qwen2")


A, B = population(2)


@pytest.mark.parametrize(
    ("members", "cells", "lost"),
    [
        ((A, B), [(B, 1), (A, 1), (B, 0), (A, 0)], None),
        ((MEAN,), [(MEAN, 0)], (MEAN, r"no completion for \(member, request\) \(-1, 1\); nothing was scored")),
        ((MEAN,), [(MEAN, 0), (MEAN, 1), (MEAN, 1)], (MEAN, r"\(-1, 1\)")),
        ((MEAN,), [(MEAN, 0), (MEAN, 1), (A, 0)], (A, r"\(0, 0\)")),
    ],
)
def test_collect_orders_completions_and_raises_if_one_is_missing_or_not_requested(members, cells, lost):
    engine = SimpleNamespace(rollout=lambda plan, asked: iter([Rollout(m, r, (1,), "a", "stop") for m, r in cells]))
    asked = [Request(i, (1,), Sampling(1)) for i in range(2)]
    if lost is None:
        found = collect(engine, Plan(0, 0.1, members), asked)
        assert [(r.member.index, r.request) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        return
    with pytest.raises(LostError, match=lost[1]) as caught:
        collect(engine, Plan(0, 0.1, members), asked)
    assert caught.value.member == lost[0]


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


# --- the sections sampling and evaluation ---


MINE = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "stop": ["\n"]}


@pytest.mark.parametrize(
    ("tree", "sampling", "evaluation"),
    [
        ({"evaluation": MINE}, MINE, MINE),  # training as the evaluation where it says nothing
        (
            {"sampling": {"max_tokens": 64}, "evaluation": {"temperature": 0.7, "samples": 20, "max_tokens": 32}},
            {"max_tokens": 64, "temperature": 0.7},
            {"max_tokens": 32, "samples": 20},
        ),
        (  # lengths and stops of training hold for the evaluation, and its temperature does not
            {"sampling": {"max_tokens": 64, "stop": ["END"], "temperature": 1.0}},
            {"temperature": 1.0},
            {"max_tokens": 64, "stop": ["END"], "temperature": 0.0},
        ),
    ],
)
def test_sampling_and_evaluation_take_settings_from_each_other(tree, sampling, evaluation):
    config = from_dict({**ES, **tree})
    assert config.sampling.model_dump().items() >= sampling.items()
    assert config.evaluation.model_dump().items() >= evaluation.items()


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


# --- texts at which a completion ends: kept where an answer counts by them, refused where they would cut it off ---

TEXT = "1</think>\n<answer>2 + 3</answer> and more</answer>"


@pytest.mark.parametrize(
    ("stop", "kept", "text"),
    [
        ((), True, TEXT),
        (("never",), True, TEXT),
        (("</answer>",), False, "1</think>\n<answer>2 + 3"),
        (("</answer>",), True, "1</think>\n<answer>2 + 3</answer>"),
        (("more", "</answer>"), True, "1</think>\n<answer>2 + 3</answer>"),  # the first to come up
        (("</answer> and", "</answer>"), True, "1</think>\n<answer>2 + 3</answer>"),  # the one that is whole first
    ],
)
def test_what_is_left_of_a_text(stop, kept, text):
    assert before_stop(TEXT, stop, kept) == text


def countdown(**sections):
    task = {"name": "countdown", "split": "first_last", "train_size": 2, "test_size": 2}
    return from_dict({"output_dir": "x", "model": {"name": "tiny"}, "es": {"sigma": 0.1}, "task": task, **sections})


def test_keeping_is_written_down_where_it_is_set_and_holds_for_the_evaluation():
    assert "keep_stop" not in str(countdown().model_dump())
    config = countdown(sampling={"stop": ["</answer>"], "keep_stop": True}, evaluation={"temperature": 0.0})
    again = from_dict(config.model_dump())
    assert [sampling_of(s).keep_stop for s in (config.sampling, again.sampling, again.evaluation)] == [True] * 3
    apart = countdown(sampling={"keep_stop": False}, evaluation={"keep_stop": True})
    assert from_dict(apart.model_dump()) == apart


@pytest.mark.parametrize(
    ("sampling", "refused"),
    [
        ({"stop": ["</answer>"]}, True),
        ({"stop": ["</answer>\n"]}, True),
        ({"stop": ["</"], "keep_stop": True}, True),
        ({"stop": ["</answer>"], "keep_stop": True}, False),
        ({"stop": ["\n\n\n", "<|im_end|>"]}, False),
    ],
)
def test_a_stop_text_that_would_cut_every_answer_is_refused(sampling, refused):
    config = countdown(sampling=sampling)
    if not refused:
        return setup.task_and_data(config, None, None)[0].close()
    with pytest.raises(ConfigError, match=r"^sampling\.stop .*before the </answer> .*; set .*keep_stop: true$"):
        setup.task_and_data(config, None, None)
    return None
