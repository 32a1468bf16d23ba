# SPDX-License-Identifier: Apache-2.0
"""KL(policy || base model) in nats per token and per completion, and the nats per token of completions under the base.

With p the policy and q the base model, and d = log q - log p of a token drawn from p (Schulman 2020, "Approximating
KL Divergence"):

    k1 = -d              unbiased; high variance, often below zero
    k2 = d^2 / 2         biased, low variance; correct to second order in the difference
    k3 = exp(d) - 1 - d  unbiased, never below zero; the control variate exp(d) - 1 has mean zero
    exact = sum_v p(v) (log p(v) - log q(v))   over the vocabulary at each position; no variance from the draw

All are means over the generated tokens of all completions, the first stop token included. Nats per token depend on the
length of completions; nats per completion, the KL of whole completions by the chain rule, do not. k1, k2 and k3 need
tokens drawn from p (temperature 1, top_p 1). The published conciseness experiments report k3 of tokens drawn at
temperature 0.7, which is biased and not comparable. `exact` sums over the next token, but prefixes are drawn.

The base model is loaded a second time. Its logits are computed first; then the policy's weights replace its own (or are
added as an adapter) for the policy's logits, and are restored. Weights are rounded to the served dtype. Arithmetic is
float32 on the CPU and the served dtype on a GPU. Both models take the same path, so equal weights give exactly 0. In
bfloat16 a KL below about 1e-3 is mostly rounding.

`Fluency` is how likely the base model finds completions: their nats per token, the logarithm of the perplexity. Greedy
text of the base model costs less than 1 nat per token, human text about 3 with a small model, and random tokens of
50,000 cost 10.8.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import nn

from evoalign import transcripts
from evoalign.config import Config
from evoalign.engines import Engine
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.engine import dtype_on, load_model
from evoalign.errors import EvoalignError, ModelError
from evoalign.evaluation import Scored
from evoalign.models.tensors import tensors_of
from evoalign.rollouts import collect, derive_seed
from evoalign.setup import Parts, Served
from evoalign.spaces import Adapter
from evoalign.statistics import ratio
from evoalign.tasks import Task
from evoalign.tokens import Tokens
from evoalign.types import MEAN, MEAN_PLAN, Example, Request, Sampling

CHUNK_BYTES = 1 << 26
"""Bytes of float64 log-probabilities [tokens, vocabulary] computed at a time."""
KEPT_BYTES = 1 << 30
"""Bytes of the base model's logits kept until the policy's are computed."""
MOST_DRAWS = 64
"""Most completions per prompt: a policy of empty completions never reaches `checks.kl_tokens`."""
MOST_COMPLETIONS = 32
"""Completions before and after training whose nats per token are measured: one per example first."""
ESTIMATORS = ("k1", "k2", "k3", "exact")
Forward: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [1, T] to logits [1, T, V]."""
Policy: TypeAlias = Served | nn.Module | Forward
"""The mean of an engine, a Hugging Face causal language model (PEFT models too), or a function."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its generated tokens, the stop token included."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL from the base model in nats per token over `tokens` tokens: three estimates and the exact value.

    `low` and `high` are the 95 % interval of `exact` over prompts (Fieller's, for a ratio); `completion` is the exact
    KL in nats per completion, with its interval. Intervals are None for fewer than three prompts, or if all are equal.
    """

    k1: float
    k2: float
    k3: float
    exact: float
    tokens: int
    low: float | None = None
    high: float | None = None
    completion: float | None = None
    completion_low: float | None = None
    completion_high: float | None = None
    prompts: int | None = None
    completions: int | None = None

    def __str__(self) -> str:
        parts: list[str] = []
        for value, low, high, unit in (
            (self.exact, self.low, self.high, "token"),
            (self.completion, self.completion_low, self.completion_high, "completion"),
        ):
            if value is not None:
                interval = "" if low is None or high is None else f" (95 %: {low:.3g} to {high:.3g})"
                parts.append(f"{value:.4g} nats per {unit}{interval}")
        if self.completion is not None:
            parts[-1] += f", over {self.completions:,} completions of {self.prompts:,} prompts"
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Fluency:
    """Nats per token under the base model, over all tokens but the first of each completion, before and after training.

    The first token is left out because training is meant to change how a completion begins. None if there are no such
    tokens. `each` has the value of every completion after training; None for those that were not measured.
    """

    before: float | None
    after: float | None
    tokens_before: int
    tokens_after: int
    each: tuple[float | None, ...] = ()

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the object for results/evaluation.json."""
        return {name: getattr(self, name) for name in ("before", "after", "tokens_before", "tokens_after")}


def estimators(policy_T: torch.Tensor, base_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return k1, k2 and k3 of each token, float64 [T], from its log-probability under both models.

    k1 and k3 are unbiased for tokens drawn from the policy at temperature 1, top_p 1.
    """
    d_T = base_T.double() - policy_T.double()
    return -d_T, d_T.square() / 2, d_T.expm1() - d_T


def exact(policy_TV: torch.Tensor, base_TV: torch.Tensor) -> torch.Tensor:
    """Return KL(policy || base) at each position, [T], from the log-probabilities of all tokens, with 0 log 0 = 0."""
    p_TV = policy_TV.exp()
    return torch.where(p_TV > 0, p_TV * (policy_TV - base_TV), 0).sum(-1)


def is_due(config: Config, done: int) -> bool:
    """Whether the divergence is measured after `done` generations."""
    every = config.checks.kl_every
    return every > 0 and done % every == 0


def draw(engine: Engine, tokens: Tokens, task: Task, examples: Sequence[Example], config: Config) -> list[Sample]:
    """Sample completions of the mean for the first `checks.kl_prompts` examples, at temperature 1 and top_p 1.

    Each prompt is sampled equally often, until there are `checks.kl_tokens` tokens, at most `MOST_DRAWS` times. The
    seeds are the same at every measurement of a run, which reduces noise between its points.
    """
    sampling = Sampling(config.evaluation.max_tokens, temperature=1.0, top_p=1.0)
    prompts = [tokens.encode(task.prompt(example), task.tools) for example in examples[: config.checks.kl_prompts]]
    samples: list[Sample] = []
    done, wanted = 0, 1
    while prompts and done < wanted:
        keys = [(i, k) for k in range(done, wanted) for i in range(len(prompts))]
        requests = [
            Request(at, prompts[i], sampling, derive_seed("divergence", config.seed, i, *([k] if k else [])))
            for at, (i, k) in enumerate(keys)
        ]
        samples += [Sample(requests[r.request].prompt_ids, r.token_ids) for r in collect(engine, MEAN_PLAN, requests)]
        done = wanted
        if (found := sum(len(s.token_ids) for s in samples)) < config.checks.kl_tokens:
            wanted = min(MOST_DRAWS, ceil(done * config.checks.kl_tokens / found) if found else MOST_DRAWS)
    return samples


class Reference:
    """The base model, loaded at first use and freed by `close`.

    `dtype` is the dtype of the policy's weights (None: the one in which this config is served on `device`).
    """

    def __init__(self, config: Config, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> None:
        self.config, self.device = config, torch.device(device)
        self.dtype = dtype or dtype_on(config.model, self.device)
        self._model: Any = None

    @classmethod
    def of(cls, served: Served) -> Reference:
        """Create a reference for an engine: on its device if that is in this process, else on the CPU."""
        device = served.facts.device if served.config.engine.serves_here else "cpu"
        return cls(served.config, device, served.layout.torch_dtype)

    @property
    def model(self) -> Any:
        """The loaded model. Raises ModelError if it does not fit."""
        if self._model is None:
            try:
                model = load_model(self.config.model, self.dtype)
                is_packed = getattr(model, "is_quantized", False)  # by bitsandbytes, which has its own products
                self._model = model.float() if self.device.type == "cpu" and not is_packed else model.to(self.device)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ModelError(
                    f"the second copy of model {self.config.model.name}, for checks.kl_every or checks.perplexity, "
                    f"does not fit the memory of {self.device}; set checks.kl_every: 0 and checks.perplexity: false, "
                    "or engine.device: cpu"
                ) from error
        return self._model

    def close(self) -> None:
        """Free the model."""
        self._model = None

    def divergence(self, policy: Policy, samples: Sequence[Sample]) -> Divergence:
        """Return the KL along `samples`, drawn from `policy` at temperature 1 and top_p 1.

        Raises EvoalignError if there are no tokens, or if a logit is not a number.
        """
        return summarise(samples, self.sums(policy, samples))

    @torch.no_grad()
    def sums(self, policy: Policy, samples: Sequence[Sample]) -> torch.Tensor:
        """Return the sums over tokens of k1, k2, k3 and the exact KL of each sample, float64 [N, 4].

        A module is measured in evaluation mode, and its mode is restored.
        """
        sums: list[torch.Tensor] = []
        if not sum(len(s.token_ids) for s in samples):
            raise EvoalignError("no token was generated, so the divergence cannot be measured; check checks.kl_prompts")
        for group in groups(self.model, samples):
            base = [logits_of(self.model, sample, self.device) for sample in group]
            with self._forward(policy) as forward:
                for sample, base_TV in zip(group, base, strict=True):
                    sums.append(sums_of(forward(sample).to(self.device), base_TV, sample.token_ids))
        return torch.stack(sums)

    @torch.no_grad()
    def nats(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Return -log q of each generated token under the base model: a float64 tensor [T] on the CPU per sample."""
        found: list[torch.Tensor] = []
        for sample in samples:
            ids_T = torch.tensor(sample.token_ids, device=self.device)[:, None]
            logits_TV = logits_of(self.model, sample, self.device)
            tokens = max(1, CHUNK_BYTES // (8 * logits_TV.shape[1]))
            parts = [
                -logits_TV[i : i + tokens].double().log_softmax(-1).gather(1, ids_T[i : i + tokens])[:, 0].cpu()
                for i in range(0, len(ids_T), tokens)
            ]
            found.append(torch.cat(parts))
        return found

    @contextmanager
    def _forward(self, policy: Policy) -> Generator[Callable[[Sample], torch.Tensor]]:
        """Yield a function from a sample to the policy's logits [T, V]."""
        if isinstance(policy, Served):
            with self._written(policy):
                yield lambda sample: logits_of(self.model, sample, self.device)
        elif isinstance(policy, nn.Module):
            training, device = policy.training, next(policy.parameters()).device
            policy.eval()
            try:
                yield lambda sample: logits_of(policy, sample, device)
            finally:
                policy.train(training)
        else:
            yield lambda sample: policy(_ids(sample, self.device))[0, len(sample.prompt_ids) - 1 : -1]

    @contextmanager
    def _written(self, served: Served) -> Generator[None]:
        """Give the model the engine's mean inside the context, and restore the base bit for bit after it."""
        parameters = tensors_of(self.model)
        unknown = f"checks.kl_every: the divergence of space {served.space.name} cannot be measured (set it to 0)"
        kept: dict[str, torch.Tensor] = {}
        beside: dict[str, torch.Tensor] = {}
        adapters: Adapters | None = None
        try:
            for name, tensor in served.engine.state():
                if name in parameters:
                    kept[name] = parameters[name].to("cpu", copy=True)
                    parameters[name].copy_(tensor.to(self.dtype))
                else:
                    beside[name] = tensor.to(self.device)
            if served.space.carrier == "adapter":
                adapters = Adapters(self.model, served.layout.modules)
                if not self._set_adapters(served, adapters, {**parameters, **beside}) and beside:
                    raise ModelError(f"{unknown}: its mean is not in the model, and its `adapter` returns None")
            elif beside:
                raise ModelError(f"{unknown}: the model has no tensor {min(beside)}, and the space has no adapter")
            yield
        finally:
            if adapters is not None:
                adapters.remove()
            for name, tensor in kept.items():
                parameters[name].copy_(tensor)

    def _set_adapters(self, served: Served, adapters: Adapters, weights: dict[str, torch.Tensor]) -> bool:
        """Set the mean's adapter of each module, in the served dtype; return whether there is any."""
        found = False
        for name in served.layout.modules:
            adapter = served.space.adapter(served.layout, name, weights.__getitem__, MEAN_PLAN, (MEAN,))
            if adapter is not None:
                found = True
                a, b = adapter.a.to(self.model.dtype), adapter.b.to(self.model.dtype)
                bias = None if adapter.bias is None else adapter.bias.to(self.model.dtype)
                adapters.set(name, Adapter(a, b, adapter.scaling, bias))
        return found


def standard_errors(samples: Sequence[Sample], sums_N4: torch.Tensor) -> dict[str, float | None]:
    """Return standard errors of k1, k2, k3 and `exact` in nats per token, over prompts; None for fewer than three.

    The errors are those of a ratio of sums, linearised (Cochran 1977, 6.4). The arguments are those of `summarise`.
    """
    prompts = list(dict.fromkeys(s.prompt_ids for s in samples))
    nats_P4 = torch.zeros(len(prompts), 4, dtype=torch.float64)
    tokens_P = torch.zeros(len(prompts), dtype=torch.float64)
    for sample, nats_4 in zip(samples, sums_N4.double(), strict=True):
        at = prompts.index(sample.prompt_ids)
        nats_P4[at] += nats_4
        tokens_P[at] += len(sample.token_ids)
    count, total = len(prompts), float(tokens_P.sum())
    residual_P4 = nats_P4 - tokens_P[:, None] * nats_P4.sum(0) / total
    errors = (residual_P4.square().sum(0) * count / max(count - 1, 1)).sqrt() / total
    return dict(zip(ESTIMATORS, errors.tolist() if count > 2 else [None] * 4, strict=True))


def summarise(samples: Sequence[Sample], sums_N4: torch.Tensor) -> Divergence:
    """Return the divergence from `Reference.sums`, float64 [N, 4]. Raises EvoalignError if one is not finite.

    Completions of one prompt are alike, so intervals are over prompts.
    """
    if not bool(sums_N4.isfinite().all()):
        raise EvoalignError("the divergence from the base model is not finite: the logits of one of the models are not")
    count = sum(len(s.token_ids) for s in samples)
    k1, k2, k3, whole = (sums_N4.sum(0) / count).tolist()
    of_prompt: dict[tuple[int, ...], list[float]] = {}
    for sample, nats in zip(samples, sums_N4[:, 3].tolist(), strict=True):
        sums = of_prompt.setdefault(sample.prompt_ids, [0.0, 0.0, 0.0])
        sums[:] = sums[0] + nats, sums[1] + len(sample.token_ids), sums[2] + 1
    nats_P, tokens_P, draws_P = zip(*of_prompt.values(), strict=True)
    per_token, per_completion = (ratio(nats_P, of_P) for of_P in (tokens_P, draws_P))
    return Divergence(
        k1,
        k2,
        k3,
        whole,
        count,
        low=None if per_token.low is None else max(0.0, per_token.low),  # no divergence is below 0
        high=per_token.high,
        completion=per_completion.mean,
        completion_low=None if per_completion.low is None else max(0.0, per_completion.low),
        completion_high=per_completion.high,
        prompts=len(of_prompt),
        completions=len(samples),
    )


def measure(parts: Parts, reference: Reference) -> Divergence:
    """Measure the divergence of the engine's mean on the test split."""
    samples = draw(parts.engine, parts.tokens, parts.task, parts.rows("test"), parts.config)
    return reference.divergence(parts, samples)


def _ids(sample: Sample, device: torch.device) -> torch.Tensor:
    return torch.tensor([[*sample.prompt_ids, *sample.token_ids]], device=device)


def logits_of(model: Any, sample: Sample, device: torch.device) -> torch.Tensor:
    """Return the logits [T, V] before each generated token: one row, no cache, no padding."""
    kept = len(sample.token_ids) + 1
    out = model(input_ids=_ids(sample, device), use_cache=False, logits_to_keep=kept)
    return out.logits[0, -kept:-1]


def groups(model: Any, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Yield groups of samples whose logits fit `KEPT_BYTES` together; at least one sample each."""
    bytes_per_token = model.config.get_text_config().vocab_size * model.dtype.itemsize
    group: list[Sample] = []
    for sample in samples:
        if group and sum(len(s.token_ids) for s in (*group, sample)) * bytes_per_token > KEPT_BYTES:
            yield group
            group = []
        group.append(sample)
    yield group


def sums_of(policy_TV: torch.Tensor, base_TV: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Return the sums over tokens of k1, k2, k3 and the exact KL, float64 [4] on the CPU."""
    ids_T = torch.tensor(ids, device=policy_TV.device)[:, None]
    tokens = max(1, CHUNK_BYTES // (8 * policy_TV.shape[1]))
    total = torch.zeros(4, dtype=torch.float64)
    for i in range(0, len(ids), tokens):
        p_TV, q_TV = (logits[i : i + tokens].double().log_softmax(-1) for logits in (policy_TV, base_TV))
        p_T, q_T = (logp_TV.gather(1, ids_T[i : i + tokens])[:, 0] for logp_TV in (p_TV, q_TV))
        total += torch.stack([k.sum() for k in (*estimators(p_T, q_T), exact(p_TV, q_TV))]).cpu()
    return total


def fluency(
    reference: Reference,
    tokens: Tokens,
    task: Task,
    examples: tuple[Sequence[Example], Sequence[Example]],
    before: Sequence[Scored],
    after: Sequence[Scored],
) -> Fluency:
    """Measure `MOST_COMPLETIONS` completions of each side. Raises ModelError if the base model does not fit.

    `examples` are those of the completions before and after. Only the first turn of an episode is measured. Texts are
    encoded again, without the stop token, so tokens may differ from those that were drawn.
    """
    chosen: list[list[int]] = []
    found: list[list[torch.Tensor]] = []
    for rows, side in zip(examples, (before, after), strict=True):
        # An evaluation lists all completions of an example in a row: take one of each example first.
        order = sorted(range(len(side)), key=lambda i: (side[i].seed, side[i].sample, side[i].example))
        chosen.append(order[:MOST_COMPLETIONS])
        samples = [
            Sample(
                tokens.encode(task.prompt(rows[side[i].example]), task.tools),
                tokens.encode_text(transcripts.turns(side[i].text)[0]),
            )
            for i in chosen[-1]
        ]
        try:
            nats = iter(reference.nats([sample for sample in samples if sample.token_ids]))
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(f"the base model does not fit the memory of {reference.device} twice") from error
        found.append([next(nats)[1:] if sample.token_ids else torch.zeros(0) for sample in samples])
    counts = [sum(map(len, parts)) for parts in found]
    sums = [float(sum(float(part.sum()) for part in parts)) for parts in found]
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    each: list[float | None] = [None] * len(after)
    for i, part in zip(chosen[1], found[1], strict=True):
        each[i] = float(part.mean()) if len(part) else None
    return Fluency(means[0], means[1], counts[0], counts[1], tuple(each))
