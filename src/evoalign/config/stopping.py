# SPDX-License-Identifier: Apache-2.0
"""When a run ends before its last generation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from evoalign.config.base import Count, Delta, Section


class StoppingConfig(Section):
    """When a run of ES ends before `es.num_generations`: on a plateau, after a time, or on whichever comes first."""

    patience: Count | None = None
    """After so many evaluations of the validation split in a row that bring no better reward. It takes
    `evaluation.every` and a validation split."""
    min_delta: Delta = 0.0
    """A reward is better where it is above the best one before it by more than this."""
    max_hours: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] | None = None
    """After the first generation that ends so many hours into the training, added up over all resumes: the seconds of
    the rows of metrics.jsonl, in which evaluations on the way are counted, and loading the model, the evaluation of the
    start and what comes after the last generation are not."""

    @model_validator(mode="after")
    def _says_when(self) -> StoppingConfig:
        if self.patience is self.max_hours is None:
            raise ValueError("set patience, max_hours or both; leave the section out to train to the last generation")
        return self
