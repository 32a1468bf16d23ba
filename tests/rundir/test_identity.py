# SPDX-License-Identifier: Apache-2.0
"""Which settings of decoding make a run another one."""

from typing import Any

import pytest

from evoalign.config import Config, from_dict
from evoalign.rundir.identity import config_hash, differences, identity


def config(**sections: Any) -> Config:
    return from_dict({"es": {"sigma": 0.01}, **sections})


@pytest.mark.parametrize(("training", "evaluation"), [([], ["\n"]), (["\n"], [])])
def test_stops_of_one_section_alone_count_and_are_read_back(training, evaluation):
    apart = config(sampling={"stop": training}, evaluation={"stop": evaluation})
    others = (config(), config(sampling={"stop": ["\n"]}), config(evaluation={"stop": ["\n"]}))
    assert config_hash(apart) not in map(config_hash, others)
    again = from_dict(identity(apart))
    assert (again.sampling.stop, again.evaluation.stop) == (training, evaluation)
    assert differences(apart, again) == ([], [])


def grpo(sampling: dict[str, Any], **settings: Any) -> Config:
    return from_dict({"sampling": sampling, "evaluation": {"max_tokens": 64}, "grpo": settings})


@pytest.mark.parametrize("unused", [{"temperature": 1.0}, {"top_p": 0.9}])
def test_grpo_is_the_same_run_with_other_settings_that_it_does_not_use(unused):
    plain = from_dict({"evaluation": {"max_tokens": 64}, "grpo": {}})
    assert config_hash(grpo(unused), "grpo") == config_hash(plain, "grpo")
    assert "sampling" not in identity(plain, "grpo")


def test_the_longest_completion_counts_where_grpo_takes_it_from_sampling():
    assert differences(grpo({"max_tokens": 9}), grpo({"max_tokens": 8}), "grpo")[0] == [
        "sampling.max_tokens is 8 in the run and 9 now"
    ]
    ours, theirs = (grpo({"max_tokens": n}, max_completion_length=7) for n in (9, 8))
    assert differences(ours, theirs, "grpo") == ([], [])


def test_what_is_not_written_down_is_told_by_its_default():
    tree = {"task": {"name": "countdown"}, "es": {"sigma": 0.1}}
    lenient = from_dict(tree | {"task": {"name": "countdown", "grading": "lenient"}})
    assert differences(from_dict(tree), lenient)[0] == ["task.grading is 'lenient' in the run and 'strict' now"]
    assert differences(lenient, from_dict(tree))[0] == ["task.grading is 'strict' in the run and 'lenient' now"]
