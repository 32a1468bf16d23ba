# SPDX-License-Identifier: Apache-2.0
"""Processes of `evoalign train` whose service is killed, returns, stays away or changes its models."""

import json
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import forked
import kill_points
import pytest
import task_runs
import yaml
from planted_scorers import safe_rlhf
from served_scorers import SECONDS, Served, ask_one_by_one, count, until
from small_runs import UNCHECKED
from task_runs import jsonl

from evoalign.config import ScorerConfig
from evoalign.rewards.scorer.models import Local

pytest.importorskip("fastapi")
pytestmark = pytest.mark.slow
SHIPPED = Path(__file__).parents[3] / "data" / "tasks" / "safety"
MODELS = {name: str(SHIPPED / "models" / name) for name in ("reward", "cost")}
WORDS = ("--reward", MODELS["reward"], "--cost", MODELS["cost"])
BITS = (*WORDS, "--batch-size", "1")
"""Model whose scores are bit-identical in any batch."""
HOLDS = (*WORDS, "--batch-size", "512", "--max-wait", "600")
"""Accept requests without responding."""
GENERATIONS, SEAL = 8, b'"weights_hash"'
"""SEAL is in the header's line, too."""


class Run:
    """`evoalign train` on task safety, asking the service at `url`."""

    def __init__(self, folder, url, *more, deadline=SECONDS):
        self.path, self._log = folder / "run", folder / "train.log"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config(folder, url, deadline)))
        command = [sys.executable, "-m", "evoalign.cli", "train", str(folder / "config.yaml"), *more]
        with self._log.open("wb") as log:
            self.process = forked.Popen(command, stdout=log)

    @property
    def said(self):
        return self._log.read_text()

    @property
    def journal(self):
        file = self.path / "journal.jsonl"
        return file.read_bytes() if file.exists() else b""

    def sealed(self, generations):
        """Wait until the file has this many lines."""
        until(lambda: self.journal.count(SEAL) > generations or self.process.poll() is not None, self.said)
        assert self.process.poll() is None, self.said

    def end(self):
        """Its exit code."""
        return self.process.wait(SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(SECONDS)


def rows_of(split):
    return task_runs.lines(SHIPPED / f"{split}.jsonl")


def config(folder, url, deadline):
    data = {f"{name}_data": jsonl(folder / name, rows_of(name)[:n]) for name, n in (("train", 8), ("test", 4))}
    return {
        "output_dir": str(folder / "run"), "seed": 5, "deterministic": True, "space": "lowrank", "lowrank": {"rank": 1},
        "model": {"name": str(SHIPPED / "models" / "base")}, "engine": {"threads": 1},
        "task": {"name": "safety", **data, "batch_size": 4},
        "scorer": {"name": "service", "url": url, "deadline": deadline},
        "es": {"sigma": 0.01, "learning_rate": 0.01, "num_generations": GENERATIONS, "population_size": 4},
        "checkpoint": {"every": 1, "keep_last": GENERATIONS}, "evaluation": {"max_tokens": 12, "every": 2},
        "checks": UNCHECKED, "tracking": {"completions_every": 0},
    }  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Run whose service was always available."""
    folder = tmp_path_factory.mktemp("unbroken")
    with Served(folder, *BITS) as service, Run(folder / "own", service.url) as run:
        assert run.end() == 0, run.said
    found = traces(run)
    assert len(found["journal"]) == 1 + 2 * GENERATIONS
    return found


def traces(run):
    """Results that must not depend on where the run and the service are."""
    return kill_points.traces(run.path) | {"journal": lines(run.journal)}


def lines(journal):
    """Lines of a journal, without the config and the hashes."""
    where = ("config", "config_hash", "hash", "previous")
    return [{k: v for k, v in json.loads(line).items() if k not in where} for line in journal.splitlines()]


def broken_off(run, unbroken):
    """Its journal ends early and has only scores of the other run."""
    found = lines(run.journal)
    assert len(found) < 1 + 2 * GENERATIONS and found == unbroken["journal"][: len(found)]


def same(run, unbroken):
    found = traces(run)
    assert sorted(name for name in {*found, *unbroken} if found.get(name) != unbroken.get(name)) == []


def test_run_continues_after_a_service_restart(tmp_path, unbroken):
    with Served(tmp_path, *BITS) as first, Run(tmp_path / "own", first.url) as run:
        run.sealed(1)
        first.stop(signal.SIGKILL)
        until(lambda: "no scores from the scorer" in run.said, "the run does not say that the service is away")
        with Served(tmp_path, *HOLDS, port=first.port) as second:
            until(lambda: count(second.url, "queue_length") > 0, "the run does not ask again")
        before = run.journal  # the second was killed with what it had been asked
        assert run.process.poll() is None and before.count(SEAL) < 1 + GENERATIONS
        with Served(tmp_path, *BITS, port=first.port):
            assert run.end() == 0, run.said
    told = [line for line in run.said.splitlines() if f"the scorer at {first.url} " in line]
    assert ["no scores from" in line for line in told] == [True, False] and told[1].endswith("responds again")
    assert run.journal.startswith(before)
    same(run, unbroken)


def test_unavailable_service_ends_the_run_which_can_resume(tmp_path, unbroken):
    with Served(tmp_path, *BITS) as service, Run(tmp_path / "own", service.url, deadline=8.0) as run:
        run.sealed(1)
        service.stop(signal.SIGKILL)
        assert run.end() == 2, run.said
    *_, last = run.said.splitlines()
    assert last.startswith(f"error: no scores from the scorer at {service.url} for 8 s (")
    assert f"resume with: evoalign train {run.path} --resume" in last and "Traceback" not in run.said
    broken_off(run, unbroken)
    with Served(tmp_path, *BITS) as other, Run(tmp_path / "own", other.url, "--resume") as resumed:
        assert resumed.end() == 0, resumed.said  # at another port, which is no other scorer
    same(resumed, unbroken)


@pytest.mark.long
def test_restarted_service_with_other_weights_is_rejected(tmp_path, unbroken):
    others = "--reward", str(safe_rlhf(tmp_path / "other", seed=11)), "--cost", MODELS["cost"], "--batch-size", "1"
    with Served(tmp_path, *BITS) as service, Run(tmp_path / "own", service.url) as run:
        run.sealed(1)
        service.stop(signal.SIGKILL)
        with Served(tmp_path, *others, port=service.port):
            assert run.end() == 2, run.said
            *_, last = run.said.splitlines()
            assert last.startswith(f"error: the scorer at {service.url} changed its models or template")
            assert f"resume with: evoalign train {run.path} --resume" in last and "Traceback" not in run.said
            broken_off(run, unbroken)
            broken = run.journal
            with Run(tmp_path / "own", service.url, "--resume") as refused:
                assert refused.end() == 2, refused.said
            assert "was scored by other models" in refused.said and run.journal == broken
    with Served(tmp_path, *BITS, port=service.port), Run(tmp_path / "own", service.url, "--resume") as resumed:
        assert resumed.end() == 0, resumed.said
    same(resumed, unbroken)


@pytest.mark.long
def test_a_thousand_requests_from_another_process_during_a_run(tmp_path, unbroken):
    rows = rows_of("train")
    prompts = [rows[i % len(rows)]["prompt"] for i in range(1000)]
    responses = [f"{rows[i * 7 % len(rows)]['prompt']} {i}" for i in range(1000)]
    wanted = Local(ScorerConfig(name="local", device="cpu", **MODELS)).score(prompts, responses)
    with (
        Served(tmp_path, *BITS, "--queue", "4096") as service,
        ProcessPoolExecutor(1, kill_points.PROCESSES) as pool,
        Run(tmp_path / "own", service.url) as run,
    ):
        pool.submit(ask_one_by_one, service.url, [], []).result(SECONDS)
        run.sealed(0)
        found = pool.submit(ask_one_by_one, service.url, prompts, responses)
        until(lambda: count(service.url, "queue_length") > 32, "the requests do not arrive")
        before = run.journal
        assert run.process.poll() is None
        answers = found.result(SECONDS)
        assert len(run.journal) > len(before)  # both were scored for at once
        assert run.end() == 0, run.said
    for column, scores in wanted.items():
        assert [answer[column] for answer in answers] == [pytest.approx([score], abs=1e-3) for score in scores]
        assert len({round(score, 4) for score in scores}) > 500
    same(run, unbroken)
