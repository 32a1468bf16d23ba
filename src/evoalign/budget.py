# SPDX-License-Identifier: Apache-2.0
"""What a run spends: prompts, tokens, FLOPs by formula, seconds and memory, of ES and GRPO alike.

FLOPs are those of matrix products, two a multiply-and-add, of real tokens: padding, norms, activations, biases, rotary
embeddings and softmax are left out (docs/concepts/budget.md has the equations). The formula knows the shapes of
`FAMILIES`; of any other model FLOPs are None, and never a guess.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from evoalign.checkpoint import write_text
from evoalign.config import Config, VllmConfig
from evoalign.engines.specs import model_config
from evoalign.engines.transformers.decode import shared_prefix
from evoalign.errors import ModelError
from evoalign.spaces import Space
from evoalign.types import Generation, Layout, Rollout, TensorSpec

FORMAT_VERSION = 1
FAMILIES = frozenset({"gemma", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "olmo2", "opt",
                      "phi3", "qwen2", "qwen3", "smollm3"})  # fmt: skip
"""`model_type`s whose formula is tested against a count of the operations that torch runs."""
TRAINING_PHASES = ("rollout", "score", "update")
ADAM_FLOPS = 14
"""Elementwise operations of AdamW a trained number: two moments, their corrections, root, decay and step."""
_READS_INPUT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
_DROPOUTS = ("dropout", "hidden_dropout", "resid_pdrop")
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True)
class Cost:
    """What something took. Costs add up; a sum has the highest peak, and None where a part is not known.

    `prompt_tokens` counts a prompt once for each completion that answers it; `generated_tokens` includes stop tokens.
    `forward_flops` has all that is no backward pass. `peak_memory_bytes` is the highest so far, of this process since
    it began: see `peak_memory`.
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
        """As it stands in a row of metrics.jsonl."""
        return asdict(self)


def cost_of(tree: Any) -> Cost | None:
    """A Cost from its form in a file; None where that is none."""
    if not isinstance(tree, Mapping) or set(tree) != {f.name for f in fields(Cost)}:
        return None
    return Cost(**tree)


def totals(rows: Sequence[Mapping[str, Any]]) -> tuple[Cost, int]:
    """The sum over rows of metrics.jsonl, and how many of them have no cost: those rebuilt from a journal."""
    costs = [cost_of(row.get("budget")) for row in rows]
    known = [cost for cost in costs if cost is not None]
    return sum(known, Cost()), len(costs) - len(known)


def write(
    path: Path,
    method: Literal["es", "grpo"],
    devices: int,
    rows: Sequence[Mapping[str, Any]],
    evaluation: Cost | None,
    note: str = "",
) -> None:
    """results/budget.json. `evaluation` None: a part of it is not known."""
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
    write_text(path, json.dumps(tree, indent=2, allow_nan=False) + "\n")


def read_evaluation(path: Path) -> Cost | None:
    """What evaluation has taken so far, of a run that goes on; None where the file does not say."""
    try:
        return cost_of(json.loads(path.read_text(encoding="utf-8"))["evaluation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def peak_memory(device: str) -> int | None:
    """Bytes, the highest of this process so far. None where it is not known.

    On a GPU, what torch allocated on it, a cache that vLLM takes in advance included. On the CPU, resident memory,
    with Python and its libraries.
    """
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) if torch.cuda.is_available() else None
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear weight [rows, columns] = [out, in]; `layer` None: of no layer."""

    name: str
    rows: int
    columns: int
    layer: int | None

    @property
    def numbers(self) -> int:
        """Of the matrix."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the formula needs of a model.

    `matrices` are applied to every token, the `head` (tied or not) only where logits are wanted. `attention` is query
    heads times head_dim, which is not always the hidden size; grouped keys and values make their projections smaller,
    not the scores. `windows` holds the most keys a token of each layer sees. For backward passes: `first` are ends of
    the names of what reads a layer's input, and `last_again` says that a norm or dropout needs the output of a layer's
    last matrix, so that checkpointing has to compute that too.
    """

    matrices: tuple[Matrix, ...]
    head: Matrix
    attention: int
    windows: tuple[int | None, ...]
    parameters: int
    first: tuple[str, ...] = _READS_INPUT
    last_again: bool = False

    @property
    def reach(self) -> float:
        """The narrowest window."""
        return min((w for w in self.windows if w is not None), default=math.inf)


def shape_of(hf: Any, specs: Sequence[TensorSpec]) -> ModelShape:
    """The shape of a model, from its transformers configuration and its tensors.

    Raises ModelError for a model that the formula does not know: mixtures of experts, state-space layers, and whatever
    is not in `FAMILIES`.
    """
    text = hf.get_text_config()
    odd = [s.name for s in specs if s.kind == "other" and len(s.shape) > 1]
    kinds = _kinds(text)
    if text.model_type not in FAMILIES or odd or None in kinds:
        why = f"its tensor {odd[0]}" if odd else f"model type {text.model_type}"
        raise ModelError(f"the formula for FLOPs does not know {why}; they are left out of the budget")
    linear = [Matrix(s.name, s.shape[0], s.shape[1], s.layer) for s in specs if s.kind == "linear"]
    heads = [m for m in linear if m.name.endswith(_HEADS)] or [
        Matrix(s.name, s.shape[0], s.shape[1], None) for s in specs if s.kind == "embedding"
    ]  # a tied head is the first embedding; others hold positions
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelShape(
        matrices=tuple(m for m in linear if m != heads[0]),
        head=heads[0],
        attention=text.num_attention_heads * head_dim,
        windows=tuple(text.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        parameters=sum(math.prod(s.shape) for s in specs),
        first=_READS_INPUT + (("dense_h_to_4h",) if getattr(text, "use_parallel_residual", False) else ()),
        last_again=any("post_feedforward" in s.name for s in specs) or any(getattr(text, n, 0) for n in _DROPOUTS),
    )


def _kinds(text: Any) -> list[str | None]:
    """How each layer attends; None for a way that the formula does not know."""
    has_window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    alike = "sliding_attention" if has_window else "full_attention"
    kinds = getattr(text, "layer_types", None) or [alike] * text.num_hidden_layers
    return [kind if kind in ("full_attention", "sliding_attention") else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Adapted:
    """Low-rank factors of rank `rank` beside the linear weights of these names."""

    rank: int
    weights: frozenset[str]

    def numbers(self, shape: ModelShape) -> int:
        """In the factors: rank * (in + out) a weight."""
        return self.rank * sum(m.rows + m.columns for m in shape.matrices if m.name in self.weights)


def keys_seen(start: int, tokens: int, window: int | None = None) -> int:
    """Keys that causal attention looks at from positions start, start + 1, ...: min(position + 1, window) each."""
    end = start + tokens
    if window is None or end <= window:
        return (start + 1 + end) * tokens // 2
    inside = max(0, window - start)
    return (start + 1 + window) * inside // 2 + window * (tokens - inside)


def sequence_flops(shape: ModelShape, start: int, tokens: int, logits: int, adapted: Adapted | None = None) -> int:
    """Forward through the model for the positions from `start`, the ones before in a cache; logits of so many."""
    linear = sum(m.numbers for m in shape.matrices) + (adapted.numbers(shape) if adapted else 0)
    return 2 * linear * tokens + _attention(shape, start, tokens, 0) + 2 * shape.head.numbers * logits


def _attention(shape: ModelShape, start: int, tokens: int, lowest: int) -> int:
    """Scores and values, two products of `attention` numbers a key, of the layers from `lowest`."""
    kinds = Counter(shape.windows[lowest:])
    return 4 * shape.attention * sum(count * keys_seen(start, tokens, window) for window, count in kinds.items())


def forward_flops(shape: ModelShape, prompt_tokens: int, generated_tokens: int, adapted: Adapted | None = None) -> int:
    """One completion with a cache of keys and values.

    The last token that is generated is not read any more; each one that is generated takes the head once.
    """
    return sequence_flops(shape, 0, prompt_tokens + max(0, generated_tokens - 1), generated_tokens, adapted)


def rollout_flops(
    shape: ModelShape,
    prompts: Sequence[tuple[int, ...]],
    generated: Sequence[int],
    adapted: Adapted | None = None,
    room: int | None = None,
) -> int:
    """Completions of one member: token ids of each one's prompt, and how many tokens it generated.

    What prompts begin with in common is read once, and so is a prompt that is asked several times, as the engines do.
    `room` is the longest prompt and completion together that could come: beyond a window, prompts of unequal lengths
    do not share their beginning.
    """
    distinct = list(dict.fromkeys(prompts))
    shared = shared_prefix(distinct) if len(distinct) > 1 else 0
    if len(set(map(len, distinct))) > 1 and (room or 0) > shape.reach:
        shared = 0
    flops = sequence_flops(shape, 0, shared, 1, adapted) if shared else 0
    flops += sum(sequence_flops(shape, shared, len(p) - shared, 1, adapted) for p in distinct)
    answers = Counter((len(p), n - 1) for p, n in zip(prompts, generated, strict=True) if n > 1)
    return flops + sum(k * sequence_flops(shape, p, n, n, adapted) for (p, n), k in answers.items())


def backward_flops(
    shape: ModelShape,
    tokens: int,
    logits: int,
    adapted: Adapted | None = None,
    *,
    checkpointing: bool = False,
    recompute_head: bool = False,
) -> int:
    """Backward of one sequence of `tokens`, the loss being on `logits` of them.

    Without factors all weights take gradients, the embedding among them: twice the forward. With them, activations'
    gradients flow down to the lowest weight that has factors (with checkpointing, to the embedding), and only
    factors take weights' gradients. `checkpointing` computes the layers again, but for their last product, which
    nothing needs. `recompute_head`: so does a head that keeps no logits.
    """
    low = 0 if adapted is None or checkpointing else min(_layers(shape, adapted), default=0)
    through = [m for m in shape.matrices if adapted is None or checkpointing or _passes(shape, m, low)]
    flops = 2 * tokens * sum(m.numbers for m in through) + 2 * _attention(shape, 0, tokens, low)
    if adapted is None:
        flops += 2 * tokens * sum(m.numbers for m in shape.matrices)
    else:
        kept = {m.name for m in through}
        unused = sum(m.columns for m in shape.matrices if m.name in adapted.weights and m.name not in kept)
        flops += tokens * (4 * adapted.numbers(shape) - 2 * adapted.rank * unused)
    head = 1 + (adapted is None) + recompute_head
    flops += 2 * head * shape.head.numbers * logits
    return flops + (_again(shape, tokens, adapted) if checkpointing else 0)


def _layers(shape: ModelShape, adapted: Adapted) -> set[int]:
    return {m.layer for m in shape.matrices if m.name in adapted.weights and m.layer is not None}


def _passes(shape: ModelShape, matrix: Matrix, lowest: int) -> bool:
    """Whether a gradient goes through to the input; what reads the input of the lowest layer passes none on."""
    first = matrix.name.removesuffix(".weight").endswith(shape.first)
    return matrix.layer is None or matrix.layer > lowest or (matrix.layer == lowest and not first)


def _again(shape: ModelShape, tokens: int, adapted: Adapted | None) -> int:
    """A second forward of the layers, which ends (torch: early stop) before the last product of each."""
    flops = sequence_flops(shape, 0, tokens, 0, adapted)
    if shape.last_again:
        return flops
    last = {m.layer: m for m in shape.matrices if m.layer is not None}.values()
    saved = [adapted.rank * m.rows if adapted and m.name in adapted.weights else m.numbers for m in last]
    return flops - 2 * tokens * sum(saved)


def answers_cost(
    shape: ModelShape | None,
    prompts: Sequence[tuple[int, ...]],
    tokens: Sequence[int],
    adapted: Adapted | None,
    max_tokens: int,
) -> Cost:
    """One model's answers by an engine: the prompt of each completion and how many tokens that has; no seconds."""
    room = max(map(len, prompts), default=0) + max_tokens
    return Cost(
        prompts=len(set(prompts)),
        completions=len(tokens),
        prompt_tokens=sum(map(len, prompts)),
        generated_tokens=sum(tokens),
        forward_flops=float(rollout_flops(shape, prompts, tokens, adapted, room)) if shape else None,
        backward_flops=0.0 if shape else None,
    )


def time_cost(seconds: float, devices: int, peak_memory_bytes: int | None) -> Cost:
    """The part of a cost that is measured. A device counts for as long as it is kept, busy or not."""
    return Cost(wall_seconds=seconds, device_seconds=seconds * devices, peak_memory_bytes=peak_memory_bytes)


def grpo_cost(
    shape: ModelShape | None,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    *,
    prompts: int,
    reference: bool,
    checkpointing: bool,
    old_logprobs: bool,
    adapted: Adapted | None = None,
    all_logits: bool = False,
    generation_flops: int | None = None,
) -> Cost:
    """A step of TRL's GRPOTrainer that generates completions and trains on them once. See the two functions below."""
    drawn = grpo_generation(
        shape, prompt_lengths, completion_lengths, prompts=prompts, reference=reference, old_logprobs=old_logprobs,
        adapted=adapted, all_logits=all_logits, generation_flops=generation_flops,
    )  # fmt: skip
    return drawn + grpo_update(
        shape, prompt_lengths, completion_lengths, checkpointing=checkpointing, adapted=adapted, all_logits=all_logits
    )


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
    """One round of completions, of `prompts` groups: real tokens, no seconds. `shape` None: FLOPs are not known.

    TRL reads each prompt for each of its completions; completions from elsewhere took `generation_flops`. Then come
    passes over prompt and completion: for the log-probabilities of the policy that generated (`old_logprobs`: with
    vLLM, or where gradient_accumulation_steps is no multiple of steps_per_generation * num_iterations), and for the
    reference, which has no factors (`reference`: beta is not 0). `all_logits`: the head sees every position and not
    those of completions alone, as TRL's does without a GPU. `adapted` None: all weights train.
    """
    forward = generation_flops or 0
    for p, c in zip(prompt_lengths, completion_lengths, strict=True) if shape else ():
        assert shape is not None
        logits = p + c - 1 if all_logits else c
        forward += forward_flops(shape, p, c, adapted) if generation_flops is None else 0
        forward += old_logprobs * sequence_flops(shape, 0, p + c, logits, adapted)
        forward += reference * sequence_flops(shape, 0, p + c, logits)
    return Cost(
        prompts=prompts,
        completions=len(completion_lengths),
        prompt_tokens=sum(prompt_lengths),
        generated_tokens=sum(completion_lengths),
        forward_flops=float(forward) if shape else None,
        backward_flops=0.0 if shape else None,
    )


def grpo_update(
    shape: ModelShape | None,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    *,
    checkpointing: bool,
    adapted: Adapted | None = None,
    all_logits: bool = False,
) -> Cost:
    """One optimizer step on these completions: forward and backward of the policy, and AdamW; no seconds.

    It counts no prompts or tokens, which are those of `grpo_generation`: completions may serve several steps.
    """
    forward = backward = 0
    for p, c in zip(prompt_lengths, completion_lengths, strict=True) if shape else ():
        assert shape is not None
        logits = p + c - 1 if all_logits else c
        forward += sequence_flops(shape, 0, p + c, logits, adapted)
        backward += backward_flops(shape, p + c, logits, adapted, checkpointing=checkpointing, recompute_head=True)
    if shape:
        backward += ADAM_FLOPS * (adapted.numbers(shape) if adapted else shape.parameters)
    known = shape is not None
    return Cost(forward_flops=float(forward) if known else None, backward_flops=float(backward) if known else None)


def noise_numbers(space: Space, layout: Layout) -> int:
    """Normals of one member: of the factors where noise is low-rank, else of what evolves."""
    if layout.rank and space.evolves_model:
        return layout.rank * sum(sum(t.shape) for t in layout.tensors)
    return layout.parameters


def es_flops(space: Space, layout: Layout, members: int, streams: int) -> int:
    """Making members and moving the mean: multiply and add a number of noise, for each.

    An antithetic pair is one of the `streams`, whose noise the update makes once. With low-rank noise, the update is
    also the product of the factors, as large as the matrix.
    """
    product = 2 * layout.rank * layout.parameters if layout.rank and space.evolves_model else 0
    return 2 * noise_numbers(space, layout) * (members + streams) + product * streams


class Meter:
    """The costs of an ES run's generations and evaluations. `note` says why FLOPs are not known."""

    def __init__(self, config: Config, specs: Sequence[TensorSpec], space: Space, layout: Layout, device: str) -> None:
        self.devices = config.engine.tensor_parallel_size if isinstance(config.engine, VllmConfig) else 1
        self.shape: ModelShape | None = None
        self.note = ""
        self._max_tokens, self._space, self._layout, self._device = config.evaluation.max_tokens, space, layout, device
        try:
            self.shape = shape_of(model_config(config), specs)
        except ModelError as error:
            self.note = str(error)
        has_factors = space.carrier == "adapter" and layout.rank > 0
        self._adapted = Adapted(layout.rank, frozenset(t.module for t in layout.tensors)) if has_factors else None

    def generation(self, generation: Generation) -> Cost:
        """Of a generation: asking, scoring and moving, not evaluating, drawing or saving."""
        of_member: dict[int, list[Rollout]] = {}
        for rollout in generation.rollouts:
            of_member.setdefault(rollout.member.index, []).append(rollout)
        seconds = sum(generation.seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
        of_members = [
            answers_cost(
                self.shape,
                [generation.prompts[r.request] for r in asked],
                [len(r.token_ids) for r in asked],
                self._adapted,
                self._max_tokens,
            )
            for asked in of_member.values()
        ]
        members = len(generation.update.members)
        streams = 0 if generation.zero_variance else len({m.noise for m in generation.update.members})
        moved = float(es_flops(self._space, self._layout, members, streams)) if self.shape else None
        whole = sum(of_members, Cost(forward_flops=moved)) + self._time(seconds)
        return replace(whole, prompts=len(generation.prompts))  # the same ones for every member

    def evaluation(self, prompts: Sequence[tuple[int, ...]], tokens: Sequence[int], seconds: float) -> Cost:
        """Of the mean's answers to these prompts, one a completion."""
        # The mean of `lora` is an adapter too; that of the other spaces lies in the weights.
        adapted = None if self._space.evolves_model else self._adapted
        return answers_cost(self.shape, prompts, tokens, adapted, self._max_tokens) + self._time(seconds)

    def _time(self, seconds: float) -> Cost:
        # With tensor parallelism the memory is that of other processes.
        memory = peak_memory(self._device) if self.devices == 1 else None
        return time_cost(seconds, self.devices, memory)
