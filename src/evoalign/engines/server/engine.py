# SPDX-License-Identifier: Apache-2.0
"""An engine over a server: the mean is kept here, members are sent to the server as adapters, completions come back.

All requests of all members are in flight at once. Each rollout gives its adapters new names, loads them while earlier
members already generate, and unloads each after its last completion. A server that dies, hangs or sends invalid replies
is started again (or waited for, where it was not started here), gets the mean's weights again, and then the missing
requests again: a lost completion is never scored.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias, cast

import torch

from evoalign.config import Config
from evoalign.engines.base import (
    ABSENT,
    Completion,
    check_lengths,
    check_members,
    check_started,
    pairs_of,
    rollouts_of,
)
from evoalign.engines.master import KeepsMean, Master, whole
from evoalign.engines.server.adapters import AdapterStore, PeftAdapter, build
from evoalign.engines.server.base_model import PROBE_TOKENS, PROBES, TOLERANCE, BaseModel, load_base
from evoalign.engines.server.client import Client, LostError, RefusedError
from evoalign.engines.server.connection import Command, Connection, refuse_missing
from evoalign.engines.server.dialect import Dialect, first_error, gather
from evoalign.engines.server.settings import ServerSettings
from evoalign.engines.specs import on_gpu
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.spaces.targets import module_of
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, Member, Plan, Request, Rollout, Sampling, TensorSpec, Update

MARGIN = 3
"""Positions at the end of its context that a server does not use."""
AT_ONCE = 8
"""Members whose adapters are built together."""
LOADS = 4
"""Adapters that are loaded concurrently: servers process one after the other."""
UNLOAD = 15.0
"""Seconds to unload an adapter: a server first notices that its requests were cancelled."""

Found: TypeAlias = "queue.SimpleQueue[tuple[Member, Request, Completion] | None]"


class ServerEngine(KeepsMean):
    """Implements `evoalign.engines.base.Engine`. Each kind of server derives from it."""

    name: ClassVar[str]
    """Name of the engine in a config."""
    module: ClassVar[str]
    """Python module that has to be installed to start a server."""
    dialect: Dialect
    elsewhere: ClassVar[str] = "set engine.adapter_folder to a folder that both see"
    moves_weights: ClassVar[bool] = False
    """Whether a server accepts new weights of the model itself."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self._config, self._tokens = config, tokens
        self._settings = cast(ServerSettings, config.engine)
        self._dtype: torch.dtype = getattr(torch, config.model.served_dtype(on_gpu=on_gpu(config)))
        self._store: AdapterStore | None = None
        self._serial, self._run = itertools.count(), secrets.token_hex(4)
        self._is_served, self._has_moved = True, False
        self._probed: list[Completion] = []
        self._load: dict[str, float] = {}
        self._total = self._left = 0
        self.connection = Connection(
            self._settings, self.dialect, lambda port, key: self.command(port, key, self._specs)
        )
        if self.connection.is_ours:
            refuse_missing(self._settings.serves, self.name, self._settings.python, self.module)
        dummy = getattr(config.engine, "load_format", None) == "dummy"
        base = load_base(config, self._dtype, dummy=dummy, compared=not self.connection.is_ours)
        self._parameters, self._specs, self._model_hash = base.parameters, base.specs, base.hash
        self._vocabulary = max((t.shape[0] for t in base.specs if t.kind == "embedding"), default=2**31)
        try:
            self._store = AdapterStore(self._settings.adapter_folder)
            self.connection.open()
            self._check_dtype()
            if not self.connection.is_ours and base.model is not None:
                self._check_model(base)
        except BaseException:
            self.close()
            raise

    # --- defined by each kind of server ------------------------------------------------------------------------------

    def command(self, port: int, key: str, specs: Sequence[TensorSpec]) -> Command:
        """Return the command that starts a server: on loopback, at this port, with this key."""
        raise NotImplementedError

    def _command(self, module: str, options: Mapping[str, Any], environment: Mapping[str, str], key: str) -> Command:
        """Return the command of a module. True is an option without a value; None and False leave it out."""
        words: list[str] = []
        for name, value in options.items():
            if value is not None and value is not False:
                words += [name, *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
        python = self._settings.python or sys.executable
        return Command(module, [*words, *self._settings.arguments], python, environment, hidden=[key])

    def _modules(self, space: Space, specs: Sequence[TensorSpec]) -> list[str]:
        """Return the names of the projections that adapters change."""
        return sorted({module_of(m) for m in space.layout(specs, self.dtype).modules})

    async def push(self, client: Client, weights: Mapping[str, torch.Tensor], store: AdapterStore) -> None:
        """Send the server new weights of the model, in the served dtype, and check that it uses them."""
        raise NotImplementedError

    async def has_weights(self, client: Client) -> bool:
        """Return whether the server still has the weights that were sent last, as far as it reports."""
        return True

    @property
    def _by_files(self) -> bool:
        """Whether adapters are files that the server reads."""
        return True

    # --- the model ---------------------------------------------------------------------------------------------------

    def _check_model(self, base: BaseModel) -> None:
        """Raise ModelError where a running server serves another model than the files, or weights that were moved."""
        self._probed = self._probe()
        pairs = zip(PROBES, self._probed, strict=True)
        distance = sum(base.distance(self._tokens.encode(prompt), one) for prompt, one in pairs) / len(PROBES)
        if not distance <= TOLERANCE[self._dtype]:
            raise ModelError(
                f"{self.connection.where} serves other weights than model {self._config.model.name} (its "
                f"log-probabilities differ by {distance:.2g}): another model, or one that a run has moved; restart it"
            )

    def _probe(self) -> list[Completion]:
        """Return the served model's completions of `PROBES`."""
        prompts = [self._tokens.encode(prompt) for prompt in PROBES]
        requests = [Request(i, prompt, Sampling(PROBE_TOKENS), logprobs=True) for i, prompt in enumerate(prompts)]
        return self._complete(requests, None)

    def _complete(self, requests: Sequence[Request], adapter: str | None) -> list[Completion]:
        """Return a few short completions, outside of a rollout. Raises LostError after `engine.timeout`."""
        client = self.connection.client
        work = self.dialect.generate(client, requests, adapter, self._tokens.stop_ids)
        return client.call(work, self._settings.timeout)

    def _check_dtype(self) -> None:
        """Raise ModelError where the server serves another dtype than the config's."""
        own, other = str(self._dtype).removeprefix("torch."), self.connection.about.dtype
        if other not in (None, "auto", own):
            raise ModelError(f"{self.connection.where} serves {other}, and this config {own}: set model.dtype {other}")

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def specs(self) -> list[TensorSpec]:
        return list(self._specs)

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Create the mean. Raises ConfigError for a space that this kind of server cannot serve."""
        if space.carrier != "adapter":
            raise ConfigError(
                f"space {space.name} writes each member over the weights, which engine {self.name} would have to send "
                "whole for every member; use engine vllm or transformers, or space lora or lowrank"
            )
        if space.evolves_model and not self.moves_weights:
            raise ConfigError(
                f"space {space.name} moves the model's own weights, which engine {self.name} does not support; use "
                "space lora, or engine sglang or vllm"
            )
        if space.evolves_model and not self._parameters:
            raise ConfigError(f"engine.load_format dummy: space {space.name} needs the model's weights")
        settings, about = self._settings, self.connection.about
        about.check(space.rank, {module_of(m) for m in layout.modules}, self.connection.where)
        device = torch.device(settings.mean_device)
        self._parameters = {n: t.to(device) for n, t in self._parameters.items()} if space.evolves_model else {}
        self.mean = Master(space, layout, optimizer, keep_start, whole(self._parameters), device)
        where = "started here" if settings.url is None else f"at {settings.url}"
        note = f"{settings.serves} {about.version} {where}; {settings.slots(self._config)} adapters at once"
        if not about.has_seeds:
            note += "; it samples without seeds, so that above temperature 0 members share no random numbers"
        return Facts(
            engine=self.name,
            device=settings.mean_device,
            dtype=layout.dtype,
            deterministic=False,
            model_hash=self._model_hash,
            library=f"{settings.serves} {about.version}",
            master_bytes=self.mean.bytes,
            note=note,
        )

    def _recover(self, error: LostError) -> None:
        self._is_served, before = False, self.connection.about.model
        self.connection.recover(error, lambda: self._check_same(before))

    def _check_same(self, before: str | None) -> None:
        """Raise ModelError where the server that was reached again is not the one that was lost."""
        self._check_dtype()
        where, model = self.connection.where, self.connection.about.model
        if model != before:
            raise ModelError(f"{where} serves {model}, and served {before} before")
        if not self._probed or (self._mean is not None and self.mean.space.evolves_model):
            return  # it was started here, or its weights are about to be sent
        first = [one.logprobs[0] for one in self._probed if one.logprobs]  # later tokens may have other prefixes
        again = [one.logprobs[0] for one in self._probe() if one.logprobs]
        distance = sum(abs(a - b) for a, b in zip(first, again, strict=False)) / max(1, len(again))
        if len(first) != len(again) or distance > TOLERANCE[self._dtype]:
            raise ModelError(f"{where} serves other weights than before it was lost")

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def context(self) -> int | None:
        return self.connection.about.longest

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield a completion of each request for each member, or the one it names; before `start` for the mean only."""
        check_lengths(requests, self.context(), "the {} positions of the server", "engine.context_length")
        check_started(self._mean is not None, plan)
        while ABSENT in plan.members:
            try:
                self._ask_absent(requests)
            except LostError as error:
                self._recover(error)
        check_members(plan, requests)
        missing = {(m.index, r.index): (m, r) for m, r in pairs_of(plan.members, requests)}
        while missing:
            try:
                self._serve_mean()
                with closing(self._completions(plan, list(missing.values()))) as completions:
                    for member, request, completion in completions:
                        del missing[member.index, request.index]
                        yield from rollouts_of(self._tokens, [(member, request, completion)])
            except LostError as error:
                self._recover(error)
            except RefusedError as error:
                if "/load_lora_adapter " in str(error) and not self.connection.is_ours:
                    message = f"{error}; if it does not see files of this machine, {self.elsewhere}"
                    raise RefusedError(message, error.status) from error
                raise

    def _ask_absent(self, requests: Sequence[Request]) -> NoReturn:
        """Request a completion by an adapter that was never loaded, and raise ModelError where the server refuses.

        Raises EvoalignError where it replies: it uses the base model for adapters that it does not know.
        """
        try:
            completions = self._complete(requests[:1], self._new_name(ABSENT))
        except RefusedError as error:
            raise ModelError(f"member {ABSENT.index} is not there: {error}") from error
        text = self._tokens.decode(completions[0].token_ids)
        raise EvoalignError(
            f"{self.connection.where} returns {text!r} for an adapter that was never loaded: it uses the base model "
            "for adapters that it does not know"
        )

    def _new_name(self, member: Member) -> str:
        """Return a name that was never used, which neither the server's cache nor an older adapter has."""
        return f"evoalign-{self._run}-{next(self._serial)}-{'mean' if member.is_mean else member.index}"

    def _completions(
        self, plan: Plan, pairs: Sequence[tuple[Member, Request]]
    ) -> Generator[tuple[Member, Request, Completion]]:
        """Yield completions as they arrive. Closing it cancels the others. Raises LostError, RefusedError."""
        found: Found = queue.SimpleQueue()
        work = self.connection.client.submit(self._complete_all(plan, pairs, found))
        try:
            while (one := found.get()) is not None:
                yield one
            work.result()
        finally:
            if not work.done():
                work.cancel()
                with suppress(queue.Empty):  # until the adapters are unloaded
                    while found.get(timeout=UNLOAD + 1.0) is not None:
                        pass

    async def _complete_all(self, plan: Plan, pairs: Sequence[tuple[Member, Request]], found: Found) -> None:
        """Put all completions into `found` as they arrive, and None at the end.

        As many members have their adapters loaded at once as the server has slots.
        """
        by_member: dict[Member, list[Request]] = {}
        for member, request in pairs:
            by_member.setdefault(member, []).append(request)
        slots, loads = asyncio.Semaphore(self._settings.slots(self._config)), asyncio.Semaphore(LOADS)
        self._total = self._left = len(pairs)
        self.connection.received()
        try:
            async with asyncio.TaskGroup() as watched:
                watch = watched.create_task(self.connection.watch())
                async with asyncio.TaskGroup() as group:
                    for member in [m for m in by_member if self._is_base(m)]:
                        group.create_task(self._complete_member(member, by_member.pop(member), None, found))
                    members = list(by_member)
                    for first in range(0, len(members), AT_ONCE):
                        some = members[first : first + AT_ONCE]
                        adapters = await asyncio.to_thread(self._adapters, plan, some)
                        for member, adapter in zip(some, adapters, strict=True):
                            await slots.acquire()
                            work = self._complete_adapter(member, by_member[member], adapter, found, slots, loads)
                            group.create_task(work)
                watch.cancel()
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        finally:
            found.put(None)

    async def _complete_adapter(
        self,
        member: Member,
        requests: Sequence[Request],
        adapter: PeftAdapter,
        found: Found,
        slots: asyncio.Semaphore,
        loads: asyncio.Semaphore,
    ) -> None:
        """Load one member's adapter, complete all its requests, and unload it."""
        assert self._store is not None
        name, client, store = self._new_name(member), self.connection.client, self._store
        try:
            async with loads:
                folder = await asyncio.to_thread(store.put, name, adapter) if self._by_files else None
                await self.dialect.load(client, name, adapter, folder, self.connection.about.ranks)
            self.connection.received()
            await self._complete_member(member, requests, name, found)
        finally:
            slots.release()
            with suppress(EvoalignError, TimeoutError):  # a server that was lost has no adapters
                async with asyncio.timeout(UNLOAD):
                    await self.dialect.unload(client, name)
            store.drop(name)

    async def _complete_member(
        self, member: Member, requests: Sequence[Request], name: str | None, found: Found
    ) -> None:
        async def complete(part: Sequence[Request]) -> None:
            client = self.connection.client
            completions = await self.dialect.generate(client, part, name, self._tokens.stop_ids)
            self.connection.received()
            for request, completion in zip(part, completions, strict=True):
                self._check_complete(request, completion)
                found.put((member, request, completion))
                self._left -= 1
                if self._left in (self._total - 1, self._total // 2):  # while the server is busy
                    await self._measure_load()

        size = self._settings.batch
        await gather(complete(requests[first : first + size]) for first in range(0, len(requests), size))

    def _check_complete(self, request: Request, completion: Completion) -> None:
        """Raise LostError for an incomplete or invalid completion: it is requested again, and not scored."""
        ids, sampling, longest = completion.token_ids, request.sampling, self.connection.about.longest
        where, ends = self.connection.where, self._tokens.stop_ids
        strange = next((token for token in ids if token >= self._vocabulary), None)
        if strange is not None:
            raise LostError(f"{where} returns token {strange}, and the model has {self._vocabulary}")
        if completion.finish_reason == "stop" and not sampling.stop and ids and ids[-1] not in ends:
            raise LostError(
                f"{where} ends a completion at token {ids[-1]}, which is not a stop token of this model {list(ends)}; "
                "where it is one, add it to eos_token_id in the model's generation_config.json"
            )
        is_full = len(ids) == sampling.max_tokens or (
            longest is not None and len(request.prompt_ids) + len(ids) >= longest - MARGIN
        )
        if completion.finish_reason == "length" and not is_full:
            raise LostError(f"{where} cuts off a completion after {len(ids)} tokens of {sampling.max_tokens}")

    def _is_base(self, member: Member) -> bool:
        """Return whether the served weights generate for a member, without an adapter."""
        return member.is_mean and (self._mean is None or self.mean.space.evolves_model)

    def _adapters(self, plan: Plan, members: Sequence[Member]) -> list[PeftAdapter]:
        mean = self.mean
        return build(mean.space, mean.layout, mean.__getitem__, plan, members, self._config.model.name)

    # --- the mean ----------------------------------------------------------------------------------------------------

    def apply(self, update: Update) -> None:
        """Move the mean. A server that serves its weights gets them before the next completion."""
        super().apply(update)
        self._is_served, self._has_moved = False, True
        self.connection.keep_log(self._logs)

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        super().load(state, optimizer)
        self._is_served = False

    def _serve_mean(self) -> None:
        """Send the mean's weights to the server, where they are the model's own and it does not have them."""
        client, connection = self.connection.client, self.connection
        if self._mean is not None and self.mean.space.evolves_model:
            if self._is_served and not connection.is_ours:  # it may have been restarted while it was idle
                self._is_served = client.call(self.has_weights(client))
            if not self._is_served:
                assert self._store is not None
                moving = {t.name for t in self.mean.layout.tensors}
                client.call(self.push(client, {n: t for n, t in self._parameters.items() if n in moving}, self._store))
        self._is_served = True

    def metrics(self) -> dict[str, float]:
        """Return the highest of a few samples of the server's load since the last call; empty where it reports none."""
        found, self._load = self._load, {}
        return found

    async def _measure_load(self) -> None:
        with suppress(EvoalignError):
            now = dict(await self.dialect.metrics(self.connection.client))
            self._load = max(self._load, now, key=lambda load: load.get("running", -1.0))

    @property
    def _logs(self) -> Path:
        """Folder for the server's log; it exists once the mean has moved."""
        return Path(self._config.output_dir) / "logs"

    def close(self) -> None:
        """End the server that was started here, with all its processes, and delete its adapters."""
        self.connection.close(self._logs if self._has_moved else None)
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self._parameters = {}
        super().close()
