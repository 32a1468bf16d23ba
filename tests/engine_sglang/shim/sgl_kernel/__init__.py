# SPDX-License-Identifier: Apache-2.0
"""In place of SGLang's kernels, which are published for CUDA alone: names that exist, and raise when called."""

from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    missing.__name__ = name
    return missing
