# SPDX-License-Identifier: Apache-2.0
"""The finished episodes of the present generation, so that a run that is killed plays only the others again."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from evoalign.types import MEAN, Member, Plan, Request, Rollout


class Kept:
    """Episodes by member and request, in a file of JSON lines: first the plan, then an episode each.

    The file of another plan, such as the generation before, is replaced. Episodes of the mean are not kept.
    """

    def __init__(self, path: Path | None, command: str, plan: Plan) -> None:
        self._path = None if plan.members == (MEAN,) else path
        self._head = {"command": command, "generation": plan.generation, "sigma": plan.sigma}
        self._found = dict[str, dict[str, Any]]()
        self._keys = dict[tuple[int, int], str]()
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        if self._path is None:
            return self
        lines = list[dict[str, Any]]()
        with suppress(OSError, ValueError):  # there is none, or a kill cut off the last line
            for line in self._path.read_text(encoding="utf-8").splitlines():
                lines.append(json.loads(line))
        is_same = bool(lines) and lines[0] == self._head
        self._found = {line["key"]: line for line in lines[1:]} if is_same else {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.with_suffix(".new")
        whole.write_text("".join(f"{json.dumps(line)}\n" for line in (self._head, *self._found.values())), "utf-8")
        whole.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.close()

    def find(self, member: Member, request: Request) -> Rollout | None:
        """Return the finished episode of a member and request, if there is one."""
        assert request.episode is not None
        row = json.dumps(dict(request.episode.example), sort_keys=True, default=str)
        key = json.dumps([asdict(member), request.index, request.seed, asdict(request.sampling), row])
        self._keys[member.index, request.index] = key
        if (line := self._found.get(key)) is None:
            return None
        later = tuple((read, made) for read, made in line["later"])
        return Rollout(member, request.index, tuple(line["token_ids"]), line["text"], line["reason"], later=later)

    def add(self, rollout: Rollout) -> None:
        """Keep a finished episode."""
        if self._file is not None:
            line = {
                "key": self._keys[rollout.member.index, rollout.request],
                "text": rollout.text,
                "reason": rollout.finish_reason,
                "later": rollout.later,
                "token_ids": rollout.token_ids,
            }
            self._file.write(f"{json.dumps(line)}\n")
            self._file.flush()
