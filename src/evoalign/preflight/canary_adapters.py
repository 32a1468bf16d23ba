# SPDX-License-Identifier: Apache-2.0
"""Adapters that `evoalign canary` loads: read from a folder, or noise of a model's shapes, in equivalent forms.

They are in one plain form: `lora_alpha` equals the rank, so that B alone holds the scale. Scales are powers of two,
which round nothing: equivalent forms are equal to the last bit in any dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from evoalign.config import from_dict
from evoalign.config.reading import check_regular, read_object
from evoalign.engines.server.adapters import PREFIX, PeftAdapter, peft_config
from evoalign.engines.server.dialect import as_object
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, EvoalignError
from evoalign.spaces.targets import module_of

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LARGEST = 2**36
"""Maximum bytes of an adapter's file."""
STANDARD = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections of random adapters: the servers support them in any model."""
_FACTOR = re.compile(r"^(?P<module>.+)\.lora_(?:embedding_)?(?P<factor>[AB])(?:\.default)?(?:\.weight)?$")


@dataclass(frozen=True, slots=True)
class Factors:
    """One module's A [r, in] and B [out, r] under their names in the file, and the scale of their product."""

    a_name: str
    b_name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def gain(self) -> float:
        """Root mean square of scale * B A x for inputs x of unit variance."""
        a, b = self.a.double(), self.b.double()
        square = float(((b.T @ b) * (a @ a.T)).sum())
        return abs(self.scale) * math.sqrt(max(0.0, square) / b.shape[0])


@dataclass(frozen=True, slots=True)
class Source:
    """An adapter by the full names of its modules. `given` is its adapter_config.json; None: it is random."""

    name: str
    config: Mapping[str, Any]
    modules: Mapping[str, Factors]
    given: Mapping[str, Any] | None = None

    @property
    def rank(self) -> int:
        """Highest rank of any module."""
        return max(f.a.shape[0] for f in self.modules.values())

    @property
    def projections(self) -> list[str]:
        """Names such as `q_proj`, each once for all layers."""
        return list(dict.fromkeys(module_of(name) for name in self.modules))

    @property
    def uses_rslora(self) -> bool:
        """Whether its adapter_config.json sets use_rslora."""
        return self.given is not None and bool(self.given.get("use_rslora"))

    def plain(
        self, strength: float, *, sign: int = 1, scale: float = 1.0, rslora: bool = False, only: str | None = None
    ) -> PeftAdapter:
        """Return `strength` times the adapter, with `scale` in `lora_alpha` and the rest in B: equal for any `scale`.

        `rslora` states the scale by rank-stabilised scaling. `only` leaves all other projections at zero.
        """
        rank, tensors = self.rank, dict[str, torch.Tensor]()
        for name, factors in self.modules.items():
            here = sign * strength * factors.scale / scale if only in (None, module_of(name)) else 0.0
            pad = rank - factors.a.shape[0]  # some servers do not read the ranks of a pattern
            tensors[factors.a_name] = torch.nn.functional.pad(factors.a, (0, 0, 0, pad)).contiguous()
            tensors[factors.b_name] = torch.nn.functional.pad(factors.b * here, (0, pad)).contiguous()
        alpha = scale * (math.sqrt(rank) if rslora else rank)
        alpha = int(alpha) if alpha == int(alpha) else alpha
        own = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora, "rank_pattern": {}, "alpha_pattern": {}}
        return PeftAdapter({**self.config, **own}, tensors)

    def as_given(self, strength: float) -> PeftAdapter:
        """Return `strength` times the adapter with its own adapter_config.json."""
        tensors = {f.a_name: f.a for f in self.modules.values()}
        tensors |= {f.b_name: (f.b * strength).contiguous() for f in self.modules.values()}
        return PeftAdapter({**self.config, **(self.given or {})}, tensors)

    def strength_of(self, gain: float) -> float:
        """Return the power of two that gives its strongest module about this gain."""
        return 2.0 ** round(math.log2(gain / max(f.gain for f in self.modules.values())))


def read_adapter(folder: Path) -> Source:
    """Read a PEFT adapter. Raises DataError, and ConfigError where it is more than LoRA factors."""
    config = read_object(folder / CONFIG, mend="give the folder of a PEFT adapter")
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").is_file():
        raise ConfigError(f"{folder} holds a pickle, which is not read: save the adapter as safetensors")
    check_regular(folder / WEIGHTS, LARGEST, "give the folder of a PEFT adapter")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{folder / WEIGHTS} cannot be read ({error})") from error
    if config.get("use_dora"):
        raise ConfigError(f"{folder}: use_dora is true, and the canary checks plain LoRA only")
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _FACTOR.match(name)
        if match is None:
            raise ConfigError(f"{folder}: {name} is not a LoRA factor, and the canary checks these only")
        found.setdefault(match["module"], {})[match["factor"]] = name
    if not found:
        raise ConfigError(f"{folder} holds no factors")
    modules = dict[str, Factors]()
    for module, names in sorted(found.items()):
        if len(names) < 2:
            raise ConfigError(f"{folder}: {module} has one factor of two")
        a, b = tensors[names["A"]], tensors[names["B"]]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ConfigError(f"{folder}: the factors of {module} have shapes {tuple(a.shape)} and {tuple(b.shape)}")
        if not all(t.is_floating_point() and bool(t.isfinite().all()) for t in (a, b)):
            raise ConfigError(f"{folder}: the factors of {module} are not finite numbers")
        generator = torch.Generator().manual_seed(len(module))  # B is zero before training: noise replaces it
        a, b = (t if bool(t.any()) else torch.randn(t.shape, generator=generator).to(t.dtype) for t in (a, b))
        modules[module] = Factors(names["A"], names["B"], a, b, _scale(config, folder, module, a.shape[0]))
    # What servers refuse or ignore is left at PEFT's defaults.
    kept = {n: config[n] for n in ("base_model_name_or_path", "target_modules", "task_type") if config.get(n)}
    plain = peft_config(str(config.get("base_model_name_or_path", "")), 1, 1.0, [])
    return Source(str(folder), {**plain, **kept}, modules, config)


def _scale(config: Mapping[str, Any], folder: Path, module: str, rank: int) -> float:
    """Return the scale of a module; as in PEFT, the first pattern that its name ends with, at a dot, has priority."""
    alpha: Any = config.get("lora_alpha", rank)
    for pattern, value in as_object(config.get("alpha_pattern")).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        except re.error as error:
            raise ConfigError(f"alpha_pattern {pattern!r} is not a regular expression ({error})") from error
    try:
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (TypeError, ValueError):
        scale = math.nan
    if not math.isfinite(scale) or scale == 0:
        raise ConfigError(f"{folder}: lora_alpha of {module} is {alpha!r}; give a number other than 0")
    return scale


def random_adapter(model: str | None, rank: int, allowed: Collection[str] | None) -> Source:
    """Return noise on each standard projection of a model whose config.json is in the folder `model`.

    Raises ConfigError where it cannot be read.
    """
    advice = "give one or more adapters by --adapter DIR, whose shapes are used instead"
    try:
        if model is None or not (Path(model) / "config.json").is_file():
            raise ConfigError(f"the server's model, {model}, is not a folder that can be read here: {advice}")
        specs = specs_of_config(from_dict({"model": {"name": model}}))
    except OSError as error:
        raise ConfigError(f"the server's model, {model}, cannot be read here ({error.strerror}): {advice}") from error
    except ConfigError:
        raise
    except EvoalignError as error:
        raise ConfigError(f"{error}; {advice}") from error
    chosen = [s for s in specs if s.kind == "linear" and s.layer is not None and "expert" not in s.name]
    chosen = [s for s in chosen if module_of(s.name) in STANDARD and module_of(s.name) in (allowed or STANDARD)]
    if not chosen:
        raise ConfigError(f"model {model} has none of {', '.join(STANDARD)}: {advice}")
    generator, modules = torch.Generator().manual_seed(0), dict[str, Factors]()
    for spec in chosen:
        name = PREFIX + spec.name.removesuffix(".weight")
        a = (torch.randn((rank, spec.shape[1]), generator=generator) / math.sqrt(spec.shape[1])).bfloat16()
        b = torch.randn((spec.shape[0], rank), generator=generator).bfloat16()
        modules[name] = Factors(f"{name}.lora_A.weight", f"{name}.lora_B.weight", a, b, 1.0)
    targets = sorted({module_of(s.name) for s in chosen})
    return Source("the model's own shapes", peft_config(model, rank, 1.0, targets), modules)
