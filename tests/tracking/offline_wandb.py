# SPDX-License-Identifier: Apache-2.0
"""Reads a `.wandb` file: LevelDB's log format (blocks of 32 KiB, a CRC-32 on each piece) with records of protobuf.

wandb reads it in a program of its own, so the framing is written again here; the records are wandb's.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def records(file: Path) -> Iterator[Any]:
    data, at, whole = file.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B", "no file of wandb"
    while at < len(data):
        room = BLOCK - at % BLOCK
        if room < HEADER:
            at += room
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + HEADER : at + HEADER + length]
        assert checksum == zlib.crc32(piece, zlib.crc32(bytes([kind]))), "damaged"
        whole += piece
        at += HEADER + length
        if kind in (FULL, LAST):
            yield Record.FromString(whole)
            whole = b""


def read(file: Path) -> dict[str, Any]:
    """The run's id, project, name and config; its history, one mapping a step; its summary; its exit code."""
    found: dict[str, Any] = {"history": [], "summary": {}, "exit_code": None}
    for record in records(file):
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                found |= {"id": run.run_id, "project": run.project, "name": run.display_name}
                found["config"] = _items(run.config.update)
            case "history":
                found["history"].append(_items(record.history.item))
            case "summary":
                found["summary"] |= _items(record.summary.update)
            case "exit":
                found["exit_code"] = record.exit.exit_code
    return found


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
