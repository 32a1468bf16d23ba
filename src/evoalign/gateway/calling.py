# SPDX-License-Identifier: Apache-2.0
"""Process that runs one episode by a Python function, and prints its score. Imports little: each episode has one."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path

from evoalign.plugins import load_object
from evoalign.transcripts import checked_scores


def main() -> None:
    """Call `function(base_url, api_key, example)`, plain or async, with the row as a dict."""
    path, base_url, row = sys.argv[1:]
    key = os.environ["OPENAI_API_KEY"]
    sys.path.insert(0, str(Path.cwd()))
    found = load_object(path, "task.command")(base_url, key, json.loads(Path(row).read_text(encoding="utf-8")))
    print(f"\n{json.dumps(checked_scores(asyncio.run(found) if inspect.iscoroutine(found) else found))}")
