# SPDX-License-Identifier: Apache-2.0
"""Lets the published SGLang start on any CPU, for tests alone.

torchvision's wheel expects the operators of a torch for CUDA, and SGLang imports it with transformers. A CPU that has
AMX would be served by kernels that are not published for it, so torch is made to say that there is none. AWQ's words
are read by `plain_awq`. SGLang's processes are forked: each would import for ten seconds what the one that starts it
has imported.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _BeforeTorchvision(MetaPathFinder):
    """Looks at each import, and does what is to be done before torchvision's."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _prepare()
        return None


def _prepare() -> None:
    import multiprocessing

    import plain_awq
    import torch

    multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[assignment,misc]
    torch.cpu._is_amx_tile_supported = lambda: False
    ops = "sglang.kernels.ops.quantization"
    sys.modules |= {f"{ops}.awq_dequantize": None, f"{ops}.awq_triton": plain_awq}  # type: ignore[dict-item]
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
