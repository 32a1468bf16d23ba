# SPDX-License-Identifier: Apache-2.0
"""Sections of the engines, and what follows from an engine's settings before it is started.

The section of an engine is in `evoalign/engines/<name>/settings.py`. A custom engine is named `package.module:Class`,
and `Class.settings` is its section. Since that is code, a config is read without it; `evoalign.engines.read` imports it
for a config that the user wrote.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, SerializeAsAny
from pydantic_core import PydanticCustomError

from evoalign.config.base import Section, named
from evoalign.config.outside import CODE
from evoalign.errors import shown

if TYPE_CHECKING:
    import torch

    from evoalign.types import Layout, TensorSpec

DEFAULT = "transformers"
_SINGLE = {
    "transformers": "evoalign.engines.transformers.settings:TransformersConfig",
    "vllm": "evoalign.engines.vllm.settings:VllmConfig",
    "sglang": "evoalign.engines.server.settings:SglangConfig",
    "vllm-server": "evoalign.engines.server.settings:VllmServerConfig",
}
_SECTIONS = _SINGLE | {"ray": "evoalign.engines.ray.settings:RayConfig"}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of memory that an engine needs besides weights and mean.

    `cache` is the size of keys, values and logits, at most or at least (`bound`) what `setting` gives, with a `note`.
    `adapters` is the size of the members' adapters, `host` the part of the mean that is in host memory while the model
    is on a GPU.
    """

    cache: float = 0.0
    bound: str = "up to"
    setting: str = ""
    note: str = ""
    adapters: int = 0
    host: int = 0


CardGib = Annotated[float, Field(ge=2, le=1e6, allow_inf_nan=False)]
"""GiB of a GPU; a CUDA context alone takes part of the first one."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How an engine divides the memory of a GPU, for `evoalign.cost.cards`.

    It takes at most `share` of the card. What weights, adapters and `graphs` leave, times `part`, or the bytes of
    `cache`, is for keys and values. Logits of `reserved` rows and the `step` (most tokens of a step; None: by the card)
    are allocated at the start, and so are `slots` for adapters, of which `members` are for members. Without, they share
    the room for keys and values. At most `rows` are generated at once. `context` is the text that the cache has to
    hold: None, no such limit; 0, all positions of the model. `cap` is the size in GiB that a setting gives the card,
    and `advice` the settings that free memory on it.
    """

    share: float = 1.0
    part: float = 1.0
    cache: float | None = None
    rows: int | None = None
    reserved: int = 0
    step: int | None = None
    graphs: int = 0
    slots: int = 0
    members: int = 0
    context: int | None = None
    mean_on_host: bool = False
    devices: int = 1
    cap: float | None = None
    advice: str = ""


class EngineSettings(Section):
    """Base of the sections of all engines. Methods that need other sections take the whole `Config` as `config`."""

    name: Annotated[str, CODE]
    path: ClassVar[str] = ""
    """The engine's class, `module:Class`. Empty: `name` is one."""
    resources: ClassVar[frozenset[str]] = frozenset()
    """Settings that may change when a run is resumed elsewhere. They affect batch shapes and kernels, and at most the
    last bits of a score."""
    steady: ClassVar[frozenset[str]] = frozenset()
    """Subset of `resources` that changes no bit where completions repeat to the bit."""
    younger: ClassVar[frozenset[str]] = frozenset()
    """Settings added after the first release; at their defaults, they are left out of the hash of a run."""
    removed: ClassVar[Mapping[str, object]] = {}
    """Settings of earlier versions, none of which changed scores or weights, with their defaults then."""
    serves_here: ClassVar[bool] = False
    """Whether it runs a transformers model in this process, so that a second model can share its device."""
    takes_mixtures: ClassVar[bool] = True
    """Whether spaces that evolve the model can move the experts of mixtures."""
    carries_experts: ClassVar[bool] = False
    """Whether members can perturb single experts of a mixture whose experts are fused."""
    own_experts: ClassVar[str] = "moves none; use engine transformers"
    """Where they cannot: the end of the warning, with the advice."""
    unreached: ClassVar[frozenset[str]] = frozenset()
    """Modules whose adapters it would not apply, or not everywhere."""
    carries_bias: ClassVar[bool] = False
    """Whether members' adapters can have a bias."""
    quantised: ClassVar[frozenset[str]] = frozenset()
    """Forms of quantised base models that it serves with adapters; see `evoalign.models.forms`."""
    packed_in_float32: ClassVar[bool] = True
    """Whether it serves a base model of packed weights in float32, too, and not only in half precision."""
    scores_given: ClassVar[bool] = False
    """Whether it scores completions that a task gives (`Request.given`), as `likelihood` does."""
    can_be_replica: ClassVar[bool] = True
    """Whether engine `ray` can run several of it, each in its own process."""
    lighter: ClassVar[str] = ""
    """Advice: the settings that reduce the memory of weights and mean."""

    @property
    def unsaid(self) -> set[str]:
        """The `younger` settings at their defaults, which the hash of a run leaves out."""
        fields = type(self).model_fields
        return {name for name in self.younger if getattr(self, name) == fields[name].default}

    @property
    def where(self) -> str:
        """Device: auto (a GPU if there is one), cpu, cuda or cuda:K."""
        return "auto"

    @property
    def devices(self) -> int:
        """Number of devices that it uses."""
        return 1

    def held(
        self, config: Any, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        """Return its memory besides the weights and a mean of `mean` bytes, which includes the copy of the start."""
        return MemoryUse()

    def batch_bytes(
        self, config: Any, specs: Sequence[TensorSpec], dtype: torch.dtype, rows: int, prompt: int
    ) -> float:
        """Return the bytes of a batch of `rows` prompts of at most `prompt` tokens; 0 where `held` includes them."""
        return 0.0

    def serving(self, config: Any) -> Serving | None:
        """Return how it divides a GPU's memory; None if it serves from a CPU, or if that is not known."""
        return None

    def refused_on_gpu(self, config: Any, specs: Sequence[TensorSpec]) -> str | None:
        """Return why it does not serve this config from a GPU, although it might from a CPU; None: it does."""
        return None

    def unpacks(self, form: str, bits: int | None) -> bool:
        """Return whether it keeps a base model quantised in this form as dense numbers."""
        return False

    def lines(self, members: int, dense: bool) -> list[str]:
        """Return the lines that a run prints at its start; `dense` members cannot share a batch."""
        return []

    def limit(self) -> tuple[str, int] | None:
        """Return the setting that limits the tokens of prompt plus completion, and its value; None without one."""
        return None

    def smaller(self, config: Any) -> str:
        """Return advice on memory: the settings to lower after running out of it."""
        return "end other programs that use the memory"

    def in_process(self) -> EngineSettings:
        """Return the engine for a model that is trained in this process: this one, or else the default one."""
        return self if self.serves_here else ENGINES[DEFAULT].model_validate({})

    def for_copy(self, *, mixed_on_gpu: bool) -> EngineSettings | None:
        """Return the engine in which a copy of a model in training completes for it; None if the model itself does.

        `mixed_on_gpu`: the training is in mixed precision on a GPU.
        """
        return None if self.serves_here else ENGINES[DEFAULT].model_validate({}).for_copy(mixed_on_gpu=mixed_on_gpu)


class UnreadEngine(EngineSettings):
    """Unchecked settings of a custom engine, whose code has not been imported."""

    model_config = ConfigDict(extra="allow")
    can_be_replica = False


class _Engines(Mapping[str, type[EngineSettings]]):
    """Sections by the engine's name, imported on access."""

    def __getitem__(self, name: str) -> type[EngineSettings]:
        module, _, attribute = _SECTIONS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(_SECTIONS)

    def __len__(self) -> int:
        return len(_SECTIONS)


ENGINES: Mapping[str, type[EngineSettings]] = _Engines()
"""The sections of the engines that come with the package, by name."""


def section_of(value: object) -> type[EngineSettings]:
    """Return the section class for the value of `engine`, without importing custom code. Raises PydanticCustomError."""
    value = named({} if value is None else value)
    name = cast(Mapping[str, Any], value).get("name", DEFAULT) if isinstance(value, Mapping) else DEFAULT
    if not isinstance(name, str) or (":" not in name and name not in ENGINES):
        message = f"unknown engine {shown(name)}; use {', '.join(ENGINES)} or package.module:Class"
        raise PydanticCustomError("unknown_engine", "{message}", {"message": message})
    return UnreadEngine if ":" in name else ENGINES[name]


def _read(value: object) -> object:
    """Accept `vllm` in place of `{name: vllm}`; the default name is transformers."""
    value = named(value)
    if not isinstance(value, Mapping):
        return value
    return section_of(value).model_validate({"name": DEFAULT, **cast(Mapping[str, Any], value)})


def _read_replica(value: object) -> object:
    """Read the engine of a replica, which cannot be `ray` or a custom engine."""
    found = _read(value)
    if isinstance(found, EngineSettings) and not found.can_be_replica:
        message = f"{found.name} cannot be a replica; use {', '.join(SINGLE)}"
        raise PydanticCustomError("unknown_engine", "{message}", {"message": message})
    return found


class _OneOf:
    """JSON schema of the field: one of the sections that come with the package."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    def __get_pydantic_json_schema__(self, _: object, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"oneOf": [handler(ENGINES[name].__pydantic_core_schema__) for name in self._names]}


SINGLE = tuple(_SINGLE)
EngineConfig = Annotated[SerializeAsAny[EngineSettings], BeforeValidator(_read), _OneOf(ENGINES)]
"""The engine that generates completions, and its settings."""
ReplicaConfig = Annotated[SerializeAsAny[EngineSettings], BeforeValidator(_read_replica), _OneOf(SINGLE)]
"""The engine of each replica of engine `ray`."""
