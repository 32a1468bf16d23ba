# SPDX-License-Identifier: Apache-2.0
"""benchmarks/start_up.py: its clock, and one process of the shipped model."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def start_up(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import start_up

    return start_up


def test_clock_gives_time_to_the_outermost_part_and_imports_to_imports(start_up, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(start_up, "ENTERED", 0.0)
    monkeypatch.setattr(start_up.time, "perf_counter", lambda: now[0])

    def passes(seconds, *then):
        def call():
            now[0] += seconds
            for name in then:
                getattr(parts, name)()

        return call

    parts = SimpleNamespace(load=passes(1.0), make=passes(2.0, "load", "imports"), imports=passes(4.0))
    parts.ask = passes(8.0, "load")
    monkeypatch.setitem(sys.modules, "parts_of_test", parts)
    clock = start_up.Clock(-0.5)
    for name, part in (("load", "tokenizer"), ("make", "engine"), ("imports", "imports"), ("ask", "rollout")):
        clock.around(f"parts_of_test:{name}", part)
    now[0] += 16.0
    parts.load()
    parts.make()
    parts.ask()
    now[0] += 32.0
    clock.enter("after")
    parts.load()
    assert dict(clock.seconds) == {
        "python": 0.5, "other": 16.0, "tokenizer": 1.0, "engine": 3.0, "imports": 4.0, "rollout": 9.0, "update": 32.0,
    }  # fmt: skip


@pytest.mark.slow
def test_parts_add_up_to_the_total(tmp_path):
    words = ["--shape", "tiny", "--members", "4", "--prompts", "2", "--tokens", "4", "--tests", "2", "--repeats", "1"]
    words += ["--warm", "0", "--dtype", "float32", "--json", str(tmp_path / "rows.jsonl")]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, str(BENCHMARKS / "start_up.py"), *words], capture_output=True, text=True)
    took = time.perf_counter() - began
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    found = dict(row["median"])
    total, second = found.pop("total"), found.pop("second")
    assert sum(found.values()) == pytest.approx(total)
    assert 0 < second < total < took and row["total"] == [total]
    assert all(found[part] > 0 for part in ("python", "imports", "config", "tokenizer", "engine", "canary", "rollout"))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_train_imports_nothing_that_trains_by_gradients():
    code = "import sys, evoalign; evoalign.{}; print({{'peft', 'transformers.trainer_utils'}} & set(sys.modules))"
    for name, found in (("train", "set()"), ("grpo", "peft")):
        done = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True)
        assert found in done.stdout
