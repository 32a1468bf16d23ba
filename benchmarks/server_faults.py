# SPDX-License-Identifier: Apache-2.0
"""A training over a server that dies, hangs, refuses adapters or answers garbage, at many moments: what becomes of it?

    python benchmarks/server_faults.py --moments 20 --json benchmarks/results/server_faults.jsonl     two hours
    python benchmarks/server_faults.py --moments 5 --space lowrank --faults kill garbage

A moment is a request of the run: before the n-th one the server's process group gets SIGKILL or SIGSTOP (`kill`,
`hang`), the adapter that is being loaded loses its file (`refuse`), or what the server answers is put in place by
something else (`garbage`). Moments are spread evenly over the requests of an undisturbed run. The server is `launched`
by the run, or `attached`: then it is another process, which is started again, or goes on, some seconds later.

Each trial either ends as if nothing had been, or stops with an error that says how to resume, and then resumes. Its
journal has to have the hashes of the undisturbed run, `replay` has to come to the last of them, and neither a process
nor a file in memory may be left. Files lie in a part of memory that is this process's own: two may run side by side.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

import evoalign
from evoalign import engines, tokens
from evoalign.config import from_dict
from evoalign.engines.server import adapters
from evoalign.engines.server.client import Client
from evoalign.engines.server.link import Link
from evoalign.errors import EvoalignError
from evoalign.models.origin import model_path

FAULTS, PLACES = ("kill", "hang", "refuse", "garbage"), ("launched", "attached")
KEY = "EVOALIGN_FAULTS_KEY"
HANG = 6.0
"""Seconds without an answer after which a server counts as hung here."""
AWAY = 3.0
"""Seconds that an attached server is away."""
GARBAGE = (
    b"<html>502</html>", b"{", b"[]", b'{"text": "4"}', b'[{"output_ids": "x", "meta_info": {}}]', b"null", b"\xff\xfe",
)  # fmt: skip


@dataclass
class Trial:
    """One run with one fault. `ended`: by itself, or after it was resumed; `same`: with the undisturbed hashes;
    `happened`: false where no request came that the fault is for."""

    fault: str
    place: str
    space: str
    moment: int
    of: int
    ended: str
    same: bool
    left: list[str]
    seconds: float
    happened: bool = True
    error: str = ""


SPACE = "lora"


def tree(folder: Path, engine: dict[str, Any]) -> dict[str, Any]:
    return {
        "space": SPACE, "lowrank": {"rank": 1, "target_layers": [3], "target_modules": ["down_proj"]},
        "output_dir": str(folder), "seed": 1, "task": {"name": "conciseness"},
        "model": {"name": "tiny", "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 4, "target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": 3, "population_size": 6, "sigma": 0.025, "learning_rate": 0.0125},
        "evaluation": {"max_tokens": 16}, "checkpoint": {"every": 1}, "tracking": {"completions_every": 0},
        "checks": {"placebo": 0, "perplexity": False, "control_every": 0},
        "engine": {"name": "sglang", "timeout": HANG, **engine},
    }  # fmt: skip


def train(folder: Path, engine: dict[str, Any], **how: Any) -> None:
    evoalign.train(tree(folder, engine), console=Console(file=io.StringIO()), **how)


def hashes(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [line["weights_hash"] for line in lines if "weights_hash" in line]


class Server:
    """A server for runs to attach to, on a port that stays its own."""

    def __init__(self) -> None:
        config = from_dict(tree(Path("unused"), {"context_length": 256, "timeout": 120.0}))
        self.engine: Any = engines.create(config, tokens.load(config.model))
        client = self.engine._there()
        self.url = client.url
        os.environ[KEY] = client._key

    @property
    def settings(self) -> dict[str, Any]:
        return {"url": self.url, "key_variable": KEY, "start_timeout": 120.0}

    @property
    def pid(self) -> int:
        return self.engine._link._process.pid

    def again(self) -> None:
        """Start the same command once more."""
        self.engine._link._process.start(self.engine._link._is_ready, 120.0)

    def begin(self) -> None:
        """Have it serve the base model's weights, which a run over it may have moved."""
        client = self.engine._there()
        body = {"model_path": str(model_path(self.engine._config.model)), "flush_cache": True}
        client.call(client.post("/update_weights_from_disk", body, seconds=60.0))

    def close(self) -> None:
        self.engine.close()


@contextmanager
def counted(act: Callable[[int, str], bytes | None]) -> Iterator[list[str]]:
    """Have `act` called before each request of any client, with its number and path: bytes are taken for the answer."""
    seen: list[str] = []
    answer = Client._answer

    async def watched(self: Client, method: str, path: str, body: Any, seconds: float | None) -> bytes:
        if path.startswith("/health"):
            return await answer(self, method, path, body, seconds)
        seen.append(path)
        instead = act(len(seen), path)
        return await answer(self, method, path, body, seconds) if instead is None else instead

    Client._answer = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Client._answer = answer  # type: ignore[method-assign]


def trial(  # noqa: C901
    fault: str, place: str, moment: int, of: int, wanted: list[str], server: Server | None
) -> Trial:
    """Run with the fault before the request number `moment`, and resume where that is how it ends."""
    folder = Path(tempfile.mkdtemp(prefix="evoalign-fault-")) / "run"
    engine = server.settings if server is not None else {"context_length": 256, "start_timeout": 120.0}
    before, groups, helpers = _in_memory(), list[int](), list[threading.Thread]()
    done = False

    def act(number: int, path: str) -> bytes | None:
        nonlocal done
        late = number >= moment and not done
        if not late or (fault == "refuse" and not path.startswith("/load_lora")):
            return None
        done = True
        if fault in ("kill", "hang"):
            group = server.pid if server is not None else groups[-1]
            os.killpg(group, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if server is not None:
                helpers.append(threading.Thread(target=come_back, args=(fault, server, group)))
                helpers[-1].start()
        if fault == "garbage":
            return GARBAGE[moment % len(GARBAGE)]
        if fault == "refuse":
            for file in adapters.IN_MEMORY.glob("evoalign-*/evoalign-*/adapter_model.safetensors"):
                file.unlink(missing_ok=True)
        return None

    launch = Link._launch

    def launched(self: Link) -> None:
        try:
            launch(self)
        finally:
            if self._process is not None and self._process.pid is not None:
                groups.append(self._process.pid)

    start, ended, error = time.monotonic(), "by itself", ""
    if server is not None:
        server.begin()
    Link._launch = launched  # type: ignore[method-assign]
    try:
        with counted(act):
            try:
                train(folder, engine)
            except EvoalignError as failed:
                error = str(failed)
                ended = "resumed" if "resume with" in error else "without progress"
        for helper in helpers:
            helper.join()
        if ended != "by itself":
            if server is not None:
                server.begin()
            train(folder, engine, resume=(folder / "journal.jsonl").exists())
    finally:
        Link._launch = launch  # type: ignore[method-assign]
    found = hashes(folder)
    same = found == wanted and evoalign.replay(folder) == wanted[-1]
    left = sorted(_in_memory() - before)
    left += [f"process group {g}" for g in groups if _lives(g)]
    return Trial(
        fault, place, SPACE, moment, of, ended, same, left, round(time.monotonic() - start, 1), done, error[:300]
    )


def come_back(fault: str, server: Server, group: int) -> None:
    time.sleep(AWAY + (2 * HANG if fault == "hang" else 0.0))
    if fault == "hang":
        os.killpg(group, signal.SIGCONT)
    else:
        server.again()


def _in_memory() -> set[str]:
    """What lies in this process's part of memory."""
    return {path.name for path in adapters.IN_MEMORY.iterdir()}


def _lives(group: int) -> bool:
    """Whether a process of the group is there that is no zombie."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def undisturbed(engine: dict[str, Any]) -> tuple[list[str], int]:
    """The hashes of a run, and how many requests it makes."""
    folder = Path(tempfile.mkdtemp(prefix="evoalign-fault-")) / "run"
    with counted(lambda number, path: None) as seen:
        train(folder, engine)
    return hashes(folder), len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--at", type=int, nargs="+", help="These requests alone, in place of moments.")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--space", choices=("lora", "lowrank"), default=SPACE)
    parser.add_argument("--json", type=Path, default=Path("runs/server_faults.jsonl"))
    options = parser.parse_args()
    globals()["SPACE"] = options.space
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=adapters.IN_MEMORY) as memory:
        adapters.IN_MEMORY = Path(memory)
        for found in trials(options.moments, options.faults, options.places, options.at):
            print(json.dumps(asdict(found)), flush=True)
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")


def trials(
    moments: int, faults: Sequence[str], places: Sequence[str], at: Sequence[int] | None = None
) -> Iterator[Trial]:
    """Each fault at each place, at so many moments, or before the requests of these numbers."""
    server = Server()
    try:
        wanted, requests = undisturbed(server.settings)
        for place in places:
            for fault in faults:
                for moment in at or [1 + (2 * k + 1) * requests // (2 * moments) for k in range(moments)]:
                    yield trial(fault, place, moment, requests, wanted, server if place == "attached" else None)
    finally:
        server.close()


if __name__ == "__main__":
    main()
