# SPDX-License-Identifier: Apache-2.0
"""Client of a scorer service, such as `evoalign score serve`.

Failed requests are retried until `scorer.deadline`; then the run stops. A failure is never a score.
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
from evoalign.config.scorer import DIGEST, ScorerConfig
from evoalign.errors import ConfigError, DataError, RewardError, ScorerAwayError, cut, plain
from evoalign.http import HttpClient, LoopThread, ReplyError, RequestError, is_here, parts_of

Pair: TypeAlias = tuple[str, str]
COLUMNS = (("reward",), ("reward", "cost"))
CHUNK = 32
"""Maximum pairs in one request."""
ROOM = 256
"""Bytes of a body without its pairs."""
BEGINNING = 30.0
"""Seconds to wait for the service at the start."""
BACKOFF, LONGEST_PAUSE = 0.25, 10.0
"""Initial and maximum seconds between retries; they double."""
QUIET, QUIET_BUSY = 2.0, 10.0
"""Seconds without scores before a warning; the second value is for a full queue."""
MOST_BYTES = 1 << 26
WORDS = 300
"""Maximum characters of a service's message in an error."""
logger = logging.getLogger("evoalign.scorer")


class Service:
    """Scorer service (`scorer.name: service`). Raises RewardError if its models change."""

    def __init__(self, config: ScorerConfig) -> None:
        """Connect. Raises ConfigError, or RewardError if no service responds."""
        self._url, self._config = str(config.url).rstrip("/"), config
        if "@" in self._url or parts_of(self._url) is None:
            raise ConfigError(
                f"scorer.url {self._url!r} is not the address of a service; use one such as http://127.0.0.1:8011"
            )
        self._closed, self._last_reply = threading.Event(), time.monotonic()
        self._http = HttpClient(self._url, _token(config.token_env, self._url), MOST_BYTES)
        self._loop = LoopThread("evoalign-scorer")
        self._digest: str | None = None
        self._lock, self._is_away = threading.Lock(), False
        try:
            about = self._request("GET", "/health", None, min(BEGINNING, config.deadline), self._closed)
            self.columns, self.digest, self._items, self._bytes = _known(about, self._url)
        except BaseException:
            self._loop.close(self._http)
            raise
        self._digest = self.digest
        self._threads = ThreadPoolExecutor(config.concurrency, "evoalign-scores")

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Mapping[str, list[float]]:
        """Return one finite number per column and pair. Raises RewardError."""
        if len(prompts) != len(responses):
            raise RewardError(f"{len(prompts)} prompts but {len(responses)} responses; pass one of each per pair")
        stop, self._last_reply = threading.Event(), time.monotonic()
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
                f"a prompt and response take {len(body)} bytes, but the scorer at {self._url} accepts {self._bytes}: "
                "start it with a larger --max-body"
            )
        tree = self._request("POST", "/score", body, self._config.deadline, stop)
        if not isinstance(tree, dict) or {*cast("dict[str, Any]", tree)} != {*self.columns}:
            columns = ", ".join(self.columns)
            raise RewardError(
                f"the scorer at {self._url} returns other columns than {columns}, which it had at the start"
            )
        found = cast("dict[str, Any]", tree)
        for column, scores in found.items():
            numbers = cast("list[Any]", scores) if isinstance(scores, list) else []
            if len(numbers) != len(chunk):
                raise RewardError(
                    f"the scorer at {self._url} returns {len(numbers)} scores of {column} for {len(chunk)} pairs"
                )
            if any(type(n) not in (int, float) for n in numbers):  # the parser rejected NaN and infinity
                raise RewardError(f"the scorer at {self._url} returns a {column} that is not a finite number")
        return {column: [float(n) for n in found[column]] for column in self.columns}

    def _request(self, method: str, path: str, body: bytes | None, deadline: float, stop: threading.Event) -> Any:
        """Return the JSON of a response. Raises RewardError after `deadline` seconds without a score, or at once if a
        retry would not help."""
        pause = BACKOFF
        while True:
            begun = time.monotonic()
            try:
                found = self._once(method, path, body, min(self._config.timeout, deadline))
                self._note_success()
                return found
            except _RetryError as error:
                left = self._last_reply + deadline - time.monotonic()
                if left <= 0:
                    fix = "start the service" if self._digest is None else "start it again with the same models"
                    raise ScorerAwayError(
                        f"no scores from the scorer at {self._url} for {deadline:g} s ({error}); {fix}"
                    ) from error
                self._note_failure(error, begun, deadline)
                wait = min(error.seconds or pause * random.uniform(0.75, 1.25), left)  # one more try at the deadline
                pause = min(2 * pause, LONGEST_PAUSE)
            if stop.wait(wait) or self._closed.is_set():
                raise RewardError(f"another request to the scorer at {self._url} has failed")

    def _note_failure(self, error: _RetryError, begun: float, deadline: float) -> None:
        """Log a warning once per outage: if no request succeeded since the failed one had `begun`, or for a while."""
        with self._lock:
            silent = time.monotonic() - self._last_reply
            if self._is_away or self._last_reply > begun or silent < (QUIET_BUSY if error.is_busy else QUIET):
                return
            self._is_away = True
            left = max(0.0, deadline - silent)
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
            logger.warning(
                "no scores from the scorer at %s (%s): retrying for %d s, until %s; without scores by then, this "
                "command ends",
                self._url,
                error,
                max(1, math.ceil(left)),
                until,
            )

    def _note_success(self) -> None:
        with self._lock:
            self._last_reply = time.monotonic()
            if self._is_away:
                logger.warning("the scorer at %s responds again", self._url)
            self._is_away = False

    def _once(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        """Send one request. Raises _RetryError, RewardError."""
        try:
            reply = self._loop.call(self._http.send(method, path, body, seconds=seconds))
        except TimeoutError as error:
            raise _RetryError(f"no response within {seconds:g} s") from error
        except RequestError as error:
            raise _RetryError(str(error)) from error
        except ReplyError as error:
            raise RewardError(str(error)) from error
        status = reply.status
        if status == 429:
            raise _RetryError("its queue is full", _seconds(reply.headers.get("Retry-After")), is_busy=True)
        try:
            tree = parse(reply.body, f"the answer of {self._url}{path}", mend="check what runs at that address")
        except DataError as error:
            if status >= 500:  # a proxy's error page
                raise _RetryError(f"status {status}") from None
            raise RewardError(f"scorer.url: status {status}, and {error}") from None
        if status >= 500 and not (isinstance(tree, dict) and cast("Mapping[str, Any]", tree).get("again") is False):
            raise _RetryError(f"status {status}: {_detail(tree)}")
        if status != 200:
            fix = "; set scorer.token_env to the name of the variable with its token" if status in (401, 403) else ""
            raise RewardError(f"the scorer at {self._url}{path} responds with status {status}: {_detail(tree)}{fix}")
        digest = reply.headers.get(DIGEST)
        if path == "/score" and digest != self._digest:
            raise RewardError(
                f"the scorer at {self._url} changed its models or template since the start of the run (digest "
                f"{cut(plain(str(digest)), 16)} instead of {str(self._digest)[:12]}...); start it with the former "
                "ones, or start a new run"
            )
        return tree

    def close(self) -> None:
        """End threads and connections."""
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)
        self._loop.close(self._http)


class _RetryError(Exception):
    """A failed request to retry, after `seconds` if the service says so. `is_busy`: its queue is full."""

    def __init__(self, words: str, seconds: float | None = None, *, is_busy: bool = False) -> None:
        super().__init__(words)
        self.seconds, self.is_busy = seconds, is_busy


def _token(variable: str | None, url: str) -> str | None:
    """Return the token. Raises ConfigError, which does not repeat it."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token or not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"scorer.token_env {variable}: this environment variable has no token; set token_env to the name of the "
            "variable, never to the token itself"
        )
    if not url.startswith("https:") and not is_here(url):
        raise ConfigError(
            f"scorer.url {url}: a token is not sent over plain http to another machine; use https, or forward the port "
            "through a tunnel"
        )
    return token


def _known(about: Any, url: str) -> tuple[tuple[str, ...], str, int, int]:
    """Return columns, digest and limits of the service. Raises RewardError."""
    try:
        columns, digest = tuple(about["columns"]), about["digest"]
        items, size = int(about["limits"]["items"]), int(about["limits"]["body"])
    except (KeyError, TypeError, ValueError):
        columns, digest, items, size = (), None, 0, 0
    if columns not in COLUMNS or not isinstance(digest, str) or items < 1 or size < 1:
        raise RewardError(f"scorer.url {url}: the server there is not a scorer; start one with `evoalign score serve`")
    return columns, digest, items, size


def _chunks(pairs: Sequence[Pair], most: int, size: int) -> Iterator[list[Pair]]:
    """Yield chunks of at most `most` pairs and `size` bytes; a longer pair forms a single chunk."""
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


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdecimal() and 0 < int(text) <= 3600 else None


def _detail(tree: Any) -> str:
    detail = cast("Mapping[str, Any]", tree).get("detail") if isinstance(tree, dict) else None
    return plain(cut(detail if isinstance(detail, str) else json.dumps(detail), WORDS))
