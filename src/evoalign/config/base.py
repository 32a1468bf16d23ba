# SPDX-License-Identifier: Apache-2.0
"""Base class and field types of all sections.

Numbers are bounded on both sides, far from any reasonable value: a larger one is a typing error, or from an untrusted
run and meant to hang or crash its reader.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

FORMAT_VERSION = 1
OWN: dict[str, Any] = {"type": "string", "pattern": ":"}
"""JSON schema of the name of custom code: `package.module:Class`, or `file.py:Class`."""


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path cannot contain NUL")
    return text


def listed(of: Any) -> BeforeValidator:
    """Accept one text, such as `tensorboard`, in place of a list of texts; `of` is the type of the list."""
    return BeforeValidator(lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | of)


Word = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""A name that cannot be taken for a command line option."""
Place = Annotated[str, AfterValidator(_path)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Every = Annotated[int, Field(ge=0, le=10**9)]
"""An interval in generations; 0 disables."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(ge=1e-37, le=1e30, allow_inf_nan=False)]
"""A positive number within the range of float32, with a margin for what is computed from it."""
Delta = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
"""How much a reward must exceed another to count as better."""
Gib = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Texts = Annotated[list[str], listed(list[str])]
_Modules = Annotated[list[str], Field(min_length=1)]
Modules = Annotated[_Modules, listed(_Modules)]
Layers = Annotated[list[Annotated[int, Field(ge=0, le=10**6)]], Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, and a number may be given as text, as YAML reads 1e-3."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), serialize_by_alias=True)


def named(value: object) -> object:
    """Accept `cosine` in place of `{name: cosine}`."""
    return {"name": value} if isinstance(value, str) else value
