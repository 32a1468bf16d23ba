# SPDX-License-Identifier: Apache-2.0
"""What each kind of line of a journal may hold; `journal.py` says what they are for."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from evoalign.config.spaces import SECTIONS, SpaceSection
from evoalign.rundir.checkpoint import Hash
from evoalign.types import Summation

Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[int, Field(ge=0, lt=2**32)]
"""A word of the noise counter."""
Reason = Literal["plateau", "time"]
"""Why a run ended before its last generation."""


class Line(BaseModel):
    """What all lines have beside their own: the hash of the line before."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    previous: Hash


class Header(Line):
    """The first line: what the run is, and what has to be the same for it to come out the same."""

    type: Literal["header"]
    format_version: int
    versions: dict[str, str]
    device: str
    dtype: Literal["float32", "bfloat16", "float16"]
    """The one the model was served in."""
    config: dict[str, Any]
    config_hash: Hash
    noise_table: Hash
    tokenizer_hash: Hash
    data_hash: Hash
    """Of the rows of all splits."""
    given_as: Literal["task", "reward"] | None
    """What was handed over as a Python object, in place of what the config names."""
    space: str
    evolved_parameters: Count
    model_hash: Hash
    weights_hash: Hash
    """Of the mean before the first update."""
    machine: dict[str, str] | None = None
    """What the last bits of a library's results may depend on, beside the versions: `capability` and `threads`."""
    summation: Summation | None = None
    scorer_digest: Hash | None = None
    """Of the models that score, where some do: files, template, tokens, dtype."""

    @property
    def sums(self) -> Summation:
        """How the terms of an update were added.

        Where a journal of before does not say: in order, but for `lowrank` (or a space of one's own) on a CPU or with
        an optimizer, which took a library's matrix product.
        """
        if self.summation is not None or not SECTIONS.get(self.space, SpaceSection).took_library_sums:
            return self.summation or "ordered"
        es: Any = self.config.get("es")
        optimizer: Any = es.get("optimizer") if isinstance(es, dict) else None
        plain = not isinstance(optimizer, dict) or optimizer.get("name", "sgd") == "sgd"
        return "ordered" if plain and not self.device.startswith("cpu") else "library"

    @model_validator(mode="after")
    def _hash_of_config(self) -> Header:
        if self.config_hash != hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest():
            raise ValueError("config_hash is not that of config")
        return self


class ScoredChunk(BaseModel):
    """Members that were answered together, and the replicas that gave the answer which counted, the first one first."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    members: list[Count]
    by: Annotated[list[Count], Field(min_length=1)]


class ScoredBy(BaseModel):
    """Who scored what of a generation, and why replicas were thrown out, so far, by their numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    chunks: Annotated[list[ScoredChunk], Field(min_length=1)]
    expelled: dict[str, str]


class UpdatedLine(Line):
    """An update, written ahead of the weights."""

    type: Literal["update"]
    index: Word
    generation: Word
    members: Annotated[list[Word], Field(min_length=1)]
    signs: list[Literal[-1, 1]]
    scores: list[Finite]
    coefficients: list[Finite]
    rms_c: Finite
    sigma: Finite
    step: Finite
    decay: Finite
    objective: Annotated[dict[str, Finite], Field(min_length=1)] | None = None
    scored_by: ScoredBy | None = None

    @model_validator(mode="after")
    def _one_each(self) -> UpdatedLine:
        if len({len(self.members), len(self.signs), len(self.scores), len(self.coefficients)}) > 1:
            raise ValueError("members, signs, scores and coefficients differ in number")
        if self.generation != self.index:
            raise ValueError(f"generation {self.generation} is not index {self.index}")
        return self


class ValidatedLine(Line):
    """The reward on the validation split, where the training depends on it."""

    type: Literal["validation"]
    index: Word
    reward: Finite


class EndedLine(Line):
    """The run ended here, before its last generation."""

    type: Literal["end"]
    index: Word
    reason: Reason
    limit: Finite


class SealedLine(Line):
    """What the weights came to."""

    type: Literal["seal"]
    index: Word
    weights_hash: Hash
