# SPDX-License-Identifier: Apache-2.0
"""Check at the start that the engine computes the loaded model as a plain forward of transformers does.

The engine samples a few tokens of prompts of different lengths in one left-padded batch. One forward of each row alone,
without a cache, must give the same log-probabilities. The same forward shows which modules are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from evoalign.engines.specs import mean_abs, refuse_not_finite, specs_of
from evoalign.errors import EvoalignError, ModelError, NotFiniteError
from evoalign.models.layers import positions
from evoalign.spaces.targets import module_of
from evoalign.tokens import Tokens
from evoalign.types import Request, Rollout, Sampling

TOKENS = 6
"""Tokens of a completion, of which all but the first are computed from cached keys and values."""
TEXTS = (
    "Name a colour of the sky, in one word, and say why it is so at noon and not at night, in summer and in winter.",
    "Solve: 3 + 5 =",
)
"""The longer first: its row is not padded."""
TOLERANCE = {torch.float32: 2**-8, torch.bfloat16: 2**-3, torch.float16: 2**-6}
"""Median difference of log-probabilities that rounding can make, by served dtype, per unit of the logits' deviation.

Of 60 families of small random models the largest are 2e-6, 0.03 and 0.002; with a wrong cache or padding, 0.05."""
AMPLIFIED = 8
"""Times the effect of one rounding error that is not taken for a fault: some models amplify rounding."""
Ask = Callable[[Sequence[Request]], Iterable[Rollout]]


def check(name: str, model: Any, tokens: Tokens, ask: Ask, modules: Mapping[str, nn.Module], section: str) -> None:
    """Raise ModelError if the model is computed wrongly, or if adapters on one of `modules` would have no effect.

    `modules` are those with the weights of these names, `section` is that of their `target_modules`. Call it while the
    model has its own weights. Cost: `TOKENS` tokens of two prompts, and a forward of each.
    """
    kind = f"model {name} ({model.config.model_type})"
    room = (positions(model.config)[0] or 1 << 30) - TOKENS
    if room < 1:
        return
    prompts = [tokens.encode(text)[:room] for text in TEXTS]
    sampling = Sampling(TOKENS, temperature=1.0)
    requests = [Request(i, ids, sampling, seed=i, logprobs=True) for i, ids in enumerate(prompts)]
    called: set[str] = set()
    handles = [m.register_forward_hook(partial(_note, called, n)) for n, m in modules.items()]
    used = _Used({id(weight): n for n, m in modules.items() if (weight := getattr(m, "weight", None)) is not None})
    try:
        rollouts = sorted(ask(requests), key=lambda rollout: rollout.request)
        with used:
            apart = [_apart(model, prompts[r.request], r) for r in rollouts]
        allowed = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
        if max(apart) > allowed:
            allowed = max(allowed, AMPLIFIED * max(_rounding(model, prompts[r.request], r) for r in rollouts))
    except (EvoalignError, MemoryError) as error:
        if isinstance(error, NotFiniteError):
            _refuse_overflow(kind, model)
        raise
    except Exception as error:  # of the model's own code
        if "allocate" in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f"{kind} cannot be computed with cached keys and values and padded rows "
            f"({type(error).__name__}: {reason}); choose another model"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    _refuse_difference(kind, len(prompts[0]) > min(map(len, prompts)), apart, allowed)
    _refuse_uncalled(kind, modules, called, used.found, section)


def _apart(model: Any, prompt: Sequence[int], rollout: Rollout) -> float:
    """Return the median difference of a rollout's log-probabilities from those of one forward, in deviations of logits.

    The median, since rounding may choose another expert of a mixture for single tokens.
    """
    plain, spread = _plain(model, prompt, rollout)
    return median(abs(p - q) for p, q in zip(rollout.logprobs or (), plain, strict=True)) / spread


def _rounding(model: Any, prompt: Sequence[int], rollout: Rollout) -> float:
    """Return the median difference that an error of one rounding in the embeddings makes, in deviations of logits."""

    def round_once(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        signs = 1 - 2 * (torch.arange(output.numel(), device=output.device) % 2).view_as(output)
        return output * (1 + torch.finfo(output.dtype).eps * signs).to(output.dtype)

    plain, spread = _plain(model, prompt, rollout)
    handle = model.get_input_embeddings().register_forward_hook(round_once)
    try:
        other, _ = _plain(model, prompt, rollout)
    finally:
        handle.remove()
    return median(abs(p - q) for p, q in zip(plain, other, strict=True)) / spread


@torch.inference_mode()
def _plain(model: Any, prompt: Sequence[int], rollout: Rollout) -> tuple[list[float], float]:
    """Return log-probabilities of a rollout's tokens by one forward, and the deviation of the logits, at least 1."""
    ids, count = rollout.token_ids, len(rollout.token_ids)
    whole = torch.tensor([[*prompt, *ids[:-1]]], device=model.device)
    logits = model(input_ids=whole, use_cache=False).logits[0, -count:].float()
    if not bool(logits.isfinite().all()):
        raise NotFiniteError("the model's logits are not finite")
    plain = logits.log_softmax(-1).gather(1, torch.tensor(ids, device=model.device)[:, None])[:, 0]
    return plain.tolist(), max(1.0, float(logits.std(-1).mean()))


def _refuse_difference(kind: str, padded: bool, apart: Sequence[float], allowed: float) -> None:
    if apart[0] > allowed:
        raise ModelError(
            f"{kind} predicts other tokens with cached keys and values than in one forward (log-probabilities differ "
            f"by {apart[0]:.2g}): it does not use the cache as a causal decoder does; choose another model"
        )
    if padded and max(apart) > allowed:
        raise ModelError(
            f"{kind} predicts other tokens in a left-padded batch than for the same prompt alone (log-probabilities "
            f"differ by {max(apart):.2g}): it does not use position_ids and the mask; choose another model"
        )


def _refuse_overflow(kind: str, model: Any) -> None:
    """Raise ModelError for logits that are not finite without noise: because of a weight, or of the dtype."""
    refuse_not_finite(specs_of(model, mean_abs))
    dtype = str(model.dtype).removeprefix("torch.")
    raise ModelError(
        f"{kind}: its logits are not finite in {dtype}, before any noise; set model.dtype to bfloat16 or float32"
    )


def _note(called: set[str], name: str, *_: object) -> None:
    called.add(name)


class _Used(TorchFunctionMode):
    """Finds which weights, by `id`, are arguments of a function of torch."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # of an attribute, such as the dtype
            values = (*args, *(kwargs or {}).values())
            self.found.update(self._names[id(value)] for value in values if id(value) in self._names)
        return func(*args, **(kwargs or {}))


def _refuse_uncalled(kind: str, modules: Iterable[str], called: set[str], used: set[str], section: str) -> None:
    """Raise ModelError for a module whose adapters would have no effect.

    Either its weight is `used` without a call of the module, so that adapters are ignored and merged weights are not,
    or no module of its name is called. Single experts, and layers that share keys, are not called by every forward.
    """
    alive = {module_of(name) for name in called}
    uncalled = [name for name in modules if name not in called]
    dead = [n for n in uncalled if n in used] or [n for n in uncalled if module_of(n) not in alive]
    others = sorted(alive - {module_of(name) for name in dead})
    if dead and others:  # if none is called, the canary says so
        raise ModelError(
            f"{kind} does not call its module {dead[0].removesuffix('.weight')}, so adapters on it would have no "
            f"effect; set {section}.target_modules: [{', '.join(others)}]"
        )
