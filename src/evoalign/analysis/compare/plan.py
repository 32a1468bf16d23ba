# SPDX-License-Identifier: Apache-2.0
"""What a comparison is to decide, written down before the runs are: budget, endpoint, which pairs, at which level.

Without a plan the budget is the least that all runs reached, which is an outcome of them: one run that was cut short,
or answers briefly, then sets it for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from evoalign.config.base import Positive, Section
from evoalign.config.reading import YAML_CHARACTERS, parse_yaml, read_bytes
from evoalign.errors import ConfigError, DataError, cut
from evoalign.statistics import LEVEL


class PlanConfig(Section):
    """The file that `evoalign compare --plan` takes."""

    format_version: Literal[1] = 1
    match: Literal["wall", "completions", "tokens", "flops"]
    """The kind of budget."""
    limit: Positive
    """How much of it each run is given: seconds, completions, tokens or floating point operations."""
    measure: str = "reward"
    """The endpoint: a measure of the test split."""
    groups: Annotated[dict[str, str], Field(min_length=2)]
    """Label to a pattern, as in shells, of the path or the name of a group's runs."""
    primary: Annotated[list[tuple[str, str]], Field(min_length=1)]
    """The pairs of labels that the comparison is to decide. Others are shown and decide nothing."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = LEVEL
    """The chance of even one false claim over the primary pairs (Holm)."""
    short: Literal["leave_out", "at_end"] = "leave_out"
    """What becomes of runs that end before the budget: left out by name, or taken at their end."""

    @model_validator(mode="after")
    def _known(self) -> PlanConfig:
        for pair in self.primary:
            odd = [label for label in pair if label not in self.groups]
            if odd or pair[0] == pair[1]:
                raise ValueError(f"primary {list(pair)}: give two labels of groups ({', '.join(self.groups)})")
        return self

    def is_primary(self, a: str, b: str) -> bool:
        """Whether a pair is one that the comparison is to decide."""
        return any({a, b} == set(pair) for pair in self.primary)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it was read. `sha256` is that of the file's bytes: what was decided on when."""

    path: Path
    sha256: str
    settings: PlanConfig


def read_plan(path: Path) -> Plan:
    """Raises ConfigError that names the file and what is wrong in it."""
    try:
        raw = read_bytes(path, YAML_CHARACTERS, "give a plan")
        tree: Any = parse_yaml(raw.decode("utf-8"), str(path))
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} is no plan: it has no settings; docs/guides/compare.md shows one")
        return Plan(path, hashlib.sha256(raw).hexdigest(), PlanConfig.model_validate(tree))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; give a plan") from None
    except DataError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {_wrong(error.errors(include_url=False, include_context=False))}") from None


def _wrong(errors: Sequence[Any]) -> str:
    first = errors[0]
    where = ".".join(map(str, first["loc"]))
    said = cut(f"{where}: {first['msg']}" if where else str(first["msg"]), 300)
    return said + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")
