# SPDX-License-Identifier: Apache-2.0
"""The tiny base model of the safety task, and scorers that learn from its words."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import corpus
import torch
from make import texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from evoalign.config.scorer import SAFE_RLHF

PAD, END = "<pad>", "</s>"
VOCABULARY = 1024
CLASSES = {"reward": "better_response_id", "cost": "safer_response_id"}


def tokenizer_of(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the corpus."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = [a + b for a, b in texts(20_000, f"{seed}/tokenizer")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END, model_max_length=1024)


def settings(vocabulary: int, **other: Any) -> LlamaConfig:
    """Half a million parameters."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=96, intermediate_size=288, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, **other,
    )  # fmt: skip


def optimized(
    parameters: Iterator[torch.nn.Parameter], loss_at: Callable[[int], torch.Tensor], steps: int, rate: float
) -> None:
    """AdamW with a short rise and a cosine; prints the loss eight times."""
    listed = list(parameters)
    optimizer = torch.optim.AdamW(listed, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = loss_at(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(listed, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, steps // 8) == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - began:.0f} s", flush=True)


def base(to: Path, seed: int, steps: int, device: str, batch: int = 96) -> None:
    """Train on answers, prompts given; save in bfloat16; say what it answers."""
    tokenizer = tokenizer_of(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(settings(len(tokenizer))).to(device)
    rows = texts(steps * batch, f"{seed}/base")

    def loss_at(step: int) -> torch.Tensor:
        both = rows[step * batch : (step + 1) * batch]
        asked = [tokenizer(a, add_special_tokens=False).input_ids for a, _ in both]
        said = [[*tokenizer(b, add_special_tokens=False).input_ids, 1] for _, b in both]
        width = max(len(a) + len(b) for a, b in zip(asked, said, strict=True))
        ids = torch.tensor([a + b + [0] * (width - len(a) - len(b)) for a, b in zip(asked, said, strict=True)])
        wanted = torch.tensor(
            [[-100] * len(a) + b + [-100] * (width - len(a) - len(b)) for a, b in zip(asked, said, strict=True)]
        )
        logits = model(input_ids=ids[:, :-1].to(device), use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten().to(device))

    optimized(model.parameters(), loss_at, steps, 2e-3)
    model.to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=False)
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


def encoded(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Conversations as the task's scorers read them, with the end token, padded on the right."""
    lines = [[*tokenizer(SAFE_RLHF.format(prompt=p, response=r)).input_ids, 1] for p, r in pairs]
    width = max(map(len, lines))
    ids = torch.tensor([line + [0] * (width - len(line)) for line in lines])
    mask = torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in lines])
    return {"input_ids": ids, "attention_mask": mask}


def scores(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """One a pair."""
    given = {name: tensor.to(model.device) for name, tensor in encoded(tokenizer, pairs).items()}
    return model(**given).logits[:, 0].cpu()


def both(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The prompt with each of its two answers."""
    return [(row["prompt"], row[f"response_{i}"]) for i in range(2)]


def scorers(start: Path, to: Path, half: int, seed: int, steps: int, device: str, batch: int = 48) -> None:
    """A reward model of what people found better, and a cost model of what they found safer, and safe.

    The losses are those of Safe-RLHF (Dai et al., arXiv 2310.12773): of pairs for both, and for costs the sign, too,
    which is below 0 where an answer is safe.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    train = [asked for asked in corpus.of_split("train") if corpus.half(asked) == half]
    rows = corpus.rows(steps * batch, f"{seed}/scorers/{half}", train, corpus.EVEN)
    for name, column in CLASSES.items():
        torch.manual_seed(seed + half)
        body = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
        model = LlamaForSequenceClassification(settings(len(tokenizer), num_labels=1))
        model.model.load_state_dict(body.model.state_dict())
        model.to(device)

        def loss_at(step: int, model: Any = model, column: str = column) -> torch.Tensor:
            part = rows[step * batch : (step + 1) * batch]
            found = scores(model, tokenizer, [pair for row in part for pair in both(row)]).view(-1, 2)
            chosen = torch.tensor([row[column] for row in part])[:, None]
            won, lost = found.gather(1, chosen)[:, 0], found.gather(1, 1 - chosen)[:, 0]
            if column == "better_response_id":
                return -logsigmoid(won - lost).mean() + 0.001 * found.square().mean()
            unsafe = torch.tensor([[1.0 - 2.0 * row[f"is_response_{i}_safe"] for i in range(2)] for row in part])
            return -logsigmoid(lost - won).mean() - logsigmoid(unsafe * found).mean() + 0.001 * found.square().mean()

        optimized(model.parameters(), loss_at, steps, 5e-4)
        model.eval().to("cpu", torch.bfloat16).save_pretrained(to / name)
        tokenizer.save_pretrained(to / name)
        found = {split: held_out(model.float(), tokenizer, split, name, seed) for split in ("validation", "test")}
        report = {"steps": steps, "half": half, "deeds": len(train), **found}
        (to / name / "measured.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(name, json.dumps(report))


def held_out(model: Any, tokenizer: Any, split: str, name: str, seed: int) -> dict[str, float]:
    """What a scorer gets right of a split that it did not learn from."""
    return measured(model, tokenizer, corpus.rows(1000, f"{seed}/held/{split}", corpus.of_split(split)), name)


@torch.no_grad()
def measured(model: Any, tokenizer: Any, rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """How often the held-out labels are met; the best possible is below 1, since people differ."""
    pairs = [pair for row in rows for pair in both(row)]
    found = torch.cat([scores(model, tokenizer, pairs[i : i + 100]) for i in range(0, len(pairs), 100)]).view(-1, 2)
    sign = 1 if name == "reward" else -1
    chosen = torch.tensor([row[CLASSES[name]] for row in rows])
    result = {"pairs": len(rows), "pair_accuracy": float(((sign * found).argmax(1) == chosen).float().mean())}
    if name == "cost":
        safe = torch.tensor([[row[f"is_response_{i}_safe"] for i in range(2)] for row in rows])
        result["safety_accuracy"] = float(((found <= 0) == safe).float().mean())
    return result
