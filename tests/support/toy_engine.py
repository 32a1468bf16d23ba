# SPDX-License-Identifier: Apache-2.0
"""An engine of one's own: the weights of a model, and a forward pass that is made up and nobody's but this file's."""

import torch

from evoalign.config import EngineSettings
from evoalign.engines.base import check_members, pairs_of
from evoalign.engines.hash import weights_hash
from evoalign.engines.master import KeepsMean, Master, whole
from evoalign.engines.specs import mean_abs, specs_of
from evoalign.engines.transformers.engine import load_model
from evoalign.tokens import before_stop
from evoalign.types import Facts, Rollout


class ToySettings(EngineSettings):
    sharpness: float = 20.0
    longest: int = 4096
    resources = frozenset({"longest"})

    def limit(self):
        return "engine.longest", self.longest


class ToyEngine(KeepsMean):
    settings, dtype = ToySettings, torch.float32

    def __init__(self, config, tokens):
        self.own, self.tokens, self.model = config.engine, tokens, load_model(config.model, self.dtype)
        self.served, self.specs = dict(self.model.named_parameters()), lambda: specs_of(self.model, mean_abs)

    def start(self, space, layout, optimizer, keep_start):
        self.mean = Master(space, layout, optimizer, keep_start, whole(self.served), torch.device("cpu"))
        return Facts("toy", "cpu", layout.dtype, True, weights_hash(self.served.items()), self.mean.bytes)

    def rollout(self, plan, requests):
        check_members(plan, requests)
        for member, state in ((m, self.read(plan, m)) for m in plan.members):
            yield from (self.answer(state, *pair) for pair in pairs_of([member], requests))

    def read(self, plan, member):
        found, space, layout = dict(self.served), self.mean.space, self.mean.layout
        for name in dict.fromkeys(t.module for t in layout.tensors):
            if space.carrier == "dense":
                found[name] = space.perturbed(layout, name, self.mean[name], plan, member)
            elif (term := space.adapter(layout, name, self.mean.__getitem__, plan, [member])) is not None:
                found[name] = found[name] + term.scaling * term.b[0] @ term.a[0]
        return sum(w.flatten()[: w.numel() // 64 * 64].view(64, -1).sum(1) for w in found.values())

    def answer(self, state, member, request):
        how, draw = request.sampling, torch.Generator().manual_seed(request.seed)
        heat, ids, said, text, reason = how.temperature, [], [], "", "length"
        while reason == "length" and len(ids) < how.max_tokens:
            place = torch.arange(len(self.tokens.tokenizer))[:, None] + sum((*request.prompt_ids, *ids))
            logs = torch.sin(self.own.sharpness * state + place * torch.arange(1, 65)).sum(1).double().log_softmax(0)
            ids.append(int(torch.multinomial((logs / heat).softmax(0), 1, generator=draw) if heat else logs.argmax()))
            said, text = [*said, float(logs[ids[-1]])], self.tokens.decode(ids)
            reason = "stop" if ids[-1] in self.tokens.stop_ids or any(s in text for s in how.stop) else "length"
        text, logprobs = before_stop(text, how.stop, how.keep_stop), tuple(said) if request.logprobs else None
        return Rollout(member, request.index, tuple(ids), text, reason, logprobs)
