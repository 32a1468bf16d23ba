# SPDX-License-Identifier: Apache-2.0
"""Evolution Strategies from Python: a tiny language model learns to answer briefly, on the CPU, in under a minute.

python examples/quickstart.py [--generations 40] [--output runs/example_quickstart]
"""

import argparse

import evoalign


def main() -> None:
    """Train, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=40)
    parser.add_argument("--output", default="runs/example_quickstart")
    arguments = parser.parse_args()

    result = evoalign.train(
        {
            "output_dir": arguments.output,
            "task": {  # 203 questions to train on, 16 a generation; 245 others to test on; all come with the package
                "name": "conciseness",
                "train_data": "data/tasks/conciseness/questions_train.json",
                "test_data": "data/tasks/conciseness/questions_test.json",
                "batch_size": 16,
            },
            "model": {"name": "tiny"},  # comes with the package; a folder or a Hugging Face name goes here as well
            "space": "lora",
            # Noise on one matrix of the last layer changes a manner of speaking, and not what the model knows.
            "lora": {"rank": 8, "alpha": 8, "target_layers": [3], "target_modules": ["down_proj"]},
            "es": {
                "num_generations": arguments.generations,
                "population_size": 32,
                "sigma": 0.025,
                "learning_rate": 0.0125,
                "antithetic": True,
            },
            "evaluation": {"max_tokens": 64},
        },
        overwrite=True,  # a run that is already there is renamed
    )

    # The run directory is all that `evaluate` needs.
    after = evoalign.evaluate(result.path, split="test")
    print(f"reward {result.before.measures['reward']:.1f} -> {after.measures['reward']:.1f}")
    print(f"the adapter is in {result.saved}; PEFT loads it")


if __name__ == "__main__":
    main()
