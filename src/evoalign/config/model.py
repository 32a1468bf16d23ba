# SPDX-License-Identifier: Apache-2.0
"""Which model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from evoalign.config.base import Section
from evoalign.config.outside import INSIDE, MODEL
from evoalign.errors import ConfigError


class ModelConfig(Section):
    """A folder, a hub name, or `tiny`: the small base model that comes with the package.

    The folder may hold a model, a PEFT adapter, an export, a run or a saved mean of one: adapters are merged into their
    base, and the run starts from that.
    """

    name: Annotated[str, MODEL] = "tiny"
    revision: Annotated[str | None, INSIDE] = None
    base: Annotated[str | None, MODEL] = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    """Of an adapter, or a run that made one: where its base is, if not where its own files say."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on the CPU, bfloat16 on a GPU."""

    @model_validator(mode="before")
    @classmethod
    def _runs_no_code(cls, tree: object) -> object:
        """Configs of before say `trust_remote_code: false`, the only value there was."""
        if not isinstance(tree, Mapping):
            return tree
        model = dict(cast("Mapping[str, Any]", tree))
        if model.pop("trust_remote_code", False) is not False:
            raise ConfigError("model.trust_remote_code cannot be set: a model's own Python files are never run")
        return model

    def served_dtype(self, *, on_gpu: bool) -> str:
        """Of weights that answer."""
        return ("bfloat16" if on_gpu else "float32") if self.dtype == "auto" else self.dtype

    @property
    def trained_dtype(self) -> str:
        """Of weights that gradients train: float32 where the config leaves it open, as mixed precision wants them."""
        return "float32" if self.dtype == "auto" else self.dtype
