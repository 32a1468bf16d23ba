# SPDX-License-Identifier: Apache-2.0
"""No module of src, benchmarks or studies imports another in a circle, anywhere in its text (from the syntax trees)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def modules(folder: Path) -> dict[str, Path]:
    """Dotted names of all Python files below a folder."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(folder: Path) -> dict[str, set[str]]:
    """Of each module those it imports of the same folder, but for what only a type checker reads."""
    known = modules(folder)
    return {name: {m for m in _named(ast.parse(path.read_text("utf-8")), known) if m != name}
            for name, path in known.items()}  # fmt: skip


def _named(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in inner if {name, node.module} & known.keys())
        yield from _named(node, known)


def circle(edges: Mapping[str, set[str]]) -> list[str] | None:
    """Modules of which each imports the next and the last the first; None where there is no such."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str] | None:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return None
        found = next((c for to in sorted(edges[name]) if (c := walk(to, [*way, name]))), None)
        done.add(name)
        return found

    return next((c for name in sorted(edges) if (c := walk(name, []))), None)


@pytest.mark.parametrize("folder", ["src", "benchmarks", "studies"])
def test_no_module_imports_itself_by_way_of_others(folder: str) -> None:
    edges = imports(ROOT / folder)
    assert sum(map(len, edges.values())) > 3, "the imports are not read"
    found = circle(edges)
    assert found is None, " -> ".join([*found, found[0]])


def test_a_circle_is_seen_wherever_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/__init__.py").write_text("")
    (tmp_path / "a/b.py").write_text("from a import c\n")
    (tmp_path / "a/c.py").write_text("def f():\n    import d\n")
    (tmp_path / "d.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import x\n")
    assert circle(imports(tmp_path)) is None
    (tmp_path / "d.py").write_text("from a.b import x\n")
    assert circle(imports(tmp_path)) == ["a.b", "a.c", "d"]
