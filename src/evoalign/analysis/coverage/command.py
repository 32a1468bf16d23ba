# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze coverage`: pass@k by temperature and by weight noise, and which problems each model solves.

Array suffixes: N tries, P problems (examples).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign.analysis.base import BASE, Analysis, Finding, row
from evoalign.analysis.coverage import estimators as of
from evoalign.analysis.coverage.estimators import SIGMA, TEMPERATURE, All, Problem, Tries, Way
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.statistics import Estimate, between

if TYPE_CHECKING:
    from evoalign.analysis.mixer import ModelMixer
    from evoalign.config import Config, EvaluationConfig
    from evoalign.evaluation import Scored


@dataclass(frozen=True)
class Settings:
    """Each of `examples` of the test split is tried `samples` times in each way, in at most `tokens` tokens.

    A way is one value of `temperature`, or one of `sigma`: each try has another draw of Gaussian noise of that width on
    all weights, and is decoded at `noisy_temperature` (0 is greedy). pass@k is reported for each `k` up to `samples`.
    `solved`: the reward from which a completion counts as solved; None: where it is right by gold, and for a task
    without gold from the largest reward. `tokens` None: those of the config's evaluation. `seed` is that of both kinds
    of draws.
    """

    temperature: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    sigma: tuple[float, ...] = (0.0005, 0.001, 0.003, 0.005, 0.01)
    noisy_temperature: float = 0.0
    samples: int = 32
    k: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    examples: int = 16
    tokens: int | None = None
    solved: float | None = None
    seed: int = 0


BEYOND = ("shrinkage_beyond_chance", "expansion_beyond_chance")


class Coverage(Analysis[Settings]):
    """pass@k by temperature and by noise on the weights, at equal numbers of samples, and the problems in common.

    `base`, the model that the targets started from, is always evaluated. What a target no longer solves, and what it
    solves anew, is compared with other samples of the base itself.
    """

    name = "coverage"
    help = "pass@k by temperature and by weight noise, which problems who solves, and how varied the answers are."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads one model, which takes the weights of every target; raises EvoalignError for one that does not fit."""
        from evoalign.analysis.coverage import figures
        from evoalign.analysis.mixer import EvalSettings, ModelMixer
        from evoalign.types import text_of

        ways, ks = _ways(settings)
        both = bool(settings.temperature and settings.sigma)
        names = [BASE, *(name for name in targets if name != BASE)]
        wanted = EvalSettings(examples=settings.examples, max_tokens=settings.tokens, seed=settings.seed)
        with ModelMixer(names, config, wanted) as mixer:
            rule, is_solved = _rule(mixer, settings)
            watching.count(len(names) * sum(1 if way.kind == TEMPERATURE else settings.samples for way in ways))
            tries = {name: {way: measure(mixer, name, way, settings, is_solved) for way in ways} for name in names}
            task = mixer.task
            problems = [Problem(text_of(task.prompt(e)), task.gold(task.handed(e))) for e in mixer.examples]
            contests = [contest(tries, n, k) for n in names for k in ks if both]
            compared = [against_base(tries, n, way, ks) for n in names[1:] for way in ways]
            numbers = {
                **asdict(settings),
                "k": ks,
                "examples": len(problems),
                "solved_is": rule,
                "drawn": mixer.config.evaluation.model_dump(mode="json", include={"max_tokens", "top_p", "stop"}),
                "targets": [{**mixer.described(n), "ways": _of_ways(tries[n], ks)} for n in names],
                "temperature_less_noise": contests,
                "against_base": compared,
                "overlap": [_overlap(tries, a, b, way) for a, b in combinations(names, 2) for way in ways],
                "problems": [_problem(problem, i, tries) for i, problem in enumerate(problems)],
            }
            few = 1 - 0.05 ** (1 / settings.samples)
            lines = [
                f"{len(problems)} problems, {settings.samples} tries of each in each way; solved is: {rule}. A problem "
                f"that no try solved may still be solved by up to {few:.1%} of further tries (95 %).",
                *_rows(tries, ks),
                *differences(contests, compared, ks),
            ]
        return Finding(numbers, lines, figures=partial(figures.draw, tries, problems, ks, rule, lines))


def _ways(settings: Settings) -> tuple[list[Way], list[int]]:
    """Return the ways and the numbers k. Raises ConfigError."""
    for name, values, least in (("temperature", settings.temperature, 1e-6), ("sigma", settings.sigma, 1e-12)):
        if wrong := [v for v in values if not least <= v < math.inf]:
            raise ConfigError(f"{name}: {wrong[0]:g} does not vary the completions; set numbers above 0")
        if len({*values}) < len(values):
            raise ConfigError(f"{name}: {list(values)} has a value twice; give each once")
    n = settings.samples
    if n < 2 or n % 2:
        raise ConfigError(f"samples: {n} cannot be halved for the comparison with the base; set an even number")
    ways = [*(Way(TEMPERATURE, v) for v in settings.temperature), *(Way(SIGMA, v) for v in settings.sigma)]
    if not ways:
        raise ConfigError("temperature and sigma are both empty; give a value of one of them")
    ks = sorted({k for k in settings.k if k <= n})
    if not ks or ks[0] < 1:
        raise ConfigError(
            f"k: {ks[0] if ks else list(settings.k)} does not fit {n} samples; set numbers from 1 to that"
        )
    return ways, ks


def _rule(mixer: ModelMixer, settings: Settings) -> tuple[str, Callable[[Scored], bool]]:
    """Return what counts as solved, in words and as a predicate."""
    task, most = mixer.task, mixer.task.max_reward
    if settings.solved is not None:
        bar = settings.solved
        return f"a reward of {bar:g} or more", lambda one: one.reward >= bar
    if all(task.is_right(task.clean(""), task.handed(example)) is not None for example in mixer.examples):
        return "right by gold", lambda one: bool(one.right)
    if math.isinf(most):
        raise ConfigError(
            f"task {task.name} has neither gold answers nor a largest reward; set the reward from which a completion "
            "counts as solved with --set solved=..."
        )
    return f"the largest reward, {most:g}", lambda one: one.reward >= most * (1 - 1e-9)


def measure(mixer: ModelMixer, name: str, way: Way, settings: Settings, is_solved: Callable[[Scored], bool]) -> Tries:
    """Try every problem in one way."""
    from evoalign.analysis.mixer import Perturbation
    from evoalign.config import EvaluationConfig

    def decoded(temperature: float, samples: int, seed: int) -> EvaluationConfig:
        changed = {"temperature": temperature, "samples": samples, "seeds": [seed]}
        return EvaluationConfig.model_validate({**mixer.config.evaluation.model_dump(), **changed})

    mix, n, where = {name: 1.0}, settings.samples, f"{name}, {way.name}"
    if way.kind == TEMPERATURE:
        watching.begin(where)
        found = [mixer.evaluate(mix, None, decoded(way.value, n, settings.seed))]
    else:
        noisy, heat = [Perturbation(way.value, trial) for trial in range(n)], settings.noisy_temperature
        found = [
            mixer.evaluate(mix, one, decoded(heat, 1, settings.seed + one.trial)) for one in watching.each(noisy, where)
        ]
    by_problem: list[list[Scored]] = [[] for _ in mixer.examples]
    for evaluation in found:
        for one in evaluation.completions:
            by_problem[one.example].append(one)
    solved_PN = np.array([[is_solved(one) for one in line] for line in by_problem], dtype=np.bool_)
    assert solved_PN.shape == (len(mixer.examples), n)
    return Tries(solved_PN.T.copy(), [[one.text for one in line] for line in by_problem])


def _of_ways(tries: Mapping[Way, Tries], ks: Sequence[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for way, one in tries.items():
        passes: list[dict[str, Any]] = []
        for k in ks:
            error = of.error(of.gaps(one.solved_NP, k), shared=way.shared)
            estimate = of.estimate(one.solved_NP, k, shared=way.shared)
            passes.append({"k": k, **estimate.tree(), "sampling_error": error})
        found.append({way.kind: way.value, "solved": int(one.solved_NP.any(0).sum()), "pass": passes, **one.variety()})
    return found


def contest(tries: All, name: str, k: int) -> dict[str, Any]:
    """Return pass@k by the best temperature minus that by the best sigma, each chosen by other problems."""
    if len(next(iter(tries[name].values())).texts_PN) < 2:
        return {"target": name, "k": k, "why": "one problem: no other one to choose a way by"}
    solved: dict[str, of.Solved] = {}
    used: dict[str, list[float]] = {}
    for kind in (TEMPERATURE, SIGMA):
        ways = {way.value: one.solved_NP for way, one in tries[name].items() if way.kind == kind}
        solved[kind], places = of.chosen_elsewhere(list(ways.values()), k)
        used[kind] = [list(ways)[i] for i in places]
    heat_P, noise_P = (of.pass_at(own, k) for own in solved.values())
    found = of.widened(between(heat_P - noise_P, -1.0, 1.0), of.gaps(solved[SIGMA], k), shared=True, least=-1.0)
    means = {"by_temperature": float(heat_P.mean()), "by_sigma": float(noise_P.mean())}
    return {"target": name, "k": k, **found.tree(), **means, "chosen": used}


def against_base(tries: All, name: str, way: Way, ks: Sequence[int]) -> dict[str, Any]:
    """Return the changes of a target from the base, and what is beyond the difference of the base from itself."""
    base_NP, own_NP = tries[BASE][way].solved_NP, tries[name][way].solved_NP
    found, chance = of.support(base_NP, own_NP), of.support(base_NP, base_NP)
    changes = [{"k": k, **of.change(base_NP, own_NP, k, shared=way.shared).tree()} for k in ks]
    return {
        "target": name,
        way.kind: way.value,
        "pass": changes,
        "tries_of_each": len(own_NP) // 2,
        "support": {part: float(own_P.mean()) for part, own_P in found.items()},
        "by_chance": {part: float(own_P.mean()) for part, own_P in chance.items()},
        "shrinkage_beyond_chance": between(found["shrunk"] - chance["shrunk"], -1.0, 1.0).tree(),
        "expansion_beyond_chance": between(found["expanded"] - chance["expanded"], -1.0, 1.0).tree(),
    }


def _overlap(tries: All, a: str, b: str, way: Way) -> dict[str, Any]:
    a_NP, b_NP = tries[a][way].solved_NP, tries[b][way].solved_NP
    a_P, b_P = a_NP.any(0), b_NP.any(0)
    counts = {"both": a_P & b_P, "a_only": a_P & ~b_P, "b_only": b_P & ~a_P, "neither": ~a_P & ~b_P}
    sums = {name: marked_P.sum() for name, marked_P in counts.items()}
    return {"a": a, "b": b, way.kind: way.value, **sums, "jaccard": of.jaccard(a_NP, b_NP)}


def _problem(problem: Problem, index: int, tries: All) -> dict[str, Any]:
    solved = {n: {way.name: one.solved_NP[:, index].sum() for way, one in ways.items()} for n, ways in tries.items()}
    return {"prompt": problem.prompt, "target": problem.target, "solved": solved}


def _rows(tries: All, ks: Sequence[int]) -> list[str]:
    """Return a row for each target and way."""
    lines: list[str] = []
    for name, ways in tries.items():
        for way, one in ways.items():
            cells: dict[str, object] = {
                f"pass@{k}": of.estimate(one.solved_NP, k, shared=way.shared) for k in sorted({ks[0], ks[-1]})
            }
            variety = one.variety()
            cells |= {"entropy": variety["entropy"].mean, "mean difference": variety["pairwise"].mean}
            lines.append(row(f"{name}, {way.name}", cells))
    return lines


def differences(
    contests: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]], ks: Sequence[int]
) -> list[str]:
    """Return sampling minus weight noise of each target, and its significant differences from the base."""
    lines = [
        row(f"{one['target']}, sampling minus weight noise", {f"pass@{one['k']}": _shown(one)})
        for one in contests
        if one["k"] == ks[-1] and "mean" in one
    ]
    tested, sure = 0, 0
    for one in compared:
        kind = TEMPERATURE if TEMPERATURE in one else SIGMA
        found = {f"pass@{change['k']}": change for change in one["pass"] if change["k"] in (ks[0], ks[-1])}
        found |= {f"share {key.partition('_')[0]} beyond chance": one[key] for key in BEYOND}
        cells = {name: _shown(tree) for name, tree in found.items() if tree["low"] and tree["low"] * tree["high"] > 0}
        tested, sure = tested + len(found), sure + len(cells)
        if cells:
            lines.append(row(f"{one['target']} minus base, {kind} {one[kind]:g}", cells))
    count = f"{sure} of {tested} differences from the base are significant; 1 in 20 is a false positive."
    return [*lines, count if compared else "No target but the base: nothing to compare with it."]


def _shown(tree: Mapping[str, Any]) -> str:
    return f"{Estimate(*(tree[name] for name in ('mean', 'n', 'low', 'high', 'why', 'items'))):+.3g}"
