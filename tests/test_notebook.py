# SPDX-License-Identifier: Apache-2.0
"""The notebook runs from its first cell to its last, in a kernel of its own, and shows what it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="the notebook needs the dependency group dev")
import nbformat  # noqa: E402 (comes with nbclient)

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The notebook with fewer generations and test examples, after all its cells, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.read(NOTEBOOK, as_version=4)
    for was, less in (
        (r"(?m)^GENERATIONS = \d+", "GENERATIONS = 2"), (r"\{GENERATIONS\}\"\]", '{GENERATIONS}", "task.test_size=16"]')
    ):  # fmt: skip
        book.cells[1].source, changed = re.subn(was, less, book.cells[1].source)
        assert changed == 1
    nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return book, folder


def html_of(cell: Any) -> str:
    return "".join(output.data.get("text/html", "") for output in cell.outputs if "data" in output)


@pytest.mark.slow
def test_every_cell_runs_and_shows_what_it_says(ran: tuple[Any, Path]) -> None:
    book, folder = ran
    assert {path.name for path in (folder / "runs").iterdir()} == {"quickstart", "sums"}
    assert "generation 2/2" in html_of(book.cells[1])  # drawn in place, not line after line
    assert "Loading weights" not in str([cell.get("outputs") for cell in book.cells])
    shown = html_of(book.cells[2])
    assert "runs/quickstart: reward" in shown and "on 16 test examples" in shown and "data:image/png;base64," in shown
    frame = html_of(book.cells[3])
    assert frame.count("<tr") == 9 and "text_before" in frame
    placebos = "".join(output.text for output in book.cells[5].outputs if output.output_type == "stream")
    assert "5 placebos (the same noise, shuffled coefficients) reached" in placebos
    assert "runs/sums: reward" in html_of(book.cells[8])
    assert "adapter_model.safetensors" in str(book.cells[9].outputs)


def test_the_shipped_notebook_has_ten_cells_and_is_a_valid_one() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    assert len(book.cells) == 10
    assert not any(output.output_type == "error" for cell in book.cells for output in cell.get("outputs", ()))
