# SPDX-License-Identifier: Apache-2.0
"""Checks whether a running server applies the LoRA adapters that it loads, without a copy of its model.

Equivalent forms of an adapter (a scale in `lora_alpha` or in B, or by rank-stabilised scaling; a name that is used
again and a new one) have to generate alike. An adapter and the base model, B and -B, and one projection and none have
to differ. The distance between completions of equal weights is measured first, in batches of other composition: no
check goes below it, so that rounding is not reported as a fault.

    evoalign canary http://127.0.0.1:8000
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import Client, LostError, RefusedError
from evoalign.errors import ConfigError, ModelError, cut, plain
from evoalign.preflight.canary_adapters import Source, random_adapter, read_adapter
from evoalign.preflight.canary_session import DIALECTS, Api, Completions, Prompter, Session, distance, identify

Status: TypeAlias = Literal["ok", "FAULT", "warning", "not checked"]
PROMPTS = (
    "The capital of France is",
    "Question: What is 17 plus 26? Answer:",
    "Once upon a time there was a miller who had three sons, and",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "List three colours of the rainbow:",
    "The opposite of hot is",
    "The river begins in the hills above the town, where snow lies until May. It passes two mills, an old bridge and a "
    "row of poplars; below the bridge it is slow and brown, and in dry summers children walk across it. In which "
    "month does the snow melt?",
)
"""The last is longer than a block of a server's prefix cache."""
FLOOR = 2**-5
"""Nats by which rounding may move the mean log-probability of a token, even where less was measured."""
LOOSE = 4
"""Completions within this many times the measured floor count as alike."""
STRONG = 8
"""An adapter is strong enough when it moves completions by this many times the tolerance."""
SHARE = 4
"""Equivalent forms count as different above a quarter of the distance that a fault would cause."""
GAINS = (2**-4, 2**10)
"""Gains of the weakest and the strongest adapter that are tried. The weights of a model have about 1."""
SCALE = 4.0
"""The scale that `lora_alpha` states."""
RANK = 4
"""Rank of random adapters: its square root is an integer."""
NOISY = 0.5
"""Nats between completions of equal weights above which nothing can be concluded."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a report. `apart` is the measured distance in nats, and `bound` what it was compared with."""

    name: str
    status: Status
    detail: str
    apart: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """How a server handles adapters. `floor` is the largest distance between completions of equal weights, in nats."""

    url: str
    server: str
    api: Api
    floor: float
    checks: tuple[Check, ...]
    seconds: float

    @property
    def faults(self) -> tuple[Check, ...]:
        """Checks whose status is FAULT."""
        return tuple(check for check in self.checks if check.status == "FAULT")

    @property
    def code(self) -> int:
        """Exit code of the command: 1 where there is a fault."""
        return 1 if self.faults else 0

    def verdict(self) -> str:
        """Return the report in one line."""
        counts = {s: sum(c.status == s for c in self.checks) for s in ("ok", "warning", "not checked")}
        rest = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        server = plain(cut(self.server, 80))
        if self.faults:
            return f"{server} does not apply adapters as they say: {len(self.faults)} FAULT, {rest}"
        return f"{server} applies these adapters: {rest} (floor {self.floor:.2g} nats, {self.seconds:.0f} s)"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {**asdict(self), "verdict": self.verdict(), "code": self.code}


def examine(
    url: str,
    *,
    adapters: Sequence[str | Path] = (),
    server: str = "auto",
    key: str | None = None,
    ca_file: str | None = None,
    folder: str | Path | None = None,
    base: str | None = None,
    api: Api = "completions",
    as_model: bool = False,
    prompts: Sequence[str] = (),
    tell: Callable[[Check], None] | None = None,
) -> Report:
    """Check the server at `url`: sglang, vllm, or auto to detect it. Calls `tell` with each check as it is done.

    `adapters` are folders of PEFT adapters, whose shapes and numbers are used; without any, noise on the projections of
    the server's model, where its config.json can be read here. `as_model` sends the adapter's name as the model's, as
    some clients do. Adapters are loaded under new names and unloaded, also after an interruption; the last check,
    `unloaded`, is present where the server keeps some. Raises EvoalignError where the server cannot be checked.
    """
    started, folders = time.monotonic(), [Path(a) for a in adapters]
    if server not in ("auto", *DIALECTS):
        raise ConfigError(f"--server {server}: use auto, {' or '.join(DIALECTS)}")
    client = Client(url, key, ca_file=ca_file)
    try:
        kind, listed = client.call(identify(client, server))
        if api == "generate" and kind != "sglang":
            raise ConfigError("--api generate is SGLang's; use completions or chat")
        dialect = DIALECTS[kind][1]()
        info = client.call(dialect.about(client))
        name = base or listed or info.model
        if name is None:
            raise ConfigError(f"{client.url} does not name its model: give --base")
        prompter, place = Prompter(client, dialect, api, name), None if folder is None else Path(folder)
        session = Session(prompter, info, prompts or PROMPTS, place, takes_tensors=kind == "sglang")
        examination, checks = Examination(session, as_model), list[Check]()

        def add(check: Check) -> None:
            checks.append(check)
            if tell is not None:
                tell(check)

        try:
            for check in examination.checks(folders):
                add(check)
        finally:
            if left := session.close():
                add(Check("unloaded", "warning", f"the server may still have {', '.join(left)}: unload what it lists"))
        what = f"{DIALECTS[kind][0]} {info.version}"
        return Report(client.url, what, api, examination.floor, tuple(checks), time.monotonic() - started)
    except RefusedError as error:
        if error.status in (401, 403):
            what = "requires a key: name its variable by" if key is None else "rejects the key given by"
            raise ModelError(f"{client.url} {what} --key-variable") from None
        raise
    finally:
        client.close()


class Examination:
    """The checks of one session, in order. Later checks use what earlier ones measured."""

    def __init__(self, session: Session, as_model: bool) -> None:
        self._session, self._as_model = session, as_model
        self.floor = 0.0
        self._differs_by_model = False

    @property
    def _near(self) -> float:
        """Distance within which completions are alike."""
        return max(LOOSE * self.floor, FLOOR)

    def checks(self, folders: Sequence[Path]) -> Iterator[Check]:
        """Yield the checks as they are done. Raises EvoalignError."""
        session = self._session
        session.drop_refused()
        (self._base,) = session.complete([None])
        if not any(completion.tokens for completion in self._base):
            raise LostError(f"{session.client.url} completes every prompt with nothing; give others by --prompt")
        self._raise_floor(session.noise(None, self._base))
        sources = self._sources(folders)
        for source in sources:
            label = f" of {source.name}" if len(sources) > 1 else ""
            for check in self._of(source):
                yield replace(check, name=check.name + label)
        if not (self._as_model and self._differs_by_model):
            yield self._unknown()

    def _sources(self, folders: Sequence[Path]) -> list[Source]:
        """Return the adapters of the folders, or noise of the highest rank up to `RANK` that the server supports."""
        info = self._session.info
        ranks = [rank for rank in (RANK, 1) if info.rank is None or rank <= info.rank]
        found: list[Source] = []
        for rank in ranks:
            found = [read_adapter(f) for f in folders] or [random_adapter(info.model, rank, info.modules)]
            try:
                with self._session.loaded(found[0].plain(found[0].strength_of(GAINS[0]))):
                    break
            except RefusedError as error:
                if folders or rank == ranks[-1]:
                    advice = "" if self._session.takes_tensors else "; if it does not see this folder, give --folder"
                    raise RefusedError(f"{error}{advice}", error.status) from error
        return found

    def _raise_floor(self, noise: float) -> None:
        """Raise the floor to `noise`. Raises LostError where it is too high for any conclusion."""
        self.floor = max(self.floor, noise)
        if not self._near <= LOOSE * NOISY:
            raise LostError(
                f"completions of the same prompt by the same weights of {self._session.client.url} differ by "
                f"{noise:.2g} nats, so that nothing can be concluded: does it decode greedily, with log-probabilities?"
            )

    # --- of one adapter ----------------------------------------------------------------------------------------------

    def _of(self, source: Source) -> Iterator[Check]:
        session = self._session
        applied, strength, found = self._applied(source)
        yield applied
        if applied.status == "FAULT":
            yield Check("all else", "not checked", "no adapter has an effect by which it could be seen")
            return
        adapter, opposite = source.plain(strength), source.plain(strength, sign=-1)
        yield from self._by_model(adapter, found)
        if self._as_model and self._differs_by_model:
            return
        found_opposite = session.completions_of(opposite)
        apart = distance(found_opposite, found)
        has_sign = apart > self._near
        if has_sign:
            yield Check("sign", "ok", f"B and -B answer {apart:.2g} nats apart", apart, self._near)
        else:
            detail = "B and -B answer alike: one adapter is served for all, or signs are lost"
            yield Check("sign", "FAULT", detail, apart, self._near)
        scaling = self._agrees(
            "lora_alpha",
            source.plain(strength, scale=SCALE),
            found,
            lambda: session.completions_of(source.plain(strength / SCALE)),
            "a scale in lora_alpha and the same in B",
            "lora_alpha is ignored: multiply lora_alpha / r into B, and set lora_alpha to r",
        )
        yield scaling
        yield from self._other_scalings(source, strength, found, scaling)
        yield from self._modules(source, strength)
        with session.loaded(adapter) as name, session.loaded(opposite) as second:
            mixed, with_base = session.complete([name, second]), session.complete([name, None])
        for check, what, pairs, other in (
            ("at once", "two adapters in one batch", zip(mixed, (found, found_opposite), strict=True), found_opposite),
            ("base beside", "the base model in a batch with an adapter", [(with_base[1], self._base)], self._base),
        ):
            apart = max(distance(one, alone) for one, alone in pairs)
            bound = max(self._near, distance(found, other) / (2 * SHARE))
            how = "as alone" if apart <= bound else f"{apart:.2g} nats from alone"
            yield Check(check, "ok" if apart <= bound else "FAULT", f"{what}: {how}", apart, bound)
        if has_sign:
            yield from self._reloaded(adapter, opposite, found, found_opposite)
        else:
            yield Check("reload", "not checked", "B and -B answer alike")

    def _applied(self, source: Source) -> tuple[Check, float, Completions]:
        """Double the strength until the effect suffices for the other checks; return that strength and completions.

        Raises LostError where adapters have an effect, and never enough for the floor.
        """
        gain, strength, effect, tried = GAINS[0] / 2, 0.0, 0.0, list[Completions]()
        while gain < GAINS[1]:
            gain *= 2
            strength = source.strength_of(gain)
            with self._session.loaded(source.plain(strength)) as name:
                tried += self._session.complete([name])
                effect = distance(tried[-1], self._base)
                if effect >= STRONG * self._near:
                    self._raise_floor(self._session.noise(name, tried[-1]))
            if effect >= STRONG * self._near:
                detail = f"an adapter answers {effect:.2g} nats from the base model"
                return Check("applied", "ok", detail, effect, STRONG * self._near), strength, tried[-1]
        if distance(tried[0], tried[-1]) > self._near:
            raise LostError(
                f"adapters move the completions of {self._session.client.url} by {effect:.2g} nats at most, and equal "
                f"weights differ by {self.floor:.2g}: too little to conclude; give other prompts by --prompt"
            )
        detail = (
            f"an adapter {GAINS[1] / GAINS[0]:.2g} times as strong as another answers as that one does, {effect:.2g} "
            "nats from the base model: it is ignored, or all are answered as the first"
        )
        return Check("applied", "FAULT", detail, effect, STRONG * self._near), strength, tried[-1]

    def _by_model(self, adapter: PeftAdapter, found: Completions) -> Iterator[Check]:
        """Send an adapter's name as the model's to a server that expects it elsewhere."""
        session, name_check = self._session, "name as model"
        prompter = session.prompter
        if prompter.dialect.naming("a", "b") == {"model": "a"} or prompter.as_model:
            return
        if prompter.api == "generate":
            if self._as_model:
                raise ConfigError("--as-model: --api generate sends no model's name; use completions or chat")
            return
        by_model, status = replace(prompter, as_model=True), "FAULT" if self._as_model else "warning"
        try:
            with session.loaded(adapter) as name:
                (other,) = session.complete([name], by_model)
        except RefusedError as error:
            self._differs_by_model = True
            yield Check(name_check, "FAULT" if self._as_model else "ok", f"is refused: {error}")
            return
        apart = distance(other, found)
        if apart <= self._near:
            yield Check(name_check, "ok", "an adapter's name sent as `model` is answered by it", apart, self._near)
            if self._as_model:
                session.prompter = by_model
            return
        self._differs_by_model = True
        whose = "the base model" if distance(other, self._base) <= self._near else "something else"
        detail = f"an adapter's name sent as `model` is answered by {whose}: send it as `lora_path`"
        yield Check(name_check, status, detail, apart, self._near)

    def _other_scalings(self, source: Source, strength: float, found: Completions, scaling: Check) -> Iterator[Check]:
        """Check rslora, a fault only for adapters that use it, and the adapter's own adapter_config.json."""
        session = self._session
        if source.rank == 1:
            rslora = Check("rslora", "not checked", "at rank 1 it makes no difference")
        elif scaling.status != "ok":
            rslora = Check("rslora", "not checked", "lora_alpha comes first")
        else:
            rslora = self._agrees(
                "rslora",
                source.plain(strength, rslora=True),
                found,
                lambda: session.completions_of(source.plain(strength / math.sqrt(source.rank))),
                "use_rslora and the same scale in B",
                "use_rslora is ignored: export with use_rslora false and lora_alpha times sqrt(r)",
            )
        is_fault = rslora.status == "FAULT"
        yield replace(rslora, status="warning") if is_fault and not source.uses_rslora else rslora
        if source.given is None:
            return
        if source.uses_rslora and is_fault:
            yield Check("as given", "not checked", "rslora, which it uses, is ignored")
            return
        yield self._agrees(
            "as given",
            source.as_given(strength),
            found,
            lambda: self._base,
            "its own adapter_config.json and the same scale in B",
            "a field of its adapter_config.json is ignored, such as alpha_pattern or rank_pattern",
        )

    def _modules(self, source: Source, strength: float) -> Iterator[Check]:
        """Check each projection alone, all others zero, stronger until it has an effect."""
        most = source.strength_of(GAINS[1])
        for module in source.projections if len(source.projections) > 1 else ():
            here, effect = strength, 0.0
            while effect <= 2 * self._near and here <= most:
                effect = distance(self._session.completions_of(source.plain(here, only=module)), self._base)
                here *= 4
            if effect > 2 * self._near:
                yield Check(f"module {module}", "ok", f"alone it moves answers by {effect:.2g} nats", effect)
            else:
                detail = f"alone, {here / 4 / strength:.2g} times as strong, it moves answers by {effect:.2g} nats"
                yield Check(f"module {module}", "FAULT", f"{detail}: it is dropped", effect, 2 * self._near)

    def _reloaded(
        self, adapter: PeftAdapter, opposite: PeftAdapter, found: Completions, found_opposite: Completions
    ) -> Iterator[Check]:
        """Load other weights under a used name: from a new folder, and, only a warning, from the same folder."""
        session = self._session
        places: list[tuple[str, Status, str | None]] = [("reload", "FAULT", None)]
        if session.by_files:
            places.append(("same folder", "warning", session.new_name()))
        for check, status, place in places:
            name = session.new_name()
            try:
                with session.loaded(adapter, name, place):
                    session.complete([name])
                with session.loaded(opposite, name, place):
                    (again,) = session.complete([name])
            except RefusedError as error:
                yield Check(check, "not checked", f"the server refuses a name that it had before: {error}")
                continue
            apart = distance(again, found_opposite)
            where = "loaded again" if place is None else "loaded again from the same folder"
            if apart <= self._near:
                yield Check(check, "ok", f"a name {where} answers by its new weights", apart, self._near)
                continue
            old = "its old weights" if distance(again, found) <= self._near else "what is left of its old weights"
            detail = f"a name {where} answers by {old}: give each version a new name and a new folder"
            yield Check(check, status, detail, apart, self._near)

    def _unknown(self) -> Check:
        """Send a name that was never loaded. Raises LostError where the server is not ready after it."""
        session = self._session
        prompter = session.prompter
        try:
            session.client.call(prompter.complete(session.prompts[0], session.new_name()))
        except RefusedError:
            return Check("unknown name", "ok", "a name that was never loaded is refused")
        except LostError as error:
            with contextlib.suppress(LostError):
                if session.client.call(prompter.dialect.is_ready(session.client)):
                    detail = f"a name that was never loaded gets an error, and the server is ready after it: {error}"
                    return Check("unknown name", "ok", detail)
            raise
        return Check(
            "unknown name", "FAULT", "a name that was never loaded is answered: a misspelt adapter is the base model"
        )

    def _agrees(
        self, name: str, tested: PeftAdapter, right: Completions, wrong: Callable[[], Completions], what: str, why: str
    ) -> Check:
        """Compare an equivalent form. `wrong` returns completions with the fault: its effect is what would be seen."""
        try:
            found = self._session.completions_of(tested)
        except RefusedError as error:
            return Check(name, "not checked", f"the server refuses it: {error}")
        apart, gap = distance(found, right), distance(wrong(), right)
        bound = max(self._near, gap / SHARE)
        if apart > bound:
            return Check(name, "FAULT", f"{what} answer {apart:.2g} nats apart: {why}", apart, bound)
        if gap < 2 * self._near:
            return Check(name, "not checked", f"the fault would move answers by {gap:.2g} nats alone", apart, gap)
        return Check(name, "ok", f"{what} answer alike", apart, bound)
