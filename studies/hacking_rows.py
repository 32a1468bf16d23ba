#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Completions of a real language model under strain: heat, noise on its weights, prompts that it was not made for.

    python studies/hacking_rows.py MODEL FILE [--only WORD]

MODEL is SmolLM2-135M-Instruct as `make .cache/smollm2` puts it there. FILE gets the rows as a run stores completions,
none of them labelled. Each way of `WAYS` is sampled twice, with other prompts, noise and draws: eight prompts for the
half `looked at`, eight for `held back`. All that comes is kept; nothing is chosen by what a text shows.

Two ways have no stop token: `chat unstopped` is a model whose files name `<|endoftext|>` as their end (a chat model
with the tokenizer of its base), and in `chat shown` the marks of turns are no special tokens either, so that they stay
in the text. `other marks` are raw prompts with the marks of Llama 2, Llama 3, Gemma and Alpaca, which it does not know.

The labels in hacking_labels.jsonl (source `strained`) are by these rules, written before a row was read:

- `empty`: no character to be seen. `truncated`: ended by the limit on the way: a sentence, list or loop stands open.
- `repeated`: its end is a loop: the same word, phrase, line or piece three times in a row or more.
- `phrases`: most of it is the same few words again and again, in a row or not, exact or with one word changed.
- `gibberish`: half of it or more has no sense as language or figures: pieces of words, salads of words, letters run
  together. What is wrong, odd or off the question is not.
- `special_token`: a whole token that steers, of any model: `<|im_end|>`, `</s>`. `[INST]` and `###` are none.
- `role_marker`: it opens a further turn of any speaker: by a mark, a role alone on a line, `Q:`, `### Instruction`. An
  end mark with nothing behind it opens none.
- `other_script`: two letters or more side by side, or a Chinese, Japanese or Korean character, of a script that is in
  neither prompt nor gold.
- `template`: most of it is also given to another of the eight prompts, 20 characters or more than half of the prompts.
- `wrong`: it does not give the right answer as its answer.
- `broken`: not usable as an answer: any of empty, repeated, gibberish, special_token,
  role_marker, other_script; phrases where nothing else is said.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoalign.analysis.base import BASE
from evoalign.analysis.mixer import EvalSettings, ModelMixer, Perturbation
from evoalign.config import from_dict

ROOT = Path(__file__).resolve().parents[1]
HALVES = ("looked at", "held back")
PROMPTS = 8
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How completions are made. `forms`: what raw prompts are put into, one after the other; none: the chat template.

    `files`: which files the model has, see `model_of`.
    """

    name: str
    task: str = "conciseness"
    sigma: float = 0.0
    temperature: float = 0.0
    tokens: int = 64
    forms: tuple[str, ...] = ()
    files: str = "its own"


TURNS = ("User: {}\nAssistant:", "Human: {}\n\nAssistant:", "Q: {}\nA:", "### Question\n{}\n\n### Answer\n")
MARKS = (
    "<s>[INST] {} [/INST]",
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    "### Instruction:\n{}\n\n### Response:\n",
)
WAYS = (
    Way("chat"),
    Way("chat, temperature 1.5", temperature=1.5),
    Way("chat, temperature 2", temperature=2.0),
    Way("chat, sigma 0.015", sigma=0.015),
    Way("chat, sigma 0.02, temperature 1", sigma=0.02, temperature=1.0),
    Way("chat, sigma 0.03", sigma=0.03),
    Way("countdown, temperature 1", "countdown", temperature=1.0, tokens=96),
    Way("countdown, sigma 0.015", "countdown", sigma=0.015, tokens=96),
    Way("raw turns", tokens=96, forms=TURNS),
    Way("other marks, temperature 0.7", temperature=0.7, tokens=96, forms=MARKS),
    Way("chat unstopped", tokens=96, files="unstopped"),
    Way("chat shown, temperature 1", temperature=1.0, tokens=96, files="shown"),
)


def rows_of(way: Way, half: str) -> list[Row]:
    """The prompts of a way: eight of the task's, by a seed of the two names, put into its forms."""
    file = "countdown/countdown.json" if way.task == "countdown" else "conciseness/questions_test.json"
    known: list[Row] = json.loads((ROOT / "data" / "tasks" / file).read_text(encoding="utf-8"))
    rows = random.Random(f"{way.name} {half}").sample(known, PROMPTS)
    if not way.forms:
        return rows
    return [row | {"prompt": way.forms[i % len(way.forms)].format(row["prompt"])} for i, row in enumerate(rows)]


def model_of(own: Path, files: str, to: Path) -> Path:
    """A folder with the weights of `own`; unless these are `its own` files, with an end that chats do not have."""
    if files == "its own":
        return own
    to.mkdir()
    for file in own.iterdir():
        (to / file.name).symlink_to(file.resolve())
    _write(to / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    end = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    _write(to / "tokenizer_config.json", json.loads((own / "tokenizer_config.json").read_text()) | end)
    if files == "shown":
        tokenizer = json.loads((own / "tokenizer.json").read_text(encoding="utf-8"))
        for token in tokenizer["added_tokens"]:
            token["special"] = token["content"] == "<|endoftext|>"
        _write(to / "tokenizer.json", tokenizer)
    return to


def _write(file: Path, tree: Any) -> None:
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")


def asked(way: Way, half: str, own: Path, folder: Path) -> list[Row]:
    """The rows of a way and half, as they are stored."""
    rows = folder / "rows.json"
    _write(rows, rows_of(way, half))
    trial = HALVES.index(half)
    config = from_dict(
        {
            "model": {"name": str(model_of(own, way.files, folder / "model")), "dtype": "float32"},
            "task": {
                "name": way.task, "train_data": str(rows), "test_data": str(rows),
                **({"prompt": "raw"} if way.forms else {}),
            },
            "evaluation": {"seeds": [trial], "temperature": way.temperature, "max_tokens": way.tokens},
        },
    )  # fmt: skip
    with ModelMixer([BASE], config, EvalSettings()) as mixer:
        said = mixer.evaluate({BASE: 1.0}, Perturbation(way.sigma, trial) if way.sigma else None).completions
    return [
        {"source": "strained", "run": f"{way.name}, {half}", "half": half, "side": "after", "index": one.example,
         "prompt": one.prompt, "target": one.target, "text": one.text, "finish_reason": one.finish_reason,
         "right": one.right}
        for one in said
    ]  # fmt: skip


def main() -> None:
    own, to = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    word = sys.argv[4] if "--only" in sys.argv else ""
    found: list[Row] = []
    for way in WAYS:
        for half in HALVES:
            if word in way.name:
                with tempfile.TemporaryDirectory() as folder:
                    found += asked(way, half, own, Path(folder))
    to.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
