# SPDX-License-Identifier: Apache-2.0
"""JSONL files, and training runs whose output is kept."""

import io
import json

from rich.console import Console

import evoalign


def jsonl(path, rows):
    """Write the rows and return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(path):
    """Write four prompts."""
    return jsonl(path, [{"prompt": f"Tell me about {word}:"} for word in ("sea", "sky", "sun", "rain")])


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(tree, method=evoalign.train, **arguments):
    """Train without a terminal; return the result and the output."""
    said = io.StringIO()
    return method(tree, console=Console(file=said, width=200), **arguments), said.getvalue()


def resumed_after(kept, run, tree, **arguments):
    """Cut the journal of a run to its first `kept` lines, resume the run, and return the new journal."""
    file = run / "journal.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:kept]))
    train(tree, resume=True, **arguments)
    return file.read_bytes()
