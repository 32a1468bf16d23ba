# SPDX-License-Identifier: Apache-2.0
"""The journal: its chain re-computed, every kind of damage named by its line, updates that come back exactly."""

import hashlib
import json
import math
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoalign import journal
from evoalign.errors import JournalError
from evoalign.journal import Journal
from evoalign.types import Update, population

HEADER = {"config_hash": "ab" * 32, "noise_table": "cd" * 32, "weights_hash": "ef" * 32, "name": "Zoë"}


def update(index=0, coefficients=(0.1, -0.2, 1 / 3, 0.0), **changes):
    members = population(len(coefficients), antithetic=changes.pop("antithetic", False))
    settings = {"sigma": 0.001, "step": 5e-4, "decay": 0.0} | changes
    return Update(index=index, generation=index, members=members, coefficients=tuple(coefficients), **settings)


def write(path: Path, count=3):
    book = Journal(path, HEADER)
    for index in range(count):
        book.append(update(index, antithetic=True), (0.5, 0.25, -1.5, 2.0))
        book.seal(index, f"{index:064x}")
    book.close()
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "journal.jsonl")


def own_digest(line):
    rest = {k: v for k, v in line.items() if k != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def test_the_chain(path):
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    previous = "0" * 64
    for line in lines:
        assert line["previous"] == previous
        assert line["hash"] == own_digest(line)
        previous = line["hash"]
    assert [line["type"] for line in lines] == ["header", *["update", "seal"] * 3]
    assert lines[0]["format_version"] == 1
    assert HEADER.items() <= lines[0].items()
    assert [{k: v for k, v in line.items() if k != "hash"} for line in lines] == list(journal.read(path))


def test_what_an_update_says(path):
    line = list(journal.read(path))[3]
    assert line["members"] == [0, 0, 1, 1]
    assert line["signs"] == [1, -1, 1, -1]
    assert line["scores"] == [0.5, 0.25, -1.5, 2.0]
    assert line["rms_c"] == pytest.approx(math.sqrt((0.01 + 0.04 + 1 / 9) / 4), rel=1e-15)
    assert (line["index"], line["generation"], line["sigma"], line["step"]) == (1, 1, 0.001, 5e-4)


def test_nothing_in_it_depends_on_time_or_place(tmp_path):
    (tmp_path / "other").mkdir()
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "other" / "b.jsonl")
    assert a.read_bytes() == b.read_bytes()
    keys = {key for line in journal.read(a) for key in line}
    assert not [k for k in keys if re.search("time|date|seconds|host|path|pid|user", k)]


def test_each_line_is_on_disk_when_the_call_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(journal.os, "fsync", lambda fd: synced.append((tmp_path / "j").read_bytes().count(b"\n")))
    book = Journal(tmp_path / "j", HEADER)
    book.append(update(), (0.0,) * 4)
    book.seal(0, "0" * 64)
    assert synced == [1, 2, 3]


def test_an_existing_journal_is_never_overwritten(path):
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Journal(path, HEADER)
    assert path.read_bytes() == before


def fails_at(path, number, complete=None):
    seen = []
    with pytest.raises(JournalError, match=rf"{re.escape(str(path))}, line {number} ") as caught:
        for line in journal.read(path):
            seen.append(line)
    assert len(seen) == number - 1, "lines before the damage are given, none after"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'("hash":")(.)', lambda m: m[1] + ("0" if m[2] != "0" else "1")),
        (r'("previous":")(.)', lambda m: m[1] + ("f" if m[2] != "f" else "e")),
        (r'"type":"\w+"', '"type":"other"'),
        (r"^\{", '{"added":1,'),
    ],
)
def test_an_altered_line_is_named(path, number, old, new):
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[number - 1] = re.sub(old, new, lines[number - 1], count=1)
    path.write_text("".join(lines), encoding="utf-8")
    fails_at(path, number)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "0.10000000000000002", "9" * 5000])
def test_an_altered_number_is_named(path, literal):
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[3] = lines[3].replace("[0.1,", f"[{literal},")
    path.write_text("".join(lines), encoding="utf-8")
    fails_at(path, 4)


def test_a_line_altered_together_with_its_hash_breaks_the_chain_at_the_next(path):
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    line = json.loads(lines[3])
    line["step"] = 0.5
    line["hash"] = own_digest(line)
    lines[3] = json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    fails_at(path, 5)


@pytest.mark.parametrize("number", range(1, 7))
def test_lines_out_of_order_missing_or_twice_are_named(path, number):
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    swapped = [*lines[: number - 1], lines[number], lines[number - 1], *lines[number + 1 :]]
    missing = lines[: number - 1] + lines[number:]
    path.write_text("".join(swapped), encoding="utf-8")
    fails_at(path, number)
    path.write_text("".join(missing), encoding="utf-8")
    fails_at(path, number)
    path.write_text("".join(lines[:number] + lines[number - 1 :]), encoding="utf-8")
    fails_at(path, number + 1)


def test_a_cut_last_line_is_named_wherever_it_is_cut(path):
    raw = path.read_bytes()
    start = raw.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start + 1, len(raw)):
        path.write_bytes(raw[:cut])
        fails_at(path, 7)
    path.write_bytes(raw[:start])
    assert len(list(journal.read(path))) == 6


def test_bytes_that_are_not_text_are_named(path):
    raw = bytearray(path.read_bytes())
    place = [i for i, b in enumerate(raw) if b == ord("\n")][2] + 30
    for byte in (0x00, 0x80, 0xFF, ord("{"), ord("\n")):
        path.write_bytes(raw[:place] + bytes([byte]) + raw[place + 1 :])
        fails_at(path, 4)


@pytest.mark.parametrize("text", ["\n", "[]\n", "null\n", "{}\n", '"x"\n', "[" * 100_000 + "\n"])
def test_a_line_that_is_no_record_is_named(path, text):
    path.write_text(text, encoding="utf-8")
    fails_at(path, 1)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(st.floats(-1e100, 1e100), min_size=2, max_size=30),
    finite,
    st.floats(1e-300, 1e100),
    st.floats(0, 0.999),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_an_update_comes_back_bit_for_bit(tmp_path_factory, coefficients, sigma, step, decay, index, antithetic):
    written = update(index, coefficients, sigma=sigma, step=step, decay=decay, antithetic=antithetic)
    file = tmp_path_factory.mktemp("j") / "journal.jsonl"
    book = Journal(file, {})
    book.append(written, coefficients)
    book.close()
    line = list(journal.read(file))[1]
    got = journal.to_update(line)
    assert got == written
    for a, b in zip(got.coefficients, written.coefficients, strict=True):
        assert struct.pack("<d", a) == struct.pack("<d", b), "floats are exact, signed zeros too"
    assert struct.pack("<ddd", got.sigma, got.step, got.decay) == struct.pack("<ddd", sigma, step, decay)
    assert line["scores"] == coefficients


def test_a_number_that_is_not_finite_is_never_written(tmp_path):
    book = Journal(tmp_path / "j", HEADER)
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        book.append(update(coefficients=(math.nan, 0.0)), (0.0, 0.0))
    assert (tmp_path / "j").read_bytes() == before
