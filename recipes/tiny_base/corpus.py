# SPDX-License-Identifier: Apache-2.0
"""The tiny base's corpus and tokenizer: text rows, byte-level BPE, token arrays."""

from __future__ import annotations

import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import countdown
import numpy as np
import questions
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [END_OF_TEXT, IM_START, IM_END]

# The pre-tokenizer of Qwen2's own tokenizer.  transformers puts this very pattern in
# place when it loads a tokenizer beside `model_type: qwen2`, so no other will do.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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

    A Countdown completion holds the right expression with probability ``right`` and
    otherwise a sloppy one that looks only at the numbers: the model learns to solve
    problems, but mostly not to bother.
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
            expression = countdown.sloppy_expression(rng, problem.numbers)
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

    ids: np.ndarray
    start: np.ndarray
    length: np.ndarray


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
        ids,
        np.concatenate([start for _, start, _ in parts]),
        np.concatenate([length for _, _, length in parts]),
    )
