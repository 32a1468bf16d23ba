# SPDX-License-Identifier: Apache-2.0
"""Adapters to ask a server with: those of a folder, or of a model's own shapes, put in forms that mean the same or not.

All are in one plain form, `lora_alpha` equal to the rank so that the scale is in B alone, and as strong as is wanted.
Scales are powers of two, which round nothing: equal forms are equal to the last bit in any dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from evoalign.config import from_dict
from evoalign.config.reading import check_regular, read_object
from evoalign.engines.server.adapters import PREFIX, PeftAdapter, peft_config
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, EvoalignError
from evoalign.spaces.targets import module_of

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LARGEST = 2**36
"""Bytes of an adapter's file."""
STANDARD = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that adapters made here are on: the servers know them in any model."""
_FACTOR = re.compile(r"^(?P<module>.+)\.lora_(?:embedding_)?(?P<factor>[AB])(?:\.default)?(?:\.weight)?$")


@dataclass(frozen=True, slots=True)
class Factors:
    """Of one module: A [r, in] and B [out, r] under their names in the file, and the scale of their product."""

    a_name: str
    b_name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def gain(self) -> float:
        """How much scale * B A makes of an input of unit variance: sqrt(in) times its weights' root mean square."""
        a, b = self.a.double(), self.b.double()
        square = float(((b.T @ b) * (a @ a.T)).sum())
        return abs(self.scale) * math.sqrt(max(0.0, square) / b.shape[0])


@dataclass(frozen=True, slots=True)
class Source:
    """An adapter by the full names of its modules. `given` is its config as it came; None: it was made here."""

    name: str
    config: Mapping[str, Any]
    modules: Mapping[str, Factors]
    given: Mapping[str, Any] | None = None

    @property
    def rank(self) -> int:
        """The highest of any module."""
        return max(f.a.shape[0] for f in self.modules.values())

    @property
    def projections(self) -> list[str]:
        """Such as `q_proj`, of whatever layers."""
        return list(dict.fromkeys(module_of(name) for name in self.modules))

    @property
    def uses_rslora(self) -> bool:
        return self.given is not None and bool(self.given.get("use_rslora"))

    def plain(
        self, strength: float, *, sign: int = 1, scale: float = 1.0, rslora: bool = False, only: str | None = None
    ) -> PeftAdapter:
        """`strength` times the adapter, `scale` of which `lora_alpha` says and B the rest: it comes to the same.

        `rslora` says it by rank-stabilised scaling. `only` leaves all other projections at zero.
        """
        rank, tensors = self.rank, dict[str, torch.Tensor]()
        for name, factors in self.modules.items():
            here = sign * strength * factors.scale / scale if only in (None, module_of(name)) else 0.0
            pad = rank - factors.a.shape[0]  # ranks of a pattern, which some servers do not read
            tensors[factors.a_name] = torch.nn.functional.pad(factors.a, (0, 0, 0, pad)).contiguous()
            tensors[factors.b_name] = torch.nn.functional.pad(factors.b * here, (0, pad)).contiguous()
        alpha = scale * (math.sqrt(rank) if rslora else rank)
        alpha = int(alpha) if alpha == int(alpha) else alpha
        own = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora, "rank_pattern": {}, "alpha_pattern": {}}
        return PeftAdapter({**self.config, **own}, tensors)

    def as_given(self, strength: float) -> PeftAdapter:
        """`strength` times the adapter by its own config, all of it."""
        tensors = {f.a_name: f.a for f in self.modules.values()}
        tensors |= {f.b_name: (f.b * strength).contiguous() for f in self.modules.values()}
        return PeftAdapter({**self.config, **(self.given or {})}, tensors)

    def strength_of(self, gain: float) -> float:
        """The power of two that brings its strongest module to about this gain."""
        return 2.0 ** round(math.log2(gain / max(f.gain for f in self.modules.values())))


def read(folder: Path) -> Source:
    """An adapter of PEFT's form. Raises DataError, ConfigError for one that is more than LoRA factors."""
    config = read_object(folder / CONFIG, mend="give the folder of a PEFT adapter")
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").is_file():
        raise ConfigError(f"{folder} holds a pickle, which is not read: save the adapter as safetensors")
    check_regular(folder / WEIGHTS, LARGEST, "give the folder of a PEFT adapter")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{folder / WEIGHTS} cannot be read ({error})") from error
    if config.get("use_dora"):
        raise ConfigError(f"{folder}: DoRA is no plain adapter, which this check is of")
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _FACTOR.match(name)
        if match is None:
            raise ConfigError(f"{folder}: {name} is no factor of LoRA, and this check is of these alone")
        found.setdefault(match["module"], {})[match["factor"]] = name
    modules = dict[str, Factors]()
    for module, names in sorted(found.items()):
        if len(names) < 2:
            raise ConfigError(f"{folder}: {module} has one factor of two")
        modules[module] = _factors(config, folder, module, names, tensors)
    if not modules:
        raise ConfigError(f"{folder} holds no factors")
    return Source(str(folder), _served(config), modules, config)


def made(model: str, rank: int, allowed: Collection[str] | None, dtype: torch.dtype = torch.bfloat16) -> Source:
    """Noise on each projection of a model whose config.json lies in the folder `model`. Raises EvoalignError."""
    specs = specs_of_config(from_dict({"model": {"name": model}}, needs_es=False))
    named = [s for s in specs if s.kind == "linear" and s.layer is not None and "expert" not in s.name]
    named = [s for s in named if module_of(s.name) in STANDARD and module_of(s.name) in (allowed or STANDARD)]
    if not named:
        raise ConfigError(f"model {model} has none of {', '.join(STANDARD)}; give an adapter by --adapter DIR")
    generator = torch.Generator().manual_seed(0)
    modules = dict[str, Factors]()
    for spec in named:
        name = PREFIX + spec.name.removesuffix(".weight")
        a = torch.randn((rank, spec.shape[1]), generator=generator) / math.sqrt(spec.shape[1])
        b = torch.randn((spec.shape[0], rank), generator=generator)
        modules[name] = Factors(f"{name}.lora_A.weight", f"{name}.lora_B.weight", a.to(dtype), b.to(dtype), 1.0)
    targets = sorted({module_of(s.name) for s in named})
    return Source("the model's own shapes", peft_config(model, rank, 1.0, targets), modules)


def _factors(
    config: Mapping[str, Any], folder: Path, module: str, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> Factors:
    """Of one module; where B or A is zero, as before a training, noise takes its place."""
    a, b = tensors[names["A"]], tensors[names["B"]]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise ConfigError(f"{folder}: the factors of {module} are {tuple(a.shape)} and {tuple(b.shape)}")
    if not (a.is_floating_point() and b.is_floating_point() and bool(a.isfinite().all() and b.isfinite().all())):
        raise ConfigError(f"{folder}: the factors of {module} are no finite numbers")
    generator = torch.Generator().manual_seed(len(module))
    a, b = (t if bool(t.any()) else torch.randn(t.shape, generator=generator).to(t.dtype) for t in (a, b))
    rank = a.shape[0]
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", rank))
    try:
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (TypeError, ValueError):
        scale = math.nan
    if not math.isfinite(scale) or scale == 0:
        raise ConfigError(f"{folder}: lora_alpha of {module} is {alpha!r}; it takes a number other than 0")
    return Factors(names["A"], names["B"], a, b, scale)


def _pattern(patterns: Any, module: str, otherwise: Any) -> Any:
    """PEFT's rule: the first pattern that a module's name ends with, at a dot."""
    for pattern, value in cast(dict[str, Any], patterns).items() if isinstance(patterns, dict) else ():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ConfigError(f"alpha_pattern {pattern!r} is no pattern ({error})") from error
    return otherwise


def _served(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's words on its modules, with what servers refuse or ignore put at PEFT's defaults."""
    plain = peft_config(str(config.get("base_model_name_or_path", "")), 1, 1.0, [])
    kept = {n: config[n] for n in ("base_model_name_or_path", "target_modules", "task_type") if config.get(n)}
    return {**plain, **kept}


def folder_of(model: str | None) -> str:
    """The folder of a server's model, whose config.json can be read here. Raises ConfigError."""
    ask = "give one or more adapters by --adapter DIR, whose shapes are then taken"
    if model is None:
        raise ConfigError(f"the server does not say which model it serves: {ask}")
    try:
        if not Path(model).is_dir() or not (Path(model) / "config.json").is_file():
            raise ConfigError(f"the server's model, {model}, is no folder that can be read here: {ask}")
    except OSError as error:
        raise ConfigError(f"the server's model, {model}, cannot be read here ({error.strerror}): {ask}") from error
    return model


def sources(folders: Sequence[Path], model: str | None, rank: int, allowed: Collection[str] | None) -> list[Source]:
    """Those of the folders, or one of the model's shapes where there are none. Raises EvoalignError."""
    if folders:
        return [read(folder) for folder in folders]
    place = folder_of(model)
    try:
        return [made(place, rank, allowed)]
    except ConfigError:
        raise
    except EvoalignError as error:
        raise ConfigError(f"{error}; give an adapter by --adapter DIR") from error
