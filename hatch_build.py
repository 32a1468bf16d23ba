# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled numbers (src/evoalign/kernels/compiled.c) where there is a C compiler; without one, torch does.

`pip install .` and `pip install -e .` call this. By itself it builds the library in place:

    python hatch_build.py

CC names the compiler, with options if need be. EVOALIGN_COMPILE=0 builds none, EVOALIGN_COMPILE=1 insists on one. The
library calls nothing of Python, so a wheel of it is for one kind of machine and for any Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # by itself
    BuildHookInterface = object

KERNELS = Path(__file__).parent / "src" / "evoalign" / "kernels"
SOURCE, LIBRARY = KERNELS / "compiled.c", KERNELS / "_compiled.so"
# -ffp-contract=off: a product fused with a sum would have other bits than torch. No -march=native: a wheel may be built
# on one machine and used on another, so that functions are compiled for several and chosen when they are loaded.
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno")
CLONES = (
    ("arch=x86-64-v4", "arch=x86-64-v3", "default"),
    ("avx512f", "avx2", "default"),
    ("avx2", "default"),
    (),
)


class Hook(BuildHookInterface):
    """What hatchling calls before it packs a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library; a wheel that carries one is for this kind of machine. An editable one lies in place."""
        if self.target_name != "wheel":
            return
        if version == "editable":
            if os.environ.get("EVOALIGN_COMPILE") or _is_old(LIBRARY):
                build(LIBRARY)
            return
        self.folder = tempfile.mkdtemp()
        made = Path(self.folder) / LIBRARY.name
        if build(made):
            build_data["force_include"][str(made)] = f"evoalign/kernels/{LIBRARY.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Take away what the wheel has taken in."""
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)


def build(library: Path = LIBRARY) -> bool:
    """Whether the library was built. Raises RuntimeError where EVOALIGN_COMPILE=1 and it was not."""
    wanted, error = os.environ.get("EVOALIGN_COMPILE", ""), "there is none"
    compiler = [] if wanted == "0" else _compiler()
    try:
        for clones in CLONES if compiler else ():
            error = _compile(compiler, clones, library)  # atomically replaces a library that other processes use
            if not error:
                return True
        library.unlink(missing_ok=True)  # it may be of another source
    except OSError as failed:  # as of a folder that cannot be written
        error = str(failed)
    if wanted == "1":
        raise RuntimeError(f"the C compiler {' '.join(compiler) or 'cc'} made no library: {error}")
    return False


def _compiler() -> list[str]:
    """CC, or the system's compiler; empty where there is none."""
    words = shlex.split(os.environ.get("CC", ""))  # who names one wants no other
    found = [words] if words else [["cc"], ["gcc"], ["clang"]]
    return next((words for words in found if shutil.which(words[0])), [])


def _compile(compiler: list[str], clones: tuple[str, ...], library: Path) -> str:
    """Compile the library with these variants of its functions; the compiler's last line where it cannot."""
    attribute = ", ".join(f'"{name}"' for name in clones)
    flags = [*FLAGS, f"-DEVOALIGN_SOURCE=0x{source_number(SOURCE):08x}"]
    flags += [f"-DCLONES=__attribute__((target_clones({attribute})))"] if clones else []
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*compiler, *flags, str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        error = _unusable(made) if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
        if not error:
            made.replace(library)
        return error.splitlines()[-1] if error else ""


def source_number(source: Path) -> int:
    """32 bits of the SHA-256 of the source, by which the library says what it was made from."""
    return int(hashlib.sha256(source.read_bytes()).hexdigest()[:8], 16)


def _is_old(library: Path) -> bool:
    """Whether it is of other code than this and the source, so that each of several environments need not build it."""
    newest = max(file.stat().st_mtime for file in (SOURCE, Path(__file__)))
    return not library.is_file() or library.stat().st_mtime < newest or bool(_unusable(library))


def _unusable(library: Path) -> str:
    """Why a library cannot be used here, such as one that a cross compiler made; empty where it can."""
    try:
        return "" if ctypes.CDLL(str(library)).evoalign_source() & 0xFFFFFFFF == source_number(SOURCE) else "another"
    except (OSError, AttributeError) as error:
        return str(error)


def _platform() -> str:
    if sys.platform == "linux":  # not manylinux, which promises more
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    from packaging.tags import sys_tags

    return next(sys_tags()).platform


if __name__ == "__main__":
    print(f"built {LIBRARY}" if build() else "no library: there is no C compiler that makes it")
