# SPDX-License-Identifier: Apache-2.0
"""The examples of harnesses: one episode each against the gateway with known completions, and a training run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_templates import model
from small_runs import UNCHECKED, read_rows

import evoalign
from evoalign.gateway.chat import Answer, Call, Chat
from evoalign.gateway.server import Server

REPOSITORY = Path(__file__).parents[2]
NAMES = ("verifiers", "mini_swe_agent", "inspect_ai")
ROW = {"question": "What is 17 + 25?", "answer": "42"}
GENERATIONS = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((REPOSITORY / f".venv-harnesses/{name}/.installed").exists() for name in NAMES),
        reason="make test-harnesses installs the harnesses",
    ),
]


class Scripted:
    """A backend whose model works out the sum of ROW with whatever tools it has, or writes `text` instead."""

    def __init__(self, text: str | None = None) -> None:
        self.text, self.keys, self.chats = text, set[str](), list[Chat]()

    def knows(self, key: str) -> bool:
        return key == "sk-test"

    async def score(self, key: str, scores: Mapping[str, float]) -> None:
        raise AssertionError("the examples print their scores")

    async def complete(self, key: str, chat: Chat) -> list[Answer]:
        self.chats.append(chat)
        if self.text is not None or not chat.tools:
            return [Answer(self.text or "It is 42.", (), "stop", 1, 1)]
        done = sum(message["role"] == "assistant" for message in chat.messages)
        name, arguments = self._call({tool["function"]["name"] for tool in chat.tools}, done)
        return [Answer("", (Call(name, arguments),), "tool_calls", 1, 1)]

    def _call(self, tools: set[str], done: int) -> tuple[str, dict[str, Any]]:
        if "bash" in tools:
            command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if done else "echo 42 > answer.txt"
            return "bash", {"command": command}
        return ("submit", {"answer": "42"}) if done else ("add", {"a": 17, "b": 25})


def episode(name: str, backend: Scripted, folder: Path, row: Mapping[str, str] = ROW) -> dict[str, float]:
    """Run the episode of an example, and return what it printed last."""
    example = folder / "example.json"
    example.write_text(json.dumps(row))
    script = REPOSITORY / f"examples/harnesses/{name}/episode.py"
    python = REPOSITORY / f".venv-harnesses/{name}/bin/python"
    with Server(backend) as server:
        words = map(str, (python, script, server.url, "sk-test", example))
        done = subprocess.run(list(words), cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_with_the_right_completions_earns_1(name: str, tmp_path: Path) -> None:
    backend = Scripted()
    assert episode(name, backend, tmp_path)["reward"] == 1
    assert len(backend.chats) == (1 if name == "verifiers" else 2)


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_with_other_completions_earns_less(name: str, tmp_path: Path) -> None:
    assert episode(name, Scripted("I do not know."), tmp_path)["reward"] == 0


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_commands_of_mini_swe_agent_see_neither_the_key_nor_the_answer(tmp_path: Path) -> None:
    class Spy(Scripted):
        def _call(self, tools: set[str], done: int) -> tuple[str, dict[str, Any]]:
            spied = "env; cat /proc/*/environ /proc/*/cmdline; ls /tmp/evoalign*; cat ../*.json; ls $HOME"
            return super()._call(tools, done - 1) if done else ("bash", {"command": spied})

    backend = Spy()
    assert episode("mini_swe_agent", backend, tmp_path)["reward"] == 1
    seen = backend.chats[1].messages[-1]["content"]
    assert "PATH=/usr/bin:/bin" in seen
    assert "sk-test" not in seen and ROW["answer"] not in seen.replace("returncode", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_trains_on_the_rewards_of_a_harness(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    templates = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    knows_tools = model(tmp_path / "model", (templates / "qwen2_5.jinja").read_text())
    config = yaml.safe_load((REPOSITORY / f"examples/harnesses/{name}/train.yaml").read_text())
    config["task"] |= {"train_size": 2, "test_size": 1, "batch_size": 1}
    config["es"] |= {"num_generations": GENERATIONS, "population_size": 2}
    config |= {"checks": UNCHECKED, "sampling": {"max_tokens": 16}, "output_dir": str(tmp_path / "run")}
    evoalign.train({**config, "model": {"name": str(knows_tools)}})
    metrics = read_rows(tmp_path / "run/metrics.jsonl")
    assert [line["generation"] for line in metrics] == list(range(GENERATIONS))
    assert all(line["budget"]["generated_tokens"] > 0 for line in metrics)  # the members were asked
