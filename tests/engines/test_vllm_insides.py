# SPDX-License-Identifier: Apache-2.0
"""What the engine on vLLM takes of vLLM is looked for before it is used. Here without vLLM, on doctored objects."""

import ast
import functools
import importlib
import re
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
    monkeypatch.setattr(insides, "_version", lambda package: "0.30.1" if package == "vllm" else None)


def decorated(cls):
    """As vLLM's own does: a constructor of which nothing says what it wraps."""
    own = cls.__init__

    def __init__(self):  # noqa: N807
        own(self)

    cls.__init__ = __init__
    return cls


def recursive():
    """A method that holds itself, and a name that was never set."""

    def method(self, depth=0):
        self.walks = True
        return never if depth == 0 else method(self, depth - 1)

    if method is None:
        never = None
    return method


@decorated
class Runner:
    """A doctored runner."""

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


def test_a_method_is_replaced_where_it_is_and_takes_the_same():
    runner = Runner()
    replace(runner, "step", lambda batch, counts, *_, **__: "new")
    replace(runner, "of_class", lambda: "new")
    assert runner.step(1, 2, extra=3) == runner.of_class() == "new"


@pytest.mark.parametrize(
    ("name", "new", "said"),
    [
        ("stepp", lambda batch: None, "has no Runner.stepp"),
        ("step", lambda counts, batch: None, r"Runner.step(batch, counts, extra), which does not take (counts, batch)"),
        ("step", lambda batch, counts, extra, more: None, "does not take (batch, counts, extra, more)"),
        ("of_class", lambda batch: None, "Runner.of_class(), which does not take (batch)"),
    ],
)
def test_a_method_that_is_missing_or_another_is_not_replaced(name, new, said):
    runner = Runner()
    with pytest.raises(
        EngineError, match=r"vLLM 0\.30\.1 has .*engine vllm knows vLLM 0\.26 to 0\.\d+: install"
    ) as refused:
        replace(runner, name, new)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value) and name not in vars(runner)


def test_a_function_of_a_module_is_replaced_alike():
    module = types.ModuleType("layers")
    with pytest.raises(EngineError, match=r"has no layers\.dispatch"):
        replace(module, "dispatch", lambda: None)
    assert not hasattr(module, "dispatch")


@pytest.mark.parametrize("owner", ["Runner", "Derived"])
def test_what_only_an_instance_has_is_found_without_one(owner):
    for name in ("declared", "first", "second", "computed", "step", "walks"):
        assert by_import(Inside(__name__, owner, name)) is not None, name
    for name in ("third", "batch"):
        assert by_import(Inside(__name__, owner, name)) is None, name


@pytest.mark.parametrize(
    ("inside", "said"),
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
def test_a_release_that_lacks_a_name_does_not_start(inside, said, monkeypatch):
    monkeypatch.setattr(insides, "INSIDES", (Inside(__name__, "Runner", "step", ("batch",)), inside))
    monkeypatch.setattr(insides, "check", functools.cache(insides.check.__wrapped__))
    if not said:
        insides.check("cpu")
        return
    with pytest.raises(EngineError, match=re.escape(said)):
        insides.check("cpu")


def test_the_list_has_all_that_is_imported_from_vllm():
    listed = {(i.module, i.owner or i.name) for i in INSIDES}
    modules = {i.module.rpartition(".")[::2] for i in INSIDES} | listed
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(node.module, name.name) for name in node.names}
            elif isinstance(node, ast.Import):
                found |= {n.name.rpartition(".")[::2] for n in node.names if n.name.split(".")[0] == "vllm"}
    assert len(found) > 20
    places = {owner for _, owner in listed}
    assert not {(m, name) for m, name in found if (m, name) not in modules and name not in places}


def test_the_list_names_nothing_twice_and_is_as_long_as_the_guide_says():
    assert len({(i.module, i.owner, i.name) for i in INSIDES}) == len(INSIDES) > 200
    guide = FOLDER.parents[3] / "docs" / "guides" / "vllm.md"
    assert f"list of {len(INSIDES)} names" in guide.read_text(encoding="utf-8")


def test_every_replacement_goes_by_the_check():
    """No attribute of an object of vLLM's is assigned but by `replace`, or to put back what was there."""
    for path in FOLDER.glob("*.py"):
        if path.name == "insides.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            parts = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
            for target in (t for t in parts if isinstance(t, ast.Attribute)):
                kept = isinstance(target.value, ast.Name) and target.value.id == "self"
                restored = isinstance(node.value, ast.Name) and node.value.id == "own"
                given = ast.unparse(target) == "layer.cpu_linear"
                given = given or ast.unparse(target.value) == "made"  # a copy, which takes no name but its fields
                assert kept or restored or given, f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_other_releases_are_refused(monkeypatch):
    monkeypatch.setattr(insides, "_version", lambda package: "0.19.1")
    with pytest.raises(ModelError, match=r"knows vLLM 0\.26 to .* 0\.19\.1 is installed"):
        insides.check_version()
    monkeypatch.setattr(insides, "_version", lambda package: None)
    with pytest.raises(ModelError, match=re.escape(install("vllm"))):
        insides.check_version()


def test_the_list_is_read_without_torch():
    import subprocess
    import sys

    code = "import sys, evoalign.engines.vllm.insides; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert importlib.util.find_spec("evoalign.engines.vllm.insides") is not None
