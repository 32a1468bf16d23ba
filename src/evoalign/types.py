# SPDX-License-Identifier: Apache-2.0
"""The nouns that pass between the loop, the engines, the spaces and the tasks.

Shapes are written as suffixes: M members, P prompts (requests with samples folded in), T tokens, R rank.
Nothing here knows a model library: plans and updates hold integers and floats only, so that a whole run can be
written down in a few bytes a member and replayed anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:  # a grader's process needs none and starts in a fraction of the time
    import torch

Messages: TypeAlias = list[dict[str, str]]
Prompt: TypeAlias = str | Messages
"""A raw string, fed to the tokenizer as it is, or chat messages for the tokenizer's chat template."""
Example: TypeAlias = Mapping[str, Any]
"""One row of a data set, by column name."""
Slices: TypeAlias = tuple[slice, ...]
"""A rectangular part of a tensor: one slice a dimension, step 1."""
FinishReason: TypeAlias = Literal["stop", "length"]


def text_of(prompt: Prompt) -> str:
    """A prompt as one text: of messages their contents, each on a line of its own."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


@dataclass(frozen=True, slots=True)
class Member:
    """One candidate of a population: `mean + sign * sigma * scale * noise[noise]`.

    `index` is its row in the scores. `noise` is the last word of the noise counter; the two members of an
    antithetic pair share it and differ in `sign`.
    """

    index: int
    noise: int
    sign: int

    @property
    def is_mean(self) -> bool:
        """True for the unperturbed model."""
        return self.sign == 0


MEAN = Member(index=-1, noise=0, sign=0)
"""The unperturbed model. Evaluation takes the same path through an engine as training."""


def population(size: int, *, antithetic: bool = False) -> tuple[Member, ...]:
    """The members of one generation: independent, or in pairs (2k, 2k+1) of opposite sign."""
    if antithetic:
        return tuple(Member(index=i, noise=i // 2, sign=1 - 2 * (i % 2)) for i in range(size))
    return tuple(Member(index=i, noise=i, sign=1) for i in range(size))


@dataclass(frozen=True, slots=True)
class Plan:
    """Who is evaluated: no tensors. `sigma` multiplies the layout's scale of each tensor."""

    generation: int
    sigma: float
    members: tuple[Member, ...]


MEAN_PLAN = Plan(generation=0, sigma=0.0, members=(MEAN,))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; `top_p` in (0, 1].

    A completion ends where one of the texts `stop` comes up, which its own text leaves out unless `keep_stop`.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    keep_stop: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One completion wanted of every member of a plan, or of the one that it names.

    `index` identifies the request among those of one member in a rollout: unique, in any order, beginning anywhere.
    `seed` belongs to the (prompt, sample) and not to the member: all members draw with common random numbers, whether
    they share a request or each have their own of the same seed.
    """

    index: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    logprobs: bool = False
    member: Member | None = None
    """Who answers; None: every member."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion. `token_ids` includes the stop token where one was produced; `text` has no special tokens.

    `request` is the `index` of its Request, never the position of that request in a list or a batch.
    `logprobs` holds, where asked for, the log-probability of each token of `token_ids` under the member's own
    untempered distribution.
    """

    member: Member
    request: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None


Summation: TypeAlias = Literal["ordered", "library", "own"]
"""How the terms of an update are added: `ordered`, one after another, which has the same bits on every machine;
`library`, in `lowrank` as the library's matrix product adds them, which journals of before were made with on a CPU;
`own`, as a space of one's own does. The last two may have other bits on another machine."""


@dataclass(frozen=True, slots=True)
class Update:
    """How the mean moves: it decays towards the start, then `+= step * scale * (1/N) * sum_i c_i sign_i noise_i`.

    `index` counts updates; `step` is eta times the sigma of generation 0, so with `sigma` it is the paper's alpha
    (Qiu et al., arXiv 2509.24372, algorithm 1). `sigma` is the one the members were evaluated with.
    `decay` is the share of the distance to the starting weights that is taken back, `summation` how the terms of the
    sum are added.
    """

    index: int
    generation: int
    members: tuple[Member, ...]
    coefficients: tuple[float, ...]
    sigma: float
    step: float
    decay: float = 0.0
    summation: Summation = "ordered"


TensorKind: TypeAlias = Literal["linear", "expert", "embedding", "norm", "bias", "other"]
"""`expert`: a linear matrix of one expert of a mixture, which is fused with others in the model."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model under its Hugging Face name. `mean_abs` is the mean of |W| in float64.

    `peft`: whether PEFT loads an adapter of it, if it is a linear matrix.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    layer: int | None
    mean_abs: float
    peft: bool = True


@dataclass(frozen=True, slots=True)
class EvolvedTensor:
    """One tensor that evolves. The noise has standard deviation `sigma * scale` (a factor's product, for factors).

    `module` is the Hugging Face name of the weight it belongs to; for `lora` that is another tensor than the
    factor itself.
    """

    name: str
    shape: tuple[int, ...]
    module: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Layout:
    """What evolves, in order, and how wide: made once from the model's tensor specs by `Space.layout`.

    `dtype` is the one the model is served in. `frozen` tensors belong to the mean but never move.
    """

    tensors: tuple[EvolvedTensor, ...]
    seed: int
    dtype: str
    frozen: tuple[EvolvedTensor, ...] = ()
    rank: int = 0
    scaling: float = 1.0
    by_name: Mapping[str, EvolvedTensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {t.name: t for t in (*self.tensors, *self.frozen)})

    def __getitem__(self, name: str) -> EvolvedTensor:
        return self.by_name[name]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The served dtype as torch has it."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def parameters(self) -> int:
        """Numbers that evolve."""
        return sum(math.prod(t.shape) for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says of itself once it has started."""

    engine: str
    device: str
    dtype: str
    deterministic: bool
    model_hash: str
    """`weights_hash` of all the model's tensors as they were loaded."""
    master_bytes: int
    note: str = ""
    """What else a user should know, such as which kernels serve the members and why not faster ones."""
    library: str = ""
    """What answers, such as a library and its version, where it is other than what every run records."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one generation came to: handed to progress displays, figures and hooks of the user's own.

    `scores_MP` are what the objective made of the rewards, `seconds` the wall time by phase (rollout, score, update,
    other).
    `fitness_M` is the mean over prompts. `rows` are the training examples in the order of the requests, so that
    `rollouts` (all members x prompts) answer the examples `rows[rollout.request]`; `prompts` are their token ids, in
    the same order. A zero-variance generation moves nothing. `rewards` has the mean of each reward column where there
    are several (None: it applied to no completion), `objective` the state after this generation where there is one.
    `mean` are the unperturbed model's answers to the same requests, where the objective asks for them; `tokens` counts
    theirs too.
    """

    index: int
    total: int
    fitness_M: tuple[float, ...]
    scores_MP: tuple[tuple[float, ...], ...]
    update: Update
    weights_hash: str
    tokens: int
    empty_share: float
    truncated_share: float
    seconds: Mapping[str, float]
    evaluation: Mapping[str, float] | None = None
    rows: tuple[int, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    objective: Mapping[str, float] = field(default_factory=dict[str, float])
    mean: tuple[Rollout, ...] = ()

    @property
    def zero_variance(self) -> bool:
        """All coefficients are exactly zero: the members could not be told apart."""
        return not any(self.update.coefficients)
