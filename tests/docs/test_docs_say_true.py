# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows is held against the code: commands, settings, configs, Python, names, files."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path
from statistics import mean
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
from evoalign.engines import Engine
from evoalign.spaces import Space
from evoalign.tasks import create

WIDTH = {"es": {"sigma": 0.01}}
"""What a config that shows one section leaves to the reader."""


def by_page(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def commands() -> list[tuple[str, str]]:
    """Every command line that a page shows, with its page."""
    lines = [(b, line.strip()) for b in blocks("sh", "", "bash") for line in b.text.replace("\\\n", " ").splitlines()]
    return [(by_page(b.page), line) for b, line in lines if re.match(r"(\w+=\S+ )*(\S+/bin/)?evoalign ", line)]


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(cli.app)


def leaf(parts: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words that are left for it."""
    command, rest = command_line(), parts[1:]
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"no command {' '.join(parts)}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: str(value)[:60])
def test_a_command_line_is_one_that_the_command_line_takes(page: str, line: str) -> None:
    parts = shlex.split(line, comments=True)
    while "=" in parts[0]:
        parts = parts[1:]
    command, rest = leaf(parts)
    context = command.make_context(command.name, rest)
    from_dict(parse_overrides(WIDTH, context.params.get("set_") or []))
    for word in rest:
        if word.startswith(("configs/", "data/", "examples/")):
            assert (REPOSITORY / word).exists(), f"{page} names {word}"


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_commands_and_options_in_running_text_exist(page: Path) -> None:
    parameters = [p for command in _commands(command_line()) for p in command.params]
    known = {name for p in parameters for name in [*p.opts, *p.secondary_opts]}
    for word in words(page):
        if word.startswith("evoalign "):
            leaf(word.split())
        if re.fullmatch(r"--[a-z][a-z-]*( \S+)?", word) and by_page(page) != "CONTRIBUTING.md":
            assert word.split()[0] in {*known, "--help", "--strict"}, f"{by_page(page)}: no option {word}"


def _commands(command: Any) -> list[Any]:
    below = getattr(command, "commands", None)
    return [command] if below is None else [leaf for inner in below.values() for leaf in _commands(inner)]


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda b: b.id)
def test_a_config_is_one_that_evoalign_takes(block: Block) -> None:
    tree = yaml.safe_load(block.text)
    from_dict({**WIDTH, **tree})


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_a_setting_in_running_text_exists(page: Path) -> None:
    known = settings()
    sections = {name.split(".")[0] for name in known if "." in name}
    for word in words(page):
        name, _, value = word.partition(": ")
        if name.split(".")[0] in sections and re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", name):
            assert name in known, f"{by_page(page)}: no setting {name}"
            if value:
                from_dict(parse_overrides(WIDTH, [f"engine={known[name]}", f"{name}={value}"]))


@functools.cache
def settings() -> dict[str, str]:
    """All dotted names, sections included, with the engine that has them."""
    found: dict[str, str] = {}
    for setting in hooks.settings():
        parts = setting["key"].split(".")
        for count in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:count]), hooks.engine_of(setting["section"]))
    return found | {f"grpo.trl.{name}": "transformers" for name in OF_TRL}


def test_the_settings_of_every_engine_are_known() -> None:
    known = settings()
    assert {"engine", "es.optimizer.name", "seed"} <= set(known)
    for engine, section in ENGINES.items():
        assert {f"engine.{name}" for name in section.model_fields} <= set(known)
        assert engine in {hooks.engine_of(setting["section"]) for setting in hooks.settings()}


@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.id)
def test_python_compiles_and_what_it_imports_of_evoalign_exists(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "evoalign":
            for name in node.names:
                assert exists(f"{node.module}:{name.name}"), f"{node.module} has no {name.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "evoalign":
            assert node.attr in evoalign.__all__, f"evoalign has no {node.attr}"


def exists(path: str) -> bool:
    """Whether `module:name` is there; the name may be a submodule."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        return hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_names_and_files_in_running_text_exist(page: Path) -> None:
    for word in words(page):
        if re.fullmatch(r"evoalign(\.\w+)+:\w+", word):
            assert exists(word), f"{by_page(page)}: no {word}"
        if re.fullmatch(r"(src|configs|scripts|examples|benchmarks|studies|recipes|tests|docs)/[\w./-]+", word):
            assert (REPOSITORY / word).exists(), f"{by_page(page)}: no file {word}"


def test_the_reference_documents_the_function_that_the_name_brings() -> None:
    for name, home in evoalign._HOMES.items():
        node, found = hooks._find(*home.split(":")), getattr(evoalign, name)
        assert node.name == found.__name__, name
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert [a.arg for a in arguments] == list(inspect.signature(found).parameters), name


def test_the_map_of_the_source_names_every_package_and_module_once() -> None:
    (shown,) = (b.text for b in blocks("text") if by_page(b.page) == "CONTRIBUTING.md")
    listed = re.findall(r"(?:^  |;  |, )([a-z]+(?:/|\.py))(?=  |$|, )", shown, re.MULTILINE)
    source = REPOSITORY / "src" / "evoalign"
    packages = {f"{file.parent.name}/" for file in source.glob("*/__init__.py")}
    assert sorted(listed) == sorted(packages | {f.name for f in source.glob("[!_]*.py")})


def test_readme_is_at_most_150_lines_and_links_to_the_map_of_the_source() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert "(CONTRIBUTING.md#map-of-the-source)" in text
    assert "\n## Map of the source\n" in (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_first_sixty_lines_of_the_readme_have_what_a_reader_needs_first() -> None:
    text = "\n".join((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()[:60])
    python = next(b.text for b in blocks("python") if by_page(b.page) == "README.md")
    wanted = (
        "make demo",
        "make test",
        "| before | after |",
        "pip install .",
        "evoalign init ",
        "evoalign train ",
        python,
    )
    assert [each for each in wanted if each not in text] == []
    assert len(python.splitlines()) <= 5
    (figure,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert (REPOSITORY / figure).is_file()


def test_links_of_the_documents_in_the_root_lead_to_files_and_headings() -> None:
    for page in PAGES:
        if page.parent != REPOSITORY:
            continue
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = REPOSITORY / path if path else page
            assert target.exists(), f"{page.name}: no file {path}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in map(_anchor, headings), f"{page.name}: no heading {link}"


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def imported(title: str, folder: Path) -> ModuleType:
    """The block of Python that a page shows as a file of this name, as a module."""
    file = folder / title
    file.write_text(next(b.text for b in blocks("python") if b.title == title), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"docs_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_analyses_has_each_that_ships_and_settings_it_takes() -> None:
    rows = re.findall(r"^\| .+? \| `(\w+)` \| (?:`(.+?)`|as it is) \|", (DOCS / "guides/analyses.md").read_text(), re.M)
    assert sorted(name for name, _ in rows) == analysis.names()
    for name, quick in rows:
        found = analysis.find(name)
        assert (settings_of(found, quick.split()) == found.settings()) is not bool(quick), name


def test_the_defaults_of_forgetting_are_those_of_the_guide() -> None:
    page = (DOCS / "guides/paths.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \|", page.partition("## Forgetting")[2], re.M)
    named = {n: v for names, values in rows for n, v in zip(names.split(", "), values.split(", "), strict=True)}
    defaults = described(analysis.find("forgetting"))
    assert named == {f"`{n}`": f"`{list(v) if isinstance(v, tuple) else v}`" for n, v in defaults.items()}


def test_the_space_of_the_guide_keeps_the_contract(tmp_path: Path) -> None:
    from evoalign.testing import spaces

    module = imported("my_spaces.py", tmp_path)
    tree = next(yaml.safe_load(b.text) for b in blocks("yaml") if "my_spaces:Norms" in b.text)
    spaces.check_space(module.Norms(from_dict({**WIDTH, **tree})))


def test_the_objective_of_the_guide_scores_and_moves_its_state(tmp_path: Path) -> None:
    from evoalign.rewards.objective import grouped, score

    objective = imported("my_objective.py", tmp_path).Priced(limit=0.25)
    group = grouped({"right": [1.0, 0.0], "cost": [0.5, 1.0]}, ["a", "b"], [{}], 0)
    assert score(objective, group).tolist() == [[0.5], [-1.0]]
    assert objective.state == {"ln_price": 0.25}


def test_the_readers_of_the_file_formats_read_what_a_run_leaves(tmp_path: Path) -> None:
    from evoalign.engines.hash import weights_hash
    from evoalign.rundir.journal import Journal
    from evoalign.types import Update, population

    ours = {"b": torch.randn(3, 5), "a": torch.tensor([-0.0, 1.0, 3e38])}
    theirs = imported("weights_hash.py", tmp_path)
    found = weights_hash(ours.items())
    assert theirs.weights_hash({name: np.asarray(t) for name, t in ours.items()}) == found
    header = {"space": "lora \u00e9", "weights_hash": found}
    journal = Journal(tmp_path / "journal.jsonl", header)
    journal.append(Update(0, 0, population(2), (1e-7, -0.1), 0.01, 0.005), [1 / 3, 1e22])
    journal.seal(0, found)
    journal.close()
    reader = imported("read_journal.py", tmp_path)
    assert [line["type"] for line in reader.read_journal(tmp_path / "journal.jsonl")] == ["header", "update", "seal"]
    text = (tmp_path / "journal.jsonl").read_text().replace("-0.1", "-0.2")
    (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(AssertionError, match="line 2 was altered"):
        reader.read_journal(tmp_path / "journal.jsonl")


def fields_under(heading: str, until: str = "## ") -> set[str]:
    """The names in the first column of the tables under a heading of the page on file formats."""
    text = (REPOSITORY / "docs/reference/files.md").read_text(encoding="utf-8")
    part = re.split(f"^{until}", text.split(f"## {heading}\n", 1)[1], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| (`[^|]+) \|", part, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def sha256(tree: object) -> str:
    """As the page says that the config and the record of a saved mean are hashed."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def test_the_fitness_functions_of_the_guide_say_what_they_are_called(tmp_path: Path) -> None:
    macro_f1 = imported("labels.py", tmp_path).macro_f1
    rows = [{"label": label} for label in ("a", "a", "a", "b")]
    assert macro_f1(["a", "a", "a", "a"], rows) == pytest.approx((6 / 7 + 0) / 2)  # 0.75 are right
    assert macro_f1(["a", "a", " a", "b"], rows) == 1.0
    pass_at_k = imported("passes.py", tmp_path).pass_at_k
    rows = [{"prompt": p, "answer": "7"} for p in ("p", "p", "q", "q")]
    assert pass_at_k(["1", "it is 7", "8", "9"], rows) == 0.5


@pytest.mark.skipif(shutil.which("jq") is None, reason="the script of the guide calls jq")
def test_the_script_of_the_guide_is_a_reward(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("sh") if block.title == "score.sh")
    (tmp_path / "score.sh").write_text(block.text)
    (tmp_path / "score.sh").chmod(0o755)
    task = create(TaskConfig(name="custom", rewards=[str(tmp_path / "score.sh")]))
    assert task.rewards(["four", ""], [{"prompt": "p"}] * 2) == [-4.0, 0.0]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations with the tiny model."""
    tree = {
        "output_dir": str(tmp_path_factory.mktemp("docs") / "run"),
        "lora": {"target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": 2, "population_size": 4, "sigma": 0.05, "learning_rate": 0.025},
        "evaluation": {"max_tokens": 8, "every": 1},
        "task": {"validation_data": "data/tasks/conciseness/questions_validation.json", "validation_size": 2},
        "tracking": {"completions_every": 1},
        "checks": {"control_every": 1},
    }
    return evoalign.train(tree).path


def test_the_file_formats_name_every_field_that_a_run_writes(small_run: Path) -> None:
    journal = [json.loads(line) for line in (small_run / "journal.jsonl").read_text().splitlines()]
    assert {name for line in journal for name in line} - {"previous", "hash"} == fields_under("journal.jsonl")
    assert journal[0]["config_hash"] == sha256(journal[0]["config"])
    rows = [json.loads(line) for line in (small_run / "metrics.jsonl").read_text().splitlines()]
    assert {name for row in rows for name in row} == fields_under("metrics.jsonl", "### ")
    assert {name for row in rows for name in row["diagnosis"]} == fields_under("diagnosis")
    record = json.loads((small_run / "loras/generation_0001/evoalign.json").read_text())
    assert record.pop("hash") == sha256(record)
    text = (REPOSITORY / "docs/reference/files.md").read_text(encoding="utf-8")
    saved = next(line for line in text.splitlines() if line.startswith("| `evoalign.json` |"))
    assert {*record, "hash"} - {"format_version"} == set(re.findall(r"`(\w+)`", saved))
    manifest = text.split("## manifest.json\n")[1].split("## ")[0]
    assert all(f"`{name}`" in manifest for name in json.loads((small_run / "manifest.json").read_text()))
    report = text.split("## results/evaluation.json\n")[1].split("## ")[0]
    names = set(json.loads((small_run / "results/evaluation.json").read_text())) - {"format_version"}
    assert all(f"`{name}`" in report for name in names)


def test_the_file_formats_name_every_column_of_completions(small_run: Path) -> None:
    from pyarrow import parquet

    for file in (small_run / "results/completions").glob("*.parquet"):
        assert re.fullmatch(r"(before|after)(_validation)?|generation_\d{4}", file.stem), (
            f"the page does not know {file.name}"
        )
        columns = set(parquet.read_schema(file).names)
        assert columns <= fields_under("results/completions"), file.name


def test_the_guides_name_every_method_and_parameter_of_what_is_written() -> None:
    for page, kind in (("engine", Engine), ("space", Space)):
        text = (REPOSITORY / f"docs/guides/{page}.md").read_text(encoding="utf-8")
        shown = dict(re.findall(r"^\| `(\w+)(?:\((.*?)\))?`", text, re.MULTILINE))
        own = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        assert own.keys() - {"name", "carrier", "evolves_model"} <= shown.keys()
        for name, method in own.items():
            if inspect.isfunction(method):
                assert shown[name] == ", ".join(list(inspect.signature(method).parameters)[1:]), f"{page}: {name}"


def test_the_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == evoalign.__version__
    assert citation["authors"] == [{"name": "The evoalign authors"}]
    assert {"message", "title"} <= citation.keys()


def test_the_drift_that_the_readme_names_is_that_of_the_benchmark() -> None:
    """Of each config, the least and the most over its seeds."""
    lines = (REPOSITORY / "benchmarks/results/demo.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    text = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    for config, name in (("quickstart", "on Conciseness"), ("template", "on the template")):
        before, real, placebos = (
            [row[k] for row in rows if row["config"] == config] for k in ("before", "real", "placebos")
        )
        rewards = [mean(p["reward"] for p in each) for each in placebos]
        shares = [round(100 * (drift - b["reward"]) / (r["reward"] - b["reward"]))
                  for drift, b, r in zip(rewards, before, real, strict=True)]  # fmt: skip
        assert f"{min(shares)} to {max(shares)} % {name}" in text
