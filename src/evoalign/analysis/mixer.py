# SPDX-License-Identifier: Apache-2.0
"""`ModelMixer`: one model in memory that takes any mixture of targets' weights, with noise, and is then evaluated.

The weights of the targets (adapters merged into their base) are kept in float32 on the CPU. A mixture is affine: it is
summed in float64 and rounded to float32. `Perturbation` adds Gaussian noise, and the sum is rounded once to the dtype
in which the config serves the model. Each `write` starts from the kept weights: nothing is restored by subtraction.
Noise is that of `evoalign.noise`, a function of seed, tensor name and trial. It is the same for every mixture, so that
differences between models are paired.

On a CPU the arithmetic is float32 whatever the served dtype; on a GPU it is that dtype.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign import evaluation, noise, statistics, tokens
from evoalign.analysis.base import BASE, by_example, check_unique
from evoalign.analysis.targets import Target, locate
from evoalign.analysis.weights import embeddings_of, head_of, parts_of
from evoalign.checks import divergence, hacking
from evoalign.checks.distance import read_as_numbers
from evoalign.config import Config, EvaluationConfig, from_dict
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.evaluation import Evaluation
from evoalign.models.adapters import is_tied, put_into, untie
from evoalign.models.files import load_whole
from evoalign.models.origin import model_path
from evoalign.models.tensors import tensors_of
from evoalign.rundir import checkpoint
from evoalign.setup import task_and_data, with_form
from evoalign.statistics import Estimate
from evoalign.tasks import Data, Split, Task
from evoalign.tokens import Tokens
from evoalign.training.resolve import check_parted
from evoalign.training.weights import check_folder

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""Weights by checkpoint name, float32 on the CPU."""
Mix: TypeAlias = Mapping[str, float]
"""Coefficients of targets by name; they sum to 1."""
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Gaussian noise of standard deviation `sigma` on the tensors of `part`; `trial` numbers the draw."""

    sigma: float
    trial: int
    part: str = "all"


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Number of `examples` of a split (None: all), and how to decode them (None: as the config's evaluation).

    `seed` seeds the noise on weights. For a divergence each example is sampled until there are `kl_tokens` tokens.
    """

    examples: int | None = None
    samples: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    split: Split = "test"
    seed: int = 0
    kl_tokens: int = 1


@dataclass(frozen=True, slots=True)
class KlSums:
    """KL from a reference in nats, tokens and completions, each summed over the completions to a prompt.

    [P], or [K, P] for K draws of noise. The means have intervals for new prompts, and for new draws.
    """

    nats_P: Floats
    tokens_P: Floats
    draws_P: Floats

    @property
    def per_token(self) -> Estimate:
        return statistics.bounded(statistics.ratio(self.nats_P, self.tokens_P), high=np.inf)

    @property
    def per_completion(self) -> Estimate:
        return statistics.bounded(statistics.ratio(self.nats_P, self.draws_P), high=np.inf)


class ModelMixer:
    """A model whose weights can be set to mixtures of the targets `names`; `base` may be among them.

    A context manager, which frees the model and the weights at its end.

    Raises EvoalignError where a target is missing, is of another task than the first, or has other tensors than the
    base model (ModelError names the first).
    """

    def __init__(self, names: Sequence[str], config: Config | None, wanted: EvalSettings = EvalSettings()) -> None:
        check_unique(names)
        targets = {name: locate(name, config, split=wanted.split) for name in names if name != BASE}
        if not targets and config is None:
            raise ConfigError(f"{BASE} alone names no model; add a run, or set the model and its task with --config")
        own = _config_of(targets, config, wanted)
        self.names, self.wanted, self.targets, self.config = tuple(names), wanted, targets, own
        self.task, data = task_and_data(own, None, None)
        try:
            self.examples = data.of(wanted.split)[: wanted.examples]
            if not self.examples:
                raise ConfigError(f"the task has no {wanted.split} split; choose another")
            _check_splits(self.task, data, own, targets, wanted.split)
            self._tokens = tokens.load(own.model, own.task.template_kwargs)
            for target in targets.values():
                target.check_prompts(own, self.task, data, self._tokens)
            read_as_numbers(own.model)
            self._engine = _engine_of(own, self._tokens)
            self._dtype = self._engine.dtype
            self.model: Any = self._engine.model
            if self._engine.device.type == "cpu":
                self.model.float()
            read, self.tied = self._read(targets)
            self._weights = dict(read)
        except BaseException:
            self.task.close()
            raise
        self._tensors = tensors_of(self.model)
        self.parts = parts_of(self.model)
        self._known: dict[tuple[tuple[str, float], ...], Evaluation] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self.task.close()
        self._weights, self._tensors, self.model = dict[str, Tensors](), {}, None

    def described(self, name: str) -> dict[str, str]:
        """Return the fields that identify a target in JSON."""
        return self.targets[name].described() if name in self.targets else {"target": name}

    def put(self, name: str, weights: Tensors) -> None:
        """Add weights under a name, or replace those that it had; missing tensors are the base model's.

        Tensors are read from `weights` at each `write`, so the mapping may compute them. Raises ModelError where names
        or shapes are not those of the base model.
        """
        layers: list[Any] = [weights, self._weights[BASE]]  # ChainMap is typed as if they were written to
        found: ChainMap[str, torch.Tensor] = ChainMap(*layers)
        _check_shapes(name, found, self._weights[BASE])
        self._weights[name] = found
        self._known = {key: one for key, one in self._known.items() if name not in dict(key)}

    @torch.no_grad()
    def write(self, mix: Mix, perturbed: Perturbation | None = None) -> None:
        """Write a mixture into the model, with noise if given. Raises EvoalignError."""
        if not isclose(sum(mix.values()), 1.0, abs_tol=1e-9):
            raise EvoalignError(f"the coefficients {dict(mix)} do not sum to 1")
        noisy = self.parts[perturbed.part] if perturbed is not None and perturbed.sigma else frozenset[str]()
        for name, served in self._tensors.items():
            value = self.mixed(name, mix)
            if perturbed is not None and name in noisy:
                mean = value.to(served.device)
                key, widths = noise.key(self.wanted.seed, "analysis", name), [perturbed.sigma]
                shape, trials = tuple(mean.shape), [perturbed.trial]
                value = noise.scaled(key, shape, 0, trials, widths, mean=mean, dtype=self._dtype)[0]
            served.copy_(value.to(self._dtype))

    def mixed(self, name: str, mix: Mix) -> torch.Tensor:
        """Return a tensor of a mixture without noise, float32 on the CPU. A single target keeps its bits."""
        chosen = [(c, self._weights[model][name]) for model, c in sorted(mix.items()) if c]
        first = chosen[0][1]
        if all(tensor is first for _, tensor in chosen):
            return first
        start = first.double()
        return start.add(sum(c * (tensor.double() - start) for c, tensor in chosen[1:])).float()

    def evaluate(
        self, mix: Mix, perturbed: Perturbation | None = None, drawn: EvaluationConfig | None = None
    ) -> Evaluation:
        """Evaluate a mixture on the examples. `drawn` replaces the config's evaluation settings.

        Results without noise and without `drawn` are cached.
        """
        key = tuple(sorted((name, c) for name, c in mix.items() if c))
        plain = perturbed is None and drawn is None
        if plain and key in self._known:
            return self._known[key]
        self.write(mix, perturbed)
        how = drawn or self.config.evaluation
        found = evaluation.evaluate(self._engine, self._tokens, self.task, self.examples, how)
        if plain:
            self._known[key] = found
        return found

    def rewards(self, found: Evaluation) -> Floats:
        """Return the reward of each example [E], the mean over samples and seeds."""
        return np.array(found.measures_E["reward"])

    def hacked(self, found: Evaluation) -> Floats:
        """Return the share of each example's completions [E] that `evoalign.checks.hacking` marks as hacked.

        Signs are compared with the base model's completions, rewards with the best one of the base and all targets.
        """
        before = self.evaluate({BASE: 1.0}).completions
        after = [one for name in self.names for one in self.evaluate({name: 1.0}).completions]
        marked = hacking.flags(found.completions, before, after)["hacked"]
        shares = by_example(found.completions, marked)
        return np.array([shares[e] for e in range(len(self.examples))])

    def divergence(self, reference: Mix, mix: Mix, perturbed: Perturbation | None = None) -> KlSums:
        """Return KL(mix || reference), exact over the vocabulary along the mixture's own samples at temperature 1.

        Raises EvoalignError where nothing is generated or a logit is not a number.
        """
        drawn, sums_N4 = self.drawn(reference, mix, perturbed)
        divergence.summarise(drawn, sums_N4)  # raises where a sum is not a number
        of_prompt: defaultdict[tuple[int, ...], Floats] = defaultdict(lambda: np.zeros(3))
        for sample, nats in zip(drawn, sums_N4[:, 3].tolist(), strict=True):
            of_prompt[sample.prompt_ids] += nats, len(sample.token_ids), 1
        return KlSums(*np.array(list(of_prompt.values())).T)

    @torch.no_grad()
    def drawn(
        self, reference: Mix, mix: Mix, perturbed: Perturbation | None = None
    ) -> tuple[list[divergence.Sample], torch.Tensor]:
        """Return a mixture's samples at temperature 1, and of each the sums of k1, k2, k3 and the exact KL [N, 4].

        Every mixture is sampled with the same seeds. Raises EvoalignError where nothing is generated.
        """
        self.write(mix, perturbed)
        drawn = divergence.draw(self._engine, self._tokens, self.task, self.examples, self.config)
        if not any(sample.token_ids for sample in drawn):
            raise EvoalignError("no token was generated, so there is no divergence to measure; give it some prompts")
        sums: list[torch.Tensor] = []
        for group in divergence.groups(self.model, drawn):
            own = [divergence.logits_of(self.model, sample, self._engine.device) for sample in group]
            self.write(reference)
            for sample, own_TV in zip(group, own, strict=True):
                other_TV = divergence.logits_of(self.model, sample, self._engine.device)
                sums.append(divergence.sums_of(own_TV, other_TV, sample.token_ids))
            self.write(mix, perturbed)
        return drawn, torch.stack(sums)

    def _read(self, targets: Mapping[str, Target]) -> tuple[Mapping[str, Tensors], bool]:
        """Return the weights of the base and of all targets by name, and whether head and embeddings are tied.

        Unchanged tensors are kept once. Where one model has an untied head, all get one.
        """
        base = {name: tensor.float().to("cpu", copy=True) for name, tensor in tensors_of(self.model).items()}
        found = {BASE: base}
        for name, target in targets.items():
            own = effective(target, self._dtype)
            found[name] = {n: base[n] if n in base and torch.equal(t, base[n]) else t.float() for n, t in own.items()}
        head, words = head_of(self.model), embeddings_of(self.model)
        tied = is_tied(self.model)
        if tied and any(head in weights for weights in found.values()):
            untie(self.model)
            tied = False
        for weights in found.values():
            if not tied and head:
                weights.setdefault(head, weights[words])
        for name, weights in found.items():
            _check_shapes(name, weights, found[BASE])
        return found, tied


def effective(target: Target, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights that a target is served with, float32 on the CPU by checkpoint name; adapters are merged.

    `dtype` is that in which the base is served. Reads whole models. Raises EvoalignError.
    """
    if target.run is None:
        check_folder(target.weights)
    if target.is_adapter:
        config = target.config.model
        model = load_whole(model_path(config), config.revision, dtype, config.name).float()
        return tensors_of(put_into(model, target.weights, config.name))
    model = load_whole(str(target.weights), None, torch.float32, target.name)
    return {**tensors_of(model), **checkpoint.mean_of(target.weights)}


def _engine_of(config: Config, tokens: Tokens) -> TransformersEngine:
    """Return an engine whose weights can be made float32 on a CPU: the static decoder keeps the dtype it began with."""
    engine = TransformersEngine(config, tokens)
    if engine.device.type != "cpu" or engine.dtype == torch.float32 or not engine.is_static:
        return engine
    engine.close()
    return TransformersEngine(config.model_copy(update={"engine": config.engine.in_process()}), tokens)


def _config_of(targets: Mapping[str, Target], config: Config | None, wanted: EvalSettings) -> Config:
    """Return the given config, or else the first target's, with the evaluation settings. Raises ConfigError.

    The data are split by the seed of the first run also with a given config, so that no training example is used.
    """
    if wanted.examples is not None and wanted.examples < 1:
        raise ConfigError(f"examples: {wanted.examples} is too few; set 1 or more")
    if config is not None:
        made = next((target for target in targets.values() if target.run is not None), None)
        own = with_form(config) if made is None else config.model_copy(update={"seed": made.config.seed})
        own = own if made is None else with_form(own, made.run)
    else:
        first, *others = targets.values()
        first.check_task()
        own = first.config
        for other in others:
            if _task(other) != _task(first):
                differ = [
                    f"{key} is {here} in {first.name} and {there} in {other.name}"
                    for key, here, there in zip(TASK_KEYS, _task(first), _task(other), strict=True)
                    if here != there
                ]
                raise ConfigError(f"these targets have no task in common: {', '.join(differ)}; set one with --config")
    changed = {"samples": wanted.samples, "max_tokens": wanted.max_tokens, "temperature": wanted.temperature}
    tree = own.evaluation.model_dump() | {name: value for name, value in changed.items() if value is not None}
    checked = from_dict({**own.model_dump(), "evaluation": tree}).evaluation
    prompts = 2**31 if wanted.examples is None else wanted.examples
    checks = own.checks.model_copy(update={"kl_prompts": prompts, "kl_tokens": wanted.kl_tokens})
    engine = own.engine if own.engine.serves_here else own.engine.in_process()
    return own.model_copy(update={"evaluation": checked, "checks": checks, "engine": engine})


TASK_KEYS = ("task.name", "model.name", "task.test_data")


def _task(target: Target) -> tuple[str, str, str | None]:
    """Return the values of `TASK_KEYS`, of files and folders their names."""
    task = target.config.task
    data = None if task.test_data is None else Path(str(task.test_data)).name
    return task.name, Path(target.config.model.name).name, data


def _check_splits(task: Task, data: Data, own: Config, targets: Mapping[str, Target], split: Split) -> None:
    """Raise ConfigError where a run split the data differently: it may have trained on examples of this split."""
    for target in targets.values():
        seed = target.config.seed
        if target.run is not None:
            check_parted(target.name, target.config.task, own.task, split)
        if target.run is None or seed == own.seed or list(task.load_data(seed).of(split)) == list(data.of(split)):
            continue
        raise ConfigError(
            f"{target.name} was trained with seed {seed}, which draws another {split} split than seed {own.seed}; give "
            f"examples of neither with --config and task.{split}_data"
        )


def _check_shapes(target: str, weights: Tensors, base: Tensors) -> None:
    if missing := [name for name in base if name not in weights]:
        raise ModelError(f"{target} has no {missing[0]}, which the base model has; is it a model of another kind?")
    if more := sorted(weights.keys() - base.keys()):
        raise ModelError(f"{target} has {more[0]}, which the base model has not; is it a model of another kind?")
    for name, tensor in base.items():
        if weights[name].shape != tensor.shape:
            raise ModelError(
                f"{target} has {name} of shape {list(weights[name].shape)}, and the base model of "
                f"{list(tensor.shape)}; only models with equal shapes can be mixed"
            )
