# SPDX-License-Identifier: Apache-2.0
"""Compare the tensors of a checkpoint with its `weights_hash`.

The checksums of the files do not suffice: they may have been rewritten along with altered files.

One pass over the weights, with one tensor in memory at a time. The hash does not cover tensors that did not evolve,
such as the embeddings in a checkpoint of `lowrank`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evoalign import spaces
from evoalign.config import Config, reading
from evoalign.engines import weights_hash
from evoalign.engines.hash import tensor_sum, weights_hash_of_sums
from evoalign.engines.specs import specs_of_config
from evoalign.errors import CheckpointError, EvoalignError, ModelError
from evoalign.models.files import load_whole
from evoalign.models.origin import elsewhere
from evoalign.models.tensors import tensors_of
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.checkpoint import ADAPTER, MEAN, PEFT_PREFIX, RECORD, Mark
from evoalign.rundir.own import read_own
from evoalign.setup import layout_of
from evoalign.spaces.lora import factors_of

Row = tuple[str, tuple[int, ...], int]
MODEL = "model*.safetensors"
MEMBER = "member.json"
"""File in the export of a member, next to the journal: the member and its weights_hash."""


def check(folder: Path, mark: Mark, config: Config | None) -> None:
    """Raise CheckpointError if a verified checkpoint does not hold the weights of its hash.

    `config` names the space of the run, which determines the evolved tensors. None: the space is unknown or
    user-defined code; a full model of which only a part evolved then passes unless it has a mean file.
    """
    mean, plain = _sums(folder.glob(MEAN)), sorted(folder.glob(MODEL))
    if mean and (folder / ADAPTER).is_file():
        right = weights_hash_of_sums(mean) == mark.weights_hash
        _check_factors(folder, config)
    elif (folder / ADAPTER).is_file():
        right = mark.weights_hash in hashes_of_adapter(folder)
    elif mean:
        right = weights_hash_of_sums(mean) == mark.weights_hash
        _check_rounded(folder, plain)
    else:
        right = _is_checkpoint_of(folder, _sums(plain), mark, config)
    if not right:
        raise CheckpointError(
            f"{folder} does not hold the weights of its weights_hash {mark.weights_hash[:12]}: they were altered after "
            "they were saved; put it back from a copy, or use another checkpoint"
        )


def without_code(folder: Path, mark: Mark, config: Config | None) -> Mark:
    """Run `check` without importing code that the config names, and return the mark. Raises CheckpointError."""
    check(folder, mark, None if config is None or config.space.names_code else config)
    return mark


def check_folder(folder: Path) -> None:
    """Run `check` on a checkpoint with its record, or on an exported adapter with its journal."""
    if (folder / RECORD).is_file():
        made = folder.parent.parent / "config.yaml"
        own = read_own(made.parent) if made.is_file() else None
        without_code(folder, checkpoint.verify(folder), own)
    elif (folder / "run" / "journal.jsonl").is_file() and (folder / ADAPTER).is_file():
        log = journal.read(folder / "run" / "journal.jsonl").whole()
        known = {log.header.weights_hash, *(g.weights_hash for g in log.generations), _member_hash(folder)}
        mean = _sums(folder.glob(MEAN))
        if mean:
            own = read_own(folder / "run")
            _check_factors(folder, None if own.space.names_code else own)
        if not known & ({weights_hash_of_sums(mean)} if mean else hashes_of_adapter(folder)):
            raise CheckpointError(f"{folder} does not hold the weights of any generation of {log.path}; export it anew")


def _member_hash(folder: Path) -> str | None:
    """Return the weights_hash of an exported member; None for an exported mean. Raises DataError."""
    try:
        return str(reading.read_object(folder / "run" / MEMBER).get("weights_hash"))
    except reading.MissingError:
        return None


def hashes_of_adapter(folder: Path) -> set[str]:
    """Return the `weights_hash` of a PEFT adapter under the tensor names of ES and under those of GRPO."""
    rows = _sums([folder / ADAPTER])
    plain = ((name.removeprefix(PEFT_PREFIX), shape, total) for name, shape, total in rows)
    live = ((re.sub(r"\.(lora_[AB])\.", r".\1.default.", name), shape, total) for name, shape, total in rows)
    return {weights_hash_of_sums(plain), weights_hash_of_sums(live)}


def _is_checkpoint_of(folder: Path, rows: Sequence[Row], mark: Mark, config: Config | None) -> bool:
    """Return whether all tensors of a checkpoint, the evolved ones, or the loaded model have the mark's hash."""
    if config is None or weights_hash_of_sums(rows) == mark.weights_hash:
        return True
    here = config.model_copy(update={"model": elsewhere(config.model, str(folder))})
    specs = specs_of_config(here)
    try:
        layout = layout_of(spaces.create(config), specs, torch.float32)
        evolving = {t.name for t in (*layout.tensors, *layout.frozen)}
    except EvoalignError:  # the space section of a GRPO run is not validated
        evolving = set[str]()
    if evolving and weights_hash_of_sums(row for row in rows if row[0] in evolving) == mark.weights_hash:
        return True
    if {spec.name for spec in specs} == {name for name, _, _ in rows}:
        return False
    try:
        model = load_whole(str(folder), None, "auto", str(folder))
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    return weights_hash(tensors_of(model).items()) == mark.weights_hash  # its files use other tensor names


def _check_factors(folder: Path, config: Config | None) -> None:
    """Raise CheckpointError if an adapter's factors are not those of the mean of the same checkpoint."""
    if config is None:
        raise CheckpointError(f"{folder}: only the code of its space could check its factors; name the run's config")
    space = spaces.create(config)
    layout = layout_of(space, specs_of_config(config), torch.float32)
    found, mean = checkpoint.load_adapter(folder), checkpoint.mean_of(folder)
    wanted = dict(factors_of(space, layout, mean.items()))
    if found.keys() != wanted.keys() or not all(torch.equal(found[name], wanted[name]) for name in wanted):
        raise CheckpointError(f"{folder / ADAPTER} does not hold the factors of the mean of {MEAN.replace('*', '…')}")


def _check_rounded(folder: Path, plain: Iterable[Path]) -> None:
    """Raise CheckpointError if the served weights are not the rounded float32 mean of the same checkpoint."""
    mean = {name: (file, tensor) for file in folder.glob(MEAN) for name, tensor in _lazily(file).items()}
    for file in plain:
        for name, served in _lazily(file).items():
            if name in mean and not torch.equal(found := served(), mean[name][1]().to(found.dtype)):
                raise CheckpointError(f"{file} does not hold the mean of {mean[name][0].name}: {name} differs")


def _sums(files: Iterable[Path]) -> list[Row]:
    lazy = (item for file in sorted(files) for item in _lazily(file).items())
    return [(name, tuple((tensor := read()).shape), tensor_sum(tensor)) for name, read in lazy]


def _lazily(file: Path) -> Mapping[str, Callable[[], torch.Tensor]]:
    """Return a function per tensor of a file that reads it. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(file, framework="pt")
        return {name: lambda name=name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} does not load: {error}") from error
