# SPDX-License-Identifier: Apache-2.0
"""An engine over a server: the mean lives here, members go to the server as adapters, completions come back.

All requests of all members are in flight at once. Each rollout gives its adapters names that were never used, loads
them while others answer already, and has them unloaded as their last answer comes in. A server that dies, hangs or
answers what is no answer is started again (or, where it is not ours, waited for), gets the mean's weights again, and
is asked again for what is missing: nothing of a lost answer is ever scored.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar, cast

import torch

from evoalign.config import Config
from evoalign.engines.base import ABSENT, check_members, pairs_of
from evoalign.engines.master import KeepsMean, Master, whole
from evoalign.engines.server.adapters import PeftAdapter, Shelf, build
from evoalign.engines.server.base import APART, PROBE, PROBED, Base, read_base
from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import Dialect, Server
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.engines.server.process import Command, ServerProcess, free_port, refuse_missing
from evoalign.engines.server.settings import ServerSettings
from evoalign.engines.server.traffic import Heard, Traffic
from evoalign.engines.specs import on_gpu
from evoalign.errors import ConfigError, DataError, EvoalignError, ModelError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.spaces.targets import module_of
from evoalign.tokens import Tokens, before_stop
from evoalign.types import MEAN, Facts, Layout, Member, Plan, Request, Rollout, Sampling, TensorSpec, Update

POLL = 0.2
"""Seconds between looks at whether the server's process is there."""


class ServerEngine(KeepsMean):
    """See `evoalign.engines.base.Engine` for what each method promises. A kind of server derives from it."""

    name: ClassVar[str]
    """Of the engine in a config."""
    module: ClassVar[str]
    """What is to be installed for a server to be started here."""
    dialect: Dialect
    moves_weights: ClassVar[bool] = False
    """Whether a server takes new weights of the model itself."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self._config, self._tokens = config, tokens
        self._settings = cast(ServerSettings, config.engine)
        self._dtype: torch.dtype = getattr(torch, config.model.served_dtype(on_gpu=on_gpu(config)))
        self._process: ServerProcess | None = None
        self._client: Client | None = None
        self._shelf: Shelf | None = None
        self._serial, self._run = itertools.count(), secrets.token_hex(4)
        self._restarts, self._server = 0, Server("")
        self._is_served, self._has_moved = True, False
        key = self._key()
        if self._settings.url is None:
            refuse_missing(self._settings.serves, self.name, self._settings.python, self.module)
        base = read_base(config, self._dtype, dummy=getattr(config.engine, "load_format", None) == "dummy")
        self._parameters, self._specs, self._model_hash = base.parameters, base.specs, base.hash
        try:
            self._shelf = Shelf(self._settings.adapter_folder)
            if self._settings.url is None:
                self._launch()
            else:
                self._client = self._connect(self._settings.url, key)
                self._wait_for_it(self._settings.start_timeout)
            self._meet()
            if self._settings.url is not None and base.model is not None:
                self._check_model(base)
        except BaseException:
            self.close()
            raise

    # --- what a kind of server says ----------------------------------------------------------------------------------

    def command(self, port: int, key: str, specs: Sequence[TensorSpec]) -> Command:
        """How such a server is started: on loopback, at this port, with this key."""
        raise NotImplementedError

    async def push(self, client: Client, weights: Mapping[str, torch.Tensor], shelf: Shelf) -> None:
        """Have the server take new weights of the model, in the served dtype, and make sure that it did."""
        raise NotImplementedError

    # --- the model ---------------------------------------------------------------------------------------------------

    def _check_model(self, base: Base) -> None:
        """Raise ModelError where a server that was not started here serves another model, or weights that were moved.

        One answer of a few tokens, whose log-probabilities are held against those of the files.
        """
        client, prompt = self._there(), tuple(self._tokens.encode(PROBE))
        request = Request(0, prompt, Sampling(PROBED), logprobs=True)
        (said,) = client.call(self.dialect.generate(client, [request], None, self._tokens.stop_ids, self._name(MEAN)))
        apart = base.apart(prompt, said)
        if not apart <= APART[self._dtype]:
            raise ModelError(
                f"{self._settings.serves} at {client.url} serves other weights than model {self._config.model.name} "
                f"(its log-probabilities are {apart:.2g} away): another model, or one that a run has moved; start it "
                "anew"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def specs(self) -> list[TensorSpec]:
        return list(self._specs)

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Make the mean. Raises ConfigError for what this kind of server cannot carry."""
        if space.carrier != "adapter":
            raise ConfigError(
                f"space {space.name} writes each member over the weights, which engine {self.name} would have to send "
                "whole for every member; use engine vllm or transformers, or space lora or lowrank"
            )
        if space.evolves_model and not self.moves_weights:
            raise ConfigError(
                f"space {space.name} moves the model's own weights, which engine {self.name} does not take; use space "
                "lora, or engine sglang or vllm"
            )
        if space.evolves_model and not self._parameters:
            raise ConfigError(f"engine.load_format dummy: space {space.name} needs the model's own weights")
        self._server.check(space.rank, {module_of(t.module) for t in layout.tensors}, self._where)
        device = torch.device(self._settings.mean_device)
        parameters = {n: t.to(device) for n, t in self._parameters.items()} if space.evolves_model else {}
        self._parameters = parameters
        self.mean = Master(space, layout, optimizer, keep_start, whole(parameters), device)
        about = self._server
        return Facts(
            engine=self.name,
            device=self._settings.mean_device,
            dtype=layout.dtype,
            deterministic=False,
            model_hash=self._model_hash,
            library=f"{self._settings.serves} {about.version}",
            master_bytes=self.mean.bytes,
            note=self._note(space, about),
        )

    def _note(self, space: Space, about: Server) -> str:
        where = "started here" if self._settings.url is None else f"at {self._settings.url}"
        said = f"{self._settings.serves} {about.version} {where}; {self._settings.slots(self._config)} adapters at once"
        if not about.has_seeds:
            said += "; it draws without seeds, so that above temperature 0 members share no random numbers"
        return said

    # --- the server --------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"{self._settings.serves} at {self._there().url}"

    def _key(self) -> str | None:
        name = self._settings.key_variable
        if name is None:
            return None
        if not os.environ.get(name):
            raise ConfigError(f"engine.key_variable: there is no {name} in the environment; set it to the server's key")
        return os.environ[name]

    def _connect(self, url: str, key: str | None) -> Client:
        ca = self._settings.ca_file
        return Client(url, key, ca_file=ca, concurrency=self._settings.concurrency)

    def _launch(self) -> None:
        """Start the server, at a new port and with a new key."""
        if self._client is not None:
            self._client.close()
        port, key = free_port(), secrets.token_hex(16)
        client = self._client = self._connect(f"http://127.0.0.1:{port}", key)
        command = self.command(port, key, self._specs)
        if self._process is None:
            self._process = ServerProcess(command, f"the {self._settings.serves} server")
        self._process.command = command
        try:
            self._process.start(lambda: client.call(self._is_ready(client)), self._settings.start_timeout)
        except LostError as error:
            raise ModelError(str(error)) from error

    async def _is_ready(self, client: Client) -> bool:
        try:
            return await self.dialect.is_ready(client)
        except LostError:
            return False

    def _wait_for_it(self, seconds: float) -> None:
        """Until a server at `url` is ready. Raises ModelError."""
        client, deadline = self._there(), time.monotonic() + seconds
        while not client.call(self._is_ready(client)):
            if time.monotonic() > deadline:
                raise ModelError(
                    f"no {self._settings.serves} answers at {client.url} (waited {seconds:g} s, engine.start_timeout); "
                    "start it, or set engine.url"
                )
            time.sleep(POLL)

    def _meet(self) -> None:
        """Ask the server what it is. Raises ModelError where it serves other numbers than this config says."""
        client = self._there()
        self._server = client.call(self.dialect.about(client))
        own = str(self._dtype).removeprefix("torch.")
        if self._server.dtype not in (None, "auto", own):
            other = self._server.dtype
            raise ModelError(f"{self._where} serves {other}, and this config {own}: set model.dtype {other}")

    def _recover(self, error: LostError) -> None:
        """After a loss: the server is there again, and has the base model. Raises EvoalignError where it is not."""
        self._restarts += 1
        if self._restarts > self._settings.restarts:
            raise EvoalignError(
                f"{error}; the server was lost {self._restarts} times (engine.restarts {self._settings.restarts})"
            ) from error
        self._is_served = False
        if self._process is not None:
            self._launch()
        else:
            try:
                self._wait_for_it(min(self._settings.start_timeout, self._settings.timeout))
            except ModelError as gone:
                raise EvoalignError(f"{error}; {gone}") from error
        self._meet()

    @property
    def _logs(self) -> Path:
        """Of the run, whose folder is there once its mean moves."""
        return Path(self._config.output_dir) / "logs"

    def _there(self) -> Client:
        if self._client is None:
            raise EvoalignError("the engine is closed")
        return self._client

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One completion of each request for each member, or the one it names; before `start`, of the mean alone."""
        self._check_length(requests)
        if self._mean is None and plan.members != (MEAN,):
            raise EvoalignError("the engine has no space yet: call start first, or ask for the mean alone")
        if ABSENT in plan.members:
            self._ask_nobody(requests)
        check_members(plan, requests)
        owed = {(m.index, r.index): (m, r) for m, r in pairs_of(plan.members, requests)}
        while owed:
            try:
                self._serve_mean()
                for heard in self._hear(plan, list(owed.values())):
                    del owed[heard.member.index, heard.request.index]
                    yield self._rollout(heard)
            except LostError as error:
                self._recover(error)

    def _rollout(self, heard: Heard) -> Rollout:
        sampling, ids = heard.request.sampling, heard.said.token_ids
        return Rollout(
            member=heard.member,
            request=heard.request.index,
            token_ids=ids,
            text=before_stop(self._tokens.decode(ids), sampling.stop, sampling.keep_stop),
            finish_reason=heard.said.finish_reason,
            logprobs=heard.said.logprobs if heard.request.logprobs else None,
        )

    def _ask_nobody(self, requests: Sequence[Request]) -> None:
        """Ask under the name of an adapter that was never loaded: a server that answers gives the base model's answer.

        Raises ModelError, one that says so where it answers.
        """
        client, name = self._there(), self._name(ABSENT)
        try:
            said = client.call(self.dialect.generate(client, requests[:1], name, self._tokens.stop_ids, name))
        except RefusedError as error:
            raise ModelError(f"member {ABSENT.index} is not there: {error}") from error
        text = self._tokens.decode(said[0].token_ids)
        raise EvoalignError(
            f"{self._settings.serves} at {client.url} answers {text!r} in the name of an adapter that was never "
            "loaded: it takes the base model for adapters that it does not know"
        )

    def _name(self, member: Member) -> str:
        """Never used before: neither a server's cache nor an older adapter can answer under it."""
        return f"evoalign-{self._run}-{next(self._serial)}-{'mean' if member.is_mean else member.index}"

    def _check_length(self, requests: Sequence[Request]) -> None:
        limit = self._server.longest
        for request in requests:
            length, room = len(request.prompt_ids), request.sampling.max_tokens
            if limit is not None and length + room > limit:
                raise DataError(
                    f"a prompt of {length} tokens and a completion of {room} exceed the {limit} positions of the "
                    "server; shorten the prompt, lower max_tokens (sampling, evaluation), or raise "
                    "engine.context_length"
                )

    def _hear(self, plan: Plan, pairs: Sequence[tuple[Member, Request]]) -> Iterator[Heard]:
        """Answers as they come. Raises LostError where the server has died, or owes answers for too long."""
        assert self._shelf is not None
        traffic = Traffic(
            client=self._there(),
            dialect=self.dialect,
            shelf=self._shelf,
            by_files=self._by_files,
            ranks=self._server.ranks,
            slots=self._settings.slots(self._config),
            batch=self._settings.batch,
            stop_ids=self._tokens.stop_ids,
            name=self._name,
        )
        last = time.monotonic()
        with closing(traffic.hear(pairs, self._is_bare, lambda members: self._adapters(plan, members))) as heard:
            for one in heard:
                if one is None:  # nothing new
                    if self._process is not None:
                        self._process.check()
                    if time.monotonic() - last > self._settings.timeout:
                        self._check_still_there()
                        last = time.monotonic()
                    continue
                last = time.monotonic()
                if isinstance(one, Heard):
                    yield one

    def _check_still_there(self) -> None:
        """Raise LostError where a server that has said nothing for long is not well either."""
        client = self._there()
        if not client.call(self._is_ready(client)):
            seconds = f"{self._settings.timeout:g} s"
            raise LostError(f"{self._settings.serves} at {client.url} hangs: no answer for {seconds}")

    @property
    def _by_files(self) -> bool:
        """Whether adapters lie in files that the server reads."""
        return True

    def _is_bare(self, member: Member) -> bool:
        """Whether the served weights alone answer for a member."""
        return member.is_mean and (self._mean is None or self.mean.space.evolves_model)

    def _adapters(self, plan: Plan, members: Sequence[Member]) -> list[PeftAdapter]:
        mean = self.mean
        return build(mean.space, mean.layout, mean.__getitem__, plan, members, self._config.model.name)

    # --- the mean ----------------------------------------------------------------------------------------------------

    def apply(self, update: Update) -> None:
        """Move the mean; a server that has its weights gets them before it answers again."""
        super().apply(update)
        self._is_served, self._has_moved = False, True
        if self._process is not None:
            self._process.keep_log(self._logs)

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        super().load(state, optimizer)
        self._is_served = False

    def _serve_mean(self) -> None:
        """Have the server answer with the mean's weights, where they are its own."""
        if self._is_served:
            return
        if self._mean is not None and self.mean.space.evolves_model:
            assert self._shelf is not None
            client, moving = self._there(), {t.name for t in self.mean.layout.tensors}
            client.call(self.push(client, {n: t for n, t in self._parameters.items() if n in moving}, self._shelf))
        self._is_served = True

    def metrics(self) -> dict[str, float]:
        """How busy the server is; nothing where it does not say."""
        client = self._there()
        try:
            return dict(client.call(self.dialect.metrics(client)))
        except EvoalignError:
            return {}

    def close(self) -> None:
        """End the server that was started here, with all its processes, and delete what was written for it."""
        process, client, shelf = self._process, self._client, self._shelf
        self._process = self._client = self._shelf = None
        if client is not None:
            client.close()
        if process is not None:
            process.stop()
            if self._has_moved:
                process.keep_log(self._logs)
            process.drop_log()
        if shelf is not None:
            shelf.close()
        self._parameters = {}
        super().close()
