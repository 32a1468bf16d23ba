# SPDX-License-Identifier: Apache-2.0
"""Train evoalign's tiny base model from nothing: corpus, tokenizer and weights.

    python recipes/tiny_base/train.py --out DIR

writes a Qwen2-architecture model folder (config, bf16 weights, tokenizer, chat
template) that transformers loads.  It runs on CUDA when there is a GPU and on the
CPU otherwise; every random draw comes from ``--seed``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

import countdown  # noqa: E402
import questions  # noqa: E402

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [END_OF_TEXT, IM_START, IM_END]

# The pre-tokenizer of Qwen2's own tokenizer.  transformers puts this very pattern in
# place when it loads a tokenizer beside `model_type: qwen2`, so no other will do.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CHUNK = 5_000  # rows made by one worker call; part of what a seed means
KINDS = ("short", "context", "chat")


def chat_prompt(question: str) -> str:
    """What CHAT_TEMPLATE makes of one user turn with the generation prompt."""
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


# --------------------------------------------------------------------------- #
# Corpus
# --------------------------------------------------------------------------- #


def make_rows(kind: str, count: int, right: float, rng: random.Random) -> list[tuple[str, str]]:
    """Draw (prompt, completion) pairs of one kind, all from the training split.

    A Countdown completion holds the right expression with probability ``right``, and
    otherwise a random expression over the right numbers, whatever it comes to: the
    model learns to solve problems but mostly not to bother.
    """
    rows = []
    for _ in range(count):
        if kind == "chat":
            question, answer = questions.sample(rng)
            rows.append((chat_prompt(question), answer))
            continue
        problem = countdown.random_problem(rng, held_out=False)
        expression = problem.solution
        if rng.random() >= right:
            tree, _ = countdown.random_tree(rng, problem.numbers)
            expression = countdown.render(tree, problem.numbers)
        prompt = countdown.short_prompt if kind == "short" else countdown.context_prompt
        rows.append((prompt(problem.numbers, problem.target), countdown.completion(expression)))
    return rows


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Train a byte-level BPE on a sample of the corpus."""
    rng = random.Random(f"{seed}/tokenizer")
    texts = []
    for kind, count in (("chat", 20_000), ("short", 2_000), ("context", 2_000)):
        for prompt, answer in make_rows(kind, count, 1.0, rng):
            texts += [prompt, answer]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


@dataclass
class Rows:
    """Token rows of one kind, padded right: ids, first completion position, length."""

    ids: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor


def _encode_chunk(job: tuple[str, int, float, str, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kind, count, right, seed, tokenizer_json = job
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rows = make_rows(kind, count, right, random.Random(seed))
    end = tokenizer.token_to_id(IM_END)
    # Prompt and completion are encoded apart, as they are when the model is used.
    prompts = tokenizer.encode_batch([p for p, _ in rows])
    answers = tokenizer.encode_batch([a for _, a in rows])
    start = np.array([len(p.ids) for p in prompts], dtype=np.int64)
    length = start + np.array([len(a.ids) + 1 for a in answers], dtype=np.int64)
    ids = np.zeros((count, int(length.max())), dtype=np.int16)
    for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        ids[i, : length[i]] = [*p.ids, *a.ids, end]
    return ids, start, length


def build_rows(kind: str, count: int, right: float, seed: int, tokenizer: Tokenizer, workers: int) -> Rows:
    """Make and encode ``count`` rows in worker processes; the result depends on the seed alone."""
    spec = tokenizer.to_str()
    jobs = [(kind, CHUNK, right, f"{seed}/{kind}/{i}", spec) for i in range(math.ceil(count / CHUNK))]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(_encode_chunk, jobs))
    width = max(ids.shape[1] for ids, _, _ in parts)
    ids = np.concatenate([np.pad(ids, ((0, 0), (0, width - ids.shape[1]))) for ids, _, _ in parts])
    return Rows(
        torch.from_numpy(ids),
        torch.from_numpy(np.concatenate([start for _, start, _ in parts])),
        torch.from_numpy(np.concatenate([length for _, _, length in parts])),
    )


# --------------------------------------------------------------------------- #
# Training
# --------------------------------------------------------------------------- #


def make_config(args: argparse.Namespace, tokenizer: Tokenizer) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def train(args: argparse.Namespace, tokenizer: Tokenizer, device: torch.device) -> Qwen2ForCausalLM:
    """Next-token training on the completions; one kind of row a step, in turn."""
    began = time.monotonic()
    sizes = {"short": args.rows, "context": args.rows // 2, "chat": args.rows // 4}
    data = {
        kind: build_rows(kind, sizes[kind], args.right, args.seed, tokenizer, args.workers) for kind in KINDS
    }
    for rows in data.values():
        rows.ids, rows.start, rows.length = (t.to(device) for t in (rows.ids, rows.start, rows.length))
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

    step_loss = torch.compile(loss_of) if args.compile else loss_of
    batch = {"short": args.batch, "context": args.batch // 4, "chat": args.batch // 4}
    turns = ("short", "context", "short", "chat")
    picker = torch.Generator(device=device).manual_seed(args.seed)
    began = time.monotonic()
    shown = dict.fromkeys(KINDS, 0.0)
    step = 0
    progress = 0.0
    while progress < 1.0:
        kind = turns[step % len(turns)]
        rows = data[kind]
        pick = torch.randint(len(rows.start), (batch[kind],), generator=picker, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_loss(rows.ids[pick].long(), rows.start[pick], rows.length[pick])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = args.lr * min(1.0, (step + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        progress = step / args.steps
        if args.max_seconds:
            progress = max(progress, (time.monotonic() - began) / args.max_seconds)
        if step % 500 < 4:
            shown[kind] = loss.item()
        if step % 500 == 4:
            losses = "  ".join(f"{k} {v:.4f}" for k, v in shown.items())
            print(f"step {step}  {time.monotonic() - began:.0f} s  {losses}", flush=True)
    print(f"trained {step} steps in {time.monotonic() - began:.0f} s", flush=True)
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
        made = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
        )[:, width:]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="corpus processes")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--intermediate", type=int, default=576)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--right", type=float, default=0.08, help="fraction of right Countdown answers")
    parser.add_argument("--rows", type=int, default=1_000_000, help="short Countdown rows in the corpus")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--max-seconds", type=float, default=0, help="finish the schedule in this time at most")
    parser.add_argument("--batch", type=int, default=1024, help="short rows a step; others a quarter")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--eval", type=int, default=1000, help="held-out problems to measure on")
    args = parser.parse_args()

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_float32_matmul_precision("high")
    tokenizer = train_tokenizer(args.vocab, args.seed)
    model = train(args, tokenizer, torch.device(args.device))
    save(model, tokenizer, args.out)
    model.float()  # measure the rounded weights, in full precision
    result = evaluate(model, tokenizer, args.seed, args.eval)
    print(json.dumps({k: round(v, 4) for k, v in result.items()}, indent=2))


if __name__ == "__main__":
    main()
