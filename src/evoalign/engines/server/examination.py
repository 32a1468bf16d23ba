# SPDX-License-Identifier: Apache-2.0
"""The checks of a server's adapters: which have to answer alike, and which must not.

Forms of an adapter that mean the same (a scale in `lora_alpha` or in B, that by rank-stabilised scaling, a name that
is used again and one that is new) have to answer alike; an adapter and the base model, B and -B, one projection alone
and none must not. How far apart equal weights answer is measured first, in batches of other composition: no verdict
goes below that, so that rounding is no fault.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.asking import Answers, apart
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.engines.server.session import Session
from evoalign.engines.server.sources import Source, sources
from evoalign.errors import ConfigError

Status: TypeAlias = Literal["ok", "FAULT", "warning", "not checked"]
FLOOR = 2**-5
"""Nats by which rounding may move a token's log-probability in the mean, whatever was measured."""
LOOSE = 4
"""Answers that lie apart by so many times the measured floor are not alike."""
STRONG = 8
"""An adapter is strong enough where it moves answers by so many times what is alike."""
SHARE = 4
"""Forms that should be the same differ where they lie apart by more than this part of what a fault would do."""
GAINS = (2**-4, 2**10)
"""Of an input of unit variance, what the weakest adapter makes that is tried, and the strongest. A model's own: 1."""
SCALE = 4.0
"""That `lora_alpha` says."""
RANK = 4
"""Of adapters that are made here: its root is whole."""
NOISY = 0.5
"""Nats: where equal weights answer so far apart, nothing can be told."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a report. `apart` is what was measured, in nats, and `bound` what it was held against."""

    name: str
    status: Status
    detail: str
    apart: float | None = None
    bound: float | None = None


class Examination:
    """The checks of one session, in their order. What was measured in one is used by those that follow."""

    def __init__(self, session: Session, as_model: bool) -> None:
        self._session, self._as_model = session, as_model
        self.floor = 0.0
        self._is_apart_by_model = False

    @property
    def _near(self) -> float:
        """Answers that lie no further apart are alike."""
        return max(LOOSE * self.floor, FLOOR)

    def checks(self, folders: Sequence[Path]) -> Iterator[Check]:
        """One by one. Raises EvoalignError."""
        session = self._session
        session.drop_refused()
        self._base = session.ask(None)
        if not any(answer.tokens for answer in self._base):
            raise LostError(f"{session.client.url} answers every prompt with nothing; give others by --prompt")
        self._widen(session.noise(None, self._base))
        found = self._sources(folders)
        for source in found:
            label = f" of {source.name}" if len(found) > 1 else ""
            for check in self._of(source):
                yield replace(check, name=check.name + label)
        if not (self._as_model and self._is_apart_by_model):
            yield self._unknown()

    def _sources(self, folders: Sequence[Path]) -> list[Source]:
        """Those of the folders; of noise the highest rank up to `RANK` that the server takes."""
        about = self._session.server
        ranks = [rank for rank in (RANK, 1) if about.rank is None or rank <= about.rank]
        found: list[Source] = []
        for rank in ranks:
            found = sources(folders, about.model, rank, about.modules)
            try:
                with self._session.loaded(found[0].plain(found[0].strength_of(GAINS[0]))):
                    break
            except RefusedError as error:
                if folders or rank == ranks[-1]:
                    seen = "" if self._session.kind == "sglang" else "; does it see this folder? else give --folder"
                    raise RefusedError(f"{error}{seen}", error.status) from error
        return found

    def _widen(self, noise: float) -> None:
        """Raises LostError where equal weights answer too far apart for any verdict."""
        self.floor = max(self.floor, noise)
        if not self._near <= LOOSE * NOISY:
            raise LostError(
                f"{self._session.client.url} answers the same prompt {noise:.2g} nats apart with the same weights; "
                "nothing can be told of adapters: does it answer greedily, with log-probabilities?"
            )

    # --- of one adapter ----------------------------------------------------------------------------------------------

    def _of(self, source: Source) -> Iterator[Check]:
        applied, strength, said = self._applied(source)
        yield applied
        if applied.status == "FAULT":
            yield Check("all else", "not checked", "no adapter has an effect by which it could be seen")
            return
        opposite_adapter = source.plain(strength, sign=-1)
        adapter = source.plain(strength)
        yield from self._by_model(adapter, said)
        if self._as_model and self._is_apart_by_model:
            return
        opposite = self._session.answers(opposite_adapter)
        sign = self._differs("sign", opposite, said, "B and -B", "one adapter is served for all, or signs are lost")
        yield sign
        scaling = self._agrees(
            "lora_alpha",
            source.plain(strength, scale=SCALE),
            said,
            lambda: self._session.answers(source.plain(strength / SCALE)),
            "a scale in lora_alpha and the same in B",
            "lora_alpha is ignored: multiply lora_alpha / r into B, and set lora_alpha to r",
        )
        yield scaling
        rslora = self._rslora(source, strength, said, scaling)
        yield rslora
        yield from self._given(source, strength, said, rslora)
        yield from self._modules(source, strength)
        yield from self._together(adapter, opposite_adapter, said, opposite)
        yield from self._reloaded(adapter, opposite_adapter, said, opposite, sign)

    def _applied(self, source: Source) -> tuple[Check, float, Answers]:
        """Twice as strong until it moves the answers enough to tell other things by; that strength, and its answers.

        Raises LostError where it moves them, and never enough for a floor such as this.
        """
        gain, strength, effect, tried = GAINS[0] / 2, 0.0, 0.0, list[Answers]()
        while gain < GAINS[1]:
            gain *= 2
            strength = source.strength_of(gain)
            with self._session.loaded(source.plain(strength)) as name:
                tried.append(self._session.ask(name))
                effect = apart(tried[-1], self._base)
                if effect >= STRONG * self._near:
                    self._widen(self._session.noise(name, tried[-1]))
            if effect >= STRONG * self._near:
                detail = f"an adapter answers {effect:.2g} nats from the base model"
                return Check("applied", "ok", detail, effect, STRONG * self._near), strength, tried[-1]
        if apart(tried[0], tried[-1]) > self._near:
            raise LostError(
                f"adapters move the answers of {self._session.client.url} by {effect:.2g} nats at most, where equal "
                f"weights lie {self.floor:.2g} apart: too little to tell; give other prompts by --prompt"
            )
        detail = (
            f"an adapter {GAINS[1] / GAINS[0]:.2g} times as strong as another answers as that one does, {effect:.2g} "
            "nats from the base model: it is ignored, or all are answered as the first"
        )
        return Check("applied", "FAULT", detail, effect, STRONG * self._near), strength, tried[-1]

    def _by_model(self, adapter: PeftAdapter, said: Answers) -> Iterator[Check]:
        """Of a server that wants an adapter's name elsewhere: what it makes of the name as the model's."""
        session = self._session
        if session.asker.dialect.naming("a", "b") == {"model": "a"} or session.asker.as_model:
            return
        if session.asker.api == "generate":
            if self._as_model:
                raise ConfigError("--as-model: --api generate has no model's name; use completions or chat")
            return
        name_check = "name as model"
        by_model = replace(session.asker, as_model=True)
        status: Status = "FAULT" if self._as_model else "warning"
        try:
            with session.loaded(adapter) as name:
                found = session.ask(name, by_model)
        except RefusedError as error:
            self._is_apart_by_model = True
            yield Check(name_check, "FAULT" if self._as_model else "ok", f"is refused: {error}")
            return
        if (distance := apart(found, said)) <= self._near:
            yield Check(name_check, "ok", "an adapter's name sent as `model` is answered by it", distance, self._near)
        else:
            self._is_apart_by_model = True
            whose = "the base model" if apart(found, self._base) <= self._near else "something else"
            detail = f"an adapter's name sent as `model` is answered by {whose}: send it as `lora_path`"
            yield Check(name_check, status, detail, distance, self._near)
        if self._as_model and not self._is_apart_by_model:
            session.asker = by_model

    def _rslora(self, source: Source, strength: float, said: Answers, scaling: Check) -> Check:
        """Ignored by some servers in silence; a fault of an adapter that uses it."""
        if source.rank == 1:
            return Check("rslora", "not checked", "of rank 1 it is the same as without")
        if scaling.status != "ok":
            return Check("rslora", "not checked", "lora_alpha comes first")
        found = self._agrees(
            "rslora",
            source.plain(strength, rslora=True),
            said,
            lambda: self._session.answers(source.plain(strength / math.sqrt(source.rank))),
            "use_rslora and the same scale in B",
            "use_rslora is ignored: export with use_rslora false and lora_alpha times sqrt(r)",
        )
        return replace(found, status="warning") if found.status == "FAULT" and not source.uses_rslora else found

    def _given(self, source: Source, strength: float, said: Answers, rslora: Check) -> Iterator[Check]:
        """By the adapter's own adapter_config.json, patterns and all."""
        if source.given is None:
            return
        if source.uses_rslora and rslora.status == "FAULT":
            yield Check("as given", "not checked", "rslora, which it uses, is ignored")
            return
        yield self._agrees(
            "as given",
            source.as_given(strength),
            said,
            lambda: self._base,
            "its own adapter_config.json and the same scale in B",
            "something that its adapter_config.json says is not followed, such as alpha_pattern or rank_pattern",
        )

    def _modules(self, source: Source, strength: float) -> Iterator[Check]:
        """Each projection alone, all others zero, stronger until it shows."""
        if len(source.projections) == 1:
            return
        most = source.strength_of(GAINS[1])
        for module in source.projections:
            here, effect = strength, 0.0
            while effect <= 2 * self._near and here <= most:
                effect = apart(self._session.answers(source.plain(here, only=module)), self._base)
                here *= 4
            if effect > 2 * self._near:
                yield Check(f"module {module}", "ok", f"alone it moves answers by {effect:.2g} nats", effect)
            else:
                detail = f"alone, {here / 4 / strength:.2g} times as strong, it moves answers by {effect:.2g} nats"
                yield Check(f"module {module}", "FAULT", f"{detail}: it is dropped", effect, 2 * self._near)

    def _together(
        self, adapter: PeftAdapter, opposite: PeftAdapter, said: Answers, said_opposite: Answers
    ) -> Iterator[Check]:
        """Two adapters in the same batches, and one with the base model, each as alone."""
        session = self._session
        with session.loaded(adapter) as one, session.loaded(opposite) as other:
            mixed, beside = session.at_once([one, other]), session.at_once([one, None])
        bound = max(self._near, apart(said, said_opposite) / (2 * SHARE))
        distance = max(apart(a, b) for a, b in zip(mixed, (said, said_opposite), strict=True))
        yield self._is_as_alone("at once", "two adapters in one batch", distance, bound)
        bound = max(self._near, apart(said, self._base) / (2 * SHARE))
        yield self._is_as_alone(
            "base beside", "the base model in a batch with an adapter", apart(beside[1], self._base), bound
        )

    def _is_as_alone(self, name: str, what: str, distance: float, bound: float) -> Check:
        if distance <= bound:
            return Check(name, "ok", f"{what}: as alone", distance, bound)
        return Check(name, "FAULT", f"{what}: {distance:.2g} nats from alone", distance, bound)

    def _reloaded(
        self, adapter: PeftAdapter, opposite: PeftAdapter, said: Answers, said_opposite: Answers, sign: Check
    ) -> Iterator[Check]:
        """A name that is used again, from a new folder and from the same, answers by its new weights."""
        if sign.status != "ok":
            yield Check("reload", "not checked", "B and -B answer alike")
            return
        session = self._session
        places: list[tuple[str, Status, str | None]] = [("reload", "FAULT", None)]
        if session.by_files:
            places.append(("same folder", "warning", session.name()))
        for check, status, place in places:
            name = session.name()
            try:
                with session.loaded(adapter, name, place):
                    session.ask(name)
                with session.loaded(opposite, name, place):
                    found = session.ask(name)
            except RefusedError as error:
                yield Check(check, "not checked", f"the server refuses a name that it had before: {error}")
                continue
            distance = apart(found, said_opposite)
            where = "loaded again" if place is None else "loaded again from the same folder"
            if distance <= self._near:
                yield Check(check, "ok", f"a name {where} answers by its new weights", distance, self._near)
                continue
            old = "its old weights" if apart(found, said) <= self._near else "what is left of its old weights"
            detail = f"a name {where} answers by {old}: give each version a name and a folder of its own"
            yield Check(check, status, detail, distance, self._near)

    def _unknown(self) -> Check:
        """A name that was never loaded has to be refused. Raises LostError where the server does not outlive it."""
        session = self._session
        name = session.name()
        try:
            session.client.call(session.asker.answer(session.prompts[0], name))
        except RefusedError:
            return Check("unknown name", "ok", "a name that was never loaded is refused")
        except LostError as error:
            with contextlib.suppress(LostError):
                if session.client.call(session.dialect.is_ready(session.client)):
                    detail = f"to a name that was never loaded the server gives an error, and is well after it: {error}"
                    return Check("unknown name", "ok", detail)
            raise
        return Check(
            "unknown name", "FAULT", "a name that was never loaded is answered: a misspelt adapter is the base model"
        )

    # --- of pairs ----------------------------------------------------------------------------------------------------

    def _differs(self, name: str, one: Answers, other: Answers, what: str, why: str) -> Check:
        distance = apart(one, other)
        if distance > self._near:
            return Check(name, "ok", f"{what} answer {distance:.2g} nats apart", distance, self._near)
        return Check(name, "FAULT", f"{what} answer alike: {why}", distance, self._near)

    def _agrees(
        self, name: str, tested: PeftAdapter, right: Answers, wrong: Callable[[], Answers], what: str, why: str
    ) -> Check:
        """`wrong` is how a server answers that has the fault: it says how much would be seen of it."""
        try:
            found = self._session.answers(tested)
        except RefusedError as error:
            return Check(name, "not checked", f"the server refuses it: {error}")
        distance, gap = apart(found, right), apart(wrong(), right)
        bound = max(self._near, gap / SHARE)
        if distance > bound:
            return Check(name, "FAULT", f"{what} answer {distance:.2g} nats apart: {why}", distance, bound)
        if gap < 2 * self._near:
            return Check(name, "not checked", f"the fault would move answers by {gap:.2g} nats alone", distance, gap)
        return Check(name, "ok", f"{what} answer alike", distance, bound)
