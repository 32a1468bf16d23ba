# SPDX-License-Identifier: Apache-2.0
"""`evoalign init`: a config, a reward and a few prompts to start a task of one's own from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from evoalign.errors import ConfigError

FILES = ("config.yaml", "reward.py", "prompts.jsonl")


def init(directory: str | Path) -> list[Path]:
    """Write the starting files and return their paths. Raises ConfigError, with nothing written, where one exists."""
    folder = Path(directory)
    paths = [folder / name for name in FILES]
    existing = [path.name for path in paths if path.exists() or path.is_symlink()]
    if existing:
        raise ConfigError(f"{folder} already has {', '.join(existing)}; give another folder, or move them away")
    templates = resources.files("evoalign.cli") / "templates"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with path.open("xb") as file:
                file.write((templates / path.name).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}; give another folder") from None
    return paths
