# SPDX-License-Identifier: Apache-2.0
"""The types that the loop, the engines, the spaces and the tasks exchange.

Suffixes are shapes: M members, P prompts (requests with samples folded in), T tokens, R rank. Plans and updates hold
only integers and floats, so that a whole run can be recorded in a few bytes per member and replayed anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # a grader's process starts much faster without torch
    import torch

Messages: TypeAlias = list[dict[str, str]]
Prompt: TypeAlias = str | Messages
"""A raw string for the tokenizer, or chat messages for its chat template."""
Example: TypeAlias = Mapping[str, Any]
"""One row of a data set, by column name."""
Slices: TypeAlias = tuple[slice, ...]
"""A rectangular part of a tensor: one slice per dimension, step 1."""
FinishReason: TypeAlias = Literal["stop", "length"]


def text_of(prompt: Prompt) -> str:
    """Join a prompt into one text; the contents of messages are separate lines."""
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
        """Whether this is the unperturbed model."""
        return self.sign == 0


MEAN = Member(index=-1, noise=0, sign=0)
"""The unperturbed model. An engine evaluates it like any other member."""


def population(size: int, *, antithetic: bool = False) -> tuple[Member, ...]:
    """Return the members of one generation: independent, or in pairs (2k, 2k+1) of opposite sign."""
    if antithetic:
        return tuple(Member(index=i, noise=i // 2, sign=1 - 2 * (i % 2)) for i in range(size))
    return tuple(Member(index=i, noise=i, sign=1) for i in range(size))


@dataclass(frozen=True, slots=True)
class Plan:
    """The members to evaluate. `sigma` multiplies the layout's scale of each tensor."""

    generation: int
    sigma: float
    members: tuple[Member, ...]


MEAN_PLAN = Plan(generation=0, sigma=0.0, members=(MEAN,))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of tokens. Temperature 0 is greedy; `top_p` in (0, 1].

    A completion ends at one of the texts `stop`, which is not part of it unless `keep_stop`.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    keep_stop: bool = False


class Player(Protocol):
    """Plays episodes: asks an engine for the turns of each member, and gives it the replies to them."""

    def play(self, engine: Any, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Play the episode of each request with each member, or with the one that it names; yield them as they end."""
        ...


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode of several turns, of one row of the data."""

    player: Player
    example: Example


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion from every member of a plan, or from one `member`.

    `index` is unique among the requests of one member in a rollout, in any order. `seed` belongs to the (prompt,
    sample): all members sample with common random numbers, whether they share a request or have requests with the same
    seed.
    """

    index: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    logprobs: bool = False
    given: tuple[int, ...] = ()
    """Tokens of the completion, which an engine then does not choose: only their log-probabilities are wanted."""
    member: Member | None = None
    """The member that generates the completion; None: every member."""
    episode: Episode | None = None
    """The episode that begins with this request; None: it has one turn. Engines never see it."""
    session: int | None = None
    """Number, unique in a process, of rollouts by the same weights. An engine may use what it computed for an earlier
    request of the same session and member whose tokens begin this prompt."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion. `token_ids` includes the stop token where one was produced; `text` has no special tokens.

    That of an episode has the tokens of all turns, the text of `evoalign.transcripts`, and in `later` the numbers of
    prompt tokens and of generated tokens of each turn after the first.

    `request` is the `index` of its Request, not its position in a list or batch. `logprobs`, if requested, has the
    log-probability of each token of `token_ids` under the member's distribution at temperature 1.
    """

    member: Member
    request: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None
    later: tuple[tuple[int, int], ...] = ()


Summation: TypeAlias = Literal["ordered", "library", "own"]
"""Order in which the terms of an update are added: `ordered`, one after another, with the same bits on every machine;
`library`, as a library's matrix product, used for `lowrank` on a CPU by earlier releases; `own`, as a custom
space. The bits of the last two may depend on the machine."""


@dataclass(frozen=True, slots=True)
class Update:
    """How the mean moves: it decays towards the start, then `+= step * scale * (1/N) * sum_i c_i sign_i noise_i`.

    `index` counts updates; `step` is eta times the sigma of generation 0, so with `sigma` it is the paper's alpha
    (Qiu et al., arXiv 2509.24372, algorithm 1). `sigma` is the one the members were evaluated with.
    `decay` is the share of the distance to the starting weights that is taken back, `summation` the order in which the
    terms are added.
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
"""`expert`: a linear matrix of one expert of a mixture, which the model fuses with others."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model under its Hugging Face name.

    `mean_abs` is the mean of |W| in float64. None: not known, before the weights are loaded or where they are packed.
    `peft`: whether PEFT can load an adapter of it.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    layer: int | None
    mean_abs: float | None
    peft: bool = True


@dataclass(frozen=True, slots=True)
class EvolvedTensor:
    """One tensor that evolves. Its noise has standard deviation `sigma * scale`.

    For `lora` a factor is such a tensor; for `lowrank` the product of the two factors has this deviation.

    `module` is the Hugging Face name of the weight that it changes, or empty if it changes several; for `lora`, `name`
    is a factor's name.
    """

    name: str
    shape: tuple[int, ...]
    module: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # a space may pass a list, which has no hash


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors that evolve, in order, with the scale of their noise: made once by `Space.layout`.

    `dtype` is the one the model is served in. `frozen` tensors belong to the mean but never move. `modules` are the
    weights that evolve or have adapters, by default those of the tensors.
    """

    tensors: tuple[EvolvedTensor, ...]
    seed: int
    dtype: str
    frozen: tuple[EvolvedTensor, ...] = ()
    rank: int = 0
    scaling: float = 1.0
    modules: tuple[str, ...] = ()
    by_name: Mapping[str, EvolvedTensor] = field(init=False, repr=False, compare=False)
    frozen_names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        object.__setattr__(self, "frozen", tuple(self.frozen))
        own = tuple(dict.fromkeys(t.module for t in self.tensors))
        object.__setattr__(self, "modules", tuple(self.modules) or own)
        object.__setattr__(self, "by_name", {t.name: t for t in (*self.tensors, *self.frozen)})
        object.__setattr__(self, "frozen_names", frozenset(t.name for t in self.frozen))

    def __getitem__(self, name: str) -> EvolvedTensor:
        return self.by_name[name]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The served dtype as a torch dtype."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def parameters(self) -> int:
        """Number of scalar parameters that evolve."""
        return sum(math.prod(t.shape) for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a started engine."""

    engine: str
    device: str
    dtype: str
    deterministic: bool
    model_hash: str
    """`weights_hash` of all tensors of the model as loaded."""
    master_bytes: int
    note: str = ""
    """A note for the user, such as which kernels are used and why not faster ones."""
    library: str = ""
    """The library that generates completions and its version, where the run does not already record it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one generation, for progress displays, figures and the user's hooks.

    `scores_MP` are the objective's scores, `fitness_M` their means over prompts, `seconds` the wall time by phase
    (rollout, score, update, other). `rows` are the training examples in the order of the requests: the example of a
    rollout (of all members x prompts) is `rows[rollout.request]`; `prompts` are their token ids, in the same order.
    `rewards` has the mean of each reward column if there are several (None: it applied to no completion), and `columns`
    their values member by member, NaN where a reward does not apply. `objective` is the objective's state after this
    generation, if it has one. `mean` are the unperturbed model's completions of the
    same requests, if the objective needs them; `tokens` includes theirs. With `task.settings`, `settings` has those
    that each member drew, and `prompts` has the prompts of each member in turn.
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
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    settings: tuple[Mapping[str, Any], ...] = ()

    @property
    def zero_variance(self) -> bool:
        """Whether all coefficients are exactly zero, since the scores of all members were equal: nothing is updated."""
        return not any(self.update.coefficients)
