# SPDX-License-Identifier: Apache-2.0
"""vLLM as an engine: plans and token ids are sent to the workers, completions come back.

Adapter members (`lora`, `lowrank`) have a slot each in the model's LoRA layers and generate together in one batch.
Dense ones (`full`) are written over the served weights one after the other. Workers keep the mean and regenerate
all noise.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from evoalign.config import Config
from evoalign.engines.base import (
    Completion,
    check_lengths,
    check_members,
    check_started,
    pairs_of,
    rollouts_of,
)
from evoalign.engines.master import MeanMethods, hash_of
from evoalign.engines.specs import specs_of_config
from evoalign.engines.vllm import insides
from evoalign.engines.vllm import start as starting
from evoalign.engines.vllm.settings import KERNEL_RANK, settings_of
from evoalign.errors import EvoalignError, ModelError
from evoalign.models.files import why_not
from evoalign.models.origin import model_path
from evoalign.models.quantised import files_hash, quantised_of
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.tokens import Tokens, stopped
from evoalign.types import MEAN, Facts, Layout, Member, Plan, Request, Rollout, Sampling, TensorSpec

FILE = "in-memory"
"""The adapter path that vLLM requires. No file exists there: all adapters are resident, so vLLM never reads it."""
AHEAD = 2
"""Prompt tokens are queued for this many further steps, so that every step is as full as if all had been queued."""
LOOK = 8
"""Tokens between two searches for a stop text: vLLM has no tokenizer here."""


class VllmEngine(MeanMethods):
    """Implements `evoalign.engines.base.Engine`."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self._config, self._tokens = config, tokens
        self.on_cpu = starting.on_cpu()
        self.deterministic = self.on_cpu if config.deterministic is None else config.deterministic
        self.llm: Any = starting.start(config, self.on_cpu, self.deterministic)
        self._quantised = quantised_of(config.model)
        self._generator = Generation(self.llm, tokens.stop_ids, tokens.decode)
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
        """Add the mean |W| to the specs, None where weights are packed.

        Raises ModelError where vLLM's model lacks a part of a tensor that it should have as it is.
        """
        parts: dict[tuple[str, tuple[int, ...]], list[tuple[int, float]]] = {}
        for name, shape, count, mean in [part for worker in self.rpc("es_means") for part in worker]:
            parts.setdefault((name, tuple(shape)), []).append((count, mean))
        measured: list[TensorSpec] = []
        packs = self._quantised is not None or any(".experts." in spec.name for spec in specs)
        for spec in specs:
            found, count = parts.get((spec.name, spec.shape), []), math.prod(spec.shape)
            is_whole = sum(size for size, _ in found) == count
            if not is_whole and not packs:
                raise ModelError(
                    f"engine vllm keeps {spec.name} of model {self._config.model.name} in a form that ES cannot move "
                    "(fused in a way that is not known); use engine transformers"
                )
            mean = sum(n * mean for n, mean in found) / count if is_whole else None
            measured.append(replace(spec, mean_abs=found[0][1] if is_whole and len(found) == 1 else mean))
        return measured

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Create the master and, for adapters, a slot for each member."""
        settings, is_adapter = settings_of(self._config), space.carrier == "adapter"
        workers = self.rpc("es_start", space, layout, optimizer, keep_start, settings.master == "host")
        missing = sorted({name for worker in workers for name in worker["missing"]})
        if missing:
            raise ModelError(f"vLLM has no adapter slot for {missing[0]}; choose other target modules")
        facts = workers[0]
        if is_adapter and settings.population not in ("auto", facts["form"]):
            raise ModelError(f"engine.population {settings.population} does not fit: {facts['why']}; use auto")
        self._space, self._layout, self.facts = space, layout, facts
        note = "members are written over the weights one after the other"
        if is_adapter:
            where = ", in plain torch on the CPU" if self.on_cpu and facts["form"] != "stock" else ""
            high = f"rank {space.rank} is above {KERNEL_RANK}" if space.rank > KERNEL_RANK else ""
            why = facts["why"] or high
            note = f"members answer in the {facts['form']} form{where}" + (f" ({why})" if why else "")
        room = self.llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        note += f"; keys and values of {room:,} tokens"
        version = insides.check_version()
        return Facts(
            engine="vllm",
            device=facts["device"],
            dtype=layout.dtype,
            deterministic=self.deterministic,
            model_hash=self._model_hash(worker["sums"] for worker in workers),
            library=f"vllm {version}",
            master_bytes=sum(worker["bytes"] for worker in workers),
            note=f"vLLM {version}; {note}",
        )

    def _model_hash(self, sums: Iterable[Any]) -> str:
        """Return the hash of the served weights, or of the files where vLLM packs some of them."""
        if all(spec.mean_abs is not None for spec in self._specs) or settings_of(self._config).load_format == "dummy":
            return hash_of(sums)
        model = self._config.model
        return files_hash(model_path(model), model.revision, model.name)

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def context(self) -> int:
        return self.llm.llm_engine.model_config.max_model_len

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield a completion of each request for each member, or the one it names; before `start` for the mean only."""
        check_lengths(requests, self.context(), "the {} positions of engine.max_model_len", "engine.max_model_len")
        check_members(plan, requests)
        check_started(self._space is not None, plan)
        with self._memory():
            if self._space is None or (self._space.carrier == "dense" and plan.members == (MEAN,)):
                yield from self._generate([(MEAN, None)], requests)
            elif self._space.carrier == "dense":
                yield from self._dense(plan, requests)
            else:
                yield from self._adapters(self._space, plan, requests)

    def _dense(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Generate one member after the other, each written straight from the mean; restore the mean once."""
        try:
            for member in dict.fromkeys(m for m, _ in pairs_of(plan.members, requests)):
                self.rpc("es_mean", "write", plan, member)
                yield from self._generate([(member, None)], requests)
        finally:  # also where the rollout fails or is left half-way
            self.rpc("es_mean", "write", plan, None)

    def _adapters(self, space: Space, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Generate as many members at once as there are slots, all their requests in flight."""
        present = dict.fromkeys(m for m, _ in pairs_of(plan.members, requests))
        served = [m for m in present if m.is_mean and space.evolves_model]
        adapted = [m for m in present if m not in served]
        most = settings_of(self._config).slots(self._config)
        pieces = [adapted[i : i + most] for i in range(0, len(adapted), most)] or [[]]
        for number, members in enumerate(pieces):
            if members:
                self.rpc("es_put", plan, members)
            without_slot = [(m, None) for m in served] if number == 0 else []
            yield from self._generate([*((m, slot) for slot, m in enumerate(members)), *without_slot], requests)

    def _generate(self, members: Sequence[tuple[Member, int | None]], requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield completions of all members, in one call per batch; a member without a slot is the served weights."""
        salt, slots = self._salt(), dict(members)
        pairs = pairs_of([m for m, _ in members], requests)
        # On a CPU vLLM 0.26 samples without seeds where a row of the batch is greedy.
        drawn = [pair for pair in pairs if pair[1].sampling.temperature > 0]
        greedy = [pair for pair in pairs if pair[1].sampling.temperature <= 0]
        for batch in (greedy, drawn) if self.on_cpu else (pairs,):
            if batch:
                for ended in self._generator.run(batch, [slots[m] for m, _ in batch], salt):
                    yield from rollouts_of(self._tokens, [(*batch[place], completion) for place, completion in ended])

    def _salt(self) -> str:
        """Return a new salt: vLLM's prefix cache is shared under the same salt only, never with other weights.

        Requests of a session have one for each member instead.
        """
        return str(next(self._serial))

    # --- the mean ----------------------------------------------------------------------------------------------------

    def _mean_layout(self) -> Layout:
        check_started(self._space is not None)
        return self._layout

    def _on_mean(self, method: str, *arguments: object) -> list[Any]:
        check_started(self._space is not None)
        return self.rpc("es_mean", method, *arguments)

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
        finally:  # the pool's memory was freed with the CUDA graphs; a later engine of this process must not reuse it
            insides.replace(type(current_platform), "_global_graph_pool", None)

    def rpc(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every worker and return the results. Raises EvoalignError where one fails."""
        with self._memory():
            try:
                return self.llm.collective_rpc(method, args=arguments)
            except (EvoalignError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # vLLM passes on any exception of a worker, and reports its death
                what = " ".join(map(str, (method, *arguments[: method == "es_mean"])))
                raise EvoalignError(f"vLLM failed in {what}: {why_not(error)}") from error

    @contextmanager
    def _memory(self) -> Generator[None]:
        """Raise EvoalignError, in one line that names settings, where a GPU runs out of memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EvoalignError(starting.out_of_memory(self._config, error)) from error


class _Row:
    """A request in flight."""

    __slots__ = ("ids", "logprobs", "place", "request", "searched")

    def __init__(self, place: int, request: Request) -> None:
        self.place, self.request, self.searched = place, request, 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []


class Generation:
    """Generates on a `vllm.LLM` of this process as its `generate` does, with less work on the host.

    vLLM's own looks at each request, copies its settings, keeps a state for each, and returns completions when the last
    is done. Here vLLM's input processor sees one request of each kind and the others are copies that share settings and
    prompts; a completion is yielded at the step it ends in. Requests are made while the device computes earlier ones.
    `decode` returns the text of tokens.
    """

    def __init__(self, llm: Any, stop_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._engine, self._stop_ids, self._decode = llm.llm_engine, stop_ids, decode
        self._step: int = self._engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._adapters: dict[int, Any] = {}
        self._flying: dict[str, _Row] = {}
        self._names = itertools.count()

    def run(
        self, pairs: Sequence[tuple[Member, Request]], slots: Sequence[int | None], salt: str
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Yield the completions that end in a step, with their places in `pairs`. Closing it aborts the others.

        `slots` holds each one's adapter slot, or None. Cached prefixes are shared within the same `salt` only.
        """
        self._abort(self._flying)  # of an earlier call that was neither finished nor closed
        core, flying = self._engine.engine_core, dict[str, _Row]()
        self._flying = flying
        waiting = self._requests(pairs, slots, salt)
        added, steps, more = 0, 0, True
        try:
            while more or flying:
                steps += 1
                while more and added <= (steps + AHEAD) * self._step:
                    made = next(waiting, None)
                    if made is None:
                        more = False
                        break
                    row, request = made
                    flying[request.request_id] = row
                    core.add_request(request)
                    added += len(row.request.prompt_ids)
                ended = [self._take(output, flying) for output in core.get_output().outputs]
                if done := [one for one in ended if one is not None]:
                    yield done
                    if self._flying is not flying:
                        raise EvoalignError("engine vllm runs one rollout at a time: finish one before the next begins")
        finally:  # a later call would receive what is left
            self._abort(flying)

    def _abort(self, flying: dict[str, _Row]) -> None:
        if flying:
            self._engine.engine_core.abort_requests(list(flying))
        flying.clear()

    def _requests(
        self, pairs: Sequence[tuple[Member, Request]], slots: Sequence[int | None], salt: str
    ) -> Iterator[tuple[_Row, Any]]:
        """Yield vLLM's form of each request: copies of one that vLLM processed, which share settings and prompts."""
        processed: dict[tuple[Sampling, bool, int], Any] = {}
        prompts: dict[tuple[int, ...], list[int]] = {}
        for place, ((member, request), slot) in enumerate(zip(pairs, slots, strict=True)):
            ids, sampling = request.prompt_ids, request.sampling
            key = (sampling, request.logprobs, request.seed if sampling.temperature > 0 else 0)
            made = copy.copy(processed.get(key) or processed.setdefault(key, self._process(request, salt)))
            made.prompt_token_ids = prompts.get(ids) or prompts.setdefault(ids, list(ids))
            made.cache_salt = salt if request.session is None else f"session-{request.session}-{member.index}"
            made.request_id = made.external_req_id = f"{salt}-{next(self._names)}"
            made.lora_request = None if slot is None else self._adapter(slot)
            yield _Row(place, request), made

    def _process(self, request: Request, salt: str) -> Any:
        """Return vLLM's form of a request. The seed belongs to the prompt and sample, so that members draw alike.

        Raises ValueError where vLLM rejects it.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=request.seed if sampling.temperature > 0 else None,
            stop_token_ids=list(self._stop_ids),
            ignore_eos=True,  # the task defines the stop tokens, whatever the model
            logprobs=0 if request.logprobs else None,
            detokenize=False,  # done here, by the task's tokenizer
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": salt}
        return self._engine.input_processor.process_inputs(
            "", prompt, parameters, supported_tasks=self._engine.get_supported_tasks()
        )

    def _adapter(self, slot: int) -> Any:
        if slot not in self._adapters:
            from vllm.lora.request import LoRARequest

            self._adapters[slot] = LoRARequest(lora_name=f"member-{slot}", lora_int_id=slot + 1, lora_path=FILE)
        return self._adapters[slot]

    def _take(self, output: Any, flying: dict[str, _Row]) -> tuple[int, Completion] | None:
        """Add one step's tokens to a row; return its completion where that ends it."""
        row = flying.get(output.request_id)
        if row is None:  # it was aborted
            return None
        row.ids += output.new_token_ids
        if row.request.logprobs and output.new_logprobs is not None:
            row.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # column 0 is the sampled token
        reason = None if output.finish_reason is None else str(output.finish_reason)
        count, stop, searched = len(row.ids), row.request.sampling.stop, row.searched
        if stop and (reason is not None or count - searched >= LOOK):
            row.searched = count
            if found := stopped(self._decode, row.ids, searched, stop):
                if reason is None:
                    self._engine.engine_core.abort_requests([output.request_id])
                count, reason = found, "stop"
        if reason is None:
            return None
        del flying[output.request_id]
        if reason not in ("stop", "length"):
            raise EvoalignError(f"vLLM ended the completion of request {row.place} early ({reason}); it is not scored")
        logprobs = tuple(row.logprobs[:count]) if row.request.logprobs else None
        return row.place, Completion(tuple(row.ids[:count]), reason, logprobs)
