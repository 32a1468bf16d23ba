# SPDX-License-Identifier: Apache-2.0
"""Reward scripts: input, output and errors."""

import datetime
import json
import os
import re
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from command_line import caller

import evoalign
from evoalign import tasks
from evoalign.config import GraderConfig, TaskConfig, code_of, from_dict
from evoalign.errors import ConfigError, RewardError
from evoalign.tasks.isolated.worker import MEMORY_SUPPORTED as BOUND

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no process to isolate in")

ROWS = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "say\nü", "answer": None}]
PYTHON = f"#!{sys.executable} -S\nimport json, sys\n"


def script(folder, source, name="score.sh", mode=0o755):
    file = folder / name
    file.write_text(source, encoding="utf-8")
    file.chmod(mode)
    return str(file)


def scored(path, texts, rows=ROWS, weights=None, **grader):
    limits = GraderConfig(**{"retries": 0, "timeout": 20, **grader})
    with closing(tasks.isolate(made(path, weights=weights), limits)) as task:
        return task.rewards(texts, rows)


def made(*paths, weights=None):
    return tasks.create(TaskConfig(name="custom", rewards=list(paths), reward_weights=weights))


def refused(folder, source, texts=("a", "b"), **grader):
    with pytest.raises(RewardError) as error:
        scored(script(folder, source), list(texts), ROWS[: len(texts)], **grader)
    return error.value


def test_a_script_reads_json_lines_and_prints_numbers(tmp_path):
    source = PYTHON + (
        "for line in sys.stdin:\n"
        "    row = json.loads(line)\n"
        "    assert sorted(row) == ['answer', 'completion', 'prompt']\n"
        "    print(len(row['completion']) + 10 * (row['answer'] == '4') + 100 * ('ü' in row['prompt']))\n"
    )
    assert scored(script(tmp_path, source), ["one", "ü\u2028x"]) == [13.0, 103.0]


def test_shell_scripts_may_print_null_and_awk_numbers(tmp_path):
    odd = script(tmp_path, "#!/bin/sh\nprintf '.5\\nnull\\n+1e-2\\r\\n'\n", "odd")
    one = script(tmp_path, "#!/bin/sh\nwhile read -r line; do echo 1; done\n", "one")
    task = tasks.isolate(made(odd, one, weights=[2.0, 1.0]), GraderConfig(retries=0))
    rows = [{"prompt": "a"}] * 3
    assert task.columns(["x", "y", "z"], rows) == {"odd": [0.5, None, 0.01], "one": [1.0, 1.0, 1.0]}
    assert task.rewards(["x", "y", "z"], rows) == [2.0, 1.0, 1.02]
    task.close()


def test_messages_are_given_as_they_are_and_the_completion_as_text(tmp_path):
    source = PYTHON + (
        "row = json.loads(sys.stdin.readline())\nprint(int(row['prompt'][0]['role'] == 'user' and "
        "row['completion'] == 'hi' and row['day'] == '2020-01-02'))\n"
    )
    row = {"prompt": [{"role": "user", "content": "q"}], "day": datetime.date(2020, 1, 2)}
    task = made(script(tmp_path, source))
    assert task.rewards(["hi"], [row]) == [1.0]


@pytest.mark.parametrize(("source", "said", "reason"), [
    ("echo oh dear >&2; exit 3", r"score\.sh failed: ScriptError: exit status 3 .on stderr: 'oh dear'", "raised"),
    ("kill -9 $$", r"killed by signal 9", "raised"),
    ("echo 1", r"printed 1 lines for 2 completions; the last is '1'; print one number", "value"),
    ("printf '1\\n2\\n3\\n'", r"printed 3 lines for 2 completions", "value"),
    ("true", r"printed 0 lines for 2 completions; print", "value"),
    ("echo why >&2; echo 1; echo good", r"printed 'good' for the completion 'b' \(on stderr: 'why'\)", "value"),
    ("echo 1; echo nan", r"printed 'nan' for the completion 'b'", "value"),
    ("echo 1; echo 1e999", r"printed '1e999' for the completion 'b'", "value"),
    ("echo 1; echo 1_0", r"printed '1_0'", "value"), ("echo 1; echo", r"printed '' for", "value"),
])  # fmt: skip
def test_invalid_output_raises_reward_error_quoting_it(tmp_path, source, said, reason):
    error = refused(tmp_path, f"#!/bin/sh\n{source}\n", isolated=False)
    assert re.search(said, str(error)), str(error)
    assert error.failed is not None and error.failed["reason"] == reason


def test_hanging_script_is_killed_with_its_children(tmp_path):
    error = refused(tmp_path, f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path}/pid\nwait\n", ("a",), timeout=1.0)
    assert "reward function score.sh hung: no answer within 1 s" in str(error)
    left = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cmdline")
    deadline = time.monotonic() + 10  # what is killed is gone a moment later
    while left.exists() and left.read_bytes():
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.01)


@pytest.mark.skipif(not BOUND, reason="the limit is Linux's")
def test_the_memory_limit_holds_for_scripts(tmp_path):
    source = PYTHON + "x = bytearray(1 << 30)\nprint(1)\nprint(1)\n"
    error = refused(tmp_path, source, memory_gib=0.25)
    assert "on stderr: 'MemoryError'" in str(error) and "or raise grader.memory_gib" in str(error)


def test_unusable_scripts_raise_config_error(tmp_path):
    path = script(tmp_path, "#!/bin/sh\n", mode=0o644)
    with pytest.raises(ConfigError, match=rf"{path} is not executable; make it executable: chmod \+x {path}"):
        made(path)
    path = script(tmp_path, "#!/bin/sh\n", "reward.py", 0o644)
    with pytest.raises(ConfigError, match=rf"write {path}:FUNCTION for a function in it; as a script, .*chmod \+x"):
        made(path)
    for name in ("nowhere.sh", str(tmp_path)):
        with pytest.raises(ConfigError, match="is neither an import path nor a file"):
            made(name)
    error = refused(tmp_path, "echo 1\n")
    assert "it does not start: Exec format error; its first line has to name its interpreter" in str(error)


def test_scripts_run_without_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "#!/bin/sh\necho 7\n", "a b;touch broken")
    assert made("a b;touch broken").rewards(["x"], ROWS[:1]) == [7.0]
    assert made("./a b;touch broken").rewards(["x"], ROWS[:1]) == [7.0]
    assert not (tmp_path / "broken").exists()


def test_a_script_is_code_that_a_run_may_not_name(tmp_path, monkeypatch, capsys):
    path = script(tmp_path, f"#!/bin/sh\ntouch {tmp_path}/ran\nwhile read -r line; do echo 1; done\n")
    tree = {"es": {"sigma": 0.1}, "task": {"name": "custom", "rewards": [path]}}
    assert code_of(from_dict(tree)) == [path]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(tree))
    (run / "manifest.json").write_text(json.dumps({"method": "es"}))
    (run / "journal.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=rf"task\.rewards to '{path}'"):
        evoalign.evaluate(run)
    done = caller(monkeypatch, capsys)("eval", run, "--set", "evaluation.max_tokens=1")
    assert done.code == 2 and "task.rewards" in done.err
    assert not (tmp_path / "ran").exists()
