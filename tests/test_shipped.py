# SPDX-License-Identifier: Apache-2.0
"""What comes with the package: configs that run from any folder, their schema, the commands to install more."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from command_line import Run, caller

from evoalign.cli.scaffold import init, schema_text
from evoalign.config import load
from evoalign.config.load import locate
from evoalign.config.schema import description, schema
from evoalign.errors import ConfigError
from evoalign.version import command

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = [f for f in sorted(ROOT.glob("configs/**/*.yaml")) if not {"plans", "sweeps"} & set(f.parts)]
SCHEMA = ROOT / "configs/evoalign.schema.json"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


def test_shipped_configs_are_found_from_anywhere_and_ones_own_go_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("configs/quickstart.yaml") == load([ROOT / "configs/quickstart.yaml"])
    with pytest.raises(ConfigError, match=r"no config file configs/none\.yaml"):
        load("configs/none.yaml")
    with pytest.raises(ConfigError, match=r"no config file quickstart\.yaml"):
        load("quickstart.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text("es: {sigma: 1}\nseed: 7\n")
    assert load("configs/quickstart.yaml").seed == 7
    assert locate("configs/quickstart.yaml") == Path("configs/quickstart.yaml")


# --- the schema ---


def test_the_schema_in_the_repository_is_the_present_one() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "evoalign schema --to configs/evoalign.schema.json"


def test_every_shipped_config_names_the_schema_and_fits_it() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    checker = jsonschema.Draft202012Validator(schema())
    assert len(CONFIGS) > 30
    for file in CONFIGS:
        text = file.read_text(encoding="utf-8")
        named = next(line for line in text.splitlines() if line.startswith("# yaml-language-server: $schema="))
        assert (file.parent / named.partition("=")[2]).resolve() == SCHEMA, file
        assert not list(checker.iter_errors(yaml.safe_load(text))), file


@pytest.mark.parametrize(
    ("tree", "places"),
    [
        ({"es": {"sigm": 1}}, [["es"]]), ({"es": {"population_size": 1}}, [["es"]]),
        ({"engine": {"name": "vllm", "threads": 1}}, [["engine"]]), ({"engine": "nothing"}, [["engine"]]),
        ({"space": 3}, [["space"]]), ({"outputdir": "x"}, [[]]),
        ({"space": "lowrank", "engine": "vllm", "es": {"sigma": 0.1, "sigma_schedule": "cosine"}}, []),
        ({"space": {"name": "my.py:Space", "own": 1}, "engine": {"name": "my.py:Engine", "own": 1}}, []),
        ({"engine": "my.py:Engine", "task": {"name": "my.py:Task", "own": 2, "objective": "my.py:Objective"}}, []),
    ],
    ids=str,
)  # fmt: skip
def test_the_schema_refuses_what_a_config_refuses_and_where(tree: dict[str, object], places: list[list[str]]) -> None:
    errors = jsonschema.Draft202012Validator(schema()).iter_errors(tree)
    assert [list(error.path) for error in errors] == places


def test_an_editor_shows_what_the_settings_mean() -> None:
    found = schema()
    es = found["$defs"]["EsConfig"]
    assert es["properties"]["population_size"]["description"] == description("EsConfig", "population_size") != ""
    sections = {name: section.get("properties", {}) for name, section in found["$defs"].items()}
    silent = [(name, field) for name, fields in sections.items() for field, value in fields.items()
              if not value.get("description") and "$ref" not in json.dumps(value)]  # fmt: skip
    assert not silent


def test_schema_prints_or_writes_it(run: Run, tmp_path: Path) -> None:
    printed = run("schema")
    assert (printed.code, printed.out) == (0, schema_text())
    written = run("schema", "--to", "my.json")
    assert written.code == 0 and "# yaml-language-server: $schema=my.json" in written.out
    assert json.loads((tmp_path / "my.json").read_text(encoding="utf-8")) == schema()
    assert "cannot write" in run("schema", "--to", "no/folder.json").err


def test_a_new_project_has_the_schema_that_its_config_names(tmp_path: Path) -> None:
    init(tmp_path)
    assert (tmp_path / "config.yaml").read_text().startswith("# yaml-language-server: $schema=evoalign.schema.json\n")
    assert json.loads((tmp_path / "evoalign.schema.json").read_text(encoding="utf-8")) == schema()


# --- the commands to install more ---


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ({}, "pip install 'evoalign[grpo,sweep]'"),
        ({"url": "file:///a%20b/c", "dir_info": {"editable": True}}, "pip install -e '/a b/c[grpo,sweep]'"),
        ({"url": "file:///src/evo", "dir_info": {}}, "pip install '/src/evo[grpo,sweep]'"),
        ({"url": "file:///x/e.whl", "archive_info": {}}, "pip install 'evoalign[grpo,sweep] @ file:///x/e.whl'"),
        ({"url": "https://example.com/e", "vcs_info": {"vcs": "git"}},
         "pip install 'evoalign[grpo,sweep] @ git+https://example.com/e'"),
    ],
    ids=["index", "clone", "copy", "wheel", "git"],
)  # fmt: skip
def test_extras_are_installed_from_where_the_package_came(origin: dict[str, object], told: str) -> None:
    assert command(origin, ("grpo", "sweep")) == told


def test_in_the_clone_itself_the_command_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}, ("grpo",)) == "pip install -e '.[grpo]'"
