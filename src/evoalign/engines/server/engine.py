# SPDX-License-Identifier: Apache-2.0
"""An engine over a server: the mean lives here, members go to the server as adapters, completions come back.

All requests of all members are in flight at once. Each rollout gives its adapters names that were never used, loads
them while others answer already, and has them unloaded as their last answer comes in. A server that dies, hangs or
answers what is no answer is started again (or, where it is not ours, waited for), gets the mean's weights again, and
is asked again for what is missing: nothing of a lost answer is ever scored.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, NoReturn, cast

import torch

from evoalign.config import Config
from evoalign.engines.base import ABSENT, check_members, pairs_of
from evoalign.engines.master import KeepsMean, Master, whole
from evoalign.engines.server.adapters import PeftAdapter, Shelf, build
from evoalign.engines.server.base import APART, PROBED, PROBES, Base, read_base
from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import Dialect, Said, Server
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.engines.server.link import Link
from evoalign.engines.server.process import Command, refuse_missing
from evoalign.engines.server.settings import ServerSettings
from evoalign.engines.server.traffic import Heard, Traffic
from evoalign.engines.specs import on_gpu
from evoalign.errors import ConfigError, DataError, EvoalignError, ModelError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space
from evoalign.spaces.targets import module_of
from evoalign.tokens import Tokens, before_stop
from evoalign.types import MEAN, Facts, Layout, Member, Plan, Request, Rollout, Sampling, TensorSpec, Update

MARGIN = 3
"""Positions at the end of its context that a server does not use."""


class ServerEngine(KeepsMean):
    """See `evoalign.engines.base.Engine` for what each method promises. A kind of server derives from it."""

    name: ClassVar[str]
    """Of the engine in a config."""
    module: ClassVar[str]
    """What is to be installed for a server to be started here."""
    dialect: Dialect
    elsewhere: ClassVar[str] = "set engine.adapter_folder to a folder that both see"
    moves_weights: ClassVar[bool] = False
    """Whether a server takes new weights of the model itself."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self._config, self._tokens = config, tokens
        self._settings = cast(ServerSettings, config.engine)
        self._dtype: torch.dtype = getattr(torch, config.model.served_dtype(on_gpu=on_gpu(config)))
        self._shelf: Shelf | None = None
        self._serial, self._run = itertools.count(), secrets.token_hex(4)
        self._is_served, self._has_moved = True, False
        self._own_words: list[Said] = []
        self._load: dict[str, float] = {}
        self._link = Link(self._settings, self.dialect, lambda port, key: self.command(port, key, self._specs))
        if self._link.is_ours:
            refuse_missing(self._settings.serves, self.name, self._settings.python, self.module)
        base = read_base(config, self._dtype, dummy=getattr(config.engine, "load_format", None) == "dummy")
        self._parameters, self._specs, self._model_hash = base.parameters, base.specs, base.hash
        self._words = max((t.shape[0] for t in base.specs if t.kind == "embedding"), default=2**31)
        try:
            self._shelf = Shelf(self._settings.adapter_folder)
            self._link.open()
            self._check_dtype()
            if not self._link.is_ours and base.model is not None:
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

    async def has_weights(self, client: Client) -> bool:
        """Whether the server still has the weights that it was sent last, as far as it says."""
        return True

    # --- the model ---------------------------------------------------------------------------------------------------

    def _check_model(self, base: Base) -> None:
        """Raise ModelError where a server that was not started here serves another model, or weights that were moved.

        Answers of a few tokens, whose log-probabilities are held against those of the files.
        """
        said = self._own_words = self._probed()
        apart = sum(base.apart(self._tokens.encode(prompt), one) for prompt, one in zip(PROBES, said, strict=True))
        apart /= len(PROBES)
        if not apart <= APART[self._dtype]:
            raise ModelError(
                f"{self._link.where} serves other weights than model {self._config.model.name} "
                f"(its log-probabilities are {apart:.2g} away): another model, or one that a run has moved; start it "
                "anew"
            )

    def _probed(self) -> list[Said]:
        """What the served weights answer to `PROBES`."""
        prompts = [self._tokens.encode(prompt) for prompt in PROBES]
        requests = [Request(i, prompt, Sampling(PROBED), logprobs=True) for i, prompt in enumerate(prompts)]
        return self._asked(requests, None)

    def _asked(self, requests: Sequence[Request], adapter: str | None) -> list[Said]:
        """A few short answers, apart from any rollout. Raises LostError after `engine.timeout`."""
        client = self._there()
        work = self.dialect.generate(client, requests, adapter, self._tokens.stop_ids)
        return client.call(work, self._settings.timeout)

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
        self._link.about.check(space.rank, {module_of(t.module) for t in layout.tensors}, self._link.where)
        device = torch.device(self._settings.mean_device)
        parameters = {n: t.to(device) for n, t in self._parameters.items()} if space.evolves_model else {}
        self._parameters = parameters
        self.mean = Master(space, layout, optimizer, keep_start, whole(parameters), device)
        about = self._link.about
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

    def _check_dtype(self) -> None:
        """Raise ModelError where the server serves other numbers than this config says."""
        own, other = str(self._dtype).removeprefix("torch."), self._link.about.dtype
        if other not in (None, "auto", own):
            raise ModelError(f"{self._link.where} serves {other}, and this config {own}: set model.dtype {other}")

    def _recover(self, error: LostError) -> None:
        self._is_served, before = False, self._link.about.model
        self._link.recover(error, lambda: self._check_same(before))

    def _check_same(self, before: str | None) -> None:
        """Raise ModelError where the server that is there again is another than the one that was lost."""
        self._check_dtype()
        if self._link.about.model != before:
            raise ModelError(f"{self._link.where} serves {self._link.about.model}, and served {before} before")
        if not self._own_words or (self._mean is not None and self.mean.space.evolves_model):
            return  # started here, or its weights are about to be sent
        first = [one.logprobs[0] for one in self._own_words if one.logprobs]  # of one and the same prefix
        again = [one.logprobs[0] for one in self._probed() if one.logprobs]
        apart = sum(abs(a - b) for a, b in zip(first, again, strict=False)) / max(1, len(again))
        if len(first) != len(again) or apart > APART[self._dtype]:
            raise ModelError(f"{self._link.where} answers otherwise than before it was lost: it serves other weights")

    @property
    def _logs(self) -> Path:
        """Of the run, whose folder is there once its mean moves."""
        return Path(self._config.output_dir) / "logs"

    def _there(self) -> Client:
        return self._link.client

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One completion of each request for each member, or the one it names; before `start`, of the mean alone."""
        self._check_length(requests)
        if self._mean is None and plan.members != (MEAN,):
            raise EvoalignError("the engine has no space yet: call start first, or ask for the mean alone")
        while ABSENT in plan.members:
            try:
                self._ask_nobody(requests)
            except LostError as error:
                self._recover(error)
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
            except RefusedError as error:
                if "/load_lora_adapter " in str(error) and not self._link.is_ours:
                    raise RefusedError(f"{error}; if it sees no files of this machine, {self.elsewhere}") from error
                raise

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

    def _ask_nobody(self, requests: Sequence[Request]) -> NoReturn:
        """Ask under the name of an adapter that was never loaded: a server that answers gives the base model's answer.

        Raises ModelError, one that says so where it answers.
        """
        try:
            said = self._asked(requests[:1], self._name(ABSENT))
        except RefusedError as error:
            raise ModelError(f"member {ABSENT.index} is not there: {error}") from error
        text = self._tokens.decode(said[0].token_ids)
        raise EvoalignError(
            f"{self._link.where} answers {text!r} in the name of an adapter that was never loaded: it takes the base "
            "model for adapters that it does not know"
        )

    def _name(self, member: Member) -> str:
        """Never used before: neither a server's cache nor an older adapter can answer under it."""
        return f"evoalign-{self._run}-{next(self._serial)}-{'mean' if member.is_mean else member.index}"

    def _check_length(self, requests: Sequence[Request]) -> None:
        limit = self._link.about.longest
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
            ranks=self._link.about.ranks,
            slots=self._settings.slots(self._config),
            batch=self._settings.batch,
            stop_ids=self._tokens.stop_ids,
            name=self._name,
        )
        self._link.heard()
        left = len(pairs)
        with closing(traffic.hear(pairs, self._is_bare, lambda members: self._adapters(plan, members))) as heard:
            for one in heard:
                if one is None:  # nothing new
                    self._link.silent()
                    continue
                self._link.heard()
                if isinstance(one, Heard):
                    self._check_whole(one)
                    left -= 1
                    if left in (len(pairs) - 1, len(pairs) // 2):  # it is idle when all is said
                        self._sample()
                    yield one

    def _check_whole(self, heard: Heard) -> None:
        """Raise LostError for what is no whole completion: it is asked for again, and not scored."""
        ids, sampling, longest = heard.said.token_ids, heard.request.sampling, self._link.about.longest
        strange = next((token for token in ids if token >= self._words), None)
        if strange is not None:
            raise LostError(f"{self._link.where} answers token {strange}, and the model has {self._words}")
        reason, ends = heard.said.finish_reason, self._tokens.stop_ids
        if reason == "stop" and not sampling.stop and ids and ids[-1] not in ends:
            raise LostError(
                f"{self._link.where} ends a completion at token {ids[-1]}, which is no stop token of this model "
                f"{list(ends)}; where it is one, add it to eos_token_id in the model's generation_config.json"
            )
        is_full = len(ids) == sampling.max_tokens or (
            longest is not None and len(heard.request.prompt_ids) + len(ids) >= longest - MARGIN
        )
        if reason == "length" and not is_full:
            raise LostError(
                f"{self._link.where} cuts off a completion after {len(ids)} tokens of {sampling.max_tokens}"
            )

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
        self._link.keep_log(self._logs)

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        super().load(state, optimizer)
        self._is_served = False

    def _serve_mean(self) -> None:
        """Have the server answer with the mean's weights, where they are its own."""
        client = self._there()
        if self._mean is not None and self.mean.space.evolves_model:
            if self._is_served and not self._link.is_ours:  # it may have been started anew while nothing was asked
                self._is_served = client.call(self.has_weights(client))
            if not self._is_served:
                assert self._shelf is not None
                moving = {t.name for t in self.mean.layout.tensors}
                client.call(self.push(client, {n: t for n, t in self._parameters.items() if n in moving}, self._shelf))
        self._is_served = True

    def metrics(self) -> dict[str, float]:
        """How busy the server was, of a few moments since this was asked last the busiest; nothing where it does not
        say."""
        found, self._load = self._load, {}
        return found

    def _sample(self) -> None:
        client = self._there()
        with suppress(EvoalignError):
            now = dict(client.call(self.dialect.metrics(client)))
            self._load = max(self._load, now, key=lambda load: load.get("running", -1.0))

    def close(self) -> None:
        """End the server that was started here, with all its processes, and delete what was written for it."""
        self._link.close(self._logs if self._has_moved else None)
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.close()
        self._parameters = {}
        super().close()
