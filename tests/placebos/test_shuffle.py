# SPDX-License-Identifier: Apache-2.0
"""Shuffled coefficients of toy runs in numpy: pairs stay pairs, steps keep their length, and a run of no signal is one
of its placebos."""

import numpy as np
import pytest

from evoalign.analysis.trajectory import signal_share
from evoalign.config import from_dict
from evoalign.placebos.counterfactual import Counterfactual, shuffled
from evoalign.placebos.estimates import expected_distance
from evoalign.rundir.journal import Recorded
from evoalign.types import EvolvedTensor, Layout, Member, Update, population

D, N, T, ETA, PLACEBOS = 256, 32, 20, 0.5, 20
REWARDS = ("linear", "even", "nothing")


def noise(antithetic, seed, generations=T):
    """Signed noises, [generations, members, D]."""
    eps_GND = np.random.default_rng(seed).normal(size=(generations, N // 2 if antithetic else N, D))
    return np.stack([eps_GND, -eps_GND], 2).reshape(generations, N, D) if antithetic else eps_GND


def walked(updates, eps_GND):
    c_GN = np.array([update.coefficients for update in updates])
    return ETA * np.einsum("gn,gnd->d", c_GN, eps_GND) / N


def trained(reward, antithetic, eps_GND):
    """The updates of an ES run from 0 with z-scores; its reward is one direction, a near optimum, or luck."""
    random = np.random.default_rng(eps_GND[0, 0, :2].view(np.uint64))
    direction, mean, updates = random.normal(size=D), np.zeros(D), list[Update]()
    rewards = {"linear": lambda at: at @ direction, "even": lambda at: -((at[:, :20] - 0.2) ** 2).sum(1)}
    for g, eps_ND in enumerate(eps_GND):
        f = rewards[reward](mean + eps_ND) if reward in rewards else random.normal(size=N)
        c = tuple(map(float, (f - f.mean()) / f.std()))
        updates.append(Update(g, g, population(N, antithetic=antithetic), c, 1.0, ETA))
        mean = mean + walked(updates[-1:], eps_ND[None])
    return updates


def weights(update):
    found = dict[int, float]()
    for member, c in zip(update.members, update.coefficients, strict=True):
        found[member.noise] = found.get(member.noise, 0.0) + member.sign * c
    return found


def placebo(updates, seed):
    other = Counterfactual("shuffle", "zscore", seed)
    return [other.update(Recorded(u, (0.0,) * len(u.members), None, "")) for u in updates]


def test_pairs_are_shuffled_whole_and_others_by_the_permutation_of_earlier_releases():
    """In one generation that has both, and whose pairs are not next to each other."""
    members = tuple(Member(i, n, s) for i, (n, s) in enumerate(
        [(3, 1), (0, 1), (1, -1), (2, 1), (0, -1), (1, 1), (4, 1), (5, 1), (5, -1)]))  # fmt: skip
    c, seen = tuple(float(x) for x in (3, 10, 21, 2, 11, 20, 4, 50, 51)), set()
    for seed in range(40):
        found = shuffled(Update(7, 7, members, c, 0.1, 0.1), seed)
        order = np.random.Generator(np.random.Philox(key=[seed, 7])).permutation(3)
        assert [found[i] for i in (0, 3, 6)] == [(3.0, 2.0, 4.0)[k] for k in order]
        pairs = [(found[1], found[4]), (found[2], found[5]), (found[7], found[8])]
        assert sorted(sorted(pair) for pair in pairs) == [[10.0, 11.0], [20.0, 21.0], [50.0, 51.0]]
        assert found == shuffled(Update(9, 7, members, c, 0.3, 0.2), seed), "of seed and generation alone"
        seen |= set(pairs)
    assert len(seen) == 6, "each pair in both orders"
    alone = Update(2, 2, population(6), tuple(map(float, range(6))), 0.1, 0.1)
    assert shuffled(alone, 5) == list(np.random.Generator(np.random.Philox(key=[5, 2])).permutation(6))


@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("reward", REWARDS)
def test_each_placebo_step_is_as_long_as_the_runs(reward, antithetic):
    updates = trained(reward, antithetic, noise(antithetic, 0))
    for seed in range(3):
        for own, other in zip(updates, placebo(updates, seed), strict=True):
            sizes = [sorted(abs(w) for w in weights(u).values()) for u in (own, other)]
            assert sizes[0] == sizes[1] and own.coefficients != other.coefficients


@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("reward", REWARDS)
def test_placebos_go_as_far_as_fresh_noise_of_the_same_weights(reward, antithetic):
    """In root mean square over seeds; the formula and the share of signal are those of fresh noise, too."""
    layout = Layout((EvolvedTensor("w", (D,), "w", 1.0),), 0, "float32")
    es = from_dict({"es": {"num_generations": T, "population_size": N, "sigma": 1.0, "learning_rate": ETA}}).es
    found = list[list[float]]()
    for seed in range(4):
        own = noise(antithetic, seed)
        updates = trained(reward, antithetic, own)
        shuffles = [float(np.linalg.norm(walked(placebo(updates, k), own))) for k in range(PLACEBOS)]
        fresh = [float(np.linalg.norm(walked(updates, noise(antithetic, (seed, k + 1))))) for k in range(PLACEBOS)]
        far = float(np.linalg.norm(walked(updates, own)))
        assert signal_share(far, shuffles).mean == pytest.approx(1 - np.mean(np.square(fresh)) / far**2, abs=0.1)
        formula = expected_distance(updates, layout, es)
        found.append([float(np.mean(np.square(distances))) for distances in (shuffles, fresh, formula)])
    placebos, new, formula = np.sqrt(np.mean(found, axis=0))
    assert placebos == pytest.approx(new, rel=0.03) and formula == pytest.approx(new, rel=0.03)


@pytest.mark.parametrize("antithetic", [True, False])
def test_a_run_of_no_signal_is_one_of_its_placebos(antithetic):
    """By its distance and along a direction that the noise does not know: p of 1 / 21 in about one of 21 runs."""
    lowest, random = 0, np.random.default_rng(0)
    for seed in range(60):
        own = noise(antithetic, seed, 5)
        updates, along = trained("nothing", antithetic, own), random.normal(size=D)
        means = [walked(updates, own), *(walked(placebo(updates, k), own) for k in range(PLACEBOS))]
        for values in ([m @ m for m in means], [m @ along for m in means]):
            lowest += max(values[1:]) < values[0]
    assert 0 < lowest <= 14, "120 / 21 = 5.7 are expected, more than 14 in one of 1,000 such tests"
