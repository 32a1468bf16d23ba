# SPDX-License-Identifier: Apache-2.0
"""How far training moved the weights: the L2 norm of their change from the base model, and its share of the base's.

The change is that of the effective weights. For an adapter it is |scaling * B A|, by two R x R Gram matrices, since
|B A|^2 = sum of (B^T B) * (A A^T): no product of the size of the model is made. Other weights are compared tensor by
tensor with the base's safetensors, read one at a time: nothing but one tensor of the base is held. The base counts as
it is served, rounded to that dtype, so that no change is exactly 0; sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evoalign.config import Config
from evoalign.config.reading import read_object
from evoalign.engines.specs import specs_of_config
from evoalign.errors import DataError, ModelError
from evoalign.models.files import INDEX, MODEL, find, refuse_pickles
from evoalign.models.origin import model_path
from evoalign.rundir import checkpoint
from evoalign.setup import Served
from evoalign.types import MEAN, MEAN_PLAN

BLOCK = 1 << 24
"""Numbers that are summed in float64 at a time."""
PLAIN = {"use_dora": False, "alpha_pattern": {}, "rank_pattern": {}, "modules_to_save": None, "bias": "none"}
"""What PEFT may say of an adapter that is nothing but (alpha / r) B A."""


@dataclass(frozen=True, slots=True)
class Distance:
    """L2 norm of the change of the effective weights; `relative` to that of all the base model's parameters."""

    l2: float
    relative: float


def distance_of_mean(served: Served) -> Distance:
    """Of an engine's mean, in float32. Raises ModelError where it cannot be determined, with the reason."""
    base = _Base(served.config, served.layout.torch_dtype)
    if served.space.evolves_model:
        return base.distance(base.change(name, tensor) for name, tensor in served.engine.state())
    if served.space.carrier != "adapter":
        raise ModelError(f"space {served.space.name} evolves tensors beside the model that are no adapter")
    return base.distance(_adapter_changes(served))


def distance_of(policy: nn.Module | str | Path, config: Config) -> Distance:
    """Of a live model, PEFT's too, or of a saved one: a folder with a PEFT adapter or a Hugging Face checkpoint.

    `config` names the base model. Raises ModelError where it cannot be determined, with the reason.
    """
    base = _Base(config)
    if isinstance(policy, nn.Module):
        return base.distance(_live_changes(policy, base))
    folder = Path(policy)
    if (folder / "adapter_config.json").is_file():
        return base.distance(_peft_changes(_settings(folder), checkpoint.load_adapter(folder)))
    return base.distance(_saved_changes(folder, base))


def product_square(a: torch.Tensor, b: torch.Tensor, scaling: float = 1.0) -> float:
    """|scaling * B A|^2 of A [R, in] and B [out, R], by their Gram matrices in float64."""
    a, b = a.detach().double(), b.detach().double()
    return max(0.0, float(((a @ a.T) * (b.T @ b)).sum())) * scaling**2


def start_of(served: Served) -> Mapping[str, torch.Tensor]:
    """The mean before training, float32 on the CPU by name: what `Engine.load` takes to go back to it.

    Of the model's own tensors each is read from its files when it is asked for, and rounded as it is served. Raises
    ModelError where they cannot be determined, with the reason.
    """
    layout, space = served.layout, served.space
    if space.evolves_model:
        return _Start(_Base(served.config, layout.torch_dtype), [t.name for t in (*layout.tensors, *layout.frozen)])
    return {t.name: space.start(layout, t.name, "cpu") for t in (*layout.tensors, *layout.frozen)}


def moved(served: Served, start: Mapping[str, torch.Tensor]) -> float:
    """L2 norm of the change of all numbers that evolve: of an adapter those of its factors, not of their product."""
    return math.sqrt(math.fsum(_square(tensor, start[name]) for name, tensor in served.engine.state()))


class _Start(Mapping[str, torch.Tensor]):
    """The model's own tensors of these names, in float32."""

    def __init__(self, base: _Base, names: Sequence[str]) -> None:
        self._base, self._names = base, dict.fromkeys(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._base.served(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Base:
    """The base model's parameters in its files, one at a time; `dtype` is what they are served in, if known."""

    def __init__(self, config: Config, dtype: torch.dtype | None = None) -> None:
        self.name, self._dtype = config.model.name, dtype
        self._shapes = {spec.name: spec.shape for spec in specs_of_config(config)}
        path = model_path(config.model)
        refuse_pickles(path, config.model.revision)
        self._tensors = _Files(_files(path, config.model.revision))
        for name, shape in self._shapes.items():
            if self._tensors.shape(self._key(name)) != shape:
                raise ModelError(f"the files of model {self.name} have no {name} of shape {list(shape)}")

    @property
    def names(self) -> Iterable[str]:
        """Of all parameters, tied ones once."""
        return self._shapes

    def change(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> float:
        """Squared L2 norm of a tensor's change. `dtype` is what both are rounded to where they are equal."""
        if self._shapes.get(name) != tuple(tensor.shape):
            raise ModelError(f"model {self.name} has no {name} of shape {list(tensor.shape)}")
        return _square(tensor, self.served(name, dtype))

    def distance(self, changes: Iterable[float]) -> Distance:
        """From the squared norms of all changes."""
        l2 = math.sqrt(math.fsum(changes))
        norm = math.sqrt(math.fsum(_square(self.served(name)) for name in self._shapes))
        if not math.isfinite(l2) or not norm:
            raise ModelError("the weights are not finite numbers")
        return Distance(l2, l2 / norm)

    def served(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor rounded to `dtype`, or to what all are served in, where that is known."""
        tensor, dtype = self._tensors[self._key(name)], dtype or self._dtype
        return tensor if dtype is None else tensor.to(dtype)

    def _key(self, name: str) -> str:
        """The files of some older models leave out the first part of all names."""
        return name if name in self._tensors else name.partition(".")[2]


class _Files(Mapping[str, torch.Tensor]):
    """The tensors of several safetensors files; each is read when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._at: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} does not load: {error}") from error
            self._at.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._at[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Without reading it; None where it is not there."""
        return tuple(self._at[name].get_slice(name).get_shape()) if name in self._at else None


def _files(path: str, revision: str | None) -> list[Path]:
    """The safetensors of a model, in a folder or in the hub's cache. Raises ModelError."""
    single, index = find(path, MODEL, revision), find(path, INDEX, revision)
    if single is not None:
        return [single]
    try:
        names = set(map(str, read_object(index)["weight_map"].values())) if index is not None else set[str]()
    except (DataError, KeyError, AttributeError) as error:
        raise ModelError(f"model {path}: {index} is damaged ({type(error).__name__}); fetch it again") from error
    found = [file for name in sorted(names) if (file := find(path, name, revision)) is not None]
    if not found or len(found) < len(names):
        raise ModelError(f"model {path} has no safetensors that are whole")
    return found


def _square(tensor: torch.Tensor, minus: torch.Tensor | None = None) -> float:
    """Sum of squares of a tensor, or of a difference, in float64."""
    flat, base = tensor.detach().reshape(-1), None if minus is None else minus.reshape(-1)
    total = 0.0
    for i in range(0, flat.numel(), BLOCK):
        block = flat[i : i + BLOCK].double()
        if base is not None:
            block = block - base[i : i + BLOCK].to(block.device).double()
        total += float(block.square().sum())
    return total


def _adapter_changes(served: Served) -> Iterator[float]:
    """Of the mean's adapter, whose factors the space gives in float32."""
    state, layout = dict(served.engine.state()), replace(served.layout, dtype="float32")
    for module in dict.fromkeys(t.module for t in layout.tensors):
        adapter = served.space.adapter(layout, module, state.__getitem__, MEAN_PLAN, (MEAN,))
        if adapter is None:
            raise ModelError(f"space {served.space.name} has no adapter of its mean for {module}")
        yield product_square(adapter.a[0], adapter.b[0], adapter.scaling)


def _live_changes(model: nn.Module, base: _Base) -> Iterator[float]:
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        return (base.change(name, tensor, tensor.dtype) for name, tensor in model.named_parameters())
    name = str(model.active_adapter)
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return _peft_changes(model.peft_config[name].to_dict(), state)


def _peft_changes(settings: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Iterator[float]:
    """Of a LoRA adapter in PEFT's form. Raises ModelError where it does more than add (alpha / r) B A."""
    odd = [name for name, plain in PLAIN.items() if settings.get(name) and settings[name] != plain]
    if str(getattr(settings["peft_type"], "value", settings["peft_type"])) != "LORA" or odd:
        raise ModelError(f"the adapter is more than plain LoRA ({', '.join(odd) or settings['peft_type']})")
    rank, alpha = settings["r"], settings["lora_alpha"]
    scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    for name, a in state.items():
        module, found, _ = name.partition(".lora_A.")
        if found:
            yield product_square(a, state[f"{module}.lora_B.weight"], scaling)
        elif ".lora_B." not in name:
            raise ModelError(f"the adapter is more than plain LoRA ({name})")


def _settings(folder: Path) -> Mapping[str, Any]:
    """adapter_config.json. Raises ModelError."""
    file = folder / "adapter_config.json"
    try:
        found = read_object(file)
        numbers = {"r": int(found["r"]), "lora_alpha": float(found["lora_alpha"])}
        if numbers["r"] < 1:
            raise ValueError("a rank below 1")
        return {**found, **numbers, "peft_type": found["peft_type"]}
    except (DataError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file} is missing or damaged ({type(error).__name__})") from error


def _saved_changes(folder: Path, base: _Base) -> Iterator[float]:
    """Of a Hugging Face checkpoint; where it is rounded, evoalign's own float32 mean lies beside it."""
    saved = _Files(sorted(folder.glob("model*.safetensors")))
    mean = _Files(sorted(folder.glob(checkpoint.MEAN)))
    for name in base.names:
        key = name if name in saved else name.partition(".")[2]
        if key not in saved:
            raise ModelError(f"{folder} has no {name}: it is no checkpoint of model {base.name}")
        rounded = saved[key]
        yield base.change(name, mean.get(name, rounded), rounded.dtype)
