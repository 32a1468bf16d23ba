# SPDX-License-Identifier: Apache-2.0
"""One model in memory whose weights can be set to anything between targets, with noise on them, and asked.

The weights that targets answer with (adapters merged into their base) are kept in float32 on the CPU. A point is an
affine mixture of them, summed in float64 and rounded to float32, to which `perturbed` adds Gaussian noise of width
sigma; the sum is rounded once, to the dtype in which the config serves the model. Every point is written from what is
kept, whatever the model held before: nothing is restored by subtraction. Noise is that of `evoalign.noise`, a function
of seed, tensor name and trial: the same for every mixture, so that differences between models are paired.

On a CPU the arithmetic is float32 whatever the served dtype, on a GPU it is that dtype.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign import evaluation, noise, tokens
from evoalign.analysis.parts import head_of, parts_of, words_of
from evoalign.analysis.targets import Target, locate
from evoalign.checks import divergence, hacking
from evoalign.config import Config, EvaluationConfig, from_dict
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.evaluation import Evaluation
from evoalign.models.adapters import is_tied, put_into, untie
from evoalign.models.files import load_whole
from evoalign.models.origin import model_path
from evoalign.models.tensors import tensors_of
from evoalign.rundir import checkpoint
from evoalign.rundir.method import method_of
from evoalign.setup import task_and_data
from evoalign.tasks import Data, Split, Task
from evoalign.training.resolve import check_parted
from evoalign.training.weights import check_folder

BASE = "base"
"""The name, among targets, of the model that they were trained from."""

Weights: TypeAlias = Mapping[str, torch.Tensor]
"""By their names in checkpoints, float32 on the CPU."""
Mix: TypeAlias = Mapping[str, float]
"""Coefficients of targets, by name; they sum to 1."""
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Gaussian noise of standard deviation `sigma` on the tensors of `part`; `trial` says which draw of it."""

    sigma: float
    trial: int
    part: str = "all"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a lab asks: so many `examples` of a split (None: all), and how they are answered (None: as the config says).

    `seed` is that of the noise on weights, whatever the seeds of the targets. For a divergence every example is
    answered again until there are `kl_tokens` tokens.
    """

    examples: int | None = None
    samples: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    split: Split = "test"
    seed: int = 0
    kl_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Nats:
    """KL of a point from a reference, summed over the tokens of its own draws: [P] each, over prompts."""

    nats_P: Floats
    tokens_P: Floats
    draws_P: Floats


class Lab:
    """See above. `names` are the targets, `base` among them where it was asked for. `close` it.

    Raises EvoalignError where a target is not there, has other tensors than the base model (ModelError names the first)
    or is of another task than the first.
    """

    def __init__(self, names: Sequence[str], config: Config | None, asked: Asked = Asked()) -> None:
        targets = _located(names, config, asked.split)
        own = _config_of(targets, config, asked)
        self.names, self.asked, self.targets, self.config = tuple(names), asked, targets, own
        self.task, data = task_and_data(own, None, None)
        try:
            self.examples = _some(data.of(asked.split), asked)
            _check_splits(self.task, data, own, targets, asked.split)
            self._tokens = tokens.load(own.model)
            self._engine = TransformersEngine(own, self._tokens)
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

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and the weights."""
        self._engine.close()
        self.task.close()
        self._weights, self._tensors, self.model = dict[str, Weights](), {}, None

    def put(self, name: str, weights: Weights) -> None:
        """Keep further weights under a name, in place of those it had; what they lack is the base model's.

        Each is read from `weights` whenever a point is written, so that it may be made only then. Raises ModelError
        where they are not of the base model's names and shapes.
        """
        layers: list[Any] = [weights, self._weights[BASE]]  # typed as if they were written to
        found: ChainMap[str, torch.Tensor] = ChainMap(*layers)
        _check_shapes(name, found, self._weights[BASE])
        self._weights[name] = found
        self._known = {key: asked for key, asked in self._known.items() if name not in dict(key)}

    @torch.no_grad()
    def write(self, mix: Mix, perturbed: Perturbation | None = None) -> None:
        """Write a point into the model, all of it from the weights that are kept. Raises EvoalignError."""
        if not isclose(sum(mix.values()), 1.0, abs_tol=1e-9):
            raise EvoalignError(f"the coefficients {dict(mix)} do not sum to 1")
        noisy = self.parts[perturbed.part] if perturbed is not None and perturbed.sigma else frozenset[str]()
        for name, served in self._tensors.items():
            value = self.mixed(name, mix)
            if perturbed is not None and name in noisy:
                value = self._noisy(name, value.to(served.device), perturbed)
            served.copy_(value.to(self._dtype))

    def mixed(self, name: str, mix: Mix) -> torch.Tensor:
        """A tensor of a point without noise, float32 on the CPU. Ends of lines are the bits of the targets."""
        chosen = [(c, self._weights[model][name]) for model, c in sorted(mix.items()) if c]
        first = chosen[0][1]
        if all(tensor is first for _, tensor in chosen):
            return first
        start = first.double()
        return start.add(sum(c * (tensor.double() - start) for c, tensor in chosen[1:])).float()

    def answer(
        self, mix: Mix, perturbed: Perturbation | None = None, drawn: EvaluationConfig | None = None
    ) -> Evaluation:
        """What a point answers to the examples, scored. `drawn` is how, where that is not as the config says.

        As the config says and without noise each point is asked once, and remembered.
        """
        key = tuple(sorted((name, c) for name, c in mix.items() if c))
        other = perturbed is not None or drawn is not None
        if other or key not in self._known:
            self.write(mix, perturbed)
            how = drawn or self.config.evaluation
            found = evaluation.evaluate(self._engine, self._tokens, self.task, self.examples, how)
            if other:
                return found
            self._known[key] = found
        return self._known[key]

    def rewards(self, found: Evaluation) -> Floats:
        """The reward of each example, [E], in the mean over samples and seeds."""
        return np.array(found.measures_E["reward"])

    def hacked(self, found: Evaluation) -> Floats:
        """The share of each example's answers, [E], that `evoalign.checks.hacking` calls hacked.

        The start that signs are held against is the base model; as good as the best is what it or a target earns best.
        """
        before = self.answer({BASE: 1.0}).completions
        after = [said for name in self.names for said in self.answer({name: 1.0}).completions]
        marked = hacking.flags(found.completions, before, after)["hacked"]
        of_example: defaultdict[int, list[float]] = defaultdict(list)
        for said, is_hacked in zip(found.completions, marked, strict=True):
            of_example[said.example].append(float(is_hacked))
        return np.array([float(np.mean(of_example[e])) for e in range(len(self.examples))])

    def divergence(self, reference: Mix, mix: Mix, perturbed: Perturbation | None = None) -> Nats:
        """KL(point || reference), exact over the vocabulary along the point's own answers at temperature 1.

        Draws of every point are by the same seeds, as of `evoalign.checks.divergence`.
        Raises EvoalignError where nothing is generated or a logit is not a number.
        """
        drawn, sums_N4 = self.drawn(reference, mix, perturbed)
        divergence.summarise(drawn, sums_N4)  # refuses what is not a number
        of_prompt: dict[tuple[int, ...], list[float]] = {}
        for sample, nats in zip(drawn, sums_N4[:, 3].tolist(), strict=True):
            found = of_prompt.setdefault(sample.prompt_ids, [0.0, 0.0, 0.0])
            found[:] = found[0] + nats, found[1] + len(sample.token_ids), found[2] + 1
        return Nats(*np.array(list(of_prompt.values())).T)

    @torch.no_grad()
    def drawn(
        self, reference: Mix, mix: Mix, perturbed: Perturbation | None = None
    ) -> tuple[list[divergence.Sample], torch.Tensor]:
        """A point's own answers at temperature 1, and sums of k1, k2, k3 and the exact KL of each, float64 [N, 4].

        Raises EvoalignError where nothing is generated.
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

    def gram(self, a: str, b: str, c: str) -> tuple[float, float, float]:
        """<b-a, b-a>, <b-a, c-a> and <c-a, c-a> over all weights, in float64."""
        total = torch.zeros(3, dtype=torch.float64)
        for name in self._tensors:
            start = self._weights[a][name].double()
            u, v = (self._weights[model][name].double().sub(start).flatten() for model in (b, c))
            total += torch.stack([u @ u, u @ v, v @ v])
        return float(total[0]), float(total[1]), float(total[2])

    def _noisy(self, name: str, mean: torch.Tensor, perturbed: Perturbation) -> torch.Tensor:
        key = noise.key(self.asked.seed, "analysis", name)
        shape, dtype = tuple(mean.shape), self._dtype
        return noise.scaled(key, shape, 0, [perturbed.trial], [perturbed.sigma], mean=mean, dtype=dtype)[0]

    def _read(self, targets: Mapping[str, Target]) -> tuple[Mapping[str, Weights], bool]:
        """The weights of the base and of all targets under one set of names, and whether head and embedding are one.

        Tensors that training left alone are kept once. Where one of the models has a head of its own, all have.
        """
        base = {name: tensor.float().to("cpu", copy=True) for name, tensor in tensors_of(self.model).items()}
        found = {BASE: base}
        for name, target in targets.items():
            found[name] = {n: _shared(t, base.get(n)) for n, t in effective(target, self._dtype).items()}
        head, words = head_of(self.model), words_of(self.model)
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
    """The weights that a target answers with, float32 on the CPU by their names in checkpoints; adapters are merged.

    `dtype` is that in which its base is served. Reads whole models. Raises EvoalignError.
    """
    if target.run is None:
        check_folder(target.weights)
    if target.is_adapter:
        config = target.config.model
        model = load_whole(model_path(config), config.revision, dtype, config.name).float()
        return tensors_of(put_into(model, target.weights, config.name))
    model = load_whole(str(target.weights), None, torch.float32, target.name)
    return {**tensors_of(model), **checkpoint.mean_of(target.weights)}


def shown_placebos(targets: Mapping[str, Target]) -> list[str]:
    """A sentence for runs of ES none of whose placebos is among the targets; empty where there is one, or no such run.

    Any coefficients would have moved the weights: what a run did says something beside one with shuffled ones.
    """
    marks = {name: checkpoint.mark_of(target.weights) for name, target in targets.items()}
    if any(mark is not None and mark.counterfactual for mark in marks.values()):
        return []
    runs = [name for name, target in targets.items() if target.run is not None and method_of(target.run) == "es"]
    if not runs:
        return []
    return [
        f"{', '.join(runs)}: no placebo is among the targets, so that signal and random walk are not told "
        "apart; `evoalign replay RUN --counterfactual shuffle --to FOLDER` makes one."
    ]


def _located(names: Sequence[str], config: Config | None, split: Split) -> dict[str, Target]:
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ConfigError(f"{twice[0]} is given twice; name each target once")
    found = {name: locate(name, config, split=split) for name in names if name != BASE}
    if not found and config is None:
        raise ConfigError(f"{BASE} alone does not say which model; name a run, or the model and its task with --config")
    return found


def _config_of(targets: Mapping[str, Target], config: Config | None, asked: Asked) -> Config:
    """The settings of the first target, or those that were given, with what is asked; one task for all.

    Rows are parted by the seed of the first run also where settings are given, so that it is asked none that it knows.
    """
    own = config
    if own is not None:
        seed = next((target.config.seed for target in targets.values() if target.run is not None), own.seed)
        own = own.model_copy(update={"seed": seed})
    else:
        first, *others = targets.values()
        first.check_task()
        own = first.config
        for other in others:
            if _task(other) != _task(first):
                raise ConfigError(
                    f"{other.name} is not of the task, base model or test data of {first.name} ({_task(other)} and "
                    f"{_task(first)}); say with --config on what all are asked"
                )
    wanted = {"samples": asked.samples, "max_tokens": asked.max_tokens, "temperature": asked.temperature}
    tree = own.evaluation.model_dump() | {name: value for name, value in wanted.items() if value is not None}
    checked = from_dict({**own.model_dump(), "evaluation": tree}, needs_es=False).evaluation
    prompts = 2**31 if asked.examples is None else asked.examples
    checks = own.checks.model_copy(update={"kl_prompts": prompts, "kl_tokens": asked.kl_tokens})
    return own.model_copy(update={"evaluation": checked, "checks": checks, "engine": own.engine.in_process()})


def _task(target: Target) -> tuple[str, str, str | None]:
    task = target.config.task
    data = None if task.test_data is None else Path(str(task.test_data)).name
    return task.name, Path(target.config.model.name).name, data


def _check_splits(task: Task, data: Data, own: Config, targets: Mapping[str, Target], split: Split) -> None:
    """Raise ConfigError where a run parted the data otherwise: it may have trained on examples of this split."""
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


def _some(examples: Sequence[Any], asked: Asked) -> Sequence[Any]:
    if not examples:
        raise ConfigError(f"the task has no {asked.split} split; choose another")
    if asked.examples is not None and asked.examples < 1:
        raise ConfigError(f"examples: {asked.examples} is none; ask 1 or more")
    return examples[: asked.examples]


def _shared(tensor: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """The base's own tensor where this one has the same numbers."""
    same = base is not None and base.shape == tensor.shape and torch.equal(tensor, base)
    return base if same and base is not None else tensor.float()


def _check_shapes(target: str, weights: Weights, base: Weights) -> None:
    for name, tensor in base.items():
        if name not in weights:
            raise ModelError(f"{target} has no {name}, which the base model has; is it a model of another kind?")
        if weights[name].shape != tensor.shape:
            raise ModelError(
                f"{target} has {name} of shape {list(weights[name].shape)}, and the base model of "
                f"{list(tensor.shape)}; only models of one shape can be mixed"
            )
    if more := sorted(weights.keys() - base.keys()):
        raise ModelError(f"{target} has {more[0]}, which the base model has not; is it a model of another kind?")
