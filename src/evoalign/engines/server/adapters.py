# SPDX-License-Identifier: Apache-2.0
"""Members as PEFT adapters, which servers load from a folder, usually in memory, or as tensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from evoalign.errors import ConfigError, ModelError
from evoalign.rundir.files import as_os_errors, is_at, locked
from evoalign.spaces.base import Master, Space
from evoalign.spaces.lora import factor_name
from evoalign.spaces.targets import module_of
from evoalign.types import Layout, Member, Plan

PREFIX = "base_model.model."
IN_MEMORY = Path("/dev/shm")
OURS, MARK = "evoalign-adapters-", ".evoalign-adapters"
"""Prefix of a process's folder, and the locked file in it; only folders with both are ever deleted."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter in PEFT's layout: adapter_config.json, and tensors under its names, on the CPU in the served dtype."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def write(self, folder: Path) -> None:
        """Write it into a new folder, readable for a server of another user whatever the umask."""
        _make(folder)
        save_file(dict(self.tensors), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)


def build(
    space: Space, layout: Layout, master: Master, plan: Plan, members: Sequence[Member], base: str
) -> list[PeftAdapter]:
    """Return the members' adapters, with `base` as the name of their model and shared factors in each.

    Raises ModelError where the space has no adapter for them.
    """
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in members]
    modules, scaling = layout.modules, space.scaling
    for module in modules:
        found = space.adapter(layout, module, master, plan, members)
        if found is None:
            continue
        scaling = found.scaling
        for factor, values in (("A", found.a), ("B", found.b)):
            name = PREFIX + factor_name(module, factor)
            here = values.detach().to("cpu").expand(len(members), *values.shape[1:])
            for own, value in zip(tensors, here, strict=True):
                own[name] = value.contiguous()
    if not all(tensors):
        raise ModelError(
            f"space {space.name} has no adapter for members {[m.index for m in members]}: its `adapter` returned None"
        )
    config = peft_config(base, space.rank, scaling, sorted({module_of(m) for m in modules}))
    return [PeftAdapter(config, own) for own in tensors]


def peft_config(base: str, rank: int, scaling: float, modules: Sequence[str]) -> dict[str, Any]:
    """Return the fields of adapter_config.json that servers read. `use_rslora` is false: some ignore it silently."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scaling * rank,
        "target_modules": list(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


class AdapterStore:
    """This process's folder of adapters, under `parent` (None: in memory, where the system has that).

    It is locked while in use; folders in memory that killed processes left are deleted.
    """

    def __init__(self, parent: str | None, setting: str = "engine.adapter_folder") -> None:
        """`setting` is the setting that error messages name."""
        self._setting = setting
        place = Path(parent) if parent is not None else IN_MEMORY if IN_MEMORY.is_dir() else None
        try:
            if parent is None and place is not None:
                _delete_orphans(place)
            self._lock: int | None
            self._folder, self._lock = _own_folder(place)
            self._folder.chmod(0o755)
        except OSError as error:
            raise ConfigError(f"{setting}: {place} cannot be written to ({error.strerror})") from error

    def put(self, name: str, adapter: PeftAdapter) -> Path:
        """Write an adapter into a new folder and return it. Raises ModelError where the disk is full."""
        folder = self._folder / name
        try:
            with as_os_errors(folder):
                adapter.write(folder)
        except OSError as error:
            raise ModelError(
                f"{folder} cannot be written ({error.strerror}); set {self._setting} to one with more room"
            ) from error
        return folder

    def folder(self, name: str) -> Path:
        """Create a folder for other files."""
        return _make(self._folder / name)

    def drop(self, name: str) -> None:
        """Delete the folder of a name."""
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def close(self) -> None:
        """Delete all folders."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove(self._folder, lock)


def _make(folder: Path) -> Path:
    """Create a folder readable for all; the mode is set afterwards, since mkdir applies the umask."""
    folder.mkdir()
    folder.chmod(0o755)
    return folder


def _own_folder(place: Path | None) -> tuple[Path, int]:
    """Return a new folder and its lock, which the system releases however the process ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=OURS, dir=place))
        lock = os.open(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if locked(lock) and is_at(lock, folder / MARK):
            return folder, lock
        os.close(lock)  # another process deleted it before it was locked


def _delete_orphans(place: Path) -> None:
    """Delete this user's marked folders that no process has locked. `place` has to support locks, as memory does."""
    for folder in place.glob(f"{OURS}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # not marked, or deleted meanwhile
            continue
        if locked(lock):
            _remove(folder, lock)
        else:
            os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    """Delete a folder, its mark last, so that an interrupted deletion leaves a recognisable orphan."""
    for inside in folder.iterdir() if folder.is_dir() else ():
        if inside.name != MARK:
            shutil.rmtree(inside, ignore_errors=True)
    os.close(lock)  # Windows removes no file that is open
    shutil.rmtree(folder, ignore_errors=True)
