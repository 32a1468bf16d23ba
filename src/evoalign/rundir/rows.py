# SPDX-License-Identifier: Apache-2.0
"""Which types the values of a row of metrics.jsonl have: rows are read back where a run is resumed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError

Number = StrictFloat | StrictInt | None
Numbers = dict[str, Number] | None


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class _Diagnosis(_Open):
    __pydantic_extra__: dict[str, Number | StrictBool]  # pyright: ignore[reportIncompatibleVariableOverride]

    control: Annotated[list[StrictFloat | StrictInt], Field(min_length=3, max_length=3)] | None = None


class _Row(_Open):
    generation: Annotated[StrictInt, Field(ge=0)]
    mean: Number = None
    best: Number = None
    worst: Number = None
    p20: Number = None
    p80: Number = None
    std: Number = None
    rms_c: Number = None
    tokens: Number = None
    empty_share: Number = None
    truncated_share: Number = None
    zero_variance: StrictBool | None = None
    seconds: dict[str, StrictFloat | StrictInt] = {}
    evaluation: Numbers = None
    validation: Numbers = None
    divergence: Numbers = None
    budget: Numbers = None
    rewards: Numbers = None
    reward_weights: Numbers = None
    objective: Numbers = None
    grpo: Numbers = None
    diagnosis: _Diagnosis | None = None


def is_row(found: Any) -> bool:
    """Whether a JSON value may be a row, as far as it has what rows have."""
    try:
        _Row.model_validate(found)
    except ValidationError:
        return False
    return isinstance(found, dict)
