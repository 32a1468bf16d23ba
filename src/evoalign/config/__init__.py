# SPDX-License-Identifier: Apache-2.0
"""All settings in a nested, typed tree. Imports no torch, so that a config is read and checked quickly.

A config is YAML. Later files win over earlier ones, `--set a.b=c` wins over files. An unknown key is refused with the
nearest name that exists. Every section that is present is checked, used or not.
"""

from typing import Any

from evoalign.config.base import FORMAT_VERSION, Section
from evoalign.config.decoding import EvaluationConfig, SamplingConfig
from evoalign.config.engines import ENGINES, EngineConfig, EngineSettings
from evoalign.config.es import EsConfig, OptimizerConfig, ScheduleConfig
from evoalign.config.grpo import GrpoConfig
from evoalign.config.load import code_of, from_dict, from_record, load, parse_overrides, read, to_yaml, with_engine
from evoalign.config.run import CheckpointConfig, ChecksConfig, Config, ModelConfig, TrackingConfig
from evoalign.config.scorer import ScorerConfig
from evoalign.config.spaces import SPACES, FullConfig, LoraConfig, LowrankConfig, SpaceConfig, SpaceSection
from evoalign.config.task import GraderConfig, ObjectiveConfig, TaskConfig

__all__ = [
    "ENGINES", "FORMAT_VERSION", "SPACES", "CheckpointConfig", "ChecksConfig", "Config", "EngineConfig",
    "EngineSettings", "EsConfig", "EvaluationConfig", "FullConfig", "GraderConfig", "GrpoConfig", "LoraConfig",
    "LowrankConfig", "ModelConfig", "ObjectiveConfig", "OptimizerConfig", "SamplingConfig", "ScheduleConfig",
    "ScorerConfig", "Section", "SpaceConfig", "SpaceSection", "TaskConfig", "TrackingConfig", "code_of", "from_dict",
    "from_record", "load", "parse_overrides", "read", "to_yaml", "with_engine",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return an engine's section by its class name, such as `VllmConfig`."""
    for section in ENGINES.values():
        if section.__name__ == name:
            return section
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
