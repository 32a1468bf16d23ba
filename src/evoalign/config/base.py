# SPDX-License-Identifier: Apache-2.0
"""What all sections of a config share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION = 1
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Modules = Annotated[list[str], Field(min_length=1)]
Layers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys refused; a number may be written as text, as YAML reads 1e-3."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), serialize_by_alias=True)


def named(value: object) -> object:
    """`cosine` is short for `{name: cosine}`."""
    return {"name": value} if isinstance(value, str) else value
