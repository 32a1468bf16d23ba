# SPDX-License-Identifier: Apache-2.0
"""Types of the rows of metrics.jsonl, which may come from anywhere."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, model_validator

Number = StrictFloat | StrictInt | None
Numbers = dict[str, Number] | None


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


Few = Field(max_length=32)
Matrix = Annotated[list[Annotated[list[StrictFloat | StrictInt], Few]], Few]


class _Axes(BaseModel):
    """Fields of `checks.axes.row_of`, and the shares."""

    columns: Annotated[list[str], Field(min_length=2, max_length=32)]
    correctness: str | None
    members: Annotated[StrictInt, Field(ge=1)] | None = None
    means: dict[str, StrictFloat | StrictInt]
    covariance: Matrix
    lasting_covariance: Matrix | None
    shares: Numbers
    lasting_share: Number
    lasting: Numbers

    @model_validator(mode="after")
    def _fits(self) -> _Axes:
        """Raise ValueError unless all fields are of the same columns."""
        count = len(self.columns)
        for matrix, size in ((self.covariance, count + 1), (self.lasting_covariance, count)):
            if matrix is not None and [len(line) for line in matrix] != [size] * size:
                raise ValueError(f"a covariance of {count} columns has another shape")
        if not {*self.columns} <= self.means.keys() or self.correctness not in (None, *self.columns):
            raise ValueError("another column")
        return self


class _Diagnosis(_Open):
    __pydantic_extra__: dict[str, Number | StrictBool]  # pyright: ignore[reportIncompatibleVariableOverride]

    axes: _Axes | None = None
    control: Annotated[list[StrictFloat | StrictInt], Field(min_length=3, max_length=3)] | None = None


class MetricsRow(_Open):
    """A row of metrics.jsonl."""

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
