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

from evoalign import statistics
from evoalign.analysis.base import BASE, Analysis, Finding, row
from evoalign.analysis.coverage import estimators as of
from evoalign.analysis.coverage import figures
from evoalign.analysis.coverage.estimators import SIGMA, TEMPERATURE, All, Floats, Problem, Support, Tries, Way
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.statistics import Estimate, between

if TYPE_CHECKING:
    from evoalign.analysis.mixer import ModelMixer
    from evoalign.config import Config, EvaluationConfig
    from evoalign.evaluation import Scored

VERDICTS = {
    "shrinkage_beyond_chance": ("solves less", "keeps more"),
    "expansion_beyond_chance": ("solves more new problems", "solves fewer new problems"),
}
"""Words for a value above 0 and below 0, compared with other tries of the base."""


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
        from evoalign.analysis.mixer import EvalSettings, ModelMixer
        from evoalign.analysis.targets import placebo_hint
        from evoalign.types import text_of

        ways, ks = _ways(settings), _ks(settings)
        both = bool(settings.temperature and settings.sigma)
        names = [BASE, *(name for name in targets if name != BASE)]
        wanted = EvalSettings(examples=settings.examples, max_tokens=settings.tokens, seed=settings.seed)
        with ModelMixer(names, config, wanted) as mixer:
            rule, is_solved = _rule(mixer, settings)
            watching.count(len(names) * sum(1 if way.kind == TEMPERATURE else settings.samples for way in ways))
            tries = {name: {way: measure(mixer, name, way, settings, is_solved) for way in ways} for name in names}
            task = mixer.task
            problems = [Problem(text_of(task.prompt(e)), task.gold(task.handed(e))) for e in mixer.examples]
            known = {name: target.described() for name, target in mixer.targets.items()}
            numbers = {
                **asdict(settings),
                "k": ks,
                "examples": len(problems),
                "solved_is": rule,
                "drawn": mixer.config.evaluation.model_dump(mode="json", include={"max_tokens", "top_p", "stop"}),
                "targets": [{**known.get(n, {"target": n}), "ways": _of_ways(tries[n], ks)} for n in names],
                "temperature_less_noise": [contest(tries, n, k) for n in names for k in ks if both],
                "against_base": [against_base(tries, n, way, ks) for n in names[1:] for way in ways],
                "overlap": [_overlap(tries, a, b, way) for a, b in combinations(names, 2) for way in ways],
                "problems": [_problem(problem, i, tries) for i, problem in enumerate(problems)],
            }
            lines = [*sentences(numbers), *placebo_hint(mixer.targets)]
        return Finding(numbers, lines, figures=partial(figures.draw, tries, problems, ks, rule, lines))


def _ways(settings: Settings) -> list[Way]:
    for name, values, least in (("temperature", settings.temperature, 1e-6), ("sigma", settings.sigma, 1e-12)):
        if wrong := [v for v in values if not least <= v < math.inf]:
            raise ConfigError(f"{name}: {wrong[0]:g} does not vary the completions; set numbers above 0")
        if len({*values}) < len(values):
            raise ConfigError(f"{name}: {list(values)} has a value twice; give each once")
    if settings.samples < 2 or settings.samples % 2:
        raise ConfigError(
            f"samples: {settings.samples} cannot be halved for the comparison with the base; set an even number"
        )
    ways = [*(Way(TEMPERATURE, v) for v in settings.temperature), *(Way(SIGMA, v) for v in settings.sigma)]
    if not ways:
        raise ConfigError("temperature and sigma are both empty; give a value of one of them")
    return ways


def _ks(settings: Settings) -> list[int]:
    wrong = [k for k in settings.k if k < 1]
    found = sorted({k for k in settings.k if 1 <= k <= settings.samples})
    if wrong or not found:
        value = wrong[0] if wrong else list(settings.k)
        raise ConfigError(f"k: {value} does not fit {settings.samples} samples; set numbers from 1 to that")
    return found


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


# --- numbers ----------------------------------------------------------------------------------------------------------


def _of_ways(tries: Mapping[Way, Tries], ks: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            way.kind: way.value,
            "solved": int(one.solved_NP.any(0).sum()),
            "pass": [
                {
                    "k": k,
                    **of.estimate(one.solved_NP, k, shared=way.shared).tree(),
                    "sampling_error": of.error(of.gaps(one.solved_NP, k), shared=way.shared),
                }
                for k in ks
            ],
            **{name: found.tree() for name, found in one.variety().items()},
        }
        for way, one in tries.items()
    ]


def contest(tries: All, name: str, k: int) -> dict[str, Any]:
    """Return pass@k by the best temperature minus that by the best sigma, each chosen by other problems."""
    if len(next(iter(tries[name].values())).texts_PN) < 2:
        return {"target": name, "k": k, "why": "one problem: no other one to choose a way by"}
    solved: dict[str, of.Solved] = {}
    used: dict[str, list[float]] = {}
    for kind in (TEMPERATURE, SIGMA):
        ways = [way for way in tries[name] if way.kind == kind]
        solved[kind], places = of.chosen_elsewhere([tries[name][way].solved_NP for way in ways], k)
        used[kind] = [ways[i].value for i in places]
    heat_P, noise_P = (of.pass_at(solved[kind], k) for kind in (TEMPERATURE, SIGMA))
    found = between(heat_P - noise_P, -1.0, 1.0)
    found = of.widened(found, of.gaps(solved[SIGMA], k), shared=True, least=-1.0)
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
        "support": _shares(found),
        "by_chance": _shares(chance),
        "shrinkage_beyond_chance": beyond(found.shrunk_P, chance.shrunk_P).tree(),
        "expansion_beyond_chance": beyond(found.expanded_P, chance.expanded_P).tree(),
    }


def beyond(found_P: Floats, chance_P: Floats) -> Estimate:
    """Estimate how far shares of problems exceed those by chance."""
    return between(found_P - chance_P, -1.0, 1.0)


def _shares(found: Support) -> dict[str, float]:
    return {part: float(getattr(found, f"{part}_P").mean()) for part in ("preserved", "shrunk", "expanded", "neither")}


def _overlap(tries: All, a: str, b: str, way: Way) -> dict[str, Any]:
    a_NP, b_NP = tries[a][way].solved_NP, tries[b][way].solved_NP
    a_P, b_P = a_NP.any(0), b_NP.any(0)
    counts = {"both": a_P & b_P, "a_only": a_P & ~b_P, "b_only": b_P & ~a_P, "neither": ~a_P & ~b_P}
    whole = {key: int(marks.sum()) for key, marks in counts.items()}
    return {"a": a, "b": b, way.kind: way.value, **whole, "jaccard": of.jaccard(a_NP, b_NP).tree()}


def _problem(problem: Problem, index: int, tries: All) -> dict[str, Any]:
    solved = {
        name: {way.name: int(one.solved_NP[:, index].sum()) for way, one in ways.items()}
        for name, ways in tries.items()
    }
    return {"prompt": problem.prompt, "target": problem.target, "solved": solved}


# --- text -------------------------------------------------------------------------------------------------------------


def sentences(numbers: Mapping[str, Any]) -> list[str]:
    """Return a row for each target and way, and the significant differences."""
    n, ks = numbers["samples"], numbers["k"]
    few = 1 - 0.05 ** (1 / n)
    lines = [
        f"{numbers['examples']} problems, {n} tries of each in each way; solved is: {numbers['solved_is']}. A problem "
        f"that no try solved may still be solved by up to {few:.1%} of further tries (95 %)."
    ]
    for target in numbers["targets"]:
        for one in target["ways"]:
            cells: dict[str, object] = {f"pass@{p['k']}": _read(p) for p in one["pass"] if p["k"] in (ks[0], ks[-1])}
            cells |= {"entropy": one["entropy"]["mean"], "mean difference": one["pairwise"]["mean"]}
            lines.append(row(f"{target['target']}, {_way(one)}", cells))
    lines += [_won(one) for one in numbers["temperature_less_noise"] if one["k"] == ks[-1] and "mean" in one]
    return [*lines, *compared(numbers["against_base"], sorted({ks[0], ks[-1]}))]


def _read(tree: Mapping[str, Any]) -> Estimate:
    mean = math.nan if tree["mean"] is None else tree["mean"]
    return Estimate(mean, tree["n"], tree["low"], tree["high"], tree["why"], tree["items"])


def _way(tree: Mapping[str, Any]) -> str:
    kind = TEMPERATURE if TEMPERATURE in tree else SIGMA
    return f"{kind} {tree[kind]:g}"


def _won(tree: Mapping[str, Any]) -> str:
    found = _read(tree)
    verdict = "no significant difference"
    if statistics.is_sure(found):
        verdict = "sampling solves more" if found.mean > 0 else "weight noise solves more"
    what = f"{tree['target']}: sampling minus weight noise, pass@{tree['k']} with equally many tries"
    return f"{what}: {found:+.3g}: {verdict}."


def compared(rows: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> list[str]:
    """Return the significant differences of targets from the base."""
    if not rows:
        return ["No target but the base: nothing to compare with it."]
    lines: list[str] = []
    for one in rows:
        label = f"{one['target']} and base, {_way(one)}"
        for change in one["pass"]:
            if change["k"] in ks and statistics.is_sure(_read(change)):
                lines.append(f"{label}: pass@{change['k']} differs by {_read(change):+.3g}.")
        for key, (more, less) in VERDICTS.items():
            if statistics.is_sure(found := _read(one[key])):
                verdict = more if found.mean > 0 else less
                lines.append(f"{label}: it {verdict} than other tries of the base: {found:+.3g}.")
    count = len(rows) * (len(ks) + len(VERDICTS))
    lines.append(f"{len(lines)} of {count} differences from the base are significant; 1 in 20 is a false positive.")
    return lines
