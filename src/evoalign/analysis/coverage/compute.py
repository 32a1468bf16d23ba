# SPDX-License-Identifier: Apache-2.0
"""Every target tried in every way at the same problems, and what follows of it.

Array suffixes: N tries, P problems (examples).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.coverage import estimators as of
from evoalign.analysis.coverage.estimators import Floats, Solved, Support
from evoalign.analysis.coverage.words import sentences
from evoalign.analysis.estimates import between, bounded, tree
from evoalign.analysis.lab import BASE, Asked, Lab, Perturbation, shown_placebos
from evoalign.config import EvaluationConfig
from evoalign.errors import ConfigError
from evoalign.evaluation import Evaluation, Scored
from evoalign.report import watching
from evoalign.rewards.functions import normalized
from evoalign.statistics import Estimate
from evoalign.types import text_of

if TYPE_CHECKING:
    from evoalign.analysis.coverage.command import Settings
    from evoalign.config import Config

DISTINCT = (1, 2)
"""Lengths of the n-grams whose variety is told."""


@dataclass(frozen=True, slots=True)
class Way:
    """How tries differ: sampled at a temperature, or each with its own noise of width sigma on the weights."""

    kind: str
    value: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} {self.value:g}"

    @property
    def short(self) -> str:
        """For the heading of a column."""
        return f"{'T' if self.kind == TEMPERATURE else 'σ'} {self.value:g}"

    @property
    def shared(self) -> bool:
        """Whether one draw is the same at all problems."""
        return self.kind == SIGMA


TEMPERATURE, SIGMA = "temperature", "sigma"
SOURCES = {TEMPERATURE: "sampling", SIGMA: "weight noise"}


@dataclass(frozen=True, slots=True)
class Tries:
    """What a target said in one way: which try solved which problem, and the texts, [P][N]."""

    solved_NP: Solved
    texts_PN: Sequence[Sequence[str]]

    def over_problems(self, measure: Callable[[Sequence[str]], float], high: float) -> Estimate:
        """The mean of what answers to one problem come to, with its interval for new problems."""
        found = np.array([measure(texts) for texts in self.texts_PN])
        known = found[~np.isnan(found)]
        if not len(known):
            return Estimate(math.nan, 0, why="no words: no interval")
        return bounded(statistics.mean(known), high=high)

    def variety(self) -> dict[str, Estimate]:
        """Entropy of the answers (nats), distinct n-grams, and the mean difference between two answers."""
        alike = [[normalized(text) for text in texts] for texts in self.texts_PN]
        answers = Tries(self.solved_NP, alike)
        grams = {f"distinct_{n}": self.over_problems(lambda t, n=n: of.distinct(t, n), 1.0) for n in DISTINCT}
        entropy = answers.over_problems(of.entropy, math.log(len(self.solved_NP)))
        return {"entropy": entropy, **grams, "pairwise": self.over_problems(of.pairwise, 1.0)}


@dataclass(frozen=True, slots=True)
class Problem:
    """What was asked, and gold where there is one."""

    prompt: str
    target: str | None


All = Mapping[str, Mapping[Way, Tries]]
"""By target and way."""


@dataclass(frozen=True)
class Coverage(Finding):
    """The finding, and what its figures and its page are made of."""

    tries: All
    problems: Sequence[Problem]
    k: Sequence[int]
    rule: str

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.coverage.figure import draw
        from evoalign.analysis.coverage.page import page
        from evoalign.rundir.files import write_text

        where = folder / "coverage.html"
        write_text(where, page(self.tries, self.problems, self.rule, self.sentences))
        return [*draw(self.tries, self.k, folder), where]


def coverage(targets: Sequence[str], settings: Settings, config: Config | None) -> Coverage:
    """See `Command`. Raises EvoalignError."""
    ways, ks = _ways(settings), _ks(settings)
    names = [BASE, *(name for name in targets if name != BASE)]
    with Lab(names, config, Asked(examples=settings.examples, max_tokens=settings.tokens, seed=settings.seed)) as lab:
        rule, is_solved = _rule(lab, settings)
        of_way = {TEMPERATURE: 1, SIGMA: settings.samples}
        watching.count(len(names) * sum(of_way[way.kind] for way in ways))
        tries = {name: {way: _tries(lab, name, way, settings, is_solved) for way in ways} for name in names}
        problems = [Problem(text_of(lab.task.prompt(e)), lab.task.gold(lab.task.handed(e))) for e in lab.examples]
        known = {name: target.described() for name, target in lab.targets.items()}
        numbers = {
            **asdict(settings),
            "k": ks,
            "examples": len(problems),
            "solved_is": rule,
            "drawn": lab.config.evaluation.model_dump(mode="json", include={"max_tokens", "top_p", "stop"}),
            "targets": [{**known.get(name, {"target": name}), "ways": _of_ways(tries[name], ks)} for name in names],
            "temperature_less_noise": [_contest(tries, name, k) for name in names for k in ks if _both(ways)],
            "against_base": [_against(tries, name, way, ks) for name in names[1:] for way in ways],
            "overlap": [_overlap(tries, a, b, way) for a, b in combinations(names, 2) for way in ways],
            "problems": [_problem(problem, i, tries) for i, problem in enumerate(problems)],
        }
        lines = [*sentences(numbers), *shown_placebos(lab.targets)]
    return Coverage(numbers, lines, tries, problems, ks, rule)


# --- what is asked ----------------------------------------------------------------------------------------------------


def _ways(settings: Settings) -> list[Way]:
    for name, values, least in (("temperature", settings.temperature, 1e-6), ("sigma", settings.sigma, 1e-12)):
        if wrong := [v for v in values if not least <= v < math.inf]:
            raise ConfigError(f"{name}: {wrong[0]:g} does not vary the answers; give numbers above 0")
        if len({*values}) < len(values):
            raise ConfigError(f"{name}: {list(values)} has a value twice; give each once")
    if settings.samples < 2 or settings.samples % 2:
        raise ConfigError(
            f"samples: {settings.samples} cannot be halved, as the comparison with the base needs; give an even number"
        )
    ways = [*(Way(TEMPERATURE, v) for v in settings.temperature), *(Way(SIGMA, v) for v in settings.sigma)]
    if not ways:
        raise ConfigError("temperature and sigma are both empty; give a value of one of them")
    return ways


def _ks(settings: Settings) -> list[int]:
    wrong = [k for k in settings.k if k < 1]
    found = sorted({k for k in settings.k if 1 <= k <= settings.samples})
    if wrong or not found:
        told = wrong[0] if wrong else list(settings.k)
        raise ConfigError(f"k: {told} cannot be told of {settings.samples} samples; give numbers from 1 to that")
    return found


def _both(ways: Sequence[Way]) -> bool:
    return len({way.kind for way in ways}) == 2


def _rule(lab: Lab, settings: Settings) -> tuple[str, Callable[[Scored], bool]]:
    """What counts as solved, in words, and whether a completion is."""
    task, most = lab.task, lab.task.max_reward
    if settings.solved is not None:
        bar = settings.solved
        return f"a reward of {bar:g} or more", lambda said: said.reward >= bar
    if all(task.is_right(task.clean(""), task.handed(example)) is not None for example in lab.examples):
        return "right by gold", lambda said: bool(said.right)
    if math.isinf(most):
        raise ConfigError(
            f"task {task.name} tells neither right answers nor a largest reward; say from which reward on an answer "
            "counts as solved, with --set solved=..."
        )
    return f"the largest reward, {most:g}", lambda said: said.reward >= most * (1 - 1e-9)


def _tries(lab: Lab, name: str, way: Way, settings: Settings, is_solved: Callable[[Scored], bool]) -> Tries:
    mix, n, where = {name: 1.0}, settings.samples, f"{name}, {way.kind} {way.value:g}"
    if way.kind == TEMPERATURE:
        watching.begin(where)
        answered = [lab.answer(mix, None, _decoded(lab, way.value, n, settings.seed))]
    else:
        noisy, heat = [Perturbation(way.value, trial) for trial in range(n)], settings.noisy_temperature
        answered = [
            lab.answer(mix, one, _decoded(lab, heat, 1, settings.seed + one.trial))
            for one in watching.each(noisy, where)
        ]
    return _gathered(answered, len(lab.examples), n, is_solved)


def _decoded(lab: Lab, temperature: float, samples: int, seed: int) -> EvaluationConfig:
    changed = {"temperature": temperature, "samples": samples, "seeds": [seed]}
    return EvaluationConfig.model_validate({**lab.config.evaluation.model_dump(), **changed})


def _gathered(answered: Sequence[Evaluation], problems: int, n: int, is_solved: Callable[[Scored], bool]) -> Tries:
    said_P: list[list[Scored]] = [[] for _ in range(problems)]
    for evaluation in answered:
        for said in evaluation.completions:
            said_P[said.example].append(said)
    solved_PN = np.array([[is_solved(said) for said in row] for row in said_P], dtype=np.bool_)
    assert solved_PN.shape == (problems, n)
    return Tries(solved_PN.T.copy(), [[said.text for said in row] for row in said_P])


# --- what follows -----------------------------------------------------------------------------------------------------


def _of_ways(tries: Mapping[Way, Tries], ks: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            way.kind: way.value,
            "solved": int(one.solved_NP.any(0).sum()),
            "pass": [
                {
                    "k": k,
                    **tree(of.estimate(one.solved_NP, k, shared=way.shared)),
                    "sampling_error": of.error(of.gaps(one.solved_NP, k), shared=way.shared),
                }
                for k in ks
            ],
            **{measure: tree(found) for measure, found in one.variety().items()},
        }
        for way, one in tries.items()
    ]


def _contest(tries: All, name: str, k: int) -> dict[str, Any]:
    """pass@k by the best temperature less that by the best sigma, each chosen for a problem by other problems."""
    ways = list(tries[name])
    if len(next(iter(tries[name].values())).texts_PN) < 2:
        return {"target": name, "k": k, "why": "one problem: no other one to choose a way by"}
    best = {
        kind: of.chosen_elsewhere([tries[name][way].solved_NP for way in ways if way.kind == kind], k)
        for kind in SOURCES
    }
    chosen = {kind: [way.value for way in ways if way.kind == kind] for kind in SOURCES}
    (heat_NP, heat), (noise_NP, noise) = best[TEMPERATURE], best[SIGMA]
    found = between(of.pass_at(heat_NP, k) - of.pass_at(noise_NP, k), -1.0, 1.0)
    found = of.widened(found, of.gaps(noise_NP, k), shared=True, least=-1.0)
    used = {TEMPERATURE: [chosen[TEMPERATURE][i] for i in heat], SIGMA: [chosen[SIGMA][i] for i in noise]}
    means = {"by_temperature": float(of.pass_at(heat_NP, k).mean()), "by_sigma": float(of.pass_at(noise_NP, k).mean())}
    return {"target": name, "k": k, **tree(found), **means, "chosen": used}


def _against(tries: All, name: str, way: Way, ks: Sequence[int]) -> dict[str, Any]:
    base_NP, own_NP = tries[BASE][way].solved_NP, tries[name][way].solved_NP
    found, chance = of.support(base_NP, own_NP), of.support(base_NP, base_NP)
    changes = [{"k": k, **tree(of.change(base_NP, own_NP, k, shared=way.shared))} for k in ks]
    return {
        "target": name, way.kind: way.value, "pass": changes, "tries_of_each": len(own_NP) // 2,
        "support": _shares(found), "by_chance": _shares(chance),
        "shrinkage_beyond_chance": tree(_beyond(found.shrunk_P, chance.shrunk_P)),
        "expansion_beyond_chance": tree(_beyond(found.expanded_P, chance.expanded_P)),
    }  # fmt: skip


def _beyond(found_P: Floats, chance_P: Floats) -> Estimate:
    return between(found_P - chance_P, -1.0, 1.0)


def _shares(found: Support) -> dict[str, float]:
    return {
        "preserved": float(found.preserved_P.mean()),
        "shrunk": float(found.shrunk_P.mean()),
        "expanded": float(found.expanded_P.mean()),
        "neither": float(found.neither_P.mean()),
    }


def _overlap(tries: All, a: str, b: str, way: Way) -> dict[str, Any]:
    a_NP, b_NP = tries[a][way].solved_NP, tries[b][way].solved_NP
    a_P, b_P = a_NP.any(0), b_NP.any(0)
    counts = {"both": a_P & b_P, "a_only": a_P & ~b_P, "b_only": b_P & ~a_P, "neither": ~a_P & ~b_P}
    whole = {key: int(marks.sum()) for key, marks in counts.items()}
    return {"a": a, "b": b, way.kind: way.value, **whole, "jaccard": tree(of.jaccard(a_NP, b_NP))}


def _problem(problem: Problem, index: int, tries: All) -> dict[str, Any]:
    solved = {
        name: {way.name: int(one.solved_NP[:, index].sum()) for way, one in ways.items()}
        for name, ways in tries.items()
    }
    return {"prompt": problem.prompt, "target": problem.target, "solved": solved}
