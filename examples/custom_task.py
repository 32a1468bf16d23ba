# SPDX-License-Identifier: Apache-2.0
"""A task of one's own, in two ways: a task object, and a reward function of TRL's form over rows of one's own.

    python examples/custom_task.py [--generations 20] [--output runs/example_custom_task]

Neither needs a gradient, a registration or a file of its own: both are passed to `evoalign.train` as they are.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import evoalign
from evoalign.config import TaskConfig

QUESTIONS = ("What is 3 + 4?", "Capital city of France:", "Opposite of big:", "How many days are in a week?")
TESTS = ("What is 8 + 9?", "Opposite of early:", "Capital city of Italy:")
WORDS = 5


class FewWords(evoalign.Task):
    """Answer in five words: what is asked, and what counts as good."""

    name = "few_words"
    max_reward = 0.0

    def load_data(self, seed: int) -> evoalign.Data:
        """Both splits. Rows are any mappings; `seed` is for tasks that draw or shuffle."""
        return evoalign.Data(train=[{"question": q} for q in QUESTIONS], test=[{"question": q} for q in TESTS])

    def prompt(self, example: Mapping[str, Any]) -> list[dict[str, str]]:
        """Messages go through the chat template; a string would go to the model as it is."""
        return [{"role": "user", "content": example["question"]}]

    def compute_reward(self, text: str, example: Mapping[str, Any]) -> float:
        """One finite number; higher is better."""
        return -abs(len(text.split()) - WORDS)

    def measures(self, text: str, example: Mapping[str, Any]) -> dict[str, float]:
        """Further figures for the table at the end."""
        return {"words": len(text.split())}


def right(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for naming the answer: TRL's signature, all completions of a generation at once, a column by its name."""
    return [float(a.lower() in c.lower()) for c, a in zip(completions, answer, strict=True)]


def brief(text: str, example: Mapping[str, Any]) -> float:
    """The simple form: one completion a call."""
    return -0.01 * len(text)


def settings(output: Path, generations: int) -> dict[str, Any]:
    """What both runs share."""
    return {
        "output_dir": str(output),
        "model": {"name": "tiny"},
        "lora": {"rank": 4, "alpha": 4, "target_modules": ["down_proj"]},
        "es": {"num_generations": generations, "population_size": 20, "sigma": 0.03, "learning_rate": 0.015},
        "evaluation": {"max_tokens": 48},
    }


def main() -> None:
    """One run with a task object, one with reward functions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/example_custom_task"))
    arguments = parser.parse_args()

    task = FewWords(TaskConfig())
    result = evoalign.train(settings(arguments.output / "task", arguments.generations), task=task, overwrite=True)
    print(f"words {result.before.measures['words']:.1f} -> {result.after.measures['words']:.1f}")

    rows = [
        ("What is 2 + 5?", "7"),
        ("What is 9 - 3?", "6"),
        ("Capital city of Spain:", "Madrid"),
        ("Opposite of hot:", "Cold"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
        config = settings(arguments.output / "reward", arguments.generations)
        # One file: the first three rows train, the last one tests.
        config["task"] = {"name": "custom", "train_data": str(data), "prompt": "chat",
                          "split": "first_last", "train_size": 3, "test_size": 1}  # fmt: skip
        result = evoalign.train(config, reward=[right, brief], overwrite=True)
    print(f"reward {result.before.measures['reward']:.2f} -> {result.after.measures['reward']:.2f}")


if __name__ == "__main__":
    main()
