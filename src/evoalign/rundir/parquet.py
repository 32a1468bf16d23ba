# SPDX-License-Identifier: Apache-2.0
"""Tables of completions on disk: parquet, whole or not at all, with a checksum on each page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evoalign.errors import DataError
from evoalign.rundir.files import replacing


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of equal keys, flush to disk, then rename into place. A column without a value is one of text."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(list(rows))
    fields = [f.with_type(pyarrow.string()) if pyarrow.types.is_null(f.type) else f for f in table.schema]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        parquet.write_table(table.cast(pyarrow.schema(fields)), file, write_page_checksum=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a table. Raises DataError naming a file that is missing or damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path, page_checksum_verification=True).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is missing or damaged: {str(error).splitlines()[0]}") from error
