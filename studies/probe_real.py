# SPDX-License-Identifier: Apache-2.0
"""Does training with what `evoalign probe` recommends on a real model end readable? Three rewards, each in each space.

For SmolLM2-135M-Instruct (`recipes/smollm2`), or another model with a chat template:

- `five`: answer "What is ...?" in five words: -|words - 5| / 5;
- `concise`: the task `conciseness` with `prompt: chat`, on questions of one-word answers: -|length - length of target|;
- `sums`: two-digit + and -: 1 where the last number of the answer is right, else 0.

Each is probed; where a width is recommended, a run is trained with it, all else unchanged. Writes a line to
`rows.jsonl` for each: the whole probe, the reward of the test split before and after, the shares of empty, broken and
cut-off answers and of those with a literal special token or letters that are not Latin, and every answer, so that a
reader can judge, and what shuffled coefficients come to (`evoalign.placebo`). A run is left in its folder. Nothing is
downloaded; a second call continues with the rows that are missing.

    python studies/probe_real.py .cache/smollm2 --device cuda
    python studies/probe_real.py .cache/smollm2 --rewards five --spaces lora --generations 2 --population 4 \\
        --members 4 --examples 6 --test 4 --tokens 8 --sigmas 0.004 0.008 0.016           (a small one, on a CPU)
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from evoalign import placebo
from evoalign.checks import hacking
from evoalign.evaluation import Evaluation
from evoalign.preflight.advice import ProbeResult, lines, table, texts
from evoalign.preflight.probe import probe
from evoalign.rundir.identity import versions
from evoalign.training.train import train

TRAIN = 32
THINGS = """
the sun, a river, music, bread, a computer, snow, the moon, a mountain, a book, a dog, rain, a car, gold,
love, a tree, an island, cheese, a bridge, a clock, fire, a planet, sleep, a school, salt, a horse, a song, a
garden, iron, a lake, a doctor, paper, wind, a cloud, a city, coffee, a bird, glass, a poem, a train, winter,
honey, a castle, a farmer, sugar, a desert, a window, light, a ship, wool, a forest, tea, a teacher, a shadow,
silver, a fish, a dream, milk, a road, history, a cat, steam, a star, chess, a map, wood, a king, rice, a
flower, thunder, a village, a pencil, oil, a bee, a market, ice, a dictionary, sand, a nurse, a lamp,
friendship, a valley, leather, a spider, democracy, a violin, an apple, fog, a museum, cotton, a baker, a
volcano, copper, a letter, a camel, dust, a judge
"""
CAPITALS = """
Japan:Tokyo France:Paris Italy:Rome Spain:Madrid Germany:Berlin Egypt:Cairo Canada:Ottawa Russia:Moscow
China:Beijing Greece:Athens Poland:Warsaw Norway:Oslo Sweden:Stockholm Austria:Vienna Portugal:Lisbon
Ireland:Dublin Cuba:Havana Peru:Lima Kenya:Nairobi Turkey:Ankara Hungary:Budapest Finland:Helsinki
Chile:Santiago Denmark:Copenhagen Belgium:Brussels Bulgaria:Sofia Croatia:Zagreb Iran:Tehran Iraq:Baghdad
Thailand:Bangkok Ukraine:Kyiv Romania:Bucharest
"""
OPPOSITES = """
hot:cold big:small up:down left:right day:night young:old fast:slow happy:sad rich:poor open:closed early:late
hard:soft wet:dry light:dark strong:weak high:low full:empty clean:dirty near:far first:last buy:sell push:pull
win:lose begin:end inside:outside always:never above:below love:hate wide:narrow thick:thin loud:quiet
true:false
"""
NOT_LATIN = 0.2
"""Least share of letters of another script for a completion to count as such."""


def five_words(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [-abs(len(_said(c).split()) - 5) / 5 for c in completions]


def right_sum(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    found = [re.findall(r"-?\d+", _said(c).replace(",", "")) for c in completions]
    return [float(bool(numbers) and numbers[-1] == gold) for numbers, gold in zip(found, answer, strict=True)]


def _said(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def rows_of(reward: str, count: int) -> list[dict[str, Any]]:
    """Questions of a reward, `count` at most, in a fixed random order: those of one seed are another's."""
    if reward == "five":
        found: list[dict[str, Any]] = [_asked(f"What is {thing}?") for thing in " ".join(THINGS.split()).split(", ")]
    elif reward == "concise":
        pairs = [pair.split(":") for pair in CAPITALS.split()]
        found = [{"prompt": f"What is the capital of {place}?", "target": city} for place, city in pairs]
        pairs = [pair.split(":") for pair in OPPOSITES.split()]
        found += [{"prompt": f"What is the opposite of {word}?", "target": other} for word, other in pairs]
        found += [
            {"prompt": f"What is {a} times {b}?", "target": str(a * b)} for a in range(2, 6) for b in range(2, 10)
        ]
    else:
        sums = random.Random(1).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
        found = [_sum(a, b, "+-"[i % 2]) for i, (a, b) in enumerate(sums)]
    random.Random(0).shuffle(found)
    return found[:count]


def _asked(question: str, **columns: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], **columns}


def _sum(a: int, b: int, sign: str) -> dict[str, Any]:
    return _asked(f"What is {a} {sign} {b}? Reply with only the number.", answer=str(a + b if sign == "+" else a - b))


def config_of(arguments: argparse.Namespace, reward: str, space: str) -> dict[str, Any]:
    """Everything but sigma and learning rate, which the probe has to find: those here are only where it looks."""
    rows = rows_of(reward, TRAIN + arguments.test)
    train_data, test_data = (arguments.output / f"{reward}_{split}.json" for split in ("train", "test"))
    for path, part in ((train_data, rows[:TRAIN]), (test_data, rows[TRAIN:])):
        path.write_text(json.dumps(part, indent=1) + "\n")
    task = {"name": "conciseness", "prompt": "chat"} if reward == "concise" else {"name": "custom"}
    return {
        "output_dir": str(arguments.output / f"{reward}_{space}_seed_{arguments.seed}"),
        "seed": arguments.seed,
        "space": space,
        "task": {**task, "train_data": str(train_data), "test_data": str(test_data), "batch_size": arguments.batch},
        "model": {"name": str(arguments.model)},
        "engine": {"name": "transformers", "device": arguments.device}
        | ({"threads": arguments.threads} if arguments.threads else {}),
        "grader": {"isolated": False},
        "es": {
            "sigma": arguments.sigma,
            "learning_rate": arguments.sigma / 2,
            "num_generations": arguments.generations,
            "population_size": arguments.population,
            "antithetic": True,
        },
        "sampling": {"max_tokens": arguments.tokens},
        "evaluation": {"max_tokens": arguments.tokens, "every": 0},
        "checkpoint": {"every": 0},
    }


def shares(said: Sequence[str], reasons: Sequence[str], special: Sequence[str]) -> dict[str, float]:
    """Return the shares of unusable completions; `broken` is the probe's own sign."""
    count = len(said)
    return {
        "empty": sum(not text.strip() for text in said) / count,
        "broken": sum(hacking.is_degenerate(text) for text in said) / count,
        "cut_off": sum(reason == "length" for reason in reasons) / count,
        "special": sum(any(token in text for token in special) for text in said) / count,
        "not_latin": sum(_is_other_script(text) for text in said) / count,
    }


def _is_other_script(text: str) -> bool:
    letters = [c for c in text if c.isalpha()]
    other = sum("LATIN" not in unicodedata.name(c, "") for c in letters)
    return bool(letters) and other >= NOT_LATIN * len(letters)


def _evaluated(result: Evaluation, special: Sequence[str]) -> dict[str, Any]:
    said = [c.text for c in result.completions]
    found = shares(said, [c.finish_reason for c in result.completions], special)
    answers = [{"prompt": c.prompt, "target": c.target, "text": c.text, "reward": c.reward} for c in result.completions]
    return {"reward": result.measures["reward"], "shares": found, "answers": answers}


def special_tokens(model: Path) -> list[str]:
    """As texts that end up in an answer are written."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    return [str(token) for token in tokenizer.all_special_tokens if len(str(token)) > 2]


def measured(arguments: argparse.Namespace, reward: str, space: str, special: Sequence[str]) -> dict[str, Any]:
    """One row: the probe, and the run where there is something to train with."""
    config = config_of(arguments, reward, space)
    function = {"five": five_words, "sums": right_sum, "concise": None}[reward]
    began = time.perf_counter()
    result = probe(config, reward=function, sigmas=arguments.sigmas, members=arguments.members,
                   examples=arguments.examples, on_step=lambda step: print(f"  {step}", flush=True))  # fmt: skip
    seconds = time.perf_counter() - began
    _show(reward, space, result, seconds)
    row: dict[str, Any] = {
        "reward": reward, "space": space, "seed": arguments.seed, "seconds_probe": round(seconds, 1),
        "recommended": result.width, "learning_rate": result.learning_rate, "probe": result.to_dict(), "run": None,
    }  # fmt: skip
    if result.width is None:
        return row
    config["es"] |= {"sigma": result.width, "learning_rate": result.learning_rate}
    began = time.perf_counter()
    with (arguments.output / f"{reward}_{space}_seed_{arguments.seed}.log").open("w") as log:
        run = train(config, reward=function, overwrite=True, console=Console(file=log, width=160))
    row["run"] = {
        "folder": run.path.name,
        "generations": arguments.generations,
        "seconds": round(time.perf_counter() - began, 1),
        "before": _evaluated(run.before, special),
        "after": _evaluated(run.after, special),
    }
    _show_run(row["run"])
    if arguments.shuffles:
        found = placebo(run.path, reward=function, shuffles=arguments.shuffles)
        row["run"]["placebo"] = found.as_dict()
        print("\n".join(found.lines()), flush=True)
    return row


def _show(reward: str, space: str, result: ProbeResult, seconds: float) -> None:
    print(f"\n## {reward}, {space}: {result.completions:,} completions, {seconds:.0f} s", flush=True)
    console = Console(width=200)
    console.print(texts(result))
    console.print(table(result))
    print("\n".join(lines(result)), flush=True)


def _show_run(run: dict[str, Any]) -> None:
    before, after = run["before"], run["after"]
    print(f"test reward {before['reward']:.4g} -> {after['reward']:.4g}, {run['seconds']:.0f} s")
    for name, part in (("before", before), ("after", after)):
        print(f"  {name}: " + ", ".join(f"{share} {value:.1%}" for share, value in part["shares"].items()))
    for old, new in list(zip(before["answers"], after["answers"], strict=True))[:12]:
        print(f"  {old['prompt']!r}: {old['text'][:80]!r} -> {new['text'][:80]!r} ({new['reward']:g})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder of a model with a chat template")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rewards", nargs="+", default=["five", "concise", "sums"])
    parser.add_argument("--spaces", nargs="+", default=["lora", "lowrank"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sigma", type=float, default=0.008, help="the ladder is 1/16 to 16 times this")
    parser.add_argument("--sigmas", type=float, nargs="+", default=None, help="of the probe, instead of that ladder")
    parser.add_argument("--members", type=int, default=None, help="of the probe; its own default")
    parser.add_argument("--examples", type=int, default=64, help="of the probe")
    parser.add_argument("--generations", type=int, default=60)
    parser.add_argument("--population", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--test", type=int, default=64, help="questions of the test split")
    parser.add_argument("--shuffles", type=int, default=20, help="placebos of each run")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_probe_real"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(f"{arguments.model.name}: {versions()}")
    rows = arguments.output / "rows.jsonl"
    there = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    done = {(row["reward"], row["space"], row["seed"]) for row in there}
    special = special_tokens(arguments.model)
    for reward in arguments.rewards:
        for space in arguments.spaces:
            if (reward, space, arguments.seed) not in done:
                row = measured(arguments, reward, space, special)
                with rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
