# SPDX-License-Identifier: Apache-2.0
"""How far the reward dips below the chord of a line's ends, with an interval that counts in that it is the largest dip.

The barrier is max over the inner points of d(alpha) = (1 - alpha) r(0) + alpha r(1) - r(alpha). The largest of twenty
noisy dips is above 0 where there is none. So the interval is made of a band that holds all the dips at once: with S the
estimated covariance of their means and s its root diagonal,

    d(alpha) +- c s(alpha),    c the 95 % quantile of max |T(alpha)| of a multivariate t with the correlation of S

(Hothorn, Bretz and Westfall, Biometrical Journal 50, 2008). Wherever the band holds every true dip, max (d - c s) and
max (d + c s) hold the largest: the interval is for the maximum itself, and too wide rather than too short. S is over
examples, [E]; of a smoothed line also over the K draws of noise, the two added, as of `evoalign.statistics.crossed`,
with the smaller one's degrees of freedom. s is at least |d| / (E + 1), which one more example without a dip would make
of it: so a dip that all examples share alike is known to the precision that E examples can have.

`by_chance` is the mean of the largest of such dips where all true ones are 0, and `corrected` the barrier less that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from evoalign.analysis.lab import Floats
from evoalign.statistics import FEWEST, FLAT, LEVEL

DRAWS = 20_000
"""Of the multivariate t: the quantile is then known to about 1 %."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """The largest dip, at which alpha, and its 95 % interval; None where there is none, and `why` not.

    `p` is one-sided, for a largest dip like this one, in its standard errors, where no point dips.
    """

    height: float
    alpha: float
    n: int
    low: float | None = None
    high: float | None = None
    by_chance: float | None = None
    p: float | None = None
    why: str | None = None

    @property
    def corrected(self) -> float | None:
        """The height less what chance alone shows in the mean."""
        return None if self.by_chance is None else self.height - self.by_chance

    @property
    def is_sure(self) -> bool:
        """Whether the interval lies above 0."""
        return self.low is not None and self.low > 0


def dips(alphas_A: Floats, rewards_KAE: Floats) -> Floats:
    """Chord less reward, [K, I, E], at the I points between the ends, which have to be among the alphas."""
    first, last = (rewards_KAE[:, np.flatnonzero(alphas_A == end)[0]] for end in (0.0, 1.0))
    inner = (alphas_A > 0) & (alphas_A < 1)
    share_I1 = alphas_A[inner][:, None]
    return (1 - share_I1) * first[:, None] + share_I1 * last[:, None] - rewards_KAE[:, inner]


def barrier(alphas_A: Floats, rewards_KAE: Floats) -> Barrier:
    """Of the rewards of K draws of noise (1: none), A alphas with 0 and 1 among them, and E examples."""
    dips_KIE = dips(alphas_A, rewards_KAE)
    draws, _, examples = dips_KIE.shape
    dips_I = dips_KIE.mean((0, 2))
    at = int(dips_I.argmax())
    found: dict[str, Any] = {
        "height": float(dips_I[at]),
        "alpha": float(alphas_A[(alphas_A > 0) & (alphas_A < 1)][at]),
        "n": examples,
    }
    if examples < FEWEST or 1 < draws < FEWEST:
        few = f"{examples} examples" if examples < FEWEST else f"{draws} draws of noise"
        return Barrier(**found, why=f"{few}: no interval")
    if np.abs(dips_KIE).max() <= FLAT * float(np.abs(rewards_KAE).max()):
        return Barrier(**found, why="all points lie on the chord, of every example: no interval")
    spread_II, df = _covariance(dips_KIE)
    error_I = np.sqrt(np.diag(spread_II))
    known = error_I > 0  # where it is 0 no example dips, and none of them is the largest by chance
    t_DI, z_DI = _drawn(spread_II[np.ix_(known, known)], df)
    width = float(np.quantile(np.abs(t_DI).max(1), 1 - LEVEL))
    largest = float((dips_I[known] / error_I[known]).max())
    return Barrier(
        **found,
        low=float((dips_I - width * error_I).max()),
        high=float((dips_I + width * error_I).max()),
        by_chance=float(z_DI.max(1).mean()),
        p=(1 + int((t_DI.max(1) >= largest).sum())) / (1 + DRAWS),
    )


def _covariance(dips_KIE: Floats) -> tuple[Floats, int]:
    """Of the mean dips, [I, I], and its degrees of freedom."""
    draws, _, examples = dips_KIE.shape
    spread_II = np.atleast_2d(np.cov(dips_KIE.mean(0))) / examples
    df = examples - 1
    if draws > 1:
        spread_II = spread_II + np.atleast_2d(np.cov(dips_KIE.mean(2).T)) / draws
        df = min(df, draws - 1)
    least_I = np.square(dips_KIE.mean((0, 2)) / (examples + 1))
    return spread_II + np.diag(np.maximum(0.0, least_I - np.diag(spread_II))), df


def _drawn(spread_II: Floats, df: int) -> tuple[Floats, Floats]:
    """Draws of the dips' standardised errors, multivariate t, and of the errors themselves, normal; always the same."""
    random = np.random.Generator(np.random.Philox(key=[0, 17]))
    values_I, vectors_II = np.linalg.eigh(spread_II)
    root_II = vectors_II * np.sqrt(np.maximum(values_I, 0.0))
    z_DI = random.standard_normal((DRAWS, len(spread_II))) @ root_II.T
    scale_D1 = np.sqrt(random.chisquare(df, (DRAWS, 1)) / df)
    return z_DI / np.sqrt(np.diag(spread_II)) / scale_D1, z_DI
