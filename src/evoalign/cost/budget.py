# SPDX-License-Identifier: Apache-2.0
"""Costs of a run, for ES and GRPO: prompts, tokens, FLOPs, seconds and memory.

FLOPs are those of `evoalign.cost.flops`, and None for a model that its formula does not cover.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from evoalign.config import Config
from evoalign.config.reading import read_object
from evoalign.cost.flops import (
    ADAM_FLOPS,
    Adapted,
    ModelShape,
    backward_flops,
    es_flops,
    forward_flops,
    rollout_flops,
    sequence_flops,
    shape_of,
)
from evoalign.errors import DataError, ModelError
from evoalign.models.origin import model_config
from evoalign.rundir.files import write_json
from evoalign.rundir.method import Method
from evoalign.spaces import Space
from evoalign.types import Generation, Layout, Rollout, TensorSpec, Update

FORMAT_VERSION = 1
TRAINING_PHASES = ("rollout", "score", "update")
MAY_BE_UNKNOWN = ("forward_flops", "backward_flops", "peak_memory_bytes")


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs, which can be added. A sum has the highest peak, and None where a part is not known.

    `prompt_tokens` counts a prompt once per completion; `generated_tokens` includes stop tokens. `forward_flops` is
    everything except backward passes. `peak_memory_bytes` is that of this process so far: see `peak_memory`.
    """

    prompts: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    forward_flops: float | None = 0.0
    backward_flops: float | None = 0.0
    wall_seconds: float = 0.0
    device_seconds: float = 0.0
    peak_memory_bytes: int | None = 0

    def __add__(self, other: Cost) -> Cost:
        def joined(name: str) -> Any:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours is None or theirs is None:
                return None
            return max(ours, theirs) if name == "peak_memory_bytes" else ours + theirs

        return Cost(**{f.name: joined(f.name) for f in fields(Cost)})

    def as_dict(self) -> dict[str, Any]:
        """Return the form in a row of metrics.jsonl."""
        return asdict(self)


def cost_of(tree: Any) -> Cost | None:
    """Read a Cost from its form in a file; None if that is invalid."""
    if not isinstance(tree, Mapping) or set(tree) != {f.name for f in fields(Cost)}:
        return None
    for name, value in tree.items():
        is_amount = type(value) in (int, float) and 0 <= value < math.inf
        if not is_amount and not (value is None and name in MAY_BE_UNKNOWN):
            return None
    return Cost(**tree)


def totals(rows: Sequence[Mapping[str, Any]]) -> tuple[Cost, int]:
    """Return the sum over rows of metrics.jsonl, and the number of rows without a cost (rebuilt from a journal)."""
    costs = [cost_of(row.get("budget")) for row in rows]
    known = [cost for cost in costs if cost is not None]
    return sum(known, Cost()), len(costs) - len(known)


def write(
    path: Path,
    method: Method,
    devices: int,
    rows: Sequence[Mapping[str, Any]],
    evaluation: Cost | None,
    note: str = "",
) -> None:
    """Write results/budget.json. `evaluation` is None if a part of it is not known."""
    training, missing = totals(rows)
    tree = {
        "format_version": FORMAT_VERSION,
        "method": method,
        "devices": devices,
        "training": training.as_dict(),
        "rows": len(rows),
        "rows_missing": missing,
        "evaluation": None if evaluation is None else evaluation.as_dict(),
        "note": note,
    }
    write_json(path, tree)


def read_evaluation(path: Path) -> Cost | None:
    """Return the evaluation cost so far, when a run resumes; None if the file does not have it."""
    try:
        return cost_of(read_object(path)["evaluation"])
    except (DataError, KeyError):
        return None


def peak_memory(device: str) -> int | None:
    """Return the peak memory of this process in bytes, or None if it is not known.

    On a GPU: memory allocated by torch, including a cache that vLLM reserves. On the CPU: resident memory.
    """
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) if torch.cuda.is_available() else None
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int | None:
    """Return the resident memory of this process in bytes; None except on Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_on_host() -> int | None:
    """Return what Linux reports as available, or the rest of a control group's limit; None elsewhere."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    free = int(found[1]) * 1024 if found else None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["active_file"]) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # no limit, written as "max", or no such group
        return free
    return limit - used if free is None else min(free, limit - used)


def answers_cost(
    shape: ModelShape | None,
    prompts: Sequence[tuple[int, ...]],
    tokens: Sequence[int],
    adapted: Adapted | None,
    max_tokens: int,
    members: int = 1,
) -> Cost:
    """Return the cost of completions, without seconds, from the prompt and number of tokens of each.

    With several `members` that share the prompts, `tokens` are ordered by member.
    """
    room = max(map(len, prompts), default=0) + max_tokens
    return Cost(
        prompts=len(set(prompts)),
        completions=len(tokens),
        prompt_tokens=members * sum(map(len, prompts)),
        generated_tokens=sum(tokens),
        forward_flops=float(rollout_flops(shape, prompts, tokens, adapted, room, members)) if shape else None,
        backward_flops=0.0 if shape else None,
    )


def later_cost(shape: ModelShape | None, turns: Sequence[tuple[int, int]], adapted: Adapted | None) -> Cost:
    """Return the cost of turns after the first of an episode, from the prompt and generated tokens of each.

    Each reads its whole prompt again. An engine that keeps a cache of prefixes computes less.
    """
    flops = sum(forward_flops(shape, p, c, adapted) for p, c in turns) if shape else None
    return Cost(
        prompt_tokens=sum(p for p, _ in turns),
        generated_tokens=sum(c for _, c in turns),
        forward_flops=None if flops is None else float(flops),
        backward_flops=0.0 if shape else None,
    )


def time_cost(seconds: float, devices: int, peak_memory_bytes: int | None) -> Cost:
    """Return the measured part of a cost. A device counts for as long as it is reserved, busy or idle."""
    return Cost(wall_seconds=seconds, device_seconds=seconds * devices, peak_memory_bytes=peak_memory_bytes)


def grpo_generation(
    shape: ModelShape | None,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    *,
    prompts: int,
    reference: bool,
    old_logprobs: bool,
    adapted: Adapted | None = None,
    all_logits: bool = False,
    generation_flops: int | None = None,
) -> Cost:
    """Return the cost of one round of completions of `prompts` groups, without seconds and padding.

    TRL computes a prompt once per completion; `generation_flops` is the cost of completions from another engine. Then
    come passes over prompt and completion: for log-probabilities of the generating policy (`old_logprobs`: with vLLM,
    or if gradient_accumulation_steps is no multiple of steps_per_generation * num_iterations), and for the reference,
    which has no factors (`reference`: beta is not 0). `all_logits`: the head computes all positions, not only those of
    completions, as TRL does without a GPU. `adapted` None: all weights train. `shape` None: FLOPs are not known.
    """
    tokens = sum(prompt_lengths), sum(completion_lengths)
    if shape is None:
        return Cost(prompts, len(completion_lengths), *tokens, forward_flops=None, backward_flops=None)
    forward = generation_flops or 0
    for p, c in zip(prompt_lengths, completion_lengths, strict=True):
        logits = p + c - 1 if all_logits else c
        forward += forward_flops(shape, p, c, adapted) if generation_flops is None else 0
        forward += old_logprobs * sequence_flops(shape, 0, p + c, logits, adapted)
        forward += reference * sequence_flops(shape, 0, p + c, logits)
    return Cost(prompts, len(completion_lengths), *tokens, forward_flops=float(forward))


def grpo_update(
    shape: ModelShape | None,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    *,
    checkpointing: bool,
    adapted: Adapted | None = None,
    all_logits: bool = False,
) -> Cost:
    """Return the FLOPs of one optimizer step: forward and backward passes of the policy, and AdamW.

    Prompts and tokens are counted by `grpo_generation`, since several steps may use the same completions.
    """
    if shape is None:
        return Cost(forward_flops=None, backward_flops=None)
    forward, backward = 0, ADAM_FLOPS * (adapted.numbers(shape) if adapted else shape.parameters)
    for p, c in zip(prompt_lengths, completion_lengths, strict=True):
        logits = p + c - 1 if all_logits else c
        forward += sequence_flops(shape, 0, p + c, logits, adapted)
        backward += backward_flops(shape, p + c, logits, adapted, checkpointing=checkpointing, recompute_head=True)
    return Cost(forward_flops=float(forward), backward_flops=float(backward))


class Meter:
    """Computes the costs of an ES run. `note` says why FLOPs are not known."""

    def __init__(self, config: Config, specs: Sequence[TensorSpec], space: Space, layout: Layout, device: str) -> None:
        self.devices = config.engine.devices
        self.shape: ModelShape | None = None
        self.note = ""
        self._config, self._space, self._layout, self._device = config, space, layout, device
        try:
            self.shape = shape_of(model_config(config.model), specs)
        except ModelError as error:
            self.note = str(error)
        has_factors = space.carrier == "adapter" and layout.rank > 0
        self._adapted = Adapted(layout.rank, frozenset(layout.modules)) if has_factors else None
        # The mean of `lora` is an adapter too; that of other spaces is in the weights.
        self._adapted_mean = None if space.evolves_model else self._adapted

    def generation(self, generation: Generation) -> Cost:
        """Return the cost of a generation: rollout, scoring and update, without evaluating, plotting or saving."""
        seconds = sum(generation.seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
        parts = [self._rollouts(generation, generation.rollouts, self._adapted)]
        parts += [self._rollouts(generation, generation.mean, self._adapted_mean)] if generation.mean else []
        members = len(generation.update.members)
        streams = 0 if generation.zero_variance else len({m.noise for m in generation.update.members})
        moved = float(es_flops(self._space, self._layout, members, streams)) if self.shape else None
        whole = sum(parts, Cost(forward_flops=moved)) + self._time(seconds)
        return replace(whole, prompts=len(generation.rows))  # the same ones for every member

    def _rollouts(self, generation: Generation, rollouts: Sequence[Rollout], adapted: Adapted | None) -> Cost:
        """Return the cost of rollouts that are ordered by member, each with all prompts."""
        members = len(rollouts) // max(1, len(generation.prompts))
        later = [turn for rollout in rollouts for turn in rollout.later]
        tokens = [len(rollout.token_ids) - sum(c for _, c in rollout.later) for rollout in rollouts]
        most = self._config.sampling.max_tokens
        first = answers_cost(self.shape, generation.prompts, tokens, adapted, most, members)
        return first + later_cost(self.shape, later, adapted)

    def followed(self, updates: Sequence[Update], seconds: float) -> Cost:
        """Return the cost of applying these updates."""
        streams = [len({m.noise for m in update.members}) for update in updates if any(update.coefficients)]
        flops = sum(es_flops(self._space, self._layout, 0, count) for count in streams)
        return Cost(forward_flops=float(flops) if self.shape else None) + self._time(seconds)

    def evaluation(
        self,
        prompts: Sequence[tuple[int, ...]],
        tokens: Sequence[int],
        seconds: float,
        later: Sequence[tuple[int, int]] = (),
    ) -> Cost:
        """Return the cost of the mean's completions, one per prompt; `later` are the turns after the first."""
        most = self._config.evaluation.max_tokens
        first = answers_cost(self.shape, prompts, tokens, self._adapted_mean, most)
        return first + later_cost(self.shape, later, self._adapted_mean) + self._time(seconds)

    def _time(self, seconds: float) -> Cost:
        # With tensor parallelism, other processes hold the memory.
        memory = peak_memory(self._device) if self.devices == 1 else None
        return time_cost(seconds, self.devices, memory)
