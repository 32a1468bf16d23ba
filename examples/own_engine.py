# SPDX-License-Identifier: Apache-2.0
"""A small engine of your own: transformers on the CPU, one completion at a time, for every space.

`python examples/own_engine.py` runs the contract checks of evoalign.testing on it. A run uses it with
`engine: {name: examples/own_engine.py:SmallEngine}`.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from evoalign.config import Config, EngineSettings, from_dict
from evoalign.engines.base import Completion, check_members, check_started, pairs_of, rollouts_of
from evoalign.engines.hash import weights_hash
from evoalign.engines.master import KeepsMean, Master, whole
from evoalign.engines.specs import mean_abs, specs_of
from evoalign.engines.transformers.engine import load_model
from evoalign.errors import ConfigError
from evoalign.optimizer import Optimizer
from evoalign.spaces import Space
from evoalign.testing import engines
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, Member, Plan, Request, Rollout, TensorSpec


class SmallSettings(EngineSettings):
    """Mixtures of experts are refused, and memory is estimated for the CPU."""

    takes_mixtures = False

    @property
    def where(self) -> str:
        return "cpu"


class SmallEngine(KeepsMean):
    """The base class has `apply`, `fingerprint`, `state`, `load` and the other methods of the mean."""

    settings, dtype = SmallSettings, torch.float32

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self.tokens, self.model = tokens, load_model(config.model, self.dtype)
        self.served = {name: weight.data for name, weight in self.model.named_parameters()}

    def specs(self) -> Sequence[TensorSpec]:
        return specs_of(self.model, mean_abs)

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        self.mean = Master(space, layout, optimizer, keep_start, whole(self.served), torch.device("cpu"))
        return Facts("small", "cpu", layout.dtype, True, weights_hash(self.served.items()), self.mean.bytes)

    @torch.inference_mode()
    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        check_started(self._mean is not None, plan)  # before `start`, an engine serves the unperturbed model only
        check_members(plan, requests)  # a member that does not exist raises ModelError
        for member in plan.members:
            weights = self.weights_of(plan, member)
            asked = pairs_of([member], requests)  # requests of all members, and those whose `member` is this one
            ended = [(one, request, self.complete(weights, request)) for one, request in asked]
            yield from rollouts_of(self.tokens, ended)  # cuts the text at sampling.stop, unless keep_stop

    def weights_of(self, plan: Plan, member: Member) -> Mapping[str, torch.Tensor]:
        found = dict(self.served)
        if self._mean is None:
            return found
        space, layout = self.mean.space, self.mean.layout
        for name in dict.fromkeys(t.module for t in layout.tensors):
            if space.carrier == "dense":
                found[name] = space.perturbed(layout, name, self.mean[name], plan, member)
            elif (term := space.adapter(layout, name, self.mean.__getitem__, plan, [member])) is not None:
                found[name] = found[name] + term.scaling * term.b[0] @ term.a[0]
        return found

    def complete(self, weights: Mapping[str, torch.Tensor], request: Request) -> Completion:
        how, draw = request.sampling, torch.Generator().manual_seed(request.seed)  # all members share the seed
        if how.top_p < 1:
            raise ConfigError(f"top_p {how.top_p}: this engine does not support it; set it to 1")
        ids, logprobs = [], []
        while len(ids) < how.max_tokens:
            read = torch.tensor([[*request.prompt_ids, *ids]])
            logits = torch.func.functional_call(self.model, weights, (read,)).logits[0, -1].double()
            warm = (logits / how.temperature).softmax(0) if how.temperature else None
            ids.append(int(logits.argmax() if warm is None else torch.multinomial(warm, 1, generator=draw)))
            logprobs.append(float(logits.log_softmax(0)[ids[-1]]))
            if ids[-1] in self.tokens.stop_ids or any(text in self.tokens.decode(ids) for text in how.stop):
                return Completion(tuple(ids), "stop", tuple(logprobs))
        return Completion(tuple(ids), "length", tuple(logprobs))


if __name__ == "__main__":
    for name in ("lora", "lowrank", "full"):
        tree = {"space": name, "model": {"name": "tiny"}, "es": {"sigma": 0.05, "learning_rate": 0.025}}
        engines.check_engine(SmallEngine, from_dict(tree))
        print(f"space {name}: {len(engines.CHECKS)} checks passed")
