# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze divergence`: KL of saved weights from their base model, as `checks.kl_every` measures it, or from
another model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from evoalign.analysis.base import BASE, Analysis, Finding, row
from evoalign.errors import ConfigError
from evoalign.report import watching

if TYPE_CHECKING:
    import torch

    from evoalign.analysis.targets import Target
    from evoalign.checks.divergence import Divergence, Sample
    from evoalign.config import Config

    Drawn: TypeAlias = tuple[list[Sample], torch.Tensor]
    """Completions of a model, and the sums over their tokens of k1, k2, k3 and the exact KL, float64 [N, 4]."""
    Measured: TypeAlias = tuple[Divergence, dict[str, float | None]]
    """A divergence, and the standard errors of its four estimates over prompts."""


@dataclass(frozen=True)
class Settings:
    """`prompts`: number of test prompts, each sampled again until there are `tokens` tokens in all.

    `reference`: the other model, which is a target too; `base` is the model from which each target was trained.
    """

    prompts: int = 32
    tokens: int = 2000
    reference: str = "base"


class DivergenceAnalysis(Analysis[Settings]):
    """KL(target || reference) of each target, on the test split at temperature 1, with intervals over prompts."""

    name = "divergence"
    help = "KL divergence from the base model, or from another, in nats per token and per completion."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads each model and its base; raises EvoalignError where one does not load or nothing is generated."""
        from evoalign.analysis.targets import locate, placebo_hint

        other = settings.reference
        if settings.prompts < 1 or settings.tokens < 1:
            raise ConfigError(f"prompts, tokens: {settings.prompts}, {settings.tokens}; set 1 or more of each")
        if set(targets) == {other} == {BASE}:
            raise ConfigError(f"{BASE} is not divergent from itself; name a run, or another model with --config")
        located = {name: locate(name, config) for name in targets if name != BASE}
        if other == BASE:
            watching.count(len(located))
            found = [divergence_of(located[n], settings.prompts, settings.tokens) for n in watching.each(located)]
        else:
            found = between([*targets], other, config, settings.prompts, settings.tokens)
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        for name, (kl, errors) in zip(located if other == BASE else targets, found, strict=True):
            target = located.get(name)
            own = target.described() if target else {"target": BASE}
            rows.append({**own, **asdict(kl), "standard_errors": errors})
            cells = {f"KL from {own['base'] if other == BASE else other}": f"{kl}", "tokens": f"{kl.tokens:,}"}
            for k in ("k1", "k3"):
                cells[f"{k} per token"] = f"{getattr(kl, k):.4g}{f' +- {errors[k]:.2g}' if errors[k] else ''}"
            lines.append(row(str(target.weights) if target else BASE, cells))
        return Finding({**asdict(settings), "targets": rows}, [*lines, *placebo_hint(located)])


def divergence_of(target: Target, prompts: int, tokens: int) -> Measured:
    """Return KL(target || base) along its own completions of the first `prompts` test prompts, at temperature 1."""
    target.check_task()
    checks = target.config.checks.model_copy(update={"kl_prompts": prompts, "kl_tokens": tokens})
    config = target.config.model_copy(update={"checks": checks})
    return _summed(*(_of_adapter if target.is_adapter else _of_model)(target, config))


def between(names: list[str], reference: str, config: Config | None, prompts: int, tokens: int) -> list[Measured]:
    """Return KL(target || reference) of each, with adapters merged. Raises EvoalignError for other shapes."""
    from evoalign.analysis.mixer import EvalSettings, ModelMixer

    wanted = EvalSettings(examples=prompts, kl_tokens=tokens)
    with ModelMixer(list(dict.fromkeys([*names, reference])), config, wanted) as mixer:
        watching.count(len(names))
        return [_summed(*mixer.drawn({reference: 1.0}, {name: 1.0})) for name in watching.each(names)]


def _summed(samples: list[Sample], sums_N4: torch.Tensor) -> Measured:
    from evoalign.checks.divergence import standard_errors, summarise

    return summarise(samples, sums_N4), standard_errors(samples, sums_N4)


def _of_adapter(target: Target, config: Config) -> Drawn:
    from evoalign.checks.divergence import Reference, draw
    from evoalign.setup import assemble
    from evoalign.training.resolve import checked_adapter, resolve_target

    config, adapter = resolve_target(target.weights, config)
    assert adapter is not None
    with closing(assemble(config)) as parts, closing(Reference.of(parts)) as reference:
        target.check_prompts(config, parts.task, parts.data, parts.tokens)
        parts.engine.load(checked_adapter(adapter, parts.layout))
        samples = draw(parts.engine, parts.tokens, parts.task, parts.data.test, parts.config)
        return samples, reference.sums(parts, samples)


def _of_model(target: Target, config: Config) -> Drawn:
    """Measure a whole model: its engine is closed before the model is loaded again next to its base."""
    import torch

    from evoalign import engines, tokens
    from evoalign.checks.divergence import Reference, draw
    from evoalign.engines.transformers.engine import load_model
    from evoalign.setup import task_and_data
    from evoalign.training.resolve import resolve_target

    own, _ = resolve_target(target.weights, config)
    task, data = task_and_data(own, None, None)
    with closing(task):
        tokenizer = tokens.load(own.model, own.task.template_kwargs)
        target.check_prompts(own, task, data, tokenizer)
        with closing(engines.create(own, tokenizer)) as engine:
            samples = draw(engine, tokenizer, task, data.test, own)
    with closing(Reference(config, "cuda" if torch.cuda.is_available() else "cpu")) as reference:
        policy = load_model(own.model, reference.dtype)
        policy = policy.float() if reference.device.type == "cpu" else policy.to(reference.device)
        return samples, reference.sums(policy, samples)
