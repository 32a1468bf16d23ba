# SPDX-License-Identifier: Apache-2.0
"""The config.yaml of a run is compared with what its journal and manifest record, wherever it is read."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from command_line import caller
from copied_runs import copy_run, edit, real_run

from evoalign.errors import ConfigError
from evoalign.rundir.own import read_own


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return real_run(tmp_path_factory.mktemp("own") / "run", steps=1, every=0)


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def set_in(run: Path, **changes):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    for section, found in changes.items():
        tree[section] = {**tree[section], **found} if isinstance(found, dict) else found
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


REFUSED = {
    "sigma": ({"es": {"sigma": 0.777}}, r"config\.yaml was edited .* es\.sigma is 0\.05 in the run and 0\.777 now"),
    "model": ({"model": {"name": "org/other"}}, r"config\.yaml was edited .* model\.name is 'tiny' in the run"),
    "evaluation": ({"evaluation": {"max_tokens": 99}}, r"evaluation\.max_tokens is 12 in the run and 99 now"),
}
ALLOWED = {"resources": {"engine": {"threads": 2}}, "records": {"tracking": {"completions_every": 3}},
           "place": {"output_dir": "elsewhere"}, "generations": {"es": {"num_generations": 9}}}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_edited_config_is_refused(name, copy):
    changes, said = REFUSED[name]
    read_own(copy)
    set_in(copy, **changes)
    with pytest.raises(ConfigError, match=said):
        read_own(copy)


@pytest.mark.parametrize("name", ALLOWED)
def test_settings_that_a_resumed_run_may_change_may_be_edited(name, copy):
    set_in(copy, **ALLOWED[name])
    read_own(copy)


def test_manifest_of_another_run_is_refused_and_a_damaged_or_missing_one_is_not(copy, made, tmp_path):
    other = copy_run(made, tmp_path / "other", sets={"es.sigma": 0.2})
    mine = (copy / "manifest.json").read_text()
    for text in ("", "[", '{"config_hash": 7, "resumed": 8}', '{"resumed": [1, {}]}'):
        (copy / "manifest.json").write_text(text)
        read_own(copy)
    edit_none = json.loads(mine)
    (copy / "manifest.json").write_text(json.dumps(edit_none | {"config_hash": "0" * 64, "resumed": [edit_none]}))
    read_own(copy)  # one of its hashes is the journal's
    shutil.copy(other / "manifest.json", copy)
    with pytest.raises(ConfigError, match=r"manifest\.json is the manifest of another run"):
        read_own(copy)


def test_config_of_grpo_is_compared_with_its_manifest(made, tmp_path):
    run = copy_run(made, tmp_path / "grpo", method="grpo")
    read_own(run)
    set_in(run, grpo={"max_steps": 77, "learning_rate": 0.5})
    with pytest.raises(ConfigError, match="was edited since"):
        read_own(run)
    edit(run / "manifest.json", lambda tree: {**tree, "versions": {"evoalign": "0.0.1"}})
    read_own(run)  # another release may hash other settings


@pytest.mark.parametrize(
    "words",
    [("export", "{run}", "--to", "out"), ("eval", "{run}"), ("placebo", "{run}"), ("train", "{run}", "--resume"),
     ("analyze", "divergence", "{run}"), ("analyze", "similarity", "{run}", "{made}"), ("compare", "{run}", "{made}"),
     ("report", "{run}")],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_command_shows_no_edited_setting_as_the_runs(words, copy, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    set_in(copy, es={"sigma": 0.777, "population_size": 4096})
    done = caller(monkeypatch, capsys)(*(word.format(run=copy, made=made) for word in words))
    said = done.out + done.err
    page = (copy / "report.html").read_text() if words[0] == "report" else ""
    assert "es.sigma is 0.05 in the run and 0.777 now" in (page or said), said
    assert done.code == (0 if words[0] in ("report", "compare") else 2), said
    assert page.count("0.777") == page.count("in the run and 0.777") and not (tmp_path / "out").exists()
