# SPDX-License-Identifier: Apache-2.0
"""What all sections of a config share, and the bounds of numbers: on both sides, where no sane use comes near.

A number beyond them is a slip, or meant to hang or crash what reads a run from elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

FORMAT_VERSION = 1


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError("no path holds a NUL")
    return text


def listed(of: Any) -> BeforeValidator:
    """`tensorboard` is short for `[tensorboard]`; `of` is the type of the list, which holds texts."""
    return BeforeValidator(lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | of)


Word = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""The name of a choice that a library has: no option of a command line."""
Place = Annotated[str, AfterValidator(_path)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Every = Annotated[int, Field(ge=0, le=10**9)]
"""Generations between two of something; 0 is none."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(ge=1e-37, le=1e30, allow_inf_nan=False)]
"""As float32 has it, with room for what is made of it."""
Delta = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
"""By how much a reward has to be above another to count as better."""
Gib = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Texts = Annotated[list[str], listed(list[str])]
_Modules = Annotated[list[str], Field(min_length=1)]
Modules = Annotated[_Modules, listed(_Modules)]
Layers = Annotated[list[Annotated[int, Field(ge=0, le=10**6)]], Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys refused; a number may be written as text, as YAML reads 1e-3."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), serialize_by_alias=True)


def named(value: object) -> object:
    """`cosine` is short for `{name: cosine}`."""
    return {"name": value} if isinstance(value, str) else value
