# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze divergence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evoalign.analysis.base import Analysis, Finding

if TYPE_CHECKING:
    from evoalign.config import Config


@dataclass(frozen=True)
class Settings:
    """`prompts`: of the test split, how many are answered, each again until there are so many `tokens`.

    `reference`: the other model, a target too; `base` is that from which each target was trained.
    """

    prompts: int = 32
    tokens: int = 2000
    reference: str = "base"


class Command(Analysis[Settings]):
    """Of each target, KL(target || reference), on the test split at temperature 1, with intervals over prompts."""

    name = "divergence"
    help = "How much the text differs from the base model's, or another's: KL in nats a token and a completion."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads each model and its base; raises EvoalignError where one does not load or nothing is generated."""
        from evoalign.analysis.divergence.compute import between, divergence_of
        from evoalign.analysis.lab import BASE, shown_placebos
        from evoalign.analysis.targets import locate
        from evoalign.errors import ConfigError
        from evoalign.report import watching

        other = settings.reference
        if settings.prompts < 1 or settings.tokens < 1:
            raise ConfigError(f"prompts, tokens: {settings.prompts}, {settings.tokens}; give 1 or more of each")
        if set(targets) == {other} == {BASE}:
            raise ConfigError(f"{BASE} is not divergent from itself; name a run, or another model with --config")
        located = {name: locate(name, config) for name in targets if name != BASE}
        if other == BASE:
            watching.count(len(located))
            found = [divergence_of(located[n], settings.prompts, settings.tokens) for n in watching.each(located)]
        else:
            found = between([*targets], other, config, settings.prompts, settings.tokens)
        rows: list[dict[str, Any]] = []
        sentences: list[str] = []
        for name, (kl, errors) in zip(located if other == BASE else targets, found, strict=True):
            target = located.get(name)
            known = {"target": BASE} if target is None else target.described()
            rows.append({**known, **asdict(kl), "standard_errors": errors})
            what = BASE if target is None else str(target.weights)
            against = other if other != BASE or target is None else target.config.model.name
            drawn = ", ".join(f"{k} {getattr(kl, k):.4g}{_error(errors[k])}" for k in ("k1", "k3"))
            sentences.append(
                f"{what}: KL from {against} is {kl}, {kl.tokens:,} tokens (summed over the vocabulary; by draws "
                f"{drawn} a token)."
            )
        return Finding({**asdict(settings), "targets": rows}, [*sentences, *shown_placebos(located)])


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.2g}"
