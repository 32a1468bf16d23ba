# SPDX-License-Identifier: Apache-2.0
"""The settings of Ray, and what follows from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from evoalign.config.base import Count, Positive
from evoalign.config.engines import DEFAULT, EngineSettings, MemoryUse, ReplicaConfig
from evoalign.config.outside import ADDRESS

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.types import Layout, TensorSpec


class RayConfig(EngineSettings):
    """Replicas of another engine, each in a Ray actor, on this host or a cluster; needs the extra `ray`."""

    name: Literal["ray"]  # pyright: ignore[reportIncompatibleVariableOverride]
    replicas: Count = 2
    """Engines that share the members. Scores and weights do not depend on how many, where runs are `deterministic`."""
    replica: ReplicaConfig = Field(default_factory=lambda: {"name": DEFAULT}, validate_default=True)
    """The engine of each replica, with its own settings."""
    at_least: Count | None = None
    """Replicas with which a run begins where there is no room for all yet; the others join once there is. None: all."""
    address: Annotated[str | None, ADDRESS] = None
    """An existing cluster, such as 10.0.0.1:6379 or auto. None: one of this run's own, on this host alone."""
    graders: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes of one CPU core each that score completions while others are decoded, wherever the cluster has room. 0:
    the run's own process scores."""
    cpus: Positive = 1.0
    """CPU cores that Ray keeps for a replica."""
    gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    """GPUs that Ray keeps for a replica. None: as many as its engine keeps busy; 0 where that is on a CPU."""
    chunk: Count = 8
    """Members that a replica is handed at once; dense members go one by one. What shares a batch decides the last bits
    of a score, so it is part of the run."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often one replica, or one grader, may be started again before the run gives up."""
    patience: Positive = 600.0
    """Seconds without an answer after which a replica is held to hang, and is started again."""
    compare_every: Count = 10
    """Every so many updates the hashes of all replicas' means are compared; one that differs is started again."""

    catch_up: Literal["auto", "replay", "copy"] = "auto"
    """How a replica that joins gets the mean: by replaying all updates, or as a copy of another's weights. auto: what
    is likely to take less time."""
    audit: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the chunks that another replica scores again, to find one whose answers are wrong."""

    path = "evoalign.engines.ray.engine:RayEngine"
    can_be_replica = False
    resources = frozenset({
        "replicas", "at_least", "graders", "address", "cpus", "gpus", "restarts", "patience", "compare_every",
        "catch_up", "audit",
    })  # fmt: skip
    steady = resources - {"address", "cpus", "gpus"}

    @field_validator("replica")
    @classmethod
    def _not_a_server(cls, replica: EngineSettings) -> EngineSettings:
        if getattr(replica, "url", None) is not None:
            raise ValueError("a server that runs already is one engine, not several: leave out its url")
        return replica

    @model_validator(mode="after")
    def _enough(self) -> RayConfig:
        if self.at_least is not None and self.at_least > self.replicas:
            raise ValueError(f"at_least {self.at_least} is more than replicas {self.replicas}; lower it")
        if self.audit and self.fewest < 3:
            raise ValueError(
                f"audit takes three replicas, one to answer, one to check and one to decide; there are {self.fewest}: "
                "raise replicas or at_least, or set audit: 0"
            )
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
    def scored_by(self) -> int:
        return self.graders

    @property
    def carries_experts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replica.carries_experts

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

    def lines(self, members: int, dense: bool) -> list[str]:
        at_once = 1 if dense else self.chunk
        chunks = -(-members // at_once)
        where = "on this host" if self.address is None else f"on the cluster {self.address}"
        size, idle = members // self.replicas, self.replicas - chunks
        found = [
            f"engine ray: {self.replicas} replicas of {self.replica.name} {where} share {members} members, "
            f"{at_once} at a time"
        ]
        if idle > 0:
            fits = "" if dense or not size else f"engine.chunk (to {size} or less) or "
            found.append(
                f"warning: these are {chunks} chunks, and {idle} of the replicas have nothing to do: lower "
                f"{fits}engine.replicas"
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
