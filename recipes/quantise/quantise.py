# SPDX-License-Identifier: Apache-2.0
"""Quantise a model to 4-bit weights (W4A16) on a CPU, as compressed-tensors packs them.

    python recipes/quantise/quantise.py MODEL --to DIR

Needs `compressed-tensors` (pip install --no-deps compressed-tensors loguru) and no data. Each group of weights has one
scale, from its largest |W|; weights are rounded to the nearest of 15 numbers. lm_head and embeddings stay as they are.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gguf"))

from convert import new, stop

KEPT = "lm_head"


def check(model: Any, group: int) -> None:
    """Stop for a model that is quantised already or of which a weight would stay in full precision."""
    from torch import nn

    if fused := next((name for name, weight in model.named_parameters() if weight.ndim > 2), None):
        stop(f"{fused} has experts in one tensor, which are not quantised here; use llm-compressor, see README.md")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != KEPT and module.in_features % group:
            stop(f"{name} has {module.in_features} inputs, which --group {group} does not divide; set another --group")


def quantise(source: str, to: Path, group: int) -> None:
    """Write the folder under another name and rename it, so that it is complete or absent."""
    if importlib.util.find_spec("compressed_tensors") is None:
        stop("compressed-tensors is not installed: pip install --no-deps compressed-tensors loguru")
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        if getattr(AutoConfig.from_pretrained(source), "quantization_config", None):
            stop("the model is quantised already; name one in full precision")
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, use_safetensors=True)
    except (OSError, ValueError) as error:
        stop(f"{source} does not load ({str(error).strip().splitlines()[0]}); give the folder or hub name of a model")
    check(model, group)
    how = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=how)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=[KEPT], quantization_status="frozen", format="pack-quantized"
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.data.float().unflatten(1, (-1, group))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), how)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    to.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        model.save_pretrained(aside)
        compressor.update_config(aside)
        AutoTokenizer.from_pretrained(source).save_pretrained(aside)
        aside.chmod(0o755)
        aside.rename(to)  # fails if a folder that is not empty was created there meanwhile
    except OSError as error:
        stop(f"{to} could not be written: {error}")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"{source} in 4 bits, groups of {group}, is in {to}")


def main() -> None:
    """Read the arguments and quantise."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("model", help="folder or hub name of a model in full precision")
    words.add_argument("--to", type=new, required=True, help="folder to write; must not exist")
    words.add_argument(
        "--group", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale; default 128"
    )
    args = words.parse_args()
    quantise(args.model, args.to, args.group)


if __name__ == "__main__":
    main()
