# SPDX-License-Identifier: Apache-2.0
"""Write and read tables of completions as parquet, with a checksum on each page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evoalign.config.reading import open_plain
from evoalign.errors import DataError, plain
from evoalign.rundir.files import make_folder, replacing

BATCH = 256
MOST_BYTES = 2**32
"""Largest table in memory."""


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys, flush to disk and rename. A column without any value has type string."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(list(rows))
    fields = [f.with_type(pyarrow.string()) if pyarrow.types.is_null(f.type) else f for f in table.schema]
    make_folder(path.parent)
    with replacing(path) as file:
        parquet.write_table(table.cast(pyarrow.schema(fields)), file, write_page_checksum=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table. Raises DataError naming a file that is missing or damaged."""
    import pyarrow
    from pyarrow import parquet

    rows: list[dict[str, Any]] = []
    size = 0
    try:
        with open_plain(path) as opened, parquet.ParquetFile(opened, page_checksum_verification=True) as file:
            for batch in file.iter_batches(BATCH):  # a small file may unpack to any size
                size += batch.nbytes
                if size > MOST_BYTES:
                    raise DataError(f"{path} unpacks to more than {MOST_BYTES // 2**20} MiB, which no run leaves")
                rows += batch.to_pylist()
            if len(rows) != file.metadata.num_rows:  # an altered page header may make a page look empty
                raise ValueError(f"{len(rows)} rows of {file.metadata.num_rows}")
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError, LookupError, TypeError, ImportError) as error:
        why = plain((str(error).splitlines() or [type(error).__name__])[0][:200])  # it may quote the file
        raise DataError(f"{path} is damaged: {why}; put it back from a copy") from error
    return rows
