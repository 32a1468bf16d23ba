# SPDX-License-Identifier: Apache-2.0
"""A symbolic solver after the text, and a setting of the solver that is searched together with the weights.

    python examples/solver_task.py [--generations 20] [--output runs/example_solver_task]

The model writes numbers. The solver combines them from left to right towards the target, each with the first operator
that comes closer; the setting `operators` is the order in which it tries them, and `form` the form of the prompt.
"""

import argparse
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evoalign
from evoalign.config import TaskConfig

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
PUZZLES = [(24, (4, 6, 1)), (17, (3, 5, 2)), (30, (7, 4, 2)), (11, (9, 4, 2)), (40, (8, 6, 8)), (21, (7, 3, 5))]


def solve(numbers: Sequence[int], target: int, order: str) -> int:
    """Combine numbers from left to right, each with the first operator of `order` that comes closer to the target."""
    value = numbers[0] if numbers else 0
    for number in numbers[1:]:
        found = (OPERATORS[name](value, number) for name in order)
        value = next((v for v in found if abs(target - v) < abs(target - value)), value)
    return value


class Solver(evoalign.Task):
    """Write numbers from which the solver makes the target."""

    name = "solver"
    max_reward = 0.0

    def load_data(self, seed: int) -> evoalign.Data:
        """A row has a column `prompt`, which text settings put into their form."""
        rows = [{"prompt": f"Make {t} of {', '.join(map(str, n))}.", "target": t, "numbers": [*n]} for t, n in PUZZLES]
        return evoalign.Data(train=rows[:4], test=rows[4:])

    def prompt(self, example: Mapping[str, Any]) -> list[dict[str, str]]:
        """The prompt in the form that the member drew."""
        return [{"role": "user", "content": example["prompt"]}]

    def compute_reward(self, text: str, example: Mapping[str, Any]) -> float:
        """Score what the solver makes of the numbers in the text that the puzzle has, by the operators' order."""
        allowed = [int(n) for n in re.findall(r"\d{1,3}", text) if int(n) in example["numbers"]]
        return -min(abs(example["target"] - solve(allowed, example["target"], example["operators"])), 100) / 100


def main() -> None:
    """Train, and print the settings that go with the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/example_solver_task"))
    arguments = parser.parse_args()
    task = {
        "name": "custom",  # the object below replaces it
        "settings": {"operators": ["+-*", "*-+", "-*+"], "form": {"text": ["{prompt}", "Numbers: {prompt}"]}},
    }
    config = {
        "output_dir": str(arguments.output),
        "task": task,
        "lora": {"rank": 4, "alpha": 4, "target_modules": ["down_proj"]},
        "es": {"num_generations": arguments.generations, "population_size": 32, "antithetic": True, "sigma": 0.03,
               "learning_rate": 0.015},
        "evaluation": {"max_tokens": 16},
    }  # fmt: skip
    result = evoalign.train(config, task=Solver(TaskConfig()), overwrite=True)
    print(f"reward {result.before.measures['reward']:.2f} -> {result.after.measures['reward']:.2f}")
    print(f"settings {(result.saved / 'settings.json').read_text()}")


if __name__ == "__main__":
    main()
