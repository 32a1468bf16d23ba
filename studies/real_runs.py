# SPDX-License-Identifier: Apache-2.0
"""Runs on a real language model, some that end well and some that break it: test cases for alarms and the probe.

    python recipes/smollm2/get.py --to MODEL
    python studies/real_runs.py FOLDER --model MODEL [--only NAME,NAME] [--jobs 8] [--device cuda]

makes a run directory each below FOLDER (finished ones are left as they are), with the completions of the test
split and `all.jsonl.gz`, the completions of every member of every generation. `python studies/real_runs.py FOLDER
--show` prints the test split's completions to be read.

The first six are those of a user's first evening with the tool: two rewards for the number of words and of characters,
at widths from one that breaks the model to one that hardly moves it. The others have other rewards, spaces, widths and
lengths. Whether a run ended healthy or broken was judged by reading, before any alarm was tuned: see
results/real_runs/labels.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REWARDS = HERE / "real_rewards.py"
TRAIN, TEST = 48, 32
WORDS: dict[str, Any] = json.loads((HERE / "real_words.json").read_text(encoding="utf-8"))

Rows = list[dict[str, Any]]


def rows_of(task: str, count: int = TRAIN + TEST) -> Rows:
    """Return this many prompts in a fixed order, without repeats, with answers if there are any."""
    rng = random.Random(f"real runs {task}")
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        row = _row(task, rng, len(found))
        found.setdefault(row["prompt"], row)
    rows = list(found.values())
    rng.shuffle(rows)
    return rows


def _row(task: str, rng: random.Random, index: int) -> dict[str, Any]:
    topic = WORDS["topics"][index % len(WORDS["topics"])]
    if task == "arithmetic":
        a, b, plus = rng.randint(10, 99), rng.randint(10, 99), rng.random() < 0.5
        prompt = f"What is {a} {'+' if plus else '-'} {b}? Reply with only the number."
        return {"prompt": prompt, "answer": str(a + b if plus else a - b)}
    if task == "capitals":
        land, city = list(WORDS["capitals"].items())[index]
        return {"prompt": f"What is the capital of {land}?", "answer": city}
    if task == "sentiment":
        good = rng.random() < 0.5
        words = rng.sample(WORDS["good" if good else "bad"], 2)
        review = f"{rng.choice(WORDS['things'])} was {words[0]} and {words[1]}."
        asked = "Is the sentiment of this review positive or negative? Answer with one word."
        return {"prompt": f"{asked}\n\n{review}", "answer": "positive" if good else "negative"}
    if task == "json":
        name, age, city = rng.choice(WORDS["names"]), rng.randint(18, 80), rng.choice(list(WORDS["capitals"].values()))
        asked = 'Extract the name, age and city as JSON with the keys "name", "age" and "city". Output only JSON.'
        gold = json.dumps({"name": name, "age": age, "city": city})
        return {"prompt": f"{asked}\n\n{name} is {age} years old and lives in {city}.", "answer": gold}
    asked = {
        "five": "Describe {t} in five words.",
        "silver": 'Write one sentence about {t} that has the word "silver" in it.',
        "capitals_few": "Write one sentence about {t}. Use only lowercase letters.",
        "no_e": 'Write one sentence about {t} without the letter "e".',
        "topic": "Write one or two sentences about {t}.",
    }[task]
    return {"prompt": asked.format(t=topic)}


def _custom(task: str, reward: str, tokens: int = 48, batch: int | None = 12) -> dict[str, Any]:
    return {
        "task": {"name": "custom", "prompt": "chat", "rewards": [f"{REWARDS}:{reward}"], "batch_size": batch},
        "data": task,
        "sampling": {"max_tokens": tokens},
    }


FIVE = _custom("five", "five_words", 40)
CONCISE: dict[str, Any] = {"task": {"name": "conciseness", "prompt": "chat"}, "sampling": {"max_tokens": 60}}
ARITHMETIC = _custom("arithmetic", "last_number", 24, 16)
SILVER, LOWER, NO_E = (
    _custom("silver", "has_silver"),
    _custom("capitals_few", "few_capitals"),
    _custom("no_e", "words_without_e"),
)
BRIEF, LONG, EXCLAIM = _custom("topic", "brief"), _custom("topic", "long", 64), _custom("topic", "exclaim")
SENTIMENT, JSON = _custom("sentiment", "sentiment", 16, 16), _custom("json", "as_json", 40)
CAPITAL = _custom("capitals", "as_long_as_gold", 40, 16)


def _es(sigma: float, rate: float, members: int, generations: int, **more: Any) -> dict[str, Any]:
    es = {"sigma": sigma, "learning_rate": rate, "population_size": members, "num_generations": generations}
    return {"es": es | more}


def _lora(rank: int = 1, **more: Any) -> dict[str, Any]:
    return {"space": "lora", "lora": {"rank": rank, "alpha": 2 * rank} | more}


LOWRANK, FULL = {"space": "lowrank"}, {"space": "full"}
SMALL = {"train": 6, "test": 8}
DOWN = {"target_modules": ["down_proj"], "target_layers": [26, 27, 28, 29]}
SETTINGS: dict[str, dict[str, Any]] = {
    # The six: few prompts, few generations.
    "five_probed": FIVE | _lora() | _es(0.03, 0.015, 12, 16) | SMALL,
    "five_b": FIVE | _lora() | _es(0.01, 0.01, 12, 16) | SMALL,
    "five_rank8": FIVE | _lora(8, **DOWN) | _es(0.02, 0.02, 12, 16) | SMALL,
    "five_e": FIVE | _lora() | _es(0.004, 0.004, 12, 16) | SMALL,
    "concise": CONCISE | _lora() | _es(0.02, 0.01, 20, 16),
    "concise2": CONCISE | _lora() | _es(0.006, 0.006, 20, 16),
    # Our own.
    "arithmetic_lowrank": ARITHMETIC | LOWRANK | _es(0.012, 0.006, 128, 30, shaping="centered"),
    "arithmetic_wide": ARITHMETIC | LOWRANK | _es(0.03, 0.03, 32, 20),
    "arithmetic_lora": ARITHMETIC | _lora() | _es(0.01, 0.01, 32, 30),
    "silver_narrow": SILVER | _lora() | _es(0.005, 0.0025, 32, 25),
    "silver_wide": SILVER | _lora() | _es(0.025, 0.025, 24, 20),
    "lower_lowrank": LOWER | LOWRANK | _es(0.006, 0.003, 32, 30),
    "lower_wide": LOWER | _lora() | _es(0.02, 0.02, 24, 25),
    "no_e_lora": NO_E | _lora() | _es(0.006, 0.006, 32, 30),
    "no_e_wide": NO_E | LOWRANK | _es(0.015, 0.015, 32, 20),
    "brief_short": BRIEF | _lora() | _es(0.004, 0.004, 24, 12),
    "brief_long": BRIEF | _lora() | _es(0.012, 0.012, 24, 30),
    "long_narrow": LONG | _lora() | _es(0.006, 0.003, 32, 25),
    "long_wide": LONG | LOWRANK | _es(0.014, 0.014, 32, 30),
    "sentiment_narrow": SENTIMENT | _lora() | _es(0.006, 0.003, 32, 25, antithetic=True),
    "sentiment_wide": SENTIMENT | _lora() | _es(0.02, 0.02, 32, 25),
    "json_lowrank": JSON | LOWRANK | _es(0.006, 0.003, 32, 15, antithetic=True),
    "json_wide": JSON | _lora() | _es(0.015, 0.015, 32, 25),
    "exclaim": EXCLAIM | _lora() | _es(0.008, 0.008, 24, 15),
    "five_full": FIVE | FULL | _es(0.002, 0.002, 12, 4),
    "capitals_lowrank": CAPITAL | LOWRANK | _es(0.004, 0.002, 32, 15, antithetic=True),
    # Enough questions to tell signal from drift; not one of the 26 that are labelled.
    "sentiment_signal": SENTIMENT | _lora() | _es(0.006, 0.003, 32, 25, antithetic=True) | {"test": 200},
}


def config_of(name: str, folder: Path, model: str, device: str) -> dict[str, Any]:
    """The config of one of them, its data written below the folder."""
    tree = {key: value for key, value in SETTINGS[name].items() if key not in ("data", "train", "test")}
    task = dict(tree["task"])
    if "data" in SETTINGS[name]:
        train, test = SETTINGS[name].get("train", TRAIN), SETTINGS[name].get("test", TEST)
        rows = rows_of(SETTINGS[name]["data"], TRAIN + max(test, TEST))
        for split, part in (("train", rows[:train]), ("test", rows[TRAIN : TRAIN + test])):
            file = folder / "data" / f"{name}_{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
            task[f"{split}_data"] = str(file)
        if task["batch_size"] is not None and task["batch_size"] >= train:
            del task["batch_size"]
    return tree | {
        "output_dir": str(folder / name),
        "task": task,
        "model": {"name": model, "dtype": "bfloat16"},
        "engine": {"name": "transformers", "device": device},
        "grader": {"isolated": False},
        "checks": {"control_every": 5, "canary_every": 0},
        "tracking": {"completions_every": 0},
    }


def make(name: str, folder: Path, model: str, device: str) -> None:
    """One run, and all its members' completions."""
    import torch
    from rich.console import Console

    from evoalign.training.train import train
    from evoalign.types import Generation

    torch.set_num_threads(1)
    config, began = config_of(name, folder, model, device), time.perf_counter()
    aside = folder / f"{name}.all.jsonl.gz"
    with gzip.open(aside, "wt", encoding="utf-8") as out, (folder / f"{name}.log").open("w", encoding="utf-8") as log:

        def keep(generation: Generation) -> None:
            for r in generation.rollouts:
                row = {"generation": generation.index, "member": r.member.index, "example": generation.rows[r.request]}
                score = generation.scores_MP[r.member.index][r.request]
                more = {"text": r.text, "finish_reason": r.finish_reason, "tokens": len(r.token_ids), "score": score}
                out.write(json.dumps(row | more) + "\n")

        train(config, on_generation=keep, overwrite=True, console=Console(file=log, width=160))
    aside.rename(folder / name / "all.jsonl.gz")
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def texts(run: Path) -> Iterator[tuple[str, str | None, str, str, float, float]]:
    """Prompt, target, completion before and after, reward before and after, of each row of the test split."""
    from evoalign.rundir import parquet

    before, after = (parquet.read(run / "results" / "completions" / f"{n}.parquet") for n in ("before", "after"))
    for b, a in zip(before, after, strict=True):
        yield a["prompt"], a["target"], b["text"], a["text"], b["reward"], a["reward"]


def show(folder: Path, names: list[str]) -> None:
    """Print the completions to read."""
    for name in names:
        if not (folder / name / "results" / "evaluation.json").is_file():
            print(f"=== {name}: not there")
            continue
        rows = list(texts(folder / name))
        before, after = (sum(rewards) / len(rows) for rewards in zip(*((row[4], row[5]) for row in rows), strict=True))
        print(f"=== {name}: reward {before:.3f} -> {after:.3f}")
        for i, (prompt, _, was, now, _, earned) in enumerate(rows):
            print(f"  [{i}] {prompt[-60:]!r}\n      was {was[:70]!r}\n      now {now[:160]!r}  {earned:.2f}")


def main() -> None:
    """Read the arguments and run each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    names = args.only.split(",") if args.only else list(SETTINGS)
    if args.show:
        show(folder, names)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if len(names) == 1:
        make(names[0], folder, args.model, args.device)
        return
    left = [name for name in names if not (folder / name / "all.jsonl.gz").exists()]

    def apart(name: str) -> None:
        words = [sys.executable, __file__, str(folder), "--model", args.model, "--only", name, "--device", args.device]
        if subprocess.run(words, check=False).returncode:
            print(f"{name} failed; see its log", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(apart, left))


if __name__ == "__main__":
    main()
