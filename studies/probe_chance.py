# SPDX-License-Identifier: Apache-2.0
"""How often does `evoalign probe` recommend a width where nothing can be learned, and where something can?

- `hash`: the reward is a bit of the SHA-256 of the text. Nothing that it pays for on one prompt says anything of
  another, and yet it is no noise: greedy decoding earns the same again. 64 questions, 32 members.
- `tools`: no model; scores as of tool calls as JSON (.25 for JSON, .25 for name and keys, .5 for values) on 64 prompts,
  most of which the noise leaves as they are. The effect of a direction is such that a generation at eta .5 raises the
  mean by .0047 with 128 members and 16 prompts, and twice the config's width breaks the model.
- `iid`, `two`: the same without such an effect; `two` on 2 prompts, with effects that persist on a prompt.
- `half`, `half_128`: the same with about half of that gain; `half_128` on 128 prompts (`--examples 128`).
- `concise`: configs/quickstart.yaml as it is. With `--train`, the run is trained as recommended, for `--shuffles`
  placebos (`evoalign.placebo`).
- `coin`: no model; the rewards are a coin's, of 5 % of the completions at the narrowest width and of all at the widest.
- `interval`: no model; how often the interval of the recommended width holds its true gain, on a fitness that is linear
  in the noise, different for each prompt, with separate noise in each score.

A line of JSON for each seed is written to --output as it is done; a second call continues.

    python studies/probe_chance.py hash --seeds 0-99
    python studies/probe_chance.py concise --seeds 0-19 --train
    python studies/probe_chance.py coin --seeds 0-399
    python studies/probe_chance.py interval --seeds 0-1999
    python studies/probe_chance.py tools --seeds 0-399      (and iid, two, half, half_128)
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from evoalign import placebo
from evoalign.config import EsConfig, load
from evoalign.preflight import probe as module
from evoalign.preflight.advice import ETA, Advice, Baseline, ProbeResult, Width, promising, recommend
from evoalign.preflight.probe import LADDER, probe
from evoalign.training.train import train

QUESTIONS = "data/tasks/conciseness/questions_train.json"
WIDTH = 0.01
MEMBERS, PROMPTS = 32, 64


def coin_of_text(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [float(hashlib.sha256(str(c).encode()).digest()[0] & 1) for c in completions]


def hashed(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    data = arguments.output / "prompts.jsonl"
    asked = [row["prompt"] for row in json.loads(Path(QUESTIONS).read_text())]
    data.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n" for text in asked))
    config = {
        "seed": seed,
        "space": "lora",
        "task": {"name": "custom", "train_data": str(data)},
        "model": {"name": "tiny"},
        "engine": {"threads": 1},
        "grader": {"isolated": False},
        "es": {"sigma": 0.02, "learning_rate": 0.01, "population_size": 32},
        "lora": {"rank": 1, "alpha": 1},
        "evaluation": {"max_tokens": 10},
    }
    return row_of(probe(config, reward=coin_of_text, members=MEMBERS, examples=PROMPTS))


def concise(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    folder = arguments.output / f"concise_seed_{seed}"
    data = [f"task.train_data={arguments.data}"] if arguments.data else []
    config = load(["configs/quickstart.yaml"], [f"seed={seed}", f"output_dir={folder}", *data])
    result = probe(config)
    row = row_of(result)
    if arguments.train and result.width is not None:
        changes = [f"es.{result.setting}={result.width}", f"es.learning_rate={result.learning_rate}"]
        config = load(["configs/quickstart.yaml"], [f"seed={seed}", f"output_dir={folder}", *data, *changes])
        with (arguments.output / f"concise_seed_{seed}.log").open("w") as log:
            train(config, overwrite=True, console=Console(file=log, width=160))
        row["placebo"] = placebo(folder, shuffles=arguments.shuffles).as_dict()["reward"]
    return row


def row_of(result: ProbeResult) -> dict[str, Any]:
    """Without the texts."""
    row = result.to_dict()
    return row | {"rungs": [{k: v for k, v in rung.items() if not k.endswith("_text")} for rung in row["rungs"]]}


def coin(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    base_P = (rng.random(PROMPTS) < 0.3).astype(float)

    def scores(width: float, pairs: int) -> Any:
        earned_MP = (rng.random((2 * pairs, PROMPTS)) < 0.3).astype(float)
        return np.where(rng.random((2 * pairs, PROMPTS)) < min(1.0, 0.8 * width), earned_MP, base_P)

    return outcome(*advised(lambda pairs: lambda width: scores(width, pairs), base_P))


def interval(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Score of member k on prompt p: width x (slope_k + slope_kp) + noise; what they share is worth the gain.

    The noise that an advantage has at one width is another at the next, and so is no part of the gain.
    """
    rng = np.random.default_rng(seed)

    def drawn(pairs: int) -> Callable[[float], Any]:
        slope_KP = rng.standard_normal((pairs, 1)) + rng.standard_normal((pairs, PROMPTS))

        def scores(width: float) -> Any:
            both = np.stack([slope_KP, -slope_KP], axis=1).reshape(2 * pairs, PROMPTS) * WIDTH * width
            return both + 0.1 * rng.standard_normal(both.shape)

        return scores

    advice, rungs = advised(drawn, np.zeros(PROMPTS))
    if advice.width is None or advice.gain_interval is None:
        return {"width": None}
    best = next(r for r in rungs if r.width == advice.width)
    true = ETA * (advice.width * WIDTH) ** 2 / best.spread - best.drift  # mean product of two advantages at this width
    low, high = advice.gain_interval
    return {"width": advice.width, "gain": true, "low": low, "high": high, "holds": low <= true <= high}


MARGINS = np.array([1.4, 1.0, 0.0])
"""Mean margins of the parts JSON, name and keys, values, each of standard deviation 1: 34 % are exact."""
COMMON, OWN, CHAOS, CURVE = 0.057, 0.15, 0.15, 0.15
"""Effects of noise of the config's width on a margin: of a direction on all prompts (a gain of .0047 by `evoalign`'s
formula), of a direction on one prompt, of anything else (it grows as the root of the width), and the loss."""
HALF = 0.039
"""A common effect of .47 of that gain, which grows as its square."""


def tools(seed: int, arguments: argparse.Namespace, common: float = COMMON, prompts: int = PROMPTS) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    margins_P3 = MARGINS + rng.standard_normal((prompts, 3))

    def paid(margins: Any) -> Any:
        first, second, third = np.moveaxis(margins > 0, -1, 0)
        return 0.25 * first + 0.25 * (first & second) + 0.5 * (first & second & third)

    def drawn(pairs: int) -> Callable[[float], Any]:
        effect_KP3 = common * rng.standard_normal((pairs, 1, 1)) + OWN * rng.standard_normal((pairs, prompts, 3))

        def scores(width: float) -> Any:
            both = np.stack([effect_KP3, -effect_KP3], axis=1).reshape(2 * pairs, prompts, 3) * width
            return paid(margins_P3 + both + CHAOS * width**0.5 * rng.standard_normal(both.shape) - CURVE * width**2)

        return scores

    return outcome(*advised(drawn, paid(margins_P3)))


def iid(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return tools(seed, arguments, common=0.0)


def two(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return tools(seed, arguments, common=0.0, prompts=2)


def half(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return tools(seed, arguments, common=HALF)


def half_128(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    return tools(seed, arguments, common=HALF, prompts=128)


def outcome(advice: Advice, rungs: Sequence[Width]) -> dict[str, Any]:
    chance = [rung.chance for rung in rungs if rung.chance is not None]
    return {"width": advice.width, "trial": advice.trial, "chance": min(chance, default=None)}


def advised(drawn: Callable[[int], Callable[[float], Any]], base_P: Any) -> tuple[Advice, tuple[Width, ...]]:
    """Return the recommendation for simulated scores, without broken texts, in the probe's two passes.

    `drawn` draws the effects of a number of pairs and returns their scores as a function of the width, in units of the
    config's.
    """
    base = Baseline(float(base_P.mean()), 0.0, 0.0, 0.0, np.inf, len(base_P))
    run = module.Training(EsConfig(sigma=WIDTH, population_size=128), 16, True)
    members = MEMBERS if len(base_P) >= PROMPTS else module.MOST_MEMBERS
    first, second = module.shares(len(LADDER), members)

    def made(members: int, widths: Sequence[float]) -> list[module.WidthScores]:
        scores = drawn(members // 2)
        return [module.WidthScores(WIDTH * k, scores(k), 1.0, 0.0, 0.0, ("",) * members) for k in widths]

    some = made(first, LADDER)
    rungs = module.widths_of(some, base_P, run)
    if (k := promising(rungs, base)) is not None:
        pair = made(second, LADDER[k - 1 : k + 1])
        again = module.widths_of(pair, base_P, run, module.lowest([*some, *pair]))
        rungs = (*rungs[: k - 1], *module.tested(again, pair, base, paired=True), *rungs[k + 1 :])
    return recommend(rungs, base), rungs


TRIALS: dict[str, Callable[[int, argparse.Namespace], dict[str, Any]]] = {
    "hash": hashed, "concise": concise, "coin": coin, "interval": interval, "tools": tools,
    "iid": iid, "two": two, "half": half, "half_128": half_128,
}  # fmt: skip


def seeds_of(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def summary(name: str, rows: list[dict[str, Any]]) -> None:
    widths = [row["width"] for row in rows]
    found = {width: widths.count(width) for width in sorted({w for w in widths if w is not None})}
    print(f"{name}: {len(rows)} seeds, a width recommended in {sum(w is not None for w in widths)}, "
          f"a trial offered in {sum(row.get('trial') is not None for row in rows)}; {found}")  # fmt: skip
    held = [row["holds"] for row in rows if "holds" in row]
    if held:
        print(f"the interval of the recommended width holds its gain in {np.mean(held):.1%} of {len(held)}")
    for row in rows:
        if "placebo" in row:
            p = row["placebo"]
            print(f"seed {row['seed']}: sigma {row['width']:g}, test reward {p['before']:.1f} -> {p['real']:.1f}; "
                  f"placebos {p['mean']:.1f} ({p['low']:.1f} to {p['high']:.1f}), {p['reached']} reach it")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("--seeds", default="0-19", help="such as 0-99 or 0,3,7")
    parser.add_argument("--data", default=None, help="of concise: other training questions")
    parser.add_argument("--train", action="store_true", help="of concise: train as recommended, and placebos")
    parser.add_argument("--shuffles", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_probe_chance"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.trial}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for seed in seeds_of(arguments.seeds):
        if seed not in {row["seed"] for row in rows}:
            rows.append({"seed": seed, **TRIALS[arguments.trial](seed, arguments)})
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    summary(arguments.trial, rows)


if __name__ == "__main__":
    main()
