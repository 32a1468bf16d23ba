# SPDX-License-Identifier: Apache-2.0
"""evoalign: Evolution Strategies fine-tuning of language models. Names are imported at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from evoalign.version import __version__

if TYPE_CHECKING:
    from evoalign.analysis.compare.comparison import compare
    from evoalign.analysis.evaluations import Evaluations, evaluate_many
    from evoalign.analysis.grpo_runs import grpo
    from evoalign.analysis.runs import train
    from evoalign.analysis.sweeping.sweep import sweep
    from evoalign.config import Config
    from evoalign.config import load as load_config
    from evoalign.errors import EvoalignError
    from evoalign.evaluation import Evaluation
    from evoalign.exporting.export import export
    from evoalign.placebos.run import placebo
    from evoalign.preflight.doctor import doctor
    from evoalign.preflight.probe import probe
    from evoalign.spaces import Space
    from evoalign.tasks import Data, Task
    from evoalign.training.replay import replay
    from evoalign.training.resolve import evaluate
    from evoalign.training.result import Result
    from evoalign.training.train import dry_run
    from evoalign.types import Generation

_HOMES = {
    "Config": "evoalign.config:Config",
    "Data": "evoalign.tasks:Data",
    "Evaluation": "evoalign.evaluation:Evaluation",
    "Evaluations": "evoalign.analysis.evaluations:Evaluations",
    "EvoalignError": "evoalign.errors:EvoalignError",
    "Generation": "evoalign.types:Generation",
    "Result": "evoalign.training.result:Result",
    "Space": "evoalign.spaces:Space",
    "Task": "evoalign.tasks:Task",
    "compare": "evoalign.analysis.compare.comparison:compare",
    "doctor": "evoalign.preflight.doctor:doctor",
    "dry_run": "evoalign.training.train:dry_run",
    "evaluate": "evoalign.training.resolve:evaluate",
    "evaluate_many": "evoalign.analysis.evaluations:evaluate_many",
    "export": "evoalign.exporting.export:export",
    "grpo": "evoalign.analysis.grpo_runs:grpo",
    "load_config": "evoalign.config:load",
    "placebo": "evoalign.placebos.run:placebo",
    "probe": "evoalign.preflight.probe:probe",
    "replay": "evoalign.training.replay:replay",
    "sweep": "evoalign.analysis.sweeping.sweep:sweep",
    "train": "evoalign.analysis.runs:train",
}

__all__ = [
    "Config",
    "Data",
    "Evaluation",
    "Evaluations",
    "EvoalignError",
    "Generation",
    "Result",
    "Space",
    "Task",
    "__version__",
    "compare",
    "doctor",
    "dry_run",
    "evaluate",
    "evaluate_many",
    "export",
    "grpo",
    "load_config",
    "placebo",
    "probe",
    "replay",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module evoalign has no attribute {name!r}")
    module, attribute = _HOMES[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
