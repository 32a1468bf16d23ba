# SPDX-License-Identifier: Apache-2.0
"""How far noise alone takes the mean: the distance that updates come to with coefficients that know nothing.

One update moves tensor t by step * scale_t * (1/N) * sum_n w_n eps_nt, where w_n is the sum of sign * coefficient over
the members of noise n (one, or an antithetic pair). Normals of another noise, tensor, element or generation are
independent, so that the squares add up:

    E |move|^2 = sum_g (step_g m_g / N_g)^2 * E[sum_n w_n^2] * sum_t numbers_t scale_t^2

For members of their own noise, sum_n w_n^2 = N rms(c)^2. With coefficients permuted over members, the two of a pair
differ by 2 (rms(c)^2 - E[c_a c_b]) in the mean square, and E[c_a c_b] over two members that are not the same is
(N mean(c)^2 - rms(c)^2) / (N - 1); over N / 2 pairs that is N rms(c)^2 * N / (N - 1) for coefficients of mean 0. m_g is
1 for plain SGD: with momentum a gradient goes on moving the mean, and decay takes back a share of what it did. With
one step size, z-scores (rms 1) and no schedule this is alpha sqrt(d T / N): d numbers, T generations, N members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evoalign.config import EsConfig
from evoalign.types import Layout, Update


def expected_distance(updates: Sequence[Update], layout: Layout, es: EsConfig) -> float | None:
    """Root mean square L2 distance from the start, over all permutations of each generation's coefficients.

    Of all numbers that evolve, as `distance.moved` measures it. None with Adam, which divides by the size of gradients.
    """
    if es.optimizer.name == "adam":
        return None
    moving = [update for update in updates if any(update.coefficients)]  # others move nothing, and no velocity
    momentum = es.optimizer.momentum if es.optimizer.name == "momentum" else 0.0
    reach, kept, squares = 0.0, 1.0, list[float]()
    for update in reversed(moving):
        # What one unit of this gradient moves the mean by in the end: its own step, and those of its velocity.
        reach = update.step * kept + momentum * reach
        kept *= 1 - update.decay
        squares.append((reach / len(update.members)) ** 2 * _squared_weights(update))
    numbers = math.fsum(math.prod(t.shape) * t.scale**2 for t in layout.tensors)
    return math.sqrt(math.fsum(squares) * numbers)


def _squared_weights(update: Update) -> float:
    """E[sum over noises of (sum of sign * coefficient)^2] over all permutations of the coefficients."""
    c, n = update.coefficients, len(update.coefficients)
    square = math.fsum(x * x for x in c) / n
    other = (math.fsum(c) ** 2 / n - square) / (n - 1) if n > 1 else 0.0
    members: dict[int, list[int]] = {}
    for member in update.members:
        members.setdefault(member.noise, []).append(member.sign)
    return math.fsum(len(s) * square + (sum(s) ** 2 - len(s)) * other for s in members.values())
