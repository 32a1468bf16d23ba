# SPDX-License-Identifier: Apache-2.0
"""The reward on the plane through the weights of three models (Garipov et al., arXiv 1802.10026, section 4).

The first model is the origin, the x axis goes to the second, and the y axis is what of the way to the third is at right
angles to it: distances in the figure are those of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.estimates import share, tree
from evoalign.analysis.lab import Floats, Lab
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.statistics import Estimate

MARGIN = 0.3
"""How far the grid goes beyond the triangle, as a share of its width and height."""
THIN = 1e-3
"""A triangle whose height is below so much of its base is a line."""


@dataclass(frozen=True, slots=True)
class Plane:
    """`rewards` and `hacked` by row (y) and column (x); `corners` are where the models lie, in units of the weights.

    `own` are the models' rewards: they are no points of the grid, and what is interpolated there is another number.
    """

    names: tuple[str, str, str]
    xs: Floats
    ys: Floats
    corners: tuple[tuple[float, float], ...]
    rewards: list[list[Estimate]]
    hacked: list[list[Estimate]]
    own: tuple[Estimate, ...]

    def tree(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "models": list(self.names),
            "corners": [list(corner) for corner in self.corners],
            "own": [tree(found) for found in self.own],
            "x": self.xs.tolist(),
            "y": self.ys.tolist(),
            "reward": [[tree(found) for found in row] for row in self.rewards],
            "hacked": [[tree(found) for found in row] for row in self.hacked],
        }

    def line(self) -> str:
        """What was asked; which point of so many is the highest is chance as well, and not said."""
        (bx, _), (cx, cy) = self.corners[1:]
        return (
            f"The plane through {', '.join(self.names)}: {len(self.xs)} x {len(self.ys)} points; {self.names[1]} is "
            f"{bx:.3g} from {self.names[0]} in weights (L2), {self.names[2]} {np.hypot(cx, cy):.3g}."
        )


def corners(lab: Lab, a: str, b: str, c: str) -> tuple[tuple[float, float], ...]:
    """Where the three lie on their plane. Raises ConfigError where they lie on a line."""
    bb, bc, cc = lab.gram(a, b, c)
    x = bc / bb**0.5 if bb > 0 else 0.0
    y = max(0.0, cc - x**2) ** 0.5
    if bb <= 0 or y <= THIN * max(bb, cc) ** 0.5:
        raise ConfigError(f"plane: {a}, {b} and {c} lie on one line in weights; name three models that do not")
    return (0.0, 0.0), (bb**0.5, 0.0), (x, y)


def plane(lab: Lab, names: tuple[str, str, str], side: int) -> Plane:
    """`side` x `side` points around the triangle. Raises EvoalignError."""
    a, b, c = names
    places = corners(lab, a, b, c)
    xs, ys = (_grid([place[axis] for place in places], side) for axis in (0, 1))
    (bx, _), (cx, cy) = places[1:]
    rewards: list[list[Estimate]] = []
    hacked: list[list[Estimate]] = []
    for y in ys:
        of_c = float(y) / cy
        shares_of_b = [(float(x) - of_c * cx) / bx for x in xs]
        found = [
            lab.answer({a: 1 - of_b - of_c, b: of_b, c: of_c})
            for of_b in watching.each(shares_of_b, f"the plane through {a}, {b} and {c}")
        ]
        rewards.append([statistics.mean(lab.rewards(one)) for one in found])
        hacked.append([share(lab.hacked(one)) for one in found])
    own = tuple(statistics.mean(lab.rewards(lab.answer({name: 1.0}))) for name in names)
    return Plane(names, xs, ys, places, rewards, hacked, own)


def _grid(places: list[float], side: int) -> Floats:
    margin = MARGIN * (max(places) - min(places))
    return np.linspace(min(places) - margin, max(places) + margin, side)
