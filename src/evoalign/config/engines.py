# SPDX-License-Identifier: Apache-2.0
"""Which engine answers, and what one may ask of its settings before it is made.

An engine brings its section along, in `evoalign/engines/<name>/settings.py`; the table below says where. One of one's
own is named `package.module:Class`, and `Class.settings` is its section. That is code: a config is read without it, and
`evoalign.engines.read` looks it up, for a config that the user wrote.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, ConfigDict, GetJsonSchemaHandler, SerializeAsAny
from pydantic_core import PydanticCustomError

from evoalign.config.base import Section, named
from evoalign.config.outside import CODE
from evoalign.errors import shown

if TYPE_CHECKING:
    import torch

    from evoalign.config.run import Config
    from evoalign.types import Layout, TensorSpec

DEFAULT = "transformers"
_SINGLE = {
    "transformers": "evoalign.engines.transformers.settings:TransformersConfig",
    "vllm": "evoalign.engines.vllm.settings:VllmConfig",
    "sglang": "evoalign.engines.sglang.settings:SglangConfig",
    "vllm-server": "evoalign.engines.vllm_server.settings:VllmServerConfig",
}
_SECTIONS = _SINGLE | {"ray": "evoalign.engines.ray.settings:RayConfig"}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that an engine holds beside weights and mean.

    `cache` is at most (`bound` up to) or at least what keys, values and logits take, as the setting `setting` says;
    `note` is what else there is to say of that. `adapters` are the members'; `host` is what of the mean lies in the
    host's memory though the model is on a GPU.
    """

    cache: float = 0.0
    bound: str = "up to"
    setting: str = ""
    note: str = ""
    adapters: int = 0
    host: int = 0


class EngineSettings(Section):
    """Base of the sections of all engines; the defaults are those of an engine that holds little of its own."""

    name: Annotated[str, CODE]
    path: ClassVar[str] = ""
    """Where the engine's class is, `module:Class`. Empty: `name` itself says so."""
    resources: ClassVar[frozenset[str]] = frozenset()
    """Settings that a run may have to change to fit where it resumes. They decide the shapes of batches and the
    kernels, and with them at most the last bits of a score."""
    steady: ClassVar[frozenset[str]] = frozenset()
    """Those of them that move no bit of a run whose answers repeat to the bit."""
    younger: ClassVar[frozenset[str]] = frozenset()
    """Settings that came after the first release: a run that leaves them at their default has the hash it had then."""
    removed: ClassVar[Mapping[str, object]] = {}
    """Settings of earlier versions, none of which changed scores or weights, with their defaults then."""
    serves_here: ClassVar[bool] = False
    """Whether it answers in this process, with a model of transformers, and lets another model onto its device."""
    takes_mixtures: ClassVar[bool] = True
    """Whether it serves mixtures of experts at all."""
    carries_experts: ClassVar[bool] = False
    """Whether members can have experts of their own, of a mixture whose experts are fused."""
    can_be_replica: ClassVar[bool] = True
    """Whether several of it, each in a process of its own, can share a population."""
    lighter: ClassVar[str] = ""
    """What of the settings makes weights and mean take less memory, as advice to who has too little."""

    @property
    def unsaid(self) -> set[str]:
        """Those of the younger settings that are at their default, which the hash of a run leaves out."""
        fields = type(self).model_fields
        return {name for name in self.younger if getattr(self, name) == fields[name].default}

    @property
    def where(self) -> str:
        """auto (a GPU if there is one), cpu, cuda or cuda:K."""
        return "auto"

    @property
    def devices(self) -> int:
        """Devices that it keeps busy."""
        return 1

    def held(self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int) -> Held:
        """What it holds beside the weights and a mean of `mean` bytes, the start's copy among them."""
        return Held()

    def batch_bytes(
        self, config: Config, specs: Sequence[TensorSpec], dtype: torch.dtype, rows: int, prompt: int
    ) -> float:
        """Bytes that it holds while it answers at once what it can of `rows` prompts of at most `prompt` tokens; 0:
        what is asked does not decide it, and `held` says it all."""
        return 0.0

    def lines(self, members: int, dense: bool) -> list[str]:
        """What a run of so many members says of it as it begins; `dense` members share no batch."""
        return []

    def limit(self) -> tuple[str, int] | None:
        """The setting that bounds a prompt and its completion together, and the tokens; None: the model alone does."""
        return None

    def smaller(self, config: Config) -> str:
        """What of the resources frees memory, as advice to a run that ran out of it."""
        return "end what else uses the memory"

    def in_process(self) -> EngineSettings:
        """What answers for a model that is being trained in this process: these settings where they can."""
        return self if self.serves_here else ENGINES[DEFAULT].model_validate({})


class UnreadEngine(EngineSettings):
    """Settings of an engine of one's own as they are written, not checked: that takes its code."""

    model_config = ConfigDict(extra="allow")
    can_be_replica = False


class _Engines(Mapping[str, type[EngineSettings]]):
    """Sections by the engine's name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> type[EngineSettings]:
        module, _, attribute = _SECTIONS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(_SECTIONS)

    def __len__(self) -> int:
        return len(_SECTIONS)


ENGINES: Mapping[str, type[EngineSettings]] = _Engines()
"""The sections of the engines that are shipped, by name."""


def section_of(value: object) -> type[EngineSettings]:
    """The class for what a config has under `engine`; none of a code's. Raises PydanticCustomError."""
    value = named({} if value is None else value)
    name = cast(Mapping[str, Any], value).get("name", DEFAULT) if isinstance(value, Mapping) else DEFAULT
    if not isinstance(name, str) or (":" not in name and name not in ENGINES):
        told = f"unknown engine {shown(name)}; use {', '.join(ENGINES)} or package.module:Class"
        raise PydanticCustomError("unknown_engine", "{told}", {"told": told})
    return UnreadEngine if ":" in name else ENGINES[name]


def _read(value: object) -> object:
    """`vllm` is short for `{name: vllm}`, and no name means transformers. What is checked already stays."""
    value = named(value)
    if not isinstance(value, Mapping):
        return value
    return section_of(value).model_validate({"name": DEFAULT, **cast(Mapping[str, Any], value)})


def _read_replica(value: object) -> object:
    """The same of an engine that is one of several; replicas have no replicas of their own, and are shipped."""
    found = _read(value)
    if isinstance(found, EngineSettings) and not found.can_be_replica:
        told = f"{found.name} cannot be a replica; use {', '.join(SINGLE)}"
        raise PydanticCustomError("unknown_engine", "{told}", {"told": told})
    return found


class _OneOf:
    """The JSON schema of the field: one of the sections that are shipped."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    def __get_pydantic_json_schema__(self, _: object, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"oneOf": [handler(ENGINES[name].__pydantic_core_schema__) for name in self._names]}


SINGLE = tuple(_SINGLE)
EngineConfig = Annotated[SerializeAsAny[EngineSettings], BeforeValidator(_read), _OneOf(ENGINES)]
"""Which engine answers the prompts, and its own settings."""
ReplicaConfig = Annotated[SerializeAsAny[EngineSettings], BeforeValidator(_read_replica), _OneOf(SINGLE)]
"""The engine of a replica of another."""
