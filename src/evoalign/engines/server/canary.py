# SPDX-License-Identifier: Apache-2.0
"""Does a server apply the LoRA adapters that it is given? Asked of the server alone, with no copy of its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from evoalign.engines.server.asking import Api, Asker
from evoalign.engines.server.client import Client
from evoalign.engines.server.errors import RefusedError
from evoalign.engines.server.examination import Check, Examination
from evoalign.engines.server.session import SERVES, Kind, Session, base_of, dialect_of, kind_of
from evoalign.errors import ConfigError, ModelError, cut, plain

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


@dataclass(frozen=True, slots=True)
class Report:
    """What a server does with adapters. `floor`: how far apart, in nats, equal weights answered at most."""

    url: str
    server: str
    api: Api
    floor: float
    checks: tuple[Check, ...]
    seconds: float

    @property
    def faults(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "FAULT")

    @property
    def code(self) -> int:
        """Exit code of the command: 1 where there is a fault."""
        return 1 if self.faults else 0

    def verdict(self) -> str:
        """In a line."""
        counts = {s: sum(c.status == s for c in self.checks) for s in ("ok", "warning", "not checked")}
        rest = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        server = plain(cut(self.server, 80))
        if self.faults:
            return f"{server} does not apply adapters as they say: {len(self.faults)} FAULT, {rest}"
        return f"{server} applies these adapters: {rest} (floor {self.floor:.2g} nats, {self.seconds:.0f} s)"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """Ask the server at `url`, which is sglang, vllm or, where it is to be asked, auto. `tell` hears of each check as
    it is done. Raises EvoalignError where it cannot be asked.

    `adapters` are folders of PEFT adapters, whose shapes and numbers are used; without any, noise on the projections
    of the server's own model, where its config.json can be read here. `as_model`: the adapter's name is sent as the
    model's, as some clients do. Adapters are loaded under new names and unloaded, also where this is interrupted; the
    last check, `unloaded`, is there where the server does not let go of some.
    """
    started, folders = time.monotonic(), [Path(a) for a in adapters]
    place = None if folder is None else Path(folder)
    with _session(url, server, key, ca_file, place, base, api, prompts) as session:
        checks: list[Check] = []

        def add(check: Check) -> None:
            checks.append(check)
            if tell is not None:
                tell(check)

        examination = Examination(session, as_model)
        try:
            for check in examination.checks(folders):
                add(check)
        finally:
            if left := session.close():
                add(Check("unloaded", "warning", f"the server may still have {', '.join(left)}: unload what it lists"))
        return Report(
            session.client.url, session.what, api, examination.floor, tuple(checks), time.monotonic() - started
        )


@contextmanager
def _session(
    url: str,
    server: str,
    key: str | None,
    ca_file: str | None,
    folder: Path | None,
    base: str | None,
    api: Api,
    prompts: Sequence[str],
) -> Generator[Session]:
    if server not in ("auto", *SERVES):
        raise ConfigError(f"--server {server}: use auto, {' or '.join(SERVES)}")
    client = Client(url, key, ca_file=ca_file)
    try:
        kind = client.call(kind_of(client)) if server == "auto" else cast(Kind, server)
        if api == "generate" and kind != "sglang":
            raise ConfigError("--api generate is of SGLang alone; use completions or chat")
        dialect = dialect_of(kind)
        about = client.call(dialect.about(client))
        name = base or client.call(base_of(client)) or about.model
        if name is None:
            raise ConfigError(f"{client.url} does not name its model: give --base")
        yield Session(client, kind, Asker(client, dialect, api, name), about, prompts or PROMPTS, folder)
    except RefusedError as error:
        if error.status in (401, 403):
            what = "wants a key: name the variable that holds it by" if key is None else "refuses the key named by"
            raise ModelError(f"{client.url} {what} --key-variable") from None
        raise
    finally:
        client.close()
