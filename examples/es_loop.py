# SPDX-License-Identifier: Apache-2.0
"""Evolution Strategies in plain torch and transformers, in one file: read this before the library.

    python examples/es_loop.py [--generations 3]

The tiny model learns to answer briefly, on one CPU core at about a second a generation, by algorithm 1 of Qiu et al.
(arXiv 2509.24372). "3.2 (k)" below is item k of its section 3.2, the implementation details; its equations have no
numbers. `evoalign.train` with space full computes the same: `tests/test_es_loop.py` compares the rewards, coefficients
and weights of three generations bit for bit. Deviations from the paper:

- Noise is a function of (seed, tensor, generation, member), not of a generator's state. Members can then be computed in
  any order and on any device.
- A perturbed tensor is replaced, computed from a copy of the mean. Subtracting the noise again would leave rounding
  errors in the weights.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign import noise
from evoalign.models import tiny

# The published code trains conciseness on these two questions. A target is the shortest right answer.
QUESTIONS = (
    {"prompt": "Compute: 6 + 7 =", "target": "13"},
    {"prompt": "If all fish can swim and salmon are fish, can salmon swim?", "target": "Yes"},
)
SEED = 2
POPULATION = 16  # N; the paper has 30
SIGMA = 0.02  # standard deviation of the noise; the paper's models are larger and take 0.001
ALPHA = 0.01  # learning rate with 1/sigma included, 3.2 (7); half of sigma, as in the paper
MAX_TOKENS = 48

Weights = dict[str, torch.Tensor]


def epsilon(name: str, tensor: torch.Tensor, generation: int, member: int) -> torch.Tensor:
    """Return eps_n of one tensor. It is drawn again wherever it is needed and never stored, 3.2 (1)."""
    return noise.normals(noise.key(SEED, "noise", name), tensor.shape, generation, [member])[0]


def perturb(model: Any, theta: Weights, generation: int, member: int) -> None:
    """Write theta + sigma eps_n into the model, in place and tensor by tensor, 3.2 (3)."""
    for name, parameter in model.named_parameters():
        parameter.copy_(theta[name] + SIGMA * epsilon(name, theta[name], generation, member))


def complete(model: Any, tokenizer: Any) -> list[str]:
    """Return the completion of each question, decoded greedily: members then differ by their noise alone, 3.2 (5)."""
    chats = [[{"role": "user", "content": question["prompt"]}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def reward(completion: str, target: str) -> float:
    """Return minus the difference in length to the target, in characters: the paper's conciseness reward."""
    return -abs(len(completion) - len(target))


def zscore(rewards: np.ndarray) -> np.ndarray:
    """Return Z_n = (R_n - R_mean) / R_std, which has the same scale in every generation and task, 3.2 (4)."""
    # 1e-8, as in the published code: where all members have the same reward, Z_n is 0 and not 0 / 0.
    return (rewards - rewards.mean()) / (rewards.std() + 1e-8)


def update(theta: Weights, coefficients: np.ndarray, generation: int) -> None:
    """Move theta by alpha (1/N) sum_n Z_n eps_n (algorithm 1), one tensor and one member at a time, 3.2 (6)."""
    for name, tensor in theta.items():
        total = torch.zeros_like(tensor)
        for member, coefficient in enumerate(coefficients.tolist()):
            total += coefficient * epsilon(name, tensor, generation, member)
        tensor += total * (1 / len(coefficients)) * ALPHA


@torch.no_grad()  # no gradient is computed anywhere
def evolve(generations: int) -> Iterator[tuple[np.ndarray, np.ndarray, Weights]]:
    """Yield the rewards [N, questions], the coefficients Z [N] and the updated weights theta of each generation."""
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32).eval()
    theta = {name: parameter.clone() for name, parameter in model.named_parameters()}  # the mean; members never move it
    for generation in range(generations):
        rewards = np.zeros((POPULATION, len(QUESTIONS)))
        for member in range(POPULATION):
            perturb(model, theta, generation, member)
            completions = complete(model, tokenizer)
            rewards[member] = [reward(c, q["target"]) for c, q in zip(completions, QUESTIONS, strict=True)]
        coefficients = zscore(rewards.mean(axis=1))  # R_n is a member's mean over the questions
        update(theta, coefficients, generation)
        yield rewards, coefficients, theta


def main() -> None:
    """Train, and print the mean reward of each population."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=3)
    for generation, (rewards, _, _) in enumerate(evolve(parser.parse_args().generations)):
        print(f"generation {generation}: mean reward {rewards.mean():.2f}")


if __name__ == "__main__":
    main()
