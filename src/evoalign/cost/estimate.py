# SPDX-License-Identifier: Apache-2.0
"""Estimates made before a run starts: step size, memory, rollouts, placebos, and the share of weights that evolves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from evoalign import spaces
from evoalign.config import Config
from evoalign.config.engines import EngineSettings, MemoryUse
from evoalign.cost.budget import free_on_host, resident
from evoalign.cost.flops import es_flops, noise_numbers
from evoalign.cost.weights import weight_bytes
from evoalign.engines.specs import carries_experts, on_gpu
from evoalign.optimizer import reach
from evoalign.spaces import Space
from evoalign.spaces.targets import module_of
from evoalign.types import Layout, TensorSpec

SHOWN = 8
"""Most module names in a line."""
FEW = 8
"""Warn if at most one of this many layers evolves: settings for a tiny model may be left in the config."""
ETA_USUAL = (0.05, 2.0)
PAPERS = 0.5
"""eta of arXiv 2509.24372: alpha = sigma / 2."""


TIME = "time: run `evoalign doctor CONFIG`, which loads the model and times part of a generation"
"""Line of a dry run on the time that the run takes."""
_COUNT = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)([bm])(?![a-z\d])", re.IGNORECASE)
"""A number of parameters in a model's name, such as 7B; not the 8x7B of a mixture, nor 4bit."""
_PACKED = re.compile(r"awq|gptq|bnb|w\da\d|(int|fp)-?[48]|[48]-?bit", re.IGNORECASE)
"""Says in a model's name that its weights are packed."""


def memory_by_name(name: str, dtype: torch.dtype) -> str:
    """Return the line on the memory of a model whose files are not here, by the size in its name if there is one."""
    found = _COUNT.search(name.rpartition("/")[2])
    if found is None or _PACKED.search(name):
        return "memory: not estimated"
    parameters = float(found[1]) * {"b": 1e9, "m": 1e6}[found[2].lower()]
    return (
        f"memory: not estimated without the model's files; its weights alone take about "
        f"{gib(parameters * dtype.itemsize)}, if {found[0]} in its name is the number of parameters"
    )


def step_lines(config: Config, layout: Layout | None) -> list[str]:
    """Describe eta and the effective sigma, with a warning if eta is unusual. `layout` None: scales are not known."""
    es = config.es
    how = "es.learning_rate / es.sigma" if es.sigma is not None else "es.learning_rate"
    lines = [f"eta {es.eta:.4g} (a step in units of the noise; {how})"]
    (low, high), moved = ETA_USUAL, reach(es)
    if es.optimizer.adapts_noise:
        lines = [f"es.optimizer {es.optimizer.name} starts from this width and adapts width and step"]
    elif moved is None:
        lines.append(
            f"the size of the steps is not known: the coefficients of es.shaping {es.shaping} depend on the scores; "
            "evoalign probe measures them"
        )
    elif not low <= (eta := es.eta * moved) <= high:
        slow = "steps are tiny: little will be learned" if eta < low else "steps overshoot: the model may break"
        odd = [name for name in (es.optimizer.name, es.shaping) if name not in ("sgd", "zscore")]
        odd += ["antithetic"] * es.antithetic
        own = "" if moved == 1 else f", which {' with '.join(odd)} makes {eta:.4g},"
        lines.append(
            f"warning: eta {es.eta:.4g}{own} is outside {low} to {high} (the paper's is {PAPERS}): {slow}; "
            f"set es.learning_rate to about {PAPERS * (es.sigma or 1) / moved:.2g}"
        )
    if layout is not None:
        lines.append(spaces.create(config).effective(layout))
    elif es.noise_multiplier is not None:
        lines.append("effective sigma: es.noise_multiplier x mean |W| of each layer, known once the weights are loaded")
    return lines


def served_dtype(config: Config) -> torch.dtype:
    """Return the dtype of `model.dtype` on this machine."""
    return getattr(torch, config.model.served_dtype(on_gpu=on_gpu(config)))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by use. `start`: the starting weights, for decay; `own`: the engine's own."""

    weights: int
    master: int
    start: int
    own: MemoryUse

    @property
    def kept(self) -> int:
        """Bytes on the device from the start of a run to its end."""
        return self.weights + self.master + self.start + self.own.adapters - self.own.host


def memory(config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype) -> Memory:
    """Return the memory that a run takes on its device."""
    master, start = spaces.create(config).mean_bytes(layout, dtype), 4 * layout.parameters if config.decays else 0
    own = config.engine.held(config, specs, layout, dtype, master + start)
    return Memory(weight_bytes(config, specs, dtype), master, start, own)


def memory_words(need: Memory, free: int | None) -> str:
    """Describe the memory that a run takes and what is free. `free` None: not known."""
    known = "free memory is not known" if free is None else f"{gib(free)} free"
    cache = f"{need.own.bound} {gib(need.own.cache)} for the cache and logits"
    return f"{gib(need.kept)} for weights and mean, {cache}; {known}"


def lighter(config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype) -> str:
    """Return the settings that reduce the memory of weights and mean."""
    need, half = (memory(config, specs, layout, served) for served in (dtype, torch.bfloat16))
    smaller = ["space lora"] if spaces.create(config).evolves_model and need.master + need.start else []
    smaller += ["model.dtype bfloat16"] if half.kept < need.kept else []
    chosen = " or ".join(filter(None, (", ".join(smaller), "a smaller model")))
    return ", ".join(filter(None, (config.engine.lighter, f"choose {chosen}")))


def refusal(config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype) -> str | None:
    """Return why a model is not loaded into this process: the kernel would kill it without a message. None: it fits.

    Memory of a GPU is not checked, as torch reports its end.
    """
    need, free = memory(config, specs, layout, dtype), free_on_host()
    if on_gpu(config) or not config.engine.serves_here or free is None or need.kept <= free:
        return None
    return f"memory: {memory_words(need, free)}; {lighter(config, specs, layout, dtype)}"


def memory_lines(
    config: Config,
    specs: Sequence[TensorSpec],
    layout: Layout,
    dtype: torch.dtype,
    batch: tuple[int, int] | None = None,
) -> list[str]:
    """Describe the memory of the process, weights, master and cache.

    `batch`: most completions generated at once, and tokens of the longest prompt; None: not known.
    """
    need, weights = memory(config, specs, layout, dtype), sum(math.prod(s.shape) for s in specs)
    batch_size = 0.0 if batch is None else config.engine.batch_bytes(config, specs, dtype, *batch)
    # The memory of a CPU also holds this process.
    base = 0 if on_gpu(config) else resident() or 0
    bound = "about" if batch_size else need.own.bound
    total = need.kept + base + (batch_size or need.own.cache)
    names = (
        "this process so far (Python and its libraries)",
        "weights",
        "float32 master",
        "starting weights for decay",
    )
    sizes = (base, need.weights, need.master, need.start)
    listed = ", ".join(f"{name} {gib(size)}" for name, size in zip(names, sizes, strict=True) if size)
    return [
        f"model {weights / 1e6:,.1f} M parameters, {layout.parameters / 1e6:,.3f} M evolve "
        f"in {len(layout.tensors)} tensors",
        f"memory {bound} {gib(total)}: {listed}, {_own_memory(need.own, batch_size, batch)}",
        *second_copy_lines(config, weights, dtype),
        *filter(None, [spaces.create(config).left_out(specs, layout)]),
    ]


def second_copy_lines(config: Config, parameters: int, dtype: torch.dtype) -> list[str]:
    """Describe the second copy of the base model, if a check needs one."""
    checks, here = config.checks, on_gpu(config) and config.engine.serves_here
    when = [f"every {checks.kl_every} (checks.kl_every)"] if checks.kl_every else []
    when += ["at the end (checks.perplexity)"] if config.measures_nats else []
    size = parameters * (dtype.itemsize if here else torch.float32.itemsize)
    where = "" if here else ", on the CPU in float32"
    return [f"second copy of the model {gib(size)}{where}: used {' and '.join(when)}"] if when else []


def _own_memory(own: MemoryUse, size: float, batch: tuple[int, int] | None) -> str:
    adapters = f"adapters {gib(own.adapters)}, " if own.adapters else ""
    host = f"; {gib(own.host)} of it in host memory" if own.host else ""
    if size and batch is not None:
        most = f", in batches limited by {own.setting}" if own.setting and size >= own.cache else ""
        return f"{adapters}cache, logits and activations {gib(size)} for {batch[0]:,} completions{most}{host}"
    setting = f" ({own.setting}{own.note})" if own.setting else ""
    return f"{adapters}cache {own.bound} {gib(own.cache)}{setting}{host}"


def work_lines(config: Config, examples: int | None, tokens: int, *, asks_mean: bool = False) -> list[str]:
    """Describe the number of rollouts, each of at most this many generated tokens.

    `asks_mean`: the objective needs rollouts of the mean as well.
    """
    es = config.es
    samples = config.task.samples or 1
    prompts = config.task.asked(examples) // samples if examples else config.task.batch_size
    if not prompts:
        return ["rollouts: population x training examples a generation (the data could not be counted)"]
    rollouts = (es.population_size + asks_mean) * prompts * samples
    each = f"{prompts} prompts x {samples} samples" if samples > 1 else f"{prompts} prompts"
    tokens *= rollouts
    most = f"; tokens at most {tokens:,} a generation, {tokens * es.num_generations:,} in all"
    return [
        f"rollouts {rollouts:,} a generation ({es.population_size} members{and_mean(asks_mean)} x {each}), "
        f"{rollouts * es.num_generations:,} in all{most if tokens else ''}",
        TIME,
    ]


def and_mean(asks_mean: bool) -> str:
    """Return what follows `16 members` if the mean generates as well."""
    return " and the mean" if asks_mean else ""


def gib(size: float) -> str:
    """Return bytes as GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


NORMAL = 64
"""FLOPs per normally distributed number. Fixed and on the safe side, since it decides what a run does and
has to be the same on all machines."""
MOST_PLACEBOS, TENTH = 5, 10


def placebos_in_a_tenth(
    config: Config, specs: Sequence[TensorSpec], layout: Layout, train: Sequence[int], test: Sequence[int]
) -> int:
    """Return how many placebos cost at most a tenth of the training, at most `MOST_PLACEBOS`.

    `train` and `test` are the prompts' lengths in tokens. The cost is 2 FLOPs per parameter and token, with completions
    of `max_tokens`, and `NORMAL` per number of noise. Placebos also generate at most a tenth of the completions, since
    scoring may cost more than generating.
    """
    es, space, drawn = config.es, spaces.create(config), config.evaluation
    streams = es.population_size // (2 if es.antithetic else 1)
    parameters = sum(math.prod(spec.shape) for spec in specs)
    noise = NORMAL * noise_numbers(space, layout)
    product = es_flops(space, layout, 0, streams)
    update = es.num_generations * (noise * streams + product)
    asked = es.num_generations * es.population_size * config.task.asked(len(train))
    draws = 1 if drawn.temperature == 0 else len(drawn.seeds) * drawn.samples
    length = sum(train) / len(train) + config.sampling.max_tokens
    training = update + es.num_generations * noise * es.population_size + 2 * parameters * asked * length
    placebo = update + 2 * parameters * draws * (sum(test) + len(test) * drawn.max_tokens)
    return int(min(MOST_PLACEBOS, training // (TENTH * placebo), asked // (TENTH * draws * len(test))))


def share_lines(config: Config, specs: Sequence[TensorSpec], layout: Layout) -> list[str]:
    """Describe the share of the weights that evolves or that adapters reach, or what the space adds.

    Warn if experts do not evolve.
    """
    reached = set(layout.modules)
    some, rest = [s for s in specs if s.name in reached], [s for s in specs if s.name not in reached]
    space = spaces.create(config)
    verb = "evolves" if space.evolves_model else "adapters reach"
    others = _names((s for s in rest if len(s.shape) > 1), listed=some)
    share = f"{verb} {percent(some, specs)} of the weights: {_names(some)}" + (f"; not: {others}" if others else "")
    line = space.adds(layout) or share
    warnings = _left_out(config, space, specs, rest) if space.carrier == "adapter" else []
    every, few = ({s.layer for s in tensors} - {None} for tensors in (specs, some))
    chosen = getattr(getattr(config, config.space.name, None), "target_layers", None)
    if chosen is not None and len(few) * FEW < len(every):
        setting = f"{config.space.name}.target_layers"
        count = f"{len(few)} of {len(every)} layers evolves"
        warnings.append(f"{count}, {setting} {chosen}; set {setting}=null for all layers")
    return [line, *(f"warning: {warning}" for warning in warnings)]


def percent(some: Iterable[TensorSpec], every: Iterable[TensorSpec]) -> str:
    """Return the share of numbers that are in some tensors."""
    part, total = (sum(math.prod(s.shape) for s in specs) for specs in (some, every))
    return f"{100.0 if part == total else min(99.9, 100 * part / total):.3g} %"


def _left_out(config: Config, space: Space, specs: Sequence[TensorSpec], rest: Sequence[TensorSpec]) -> list[str]:
    """Return warnings for tensors that take no adapter although the config does not exclude them."""
    experts = [s for s in rest if s.layer is not None and (".experts." in s.name or len(s.shape) == 3)]
    fused = [s for s in experts if s.kind == "other" and len(s.shape) == 3]
    apart = [s for s in experts if s.kind == "other" and len(s.shape) == 2 and not carries_experts(config)]
    advice = EngineSettings.own_experts if space.evolves_model else config.engine.own_experts
    unknown = [s for s in experts if not s.peft]
    taken = [s for s in rest if s.kind == "linear" and not s.peft]
    found: list[str] = []
    by_peft = [s for s in unknown if s.kind == "expert" and not space.evolves_model]
    for tensors, why in (
        (fused, "the model fuses them in a form that evoalign cannot split; use space full"),
        (apart, f"engine {config.engine.name} {advice}"),
        (by_peft, "PEFT has no adapter for them; use space lowrank"),
    ):
        if tensors:
            found.append(f"the experts, {percent(tensors, specs)} of the weights, do not evolve: {why}")
    if taken and not space.evolves_model:
        found.append(
            f"{_names(taken)} outside the experts, {percent(taken, specs)} of the weights, do not evolve: PEFT "
            "treats these names as experts; use space lowrank"
        )
    return found


def _names(specs: Iterable[TensorSpec], listed: Sequence[TensorSpec] = ()) -> str:
    """Return the distinct module names. Names that are also in `listed`, but in other layers, are marked as such."""
    named: dict[str, set[int | None]] = {}
    for spec in listed:
        named.setdefault(_name(spec), set()).add(spec.layer)
    names: dict[str, None] = {}
    for spec in specs:
        name = _name(spec)
        others = name in named and spec.layer not in named[name]
        names[f"{name} of other layers" if others else name] = None
    return ", ".join([*names][:SHOWN]) + (" ..." if len(names) > SHOWN else "")


def _name(spec: TensorSpec) -> str:
    module = module_of(spec.name)
    return f"experts.{module}" if ".experts." in spec.name else module
