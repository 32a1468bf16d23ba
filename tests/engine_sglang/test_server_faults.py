# SPDX-License-Identifier: Apache-2.0
"""A training continues, or can be resumed, whatever happens to its server, and ends with the same hashes.

A moment is a request of the run. Before it the server's process group gets SIGKILL or SIGSTOP (`kill`, `hang`), the
adapter that is being loaded loses its file (`refuse`), or an invalid reply replaces the server's (`garbage`). The run
launches the server, or is attached to it: then it is another process, which is restarted, or continues, after a while.
"""

import io
import json
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from served import KEY

import evoalign
from evoalign import engines, tokens
from evoalign.config import from_dict
from evoalign.engines.server import adapters
from evoalign.engines.server.client import Client
from evoalign.engines.server.connection import Connection
from evoalign.errors import EvoalignError
from evoalign.models.origin import model_path

FAULT_KEY = "EVOALIGN_FAULTS_KEY"
HANG, AWAY = 6.0, 3.0
"""Seconds after which a silent server counts as hung, and for which an attached server is away."""
GARBAGE = b'[{"output_ids": "x", "meta_info": {}}]'
LAUNCHED = {"context_length": 256, "start_timeout": 400.0}


def settings(folder, engine, space="lora"):
    place = {"target_layers": [3], "target_modules": ["down_proj"]}
    return {
        "space": space, "lora": {"rank": 4, "alpha": 4, **place}, "lowrank": {"rank": 1, **place},
        "output_dir": str(folder), "seed": 1, "task": {"name": "conciseness"},
        "model": {"name": "tiny", "dtype": "float32"},
        "es": {"num_generations": 3, "population_size": 6, "sigma": 0.025, "learning_rate": 0.0125},
        "evaluation": {"max_tokens": 16}, "checkpoint": {"every": 1}, "tracking": {"completions_every": 0},
        "checks": {"placebo": 0, "perplexity": False, "control_every": 0},
        "engine": {"name": "sglang", "timeout": HANG, **engine},
    }  # fmt: skip


def train(folder, engine, space, **more):
    evoalign.train(settings(folder, engine, space), console=Console(file=io.StringIO()), **more)


def hashes(folder):
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [line["weights_hash"] for line in lines if "weights_hash" in line]


class Attached:
    """A server for runs to attach to, on a port that does not change."""

    def __init__(self):
        config = from_dict(settings(Path("unused"), {"context_length": 256, "timeout": 120.0}))
        self.engine = engines.create(config, tokens.load(config.model))
        self.client = self.engine.connection.client
        os.environ[FAULT_KEY] = self.client.key
        self.settings = {"url": self.client.url, "key_variable": FAULT_KEY, "start_timeout": 120.0}

    @property
    def pid(self):
        return self.engine.connection.process.pid

    def restore(self):
        """Serve the base model's weights, which a run may have moved."""
        body = {"model_path": str(model_path(self.engine._config.model)), "flush_cache": True}
        self.client.call(self.client.post("/update_weights_from_disk", body, seconds=60.0))

    def come_back(self, fault, group):
        time.sleep(AWAY + (2 * HANG if fault == "hang" else 0.0))
        if fault == "hang":
            os.killpg(group, signal.SIGCONT)
        else:
            self.engine.connection.process.start(self.engine.connection.is_ready, 120.0)


@contextmanager
def intercepted(act):
    """Call `act` before each request, with its number and path; bytes replace the reply. Yields the paths."""
    paths = []
    send = Client._send

    async def watched(self, method, path, body, seconds):
        if path.startswith("/health"):
            return await send(self, method, path, body, seconds)
        paths.append(path)
        instead = act(len(paths), path)
        return await send(self, method, path, body, seconds) if instead is None else instead

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "_send", watched)
        yield paths


@pytest.fixture(scope="module")
def attached():
    server = Attached()
    yield server
    server.engine.close()


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(adapters, "IN_MEMORY", place)
    return place


def undisturbed(folder, engine, space):
    """Return the hashes of an undisturbed run, and how many requests it sends."""
    with intercepted(lambda number, path: None) as paths:
        train(folder, engine, space)
    return hashes(folder), len(paths)


@pytest.fixture(scope="module")
def on_lora(url, tmp_path_factory):
    """An undisturbed run of space lora, which moves no weights of the shared server."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return undisturbed(folder, {"url": url, "key_variable": KEY}, "lora")


@contextmanager
def launches(groups):
    """Add the process group of each server that is launched to `groups`."""
    launch = Connection._launch

    def launched(self):
        try:
            launch(self)
        finally:
            if self.process is not None and self.process.pid is not None:
                groups.append(self.process.pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_launch", launched)
        yield


def check(fault, server, space, folder, wanted, moment):
    """Run with a fault before request `moment`, resume if that is needed, and return how the run ended."""
    engine = LAUNCHED if server is None else server.settings
    groups, threads, happened = [], list[threading.Thread](), []

    def act(number, path):
        if number < moment or happened or (fault == "refuse" and not path.startswith("/load_lora")):
            return None
        happened.append(number)
        if fault in ("kill", "hang"):
            group = groups[-1] if server is None else server.pid
            os.killpg(group, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if server is not None:
                threads.append(threading.Thread(target=server.come_back, args=(fault, group)))
                threads[-1].start()
        if fault == "refuse":
            for file in adapters.IN_MEMORY.glob("evoalign-*/evoalign-*/adapter_model.safetensors"):
                file.unlink(missing_ok=True)
        return GARBAGE if fault == "garbage" else None

    ended = "by itself"
    try:
        with launches(groups), intercepted(act):
            train(folder, engine, space)
    except EvoalignError:
        ended = "stopped"
    for thread in threads:
        thread.join()
    if ended == "stopped":
        if server is not None:
            server.restore()
        train(folder, engine, space, resume=(folder / "journal.jsonl").exists())
    assert happened and hashes(folder) == wanted and evoalign.replay(folder) == wanted[-1]
    assert not list(adapters.IN_MEMORY.iterdir()) and not any(is_alive(group) for group in groups)
    return ended


def is_alive(group):
    """Return whether the process group has a process that is not a zombie."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


@pytest.mark.first("kill-0.5")
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("fault", ["kill", "hang", "refuse", "garbage"])
def test_a_run_survives_a_fault_of_a_server_that_it_launched(fault, part, on_lora, tmp_path):
    wanted, requests = on_lora
    ended = check(fault, None, "lora", tmp_path / "run", wanted, 1 + int(part * requests))
    assert ended == "by itself" or fault == "refuse"


@pytest.mark.long
@pytest.mark.parametrize("space", ["lora", "lowrank"])
@pytest.mark.parametrize("fault", ["kill", "hang", "refuse", "garbage"])
def test_a_run_survives_a_fault_of_an_attached_server(fault, space, attached, tmp_path):
    attached.restore()
    wanted, requests = undisturbed(tmp_path / "undisturbed", attached.settings, space)
    attached.restore()
    check(fault, attached, space, tmp_path / "run", wanted, 1 + requests // 2)
