# SPDX-License-Identifier: Apache-2.0
"""The names that the engine uses in vLLM are checked before it starts. Here without vLLM, on stand-in objects."""

import ast
import functools
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from evoalign.engines.vllm import insides
from evoalign.engines.vllm.insides import INSIDES, Inside, by_import, replace
from evoalign.errors import EngineError, ModelError
from evoalign.version import install

FOLDER = Path(insides.__file__).parent


@pytest.fixture(autouse=True)
def _release(monkeypatch):
    monkeypatch.setattr(insides, "_installed", lambda: "0.30.1")


def decorated(cls):
    """Wrap the constructor without naming it, as a decorator of vLLM does."""
    own = cls.__init__

    def __init__(self):  # noqa: N807
        own(self)

    cls.__init__ = __init__
    return cls


def recursive():
    """Return a method whose closure holds itself, and an empty cell."""

    def method(self, depth=0):
        self.walks = True
        return never if depth == 0 else method(self, depth - 1)

    if method is None:
        never = None
    return method


@decorated
class Runner:
    """A stand-in for a runner of vLLM."""

    declared: int

    def __init__(self):
        self.first, self.second = 1, 2

    @property
    def computed(self):
        return 3

    def step(self, batch, counts, extra=None):
        return "own"

    walked = recursive()

    @classmethod
    def of_class(cls):
        return "own"


class Derived(Runner):
    pass


def test_replace_sets_a_method_with_the_same_parameters():
    runner = Runner()
    replace(runner, "step", lambda batch, counts, *_, **__: "new")
    replace(runner, "of_class", lambda: "new")
    assert runner.step(1, 2, extra=3) == runner.of_class() == "new"


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("stepp", lambda batch: None, "has no Runner.stepp"),
        ("step", lambda counts, batch: None, r"Runner.step(batch, counts, extra), which does not take (counts, batch)"),
        ("step", lambda batch, counts, extra, more: None, "does not take (batch, counts, extra, more)"),
        ("of_class", lambda batch: None, "Runner.of_class(), which does not take (batch)"),
    ],
)
def test_replace_refuses_a_method_that_is_missing_or_has_other_parameters(name, new, message):
    runner = Runner()
    with pytest.raises(EngineError, match=r"vLLM 0\.30\.1 has .*0\.26 to 0\.\d+") as refused:
        replace(runner, name, new)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) and name not in vars(runner)


def test_replace_refuses_a_missing_function_of_a_module():
    module = types.ModuleType("layers")
    with pytest.raises(EngineError, match=r"has no layers\.dispatch"):
        replace(module, "dispatch", lambda: None)
    assert not hasattr(module, "dispatch")


@pytest.mark.parametrize("owner", ["Runner", "Derived"])
def test_by_import_finds_attributes_that_only_instances_have(owner):
    for name in ("declared", "first", "second", "computed", "step", "walks"):
        assert by_import(Inside(__name__, owner, name)) is not None, name
    for name in ("third", "batch"):
        assert by_import(Inside(__name__, owner, name)) is None, name


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (Inside(__name__, "Runner", "gone"), f"has no {__name__}.Runner.gone"),
        (Inside(__name__, "Gone", "step"), f"has no {__name__}.Gone.step"),
        (Inside("evoalign.nowhere", "", "step"), "has no evoalign.nowhere.step"),
        (Inside(__name__, "Runner", "step", ("counts",)), "which does not take (counts)"),
        (Inside(__name__, "Runner", "step", ("batch", "more=")), "which does not take (batch, more=)"),
        (Inside(__name__, "Runner", "step", ("batch", "extra=", "counts=")), ""),
        (Inside(__name__, "Runner", "gone", (), "gpu"), ""),
    ],
)
def test_check_refuses_a_release_that_lacks_a_name(inside, message, monkeypatch):
    monkeypatch.setattr(insides, "INSIDES", (Inside(__name__, "Runner", "step", ("batch",)), inside))
    monkeypatch.setattr(insides, "check", functools.cache(insides.check.__wrapped__))
    if not message:
        insides.check("cpu")
        return
    with pytest.raises(EngineError, match=re.escape(message)):
        insides.check("cpu")


def nodes(kind):
    """Return nodes of a kind in the engine's files, with the file."""
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path, node


def test_insides_lists_every_import_from_vllm():
    listed = {(i.module, i.owner or i.name) for i in INSIDES}
    modules = {i.module.rpartition(".")[::2] for i in INSIDES} | listed
    found = {
        (node.module, name.name)
        for _, node in nodes(ast.ImportFrom)
        for name in node.names
        if (node.module or "").split(".")[0] == "vllm"
    }
    imported = {name.name for _, node in nodes(ast.Import) for name in node.names}
    found |= {name.rpartition(".")[::2] for name in imported if name.split(".")[0] == "vllm"}
    assert len(found) > 20
    assert not {pair for pair in found - modules if pair[1] not in {owner for _, owner in listed}}
    assert len({(i.module, i.owner, i.name) for i in INSIDES}) == len(INSIDES) > 200


def test_every_attribute_of_vllm_is_set_by_replace():
    """Only restoring an earlier value is exempt."""
    for path, node in nodes(ast.Assign):
        restored = path.name == "insides.py" or (isinstance(node.value, ast.Name) and node.value.id == "own")
        parts = [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in (t for t in parts if isinstance(t, ast.Attribute) and not restored):
            owner = ast.unparse(target.value)  # `made` and `row`: a copy with slots, and an own class
            given = owner in ("self", "made", "row") or ast.unparse(target) == "layer.cpu_linear"
            assert given, f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_check_version_refuses_other_releases(monkeypatch):
    monkeypatch.setattr(insides, "_installed", lambda: "0.19.1")
    with pytest.raises(ModelError, match=r"0\.26 to .* 0\.19\.1"):
        insides.check_version()
    monkeypatch.setattr(insides, "_installed", lambda: None)
    with pytest.raises(ModelError, match=re.escape(install("vllm"))):
        insides.check_version()


def test_insides_imports_neither_torch_nor_vllm():
    code = "import sys, evoalign.engines.vllm.insides; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
