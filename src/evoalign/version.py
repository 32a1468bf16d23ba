# SPDX-License-Identifier: Apache-2.0
"""The version of the package, and the command that installs its extras."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__version__ = "0.1.0"


def install(*extras: str) -> str:
    """Return the command that installs extras from the source of this package: a clone, a wheel or an index."""
    try:
        found = json.loads(metadata.distribution("evoalign").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):  # a source tree that is not installed
        found = {}
    return command(found, extras)


def command(origin: Mapping[str, Any], extras: tuple[str, ...]) -> str:
    """Return the pip command that installs evoalign from an origin recorded by pip (PEP 610)."""
    named, url = f"evoalign[{','.join(extras)}]", str(origin.get("url", ""))
    if "dir_info" in origin:
        folder = Path(unquote(urlsplit(url).path))
        where = "." if folder == Path.cwd() else str(folder)
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{where}[{','.join(extras)}]'"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info'].get('vcs', 'git')}+{url}"
    return f"pip install '{named} @ {url}'" if url else f"pip install '{named}'"
