# SPDX-License-Identifier: Apache-2.0
"""The change of a model's effective weights from its base model, tensor by tensor, in blocks of rows.

A tensor of a checkpoint, or of a live model, is compared with the same tensor in the base's safetensors. Both are read
a block of rows at a time, so that no more than a block is held. The base counts as it is served, rounded to that dtype,
so that no change is exactly 0. Of an adapter the change is scaling * B A, and stays these factors. Names are those of
checkpoints, each expert's matrices by themselves, whether or not the files have them fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from evoalign.config import Config
from evoalign.config.reading import read_object
from evoalign.engines.specs import specs_of_config
from evoalign.errors import DataError, ModelError
from evoalign.models.adapters import ADAPTER_CONFIG, MERGE_FIRST, MOVES_BASE, weights_of
from evoalign.models.files import refuse_pickles, weight_files
from evoalign.models.origin import model_path
from evoalign.models.tensors import Files, tensors_of
from evoalign.rundir import checkpoint

BLOCK = 1 << 16
"""Numbers that are read and summed in float64 at a time: so few stay in a processor's cache, which makes them ten times
as fast as blocks of millions (benchmarks/similarity.py)."""
PLAIN = {
    "use_dora": False, "alpha_pattern": {}, "rank_pattern": {}, "modules_to_save": None, "bias": "none",
    "target_parameters": None, "layer_replication": None, "trainable_token_indices": None, "lora_bias": False,
}  # fmt: skip
"""What PEFT may say of an adapter that is nothing but (alpha / r) B A."""
Rows: TypeAlias = Callable[[slice], torch.Tensor]
"""Reads rows of a tensor [rows, ...]; a number alone is one row."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The change of one tensor: `new` less `base`."""

    shape: tuple[int, ...]
    new: Rows
    base: Rows

    def rows(self, at: slice) -> torch.Tensor:
        """Those rows of the change, float64 [rows, ...]."""
        new = self.new(at).detach().double()
        return new - self.base(at).to(new.device).double()

    def square(self) -> float:
        """Squared L2 norm."""
        with one_thread():
            return math.fsum(float(self.rows(at).square().sum()) for at in blocks(self.shape))


@dataclass(frozen=True, slots=True)
class Product:
    """The change of one matrix by an adapter: scaling * B A of `a` [R, in] and `b` [out, R]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]"""
        return (self.b.shape[0], self.a.shape[1])

    def rows(self, at: slice) -> torch.Tensor:
        """Those rows of the change, float64 [rows, in]."""
        return (self.b[at].detach().double() @ self.a.detach().double()) * self.scaling

    def square(self) -> float:
        """Squared L2 norm, by two R x R Gram matrices: |B A|^2 = sum of (B^T B) * (A A^T)."""
        a, b = self.a.detach().double(), self.b.detach().double()
        return max(0.0, float(((a @ a.T) * (b.T @ b)).sum())) * self.scaling**2


Change: TypeAlias = Difference | Product


def blocks(shape: tuple[int, ...], numbers: int | None = None) -> Iterator[slice]:
    """Rows of a tensor, at most so many numbers (None: BLOCK) at a time, or one row."""
    rows = shape[0] if shape else 1
    step = max(1, (numbers or BLOCK) * rows // max(1, math.prod(shape)))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@contextmanager
def one_thread() -> Generator[None]:
    """No threads of torch's: on blocks as small as these they take turns at waiting for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def difference(new: torch.Tensor, base: torch.Tensor) -> Difference:
    """Of two tensors in memory, of one shape."""
    return Difference(tuple(new.shape), _rows_of(new), _rows_of(base))


def _rows_of(tensor: torch.Tensor) -> Rows:
    return tensor.reshape(tensor.shape or (1,)).__getitem__


class Base:
    """The base model's parameters in its files; `dtype` is what they are served in, if known.

    `specs` has them all by name, tied ones once. Raises ModelError where the files are not those of the config's model.
    """

    def __init__(self, config: Config, dtype: torch.dtype | None = None) -> None:
        self.name, self._dtype = config.model.name, dtype
        self.specs = {spec.name: spec for spec in specs_of_config(config)}
        path = model_path(config.model)
        refuse_pickles(path, config.model.revision)
        self.files = Files(weight_files(path, config.model.revision, self.name))
        for name, spec in self.specs.items():
            if self.files.shape(name) != spec.shape:
                raise ModelError(f"the files of model {self.name} have no {name} of shape {list(spec.shape)}")

    def rows(self, name: str, dtype: torch.dtype | None = None) -> Rows:
        """A tensor rounded to `dtype`, or to what all are served in, where that is known."""
        wanted = dtype or self._dtype

        def read(at: slice) -> torch.Tensor:
            found = self.files.rows(name, at)
            return found if wanted is None else found.to(wanted)

        return read

    def served(self, name: str) -> torch.Tensor:
        """All of a tensor, in its shape."""
        return self.rows(name)(slice(None)).reshape(self.specs[name].shape)

    def square(self, name: str) -> float:
        """Squared L2 norm of a tensor."""
        read = self.rows(name)
        with one_thread():
            return math.fsum(float(read(at).double().square().sum()) for at in blocks(self.specs[name].shape))

    def difference(self, name: str, new: torch.Tensor, dtype: torch.dtype | None = None) -> Difference:
        """Of a tensor in memory. `dtype` is what the base is rounded to. Raises ModelError, as `check` does."""
        self.check(name, tuple(new.shape))
        return Difference(tuple(new.shape), _rows_of(new), self.rows(name, dtype))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError where the model has no tensor of this name and shape."""
        if name not in self.specs:
            raise ModelError(f"model {self.name} has no {name} of shape {list(shape)}")
        if self.specs[name].shape != shape:
            own = list(self.specs[name].shape)
            raise ModelError(f"model {self.name} has no {name} of shape {list(shape)}: its own is {own}")


def changes_of(policy: nn.Module | str | Path, base: Base) -> Mapping[str, Change]:
    """By name, of a live model, PEFT's too, or of a folder with a PEFT adapter or a Hugging Face checkpoint.

    Each is read when it is asked for; those of a model are all tensors, those of an adapter what it is on. Raises
    ModelError naming a tensor that is missing, has another shape than the base's, or is of no base at all.
    """
    if isinstance(policy, nn.Module):
        return _of_live(policy, base)
    folder = Path(policy)
    if (folder / ADAPTER_CONFIG).is_file():
        return _Adapter(_settings(folder), Files([weights_of(folder)], checkpoint.PEFT_PREFIX), base, str(folder))
    return _Checkpoint(folder, base)


def _of_live(model: nn.Module, base: Base) -> Mapping[str, Change]:
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        return {name: base.difference(name, tensor, tensor.dtype) for name, tensor in tensors_of(model).items()}
    name = str(model.active_adapter)
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    own = {key.removeprefix(checkpoint.PEFT_PREFIX): tensor for key, tensor in state.items()}
    return _Adapter(model.peft_config[name].to_dict(), own, base, "the live adapter")


class _Adapter(Mapping[str, Change]):
    """Of a LoRA adapter in PEFT's form. Raises ModelError where it does more than add (alpha / r) B A."""

    def __init__(self, settings: Mapping[str, Any], state: Mapping[str, torch.Tensor], base: Base, where: str) -> None:
        _check_plain(settings)
        rank, alpha = settings["r"], settings["lora_alpha"]
        self._scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        self._state, self._base, self._where = state, base, where
        self._transposed = bool(settings.get("fan_in_fan_out"))
        odd = [name for name in state if ".lora_A." not in name and ".lora_B." not in name]
        if odd:
            raise ModelError(f"the adapter is more than plain LoRA ({odd[0]}); {MERGE_FIRST}")
        self._modules = {f"{m}.weight": m for m in dict.fromkeys(name.partition(".lora_")[0] for name in state)}
        for name in self:  # one that the base has no place for would otherwise be left out by who asks for the base's
            self[name]

    def __getitem__(self, name: str) -> Change:
        factors = [f"{self._modules[name]}.lora_{factor}.weight" for factor in "AB"]
        for factor in factors:
            if factor not in self._state:
                raise ModelError(f"{self._where} has no {factor}")
        a, b = (self._state[factor] for factor in factors)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ModelError(f"{self._where}: {factors[0]} {list(a.shape)} and its lora_B {list(b.shape)} do not fit")
        spec = self._base.specs.get(name)
        if self._transposed and spec is not None and spec.kind != "linear":  # GPT-2's own layers, which are [in, out]
            a, b = b.T, a.T
        found = Product(a, b, self._scaling)
        self._base.check(name, found.shape)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def _check_plain(settings: Mapping[str, Any]) -> None:
    odd = [name for name, plain in PLAIN.items() if settings.get(name) and settings[name] != plain]
    if str(settings.get("init_lora_weights")).lower().startswith(MOVES_BASE):
        odd.append(f"init_lora_weights {settings['init_lora_weights']}")
    if str(getattr(settings["peft_type"], "value", settings["peft_type"])) != "LORA" or odd:
        what = ", ".join(odd) or settings["peft_type"]
        raise ModelError(f"the adapter is more than plain LoRA ({what}); {MERGE_FIRST}")


def _settings(folder: Path) -> Mapping[str, Any]:
    """adapter_config.json. Raises ModelError."""
    file = folder / ADAPTER_CONFIG
    try:
        found = read_object(file)
        numbers = {"r": int(found["r"]), "lora_alpha": float(found["lora_alpha"])}
        if numbers["r"] < 1:
            raise ValueError("a rank below 1")
        return {**found, **numbers, "peft_type": found["peft_type"]}
    except (DataError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file} is missing or damaged ({type(error).__name__})") from error


class _Checkpoint(Mapping[str, Change]):
    """Of a Hugging Face checkpoint; where it is rounded, evoalign's own float32 mean lies beside it."""

    def __init__(self, folder: Path, base: Base) -> None:
        self._base = base
        self._saved = Files(sorted(folder.glob("model*.safetensors")))
        self._mean = Files(sorted(folder.glob(checkpoint.MEAN)))
        for name, spec in base.specs.items():
            for shape in (self._saved.shape(name), *([self._mean.shape(name)] if name in self._mean else [])):
                if shape is None:
                    raise ModelError(f"{folder} has no {name}: it is no checkpoint of model {base.name}")
                if shape != spec.shape:
                    raise ModelError(
                        f"{folder} has {name} of shape {list(shape)}: it is no checkpoint of model {base.name}, whose "
                        f"own is {list(spec.shape)}"
                    )
        known = {self._saved.listed(name) for name in base.specs}
        more = [name for name in self._saved if name not in known and name not in base.files]
        if more:
            raise ModelError(f"{folder} has a {more[0]}: it is no checkpoint of model {base.name}, which has none")

    def __getitem__(self, name: str) -> Change:
        new = self._mean if name in self._mean else self._saved
        old = self._base.rows(name, self._saved.dtype(name))
        return Difference(self._base.specs[name].shape, lambda at: new.rows(name, at), old)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.specs)

    def __len__(self) -> int:
        return len(self._base.specs)
