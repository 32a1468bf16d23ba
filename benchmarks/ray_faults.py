# SPDX-License-Identifier: Apache-2.0
"""Runs of `engine: ray` with real faults: do they end with the bits of a run that had none, and is anything left?

    OMP_NUM_THREADS=1 python benchmarks/ray_faults.py                  all of it, about an hour on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/ray_faults.py --kinds kill garbage --count 5

kill     a replica sends itself SIGKILL at a random share of the usual length of a phase: start, rollout, apply, hash,
         or join (a replica that had just been started again); 8 times each
stop     a replica sends itself SIGSTOP in mid-rollout
garbage  a replica answers something that is no list of completions, each time another thing
driver   the run itself is killed, and resumed in another process; on a cluster of its own and on one that goes on
raylet   a node manager of three is killed: of a node with a replica, with all that it started, where the run misses
         that replica before it is over; or of the node of the run, which ends then and is resumed on another cluster

All means are compared after each update, so that a replica which joins with other bits is seen. Runs in one process
share an engine, whose mean is put back in between; a row says where the engine was new. Rows of kinds that a call does
not run stay in the file. Exits with 1 where a run differs, a fault did not happen, or a process is left.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import multiprocessing
import os
import platform
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Ray reads these as it is imported; processes that it starts find this file by the path.
os.environ |= {
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
}  # fmt: skip

import psutil
import yaml
from rich.console import Console

import evoalign
from evoalign.config import Config
from evoalign.engines.ray import engine as ray_engine
from evoalign.engines.ray import team
from evoalign.engines.ray.engine import RayEngine
from evoalign.engines.ray.replica import Replica
from evoalign.engines.ray.wire import tokens_text
from evoalign.tokens import Tokens
from evoalign.types import Facts

KINDS = ("kill", "stop", "garbage", "driver", "raylet")
PHASES = ("start", "rollout", "apply", "hash", "join")
COUNT = {"kill": 40, "stop": 20, "garbage": 20, "driver": 20, "raylet": 20}
PATIENCE = 20.0
"""Seconds without an answer at the least: more where a replica takes longer to start."""
START = 5.0
"""Seconds that a run on a cluster starts for, at the least: on a machine without other work."""
LONGEST = 240.0
"""Seconds after which a run is held to hang."""
GONE = 30.0
"""Seconds in which processes have to end."""
PLACE, MARK = "EVOALIGN_FAULTS_PLACE", "EVOALIGN_FAULTS_MARK"
DATA = Path(__file__).parents[1] / "data" / "tasks" / "conciseness"
RESULTS = Path(__file__).parent / "results" / "ray_faults.json"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["evoalign.cli.train", "evoalign.training.train", "evoalign.engines.ray.engine", "evoalign.engines.transformers",
     "matplotlib.figure", "matplotlib.backends.backend_agg", "pandas", "pyarrow.parquet"]
)  # fmt: skip


def settings(to: Path, **engine: Any) -> dict[str, Any]:
    replica = {"name": "transformers", "device": "cpu", "threads": 1}
    return {
        "space": "lora", "model": {"name": "tiny"}, "deterministic": True, "output_dir": str(to), "report": False,
        "checks": {"placebo": 0, "perplexity": False, "control_every": 0, "canary_every": 0},
        "task": {"name": "conciseness", "train_data": str(DATA / "questions_train.json"),
                 "test_data": str(DATA / "questions_test.json"), "train_size": 6, "test_size": 6},
        "es": {"num_generations": 3, "population_size": 12, "sigma": 0.01, "learning_rate": 0.005},
        "sampling": {"max_tokens": 8}, "evaluation": {"max_tokens": 8}, "tracking": {"completions_every": 0},
        "engine": {"name": "ray", "replicas": 2, "cpus": 1, "chunk": 2, "replica": replica, "restarts": 1000,
                   "compare_every": 1, "patience": 120.0, **engine},
    }  # fmt: skip


def generations(run: Path) -> list[dict[str, Any]]:
    """The lines of a journal below its head, without the chain of hashes that begins with it."""
    lines = (run / "journal.jsonl").read_text().splitlines()[1:]
    return [{k: v for k, v in json.loads(line).items() if k not in ("hash", "previous")} for line in lines]


@dataclass
class Row:
    """One run with one fault. `moment`: a share of the phase, or when; `why`: what the log says of restarts."""

    kind: str
    phase: str
    moment: str
    seconds: float = 0.0
    restarts: int = 0
    same: bool = False
    happened: bool = False
    is_new: bool = False
    left: list[str] = field(default_factory=list[str])
    why: list[str] = field(default_factory=list[str])
    error: str = ""

    @property
    def is_good(self) -> bool:
        return self.same and self.happened and not self.left and not self.error


# --- in a replica's process ------------------------------------------------------------------------------------------


class Unreadable:
    """What fails as it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def _row(place: int, value: Any) -> Callable[[bytes], bytes]:
    """The last row with something else at one place."""

    def changed(data: bytes) -> bytes:
        rows = json.loads(data)
        rows[-1][place] = value
        return json.dumps(rows).encode()

    return changed


def _rows(change: Callable[[list[Any]], Any]) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(change(json.loads(data))).encode()


GARBAGE: dict[str, Callable[[bytes], Any]] = {
    "no JSON": lambda data: b"<html>502</html>",
    "nothing": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "a row too few": _rows(lambda rows: rows[:-1]),
    "a row twice": _rows(lambda rows: [*rows, rows[-1]]),
    "a row twice, another missing": _rows(lambda rows: [*rows[:-1], rows[0]]),
    "an object": lambda data: b'{"rows": []}',
    "a member that was not asked": _row(0, 10**6),
    "true for an index": _row(0, True),
    "NaN for an index": _row(0, float("nan")),
    "no UTF-8": lambda data: b"\xff\xfe\xfd" + data,
    "deep nesting": lambda data: b"[" * 200_000,
    "None": lambda data: None,
    "a Python object": lambda data: object(),
    "what cannot be unpickled": lambda data: Unreadable(),
    "what cannot be pickled": lambda data: threading.Lock(),
    "a number of 5,000 digits": lambda data: b"[[" + b"9" * 5000 + b"]]",
    "NaN for tokens": _row(2, float("nan")),
    "a number of 400 digits for tokens": _row(2, 10**400),
    "a negative token": _row(2, tokens_text([-1])),
    "a number for a text": _row(3, 5),
    "more tokens than asked for": _row(2, tokens_text([7] * 9)),
    "a reason of its own": _row(4, "gone"),
    "log-probabilities nobody asked for": _row(5, [0.0]),
    "a fraction of a token": _row(2, "BwAA"),
}


class Faulty(Replica):
    """Reads before each call whether the fault is its, and notes how long phases take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import ray

        self._place, self._born, self._calls = Path(os.environ[PLACE]), time.monotonic(), dict[str, int]()
        _note(self._place / "processes", f"{os.getpid()} {ray.get_runtime_context().get_node_id()}")
        order = self._order()
        self._joins = order.get("phase") == "join" and (self._place / "first").exists() and self._claims("second")
        self._is_in = True  # until the first fingerprint, it starts or joins
        if self._joins:
            self._strike(order["share"] * order["length"], signal.SIGKILL, "done")
        super().__init__(*args, **kwargs)

    def about(self, *args: Any, **kwargs: Any) -> Any:
        return self._within("about", lambda: super(Faulty, self).about(*args, **kwargs))

    def start(self, *args: Any, **kwargs: Any) -> Any:
        return self._within("start", lambda: super(Faulty, self).start(*args, **kwargs))

    def rollout(self, *args: Any, **kwargs: Any) -> Any:
        return self._within("rollout", lambda: super(Faulty, self).rollout(*args, **kwargs))

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return self._within("apply", lambda: super(Faulty, self).apply(*args, **kwargs))

    def fingerprint(self, *args: Any, **kwargs: Any) -> Any:
        found = self._within("hash", lambda: super(Faulty, self).fingerprint(*args, **kwargs))
        if self._joins:
            time.sleep(LONGEST)  # the signal is under way
        if self._is_in:
            _note(self._place / "times", f"join {time.monotonic() - self._born}")
        self._is_in = False
        return found

    def _order(self) -> dict[str, Any]:
        try:
            return json.loads((self._place / "order").read_text())
        except FileNotFoundError:
            return {}

    def _claims(self, name: str) -> bool:
        """Whether this process is the first to ask."""
        try:
            (self._place / name).open("x").close()
        except FileExistsError:
            return False
        return True

    def _within(self, phase: str, do: Callable[[], Any]) -> Any:
        order, began = self._order(), time.monotonic()
        key = f"{order.get('id')} {phase}"
        self._calls[key] = self._calls.get(key, 0) + 1
        if order.get("at") == phase and self._calls[key] >= order["call"] and self._claims("first"):
            if order["garbage"]:
                (self._place / "done").touch()
                return GARBAGE[order["garbage"]](do())
            is_all = order["phase"] != "join"
            after = order["share"] * order["length"] if is_all else 0.0
            self._strike(after, signal.Signals(order["signal"]), "done" if is_all else "dies")
            do()
            time.sleep(LONGEST)  # the signal is under way
        found = do()
        _note(self._place / "times", f"{phase} {time.monotonic() - began}")
        return found

    def _strike(self, after: float, how: signal.Signals, name: str) -> None:
        place = self._place

        def strike() -> None:
            time.sleep(after)
            (place / name).touch()
            os.kill(os.getpid(), how)

        threading.Thread(target=strike, daemon=True).start()


def _note(file: Path, line: str) -> None:
    with file.open("a") as notes:
        notes.write(line + "\n")


# --- the run ---------------------------------------------------------------------------------------------------------


class Field:
    """Where replicas are told of faults and leave notes; what one engine of many runs is, and what a run came to."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.place = folder / "place"
        self.place.mkdir(parents=True)
        forkserver.ensure_running()  # without the mark: it stays
        os.environ[PLACE], os.environ[MARK] = str(self.place), secrets.token_hex(8)
        self.wanted: list[dict[str, Any]] = []
        self.lengths: dict[str, float] = {}
        self.kept: Kept | None = None
        self.number = 0

    def run_folder(self) -> Path:
        self.number += 1
        return self.folder / f"run{self.number}"

    def order(self, **what: Any) -> None:
        """Take away the marks of the former fault, and tell of a new one."""
        for name in ("order", "first", "second", "dies", "done"):
            (self.place / name).unlink(missing_ok=True)
        if what:
            (self.place / "new").write_text(json.dumps({"id": self.number, "garbage": None, "share": 0.0, **what}))
            (self.place / "new").rename(self.place / "order")

    def measure(self) -> None:
        """Two runs without order: the reference; and one with a death, for how long it takes to join."""
        row = Row("reference", "", "")
        self.measured(row, self.train, is_new=True)
        self.wanted = generations(self.last)
        assert len(self.wanted) == 6 and not row.error, row
        self.order(at="rollout", phase="rollout", call=3, length=0.0, signal=signal.SIGKILL)
        rehearsal = Row("rehearsal", "rollout", "0.00")
        self.measured(rehearsal, self.train)
        assert rehearsal.same and (self.place / "done").exists(), rehearsal
        found: dict[str, list[float]] = {}
        for line in (self.place / "times").read_text().splitlines():
            phase, seconds = line.split()
            found.setdefault(phase, []).append(float(seconds))
        self.lengths = {phase: sorted(all_)[len(all_) // 2] for phase, all_ in found.items()}
        self.lengths["join"] = min(found["join"])
        print("seconds of phases:", {k: round(v, 4) for k, v in self.lengths.items()}, flush=True)

    def train(self, to: Path) -> None:
        """A run in this process, with the engine that is kept."""
        evoalign.train(self.settings(to), console=Console(file=io.StringIO()))

    def settings(self, to: Path) -> dict[str, Any]:
        return settings(to, patience=self.patience)

    patience = 120.0

    def measured(self, row: Row, run: Callable[[Path], None], *, is_new: bool = False) -> None:
        """A run, and whether it is as the reference; what it left; why replicas were started again."""
        if is_new:
            self.drop()
        to, was, before, began = self.run_folder(), self.kept, self.restarts(), time.monotonic()
        self.last = to
        with told() as row.why, limited(LONGEST):
            try:
                run(to)
                row.same = not self.wanted or generations(to) == self.wanted
            except Exception as error:
                row.error = f"{type(error).__name__}: {error}"[:300]
        row.is_new = self.kept is not was or was is None
        row.restarts = self.restarts() - (0 if row.is_new else before)
        row.same = row.same and not any("another mean" in line for line in row.why)
        row.left += self._left()
        row.seconds = round(time.monotonic() - began, 1)
        if row.error:
            self.drop()
        elif row.same and self.wanted:
            shutil.rmtree(to)

    def restarts(self) -> int:
        return 0 if self.kept is None else int(self.kept.metrics()["restarts"])

    def _left(self) -> list[str]:
        """Processes of replicas beyond those that the engine has."""
        most, end = 0 if self.kept is None else 2, time.monotonic() + GONE
        while True:
            notes = self.place / "processes"
            pids = {int(line.split()[0]) for line in notes.read_text().splitlines()} if notes.exists() else set[int]()
            there = [pid for pid in pids if _lives(pid)]
            if len(there) <= most:
                return []
            if time.monotonic() > end:
                return [f"replicas {sorted(there)}"]
            time.sleep(0.2)

    def nodes(self) -> list[str]:
        """The nodes of the replicas that live."""
        lines = [line.split() for line in (self.place / "processes").read_text().splitlines()]
        return [node for pid, node in lines if _lives(int(pid))]

    def drop(self) -> None:
        if self.kept is not None:
            with suppress(Exception):
                self.kept.really_close()
            self.kept = None

    def engine(self, config: Config, tokens: Tokens) -> Kept:
        if self.kept is None or self.kept.patience != config.engine.patience:  # type: ignore[attr-defined]
            self.drop()
            self.kept = Kept(config, tokens)
        return self.kept


class Kept(RayEngine):
    """An engine that outlives a run: started once, its first mean put back for each run that comes later."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self.patience = config.engine.patience  # type: ignore[attr-defined]
        self._begun: tuple[Facts, dict[str, Any], dict[str, Any]] | None = None
        super().__init__(config, tokens)

    def start(self, *args: Any, **kwargs: Any) -> Facts:
        if self._begun is None:
            facts = super().start(*args, **kwargs)
            self._begun = facts, dict(self.state()), dict(self.optimizer_state())
        else:
            self.load(self._begun[1], self._begun[2] or None)
        return self._begun[0]

    def close(self) -> None:
        pass

    def really_close(self) -> None:
        super().close()


@contextmanager
def patched(field_: Field) -> Generator[None]:
    """Runs of this process have replicas with faults, and an engine that is kept."""
    before = team.Replica, ray_engine.RayEngine
    team.Replica, ray_engine.RayEngine = Faulty, field_.engine  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        field_.drop()
        team.Replica, ray_engine.RayEngine = before  # type: ignore[misc]


@contextmanager
def told() -> Generator[list[str]]:
    """What the engine's log says."""
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage()[:200])
    log = logging.getLogger("evoalign.engine.ray")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


@contextmanager
def limited(seconds: float) -> Generator[None]:
    """Raise TimeoutError in what takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def marked(mark: str, but: Sequence[int] = ()) -> list[psutil.Process]:
    """Processes that were started with this mark in their environment, and what they started."""
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in but and process.environ().get(MARK) == mark and _lives(process.pid):
                found.append(process)
    return found


def gone(find: Callable[[], list[psutil.Process]]) -> list[str]:
    """Names of the processes that are still there after some seconds."""
    end = time.monotonic() + GONE
    while (there := find()) and time.monotonic() < end:
        time.sleep(0.3)
    return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in there if p.is_running()]


# --- the kinds of faults ---------------------------------------------------------------------------------------------


@contextmanager
def cluster(cores: int = 6) -> Generator[str]:
    """One that this process is connected to; its address."""
    import ray

    context: Any = ray.init(
        address="local", num_cpus=cores, num_gpus=0, include_dashboard=False, object_store_memory=2**27,
        log_to_driver=False, logging_level=logging.CRITICAL, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()


def within(field_: Field, count: int, phases: Sequence[str], **what: Any) -> Iterator[Row]:
    """Signals and garbage, in the replicas themselves."""
    most = {"about": 1, "start": 1, "rollout": 7, "apply": 3, "hash": 4}
    with cluster(), patched(field_):
        field_.patience = 120.0
        field_.measure()
        if "patience" in what:  # what starts has to answer within it, too
            field_.patience = max(what["patience"], round(3 * field_.lengths["about"], 1))
        names = list(GARBAGE)
        field_.draw.shuffle(names)
        for number in range(count):
            phase = phases[number % len(phases)]
            row = Row(what["kind"], phase, "")
            for _ in range(3):  # a run may have no such call in that replica
                at = {"start": field_.draw.choice(("about", "start")), "join": "rollout"}.get(phase, phase)
                share, call = field_.draw.random(), field_.draw.randint(1, most[at])
                garbage = names[number % len(names)] if what["kind"] == "garbage" else None
                length = field_.lengths["join" if phase == "join" else at]
                if phase == "start":
                    field_.drop()  # before the order: a replica of this engine that joins still would take it
                field_.order(
                    at=at, phase=phase, call=call, share=share, length=length, garbage=garbage,
                    signal=what.get("signal", signal.SIGKILL),
                )  # fmt: skip
                moment = garbage or f"{at if phase == 'start' else phase} {call}, {share:.2f}"
                row = Row(what["kind"], phase, moment)
                field_.measured(row, field_.train, is_new=phase == "start")
                row.happened = (field_.place / "done").exists()
                if garbage and row.happened and not row.restarts:
                    row.error = "it was taken for an answer"
                if row.happened:
                    break
            field_.order()
            yield row


def kills(field_: Field, count: int) -> Iterator[Row]:
    yield from within(field_, count, PHASES, kind="kill")


def stops(field_: Field, count: int) -> Iterator[Row]:
    yield from within(field_, count, ("rollout",), kind="stop", signal=signal.SIGSTOP, patience=PATIENCE)


def garbage(field_: Field, count: int) -> Iterator[Row]:
    yield from within(field_, count, ("rollout",), kind="garbage")


def _command(words: Sequence[str], log: Path, own: dict[str, str | None]) -> None:
    """The command line, in this process, with these variables."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(handle, number)
    for name, value in own.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    from evoalign import cli

    sys.argv = ["evoalign", *words]
    cli.main()


class Driver:
    """A run in a process of its own: where it is killed, and how it is resumed."""

    def __init__(self, to: Path, address: str | None, **engine: Any) -> None:
        self.to, self.mark, self.engine = to, secrets.token_hex(8), engine
        self.began = time.monotonic()
        self._begin(address)

    def _begin(self, address: str | None, *more: str) -> None:
        config = self.to.with_suffix(".yaml")
        engine = self.engine | ({} if address is None else {"address": address})
        config.write_text(yaml.safe_dump(json.loads(json.dumps(settings(self.to, **engine)))))
        own = {MARK: self.mark} | ({} if address else {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None})
        words = ["train", str(config), *more]
        self.process = FORKS.Process(target=_command, args=(words, self.to.with_suffix(".log"), own))
        self.process.start()

    def lines(self) -> int:
        journal = self.to / "journal.jsonl"
        return len(journal.read_bytes().splitlines()) if journal.exists() else 0

    def reach(self, lines: int, more: float) -> bool:
        """Wait until the journal has so many lines, and `more` seconds. False where the run has ended before."""
        while self.lines() < lines and self.process.is_alive() and time.monotonic() < self.began + LONGEST:
            time.sleep(0.005)
        time.sleep(more)
        return self.process.is_alive()

    def resume(self, address: str | None) -> None:
        """Raises RuntimeError where that does not go well."""
        self._begin(address, "--resume")
        self.end()
        if self.process.exitcode != 0:
            said = self.to.with_suffix(".log").read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"resuming ended with {self.process.exitcode}: {said[-1] if said else ''}")

    def end(self) -> None:
        self.process.join(LONGEST)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"no end after {LONGEST:g} s")


def _moment(draw: random.Random, length: float, number: int) -> tuple[str, int, float]:
    """Every fourth before the first line of the journal, the others after one: how many lines, and seconds then."""
    if number % 4 == 0:
        share = draw.random()
        return f"{share:.2f} of the start", 0, share * length
    lines, more = draw.randint(1, 6), 0.3 * draw.random()
    return f"journal line {lines}, {more:.2f} s later", lines, more


def outside(field_: Field, kind: str, phase: str, do: Callable[[Path, Row], None]) -> Row:
    """A row of a run in a process of its own."""
    row, began = Row(kind, phase, "", is_new=True), time.monotonic()
    to = field_.run_folder()
    try:
        do(to, row)
        row.same = generations(to) == field_.wanted
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}"[:300]
    row.seconds = round(time.monotonic() - began, 1)
    return row


def drivers(field_: Field, count: int) -> Iterator[Row]:
    """In turns on a cluster that ends with the run, and on one that was there before and goes on."""
    with cluster() as address:
        length = 0.0
        for number in range(-1, count):  # the first is let end: how long the start is, and the reference
            where = None if number % 2 == 0 else address

            def do(to: Path, row: Row, where: str | None = where, number: int = number) -> None:
                nonlocal length
                driver = Driver(to, where)
                if number < 0:
                    driver.reach(1, 0.0)
                    length = time.monotonic() - driver.began
                    driver.end()
                    field_.wanted = field_.wanted or generations(to)
                    return
                row.moment, lines, more = _moment(field_.draw, length, number // 2)
                row.happened = driver.reach(lines, more)
                driver.process.kill()
                driver.process.join()
                row.happened = row.happened and driver.process.exitcode == -signal.SIGKILL
                row.left += gone(lambda: [*marked(driver.mark), *replicas()])
                driver.resume(where)
                row.left += gone(lambda: [*marked(driver.mark), *replicas()])

            row = outside(field_, "driver", "own cluster" if where is None else "a cluster that goes on", do)
            if number >= 0:
                yield row
            elif not row.same:
                raise RuntimeError(f"the reference itself failed: {row}")


def replicas() -> list[psutil.Process]:
    """Actors of clusters that this process started."""
    found = list[psutil.Process]()
    for process in marked(os.environ[MARK], [os.getpid()]):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(("ray::Replica", "ray::Faulty")):
                found.append(process)
    return found


class Nodes:
    """A cluster of three nodes on this host, with room for three replicas."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # A node that is gone refuses, and is found at once; one that is slow has time to answer.
        soon = {"health_check_period_ms": 500, "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 5}
        self.of = Cluster(initialize_head=True, head_node_args=self._node() | {"_system_config": soon})
        for _ in range(2):
            self.of.add_node(**self._node())

    def _node(self) -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False}

    def kill(self, node: Any) -> None:
        """Its node manager; whose child here it is, so that it must not stay a zombie."""
        process = node.all_processes["raylet"][0].process
        process.kill()
        process.wait()

    def lose(self, node: Any) -> None:
        """Its node manager, and what that started, a replica among it."""
        started = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
        self.kill(node)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def again(self, node: Any) -> None:
        """Another node in place of one that is gone."""
        self.of.remove_node(node, allow_graceful=False)
        self.of.add_node(**self._node())


def raylets(field_: Field, count: int) -> Iterator[Row]:
    """A quarter of the driver's, the others of a node with a replica."""
    of_driver = count // 4 or int(count > 1)
    yield from _of_replicas(field_, count - of_driver)
    yield from _of_drivers(field_, of_driver)


def _of_replicas(field_: Field, count: int) -> Iterator[Row]:
    """One cluster, with a new node after each that is lost."""
    import ray

    with patched(field_):
        field_.patience = 120.0
        nodes = Nodes()
        ray.init(address=nodes.of.address, log_to_driver=False, logging_level=logging.CRITICAL)
        try:
            field_.measure()
            for _ in range(count):
                row = Row("raylet", "of a replica", "")
                for _ in range(8):  # a run may be over before
                    row = Row("raylet", "of a replica", "")
                    field_.measured(row, lambda to, row=row: _one_node_less(field_, nodes, to, row))
                    if row.happened or row.error:
                        break
                yield row
        finally:
            field_.drop()
            ray.shutdown()
            nodes.of.shutdown()


def _of_drivers(field_: Field, count: int) -> Iterator[Row]:
    """A cluster for each, and another one to go on."""
    for number in range(count):

        def do(to: Path, row: Row, number: int = number) -> None:
            nodes = Nodes()
            try:
                # Ray does not end a driver whose node manager is gone: new replicas never answer, until it gives up.
                driver = Driver(to, nodes.of.address, patience=40.0, restarts=2)
                row.moment, lines, more = _moment(field_.draw, START, number)
                row.happened = driver.reach(lines, more)
                nodes.kill(nodes.of.head_node)
                driver.end()
                row.why.append(f"the driver ended with {driver.process.exitcode}")
                row.left += gone(lambda: [*marked(driver.mark), *replicas()])
            finally:
                nodes.of.shutdown()
            nodes = Nodes()
            try:
                driver.resume(nodes.of.address)
                row.left += gone(lambda: [*marked(driver.mark), *replicas()])
            finally:
                nodes.of.shutdown()

        yield outside(field_, "raylet", "of the driver", do)


def _one_node_less(field_: Field, nodes: Nodes, to: Path, row: Row) -> None:
    """A run during which a node with a replica is lost, at some moment after a line of its journal. It happened where
    the run missed the replica, and was not over before."""
    lines, more, before = field_.draw.randint(1, 4), 0.05 * field_.draw.random(), field_.restarts()
    row.moment = f"journal line {lines}, {more:.2f} s later"
    lost, is_over = list[Any](), threading.Event()

    def kill() -> None:
        journal = to / "journal.jsonl"
        while not is_over.is_set() and not (journal.exists() and len(journal.read_bytes().splitlines()) >= lines):
            time.sleep(0.005)
        time.sleep(more)
        used = set(field_.nodes())
        lost.extend([n for n in list[Any](nodes.of.worker_nodes) if n._node_id in used][:1])
        for node in lost:
            nodes.lose(node)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        field_.train(to)
        row.happened = field_.restarts() > before
    finally:
        is_over.set()
        thread.join()
        for node in lost:
            nodes.again(node)
        if field_.kept is not None:
            field_.kept.team.stands()  # who is lost is missed now, and joins before the next node goes
            while len(field_.kept.team.ready) < 2:
                field_.kept.team.poll(())
                time.sleep(0.1)


RUN = {"kill": kills, "stop": stops, "garbage": garbage, "driver": drivers, "raylet": raylets}


def trials(kinds: Sequence[str], count: int | None, seed: int) -> Iterator[Row]:
    """Rows of each kind, as they come."""
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="evoalign-faults-") as folder:
            field_ = Field(Path(folder), seed)
            yield from RUN[kind](field_, COUNT[kind] if count is None else count)
            if left := gone(lambda: marked(os.environ[MARK], [os.getpid()])):
                yield Row(kind, "the end", "", same=True, happened=True, left=left)


def write(file: Path, rows: Sequence[Row], kinds: Sequence[str]) -> None:
    """The rows, beside those of other kinds that the file has."""
    import ray
    import torch

    versions = {"python": platform.python_version(), "ray": ray.__version__, "torch": torch.__version__}
    command = " ".join(["python", "benchmarks/ray_faults.py", *sys.argv[1:]])
    made = {kind: {"command": command, **versions} for kind in kinds}
    before: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"made": {}, "rows": []}
    kept = [row for row in before["rows"] if row["kind"] not in kinds]
    tree = {"made": before["made"] | made, "rows": [*kept, *map(asdict, rows)]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    lines = ["| fault | phase | cases | as the reference | started again | left behind | seconds, median |",
             "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for kind, phase in dict.fromkeys((row.kind, row.phase) for row in rows):
        of = [row for row in rows if (row.kind, row.phase) == (kind, phase)]
        seconds = sorted(row.seconds for row in of)[len(of) // 2]
        again, left = sum(row.restarts for row in of), sum(bool(row.left) for row in of)
        same = sum(row.same and row.happened for row in of)
        lines.append(f"| {kind} | {phase} | {len(of)} | {same} | {again} | {left} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--count", type=int, help="Cases of each kind, in place of 40 and 20.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = list[Row]()
    for row in trials(options.kinds, options.count, options.seed):
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
        write(options.json, rows, options.kinds)
    print(table(rows))
    sys.exit(0 if rows and all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()
