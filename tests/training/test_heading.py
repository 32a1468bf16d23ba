# SPDX-License-Identifier: Apache-2.0
"""Lines of a dry run: the evaluations and checkpoints of a run."""

import pytest

from evoalign.config import from_dict
from evoalign.tasks import Data
from evoalign.training.heading import measuring_line

DRAWN = {"temperature": 0.7, "samples": 2, "seeds": [1, 2, 3]}


@pytest.mark.parametrize(
    ("sections", "validation", "start", "end"),
    [
        ({}, 0, "evaluations 2 of 10 completions, 20 in all; those of placebos", "checkpoints 2"),
        ({"checks": {"placebo": 0}}, 0, "evaluations 2 of 10 completions, 20 in all; checkpoints", "checkpoints 2"),
        ({"checks": {"placebo": 3}}, 0, "evaluations 2 of 10 completions, 20 in all; 3 placebos at the end, 30", "2"),
        ({"evaluation": {"every": 5}}, 0, "evaluations 5 of 10 completions, 50 in all", "checkpoints 2"),
        ({"evaluation": {"every": 5}}, 4, "evaluations 5 of 14 completions, 70 in all", "2, and the best ones"),
        ({"evaluation": {"every": 7}}, 0, "evaluations 4 of 10 completions, 40 in all", "checkpoints 2"),
        ({"evaluation": {"every": 30}}, 0, "evaluations 2 of ", "checkpoints 2"),
        ({"evaluation": DRAWN}, 0, "evaluations 2 of 60 completions, 120 in all", "checkpoints 2"),
        ({"checkpoint": {"every": 5}}, 0, "evaluations 2 of ", "checkpoints 4"),
    ],
)
def test_measuring_line_counts_evaluations_and_checkpoints(sections, validation, start, end):
    config = from_dict(
        {"es": {"sigma": 0.1, "learning_rate": 0.05, "num_generations": 20}, "space": "lora", **sections}
    )
    rows = [{"prompt": str(i)} for i in range(10)]
    line = measuring_line(config, Data(rows, rows, validation=rows[:validation]))
    assert line.startswith(start) and line.endswith(end)
