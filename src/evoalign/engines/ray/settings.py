# SPDX-License-Identifier: Apache-2.0
"""Settings of engine `ray`. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from pydantic import Field, field_validator, model_validator

from evoalign.config.base import Count, Positive
from evoalign.config.engines import DEFAULT, EngineSettings, MemoryUse, ReplicaConfig, Serving
from evoalign.config.outside import ADDRESS

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec


class RayConfig(EngineSettings):
    """Replicas of another engine, each in a Ray actor, on this host or a cluster. Needs the extra `ray`."""

    name: Literal["ray"]  # pyright: ignore[reportIncompatibleVariableOverride]
    replicas: Count = 2
    """Engines that share the members. With `deterministic: true`, scores and weights do not depend on this number."""
    replica: ReplicaConfig = Field(default_factory=lambda: {"name": DEFAULT}, validate_default=True)
    """The engine of each replica, with its own settings."""
    at_least: Count | None = None
    """Replicas that must have room before the run begins; the others join later. None: all."""
    address: Annotated[str | None, ADDRESS] = None
    """Address of a running cluster, such as 10.0.0.1:6379 or auto. None: start one for this run, on this host only."""
    cpus: Positive = 1.0
    """CPU cores that Ray reserves for each replica."""
    gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    """GPUs that Ray reserves for each replica. None: as many as its engine uses, 0 if that is on a CPU."""
    chunk: Count = 8
    """Members per call of a replica; members of `full` are always sent one by one. Which members share a batch decides
    the last bits of a score, so this setting is part of the run's identity."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often each replica may be restarted before the run stops."""
    patience: Positive = 600.0
    """Seconds without a response after which a replica is restarted."""
    compare_every: Count = 10
    """Compare the weights hashes of all replicas every this many updates; a replica that differs is restarted."""

    path = "evoalign.engines.ray.engine:RayEngine"
    can_be_replica = False
    resources = frozenset({"replicas", "at_least", "address", "cpus", "gpus", "restarts", "patience", "compare_every"})
    steady = resources - {"address", "cpus", "gpus"}

    removed: ClassVar[Mapping[str, object]] = {"graders": 0, "catch_up": "auto", "audit": 0.0}

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, settings: object) -> object:
        """Drop removed settings at their former defaults, which the config files of earlier runs contain."""
        if not isinstance(settings, Mapping):
            return settings
        given = cast(Mapping[str, object], settings)
        return {name: value for name, value in given.items() if name not in cls.removed or value != cls.removed[name]}

    @field_validator("replica")
    @classmethod
    def _is_started_here(cls, replica: EngineSettings) -> EngineSettings:
        if getattr(replica, "url", None) is not None:
            raise ValueError("a running server is one engine and cannot be a replica: remove its url")
        return replica

    @model_validator(mode="after")
    def _at_least_is_possible(self) -> RayConfig:
        if self.at_least is not None and self.at_least > self.replicas:
            raise ValueError(f"at_least {self.at_least} is more than replicas {self.replicas}; lower it")
        return self

    @property
    def fewest(self) -> int:
        """Replicas with which a run begins."""
        return self.at_least or self.replicas

    @property
    def where(self) -> str:
        return self.replica.where

    @property
    def devices(self) -> int:
        return self.replicas * self.replica.devices

    @property
    def quantised(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.quantised

    @property
    def packed_in_float32(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.packed_in_float32

    @property
    def carries_experts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.carries_experts

    @property
    def own_experts(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.own_experts.replace("engine.", "engine.replica.")

    @property
    def unreached(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.unreached

    @property
    def carries_bias(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.carries_bias

    @property
    def scores_given(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.scores_given

    @property
    def takes_mixtures(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.takes_mixtures

    def held(
        self, config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, mean: int
    ) -> MemoryUse:
        return self.replica.held(_of_replica(config, self), specs, layout, dtype, mean)

    def batch_bytes(
        self, config: Config, specs: Sequence[TensorSpec], dtype: torch.dtype, rows: int, prompt: int
    ) -> float:
        return self.replica.batch_bytes(_of_replica(config, self), specs, dtype, rows, prompt)

    def refused_on_gpu(self, config: Config, specs: Sequence[TensorSpec]) -> str | None:
        return self.replica.refused_on_gpu(_of_replica(config, self), specs)

    def serving(self, config: Config) -> Serving | None:
        return self.replica.serving(_of_replica(config, self))

    def unpacks(self, form: str, bits: int | None) -> bool:
        return self.replica.unpacks(form, bits)

    def lines(self, members: int, dense: bool) -> list[str]:
        per_call = 1 if dense else self.chunk
        chunks = -(-members // per_call)
        where = "on this host" if self.address is None else f"on the cluster {self.address}"
        found = [
            f"engine ray: {self.replicas} replicas of {self.replica.name} {where} share {members} members, "
            f"{per_call} per call"
        ]
        idle, share = self.replicas - chunks, members // self.replicas
        if idle > 0:
            setting = f"engine.chunk (to {share} or less) or engine.replicas"
            found.append(
                f"warning: {members} members make {chunks} chunks, and {idle} of the replicas are idle: lower "
                f"{setting if share and not dense else 'engine.replicas'}"
            )
        return found

    def limit(self) -> tuple[str, int] | None:
        found = self.replica.limit()
        return None if found is None else (found[0].replace("engine.", "engine.replica.", 1), found[1])

    def smaller(self, config: Config) -> str:
        return self.replica.smaller(_of_replica(config, self)).replace("engine.", "engine.replica.")

    def in_process(self) -> EngineSettings:
        return self.replica.in_process()


def _of_replica(config: Config, settings: RayConfig) -> Config:
    return config.model_copy(update={"engine": settings.replica})
