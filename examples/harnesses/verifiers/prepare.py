# SPDX-License-Identifier: Apache-2.0
"""Install the chat program of verifiers once, and lock its packages: episodes then need no package index."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import SubprocessConfig, SubprocessRuntime

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
runtime = SubprocessRuntime(SubprocessConfig())
asyncio.run(runtime.start())
program = asyncio.run(runtime.prepare_uv_script(CHAT_PROGRAM_SOURCE, activate=False))
asyncio.run(runtime.teardown())
subprocess.run(["uv", "lock", "--script", program[-1], "--quiet"], check=True)
