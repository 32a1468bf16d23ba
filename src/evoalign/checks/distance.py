# SPDX-License-Identifier: Apache-2.0
"""The change of a model's effective weights from its base, tensor by tensor, and its L2 norm.

A tensor of a checkpoint, or of a model in memory, is compared with the same tensor in the base's safetensors. Both are
read a block of rows at a time. The base is rounded to the served dtype, so that no change is exactly 0. A quantised
base is unpacked a tensor at a time. The change of an adapter is scaling * B A, and is kept as these factors. Names are
those of checkpoints, with the matrices of each expert on their own, whether or not the files fuse them. Sums are
float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from evoalign.config import Config, ModelConfig
from evoalign.config.reading import read_object
from evoalign.engines.specs import specs_of_config
from evoalign.errors import DataError, ModelError
from evoalign.models import unpack
from evoalign.models.adapters import ADAPTER_CONFIG, MERGE_FIRST, MOVES_BASE, weights_of
from evoalign.models.files import refuse_pickles, weight_files
from evoalign.models.forms import FULL_PRECISION, Quantised
from evoalign.models.origin import model_path
from evoalign.models.quantised import quantised_of
from evoalign.models.tensors import Files, tensors_of
from evoalign.rundir import checkpoint
from evoalign.setup import Served
from evoalign.types import MEAN, MEAN_PLAN, TensorSpec

BLOCK = 1 << 16
"""Numbers that are read and summed in float64 at a time. They fit a processor's cache, which is ten times as fast as
blocks of millions (studies/similarity.py)."""
READERS = 4
"""Threads that read the base model at once, a tensor each."""
PLAIN = {
    "use_dora": False, "alpha_pattern": {}, "rank_pattern": {}, "modules_to_save": None, "bias": "none",
    "target_parameters": None, "layer_replication": None, "trainable_token_indices": None, "lora_bias": False,
}  # fmt: skip
"""PEFT settings of an adapter that only adds (alpha / r) B A."""
Rows: TypeAlias = Callable[[slice], torch.Tensor]
"""Function that reads rows of a tensor [rows, ...]; a scalar is one row."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The change of one tensor: `new` minus `base`."""

    shape: tuple[int, ...]
    new: Rows
    base: Rows

    def rows(self, at: slice) -> torch.Tensor:
        """Return rows of the change, float64 [rows, ...]."""
        new = self.new(at).detach().double()
        return new - self.base(at).to(new.device).double()

    def square(self) -> float:
        """Return the squared L2 norm."""
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
        """Return rows of the change, float64 [rows, in]."""
        return (self.b[at].detach().double() @ self.a.detach().double()) * self.scaling

    def square(self) -> float:
        """Return the squared L2 norm, from two R x R Gram matrices: |B A|^2 = sum of (B^T B) * (A A^T)."""
        a, b = self.a.detach().double(), self.b.detach().double()
        return max(0.0, float(((a @ a.T) * (b.T @ b)).sum())) * self.scaling**2


Change: TypeAlias = Difference | Product


def blocks(shape: tuple[int, ...], numbers: int | None = None) -> Iterator[slice]:
    """Yield slices of rows with at most `numbers` numbers (None: BLOCK), or one row."""
    rows = shape[0] if shape else 1
    step = max(1, (numbers or BLOCK) * rows // max(1, math.prod(shape)))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@contextmanager
def one_thread() -> Generator[None]:
    """Use one torch thread: on small blocks, threads mostly wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def difference(new: torch.Tensor, base: torch.Tensor) -> Difference:
    """Return the difference of two tensors in memory, of one shape."""
    return Difference(tuple(new.shape), _rows_of(new), _rows_of(base))


def _rows_of(tensor: torch.Tensor) -> Rows:
    return tensor.reshape(tensor.shape or (1,)).__getitem__


class Base:
    """The base model's parameters in its files; `dtype` is the served dtype, if known.

    `specs` has all parameters by name, tied ones once. Raises ModelError if the files do not match the config's model.
    """

    def __init__(self, config: Config, dtype: torch.dtype | None = None) -> None:
        self.name, self._dtype = config.model.name, dtype
        self.specs = {spec.name: spec for spec in specs_of_config(config)}
        path = model_path(config.model)
        refuse_pickles(path, config.model.revision)
        files = weight_files(path, config.model.revision, self.name)
        packed = read_as_numbers(config.model)
        if packed is None:
            self.files = Files(files)
        else:
            self.files = _Unpacked(self.name, files, packed, dtype or torch.float32, self.specs)
        for name, spec in self.specs.items():
            if self.files.shape(name) != spec.shape:
                raise ModelError(f"the files of model {self.name} have no {name} of shape {list(spec.shape)}")

    def rows(self, name: str, dtype: torch.dtype | None = None) -> Rows:
        """Return a reader of a tensor, rounded to `dtype`, or to the served dtype if known."""
        wanted = dtype or self._dtype

        def read(at: slice) -> torch.Tensor:
            found = self.files.rows(name, at)
            return found if wanted is None else found.to(wanted)

        return read

    def served(self, name: str) -> torch.Tensor:
        """Return a whole tensor in its shape."""
        return self.rows(name)(slice(None)).reshape(self.specs[name].shape)

    def square(self, name: str) -> float:
        """Return the squared L2 norm of a tensor."""
        read = self.rows(name)
        with one_thread():
            return math.fsum(float(read(at).double().square().sum()) for at in blocks(self.specs[name].shape))

    def difference(self, name: str, new: torch.Tensor, dtype: torch.dtype | None = None) -> Difference:
        """Return the change of a tensor in memory; `dtype` is what the base is rounded to. Raises as `check` does."""
        self.check(name, tuple(new.shape))
        return Difference(tuple(new.shape), _rows_of(new), self.rows(name, dtype))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError if the model has no tensor of this name and shape."""
        if name not in self.specs:
            raise ModelError(f"model {self.name} has no {name} of shape {list(shape)}")
        if self.specs[name].shape != shape:
            own = list(self.specs[name].shape)
            raise ModelError(f"{name} of model {self.name} has shape {own}, not {list(shape)}")


def read_as_numbers(config: ModelConfig) -> Quantised | None:
    """Return how a model is quantised, or None. Raises ModelError for a form that is not read as numbers."""
    packed = quantised_of(config)
    stays = packed is not None and packed.form == "bitsandbytes" and packed.bits == 4
    if packed is not None and (stays or packed.form not in unpack.FORMS):
        raise ModelError(
            f"model {config.name} is quantised ({packed.words}), and its weights are not read as numbers here; use a "
            f"checkpoint of it in AWQ, GPTQ or FP8, or {FULL_PRECISION}"
        )
    return packed


class _Unpacked(Mapping[str, torch.Tensor]):
    """The tensors of a quantised model's files, each unpacked when it is read. A thread keeps its last one.

    Raises ModelError.
    """

    def __init__(
        self, name: str, files: Iterable[Path], packed: Quantised, dtype: torch.dtype, specs: Mapping[str, TensorSpec]
    ) -> None:
        self._name, self._specs = name, specs
        self._tensors = unpack.unpacked(name, files, packed, dtype)
        self._last = threading.local()

    def __getitem__(self, name: str) -> torch.Tensor:
        if getattr(self._last, "name", "") != name:
            found: torch.Tensor = self._tensors[name][:]
            if found.shape != self._specs[name].shape:
                raise ModelError(f"model {self._name}: its {name} is unpacked to shape {list(found.shape)}")
            self._last.name, self._last.tensor = name, found
        return self._last.tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that a tensor has to have; None where it is missing."""
        return self._specs[name].shape if name in self._tensors else None

    def rows(self, name: str, at: slice) -> torch.Tensor:
        """Return rows of a tensor."""
        return self[name][at]


def changes_of(policy: nn.Module | str | Path, base: Base) -> Mapping[str, Change]:
    """Return changes by name, of a model in memory, a folder with a PEFT adapter, or a Hugging Face checkpoint.

    Each is read on access. A model has changes of all tensors, an adapter of its target modules. Raises ModelError for
    a tensor that is missing, has another shape than the base's, or that the base does not have.
    """
    if not isinstance(policy, nn.Module):
        folder = Path(policy)
        if (folder / ADAPTER_CONFIG).is_file():
            return _Adapter(_settings(folder), Files([weights_of(folder)], checkpoint.PEFT_PREFIX), base, str(folder))
        return _Checkpoint(folder, base)
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(policy, PeftModel):
        return {name: base.difference(name, tensor, tensor.dtype) for name, tensor in tensors_of(policy).items()}
    name = str(policy.active_adapter)
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(policy, adapter_name=name, save_embedding_layers=False)
    own = {key.removeprefix(checkpoint.PEFT_PREFIX): tensor for key, tensor in state.items()}
    return _Adapter(policy.peft_config[name].to_dict(), own, base, "the adapter in memory")


class _Adapter(Mapping[str, Change]):
    """Changes of a LoRA adapter in PEFT's format. Raises ModelError if it does more than add (alpha / r) B A."""

    def __init__(self, settings: Mapping[str, Any], state: Mapping[str, torch.Tensor], base: Base, where: str) -> None:
        odd = [name for name, plain in PLAIN.items() if settings.get(name) and settings[name] != plain]
        if str(settings.get("init_lora_weights")).lower().startswith(MOVES_BASE):
            odd.append(f"init_lora_weights {settings['init_lora_weights']}")
        if str(getattr(settings["peft_type"], "value", settings["peft_type"])) != "LORA" or odd:
            what = ", ".join(odd) or settings["peft_type"]
            raise ModelError(f"the adapter is more than plain LoRA ({what}); {MERGE_FIRST}")
        rank, alpha = settings["r"], settings["lora_alpha"]
        self._scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        self._state, self._base, self._where = state, base, where
        self._transposed = bool(settings.get("fan_in_fan_out"))
        odd = [name for name in state if ".lora_A." not in name and ".lora_B." not in name]
        if odd:
            raise ModelError(f"the adapter is more than plain LoRA ({odd[0]}); {MERGE_FIRST}")
        self._modules = {f"{m}.weight": m for m in dict.fromkeys(name.partition(".lora_")[0] for name in state)}
        for name in self:  # refuse modules that the base does not have, which callers would skip
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


def _settings(folder: Path) -> Mapping[str, Any]:
    """Read adapter_config.json. Raises ModelError."""
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
    """Changes of a Hugging Face checkpoint; of a rounded one, evoalign's float32 mean in the same folder is used."""

    def __init__(self, folder: Path, base: Base) -> None:
        self._base = base
        self._saved = Files(sorted(folder.glob("model*.safetensors")))
        self._mean = Files(sorted(folder.glob(checkpoint.MEAN)))
        for name, spec in base.specs.items():
            for shape in (self._saved.shape(name), *([self._mean.shape(name)] if name in self._mean else [])):
                if shape is None:
                    raise ModelError(f"{folder} is no checkpoint of model {base.name}: it has no {name}")
                if shape != spec.shape:
                    raise ModelError(
                        f"{folder} is no checkpoint of model {base.name}: its {name} has shape {list(shape)}, not "
                        f"{list(spec.shape)}"
                    )
        known = {self._saved.listed(name) for name in base.specs}
        more = [name for name in self._saved if name not in known and name not in base.files]
        if more:
            raise ModelError(f"{folder} is no checkpoint of model {base.name}, which has no {more[0]}")

    def __getitem__(self, name: str) -> Change:
        new = self._mean if name in self._mean else self._saved
        old = self._base.rows(name, self._saved.dtype(name))
        return Difference(self._base.specs[name].shape, lambda at: new.rows(name, at), old)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.specs)

    def __len__(self) -> int:
        return len(self._base.specs)


@dataclass(frozen=True, slots=True)
class Distance:
    """L2 norm of the change of the effective weights; `relative` to the norm of all parameters of the base model."""

    l2: float
    relative: float


def distance_of_mean(served: Served) -> Distance:
    """Return the distance of an engine's mean, in float32. Raises ModelError if the space does not allow it."""
    base = Base(served.config, served.layout.torch_dtype)
    if served.space.evolves_model:
        return _distance((base.difference(name, tensor).square() for name, tensor in served.engine.state()), base)
    if served.space.carrier != "adapter":
        raise ModelError(f"space {served.space.name} evolves tensors that are neither the model's nor an adapter")
    squares, state, layout = list[float](), dict(served.engine.state()), replace(served.layout, dtype="float32")
    for module in layout.modules:
        adapter = served.space.adapter(layout, module, state.__getitem__, MEAN_PLAN, (MEAN,))
        if adapter is None:
            raise ModelError(f"space {served.space.name} has no adapter of its mean for {module}")
        squares.append(Product(adapter.a[0], adapter.b[0], adapter.scaling).square())
        if adapter.bias is not None:
            squares.append(float(adapter.bias.double().square().sum()) * adapter.scaling**2)
    return _distance(squares, base)


def distance_of(policy: nn.Module | str | Path, config: Config) -> Distance:
    """Return the distance of a model in memory or a saved one (see `changes_of`) from the base model of `config`.

    Raises ModelError as `changes_of` does.
    """
    base = Base(config)
    return _distance((change.square() for change in changes_of(policy, base).values()), base)


def start_of(served: Served) -> Mapping[str, torch.Tensor]:
    """Return the mean before training, float32 on the CPU by name, as `Engine.load` takes it.

    The model's own tensors are read from its files on access, and rounded to the served dtype. Raises ModelError.
    """
    layout, space = served.layout, served.space
    if space.evolves_model:
        return _Start(Base(served.config, layout.torch_dtype), [t.name for t in (*layout.tensors, *layout.frozen)])
    return {t.name: space.start(layout, t.name, "cpu") for t in (*layout.tensors, *layout.frozen)}


def moved(served: Served, start: Mapping[str, torch.Tensor]) -> float:
    """Return the L2 norm of the change of all evolved numbers: the factors of an adapter, not their product."""
    return math.sqrt(math.fsum(difference(tensor, start[name]).square() for name, tensor in served.engine.state()))


class _Start(Mapping[str, torch.Tensor]):
    """Tensors of the base model, in float32."""

    def __init__(self, base: Base, names: Sequence[str]) -> None:
        self._base, self._names = base, dict.fromkeys(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._base.served(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _distance(squares: Iterable[float], base: Base) -> Distance:
    l2 = math.sqrt(math.fsum(squares))
    with one_thread(), ThreadPoolExecutor(READERS) as pool:
        norm = math.sqrt(math.fsum(pool.map(base.square, base.specs)))
    if not math.isfinite(l2) or not norm:
        raise ModelError("the weights are not finite numbers")
    return Distance(l2, l2 / norm)
