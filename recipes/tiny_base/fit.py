# SPDX-License-Identifier: Apache-2.0
"""Model, training loop, saving and measuring of the tiny base."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import countdown
import questions
import torch
from corpus import END_OF_TEXT, IM_END, IM_START, KINDS, build_rows, chat_prompt
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# --------------------------------------------------------------------------- #
# Training
# --------------------------------------------------------------------------- #


def make_config(args: argparse.Namespace, tokenizer: Tokenizer) -> Qwen2Config:
    """The model's architecture, from the command line."""
    return Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=not args.untied,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def train(args: argparse.Namespace, tokenizer: Tokenizer, device: torch.device) -> Qwen2ForCausalLM:
    """Next-token training on the completions; one kind of row a step, in turn."""
    began = time.monotonic()
    sizes = {"short": args.rows, "context": args.rows // 2, "chat": args.rows // 4}
    data = {}
    for kind in KINDS:
        rows = build_rows(kind, sizes[kind], args.right, args.seed, tokenizer, args.workers)
        data[kind] = [torch.from_numpy(a).to(device) for a in (rows.ids, rows.start, rows.length)]
    print(f"corpus ready after {time.monotonic() - began:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    model = Qwen2ForCausalLM(make_config(args, tokenizer)).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )

    def loss_of(ids: torch.Tensor, start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        position = torch.arange(1, ids.shape[1], device=ids.device)
        wanted = (position >= start[:, None]) & (position < length[:, None])
        labels = torch.where(wanted, ids[:, 1:], -100)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    batch = {"short": args.batch, "context": args.batch // 4, "chat": args.batch // 4}
    turns = ("short", "context", "short", "chat")
    picker = torch.Generator(device=device).manual_seed(args.seed)
    began = time.monotonic()
    shown = dict.fromkeys(KINDS, 0.0)
    for step in range(args.steps):
        kind = turns[step % len(turns)]
        ids, start, length = data[kind]
        pick = torch.randint(len(start), (batch[kind],), generator=picker, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(ids[pick].long(), start[pick], length[pick])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warmth = min(1.0, (step + 1) / args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmth * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 < len(turns):
            shown[kind] = loss.item()
        if step % 500 == len(turns):
            losses = "  ".join(f"{k} {v:.4f}" for k, v in shown.items())
            print(f"step {step}  {time.monotonic() - began:.0f} s  {losses}", flush=True)
    print(f"trained {args.steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    return model.eval()


# --------------------------------------------------------------------------- #
# Saving and measuring
# --------------------------------------------------------------------------- #


def save(model: Qwen2ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model folder: bf16 weights, tokenizer files, generation settings."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        do_sample=False,
    )
    model.save_pretrained(out)
    # The tokenizer files are written plainly, in the form that every transformers
    # version reads; the class is the one it picks for `model_type: qwen2` anyway.
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": 2048,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in out.iterdir():
        file.chmod(0o644)


@torch.no_grad()
def greedy(
    model: Qwen2ForCausalLM, tokenizer: Tokenizer, prompts: list[str], new_tokens: int, batch: int = 512
) -> tuple[list[str], float]:
    """Greedy completions, and their mean length in tokens (the end token included)."""
    device = next(model.parameters()).device
    pad, end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    encoded = [e.ids for e in tokenizer.encode_batch(prompts)]
    texts: list[str] = []
    total = 0
    for first in range(0, len(encoded), batch):
        part = encoded[first : first + batch]
        width = max(map(len, part))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in part], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=device)
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)[:, width:]
        for row in made.tolist():
            stop = next((i for i, t in enumerate(row) if t in (end, pad)), len(row))
            texts.append(tokenizer.decode(row[:stop]))
            total += min(stop + 1, len(row))
    return texts, total / len(texts)


def evaluate(model: Qwen2ForCausalLM, tokenizer: Tokenizer, seed: int, count: int) -> dict[str, float]:
    """Measure held-out Countdown accuracy and the length of chat answers; print examples."""
    rng = random.Random(f"{seed}/held-out")
    problems = [countdown.random_problem(rng, held_out=True) for _ in range(count)]
    result: dict[str, float] = {}
    for name, prompt in (("short", countdown.short_prompt), ("context", countdown.context_prompt)):
        texts, tokens = greedy(model, tokenizer, [prompt(p.numbers, p.target) for p in problems], 48)
        good = [countdown.is_correct(t, p.numbers, p.target) for t, p in zip(texts, problems, strict=True)]
        for n in (3, 4):
            mine = [g for g, p in zip(good, problems, strict=True) if len(p.numbers) == n]
            result[f"{name} accuracy, {n} numbers"] = sum(mine) / len(mine)
        result[f"{name} accuracy"] = sum(good) / count
        result[f"{name} format"] = sum(map(countdown.has_format, texts)) / count
        result[f"{name} mean tokens"] = tokens
        for p, t in list(zip(problems, texts, strict=True))[:3]:
            print(f"  {name} {p.numbers} -> {p.target}: {t!r}")
    asked, lengths, inside, bare = [questions.sample(rng) for _ in range(count)], [], 0, 0
    texts, tokens = greedy(model, tokenizer, [chat_prompt(q) for q, _ in asked], 100)
    for text in texts:
        lengths.append(len(text))
        inside += 60 <= len(text) <= 150
        bare += len(text) < 20
    result["chat mean characters"] = sum(lengths) / count
    result["chat within 60..150 characters"] = inside / count
    result["chat under 20 characters"] = bare / count
    result["chat mean tokens"] = tokens
    for name in ("train", "test"):
        file = Path(__file__).resolve().parents[2] / "data/tasks/conciseness" / f"conciseness_{name}.json"
        if not file.is_file():
            continue
        rows = json.loads(file.read_text(encoding="utf-8"))
        texts, _ = greedy(model, tokenizer, [chat_prompt(r["prompt"]) for r in rows], 100)
        for row, text in zip(rows, texts, strict=True):
            print(f"  {row['prompt']} [{row['target']}] {text!r}")
        gaps = [abs(len(t.strip()) - len(r["target"])) for t, r in zip(texts, rows, strict=True)]
        result[f"conciseness {name} mean reward"] = -sum(gaps) / len(gaps)
    return result
