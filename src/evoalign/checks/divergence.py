# SPDX-License-Identifier: Apache-2.0
"""KL(policy || base model) in nats a generated token and nats a completion, along completions that the policy draws.

With p the policy and q the base model, and d = log q - log p of a token drawn from p (Schulman 2020, "Approximating
KL Divergence"):

    k1 = -d            unbiased; high variance, often below zero
    k2 = d^2 / 2       biased, low variance; right to second order in the difference
    k3 = exp(d) - 1 - d  unbiased, never below zero; the control variate exp(d) - 1 has mean zero
    exact = sum_v p(v) (log p(v) - log q(v))   over the vocabulary at each position: no draw, no variance there

All four are means over the generated tokens of all completions together, the first stop token included. Nats a token
depend on how long the completions are: a policy that learned to answer in two words has all that it learned in few
tokens. Nats a completion, the KL of whole completions by the chain rule, do not, and stand beside them. The three
estimators need tokens drawn from p: temperature 1, top_p 1. The KL of the published conciseness experiments is k3 of
tokens drawn at temperature 0.7, which are not draws from p: it is biased, and not comparable with these numbers.
`exact` sums over the next token alone; the prefixes are still drawn, so it too depends on how.

The base model is loaded once more. Its logits come first; then the policy's weights take its place, or stand beside
it as an adapter, for the policy's logits, and the base's own are put back. Weights are those that are served: rounded
to the served dtype. On the CPU the arithmetic is float32 whatever that dtype is, on a GPU it is that dtype. Both models
take the same path in the same shapes, so equal weights give exactly 0. Different weights differ in their rounding too:
in bfloat16 the logits have eight bits, and a KL below about 1e-3 is mostly that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import nn

from evoalign.config import Config
from evoalign.engines import Engine
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.engine import dtype_on, load_model
from evoalign.errors import EvoalignError, ModelError
from evoalign.models.tensors import tensors_of
from evoalign.rollouts import collect, derive_seed
from evoalign.setup import Parts, Served
from evoalign.spaces import Adapter
from evoalign.statistics import Estimate, ratio
from evoalign.tasks import Task
from evoalign.tokens import Tokens
from evoalign.types import MEAN, MEAN_PLAN, Example, Request, Sampling

CHUNK_BYTES = 1 << 26
"""Of log-probabilities [tokens, vocabulary] in float64, at a time."""
KEPT_BYTES = 1 << 30
"""Of the base model's logits that wait for the policy's; between such groups the weights change places."""

MOST_DRAWS = 64
"""Completions of a prompt at the most: a mean that answers with nothing would be asked without end."""

ESTIMATORS = ("k1", "k2", "k3", "exact")
Forward: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [1, T] to logits [1, T, V]."""
Policy: TypeAlias = Served | nn.Module | Forward
"""The mean of an engine, a Hugging Face causal language model (PEFT's too) as it stands, or a function."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and what was generated, the stop token included."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL from the base model in nats a token, three estimates and the exact one; over so many tokens.

    `low` and `high` are the 95 % interval of `exact` over prompts (Fieller's, of a ratio); `completion` is the exact
    one in nats a completion, with its own. None where there is no interval: of fewer than three prompts, or where all
    are alike.
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
        nats = [self._said(self.exact, self.low, self.high, "nats a token")]
        if self.completion is not None:
            whole = self._said(self.completion, self.completion_low, self.completion_high, "nats a completion")
            nats.append(f"{whole}, over {self.completions:,} completions of {self.prompts:,} prompts")
        return "; ".join(nats)

    @staticmethod
    def _said(value: float, low: float | None, high: float | None, unit: str) -> str:
        sure = "" if low is None or high is None else f" (95 %: {low:.3g} to {high:.3g})"
        return f"{value:.4g} {unit}{sure}"


def estimators(policy_T: torch.Tensor, base_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k1, k2 and k3 of each token, float64 [T], from its log-probability under both models.

    Unbiased (k1, k3) where the tokens are draws from the policy: temperature 1, top_p 1.
    """
    d_T = base_T.double() - policy_T.double()
    return -d_T, d_T.square() / 2, d_T.expm1() - d_T


def exact(policy_TV: torch.Tensor, base_TV: torch.Tensor) -> torch.Tensor:
    """KL(policy || base) at each position, [T], from the log-probabilities of all tokens. 0 log 0 is 0."""
    p_TV = policy_TV.exp()
    return torch.where(p_TV > 0, p_TV * (policy_TV - base_TV), 0).sum(-1)


def is_due(config: Config, done: int) -> bool:
    """Whether the divergence is measured after so many generations."""
    every = config.checks.kl_every
    return every > 0 and done % every == 0


def draw(engine: Engine, tokens: Tokens, task: Task, examples: Sequence[Example], config: Config) -> list[Sample]:
    """What the mean answers to the first `checks.kl_prompts` examples, at temperature 1 and top_p 1.

    All are asked equally often, until `checks.kl_tokens` tokens are there, or each was asked `MOST_DRAWS` times. The
    seeds are the same at each measurement of a run, so that its points differ less by chance.
    """
    sampling = Sampling(config.evaluation.max_tokens, temperature=1.0, top_p=1.0)
    prompts = [tokens.encode(task.prompt(example)) for example in examples[: config.checks.kl_prompts]]
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
    """The base model, to measure policies against. Loaded at the first use; `close` frees it.

    `dtype` is that of the policy's weights; None: what a model of this config is served in on `device`.
    """

    def __init__(self, config: Config, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> None:
        self.config, self.device = config, torch.device(device)
        self.dtype = dtype or dtype_on(config.model, self.device)
        self._model: Any = None

    @classmethod
    def of(cls, served: Served) -> Reference:
        """Beside an engine: on its device where that is in this process, else on the CPU."""
        device = served.facts.device if served.config.engine.serves_here else "cpu"
        return cls(served.config, device, served.layout.torch_dtype)

    @property
    def model(self) -> Any:
        """The copy. Raises ModelError."""
        if self._model is None:
            try:
                model = load_model(self.config.model, self.dtype)
                self._model = model.float() if self.device.type == "cpu" else model.to(self.device)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ModelError(
                    f"the second copy of model {self.config.model.name}, for checks.kl_every or checks.perplexity, "
                    f"does not fit the memory of {self.device}; set checks.kl_every: 0 and checks.perplexity: false, "
                    "or engine.device: cpu"
                ) from error
        return self._model

    def close(self) -> None:
        """Free the copy."""
        self._model = None

    def divergence(self, policy: Policy, samples: Sequence[Sample]) -> Divergence:
        """KL from the base model along `samples`, which are to be draws of `policy` at temperature 1, top_p 1.

        Raises EvoalignError where there is no token, or where a logit is not a number.
        """
        return summarise(samples, self.sums(policy, samples))

    @torch.no_grad()
    def sums(self, policy: Policy, samples: Sequence[Sample]) -> torch.Tensor:
        """Sums over tokens of k1, k2, k3 and the exact KL of each sample, float64 [N, 4]; see `divergence`.

        A module is measured in evaluation mode and put back into the mode that it was in.
        """
        sums: list[torch.Tensor] = []
        if not sum(len(s.token_ids) for s in samples):
            raise EvoalignError("no token was generated, so there is no divergence to measure; give it some prompts")
        for group in groups(self.model, samples):
            base = [logits_of(self.model, sample, self.device) for sample in group]
            with self._forward(policy) as forward:
                for sample, base_TV in zip(group, base, strict=True):
                    sums.append(sums_of(forward(sample).to(self.device), base_TV, sample.token_ids))
        return torch.stack(sums)

    @torch.no_grad()
    def nats(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """-log q of each generated token under the base model, float64 [T] on the CPU; a tensor for each sample."""
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
        """A function from a sample to the policy's logits [T, V]."""
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
        """The copy serves the mean as the engine does; then it is the base again, bit for bit."""
        parameters = tensors_of(self.model)
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
                adapters = self._hook(served, {**parameters, **beside}, needed=bool(beside))
            elif beside:
                raise ModelError(f"{_unknown(served)}: the model has no {min(beside)}, and there is no adapter")
            yield
        finally:
            if adapters is not None:
                adapters.remove()
            for name, tensor in kept.items():
                parameters[name].copy_(tensor)

    def _hook(self, served: Served, weights: dict[str, torch.Tensor], *, needed: bool) -> Adapters:
        """The mean's adapter on the copy's layers, its factors as they are served."""
        names = dict.fromkeys(t.module for t in served.layout.tensors)
        adapters = Adapters(self.model, names)
        found = False
        for name in names:
            adapter = served.space.adapter(served.layout, name, weights.__getitem__, MEAN_PLAN, (MEAN,))
            if adapter is not None:
                found = True
                a, b = adapter.a.to(self.model.dtype), adapter.b.to(self.model.dtype)
                adapters.set(name, Adapter(a, b, adapter.scaling))
        if needed and not found:
            adapters.remove()
            raise ModelError(f"{_unknown(served)}: its mean lies beside the model, and `adapter` gives none of it")
        return adapters


def standard_errors(samples: Sequence[Sample], sums_N4: torch.Tensor) -> dict[str, float | None]:
    """Of k1, k2, k3 and `exact` in nats a token, over prompts: that of a ratio of sums, linearised (Cochran 1977, 6.4).

    From what `summarise` takes. None of fewer than three prompts.
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
    """From the sums over tokens of k1, k2, k3 and the exact KL of each sample, float64 [N, 4].

    Completions of one prompt are alike, so that it is prompts that count. Raises EvoalignError for what is no number.
    """
    if not bool(sums_N4.isfinite().all()):
        raise EvoalignError("the divergence from the base model is not a number: the logits of one are not either")
    count = sum(len(s.token_ids) for s in samples)
    k1, k2, k3, whole = (sums_N4.sum(0) / count).tolist()
    of_prompt: dict[tuple[int, ...], list[float]] = {}
    for sample, nats in zip(samples, sums_N4[:, 3].tolist(), strict=True):
        sums = of_prompt.setdefault(sample.prompt_ids, [0.0, 0.0, 0.0])
        sums[:] = sums[0] + nats, sums[1] + len(sample.token_ids), sums[2] + 1
    nats_P, tokens_P, draws_P = zip(*of_prompt.values(), strict=True)
    a_token, a_completion = (_not_below_0(ratio(nats_P, of_P)) for of_P in (tokens_P, draws_P))
    return Divergence(
        k1, k2, k3, whole, count, low=a_token.low, high=a_token.high, completion=a_completion.mean,
        completion_low=a_completion.low, completion_high=a_completion.high, prompts=len(of_prompt),
        completions=len(samples),
    )  # fmt: skip


def _not_below_0(found: Estimate) -> Estimate:
    """As no divergence is."""
    return found if found.low is None else replace(found, low=max(0.0, found.low))


def measure(parts: Parts, reference: Reference) -> Divergence:
    """The divergence of the engine's mean, on the test split."""
    samples = draw(parts.engine, parts.tokens, parts.task, parts.data.test, parts.config)
    return reference.divergence(parts, samples)


def _ids(sample: Sample, device: torch.device) -> torch.Tensor:
    return torch.tensor([[*sample.prompt_ids, *sample.token_ids]], device=device)


def logits_of(model: Any, sample: Sample, device: torch.device) -> torch.Tensor:
    """Logits [T, V] before each generated token: one row, no cache, no padding."""
    kept = len(sample.token_ids) + 1
    out = model(input_ids=_ids(sample, device), use_cache=False, logits_to_keep=kept)
    return out.logits[0, -kept:-1]


def groups(model: Any, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples whose logits under this model may wait together, by `KEPT_BYTES`; at least one."""
    a_token = model.config.get_text_config().vocab_size * model.dtype.itemsize
    group: list[Sample] = []
    for sample in samples:
        if group and sum(len(s.token_ids) for s in (*group, sample)) * a_token > KEPT_BYTES:
            yield group
            group = []
        group.append(sample)
    yield group


def sums_of(policy_TV: torch.Tensor, base_TV: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Sums over tokens of k1, k2, k3 and the exact KL, float64 [4] on the CPU."""
    ids_T = torch.tensor(ids, device=policy_TV.device)[:, None]
    tokens = max(1, CHUNK_BYTES // (8 * policy_TV.shape[1]))
    total = torch.zeros(4, dtype=torch.float64)
    for i in range(0, len(ids), tokens):
        p_TV, q_TV = (logits[i : i + tokens].double().log_softmax(-1) for logits in (policy_TV, base_TV))
        p_T, q_T = (logp_TV.gather(1, ids_T[i : i + tokens])[:, 0] for logp_TV in (p_TV, q_TV))
        total += torch.stack([k.sum() for k in (*estimators(p_T, q_T), exact(p_TV, q_TV))]).cpu()
    return total


def _unknown(served: Served) -> str:
    return f"checks.kl_every: the divergence of space {served.space.name} cannot be measured (set it to 0)"
