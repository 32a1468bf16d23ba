# SPDX-License-Identifier: Apache-2.0
"""`evoalign gateway` as a process: what it prints, and that a signal ends it and all that it started."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import forked
import httpx
import pytest
from command_line import Run, caller

pytest.importorskip("uvicorn")

SECONDS = 300.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process, started in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


def sessions() -> list[int]:
    """Return the session of each process that lives."""
    found = list[list[str]]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found.append(file.read_text().rpartition(")")[2].split())
    return [int(fields[3]) for fields in found if fields[0] not in "ZX"]


@pytest.mark.parametrize(("number", "variable"), [(signal.SIGINT, None), (signal.SIGTERM, "GATEWAY_KEY")])
def test_a_server_ends_by_a_signal(tmp_path: Path, number: int, variable: str | None) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-m", "evoalign.cli", "gateway", "tiny", "--port", "0", "-s", "evaluation.max_tokens=4"]
    more = [] if variable is None else ["--token-env", variable]
    with log.open("wb") as out:
        process = forked.Popen([*words, *more], stdout=out, env={**os.environ, "GATEWAY_KEY": "0123456789abcdef"})
    end, lines = time.monotonic() + SECONDS, ""
    while "API_KEY" not in lines or not lines.endswith("\n"):
        assert process.poll() is None and time.monotonic() < end, lines
        time.sleep(0.05)
        lines = log.read_text()
    url, key = (re.search(rf"^export OPENAI_{name}=(.+)$", lines, re.MULTILINE)[1] for name in ("BASE_URL", "API_KEY"))
    assert (key == "$GATEWAY_KEY") is (variable is not None) and "0123456789abcdef" not in lines
    head = {"Authorization": f"Bearer {key if variable is None else '0123456789abcdef'}"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    found = httpx.post(f"{url}/chat/completions", json=body, headers=head, timeout=SECONDS).raise_for_status().json()
    assert 0 < found["usage"]["completion_tokens"] <= 4
    process.send_signal(number)
    assert process.wait(SECONDS) == 0 and log.read_text().endswith("ended\n")
    assert not sessions().count(process.pid)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tiny", "--member", "0"], "--generation"),
        (["tiny", "--generation", "1"], "is not a run directory"),
        (["tiny", "--host", "0.0.0.0"], "--token-env"),
        (["tiny", "--token-env", "GATEWAY_KEY"], "GATEWAY_KEY"),
        (["tiny", "--certfile", "cert.pem"], "keyfile"),
    ],
)
def test_what_cannot_be_served_is_one_line(run: Run, words: list[str], named: str) -> None:
    done = run("gateway", *words, *(["--port", "0"]))
    assert done.code == 2 and not done.out and done.err.count("\n") == 1 and named in done.err
