# SPDX-License-Identifier: Apache-2.0
"""How likely the base model finds what was said: its nats a token, the logarithm of the perplexity, of completions.

A model that learnt a task says what the base model might have said, if rarely; one that noise has broken says what no
model would. Of the base model's own greedy text a token costs less than 1 nat, of text by people about 3 with a small
model; a token drawn blindly from 50,000 costs 10.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evoalign.checks.divergence import Reference, Sample
from evoalign.errors import ModelError
from evoalign.evaluation import Scored
from evoalign.tasks import Task
from evoalign.tokens import Tokens
from evoalign.types import Example

MOST = 32
"""Completions of each side that are looked at: one of each example first, then the next of each."""


@dataclass(frozen=True, slots=True)
class Fluency:
    """Nats a token under the base model, over all tokens of the completions before training and after it but the first
    of each: how an answer begins is what training is to change, and a right answer of one word is unlikely at first.

    None where there is no such token: an empty completion is not fluent, and counts as empty elsewhere. `each`: of the
    completions after training, in their order; None of those that were not looked at, too.
    """

    before: float | None
    after: float | None
    tokens_before: int
    tokens_after: int
    each: tuple[float | None, ...] = ()

    def as_dict(self) -> dict[str, float | int | None]:
        """For results/evaluation.json."""
        return {name: getattr(self, name) for name in ("before", "after", "tokens_before", "tokens_after")}


def measure(
    reference: Reference,
    tokens: Tokens,
    task: Task,
    examples: Sequence[Example],
    before: Sequence[Scored],
    after: Sequence[Scored],
) -> Fluency:
    """Of `MOST` completions of each side. Raises ModelError where the second copy of the model does not fit.

    The texts are encoded again, without the stop token: a tokenizer may cut them otherwise than they were drawn.
    """
    try:
        first, then = (
            _nats(reference, tokens, task, examples, [side[i] for i in _places(side)]) for side in (before, after)
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelError(f"the base model does not fit the memory of {reference.device} once more") from error
    each: list[float | None] = [None] * len(after)
    for i, nats in zip(_places(after), then, strict=True):
        each[i] = float(nats.mean()) if len(nats) else None
    return Fluency(_mean(first), _mean(then), sum(map(len, first)), sum(map(len, then)), tuple(each))


def _places(side: Sequence[Scored]) -> list[int]:
    """An evaluation has all that was drawn for an example in a row: the first ones would be of the first examples."""
    return sorted(range(len(side)), key=lambda i: (side[i].seed, side[i].sample, side[i].example))[:MOST]


def _nats(
    reference: Reference, tokens: Tokens, task: Task, examples: Sequence[Example], said: Sequence[Scored]
) -> list[torch.Tensor]:
    """Of each completion; of one without a token, an empty tensor."""
    samples = [Sample(tokens.encode(task.prompt(examples[s.example])), tokens.encode_text(s.text)) for s in said]
    found = iter(reference.nats([sample for sample in samples if sample.token_ids]))
    return [next(found)[1:] if sample.token_ids else torch.zeros(0) for sample in samples]


def _mean(nats: Sequence[torch.Tensor]) -> float | None:
    count = sum(map(len, nats))
    return float(sum(float(part.sum()) for part in nats)) / count if count else None
