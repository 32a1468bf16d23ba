# SPDX-License-Identifier: Apache-2.0
"""Every command killed at random instants, repeated, and held against one that was never killed: bits and files.

    OMP_NUM_THREADS=1 python tests/support/random_kills.py --count 200 --json kills.jsonl

A process kills itself at its n-th call of mkdir, rename, replace, unlink, rmdir or fsync, n drawn at random among those
of a phase: before the call, after it, or with what is being written cut in half; or it is killed from outside at any
instant. A phase is the function of evoalign that makes the call. All processes are forks of one that has imported
everything, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kill_points
import yaml

from evoalign.analysis.sweeping.children import is_busy

CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
PHASES = {  # by module and function; the innermost frame that is here says what the call is for
    "rundir.directory.lock": "directory", "rundir.directory.create": "directory", "sweeping.cells.add": "directory",
    "rundir.journal.__init__": "directory", "rundir.directory.release": "lock", "rundir.journal.append": "update",
    "rundir.journal.seal": "seal", "rundir.checkpoint.save": "checkpoint", "baselines.policy.save": "checkpoint",
    "baselines.trainer_state.mark": "checkpoint", "training.saving.retain": "checkpoint",
    "training.recorder._draw": "report", "training.recorder._write_budget": "report",
    "training.result.write_completions": "report", "training.result._write_evaluation": "report",
    "rundir.directory.resume": "resuming", "rundir.directory.replace_metrics": "resuming",
    "rundir.directory.sweep": "resuming", "exporting.export.export": "export", "sweeping.children.start": "cells",
    "sweeping.sweep.record": "report", "sweeping.sweep.conclude": "report", "cli.evaluate.evaluate": "report",
}  # fmt: skip
MAIN = ("directory", "seal", "checkpoint")
ANY = "any instant"
PARTS = {
    "grpo": ("trl.trainer.grpo_trainer", "evoalign.baselines.train"),
    "sweep": ("evoalign.analysis.sweeping.sweep",),
}
ASIDE = re.compile(r"run\.\d{8}-\d{6}(/|$)")
"""Where `grpo --resume` puts a run that died before it had a state to resume from."""
Call = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """A command, the words that repeat it after a death, and the folder it begins with, if any. `cell`: not the command
    itself dies, but the first process that it starts."""

    command: str
    space: str
    words: tuple[str, ...]
    again: tuple[str, ...]
    given: Path | None = None
    cell: bool = False

    @property
    def name(self) -> str:
        return f"{self.command}{', a cell' if self.cell else ''} {self.space}"


@dataclass(frozen=True)
class Death:
    """At which call, and when; no call: `after` so many seconds."""

    phase: str
    call: int = -1
    moment: str = "before"
    after: float = 0.0


def phase() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "").removeprefix("evoalign.")
        if found := PHASES.get(f"{module}.{frame.f_code.co_name}"):
            return found
        frame = frame.f_back
    return "else"


class Watch:
    """Counts the calls, and dies at one of them."""

    def __init__(self, death: Death | None) -> None:
        self.death, self.calls = death, list[Call]()
        self._own = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> Watch:
        for name, own in self._own.items():
            setattr(os, name, self._wrapped(name, own))
        return self

    def __exit__(self, *raised: object) -> None:
        for name, own in self._own.items():
            setattr(os, name, own)

    def _wrapped(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            now, number = self.death, len(self.calls)
            self.calls.append((name, phase()))
            if now is None or number != now.call:
                return own(*args, **kwargs)
            try:
                if now.moment == "half" and name == "fsync":
                    _cut(args[0])
                elif now.moment != "before":
                    own(*args, **kwargs)
            finally:  # a folder that is there already is no error of the command
                kill_points.die()

        return call


def _cut(handle: int) -> None:
    """Of what was written last, half is not there yet."""
    path = Path(f"/proc/self/fd/{handle}").readlink()
    if path.is_file():
        raw = path.read_bytes()
        start = raw.rfind(b"\n", 0, -1) + 1
        os.truncate(path, start + (len(raw) - start) // 2)


def _be(case: Case, words: Sequence[str], death: Death | None, folder: Path, calls: Path | None) -> None:
    from matplotlib.figure import Figure

    from evoalign import cli
    from evoalign.analysis.sweeping import children

    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for handle in (1, 2):
        os.dup2(log, handle)
    os.chdir(folder)
    Figure.savefig = lambda self, file, **options: file.write(b"one pixel")  # type: ignore[assignment,method-assign]
    forked = _forks(death if case.cell else None, calls if case.cell else None)
    children.subprocess = SimpleNamespace(Popen=forked, DEVNULL=None, STDOUT=None)  # type: ignore[assignment]
    _watched(lambda: _main(cli, words), None if case.cell else death, None if case.cell else calls)


def _main(cli: Any, words: Sequence[str]) -> int:
    sys.argv = ["evoalign", *words]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _watched(run: Callable[[], int], death: Death | None, calls: Path | None) -> None:
    with Watch(death) as watch:
        code = run()
    if calls is not None and not calls.exists():
        calls.write_text(json.dumps(watch.calls))
    sys.stdout.flush()
    os._exit(code)


def _forks(death: Death | None, calls: Path | None) -> type:
    """In place of a process that is started anew: a fork; the first one dies."""
    waiting = [(death, calls)]

    class Forked:
        def __init__(self, words: Sequence[str], *, pass_fds: Sequence[int], stdout: Any, **_: Any) -> None:
            first = waiting.pop() if waiting else (None, None)
            self.returncode: int | None = None
            self.pid = os.fork()
            if self.pid:
                return
            from evoalign.analysis.sweeping import child

            os.setsid()
            for handle in (1, 2):
                os.dup2(stdout.fileno(), handle)
            (kept,) = pass_fds
            os.closerange(3, kept)
            os.closerange(kept + 1, 4096)

            def run() -> int:
                sys.argv = list(words[2:])
                try:
                    child.main()
                except SystemExit as end:
                    return int(end.code or 0)
                return 0

            _watched(run, *first)

        def poll(self) -> int | None:
            return self.wait(os.WNOHANG)

        def wait(self, options: int = 0) -> int | None:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, options)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    return Forked


def lay(case: Case, folder: Path) -> None:
    if case.given is not None:
        shutil.copytree(case.given, folder)
        return
    folder.mkdir(parents=True)
    (folder / "config").mkdir()
    (folder / "config/c.yaml").write_text(yaml.safe_dump(_config(case)), encoding="utf-8")


def _config(case: Case) -> dict[str, Any]:
    tree = kill_points.config(case.space, Path("run"))
    if case.command == "sweep":
        tree["es"]["num_generations"] = 2
    if case.command == "grpo":
        own = {"max_steps": 3, "num_generations": 2, "per_device_train_batch_size": 4, "rollouts": "engine"}
        tree = {"seed": 5, "output_dir": "run", "task": {"name": "conciseness"}, "checkpoint": {"every": 1},
                "evaluation": {"max_tokens": 4}, "grpo": own}  # fmt: skip
    return tree


def go(case: Case, folder: Path, words: Sequence[str], death: Death | None = None, calls: Path | None = None) -> int:
    """The exit code of the command, in a process of its own."""
    process = kill_points.PROCESSES.Process(target=_be, args=(case, words, death, folder, calls))
    process.start()
    if death is not None and death.call < 0:
        process.join(death.after)
        if process.pid is not None and process.exitcode is None:
            process.kill()
    process.join()
    return process.exitcode or 0


def facts(folder: Path) -> dict[str, Any]:
    """All files by name, moved runs aside, and of each what may not differ."""
    found: dict[str, Any] = {}
    for file in folder.rglob("*"):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not ASIDE.match(name):
            found[name] = _bits(file)
    return found


def _bits(file: Path) -> Any:
    if file.suffix == ".safetensors" or file.name in ("journal.jsonl", "evaluation.json", "output.json"):
        return file.read_bytes()
    if file.parts[-2] == "to" or file.name == "config.yaml":
        return file.read_bytes()
    if file.name == "metrics.jsonl":
        rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return [(row["generation"], row["mean"], row["std"], row["rms_c"]) for row in rows]
    return None  # has times in it


class Bench:
    """The cases, what each comes to unbroken, which calls it makes, and how long it takes."""

    def __init__(self, folder: Path, commands: Sequence[str], spaces: Sequence[str]) -> None:
        self.folder, self.count = folder, 0
        self.cases: list[Case] = []
        self.wanted: dict[Case, dict[str, Any]] = {}
        self.calls: dict[Case, list[Call]] = {}
        self.seconds: dict[Case, float] = {}
        more = [module for command in commands for module in PARTS.get(command, ())]
        kill_points.PROCESSES.set_forkserver_preload([*kill_points.PRELOADED, *more])
        for space in spaces:
            self._of_space(space, commands)
        if "grpo" in commands:
            self._add(Case("grpo", "", ("grpo", "config/c.yaml"), ("grpo", "config/c.yaml", "--resume")))
        if "sweep" in commands:
            words = ("sweep", "config/c.yaml", "--grid", "es.sigma=0.01,0.02", "--to", "sweep")
            self._add(Case("sweep", "lora", words, words))
            self._add(Case("sweep", "lora", words, words, cell=True))

    def _of_space(self, space: str, commands: Sequence[str]) -> None:
        again = ("train", "config/c.yaml", "--resume")
        train = self._add(Case("train", space, again[:2], again), wanted="train" in commands)
        done = self.folder / train.name
        if "resume" in commands:
            seals = [i for i, (_, what) in enumerate(self.calls[train]) if what == "seal"]
            half = self._new("half")
            lay(train, half)
            assert go(train, half, train.words, Death("seal", seals[1], "after")) == -signal.SIGKILL
            self._add(Case("resume", space, again, again, half))
        if "eval" in commands:
            words = ("eval", "run", "--output", "out/output.json")
            self._add(Case("eval", space, words, words, done))
        if "export" in commands:
            for more in ((), ("--generation", "1")):
                words = ("export", "run", "--to", "to", *more)
                self._add(Case("export", space, words, words, done))

    def _add(self, case: Case, *, wanted: bool = True) -> Case:
        folder = self._new("unbroken") if case.given or case.cell else self.folder / case.name
        lay(case, folder)
        calls, start = self._new("calls"), time.monotonic()
        code = go(case, folder, case.words, calls=calls)
        assert code == 0, Path(f"{folder}.log").read_text(encoding="utf-8")
        self.seconds[case] = time.monotonic() - start
        self.calls[case] = [(name, what) for name, what in json.loads(calls.read_text(encoding="utf-8"))]
        self.wanted[case] = facts(folder)
        self.cases += [case] if wanted else []
        return case

    def _new(self, name: str) -> Path:
        self.count += 1
        return self.folder / f"{name}-{self.count}"

    def draw(self, wanted: str, draw: random.Random) -> tuple[Case, Death]:
        """A case and a death in a phase; those that have no such phase are left out."""
        if wanted == ANY:
            case = draw.choice([c for c in self.cases if not c.cell])
            return case, Death(ANY, after=draw.uniform(0.0, self.seconds[case]))
        other = [c for c in self.cases if any(self._is(call, wanted) for call in self.calls[c])]
        case = draw.choice(other)
        number = draw.choice([i for i, call in enumerate(self.calls[case]) if self._is(call, wanted)])
        return case, Death(self.calls[case][number][1], number, draw.choice(("before", "half", "after")))

    @staticmethod
    def _is(call: Call, wanted: str) -> bool:
        return call[1] == wanted or (wanted == "else" and call[1] not in MAIN)

    def trial(self, case: Case, death: Death) -> dict[str, Any]:
        """Die, repeat, compare; `outcome` is "same", or what differs."""
        folder, start = self._new("trial"), time.monotonic()
        lay(case, folder)
        ended = go(case, folder, case.words, death)
        while any(is_busy(path.parent) for path in folder.glob("sweep/*/*/.lock")):
            time.sleep(0.1)  # the runs of a sweep that was killed save and stop
        # An export that was done when the signal came is not to be made again.
        done = case.command == "export" and facts(folder) == self.wanted[case]
        code = 0 if done else go(case, folder, case.again)
        row = {"command": case.command, "cell": case.cell, "space": case.space, **asdict(death),
               "name": self.calls[case][death.call][0] if death.call >= 0 else None, "exit": ended}  # fmt: skip
        if code:
            tail = Path(f"{folder}.log").read_text(encoding="utf-8").strip().splitlines()[-1:]
            return row | {"outcome": f"stuck: exit code {code}, {' '.join(tail)}"}
        found, wanted = facts(folder), self.wanted[case]
        odd = sorted(n for n in {*found, *wanted} if n not in found or n not in wanted or found[n] != wanted[n])
        left = [f"{n} {'differs' if n in found and n in wanted else 'left' if n in found else 'lost'}" for n in odd]
        if not odd:
            shutil.rmtree(folder)
        return row | {"outcome": ", ".join(left) or "same", "seconds": round(time.monotonic() - start, 2)}


def histogram(rows: Sequence[dict[str, Any]]) -> str:
    """Kills by command and phase, and what was not the same."""
    counts = Counter((row["command"], row["phase"]) for row in rows)
    phases = sorted({what for _, what in counts})
    lines = [f"{'':8}" + "".join(f"{what:>14}" for what in phases)]
    lines += [
        f"{command:8}" + "".join(f"{counts[command, what]:14}" for what in phases)
        for command in dict.fromkeys(row["command"] for row in rows)
    ]
    odd = [row for row in rows if row["outcome"] != "same"]
    killed = sum(row["exit"] == -signal.SIGKILL or row["cell"] for row in rows)
    lines += [f"{len(rows)} trials, {killed} killed, {len(odd)} not the same", *map(json.dumps, odd)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="*", default=["train", "resume", "grpo", "sweep", "eval", "export"])
    parser.add_argument("--spaces", nargs="*", default=list(kill_points.SPACES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    draw, rows, start = random.Random(given.seed), list[dict[str, Any]](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), given.commands, given.spaces)
        print(f"{len(bench.cases)} cases unbroken after {time.monotonic() - start:.0f} s", flush=True)
        for number in range(given.count):
            rows.append(bench.trial(*bench.draw((*MAIN, "else", ANY)[number % 5], draw)))
            shown = {k: v for k, v in rows[-1].items() if v is not None}
            print(f"{number + 1:4} {time.monotonic() - start:6.0f} s {json.dumps(shown)}", flush=True)
            if given.json is not None:
                with given.json.open("a" if number else "w", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(histogram(rows))
    raise SystemExit(any(row["outcome"] != "same" for row in rows))


if __name__ == "__main__":
    main()
