# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze alignment`: the cosine of the step of ES with the gradient by backpropagation.

Both are taken at the target's weights, for the same training prompts and the expected reward J of completions sampled
at temperature 1:

    g    the gradient of J by REINFORCE (Williams 1992): mean of (reward - mean reward of the prompt) grad log p
    u    sum_i c_i eps_i, the step of ES (Wierstra et al. 2014; Salimans et al., arXiv 1703.03864, eq. 1), with the
         coefficients c of the config's shaping; members share their random numbers, as in training

Greedy members maximise another quantity, the reward of greedy completions, so members are sampled here. Directions are
in units of the noise: the gradient of a tensor is multiplied by the tensor's scale (1 with `es.sigma`).

Noise in g lowers the cosine. g is the mean of two independent halves of the samples. With the cosine r of the halves
its reliability is 2 r / (1 + r) (Spearman, Brown); `corrected` is the cosine over the square root of it.

References: a random direction has 0 with standard deviation 1 / sqrt(d). For a linear reward without noise and Gaussian
eps, the squared cosine with N centred coefficients in d dimensions has the distribution Beta((N - 1) / 2, (d - 1) / 2),
which gives the mean `expected`; the ratio of moments sqrt(N / (N + d + 1)) is near it. Antithetic pairs have N / 2 in
place of N - 1. Noise of rank r has the same second moments, so there the formula is near where N is far below d. A
placebo shuffles the coefficients.

No noise of a whole model is held: <g, eps_i> and <eps_i, eps_j> are summed over blocks of one tensor, and the length of
any step follows from them. Array suffixes: N noises, P prompts, K samples, S shuffles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import BASE, Analysis, Finding, check_unique, row
from evoalign.errors import ConfigError, EvoalignError
from evoalign.report import watching
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    import torch

    from evoalign.analysis.targets import Target
    from evoalign.checks.divergence import Sample
    from evoalign.config import Config
    from evoalign.rollouts import Encoded
    from evoalign.setup import Parts
    from evoalign.spaces import Space
    from evoalign.types import Layout

    Drawn: TypeAlias = tuple[list[Sample], "Floats"]
    """Samples of the mean, prompt by prompt, and their rewards [P, K]."""

Floats: TypeAlias = NDArray[np.float64]
GENERATION = 10**9
"""Generation of the members' noise, which no run uses."""
NUMBERS = 1 << 26
"""Most numbers of all noises together that are held at a time, in float32: 256 MiB; on a GPU 16 times as many, because
each noise of a block needs a call, and calls for small blocks leave a GPU idle."""
SHUFFLES = 199
FEWEST = 8


@dataclass(frozen=True)
class Settings:
    """`members`: the largest population; smaller ones of 8, 16, 32, ... are its first members.

    `prompts`: number of training prompts, those of the first generation. `samples`: completions of each prompt for the
    gradient. `sigma`: widths of the noise as multiples of the config's. `ranks`: ranks of the noise in space lowrank;
    none: the config's.
    """

    members: int = 128
    prompts: int = 16
    samples: int = 32
    sigma: tuple[float, ...] = (0.5, 1.0, 2.0)
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Population:
    """The scores [members, completions] of members of one space, by multiple of the config's sigma."""

    space: Space
    layout: Layout
    scores: Mapping[float, Floats]


@dataclass(frozen=True, slots=True)
class Products:
    """Scalar products of N noises with each half of the gradient, with each other, and of the halves."""

    halves_2N: Floats
    gram_NN: Floats
    own_22: Floats

    @property
    def norm(self) -> float:
        """Length of the gradient, the mean of its halves."""
        return float(self.own_22.sum()) ** 0.5 / 2

    @property
    def agreement(self) -> float:
        """Cosine of the halves."""
        return float(self.own_22[0, 1] / np.sqrt(self.own_22[0, 0] * self.own_22[1, 1]))

    @property
    def reliability(self) -> float | None:
        """Squared cosine of the gradient with the one without noise, as estimated; None unless the halves agree."""
        return 2 * self.agreement / (1 + self.agreement) if self.agreement > 0 else None


class Alignment(Analysis[Settings]):
    """Cosine of the step of ES with the gradient by backpropagation, by population, sigma and rank."""

    name = "alignment"
    help = "Cosine of the step of ES with the gradient by backpropagation: by population, sigma and rank."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads each model several times, in turn. Raises EvoalignError."""
        s = settings
        check_unique(targets)
        for name, fewest in {"members": FEWEST, "prompts": 1, "samples": 4}.items():
            if getattr(s, name) < fewest:
                raise ConfigError(f"{name}: {getattr(s, name)} is too few; set {fewest} or more")
        if s.samples % 2 or any(r < 1 for r in s.ranks):
            raise ConfigError(f"samples, ranks: {s.samples}, {list(s.ranks)}; set an even number, and ranks above 0")
        if not s.sigma or not all(0 < times < np.inf for times in s.sigma) or len({*s.sigma}) < len(s.sigma):
            raise ConfigError(f"sigma: {list(s.sigma)}; set one or more different numbers above 0")
        resolved = {name: resolve(name, config, s) for name in targets}
        watching.count(len(targets) * (1 + max(1, len(s.ranks)) * (1 + len(s.sigma))))
        found = [measure(name, *one, s) for name, one in resolved.items()]
        lines, near = list[str](), min(s.sigma, key=lambda times: abs(np.log(times)))
        for one in found:
            reliable = "its halves disagree" if one["reliability"] is None else f"{one['reliability']:.3g}"
            head = {"dimensions": f"{one['dimensions']:,}", "reliability of the gradient": reliable}
            lines.append(row(one["target"], {**head, "cosine of its halves": one["agreement"]}))
            for at in one["rows"]:
                where = f"{one['target']}, rank {at['rank']}" if at["rank"] else one["target"]
                cells = {"cosine": at["cosine"], "corrected": at["corrected"], "linear reward": at["expected"]}
                noise = {"random": f"0 +- {at['random']:.3g}", "p by shuffling": at["placebo"]["p"]}
                if at["members"] == s.members or at["times"] == near:
                    lines.append(row(f"{where}, sigma {at['sigma']:.3g}, {at['members']} members", cells | noise))
        return Finding({**asdict(s), "targets": found}, lines)


def resolve(name: str, config: Config | None, settings: Settings) -> tuple[Target | None, Config]:
    """Return a target and its config. Raises ConfigError for what has no step of ES in the model's own weights."""
    from evoalign import spaces
    from evoalign.analysis.targets import locate
    from evoalign.rundir.own import load_own
    from evoalign.training.resolve import resolve_target

    target = None if name == BASE else locate(name, config, split="train")
    own = config if target is None else target.config
    if own is None:
        raise ConfigError(f"{BASE} alone names no model; set the model, its task, space and es with --config")
    if target is not None:
        target.check_task()
        if target.run is not None and config is None:
            load_own(target.run, skip=("tracking", "grpo"))  # refuses a shaping of its own too, which is called here
        if target.is_adapter:
            raise ConfigError(f"{name} is an adapter; `evoalign export RUN --merge` makes a model folder; give that")
        own, _ = resolve_target(target.weights, own, "train")
        own = own if config is None else own.model_copy(update={"es_": config.es_})
    if not own.engine.serves_here:
        raise ConfigError(f"engine {own.engine.name}: alignment needs engine: transformers; set it with --config")
    if own.es_ is None:
        raise ConfigError(f"{name} has no section es; set es, and space: full or lowrank, with --config")
    if not spaces.create(own).evolves_model:
        raise ConfigError(f"space {own.space.name} evolves an adapter; set space: full or lowrank with --config")
    if settings.ranks and "rank" not in type(own.section).model_fields:
        raise ConfigError(f"ranks: {list(settings.ranks)} do not apply to space {own.space.name}; set space: lowrank")
    if own.es.antithetic and settings.members % 2:
        raise ConfigError(f"members: {settings.members} is odd, and es.antithetic needs pairs; set an even number")
    return target, own


def measure(name: str, target: Target | None, config: Config, settings: Settings) -> dict[str, Any]:
    """Return the numbers of one target."""
    from evoalign.setup import assemble

    populations: list[Population] = []
    drawn: Drawn | None = None
    device = "cpu"
    for rank in settings.ranks or (None,):
        section = {} if rank is None else {config.space.name: config.section.model_copy(update={"rank": rank})}
        own = config.model_copy(update=section)
        with closing(assemble(own)) as parts:
            if target is not None:
                target.check_prompts(own, parts.task, parts.data, parts.tokens)
            device = parts.facts.device
            drawn = drawn or sample(parts, settings)
            scores = {
                times: answer(parts, settings, times) for times in watching.each(settings.sigma, f"{name}, members")
            }
            populations.append(Population(parts.space, parts.layout, scores))
    assert drawn is not None
    watching.begin(f"{name}, gradient")
    halves = gradients(config, populations[0].layout, *drawn, device)
    rows: list[dict[str, Any]] = []
    found = Products(np.zeros((2, 0)), np.zeros((0, 0)), np.zeros((2, 2)))
    for one in watching.each(populations, f"{name}, noise"):
        count = settings.members // (2 if config.es.antithetic else 1)
        found = products(one, config.es.width, halves, count, device)
        rows += [at for times in one.scores for at in compare(one, config, times, found)]
    layout = populations[0].layout
    own = {"target": name} if target is None else target.described()
    numbers = {"space": config.space.name, "prompts": len(drawn[1]), "dimensions": layout.parameters}
    return {**own, **numbers, "agreement": found.agreement, "reliability": found.reliability, "rows": rows}


def sample(parts: Parts, settings: Settings) -> Drawn:
    """Sample the completions of the mean, and score them. Raises ConfigError without scores of single completions."""
    from evoalign.checks.divergence import Sample
    from evoalign.rewards.objective import refuse_whole_members
    from evoalign.rollouts import collect, columns_of, derive_seed, requests_of, scores_of
    from evoalign.types import MEAN_PLAN

    refuse_whole_members(parts.objective, "analyze alignment")
    if parts.task.player:
        raise ConfigError(
            f"analyze alignment: the gradient of episodes of several turns ({parts.task.name}) is unknown"
        )
    rows, config, prompts = _prompts(parts, settings, settings.samples)
    requests = requests_of(config, rows, prompts, GENERATION)
    requests = [replace(r, seed=derive_seed("alignment", config.seed, r.index)) for r in requests]
    rollouts = collect(parts.engine, MEAN_PLAN, requests)
    texts, examples = [r.text for r in rollouts], [parts.data.train[i] for i in rows]
    rewards = scores_of(parts.objective, columns_of(parts.task, texts, examples), texts, examples)
    samples = [Sample(prompts[i], r.token_ids) for i, r in zip(rows, rollouts, strict=True)]
    return samples, np.array(rewards).reshape(-1, settings.samples)


def answer(parts: Parts, settings: Settings, times: float) -> Floats:
    """Return the scores [members, completions] of members at `times` the config's sigma."""
    from evoalign.rewards.objective import judge
    from evoalign.rollouts import collect, group_of, requests_of
    from evoalign.types import Plan, population

    rows, config, prompts = _prompts(parts, settings, parts.config.task.samples or 1)
    members = population(settings.members, antithetic=config.es.antithetic)
    plan = Plan(GENERATION, times * config.es.width, members)
    rollouts = collect(parts.engine, plan, requests_of(config, rows, prompts, GENERATION))
    return judge(parts.objective, group_of(parts.task, [parts.data.train[i] for i in rows], rollouts, len(members)))


def _prompts(parts: Parts, settings: Settings, each: int) -> tuple[list[int], Config, Encoded]:
    """Return the rows of the prompts, each as often as it is sampled; the config at temperature 1; token ids by row."""
    from evoalign.rollouts import Encoded, batch

    train, sampling = parts.data.train, {"temperature": 1.0, "top_p": 1.0}
    chosen = batch(len(train), min(settings.prompts, len(train)), parts.config.seed, 0)
    config = parts.config.model_copy(update={"sampling": parts.config.sampling.model_copy(update=sampling)})
    return [i for i in chosen for _ in range(each)], config, Encoded(parts.task, parts.tokens, train)


def gradients(
    config: Config, layout: Layout, samples: Sequence[Sample], rewards_PK: Floats, device: str
) -> list[dict[str, torch.Tensor]]:
    """Return the gradient of the expected reward by each half of the samples, on the CPU, by tensor of the layout.

    The served weights are computed in float32. Raises EvoalignError where all samples of every prompt score the same.
    """
    import torch

    from evoalign.checks.divergence import logits_of
    from evoalign.engines.transformers.engine import dtype_on, load_model
    from evoalign.models.tensors import tensors_of

    halves_P2K = rewards_PK.reshape(len(rewards_PK), 2, -1)
    weights_P2K = (halves_P2K - halves_P2K.mean(2, keepdims=True)) / (halves_P2K.size / 2)
    if not weights_P2K.any(axis=(0, 2)).all():
        raise EvoalignError("all completions of each prompt have the same reward: no gradient; raise samples, prompts")
    at = torch.device(device)
    model = load_model(config.model, dtype_on(config.model, at)).float().to(at).requires_grad_(True)
    found: list[dict[str, torch.Tensor]] = []
    for half in range(2):
        model.zero_grad()
        where = np.zeros_like(weights_P2K)
        where[:, half] = weights_P2K[:, half]
        for one, weight in zip(samples, where.flat, strict=True):
            if weight and one.token_ids:
                ids_T = torch.tensor(one.token_ids, device=at)[:, None]
                (float(weight) * logits_of(model, one, at).log_softmax(-1).gather(1, ids_T).sum()).backward()
        weights = [p.data for p in model.parameters()]
        for p in model.parameters():  # so that the gradients have the names of the tensors, single experts too
            p.data = torch.zeros_like(p) if p.grad is None else p.grad
        named = tensors_of(model)
        found.append({t.name: named[t.name].to("cpu", copy=True) for t in layout.tensors})
        for p, weight in zip(model.parameters(), weights, strict=True):
            p.data = weight
    return found


def products(
    one: Population, width: float, halves: Sequence[Mapping[str, torch.Tensor]], count: int, device: str
) -> Products:
    """Return the scalar products of the first `count` noises, each regenerated block by block as an update has it."""
    import torch

    from evoalign.noise import row_blocks
    from evoalign.types import Member, Update

    at = torch.device(device)
    numbers = NUMBERS if at.type == "cpu" else 16 * NUMBERS
    alone = [Update(0, GENERATION, (Member(0, i, 1),), (1.0,), width, 1.0) for i in range(count)]
    dots_2N, gram_NN, own_22 = (torch.zeros(n, m, dtype=torch.float64) for n, m in ((2, count), (count, count), (2, 2)))
    for t in one.layout.tensors:
        for slices in row_blocks(t.shape, max(1, numbers // count)):
            noise_N = torch.empty(count, math.prod(s.stop - s.start for s in slices), device=at)
            for i, u in enumerate(alone):
                noise_N[i] = one.space.gradient(one.layout, t.name, u, slices, at).flatten()
            part_2 = torch.stack([half[t.name][slices].flatten() for half in halves]).to(at) * t.scale
            dots_2N += (part_2 @ noise_N.mT).cpu()
            gram_NN += (noise_N @ noise_N.mT).cpu()
            own_22 += (part_2.double() @ part_2.double().mT).cpu()
    return Products(dots_2N.numpy(), gram_NN.numpy(), own_22.numpy())


def compare(one: Population, config: Config, times: float, found: Products) -> list[dict[str, Any]]:
    """Return the cosines of populations of 8, 16, 32, ... and all members at `times` the config's sigma."""
    from evoalign import shaping

    scores_MP, rows, each = one.scores[times], list[dict[str, Any]](), 2 if config.es.antithetic else 1
    sizes = [2**k for k in range(3, 64) if 2**k < len(scores_MP)]
    for size in [*sizes, len(scores_MP)]:
        weights_N = shaping.shape(scores_MP[:size], config.es.shaping)
        weights_N = weights_N if each == 1 else weights_N[::2] - weights_N[1::2]
        n = len(weights_N)
        dots_N, gram_NN = found.halves_2N.mean(0)[:n] / found.norm, found.gram_NN[:n, :n]
        at = cosine(weights_N, dots_N, gram_NN)
        rows.append({
            "rank": one.layout.rank or None, "times": times, "sigma": times * config.es.width, "members": size,
            "cosine": at, "corrected": corrected(at, found.reliability),
            "expected": expected(n if each == 2 else n - 1, one.layout.parameters),
            "random": one.layout.parameters**-0.5, "placebo": placebo(weights_N, dots_N, gram_NN, signs=each == 2),
        })  # fmt: skip
    return rows


def cosine(weights: Floats, dots: Floats, gram: Floats) -> Estimate:
    """Return the cosine of sum_i w_i eps_i with a unit vector g, given <g, eps_i> and <eps_i, eps_j>.

    The interval is for new members: t of the changes of the cosine by each member, to first order.
    """
    moved_N = gram @ weights
    square = float(weights @ moved_N)
    if not square:
        return Estimate(float("nan"), len(weights), why="all members score the same: no step")
    found = float(weights @ dots) / square**0.5
    own_N = weights * dots / square**0.5 - found * weights * (moved_N - weights * gram.diagonal() / 2) / square
    return statistics.mean(found + len(weights) * (own_N - own_N.mean()))


def corrected(found: Estimate, reliability: float | None) -> Estimate | None:
    """Return the cosine with a gradient without noise, from one with a gradient of this reliability; None if unknown.

    The interval does not include the error of the reliability.
    """
    if reliability is None:
        return None
    ends = (None if end is None else end / reliability**0.5 for end in (found.low, found.high))
    return replace(found, mean=found.mean / reliability**0.5, **dict(zip(("low", "high"), ends, strict=True)))


def expected(freedom: int, dimensions: int) -> float:
    """Return the mean cosine for a linear reward, the root of a variable of Beta(freedom / 2, (dimensions - 1) / 2)."""
    from scipy.special import poch

    return float(poch(freedom / 2, 0.5) / poch((freedom + dimensions - 1) / 2, 0.5))


def placebo(weights: Floats, dots: Floats, gram: Floats, *, signs: bool) -> dict[str, float]:
    """Return mean and standard deviation of the cosine with shuffled weights (and `signs`), and p of the own one."""
    random = np.random.Generator(np.random.Philox(0))
    shuffled_SN = random.permuted(np.tile(weights, (SHUFFLES, 1)), axis=1)
    shuffled_SN *= random.choice((-1.0, 1.0), shuffled_SN.shape) if signs else 1.0
    found_S = np.array([cosine(one_N, dots, gram).mean for one_N in shuffled_SN])
    above = int((~(found_S < cosine(weights, dots, gram).mean)).sum())  # all of them without a step
    return {"mean": float(found_S.mean()), "sd": float(found_S.std(ddof=1)), "p": (1 + above) / (1 + SHUFFLES)}
