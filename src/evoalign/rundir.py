# SPDX-License-Identifier: Apache-2.0
"""The files a run leaves: made once everything is known to work, so that bad input leaves nothing half-written."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import torch

from evoalign import journal
from evoalign.checkpoint import write_text
from evoalign.config import Config, TransformersConfig, to_yaml
from evoalign.errors import ResumeError, RunExistsError
from evoalign.version import __version__

Method: TypeAlias = Literal["es", "grpo"]
COMMANDS: dict[Method, str] = {"es": "train", "grpo": "grpo"}
"""The command that makes a run of each method, and goes on with it."""
NAMES: dict[Method, str] = {"es": "ES", "grpo": "GRPO"}
FAILED_COMPLETION = "failed_completion.json"
LOCK = ".lock"
OURS = frozenset({"config.yaml", "manifest.json", "journal.jsonl", "metrics.jsonl", "results", "figures", "logs",
                  "trainer", FAILED_COMPLETION, LOCK})  # fmt: skip
"""What `create` and the first generation leave in a run directory."""
RESOURCES = (
    "engine.device", "engine.memory_gib", "engine.max_rows", "engine.threads",
    "engine.tensor_parallel_size", "engine.gpu_memory_utilization", "engine.kv_cache_gib", "engine.max_num_seqs",
    "engine.max_num_batched_tokens", "engine.max_model_len", "engine.enforce_eager", "engine.attention_backend",
    "engine.population", "engine.members", "engine.master",
)  # fmt: skip
"""Settings that a run may have to change to fit where it goes on. They decide the shapes of batches and the kernels."""
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy", "scipy")
MORE_LIBRARIES: dict[Method, tuple[str, ...]] = {"es": (), "grpo": ("trl",)}


class RunDir:
    """The paths of a run and the writing of its plain files."""

    def __init__(self, path: Path) -> None:
        path = path.expanduser().absolute()  # a hook or a reward may change the working directory
        self.path = path
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.journal = path / "journal.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.results = path / "results"
        self.budget = self.results / "budget.json"
        self.figures = path / "figures"
        self.rows: list[dict[str, Any]] = []
        self.aside: Path | None = None
        """Where `create` moved the run that was here."""
        self._lock: IO[bytes] | None = None
        self._made: list[Path] = []
        self._created = False

    def saved(self, generation: int, *, adapter: bool) -> Path:
        """Where the mean after so many generations is saved."""
        return self.path / ("loras" if adapter else "checkpoints") / f"generation_{generation:04d}"

    def completions(self, name: str) -> Path:
        """A parquet file of completions."""
        return self.results / "completions" / f"{name}.parquet"

    def lock(self) -> None:
        """Keep other processes out until `release`; the lock goes with the process, however that ends.

        Makes the folder. Raises RunExistsError where another process is in it.
        """
        self._check_place()
        self._made += [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK).open("ab")
        if not _locked(file) or not _is_at(file, self.path / LOCK):
            file.close()
            raise RunExistsError(
                f"output_dir {self.path}: another process is training there; stop it first, or choose another"
            )
        self._lock = file
        _HELD.add(file)

    def release(self) -> None:
        """Let others in. Folders that were made for the lock and hold nothing go too."""
        if self._lock is not None:
            (self.path / LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        for folder in self._made:
            with suppress(OSError):  # not empty: it is a run by now
                folder.rmdir()

    def create(self, config: Config, manifest: Mapping[str, Any], *, overwrite: bool, resume: bool = False) -> None:
        """Make the folders and write config and manifest; nothing is left of them where that fails.

        Raises RunExistsError. A run that was here is moved to `aside`.
        """
        if self.exists():
            self.refuse(overwrite=overwrite, resume=resume)
            if not (resume and self.is_unstarted()):
                self._move_aside()
        self._created = True
        try:
            self.journal.unlink(missing_ok=True)  # without a first line
            self._make_folders()
            write_text(self.config, to_yaml(config))
            write_text(self.manifest, json.dumps(manifest, indent=2) + "\n")
        except BaseException:
            self.undo()
            raise

    def go_on(self, config: Config, manifest: Mapping[str, Any]) -> None:
        """Make what is missing of the folders, write the config of now, and add to the manifest who goes on."""
        self._make_folders()
        write_text(self.config, to_yaml(config))
        try:
            whole = json.loads(self.manifest.read_text(encoding="utf-8"))
            whole.setdefault("resumed", []).append(dict(manifest))
        except (OSError, ValueError, AttributeError):  # lost or damaged: it is not needed to go on
            whole = dict(manifest)
        write_text(self.manifest, json.dumps(whole, indent=2) + "\n")

    def sweep(self) -> None:
        """Take away what a process that died left half written."""
        for file in [*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp"), *self.path.glob("results/*/.*.tmp")]:
            _remove(file)

    def undo(self) -> None:
        """Take back what `create` did: for input that turns out to be bad before the first generation is done."""
        if not self._created:
            return
        self._created = False
        for name in OURS - {LOCK}:
            _remove(self.path / name)
        if self.aside is not None:
            self.release()
            with suppress(FileNotFoundError):
                self.path.rmdir()
            self.aside.rename(self.path)
            self.aside = None

    def _make_folders(self) -> None:
        for folder in (self.results / "completions", self.figures, self.path / "logs"):
            folder.mkdir(parents=True, exist_ok=True)

    def exists(self) -> bool:
        """Whether there is anything in the directory; a lock, and what a failed reward left, do not count."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(entry.name not in (FAILED_COMPLETION, LOCK) for entry in self.path.iterdir())

    def refuse(self, *, overwrite: bool, resume: bool = False) -> None:
        """Raise RunExistsError where the directory is taken and may not be moved aside.

        `resume` takes a run that recorded nothing yet.
        """
        self._check_place()
        if not self.exists() or (resume and self.is_unstarted()):
            return
        if not (self.manifest.is_file() or self.journal.is_file()):
            raise RunExistsError(f"output_dir {self.path} holds something else than a run; choose another")
        if not overwrite:
            raise RunExistsError(
                f"output_dir {self.path} holds a run; go on with it ({how_to_go_on(self.path)}), move it aside "
                "(--overwrite), or choose another"
            )

    def _check_place(self) -> None:
        there = next(place for place in (self.path, *self.path.parents) if place.exists())
        if not there.is_dir():
            raise RunExistsError(f"output_dir {self.path}: {there} is a file; choose another")
        if not os.access(there, os.W_OK):
            raise RunExistsError(f"output_dir {self.path}: no permission to write into {there}; choose another")

    def is_unstarted(self) -> bool:
        """Whether a run was begun here that has not come as far as the first line of its journal."""
        return (
            self.manifest.is_file()
            and journal.is_blank(self.journal)
            and not self.has_progress()
            and all(entry.name in OURS for entry in self.path.iterdir())
        )

    def has_progress(self) -> bool:
        """Whether generations have left anything beside the journal."""
        return self.metrics.is_file() or bool(saved_folders(self.path))

    def keep_failure(self, failed: Mapping[str, Any]) -> Path:
        """Write down the completion that a reward failed on; a run need not have begun."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / FAILED_COMPLETION
        write_text(file, json.dumps(dict(failed), indent=2) + "\n")
        return file

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl; also kept for the figures."""
        self.rows.append(row)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def replace_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """All of metrics.jsonl anew."""
        self.rows = list(rows)
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def read_metrics(self) -> dict[int, dict[str, Any]]:
        """Rows by generation; lines that are cut or damaged are left out."""
        rows: dict[int, dict[str, Any]] = {}
        text = self.metrics.read_bytes() if self.metrics.is_file() else b""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                rows[int(row["generation"])] = row
            except (ValueError, KeyError, TypeError):
                continue
        return rows

    def _move_aside(self) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.path.stat().st_mtime))
        aside = self.path.with_name(f"{self.path.name}.{stamp}")
        count = 1
        while aside.exists():
            count += 1
            aside = self.path.with_name(f"{self.path.name}.{stamp}.{count}")
        self.release()  # the lock's name; whoever comes in between is refused by the folder that is not empty
        self.aside = self.path.rename(aside)
        self.lock()


_HELD: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _locked(file: IO[bytes]) -> bool:
    """Lock a file; False where another process has it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that knows no locks
        return True
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file still is the one at its path: who releases a lock takes the file away."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _forget_locks() -> None:
    """A fork, such as a worker that scores, shares the lock of its parent; it must not keep it beyond that."""
    for file in list(_HELD):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _remove(path: Path) -> None:
    """A file, a link (and not what it points to), or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def generation_of(folder: Path) -> int:
    """The number in the name of a saved mean."""
    return int(folder.name.removeprefix("generation_"))


def saved_folders(path: Path) -> list[Path]:
    """The saved means of a run, the latest last."""
    found = [*path.glob("loras/generation_*"), *path.glob("checkpoints/generation_*")]
    return sorted((f for f in found if f.name.removeprefix("generation_").isdecimal()), key=generation_of)


def remove_saved(folder: Path) -> None:
    """Delete a saved mean; of one that is a link, the link."""
    _remove(folder)


def method_of(path: Path) -> Method | None:
    """By what a run directory was made; None where it holds no run. Only a run of ES has a journal."""
    if (path / "journal.jsonl").is_file():
        return "es"
    try:
        found = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        return "grpo" if found["method"] == "grpo" else "es"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def how_to_go_on(path: Path) -> str:
    """The command that goes on with the run in a directory, whatever made it."""
    return f"evoalign {COMMANDS[method_of(path) or 'es']} {shlex.quote(str(path))} --resume"


def refuse_other(path: Path, method: Method) -> None:
    """Raise ResumeError where a directory holds a run of the other method: neither can go on with the other's."""
    found = method_of(path)
    if found not in (None, method):
        raise ResumeError(f"{path} holds a run of {NAMES[found]}; go on with: {how_to_go_on(path)}")


def identity(config: Config, method: Method = "es") -> dict[str, Any]:
    """The settings that make a run what it is: those that only say what is kept, shown or told are left out.

    So are those of the other method. The number of generations, or steps, is one of these too, unless a schedule
    depends on it: a longer run of the same settings begins as the shorter one.
    """
    told = {"output_dir", "grader", "checkpoint", "tracking", "checks"}
    if method == "grpo":
        return _identity_of_grpo(config, told)
    tree = config.model_dump(mode="json", exclude={*told, "grpo"})
    del tree["evaluation"]["every"]
    if config.es.sigma_schedule.name == config.es.learning_rate_schedule.name == "constant":
        del tree["es"]["num_generations"]
    return tree


def _identity_of_grpo(config: Config, told: set[str]) -> dict[str, Any]:
    unused = {"full"}
    if config.grpo.rollouts != "es":
        unused |= {"es_", "space", "lowrank"}
        unused |= {"lora"} if config.grpo.tune == "full" else set()
    tree = config.model_dump(mode="json", exclude={*told, *unused})
    del tree["evaluation"]["every"]
    if config.grpo.lr_scheduler_type == "constant":
        del tree["grpo"]["max_steps"]
    return tree


def config_hash(config: Config, method: Method = "es") -> str:
    """SHA-256 of what makes a run what it is."""
    return hashlib.sha256(json.dumps(identity(config, method), sort_keys=True).encode()).hexdigest()


def differences(ours: Config, theirs: Config, method: Method = "es") -> tuple[list[str], list[str]]:
    """In words, what makes two configs different runs, and what may only move the last bits of a score."""
    found = _differ(identity(ours, method), identity(theirs, method), "")
    # What only one of them counts, as the steps of a schedule, is shown as it is, and not named where it is the same:
    # then another setting, which is named, is why it counts. Nothing that differs may be lost here.
    here, there = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    raw = {key: (_at(here, key, mine), _at(there, key, other)) for key, (mine, other) in found.items()}
    odd = {key: pair for key, pair in raw.items() if pair[0] != pair[1]} or found
    words = {key: f"{key} is {there!r} in the run and {here!r} now" for key, (here, there) in sorted(odd.items())}
    return (
        [line for key, line in words.items() if key not in RESOURCES],
        [line for key, line in words.items() if key in RESOURCES],
    )


def _at(tree: Any, key: str, otherwise: Any) -> Any:
    """The value of a dotted key, where it is there."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return otherwise
        tree = tree[part]
    return tree


def room(config: Config) -> str:
    """What of `RESOURCES` frees memory, as advice to a run that ran out of it."""
    engine = config.engine
    if isinstance(engine, TransformersConfig):
        return "lower engine.memory_gib or engine.max_rows"
    host = config.space.name != "lora" and engine.master == "device"
    mean = ", or set engine.master host" if host else ""
    return f"lower engine.gpu_memory_utilization, engine.kv_cache_gib or engine.max_num_seqs{mean}"


def _differ(ours: Any, theirs: Any, name: str) -> dict[str, tuple[Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in {*ours, *theirs}:
            found |= _differ(ours.get(key), theirs.get(key), f"{name}.{key}" if name else str(key))
        return found
    return {} if ours == theirs else {name: (ours, theirs)}


def versions(method: Method = "es") -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    libraries = {name: importlib.metadata.version(name) for name in (*LIBRARIES, *MORE_LIBRARIES[method])}
    return {"python": platform.python_version(), "evoalign": __version__, **libraries}


def make_manifest(
    config: Config, facts: Mapping[str, Any], command: Sequence[str], method: Method = "es"
) -> dict[str, Any]:
    """Where, when and with what a run was made. Nothing here is needed to replay it."""
    return {
        "format_version": config.format_version,
        "method": method,
        "command": list(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config_hash": config_hash(config, method),
        "versions": versions(method),
        "hardware": _hardware(),
        "git": _git(),
        **facts,
    }


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"system": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


def _git() -> dict[str, Any] | None:
    """Commit and state of the working directory's repository, if it is one."""
    try:
        commit = _run_git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_run_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def command_line() -> list[str]:
    """The command as it was typed."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
