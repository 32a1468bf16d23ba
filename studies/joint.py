# SPDX-License-Identifier: Apache-2.0
"""Joint search over weights and a setting, on a planted interaction: the setting that suits the base suits it no more.

The tiny model answers questions in a sentence, or, once trained to, in one word. A symbolic reader takes the answer
from the completion, and the setting `reader` says which: `sentence` reads the word after "is", which suits the base and
earns 0.5; `bare` reads the whole completion, which the base almost never gets right and a trained model often, and
earns 1; `first` and `last` word earn 0.3 and 0.4. Five methods have equal completions (6,144, grids included):

    joint        `task.settings`: members draw the reader, its logits move with the weights
    grid         the base is asked with each reader, then ES with the best one
    alternating  four times: the mean is asked with each reader, then a quarter of ES with the best one
    hybrid       the weights move by GRPO's gradient (on policy, one step a batch), the logits by the score function
    random       ES with a reader at random: two of eight seeds have each

ES trains a LoRA of one matrix, as in the demo, and the hybrid all weights. Learning rates are chosen with seeds of 100
and more, whose rows go to tuning.jsonl.

    python studies/joint.py --method joint     # appends to studies/results/joint/rows.jsonl
    python studies/joint.py --method hybrid --rate 0.5 --learning-rate 1e-4
    python studies/joint.py --table
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evoalign import evaluation, statistics
from evoalign.config import from_dict
from evoalign.config.joint import SettingConfig
from evoalign.evolve import evolve
from evoalign.models.origin import model_path
from evoalign.rundir.journal import Journal
from evoalign.setup import assemble
from evoalign.tasks import Split
from evoalign.tasks.joint import Settings
from evoalign.training import saving
from evoalign.types import Update, population

ROWS = Path(__file__).resolve().parent / "results" / "joint" / "rows.jsonl"
TUNING = ROWS.with_name("tuning.jsonl")
"""Rows of other seeds, by which the learning rates were chosen."""
DATA = "data/tasks/conciseness/questions_{}.json"
READERS = ["sentence", "bare", "first", "last"]
WORTH = {"sentence": 0.5, "bare": 1.0, "first": 0.3, "last": 0.4}
GENERATIONS, MEMBERS, QUESTIONS, TOKENS = 24, 32, 8, 10
GRID = 25
"""Training questions that each reader is tried on: five grids of an alternating run are two generations."""
GRPO = {"group": 8, "temperature": 1.0}


def read(text: str, reader: str) -> str:
    """Return the answer that a reader takes from a completion."""
    words = re.findall(r"[\w']+", text)
    if reader == "sentence":
        found = re.search(r"\bis ([\w']+)", text)
        return found[1] if found else ""
    return text if reader == "bare" else "" if not words else words[0 if reader == "first" else -1]


def worth(text: str, example: Mapping[str, Any]) -> float:
    """Return what the reader earns if the answer that it reads is right."""
    right = read(text, example["reader"]).strip().lower() == str(example["target"]).lower()
    return WORTH[example["reader"]] * right


def tree(output: Path, seed: int, readers: Sequence[str], generations: int, **es: Any) -> dict[str, Any]:
    """Return the config of ES: that of the demo, with shorter completions and `readers` as options."""
    return {
        "output_dir": str(output), "seed": seed, "report": False,
        "task": {"name": "custom", "train_data": DATA.format("train"), "test_data": DATA.format("test"),
                 "batch_size": QUESTIONS, "prompt": "chat", "settings": {"reader": list(readers)}},
        "lora": {"rank": 8, "alpha": 8, "target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": generations, "population_size": MEMBERS, "sigma": 0.025, "antithetic": True, **es},
        "engine": {"threads": 1}, "evaluation": {"max_tokens": TOKENS}, "grader": {"isolated": False},
        "checkpoint": {"every": 0},
        "checks": {"control_every": 0, "canary_every": 0, "perplexity": False, "placebo": 0},
    }  # fmt: skip


class Rates(NamedTuple):
    """Learning rates, of the logits and of the weights."""

    settings: float
    weights: float


class Search:
    """One run of ES in phases: a mean, its journal, and the generations so far."""

    def __init__(self, folder: Path, seed: int, rates: Rates) -> None:
        own = {"settings_learning_rate": rates.settings, "learning_rate": rates.weights}
        config = from_dict(tree(folder, seed, READERS, GENERATIONS, **own))
        self.parts, self.done = assemble(config, reward=worth), 0
        self.journal = Journal(folder / "journal.jsonl", saving.header(self.parts, "reward"))
        self.path: list[float] = []

    def grid(self, questions: int) -> str:
        """Return the reader that suits the mean best on the first training questions."""
        return max(READERS, key=lambda reader: self.reward("train", reader, questions))

    def reward(self, split: Split, reader: str, questions: int | None = None) -> float:
        """Return the mean's reward with a reader."""
        parts = self.parts
        rows = parts.settings.under(parts.data.of(split), READERS.index(reader))[:questions]
        return evaluation.evaluate(parts.engine, parts.tokens, parts.task, rows, parts.config.evaluation).measures[
            "reward"
        ]

    def train(self, generations: int, reader: str | None = None) -> None:
        """Train with one reader; None: it is searched too."""
        run = self.parts.run(self.journal)
        if reader is not None:
            run = replace(run, settings=Settings({"reader": SettingConfig(categorical=[reader])}))
        self.done += generations
        es = run.config.es.model_copy(update={"num_generations": self.done})
        run = replace(run, config=run.config.model_copy(update={"es_": es}))
        for _ in evolve(run, self.done - generations):
            if reader is None:
                self.path.append(round(run.settings.probabilities("reader")[READERS.index("bare")], 4))

    def ended(self, reader: str) -> dict[str, Any]:
        """Return the row of the mean on the test split."""
        row = {"reward": self.reward("test", reader), "reader": reader}
        self.journal.close()
        self.parts.close()
        return row


def joint(folder: Path, seed: int, rates: Rates) -> dict[str, Any]:
    """Search both together."""
    search = Search(folder, seed, rates)
    search.train(GENERATIONS)
    return {**search.ended(READERS[search.parts.settings.mode()]), "bare": search.path}


def grid_then_es(folder: Path, seed: int, rates: Rates) -> dict[str, Any]:
    """Choose the reader by the base, for two generations' completions, then train."""
    search = Search(folder, seed, rates)
    reader = search.grid(2 * MEMBERS * QUESTIONS // len(READERS))
    search.train(GENERATIONS - 2, reader)
    return search.ended(reader)


def alternating(folder: Path, seed: int, rates: Rates) -> dict[str, Any]:
    """Choose the reader and train in turn; choose once more at the end."""
    search, readers = Search(folder, seed, rates), list[str]()
    for generations in (5, 5, 6, 6):
        readers.append(search.grid(GRID))
        search.train(generations, readers[-1])
    readers.append(search.grid(GRID))
    return {**search.ended(readers[-1]), "readers": readers}


def at_random(folder: Path, seed: int, rates: Rates) -> dict[str, Any]:
    """Train with a reader at random: two seeds in eight have each."""
    search, reader = Search(folder, seed, rates), READERS[seed % len(READERS)]
    search.train(GENERATIONS, reader)
    return search.ended(reader)


def hybrid(folder: Path, seed: int, rates: Rates) -> dict[str, Any]:
    """Move the weights by GRPO's gradient and the reader by the score function of its groups' rewards.

    Each prompt group draws a reader. GRPO's ratio is 1, as each batch is used once: the loss is -A log p per token.
    """
    from transformers import AutoModelForCausalLM

    parts = assemble(from_dict(tree(folder, seed, READERS, 1, learning_rate=rates.weights)), reward=worth)
    tokens, rows, task = parts.tokens, parts.data.train, parts.task
    model = AutoModelForCausalLM.from_pretrained(model_path(parts.config.model), dtype=torch.float32)
    settings = Settings({"reader": SettingConfig(categorical=list(READERS))}, seed, rates.settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates.weights, weight_decay=0.0)
    torch.manual_seed(seed)
    group, drawn, path = int(GRPO["group"]), random.Random(seed), list[float]()
    for step in range(GENERATIONS):
        chosen = [drawn.randrange(len(rows)) for _ in range(MEMBERS * QUESTIONS // group)]
        members = population(len(chosen))
        numbers = settings.draw(step, members)
        asked = [settings.under(rows, n)[i] for i, n in zip(chosen, numbers, strict=True)]
        prompts = [tokens.encode(task.prompt(row)) for row in asked for _ in range(group)]
        ids, mask, texts, start = sampled(model, tokens, prompts, GRPO["temperature"])
        rewards = torch.tensor([worth(t.strip(), asked[i // group]) for i, t in enumerate(texts)]).view(-1, group)
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        kept = ids.shape[1] - start + 1
        logits = model(input_ids=ids, attention_mask=mask[0], logits_to_keep=kept).logits[:, :-1] / GRPO["temperature"]
        logp = logits.log_softmax(-1).gather(2, ids[:, start:, None])[..., 0]
        loss = -(advantage * logp * mask[1]).sum() / mask[1].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        of_group = rewards.double().mean(1)
        c = (of_group - of_group.mean()) / (of_group.std(correction=0) + 1e-8)
        settings.move(Update(step, step, members, tuple(c.tolist()), 1.0, 1.0))
        path.append(round(settings.probabilities("reader")[READERS.index("bare")], 4))
    test = settings.under(parts.data.test, settings.mode())
    prompts = [tokens.encode(task.prompt(row)) for row in test]
    _, _, texts, _ = sampled(model, tokens, prompts, 0.0)
    parts.close()
    reward = sum(worth(t.strip(), row) for t, row in zip(texts, test, strict=True)) / len(test)
    return {"reward": reward, "reader": READERS[settings.mode()], "bare": path}


@torch.no_grad()
def sampled(model: Any, tokens: Any, prompts: Sequence[Sequence[int]], temperature: float) -> Any:
    """Return ids, the masks of attention and of the completions, texts, and where the completions start."""
    start = max(map(len, prompts))
    left = torch.tensor([[tokens.pad_id] * (start - len(p)) + [*p] for p in prompts])
    seen = torch.tensor([[0] * (start - len(p)) + [1] * len(p) for p in prompts])
    how: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    ids = model.generate(
        left, attention_mask=seen, max_new_tokens=TOKENS, pad_token_id=tokens.pad_id,
        eos_token_id=list(tokens.stop_ids), **({"do_sample": False} | how),
    )  # fmt: skip
    ends = torch.isin(ids[:, start:], torch.tensor(list(tokens.stop_ids)))
    own = ((ends.cumsum(1) - ends.long()) == 0).long()  # up to the first stop token, and that one
    texts = [tokens.decode(row[m.bool()].tolist()) for row, m in zip(ids[:, start:], own, strict=True)]
    return ids, (torch.cat([seen, own], 1), own), texts, start


def table() -> str:
    """Return the table of the rows: the mean over seeds with its 95 % interval, and that of joint less each."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    by = {m: {r["seed"]: r for r in rows if r["method"] == m} for m in dict.fromkeys(r["method"] for r in rows)}
    lines = [
        "| method | seeds | test reward (95 % interval) | ended with bare | joint less it |",
        "|---|---|---|---|---|",
    ]
    for method, found in by.items():
        estimate = statistics.mean([r["reward"] for r in found.values()])
        bare = sum(r["reader"] == "bare" for r in found.values())
        seeds = sorted(found.keys() & by["joint"].keys())
        less = statistics.paired([found[s]["reward"] for s in seeds], [by["joint"][s]["reward"] for s in seeds])
        apart = "" if method == "joint" else f"{less.mean:+.3f} ({_between(less)})"
        cells = (method, len(found), f"{estimate.mean:.3f} ({_between(estimate)})", f"{bare} of {len(found)}", apart)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _between(found: statistics.Estimate) -> str:
    return "no interval" if found.low is None else f"{found.low:.3f} to {found.high:.3f}"


METHODS: dict[str, Callable[[Path, int, Rates], dict[str, Any]]] = {
    "joint": joint, "grid": grid_then_es, "alternating": alternating, "hybrid": hybrid, "random": at_random,
}  # fmt: skip


def main() -> None:
    """Run one method for some seeds, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--rate", type=float, default=1.0, help="learning rate of the logits")
    parser.add_argument("--learning-rate", type=float, default=0.025, help="of ES, or of GRPO's AdamW")
    parser.add_argument("--label", help="name of the rows; default: the method")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        print(table())
        return
    torch.set_num_threads(1)
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    for seed in chosen.seeds:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            run = METHODS[chosen.method](Path(folder), seed, Rates(chosen.rate, chosen.learning_rate))
        row = {"method": chosen.label or chosen.method, "seed": seed, **run}
        row |= {"seconds": round(time.monotonic() - began, 1)}
        with (ROWS if seed < 100 else TUNING).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
