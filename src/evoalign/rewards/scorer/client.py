# SPDX-License-Identifier: Apache-2.0
"""A scorer behind an address, as `evoalign score serve` makes one.

What fails on the way is sent again until `scorer.deadline`; then the run stops. Nothing of it is ever a score.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, cast

from evoalign.config.reading import parse
from evoalign.config.scorer import ScorerConfig
from evoalign.errors import ConfigError, DataError, RewardError, ScorerAwayError, cut, plain
from evoalign.http import HttpClient, LoopThread, ReplyError, RequestError, is_here, parts_of
from evoalign.rewards.scorer.wire import DIGEST

Pair: TypeAlias = tuple[str, str]
COLUMNS = (("reward",), ("reward", "cost"))
CHUNK = 32
"""Pairs in one request, at most."""
ROOM = 256
"""Bytes of a body beside its pairs."""
BEGINNING = 30.0
"""Seconds that are waited for a service that should run already."""
BACKOFF, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before a request is sent again, which double, and what they come to at most."""
QUIET, QUIET_BUSY = 2.0, 10.0
"""Seconds without scores before an outage is told, and where the queue is full."""
MOST_BYTES = 1 << 26
WORDS = 300
"""Of what a service says, in a message."""
logger = logging.getLogger("evoalign.scorer")
MEND, MEND_FIRST = "start it again, with the same models", "start the service"


class Service:
    """`scorer.name: service`. Its models are those that it had when this was made."""

    def __init__(self, config: ScorerConfig) -> None:
        """Raises ConfigError, RewardError where no service answers."""
        self._url, self._config = _checked(str(config.url)), config
        self._closed, self._heard = threading.Event(), time.monotonic()
        self._http = HttpClient(self._url, _token(config.token_env, self._url), MOST_BYTES)
        self._loop = LoopThread("evoalign-scorer")
        self._digest: str | None = None
        self._telling, self._is_away = threading.Lock(), False
        try:
            about = self._asked("GET", "/health", None, min(BEGINNING, config.deadline), self._closed)
            self.columns, self.digest, self._items, self._bytes = _known(about, self._url)
        except BaseException:
            self._loop.close(self._http)
            raise
        self._digest = self.digest
        self._threads = ThreadPoolExecutor(config.concurrency, "evoalign-scores")

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Mapping[str, list[float]]:
        """One finite number of each column for each pair. Raises RewardError."""
        if len(prompts) != len(responses):
            raise RewardError(f"{len(prompts)} prompts and {len(responses)} responses: a score takes one of each")
        stop, self._heard = threading.Event(), time.monotonic()
        chunks = list(_chunks(list(zip(prompts, responses, strict=True)), min(self._items, CHUNK), self._bytes))
        waiting = [self._threads.submit(self._scores, chunk, stop) for chunk in chunks]
        found: dict[str, list[float]] = {column: [] for column in self.columns}
        try:
            for future in waiting:
                for column, scores in future.result().items():
                    found[column] += scores
        except BaseException:
            stop.set()
            for future in waiting:
                future.cancel()
            raise
        return found

    def _scores(self, chunk: Sequence[Pair], stop: threading.Event) -> Mapping[str, list[float]]:
        body = _encoded(chunk)
        if len(body) > self._bytes:
            raise RewardError(
                f"a prompt and its response take {len(body)} bytes, and the scorer at {self._url} takes {self._bytes}; "
                "start it with a larger --max-body"
            )
        answer = self._asked("POST", "/score", body, self._config.deadline, stop)
        return _checked_scores(answer, self.columns, len(chunk), self._url)

    def _asked(self, method: str, path: str, body: bytes | None, deadline: float, stop: threading.Event) -> Any:
        """The JSON of an answer. Raises RewardError when nothing has come for `deadline` seconds, or at once where
        asking again does not help."""
        pause = BACKOFF
        while True:
            begun = time.monotonic()
            try:
                found = self._once(method, path, body, min(self._config.timeout, deadline))
                self._tell_back()
                return found
            except _AgainError as error:
                left = self._heard + deadline - time.monotonic()
                if left <= 0:
                    mend = MEND_FIRST if self._digest is None else MEND
                    raise ScorerAwayError(
                        f"the scorer at {self._url} has given no scores for {deadline:g} s ({error}); {mend}"
                    ) from error
                self._tell_away(error, begun, deadline)
                wait = min(error.seconds or pause * random.uniform(0.75, 1.25), left)  # a last try when it has passed
                pause = min(2 * pause, LONGEST_PAUSE)
            if stop.wait(wait) or self._closed.is_set():
                raise RewardError(f"another request to the scorer at {self._url} has failed")

    def _tell_away(self, error: _AgainError, begun: float, deadline: float) -> None:
        """Once for all requests that meet the same outage, which may be waited through for long.

        It is none where others were answered after the one that failed had `begun`, or a moment ago.
        """
        with self._telling:
            silent = time.monotonic() - self._heard
            if self._is_away or self._heard > begun or silent < (QUIET_BUSY if error.is_busy else QUIET):
                return
            self._is_away = True
            left = max(0.0, deadline - silent)
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
            logger.warning(
                "the scorer at %s gives no scores (%s): it is asked again for %d s, until %s; if it has given none "
                "by then, this command ends, and says how to go on",
                self._url, error, max(1, math.ceil(left)), until,
            )  # fmt: skip

    def _tell_back(self) -> None:
        with self._telling:
            self._heard = time.monotonic()
            if self._is_away:
                logger.warning("the scorer at %s answers again", self._url)
            self._is_away = False

    def _once(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        """Raises _AgainError, RewardError."""
        try:
            reply = self._loop.call(self._http.send(method, path, body, seconds=seconds))
        except TimeoutError as error:
            raise _AgainError(f"no answer within {seconds:g} s") from error
        except RequestError as error:
            raise _AgainError(str(error)) from error
        except ReplyError as error:
            raise RewardError(str(error)) from error
        status = reply.status
        if status == 429:
            raise _AgainError("its queue is full", _seconds(reply.headers.get("Retry-After")), is_busy=True)
        try:
            tree = parse(reply.body, f"the answer of {self._url}{path}", mend="see what answers there")
        except DataError as error:
            if status >= 500:  # a proxy's page
                raise _AgainError(f"status {status}") from None
            raise RewardError(f"scorer.url: status {status}, and {error}") from None
        if status >= 500 and not (isinstance(tree, dict) and cast("Mapping[str, Any]", tree).get("again") is False):
            raise _AgainError(f"status {status}: {_words(tree)}")
        if status != 200:
            raise RewardError(
                f"the scorer at {self._url}{path} refuses, with status {status}: {_words(tree)}{_mend(status)}"
            )
        self._check_digest(reply.headers.get(DIGEST), path)
        return tree

    def _check_digest(self, digest: str | None, path: str) -> None:
        if path == "/score" and digest != self._digest:
            raise RewardError(
                f"the scorer at {self._url} has other models, or another template, than when the run began (digest "
                f"{cut(plain(str(digest)), 16)}, and it was {str(self._digest)[:12]}...); start the one of before "
                "again, or a run of its own with the new one"
            )

    def close(self) -> None:
        """End its threads and connections."""
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)
        self._loop.close(self._http)


class _AgainError(Exception):
    """Of a request that may be sent again, after `seconds` where that is said. `is_busy`: the service is well."""

    def __init__(self, words: str, seconds: float | None = None, *, is_busy: bool = False) -> None:
        super().__init__(words)
        self.seconds, self.is_busy = seconds, is_busy


def _checked(url: str) -> str:
    if "@" in url or parts_of(url) is None:
        raise ConfigError(f"scorer.url {url!r} is no address of a service; give one such as http://127.0.0.1:8011")
    return url.rstrip("/")


def _token(variable: str | None, url: str) -> str | None:
    """Return the token. Raises ConfigError, which does not repeat it."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token or not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"scorer.token_env {variable}: the environment has no token in a variable of that name; it takes the name "
            "of the variable, never the token itself"
        )
    if not url.startswith("https:") and not is_here(url):
        raise ConfigError(
            f"scorer.url {url}: a token is not sent over plain http to another machine; give an https address, or "
            "bring the port here through a tunnel"
        )
    return token


def _known(about: Any, url: str) -> tuple[tuple[str, ...], str, int, int]:
    """Columns, digest and limits of what answers. Raises RewardError."""
    try:
        columns, digest = tuple(about["columns"]), about["digest"]
        items, size = int(about["limits"]["items"]), int(about["limits"]["body"])
    except (KeyError, TypeError, ValueError):
        columns, digest, items, size = (), None, 0, 0
    if columns not in COLUMNS or not isinstance(digest, str) or items < 1 or size < 1:
        raise RewardError(f"scorer.url {url}: what answers there is no scorer; start one with `evoalign score serve`")
    return columns, digest, items, size


def _chunks(pairs: Sequence[Pair], most: int, size: int) -> Iterator[list[Pair]]:
    """Pairs in requests, of `most` pairs and `size` bytes at most; a pair that is longer by itself."""
    chunk, taken = list[Pair](), ROOM
    for pair in pairs:
        length = len(_encoded([pair]))
        if chunk and (len(chunk) == most or taken + length > size):
            yield chunk
            chunk, taken = [], ROOM
        chunk.append(pair)
        taken += length
    if chunk:
        yield chunk


def _encoded(pairs: Sequence[Pair]) -> bytes:
    return json.dumps({"prompts": [p for p, _ in pairs], "responses": [r for _, r in pairs]}).encode()


def _checked_scores(tree: Any, columns: Sequence[str], count: int, url: str) -> dict[str, list[float]]:
    """A finite number of each column for each pair. Raises RewardError."""
    if not isinstance(tree, dict) or {*cast("dict[str, Any]", tree)} != {*columns}:
        raise RewardError(
            f"the scorer at {url} answers other columns than {', '.join(columns)}, which it had at the start"
        )
    found = cast("dict[str, Any]", tree)
    for column, scores in found.items():
        numbers = cast("list[Any]", scores) if isinstance(scores, list) else []
        if len(numbers) != count:
            raise RewardError(f"the scorer at {url} answers {len(numbers)} scores of {column} for {count} pairs")
        if any(type(n) not in (int, float) for n in numbers):  # JSON of others than finite ones was refused
            raise RewardError(f"the scorer at {url} answers a {column} that is no finite number")
    return {column: [float(n) for n in found[column]] for column in columns}


def _seconds(said: str | None) -> float | None:
    return float(said) if said is not None and said.isascii() and said.isdecimal() and 0 < int(said) <= 3600 else None


def _words(tree: Any) -> str:
    detail = cast("Mapping[str, Any]", tree).get("detail") if isinstance(tree, dict) else None
    return plain(cut(detail if isinstance(detail, str) else json.dumps(detail), WORDS))


def _mend(status: int) -> str:
    return "; set scorer.token_env to the name of the variable that holds its token" if status in (401, 403) else ""
