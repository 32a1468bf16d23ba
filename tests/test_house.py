# SPDX-License-Identifier: Apache-2.0
"""How the source is built, held over its syntax tree: who may ask what something is, who may ask an engine, and sizes.

What is an engine's, a space's or a task's own is asked of the object. Only the package that owns a kind of part may
look at which one it has: by name, by class, by `match`, `type`, `hasattr` or a default of `getattr`.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evoalign.config import from_dict
from evoalign.engines import ENGINES
from evoalign.spaces import SPACES
from evoalign.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "evoalign"
FILES = sorted(PACKAGE.rglob("*.py"))
Rule = Callable[[ast.AST], bool]

OWNER = {"engine": "engines", "space": "spaces", "task": "tasks"}
NAMES = {"engine": set(ENGINES), "space": set(SPACES), "task": set(TASKS)}
CLASSES = {
    "engine": {n for cls in ENGINES.values() for n in (cls.__name__, cls.path.rpartition(":")[2])},
    "space": {"FullConfig", "LoraConfig", "LowrankConfig", *(cls.__name__ for cls in SPACES.values())},
    "task": {cls.__name__ for cls in TASKS.values()},
}
SHIPPED = set().union(*NAMES.values())
OWN_NAMES = (
    "config/engines.py", "config/spaces.py", "config/task.py", "config/run.py", "config/grpo.py",
    *(f"{package}/" for package in OWNER.values()),
)  # fmt: skip
"""Where the name of a shipped part may stand in the code: where it is defined, and where a config's defaults are."""
OTHERS = {
    "baselines/train.py": "grpo.tune", "baselines/planning.py": "grpo.tune, and the space of its adapter",
    "cli/__init__.py": "a command", "exporting/card.py": "grpo.tune, a library's name and a tag of the hub",
    "preflight/canary.py": "kinds of servers", "preflight/canary_session.py": "kinds of servers",
    "preflight/doctor.py": "a library's name", "rundir/identity.py": "sections, grpo.tune, libraries' names",
    "analysis/sweeping/search.py": "the default of task.name",
    "training/resolve.py": "what a PEFT adapter is",
    "analysis/similarity/results.py": "a column", "analysis/weights.py": "a part of a model",
    "gateway/anthropic.py": "fields of its API", "gateway/chat.py": "a finish reason",
    "gateway/dialect.py": "a field of messages", "gateway/openai_chat.py": "fields of its API",
    "gateway/batches.py": "a finish reason", "episodes.py": "a field of messages", "transcripts.py": "the same",
    "models/tool_formats.py": "a key of messages", "tokens.py": "a key of messages",
}  # fmt: skip
"""Files where such a word stands for something else, and for what. None comes."""
MAY_ROLL_OUT = ("engines/", "rollouts.py", "testing/", "episodes.py", "gateway/batches.py")
MOST_ENTRIES, MOST_LINES = 40, 450


# --- what counts ---


def last(node: ast.AST) -> str:
    """`space` of `space`, `config.space` and `self.config.space`; what is called, of a call."""
    if isinstance(node, ast.Call):
        return last(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def literals(node: ast.AST) -> set[str]:
    """The texts in a constant, or in a tuple, list or set of them."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def classes(node: ast.AST) -> set[str]:
    """The names of classes in `A`, `x.A`, `(A, B)` and `A | B`."""
    return {last(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}


def asks_the_name(kind: str) -> Rule:
    """`config.space.name == ...`, `!=`, `in`, `.startswith`; or any comparison of a `.name` with one that is known."""

    def rule(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith"):
            return (
                isinstance(node.value, ast.Attribute) and node.value.attr == "name" and last(node.value.value) == kind
            )
        if not isinstance(node, ast.Compare):
            return False
        operands = (node.left, *node.comparators)
        if isinstance(node.left, ast.Constant) and node.left.value == ":":  # whether it is an import path, of anything
            return False
        names = [n for n in operands if isinstance(n, ast.Attribute) and n.attr == "name"]
        others = [n for n in operands if n not in names]
        if any(last(n.value) == kind for n in names):  # with a name of the user's it is no choice of ours
            return not (others and all(isinstance(n, ast.Name) and n.id.islower() for n in others))
        said = {text for n in operands for text in literals(n)} & NAMES[kind]
        return bool(said) and any(last(n) in ("name", kind, f"{kind}_name") for n in operands)

    return rule


def asks_the_class(kind: str) -> Rule:
    """`isinstance` or `issubclass` with a class of this kind, and `case` with one."""

    def rule(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and last(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            return bool(classes(node.args[1]) & CLASSES[kind])
        return isinstance(node, ast.MatchClass) and bool(classes(node.cls) & CLASSES[kind])

    return rule


def asks_otherwise(kind: str) -> Rule:
    """`type(x)`, `dir(x)`, `vars(x)`, `hasattr(x, ...)`, `getattr(x, ...)`, `match x`, `match x.name` of this kind."""

    def rule(node: ast.AST) -> bool:
        if isinstance(node, ast.Match):
            subject = node.subject
            within = subject.value if isinstance(subject, ast.Attribute) and subject.attr == "name" else subject
            return kind in (last(subject), last(within))
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            return False
        least = {"type": 1, "dir": 1, "vars": 1, "hasattr": 2, "getattr": 2}.get(node.func.id, 99)
        return len(node.args) >= least and last(node.args[0]) == kind

    return rule


def names_a_part(node: ast.AST) -> bool:
    """The name of a shipped engine, space or task, whatever is done with it: compared, looked up, in a set."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SHIPPED


def asks_for_the_class(node: ast.AST) -> bool:
    """`x.__class__`, of anything."""
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def tries_an_attribute(node: ast.AST) -> bool:
    """`except AttributeError` alone: the question of `hasattr`, asked by doing."""
    return isinstance(node, ast.ExceptHandler) and node.type is not None and last(node.type) == "AttributeError"


def rolls_out(node: ast.AST) -> bool:
    """`engine.rollout`, called or handed on, and `getattr(engine, "rollout")`."""
    if isinstance(node, ast.Call) and last(node) == "getattr" and len(node.args) > 1:
        return "rollout" in literals(node.args[1])
    return isinstance(node, ast.Attribute) and node.attr == "rollout" and isinstance(node.ctx, ast.Load)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def found(rule: Rule, *own: str) -> list[str]:
    """Where a rule is broken outside the files that may, as `file:line`."""
    return [
        f"{name}:{node.lineno}"  # type: ignore[attr-defined]
        for path in FILES
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith(own)
        for node in nodes(path)
        if rule(node)
    ]


RULES = {"name": asks_the_name, "class": asks_the_class, "otherwise": asks_otherwise}


@pytest.mark.parametrize("kind", OWNER)
@pytest.mark.parametrize("how", RULES)
def test_a_part_is_asked_and_not_looked_at(kind: str, how: str) -> None:
    assert found(RULES[how](kind), f"{OWNER[kind]}/") == []


def test_one_door_leads_to_an_engine() -> None:
    assert found(rolls_out, *MAY_ROLL_OUT) == []


def test_no_shipped_part_is_named_elsewhere() -> None:
    assert found(names_a_part, *OWN_NAMES, *OTHERS) == []
    used = {place.partition(":")[0] for place in found(names_a_part, *OWN_NAMES)}
    assert used == set(OTHERS), "take it out of OTHERS"


def test_nobody_asks_for_a_class_or_tries_an_attribute() -> None:
    assert found(asks_for_the_class) == []
    assert found(tries_an_attribute, "plugins.py") == []  # there an attribute is what the user named


def test_the_classes_of_settings_are_known_here() -> None:
    sections = {type(from_dict({"engine": {"name": name}, "es": {"sigma": 0.1}}).engine).__name__ for name in ENGINES}
    assert sections <= CLASSES["engine"]


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("config.space.name == 'x'", asks_the_name("space")),
        ("a if self.config.space.name not in ('lora', 'full') else b", asks_the_name("space")),
        ("name = config.space.name\nname == 'lora'", asks_the_name("space")),
        ("config.engine.name != 'vllm'", asks_the_name("engine")),
        ("task.name in TASKS", asks_the_name("task")),
        ("config.engine.name.startswith('vl')", asks_the_name("engine")),
        ("isinstance(config.engine, VllmConfig)", asks_the_class("engine")),
        ("isinstance(e, config.TransformersConfig | None)", asks_the_class("engine")),
        ("match x:\n    case VllmConfig(): ...", asks_the_class("engine")),
        ("issubclass(cls, (int, Lora))", asks_the_class("space")),
        ("match config.space.name:\n    case 'lora': ...", asks_otherwise("space")),
        ("type(self.engine) is Other", asks_otherwise("engine")),
        ("hasattr(engine, 'shards')", asks_otherwise("engine")),
        ("getattr(config.engine, 'memory', None)", asks_otherwise("engine")),
        ("getattr(engine, 'shards')", asks_otherwise("engine")),
        ("'shards' in dir(self.engine)", asks_otherwise("engine")),
        ("'memory' in vars(config.engine)", asks_otherwise("engine")),
        ("{'vllm': 1}[config.engine.name]", names_a_part),
        ("config.engine.name.startswith('vllm')", names_a_part),
        ("SPECIAL = ('lora', 'full')\nself.name in SPECIAL", names_a_part),
        ("vllm = 'vllm'\nconfig.engine.name == vllm", names_a_part),
        ("x = config.space.name\nx == 'lora'", names_a_part),
        ("{'lora', 'full'} - {name}", names_a_part),
        ("config.engine.__class__.__name__ == 'VllmConfig'", asks_for_the_class),
        ("try: engine.shards\nexcept AttributeError: pass", tries_an_attribute),
        ("getattr(engine, 'rollout')(plan, requests)", rolls_out),
    ],
)
def test_what_counts_is_found(code: str, rule: Rule) -> None:
    assert any(map(rule, ast.walk(ast.parse(code))))


def test_what_does_not_count_passes() -> None:
    rules = [rolls_out, *(rule(kind) for rule in RULES.values() for kind in OWNER)]
    for code in (
        "tensor.name in layout.by_name", "config.grpo.tune == 'lora'", "self.es.optimizer.name != 'sgd'",
        "isinstance(x, dict)", "type(value) is list", "hasattr(os, 'fork')", "getattr(text, 'head_dim', None)",
        "SPACES[config.space.name]", "f'{config.space.name}'", "mode == 'full'",
    ):  # fmt: skip
        assert not any(rule(node) for node in ast.walk(ast.parse(code)) for rule in rules), code


# --- rooms ---


def test_the_top_reads_like_a_table_of_contents() -> None:
    entries = [p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_no_package_only_wraps_another() -> None:
    for init in PACKAGE.rglob("__init__.py"):
        beside = [p for p in init.parent.iterdir() if p.name not in ("__init__.py", "__pycache__")]
        inner = [p for p in beside if (p / "__init__.py").is_file()]
        assert not (len(beside) == len(inner) == 1), f"{init.parent.relative_to(PACKAGE)} has nothing of its own"


def test_files_are_short() -> None:
    lengths = {p.relative_to(PACKAGE).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert {f: n for f, n in lengths.items() if n > MOST_LINES} == {}


def test_every_package_and_module_has_its_layer() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contract = tools["importlinter"]["contracts"][0]
    layers = {name.partition(".")[0] for layer in contract["layers"] for name in layer.split(" : ")}
    top = [p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()]
    assert contract["type"] == "layers" and sorted(layers) == sorted(set(top) - {"__init__"})


# --- imports ---


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield every imported name, also of imports in functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def circle(*folders: Path) -> list[str]:
    """Return modules below the folders of which each imports the next; empty where there is no circle."""
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in folder.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        known = {w if w in modules else w.rpartition(".")[0] for w in imported(ast.parse(path.read_text("utf-8")))}
        graph[name] = {w for w in known if w in modules and w != name}
    assert sum(map(len, graph.values())) > 1, "the imports are not read"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_have_no_circle() -> None:
    assert circle(ROOT / "src", *(ROOT / name for name in ("benchmarks", "studies"))) == []


@pytest.mark.parametrize("line", ["from a.b import x", "if TYPE_CHECKING:\n    from a.b import x"])
def test_circle_finds_imports_in_functions_and_under_type_checking(tmp_path: Path, line: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/__init__.py").write_text("")
    (tmp_path / "a/b.py").write_text("from a import c\n")
    (tmp_path / "a/c.py").write_text("def f():\n    import d\n")
    (tmp_path / "d.py").write_text("x = 1\n")
    assert circle(tmp_path) == []
    (tmp_path / "d.py").write_text(f"{line}\n")
    assert set(circle(tmp_path)) == {"a.b", "a.c", "d"}
