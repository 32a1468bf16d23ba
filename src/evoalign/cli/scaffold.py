# SPDX-License-Identifier: Apache-2.0
"""Write the files of `evoalign init`: a config, a reward and prompts to start a custom task from."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from evoalign.config.schema import schema
from evoalign.errors import ConfigError
from evoalign.tasks import data

TEMPLATES = ("config.yaml", "reward.py")
QUESTIONS = {"prompts.jsonl": "train", "test.jsonl": "test"}
"""Files with the Conciseness questions of a split, whose target is renamed to `answer`."""
SCHEMA = "evoalign.schema.json"
"""The JSON schema with which an editor completes and checks config.yaml, whose first line names it."""
FILES = (*TEMPLATES, *QUESTIONS, SCHEMA)


def init(directory: str | Path) -> list[Path]:
    """Write the starting files and return their paths. Raises ConfigError, with nothing written, where one exists."""
    folder = Path(directory)
    paths = [folder / name for name in FILES]
    existing = [path.name for path in paths if path.exists() or path.is_symlink()]
    if existing:
        raise ConfigError(f"{folder} already has {', '.join(existing)}; give another folder, or move them away")
    contents = [_content(name) for name in FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, contents, strict=True):
            with path.open("xb") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}; give another folder") from None
    return paths


def schema_text() -> str:
    """Return the text of the JSON schema of a config."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _content(name: str) -> bytes:
    if name == SCHEMA:
        return schema_text().encode()
    if name in TEMPLATES:
        return (resources.files("evoalign.cli") / "templates" / name).read_bytes()
    rows = data.read(f"data/tasks/conciseness/questions_{QUESTIONS[name]}.json")
    kept = ({"prompt": row["prompt"], "answer": row["target"]} for _, row in rows)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept).encode()
