# SPDX-License-Identifier: Apache-2.0
"""The script that checks vLLM releases finds in a source tree what an import would find."""

import importlib.util
import textwrap
from pathlib import Path

import pytest

from evoalign.engines.vllm.insides import INSIDES, Inside, unmet

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_vllm_releases.py"
spec = importlib.util.spec_from_file_location("check_vllm_releases", SCRIPT)
assert spec is not None and spec.loader is not None
releases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(releases)

FILES = {
    "vllm/__init__.py": """
        import typing
        MODULE_ATTRS = {"LLM": ".entrypoints.llm:LLM"}
        if typing.TYPE_CHECKING:
            from vllm.nowhere import LLM
    """,
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/llm.py": """
        from vllm.base import Base as Offline
        class LLM(Offline):
            declared: int
            def __init__(self, model, *, dtype="auto", **more):
                self.engine, self.sizes = make(), []
            def generate(self, prompts: list, params=None, *, use_tqdm=True):
                "Words."
                return prompts
    """,
    "vllm/base.py": """
        class Base:
            named = 1
            @property
            def inherited(self):
                other.foreign = 2
    """,
    "vllm/distributed/__init__.py": "from .ops import *\nfrom .ops import own as called_here",
    "vllm/distributed/ops.py": "def all_reduce(input_):\n    return input_\ndef own(): pass",
}


@pytest.fixture
def reader(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return releases.Reader(tmp_path)


@pytest.mark.parametrize(
    ("module", "owner", "name", "parameters"),
    [
        ("vllm", "LLM", "__init__", "model dtype="),
        ("vllm", "LLM", "generate", "prompts params use_tqdm="),
        *(("vllm.entrypoints.llm", "LLM", name, "") for name in ["declared", "engine", "sizes", "named", "inherited"]),
        ("vllm.distributed", "", "all_reduce", "input_"),
        ("vllm.distributed", "", "called_here", ""),
    ],
)
def test_reader_finds_names_that_exist(reader, module, owner, name, parameters):
    assert list(unmet(reader, [Inside(module, owner, name, tuple(parameters.split()))])) == []


@pytest.mark.parametrize(
    ("module", "owner", "name", "parameters", "message"),
    [
        ("vllm", "LLM", "chat", "", "has no vllm.LLM.chat"),
        ("vllm", "LLM", "foreign", "", "has no vllm.LLM.foreign"),
        ("vllm", "Server", "chat", "", "has no vllm.Server.chat"),
        ("vllm.gone", "", "all_reduce", "", "has no vllm.gone.all_reduce"),
        ("vllm.distributed", "", "all_gather", "", "has no vllm.distributed.all_gather"),
        ("vllm", "LLM", "generate", "params prompts", "does not take (params, prompts)"),
        ("vllm", "LLM", "generate", "prompts params use_tqdm", "does not take (prompts, params, use_tqdm)"),
        ("vllm", "LLM", "__init__", "model more=", "does not take (model, more=)"),
        ("vllm.distributed", "", "all_reduce", "tensor", "does not take (tensor)"),
    ],
)
def test_unmet_reports_missing_names_and_other_parameters(reader, module, owner, name, parameters, message):
    (found,) = unmet(reader, [Inside(module, owner, name, tuple(parameters.split()))])
    assert message in found


def test_unmet_reports_every_name_of_an_empty_tree(tmp_path):
    assert len(list(unmet(releases.Reader(tmp_path)))) == len(INSIDES)


def test_table_shows_what_differs_from_the_first_release(reader):
    text = reader.text("vllm", "LLM.generate")
    assert text == "def generate(self, prompts, params=None, *, use_tqdm=True):\n    return prompts"
    rows = [
        releases.Row("0.32.0", "imported", [], {"LLM.generate": text}, "9 passed"),
        releases.Row("0.33.0", "read, not run", ["has no vllm.LLM"], {"LLM.generate": ""}, ""),
    ]
    first, second = releases.table(rows).splitlines()[2:]
    assert first == f"| 0.32.0 | imported | all {len(INSIDES)} | the same | 9 passed |"
    assert second == "| 0.33.0 | read, not run | has no vllm.LLM | LLM.generate |  |"
