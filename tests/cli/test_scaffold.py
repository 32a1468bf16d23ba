# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from evoalign.baselines import settings
from evoalign.cli.scaffold import FILES, init
from evoalign.config import load
from evoalign.errors import ConfigError
from evoalign.tasks import create


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a" / "new project"
    assert [path.name for path in init(folder)] == list(FILES)
    monkeypatch.chdir(folder)
    return folder


def test_the_files_make_a_task_that_runs_from_their_folder(project: Path) -> None:
    config = load(["config.yaml"])
    assert 0.5 <= config.es.eta <= 1, "a sound step"
    task = create(config.task)
    data = task.load_data(config.seed)
    assert (len(data.train), len(data.test)) == (203, 245)
    assert {example["prompt"] for example in data.train}.isdisjoint(example["prompt"] for example in data.test)
    assert task.prompt(data.train[0]) == [{"role": "user", "content": data.train[0]["prompt"]}]
    assert all(row.keys() == {"prompt", "answer"} for row in (*data.train, *data.test))
    golds = [row["answer"] for row in data.test]
    assert task.rewards(golds, data.test) == [1.0] * len(golds)


def test_the_rewards_ask_for_the_answer_and_for_no_more_than_it(project: Path) -> None:
    task = create(load(["config.yaml"]).task)
    row = {"prompt": "What is 3 + 4?", "answer": "7"}
    worth = {
        "7": 1.0, " 7.\n": 1.0, "Answer: 7": 0.5, "The answer to this sum is 7.": 0.5 - 0.08, "Answer: igo": 0.0,
        "17": 0.0, "": 0.0, "x" * 30: -0.1,
    }  # fmt: skip
    assert task.rewards(list(worth), [row] * len(worth)) == pytest.approx(list(worth.values()))
    assert task.rewards(["SI", "sí"], [{"prompt": "yes in Spanish", "answer": "Sí"}] * 2) == [0.0, 1.0]


@pytest.mark.parametrize("name", FILES)
def test_existing_files_are_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=name):
        init(tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine")]


def test_a_link_to_nowhere_is_not_written_through_and_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "reward.py").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"reward\.py"):
        init(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write into"):
        init(tmp_path / "file")


def test_a_folder_with_other_files_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    init(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*FILES, "notes.txt"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot write into"):
        init(tmp_path)


def test_the_section_for_grpo_is_good_once_its_marks_are_taken_away(project: Path) -> None:
    file = project / "config.yaml"
    lines = file.read_text().splitlines()
    start = lines.index("# grpo:")
    stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("#"))
    file.write_text("\n".join([*lines[:start], *(x.removeprefix("# ") for x in lines[start:stop]), *lines[stop:]]))
    config = load(["config.yaml"])
    assert "grpo" in config.model_fields_set
    settings.check_prompts(config, len((project / "prompts.jsonl").read_text().splitlines()))
