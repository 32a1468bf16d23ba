# SPDX-License-Identifier: Apache-2.0
"""The documentation compared with the code: commands, settings, configs, Python, names, files, examples."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
import yaml
from pages import DOCS, PAGES, REPOSITORY, Block, blocks, hooks, words

import evoalign
from evoalign import analysis, cli
from evoalign.analysis.base import described, settings_of
from evoalign.config import ENGINES, TaskConfig, from_dict, parse_overrides
from evoalign.config.grpo import OF_TRL
from evoalign.tasks import create

WIDTH = {"es": {"sigma": 0.01}}
"""The setting that a config needs, for examples that show another section."""
FILES = DOCS / "reference/files.md"


def by_page(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(cli.app)


def leaf(parts: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the words name, and the remaining words."""
    command, rest = command_line(), parts[1:]
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"no command {' '.join(parts)}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@functools.cache
def options() -> set[str]:
    parameters = [p for _, command in hooks.commands() for p in command.params]
    return {name for p in parameters for name in [*p.opts, *p.secondary_opts]} | {"--help", "--strict"}


@functools.cache
def settings() -> dict[str, str]:
    """All dotted names, sections included, with the engine that has them."""
    found: dict[str, str] = {}
    for setting in hooks.settings():
        parts = setting["key"].split(".")
        for count in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:count]), hooks.engine_of(setting["section"]))
    return found | {f"grpo.trl.{name}": "transformers" for name in OF_TRL}


def exists(path: str) -> bool:
    """Return whether `module:name` exists; the name may be a submodule."""
    module, _, name = path.partition(":")
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_command_lines_are_accepted(page: Path) -> None:
    shown = [b.text.replace("\\\n", " ") for b in blocks("sh", "", "bash") if b.page == page]
    lines = [line.strip() for text in shown for line in text.splitlines()]
    for line in (line for line in lines if re.match(r"(\w+=\S+ )*(\S+/bin/)?evoalign \w", line)):
        parts = shlex.split(line, comments=True)
        while "=" in parts[0]:
            parts = parts[1:]
        command, rest = leaf(parts)
        from_dict(parse_overrides(WIDTH, command.make_context(command.name, rest).params.get("set_") or []))
        for word in rest:
            if word.startswith(("configs/", "data/", "examples/")):
                assert (REPOSITORY / word).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_commands_settings_names_and_files_in_running_text_exist(page: Path) -> None:
    sections = {name.split(".")[0] for name in settings() if "." in name}
    for word in words(page):
        if re.match(r"evoalign [a-z]", word):
            leaf(word.split())
        if re.fullmatch(r"--[a-z][a-z-]*( \S+)?", word) and by_page(page) != "CONTRIBUTING.md":
            assert word.split()[0] in options() | {"--apply_chat_template"}, f"no option {word}"
        name, _, value = word.partition(": ")
        if name.split(".")[0] in sections and re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", name):
            assert name in settings(), f"no setting {name}"
            if value:
                from_dict(parse_overrides(WIDTH, [f"engine={settings()[name]}", f"{name}={value}"]))
        if re.fullmatch(r"evoalign(\.\w+)+:\w+", word):
            assert exists(word), f"no {word}"
        if re.fullmatch(r"(src|configs|scripts|examples|benchmarks|studies|recipes|tests|docs)/[\w./-]+", word):
            assert (REPOSITORY / word).exists(), f"no file {word}"


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda b: b.id)
def test_configs_are_accepted(block: Block) -> None:
    from_dict({**WIDTH, **yaml.safe_load(block.text)})


@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.id)
def test_python_compiles_and_its_imports_of_evoalign_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "evoalign":
            for name in node.names:
                assert exists(f"{node.module}:{name.name}"), f"{node.module} has no {name.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "evoalign":
            assert node.attr in evoalign.__all__, f"evoalign has no {node.attr}"


def test_links_of_the_documents_in_the_root_lead_to_files_and_headings() -> None:
    for page in (page for page in PAGES if page.parent == REPOSITORY):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = REPOSITORY / path if path else page
            assert target.exists(), f"{page.name}: no file {path}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in anchors, f"{page.name}: no heading {link}"


def test_settings_lists_those_of_every_engine() -> None:
    assert {"engine", "es.optimizer.name", "seed"} <= set(settings())
    for engine, section in ENGINES.items():
        assert {f"engine.{name}" for name in section.model_fields} <= set(settings())
        assert engine in {hooks.engine_of(setting["section"]) for setting in hooks.settings()}


def test_reference_documents_the_functions_that_the_public_names_import() -> None:
    for name, home in evoalign._HOMES.items():
        node, found = hooks._find(*home.split(":")), getattr(evoalign, name)
        assert node.name == found.__name__, name
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert [a.arg for a in arguments] == list(inspect.signature(found).parameters), name


def test_reference_has_every_method_of_the_base_classes() -> None:
    text = hooks.written("bases", None)
    for name, homes in hooks.BASES.items():
        part = text.split(f"{{#base-{name}}}")[1].split("\n### ")[0]
        shown = dict(re.findall(r"^`(\w+)(?:\((.*?)\))?`\n\n:   \w", part, re.MULTILINE))
        for module, kind in (home.split(":") for home in homes):
            for member, value in vars(getattr(importlib.import_module(module), kind)).items():
                if inspect.isfunction(value) and not member.startswith("_"):
                    assert shown[member] == ", ".join(list(inspect.signature(value).parameters)[1:]), f"{name}.{member}"


def test_map_of_the_source_has_every_package_and_module_once() -> None:
    (shown,) = (b.text for b in blocks("text") if by_page(b.page) == "CONTRIBUTING.md")
    listed = re.findall(r"(?:^  |;  |, )([a-z]+(?:/|\.py))(?=  |$|, )", shown, re.MULTILINE)
    source = REPOSITORY / "src" / "evoalign"
    packages = {f"{file.parent.name}/" for file in source.glob("*/__init__.py")}
    assert sorted(listed) == sorted(packages | {f.name for f in source.glob("[!_]*.py")})


def test_page_of_analyses_has_each_that_ships_with_settings_it_accepts() -> None:
    text = (DOCS / "guides/analyses.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+? \| `(\w+)` \| (?:`(.+?)`|as it is) \|", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == analysis.names()
    for name, quick in rows:
        found = analysis.find(name)
        assert (settings_of(found, quick.split()) == found.settings()) is not bool(quick), name
    part = text.partition("\n## Forgetting\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \|", part, re.MULTILINE)
    named = {n: v for names, values in rows for n, v in zip(names.split(", "), values.split(", "), strict=True)}
    defaults = described(analysis.find("forgetting"))
    assert named == {f"`{n}`": f"`{list(v) if isinstance(v, tuple) else v}`" for n, v in defaults.items()}


def test_readme_is_short_and_its_figure_and_commands_are_true() -> None:
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    text = "\n".join(lines[:60])
    assert all(command in text for command in ("make demo", "pip install .", "evoalign init ", "evoalign train "))
    (figure,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert (REPOSITORY / figure).is_file()


def test_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", evoalign.__version__)
    assert citation["authors"] == [{"name": "The evoalign authors"}]
    assert {"message", "title"} <= citation.keys()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports an example, from a folder that has all examples as files."""
    for block in blocks("python", "yaml", "sh"):
        if block.title:
            (tmp_path / Path(block.title).name).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[str] = []

    def load_example(name: str) -> ModuleType:
        loaded.append(name)
        return importlib.import_module(name)

    yield load_example
    for name in [*loaded, "my_space", "my_task"]:
        sys.modules.pop(name, None)


def test_space_task_and_shaping_keep_their_contracts(load: Any) -> None:
    load("test_my_space").test_output_projections()
    load("test_my_task").test_short_answer()
    coefficients = load("my_shaping").squashed(np.array([[100.0], [2.0], [3.0], [1.0]]))
    assert abs(coefficients.sum()) < 1e-12 and np.argsort(coefficients).tolist() == [3, 1, 2, 0]


def test_analysis_counts_completions_of_a_run(load: Any, small_run: Path) -> None:
    run = str(small_run)
    found = analysis.find("lengths.py:Lengths")
    assert found.run([run], settings_of(found, ["longest=100000"])).numbers == {run: 0}
    assert found.run([run], settings_of(found, ["longest=0"])).numbers[run] > 0


def test_objective_scores_and_changes_its_state(load: Any) -> None:
    from evoalign.rewards.objective import grouped, score

    objective = load("my_objective").Priced(limit=0.25)
    group = grouped({"right": [1.0, 0.0], "cost": [0.5, 1.0]}, ["a", "b"], [{}], 0)
    assert score(objective, group).tolist() == [[0.5], [-1.0]]
    assert objective.state == {"ln_price": 0.25}


def test_fitness_functions_return_what_they_are_named_for(load: Any) -> None:
    macro_f1 = load("labels").macro_f1
    rows = [{"label": label} for label in ("a", "a", "a", "b")]
    assert macro_f1(["a", "a", "a", "a"], rows) == pytest.approx((6 / 7 + 0) / 2)  # 0.75 are right
    assert macro_f1(["a", "a", " a", "b"], rows) == 1.0
    rows = [{"prompt": p, "answer": "7"} for p in ("p", "p", "q", "q")]
    assert load("passes").pass_at_k(["1", "it is 7", "8", "9"], rows) == 0.5


@pytest.mark.skipif(shutil.which("jq") is None, reason="the script calls jq")
def test_script_is_a_reward(load: Any) -> None:
    Path("score.sh").chmod(0o755)
    task = create(TaskConfig(name="custom", rewards=["./score.sh"]))
    assert task.rewards(["four", ""], [{"prompt": "p"}] * 2) == [-4.0, 0.0]


def test_readers_of_the_file_formats_read_a_journal_and_its_hashes(load: Any) -> None:
    from evoalign.engines.hash import weights_hash
    from evoalign.rundir.journal import Journal
    from evoalign.types import Update, population

    ours = {"b": torch.randn(3, 5), "a": torch.tensor([-0.0, 1.0, 3e38])}
    found = weights_hash(ours.items())
    assert load("weights_hash").weights_hash({name: np.asarray(t) for name, t in ours.items()}) == found
    file = Path("journal.jsonl")
    journal = Journal(file, {"space": "lora \u00e9", "weights_hash": found})
    journal.append(Update(0, 0, population(2), (1e-7, -0.1), 0.01, 0.005), [1 / 3, 1e22])
    journal.seal(0, found)
    journal.close()
    read_journal = load("read_journal").read_journal
    assert [line["type"] for line in read_journal(file)] == ["header", "update", "seal"]
    file.write_text(file.read_text().replace("-0.1", "-0.2"))
    with pytest.raises(AssertionError, match="line 2 was altered"):
        read_journal(file)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations with the tiny model."""
    validation = {"validation_data": "data/tasks/conciseness/questions_validation.json", "validation_size": 2}
    tree = {
        "output_dir": str(tmp_path_factory.mktemp("docs") / "run"), "task": validation,
        "lora": {"target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": 2, "population_size": 4, "sigma": 0.05, "learning_rate": 0.025},
        "evaluation": {"max_tokens": 8, "every": 1}, "tracking": {"completions_every": 1},
        "checks": {"control_every": 1},
    }  # fmt: skip
    return evoalign.train(tree).path


def fields_under(heading: str, until: str = "## ") -> set[str]:
    """Return the names in the first column of the tables under a heading of the page on file formats."""
    part = re.split(f"^{until}", FILES.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1], flags=re.MULTILINE)
    rows = re.findall(r"^\| (`[^|]+) \|", part[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def sha256(tree: object) -> str:
    """Hash the config, or the record of a saved mean, as the page describes."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def test_file_formats_name_every_field_that_a_run_writes(small_run: Path) -> None:
    from pyarrow import parquet

    journal, rows = (
        [json.loads(line) for line in (small_run / name).read_text().splitlines()]
        for name in ("journal.jsonl", "metrics.jsonl")
    )
    assert {name for line in journal for name in line} - {"previous", "hash"} == fields_under("journal.jsonl")
    assert journal[0]["config_hash"] == sha256(journal[0]["config"])
    assert {name for row in rows for name in row} == fields_under("metrics.jsonl", "### ")
    assert {name for row in rows for name in row["diagnosis"]} == fields_under("diagnosis")
    assert {name for row in rows for name in row["diagnosis"]["axes"]} == fields_under("axes", "### ")
    record = json.loads((small_run / "loras/generation_0001/evoalign.json").read_text())
    assert record.pop("hash") == sha256(record)
    (saved,) = re.findall(r"^\| `evoalign\.json`.*$", FILES.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*record, "hash"} - {"format_version"} == set(re.findall(r"`(\w+)`", saved))
    assert set(json.loads((small_run / "manifest.json").read_text())) <= fields_under("manifest.json")
    evaluation = set(json.loads((small_run / "results/evaluation.json").read_text())) - {"format_version"}
    assert evaluation <= fields_under("results/evaluation.json")
    for file in (small_run / "results/completions").glob("*.parquet"):
        assert re.fullmatch(r"(before|after)(_validation)?|(generation|rewards)_\d{4}", file.stem), (
            f"{file.name} is not named"
        )
        assert set(parquet.read_schema(file).names) <= fields_under("results/completions"), file.name
