# SPDX-License-Identifier: Apache-2.0
"""Processes of `evoalign score serve`."""

import asyncio
import os
import signal
import sys
import time

import forked
import httpx

SECONDS = 300.0
"""That a service may take to come or go; none of the tests is about how long that is."""


class Served:
    """A service on the loopback address that is ready; `url` is where. Use it as a context, or `stop` it."""

    def __init__(self, folder, *words, port=0, environment=None):
        self._log = folder / f"service_{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "evoalign.cli", "score", "serve", "--port", str(port), "--device", "cpu"]
        with self._log.open("wb") as log:
            self.process = forked.Popen([*command, *words], stdout=log, env={**os.environ, **(environment or {})})
        until(lambda: " is ready\n" in self.said or self.process.poll() is not None, self.said)
        assert self.process.poll() is None, self.said
        self.url = self.said.split(" is ready")[0].split()[-1]

    @property
    def said(self):
        """All that it wrote."""
        return self._log.read_text()

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def stop(self, number=signal.SIGTERM):
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop(signal.SIGKILL)


def until(is_so, what):
    """Wait for it."""
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def count(url, name, headers=None):
    """One of a service's metrics."""
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=SECONDS).text
    return next(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"evoalign_scorer_{name} ")
    )


def ask_one_by_one(url, prompts, responses):
    """Return responses to requests of one pair each, 64 at once."""

    async def asked():
        room = asyncio.Semaphore(64)
        async with httpx.AsyncClient(timeout=SECONDS) as http:

            async def one(prompt, response):
                async with room:
                    body = {"items": [{"prompt": prompt, "response": response}]}
                    answer = await http.post(f"{url}/score", json=body)
                return answer.raise_for_status().json()

            return await asyncio.gather(*map(one, prompts, responses))

    return asyncio.run(asked())
