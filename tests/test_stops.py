# SPDX-License-Identifier: Apache-2.0
"""Texts at which a completion ends: kept where an answer counts by them, and refused where they would cut it off."""

import pytest

from evoalign import setup
from evoalign.config import from_dict
from evoalign.errors import ConfigError
from evoalign.rollouts import sampling_of
from evoalign.tokens import before_stop

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
