# SPDX-License-Identifier: Apache-2.0
"""What a run will do and need, told before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evoalign import spaces
from evoalign.config import Config
from evoalign.config.engines import MemoryUse
from evoalign.cost.budget import resident
from evoalign.cost.flops import es_flops, noise_numbers
from evoalign.engines.specs import on_gpu
from evoalign.optimizer import reach
from evoalign.types import Layout, TensorSpec

ETA_USUAL = (0.05, 2.0)
PAPERS = 0.5
"""eta of arXiv 2509.24372: alpha = sigma / 2."""


def step_lines(config: Config, layout: Layout | None) -> list[str]:
    """eta and the effective sigma, in words; a warning where eta is unusual. `layout` None: scales not known yet."""
    es = config.es
    lines = [f"eta {es.eta:.4g} (a step in units of the noise; {_how(config)})"]
    low, high = ETA_USUAL
    eta = es.eta * reach(es)
    if not low <= eta <= high:
        slow = "steps are tiny: little will be learnt" if eta < low else "steps overshoot: the model may break"
        own = "" if reach(es) == 1 else f", which {es.optimizer.name} makes {eta:.4g},"
        lines.append(
            f"warning: eta {es.eta:.4g}{own} is outside {low} to {high} (the paper's is {PAPERS}): {slow}; "
            f"set es.learning_rate to about {PAPERS * (es.sigma or 1) / reach(es):.2g}"
        )
    if layout is not None:
        lines.append(spaces.create(config).effective(layout))
    elif es.noise_multiplier is not None:
        lines.append("effective sigma: es.noise_multiplier x mean |W| of each layer, known once the weights are loaded")
    return lines


def _how(config: Config) -> str:
    return "es.learning_rate / es.sigma" if config.es.sigma is not None else "es.learning_rate"


def served_dtype(config: Config) -> torch.dtype:
    """The dtype that `model.dtype` comes to on this machine."""
    return getattr(torch, config.model.served_dtype(on_gpu=on_gpu(config)))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they hold. `start`: the starting weights, for decay; `own`: what the engine adds."""

    weights: int
    master: int
    start: int
    own: MemoryUse

    @property
    def kept(self) -> int:
        """What is held on the device from the start of a run to its end."""
        return self.weights + self.master + self.start + self.own.adapters - self.own.host


def memory(config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype) -> Memory:
    """What a run holds on its device."""
    master, start = spaces.create(config).mean_bytes(layout, dtype), 4 * layout.parameters if config.decays else 0
    own = config.engine.held(config, specs, layout, dtype, master + start)
    return Memory(sum(math.prod(s.shape) for s in specs) * dtype.itemsize, master, start, own)


def memory_lines(
    config: Config,
    specs: Sequence[TensorSpec],
    layout: Layout,
    dtype: torch.dtype,
    asked: tuple[int, int] | None = None,
) -> list[str]:
    """Bytes of the process, weights, master and cache, in words.

    `asked`: the most completions that are asked for together, and the tokens of the longest prompt; None: not known.
    """
    need, weights = memory(config, specs, layout, dtype), sum(math.prod(s.shape) for s in specs)
    batch = 0.0 if asked is None else config.engine.batch_bytes(config, specs, dtype, *asked)
    # What lies on a GPU is counted there; a CPU has the process beside it.
    base = 0 if on_gpu(config) else resident() or 0
    bound = "about" if batch else need.own.bound
    total = need.kept + base + (batch or need.own.cache)
    parts = {
        "this process so far (Python and its libraries)": base, "weights": need.weights, "float32 master": need.master,
        "starting weights for decay": need.start,
    }  # fmt: skip
    said = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return [
        f"model {weights / 1e6:,.1f} M parameters, {layout.parameters / 1e6:,.3f} M evolve "
        f"in {len(layout.tensors)} tensors",
        f"memory {bound} {gib(total)}: {said}, {_own_words(need.own, batch, asked)}",
        *second_copy_lines(config, weights, dtype),
        *filter(None, [spaces.create(config).left_out(specs, layout)]),
    ]


def second_copy_lines(config: Config, parameters: int, dtype: torch.dtype) -> list[str]:
    """The base model that is asked beside the one that is trained, in words; nothing where no check asks for it."""
    checks, here = config.checks, on_gpu(config) and config.engine.serves_here
    when = [f"every {checks.kl_every} (checks.kl_every)"] if checks.kl_every else []
    when += ["at the end (checks.perplexity)"] if config.measures_nats else []
    size = parameters * (dtype.itemsize if here else torch.float32.itemsize)
    where = "" if here else ", on the CPU in float32"
    return [f"second copy of the model {gib(size)}{where}: asked {' and '.join(when)}"] if when else []


def _own_words(own: MemoryUse, batch: float, asked: tuple[int, int] | None) -> str:
    adapters = f"adapters {gib(own.adapters)}, " if own.adapters else ""
    host = f"; {gib(own.host)} of it in host memory" if own.host else ""
    if batch and asked is not None:
        most = f", in batches that keep to {own.setting}" if own.setting and batch >= own.cache else ""
        return f"{adapters}cache, logits and activations {gib(batch)} for {asked[0]:,} completions{most}{host}"
    setting = f" ({own.setting}{own.note})" if own.setting else ""
    return f"{adapters}cache {own.bound} {gib(own.cache)}{setting}{host}"


TIME = "time: evoalign doctor CONFIG loads the model and times a piece of a generation"


def work_lines(config: Config, examples: int | None, *, asks_mean: bool = False) -> list[str]:
    """Rollouts and tokens, in words. `asks_mean`: the objective has the unperturbed model asked too."""
    es = config.es
    samples = config.task.samples or 1
    prompts = config.task.asked(examples) // samples if examples else config.task.batch_size
    if not prompts:
        return ["rollouts: population x training examples a generation (the data could not be counted)"]
    rollouts = (es.population_size + asks_mean) * prompts * samples
    each = f"{prompts} prompts x {samples} samples" if samples > 1 else f"{prompts} prompts"
    tokens = rollouts * config.sampling.max_tokens
    return [
        f"rollouts {rollouts:,} a generation ({es.population_size} members{and_mean(asks_mean)} x {each}), "
        f"{rollouts * es.num_generations:,} in all",
        f"tokens at most {tokens:,} a generation, {tokens * es.num_generations:,} in all",
        TIME,
    ]


def and_mean(asks_mean: bool) -> str:
    """What follows on `16 members` where the unperturbed model is asked as well."""
    return " and the mean" if asks_mean else ""


def gib(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


NORMAL = 64
"""FLOPs of a matrix product that take about as long as one normal: a tenth of a Philox call and a look-up. A round
number on the safe side, since what is counted with it decides what a run does and has to be the same everywhere."""
MOST_PLACEBOS, TENTH = 5, 10


def placebos_in_a_tenth(
    config: Config, specs: Sequence[TensorSpec], layout: Layout, train: Sequence[int], test: Sequence[int]
) -> int:
    """How many placebos cost at most a tenth of what training did, up to `MOST_PLACEBOS`; by counts alone.

    `train` and `test` are the prompts' lengths in tokens. Work is 2 FLOPs a parameter and token, of prompts and of the
    completions as long as they may get, and `NORMAL` for each number of noise; and neither may the placebos ask for
    more than a tenth of the completions: scoring them may cost more than making them.
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
