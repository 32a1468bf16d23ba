# SPDX-License-Identifier: Apache-2.0
"""Save, verify and load the mean of a run, as safetensors and JSON.

A saved mean is a plain PEFT adapter (`lora`, float32) or a Hugging Face checkpoint in the served dtype (`lowrank`,
`full`), which any library loads, with these files added:

    evoalign.json            which generation, its weights_hash, its place in the journal, SHA-256 of each file
    mean-NNNNN.safetensors   the mean in float32, where the checkpoint has rounded it
    optimizer.safetensors    state of the optimizer
    settings.json            the likeliest option of each of `task.settings`, to be used with these weights
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from evoalign.config import FORMAT_VERSION, Config
from evoalign.config.joint import likeliest
from evoalign.config.reading import check_regular, parse, read_bytes
from evoalign.errors import CheckpointError, DataError, ModelError
from evoalign.optimizer import cma
from evoalign.rundir.files import digest_of, filled
from evoalign.types import Layout

PEFT_PREFIX = "base_model.model."
ADAPTER = "adapter_model.safetensors"
RECORD = "evoalign.json"
OPTIMIZER = "optimizer.safetensors"
SETTINGS = "settings.json"
MEAN = "mean-*.safetensors"
SHARD_BYTES = 10**9
"""Bytes of one file of the float32 mean: several files are hashed at the same time."""
THREADS = 8
MOST_BYTES = 2**44
RECORD_BYTES = 2**20
NO_JOURNAL = "0" * 64
"""Used as a journal line's hash for a run of GRPO, which has no journal."""
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PlainName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=255)]
"""Name of a file directly in the folder."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
_NOT_THE_RUN = """# Not the result of a run

These weights are a counterfactual ({0.counterfactual}) of a run of Evolution Strategies: its noise, and other
coefficients, replayed with evoalign for {0.generation} generations. weights_hash {0.weights_hash}
"""
State = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class Mark:
    """Identifies a saved mean within a run. `journal` is the hash of the journal line that sealed it.

    `validation` is its reward on the validation split, if evaluated, by which `checkpoint.keep_best` compares means.
    `reward` is that on the test split, which earlier releases compared; this one leaves it None. `objective` is the
    state of the objective and of `task.settings` after that generation. `counterfactual` names the changed coefficients
    of a mean that is not the run's own. `validation`, `objective` and `counterfactual` are written only where they are
    set.
    """

    generation: Annotated[int, Field(ge=0, lt=2**32)]
    weights_hash: Hash
    journal: Hash
    reward: Finite | None = None
    objective: Mapping[str, Finite] = field(default_factory=dict[str, float])
    counterfactual: Annotated[str, Field(min_length=1, max_length=99)] | None = None
    validation: Finite | None = None


class _Record(BaseModel):
    """The fields of evoalign.json besides the mark. They may come from an untrusted source."""

    model_config = ConfigDict(strict=True)

    format_version: Literal[1]
    files: dict[PlainName, Hash]
    hash: Hash


def save(
    folder: Path,
    mark: Mark,
    config: Config,
    layout: Layout,
    base: str,
    state: Callable[[], State],
    optimizer: State = (),
    *,
    whole: Callable[[Path, State], None] | None = None,
    factors: Callable[[State], State] | None = None,
    replace: bool = True,
) -> None:
    """Save the mean that `state` yields. `base` is the folder or hub name of the model it started from.

    `whole` writes that model with the evolved tensors in place, and its tokenizer; None saves an adapter, whose factors
    `factors` computes from the mean; None: the mean consists of them. With `replace`, an existing folder is replaced;
    otherwise it has to be empty.
    """
    from safetensors import safe_open

    with filled(folder, replace=replace) as temporary:
        if whole is None:
            _write_adapter(temporary, config, layout, base, state() if factors is None else factors(state()))
            if factors is not None:
                _write_mean(temporary, state())
        else:
            whole(temporary, state())
            names: set[str] = set()
            for file in temporary.glob("model*.safetensors"):
                with safe_open(file, framework="pt") as opened:
                    names.update(opened.keys())
            if layout.dtype != "float32" or not all(t.name in names for t in layout.tensors):
                _write_mean(temporary, state())  # the checkpoint does not hold the float32 mean by its evolved names
        if mark.counterfactual:
            (temporary / "README.md").write_text(_NOT_THE_RUN.format(mark), encoding="utf-8")
        if config.task.settings:
            chosen = likeliest(config.task.settings, mark.objective)
            (temporary / SETTINGS).write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")
        slots = dict(optimizer)
        if slots:
            _save_file(slots, temporary / OPTIMIZER)
        seal(temporary, mark)


def verify(folder: Path) -> Mark:
    """Return the mark of a saved mean. Raises CheckpointError naming a file that is missing or was altered."""
    mark, files = _record_of(folder)
    for found in folder.glob("*.safetensors"):
        if found.name not in files:
            raise CheckpointError(f"{found} does not belong there")
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing")
    for name, digest in _digests([folder / name for name in files]).items():
        if digest != files[name]:
            raise CheckpointError(f"{folder / name} was altered")
    return mark


def verify_policy(folder: Path) -> Mark:
    """Return the mark of a saved policy of GRPO. Raises CheckpointError where it is damaged, or from a run of ES."""
    mark = verify(folder)
    if mark.journal != NO_JOURNAL:
        raise CheckpointError(f"{folder} is not from a run of GRPO: it belongs to a journal")
    return mark


def holds(folder: Path, mark: Mark) -> bool:
    """Return whether this mean is saved there undamaged; the `reward` of an earlier release is ignored."""
    try:
        return replace(verify(folder), reward=mark.reward) == mark
    except CheckpointError:
        return False


def mark_of(folder: Path) -> Mark | None:
    """Return the mark of a saved mean without verifying its files; None where evoalign.json cannot be read."""
    try:
        return _record_of(folder)[0]
    except CheckpointError:
        return None


def _record_of(folder: Path) -> tuple[Mark, dict[str, str]]:
    """Return the mark in evoalign.json, whose hash is checked, and SHA-256 by file. Raises CheckpointError."""
    file = folder / RECORD
    try:
        raw = read_bytes(file, RECORD_BYTES)
        found: Any = parse(raw, str(file))
        files = _Record.model_validate(found).files
        mark = Mark(**{name: value for name, value in found.items() if name not in _Record.model_fields})
    except (DataError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is missing or damaged ({type(error).__name__})") from error
    if raw != _record_text({name: value for name, value in found.items() if name != "hash"}).encode():
        raise CheckpointError(f"{file} was altered, or was written by another release")
    return mark, files


def load(folder: Path, layout: Layout) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the mean, in float32, and the optimizer's state, by name. Call `verify` first. Raises CheckpointError."""
    files = sorted(folder.glob(MEAN)) or sorted(folder.glob("*model*.safetensors"))
    wanted = [t.name for t in (*layout.tensors, *layout.frozen)]
    state: dict[str, torch.Tensor] = {}
    for file in files:
        named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in _load_file(file).items()}
        state.update({name: named[name] for name in wanted if name in named})
    missing = [name for name in wanted if name not in state]
    if missing:
        raise CheckpointError(f"{folder} has no {missing[0]}; was it saved by a run with other settings?")
    slots = _load_file(folder / OPTIMIZER) if (folder / OPTIMIZER).is_file() else {}
    shapes = {t.name: t.shape for t in (*layout.tensors, *layout.frozen)}
    for name, tensor in (*state.items(), *slots.items()):
        slot, _, module = name.rpartition(":")  # the optimizer's are named `slot:tensor`
        shape = () if slot == "count" else shapes.get(module)
        if module == cma.NAME:
            shape = cma.shape_of(slot, layout.parameters)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{folder}: {name!r} has shape {tuple(tensor.shape)}, not {shape}")
    return state, slots


def load_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a PEFT adapter by evoalign's names. Raises ModelError naming a file that does not load."""
    try:
        return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in _load_file(folder / ADAPTER).items()}
    except CheckpointError as error:
        raise ModelError(str(error)) from error


def mean_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the float32 mean saved with a rounded checkpoint, by name; empty where there is none."""
    return {name: tensor for file in sorted(folder.glob(MEAN)) for name, tensor in _load_file(file).items()}


def _write_adapter(folder: Path, config: Config, layout: Layout, base: str, state: State) -> None:
    """Write a PEFT adapter in float32, as `PeftModel.from_pretrained` loads it."""
    from peft import LoraConfig, TaskType

    modules = [m.removesuffix(".weight") for m in layout.modules]
    tensors = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in state}
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        inference_mode=True,
        r=layout.rank,
        lora_alpha=layout.scaling * layout.rank,  # pyright: ignore[reportArgumentType]  # PEFT accepts a float
        target_modules=sorted({m.rsplit(".", 1)[-1] for m in modules}),
        lora_bias=any(name.endswith(".lora_B.bias") for name in tensors),
        layers_to_transform=config.lora.target_layers,
        base_model_name_or_path=base,
        revision=config.model.revision,
    )
    peft_config.save_pretrained(str(folder))
    _save_file(tensors, folder / ADAPTER)


def _write_mean(folder: Path, state: State) -> None:
    """Write float32 tensors, in files of at most SHARD_BYTES or one tensor."""
    shard: dict[str, torch.Tensor] = {}
    count = size = 0
    for name, tensor in state:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            _save_file(shard, folder / MEAN.replace("*", f"{count:05d}"))
            shard, size, count = {}, 0, count + 1
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    _save_file(shard, folder / MEAN.replace("*", f"{count:05d}"))


def seal(folder: Path, mark: Mark) -> None:
    """Write evoalign.json, with the SHA-256 of all other files, as the last file of a folder."""
    files = _digests(sorted(folder.iterdir()))
    record = {"format_version": FORMAT_VERSION, **asdict(mark), "files": files}
    for name in ("objective", "counterfactual", "validation"):
        if record[name] in (None, {}):
            del record[name]
    (folder / RECORD).write_text(_record_text(record), encoding="utf-8")


def _digests(files: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by name, computed in threads. Raises DataError."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip((file.name for file in files), pool.map(digest_of, files), strict=True))


def _record_text(record: Mapping[str, Any]) -> str:
    """Return the canonical text of a record, with its own hash."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "hash": digest}, indent=2, sort_keys=True) + "\n"


def _save_file(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata={"format": "pt"})


def _load_file(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        check_regular(file, MOST_BYTES)  # opening a pipe would wait for its other end
        return load_file(file)
    except (DataError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} does not load: {error}") from error
