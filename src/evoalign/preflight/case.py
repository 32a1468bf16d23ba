# SPDX-License-Identifier: Apache-2.0
"""Shared by the checks of `evoalign doctor`: findings, the config with what earlier checks loaded, and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from evoalign.config import Config
from evoalign.engines import Engine
from evoalign.errors import EvoalignError
from evoalign.rundir.method import Method
from evoalign.spaces import Space
from evoalign.tasks import Data, Task
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, TensorSpec

Status = Literal["ok", "warning", "failed", "skipped"]
NEEDS_FLAG = "needs --resume or --overwrite"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `fix` says what to do, unless `detail` does."""

    name: str
    status: Status
    detail: str
    fix: str = ""


class SkippedError(Exception):
    """A check needs the result of an earlier check, named here, which failed."""


class IdleError(Exception):
    """A check does not apply to this config, for the reason given here."""


class Case:
    """A config, and what its checks have loaded so far; None if that failed or was not reached."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.task: Task | None = None
        self.data: Data | None = None
        self.tokens: Tokens | None = None
        self.specs: Sequence[TensorSpec] | None = None
        self.planned: Layout | None = None
        self.engine: Engine | None = None
        self.fits = True
        self.served: tuple[Space, Layout, Facts] | None = None

    @property
    def method(self) -> Method:
        """The training method: GRPO if the config has a section grpo and none es."""
        return "es" if self.config.es_ is not None or "grpo" not in self.config.model_fields_set else "grpo"

    def close(self) -> None:
        """Free the model and end the task's worker."""
        if self.engine is not None:
            self.engine.close()
        if self.task is not None:
            self.task.close()


T = TypeVar("T")


def need(value: T | None, what: str) -> T:
    """Return the result of the earlier check `what`. Raises SkippedError if there is none."""
    if value is None:
        raise SkippedError(what)
    return value


def run_check(name: str, check: Callable[[], Finding], smaller: str = "end what else uses it") -> Finding:
    """Run a check and turn errors into findings. `smaller` says what to do if memory runs out."""
    try:
        return check()
    except SkippedError as missing:
        return Finding(name, "skipped", f"needs the check {missing}, which failed")
    except IdleError as reason:
        return Finding(name, "skipped", str(reason))
    except torch.OutOfMemoryError as error:
        return Finding(name, "failed", first_line(error), f"{smaller}; or choose space lora or a smaller model")
    except EvoalignError as error:  # its message says how to fix it
        return Finding(name, "failed", str(error))
    except SystemExit as end:
        fix = "the code of the task, space or reward ends the process; take its sys.exit out"
        return Finding(name, "failed", f"SystemExit: {end}", fix)
    except Exception as error:  # of a library, or of a custom task, space or reward
        return Finding(name, "failed", f"{type(error).__name__}: {first_line(error)}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
