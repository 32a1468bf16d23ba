# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own `generate` does, at less of the host's time: its core is handed requests and gives tokens.

vLLM looks at each request, copies its settings and keeps a state of its own for each; it hands out completions when the
last is done. Here it looks at one of each kind, the others are copies that share settings and prompts, and a completion
is there at the step it ends in. Requests are made while the device is busy with those before them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from evoalign.errors import EvoalignError
from evoalign.tokens import stopped
from evoalign.types import Member, Request, Sampling

FILE = "in-memory"
"""What vLLM is told of where an adapter lies. Nothing lies there, and vLLM never looks: all are resident."""
AHEAD = 2
"""Steps' worth of prompt tokens that wait, so that no step has fewer to take than if all had been asked at once."""
LOOK = 8
"""Tokens between two looks for a text to stop at: vLLM has no tokenizer here."""


class Said(NamedTuple):
    """A completion; `reason` is vLLM's word."""

    token_ids: tuple[int, ...]
    reason: str
    logprobs: tuple[float, ...] | None


class _Row:
    """One in flight."""

    __slots__ = ("ids", "logprobs", "looked", "place", "request")

    def __init__(self, place: int, request: Request) -> None:
        self.place, self.request, self.looked = place, request, 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def stopped(self, decode: Callable[[Sequence[int]], str], ended: bool) -> int:
        """Tokens up to a text to stop at, looked for once in a while and at the end; 0 where none is there."""
        stop, looked = self.request.sampling.stop, self.looked
        if not stop or not (ended or len(self.ids) - looked >= LOOK):
            return 0
        self.looked = len(self.ids)
        return stopped(decode, self.ids, looked, stop)


class Asking:
    """Completions of a `vllm.LLM` that lives in this process. `decode` gives the text of tokens."""

    def __init__(self, llm: Any, stop_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._engine, self._stop_ids, self._decode = llm.llm_engine, stop_ids, decode
        self._step: int = self._engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._adapters: dict[int, Any] = {}
        self._flying: dict[str, _Row] = {}
        self._names = itertools.count()

    def answers(
        self, asked: Sequence[tuple[Member, Request]], slots: Sequence[int | None], salt: str
    ) -> Iterator[list[tuple[int, Said]]]:
        """The completions that end in a step, with their places in `asked`; whoever leaves early leaves none behind.

        `slots` says where each one's adapter is; None: it has none. What is computed of a prompt serves those of the
        same `salt` alone.
        """
        core, flying = self._engine.engine_core, self._begin()
        waiting = self._made(asked, slots, salt)
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
                ended = [self._take(said, flying) for said in core.get_output().outputs]
                if done := [one for one in ended if one is not None]:
                    yield done
                    self._check(flying)
        finally:  # a later call would be answered with what is left
            self._abort(flying)

    def _begin(self) -> dict[str, _Row]:
        """Room for those in flight. What nobody finished is called off: its frame may outlive what left it."""
        self._abort(self._flying)
        self._flying = {}
        return self._flying

    def _check(self, flying: dict[str, _Row]) -> None:
        if self._flying is not flying:
            raise EvoalignError("engine vllm answers one rollout at a time: finish one before the next begins")

    def _abort(self, flying: dict[str, _Row]) -> None:
        if flying:
            self._engine.engine_core.abort_requests(list(flying))
        flying.clear()

    def _made(
        self, asked: Sequence[tuple[Member, Request]], slots: Sequence[int | None], salt: str
    ) -> Iterator[tuple[_Row, Any]]:
        """vLLM's form of each: copies of one that vLLM has looked at, which share their settings and prompts."""
        looked: dict[tuple[Sampling, bool, int], Any] = {}
        prompts: dict[tuple[int, ...], list[int]] = {}
        for place, ((_, request), slot) in enumerate(zip(asked, slots, strict=True)):
            ids, sampling = request.prompt_ids, request.sampling
            key = (sampling, request.logprobs, request.seed if sampling.temperature > 0 else 0)
            made = copy.copy(looked.get(key) or looked.setdefault(key, self._looked_at(request, salt)))
            made.prompt_token_ids = prompts.get(ids) or prompts.setdefault(ids, list(ids))
            made.request_id = made.external_req_id = f"{salt}-{next(self._names)}"
            made.lora_request = None if slot is None else self._adapter(slot)
            yield _Row(place, request), made

    def _looked_at(self, request: Request, salt: str) -> Any:
        """Raises ValueError where vLLM does not take it."""
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": salt}
        return self._engine.input_processor.process_inputs(
            "", prompt, _sampling(request, self._stop_ids), supported_tasks=self._engine.get_supported_tasks()
        )

    def _adapter(self, slot: int) -> Any:
        """The one of a slot, which stays."""
        if slot not in self._adapters:
            from vllm.lora.request import LoRARequest

            self._adapters[slot] = LoRARequest(lora_name=f"member-{slot}", lora_int_id=slot + 1, lora_path=FILE)
        return self._adapters[slot]

    def _take(self, said: Any, flying: dict[str, _Row]) -> tuple[int, Said] | None:
        """What one has said at a step; the whole of it where that ends it."""
        row = flying.get(said.request_id)
        if row is None:  # of one that was called off
            return None
        row.ids += said.new_token_ids
        if row.request.logprobs and said.new_logprobs is not None:
            row.logprobs += said.new_logprobs.logprobs[:, 0].tolist()  # that of the token which was taken comes first
        reason = None if said.finish_reason is None else str(said.finish_reason)
        count = len(row.ids)
        if found := row.stopped(self._decode, ended=reason is not None):
            if reason is None:
                self._engine.engine_core.abort_requests([said.request_id])
            count, reason = found, "stop"
        if reason is None:
            return None
        del flying[said.request_id]
        logprobs = tuple(row.logprobs[:count]) if row.request.logprobs else None
        return row.place, Said(tuple(row.ids[:count]), reason, logprobs)


def _sampling(request: Request, stop_ids: Sequence[int]) -> Any:
    """vLLM's settings for a request. The seed belongs to the prompt and sample, so members draw alike."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: Sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=request.seed if sampling.temperature > 0 else None,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # the stop tokens are the task's, of whatever model
        logprobs=0 if request.logprobs else None,
        detokenize=False,  # done here, by the task's tokenizer
        skip_clone=True,  # nobody else has it
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
