# SPDX-License-Identifier: Apache-2.0
"""Plugins of vLLM, by which other processes of vLLM run what a test replaces in its own."""

from pathlib import Path


def written(folder: Path, module: str) -> list[str]:
    """Write a plugin that calls `use()` of a module here; return the folders of the path that finds both."""
    about = folder / f"{module}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:use\n")
    here = Path(__file__).parent
    return [str(path) for path in (folder, here, here.parent / "support")]
