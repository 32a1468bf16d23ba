# SPDX-License-Identifier: Apache-2.0
"""vLLM as an engine: plans and token ids go to the workers, completions come back.

Adapter members (`lora`, `lowrank`) have a slot each in the model's LoRA layers and answer together in one batch; dense
ones (`full`) are written over the served weights one after the other. Workers keep the mean and regenerate all noise.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from evoalign.config import Config
from evoalign.engines.base import EngineDefaults, check_members, pairs_of
from evoalign.engines.master import check_state, gathered, hash_of, joined
from evoalign.engines.specs import specs_of_config
from evoalign.engines.vllm import insides
from evoalign.engines.vllm import start as starting
from evoalign.engines.vllm.adapters import KERNEL_RANK, rank, room, settings, slots
from evoalign.engines.vllm.asking import Asking, Said
from evoalign.engines.vllm.insides import check_version
from evoalign.errors import DataError, EvoalignError, ModelError
from evoalign.models.files import why_not
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.tokens import Tokens, before_stop
from evoalign.types import MEAN, Facts, Layout, Member, Plan, Request, Rollout, TensorSpec, Update


class VllmEngine(EngineDefaults):
    """See `evoalign.engines.base.Engine` for what each method promises."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self._config, self._tokens = config, tokens
        self.on_cpu = starting.on_cpu()
        self.deterministic = self.on_cpu if config.deterministic is None else config.deterministic
        self.llm: Any = starting.start(config, self.on_cpu, self.deterministic)
        self._asking = Asking(self.llm, tokens.stop_ids, tokens.decode)
        self._space: Space | None = None
        self._serial = itertools.count()
        self.facts: dict[str, Any] = {}
        try:
            self._specs = self._measured(specs_of_config(config))
        except BaseException:
            self.close()
            raise

    @property
    def dtype(self) -> torch.dtype:
        return self.llm.llm_engine.model_config.dtype

    def specs(self) -> list[TensorSpec]:
        return list(self._specs)

    def _measured(self, specs: list[TensorSpec]) -> list[TensorSpec]:
        """The specs with their mean |W|. Raises ModelError where vLLM's model lacks a part of a tensor."""
        parts = [part for held in self.rpc("es_means") for part in held]
        wanted = {s.name: s.shape for s in specs}
        held: dict[str, list[tuple[int, float]]] = {name: [] for name in wanted}
        for name, shape, numbers, mean in parts:
            if wanted.get(name) == tuple(shape):
                held[name].append((numbers, mean))
        whole: dict[str, float] = {}
        for name, shape in wanted.items():
            count = math.prod(shape)
            if sum(numbers for numbers, _ in held[name]) != count:
                raise ModelError(
                    f"engine vllm keeps {name} of model {self._config.model.name} in a form that ES cannot move "
                    "(quantised, or fused in a way that is not known); use engine transformers"
                )
            single = len(held[name]) == 1
            whole[name] = held[name][0][1] if single else sum(n * mean for n, mean in held[name]) / count
        return [replace(s, mean_abs=whole[s.name]) for s in specs]

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Make the master and, for adapters, a slot for each member."""
        count = room(self._config) if space.carrier == "adapter" else 0
        host = settings(self._config).master == "host"
        said = self.rpc("es_start", space, layout, optimizer, keep_start, host, count)
        missing = sorted({name for worker in said for name in worker["missing"]})
        if missing:
            raise ModelError(f"vLLM has no adapter slot for {missing[0]}; choose other target modules")
        if count:
            self._check_form(said[0])
        self._space, self._layout, self.facts = space, layout, said[0]
        return Facts(
            engine="vllm",
            device=said[0]["device"],
            dtype=layout.dtype,
            deterministic=self.deterministic,
            model_hash=hash_of(worker["sums"] for worker in said),
            library=f"vllm {check_version()}",
            master_bytes=sum(worker["bytes"] for worker in said),
            note=f"vLLM {check_version()}; {self._note(said[0], adapters=count > 0)}",
        )

    def _check_form(self, said: Mapping[str, str]) -> None:
        """Raise ModelError where a form was asked for by name and another serves."""
        asked = settings(self._config).population
        if asked not in ("auto", said["form"]):
            raise ModelError(f"engine.population {asked} does not fit: {said['why']}; use auto")

    def _note(self, said: Mapping[str, str], adapters: bool) -> str:
        """How members answer, and why not in a faster way."""
        if not adapters:
            return "members are written over the weights one after the other"
        high = rank(self._config) > KERNEL_RANK and f"rank {rank(self._config)} is above {KERNEL_RANK}"
        why = said["why"] or high or ""
        where = ", in plain torch on the CPU" if self.on_cpu and said["form"] != "stock" else ""
        return f"members answer in the {said['form']} form{where}" + (f" ({why})" if why else "")

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One completion of each request for each member, or the one it names; before `start`, of the mean alone."""
        self._check_length(requests)
        check_members(plan, requests)
        with self._memory():
            yield from self._members(plan, requests)

    def _members(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        if self._space is None:
            if plan.members != (MEAN,):
                raise EvoalignError("the engine has no space yet: call start first, or ask for the mean alone")
            yield from self._ask([(MEAN, None)], requests)
        elif self._space.carrier == "dense":
            yield from self._dense(plan, requests)
        else:
            yield from self._adapters(plan, requests)

    def _dense(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One member after the other, each straight from the mean; the mean is put back once."""
        if plan.members == (MEAN,):
            yield from self._ask([(MEAN, None)], requests)
            return
        try:
            for member in dict.fromkeys(m for m, _ in pairs_of(plan.members, requests)):
                self.rpc("es_write", plan, member)
                yield from self._ask([(member, None)], requests)
        finally:  # also where the rollout fails or is left half-way
            self.rpc("es_write", plan, None)

    def _adapters(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """As many members as there are slots at once, all their requests in flight."""
        assert self._space is not None
        bare = self._space.evolves_model
        present = dict.fromkeys(m for m, _ in pairs_of(plan.members, requests))
        base = [m for m in present if m.is_mean and bare]
        adapted = [m for m in present if not (m.is_mean and bare)]
        most = slots(self._config)
        pieces = [adapted[i : i + most] for i in range(0, len(adapted), most)] or [[]]
        for number, members in enumerate(pieces):
            if members:
                self.rpc("es_put", plan, members)
            named = [(m, slot) for slot, m in enumerate(members)]
            alone = [(m, None) for m in base] if number == 0 else []
            yield from self._ask([*named, *alone], requests)

    def _ask(self, members: Sequence[tuple[Member, int | None]], requests: Sequence[Request]) -> Iterator[Rollout]:
        """Completions of all members, in one call a batch; a member without a slot is the served weights."""
        salt, slots = self._salt(), dict(members)
        for asked in self._batches(pairs_of([m for m, _ in members], requests)):
            for ended in self._asking.answers(asked, [slots[m] for m, _ in asked], salt):
                yield from self._rollouts([(*asked[place], said) for place, said in ended])

    def _batches(self, asked: list[tuple[Member, Request]]) -> list[list[tuple[Member, Request]]]:
        """What may be in flight together: on a CPU vLLM 0.26 draws without seeds where a row of the batch is greedy."""
        drawn = [pair for pair in asked if pair[1].sampling.temperature > 0]
        greedy = [pair for pair in asked if pair[1].sampling.temperature <= 0]
        return [pairs for pairs in ((greedy, drawn) if self.on_cpu else (asked,)) if pairs]

    def _salt(self) -> str:
        """What vLLM has computed of a prompt is found again under the same salt only: never with other weights."""
        return str(next(self._serial))

    def _rollouts(self, ended: Sequence[tuple[Member, Request, Said]]) -> Iterator[Rollout]:
        """What has ended in a step, each of its texts made once."""
        ids = list(dict.fromkeys(said.token_ids for _, _, said in ended))
        texts = dict(zip(ids, self._tokens.decode_all(ids), strict=True))
        for member, request, said in ended:
            if said.reason not in ("stop", "length"):
                raise EvoalignError(
                    f"vLLM gave up on a completion of member {member.index}: {said.reason}; it is not scored"
                )
            yield Rollout(
                member=member,
                request=request.index,
                token_ids=said.token_ids,
                text=before_stop(texts[said.token_ids], request.sampling.stop, request.sampling.keep_stop),
                finish_reason=said.reason,
                logprobs=said.logprobs,
            )

    def _check_length(self, requests: Sequence[Request]) -> None:
        limit: int = self.llm.llm_engine.model_config.max_model_len
        for request in requests:
            length, room = len(request.prompt_ids), request.sampling.max_tokens
            if length + room > limit:
                raise DataError(
                    f"a prompt of {length} tokens and a completion of {room} exceed the {limit} positions of "
                    "engine.max_model_len; shorten the prompt, lower max_tokens (sampling, evaluation), or raise it"
                )

    def apply(self, update: Update) -> None:
        """Move the mean and serve it: served weights equal round(master)."""
        self._started()
        self.rpc("es_apply", update)

    def fingerprint(self) -> str:
        """`weights_hash` of the master, summed where the weights are."""
        self._started()
        return hash_of(self.rpc("es_sums"))

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The master, on the CPU."""
        layout = self._started()
        for tensor in (*layout.tensors, *layout.frozen):
            yield tensor.name, joined(tensor.shape, self.rpc("es_state", tensor.name))

    def probe_weights(self, count: int) -> torch.Tensor:
        """The master at fixed places, gathered where it lies."""
        return gathered(self._started(), count, self.rpc("es_probe", count))

    sample = probe_weights

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Momentum's or Adam's slots, on the CPU."""
        self._started()
        yield from self.rpc("es_optimizer_state")[0]  # kept alike by all workers

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Put a master back. Raises ModelError where names or shapes differ, and then changes nothing."""
        check_state(self._started(), state)
        for name, tensor in state.items():
            self.rpc("es_load", name, tensor)
        self.rpc("es_load_optimizer", dict(optimizer or {}))

    def close(self) -> None:
        """Free the model, the cache and, under tensor parallelism, the workers."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.platforms import current_platform

        try:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
        finally:  # the memory of CUDA graphs went with them; a next engine in this process would begin its own in it
            insides.replace(type(current_platform), "_global_graph_pool", None)

    def rpc(self, method: str, *arguments: object) -> list[Any]:
        """What each worker returns. Raises EvoalignError where one fails."""
        with self._memory():
            try:
                return self.llm.collective_rpc(method, args=arguments)
            except (EvoalignError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # vLLM passes on whatever a worker raised, or that it died
                raise EvoalignError(f"vLLM failed in {method}: {why_not(error)}") from error

    @contextmanager
    def _memory(self) -> Generator[None]:
        """Raises EvoalignError, in one line that says what to change, where a GPU has not enough memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EvoalignError(starting.out_of_memory(self._config, error)) from error

    def _started(self) -> Layout:
        if self._space is None:
            raise EvoalignError("the engine has no space yet: call start first, or ask for the mean alone")
        return self._layout
