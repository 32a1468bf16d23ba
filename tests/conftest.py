# SPDX-License-Identifier: Apache-2.0
"""What tests share: settings of hypothesis, and small models that need no download."""

import base64
import functools
import gc
import logging
import os
import shutil
import signal
import ssl
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import certifi
import pytest
import typer.main
from hypothesis import HealthCheck, settings

settings.register_profile("evoalign", deadline=None, max_examples=60, derandomize=True,
                          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
settings.load_profile("evoalign")

if "PYTHONPATH" in os.environ:  # of processes that tests start in other folders
    os.environ["PYTHONPATH"] = os.pathsep.join(
        str(Path(p).absolute()) for p in os.environ["PYTHONPATH"].split(os.pathsep)
    )

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background: Ctrl-C is tested
    signal.signal(signal.SIGINT, signal.default_int_handler)

# At its import it warns on some processors, in whichever test that is, that it lacks a kernel for a product in 4 bits.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves an actor next to other tests hardly any time

# Figures of a run are painted in tests that are slow or long and in those of PAINTED; others get an empty picture.
# Pixels, which take most of the time, are made of figures where tests look at them (PIXELS) and in every test that is
# long. In processes other than the tests' own all of it is done.
PAINTED = ("analysis/", "report/", "training/test_api_train", "training/test_result")
PIXELS = ("report/", "analysis/sweeping/", "analysis/page/", "analysis/compare/")
BLANK = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
painted, pixels, prepared, imported = True, True, False, 0
freeze = gc.freeze


def blank_figures() -> None:
    """Make `Figure.savefig` write one pixel unless `pixels`, and leave a run's figures empty unless `painted`."""
    from matplotlib.figure import Figure

    from evoalign.report import figures

    whole_figure, whole_panel, disable_math = Figure.savefig, figures._panel, figures._disable_math

    def save_figure(figure: Figure, file: Any, **options: Any) -> None:
        whole_figure(figure, file, **options) if pixels else file.write(BLANK)

    @contextmanager
    def panel(path: str | Path, *given: Any) -> Generator[Any]:
        with whole_panel(path, *given) if painted else nullcontext(MagicMock()) as axes:
            yield axes
        if not painted:
            figures.save(Figure(), Path(path))

    figures._panel = panel
    Figure.savefig = save_figure  # type: ignore[method-assign]
    figures._disable_math = lambda figure: disable_math(figure) if pixels else None


def write_through() -> None:
    """Make `os.fsync` wait for no disk: no test cuts the power. A handle that is none, or closed, still fails."""

    def fsync(handle: Any) -> None:
        os.fstat(handle if isinstance(handle, int) else handle.fileno())

    os.fsync = fsync


def freeze_in_name() -> None:
    """Make `gc.freeze`, `gc.unfreeze` and `gc.get_freeze_count` (0 or 1) only note what was called: a run would count
    millions of objects here, one by one, and unfreeze those of libraries, through which vLLM looks nine times."""
    frozen = False

    def note(now: bool) -> None:
        nonlocal frozen
        frozen = now

    gc.freeze, gc.unfreeze = lambda: note(True), lambda: note(False)
    gc.get_freeze_count = lambda: int(frozen)


def read_certificates_once() -> None:
    """Make httpx read the authorities' certificates once: each of hundreds of clients would, for 0.04 s."""
    whole, authorities = ssl.create_default_context, (None, certifi.where(), os.environ.get("SSL_CERT_FILE"))
    known = functools.cache(lambda file: whole(cafile=file))

    def create(*purpose: Any, **files: Any) -> ssl.SSLContext:
        is_known = not purpose and files.keys() == {"cafile"} and files["cafile"] in authorities
        return known(files["cafile"]) if is_known else whole(*purpose, **files)

    ssl.create_default_context = create


def build_commands_once() -> None:
    """Make Typer build the parser of an app once: it takes 0.05 s, in each call of a command."""
    typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_collectstart() -> None:
    """Import what takes seconds, in processes that collect tests only: the one that starts xdist's workers does not."""
    global prepared
    if not prepared:
        prepared = True
        gc.disable()  # tests that are collected stay, and a tenth of the time would be spent on looking through them
        import interpreted  # noqa: F401  before anything that imports Triton

        blank_figures()
        write_through()
        freeze_in_name()
        read_certificates_once()
        build_commands_once()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global painted, pixels, imported
    if len(sys.modules) != imported:  # TRL collects garbage often, and would look through all that was imported
        freeze()
        imported = len(sys.modules)
    within = item.path.relative_to(Path(__file__).parent).as_posix()
    pixels = within.startswith(PIXELS) or item.get_closest_marker("long") is not None
    painted = pixels or within.startswith(PAINTED) or item.get_closest_marker("slow") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The cases of a test that its mark `first` does not name are long, or what it calls `others`; those that its mark
    `last` names are long, and so is all that is `real`. A word of either that names no case is an error."""
    idle: dict[str, set[str]] = {}
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker("long")
        test, bracket, case = item.nodeid.partition("[")
        for tier in ("first", "last"):
            if marker := item.get_closest_marker(tier):
                said = {word for word in marker.args if word in bracket + case}
                name = f"{tier}() of {test}"
                idle[name] = idle.get(name, set(marker.args)) - said
                if bool(said) == (tier == "last"):
                    item.add_marker("long" if said else marker.kwargs.get("others", "long"))
    whole = not any("::" in arg for arg in config.args)  # else not all cases are here
    if whole and (wrong := {name: words for name, words in idle.items() if words}):
        raise pytest.UsageError(f"these words name no case: {wrong}")


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a generation that the doctor times two members answer: its pieces are most of what it takes."""
    from evoalign.preflight import work

    monkeypatch.setattr(work, "BUDGET", 0.0)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct with weights of 4 bits in bfloat16, as `make test-real` makes it."""
    folder = Path(__file__).parents[1] / ".cache" / "smollm2"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: make test-real makes it (recipes/smollm2)")
    return folder


@pytest.fixture(scope="session")
def random_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model with random weights and the tiny model's tokenizer: one layer, about 20,000 parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from evoalign.models import tiny

    folder = tmp_path_factory.mktemp("random_qwen2")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=1024, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
        )
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / name, folder)
    return folder
