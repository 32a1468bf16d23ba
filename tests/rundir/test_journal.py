# SPDX-License-Identifier: Apache-2.0
"""The journal: its chain re-computed, every kind of damage named by its line, updates that come back exactly."""

import json
import math
import re
import struct
from pathlib import Path

import pytest
from chains import own_digest, relinked
from families import JOURNAL_HEADER as HEADER
from hypothesis import given
from hypothesis import strategies as st

from evoalign.errors import JournalError
from evoalign.rundir import journal
from evoalign.rundir.journal import Journal
from evoalign.types import Update, population

SCORES = (0.5, 0.25, -1.5, 2.0)


def update(index=0, coefficients=(0.1, -0.2, 1 / 3, 0.0), **changes):
    members = population(len(coefficients), antithetic=changes.pop("antithetic", False))
    settings = {"sigma": 0.001, "step": 5e-4, "decay": 0.0} | changes
    return Update(index=index, generation=index, members=members, coefficients=tuple(coefficients), **settings)


def write(path: Path, count=3):
    book = Journal(path, HEADER)
    for index in range(count):
        book.append(update(index, antithetic=True), SCORES)
        book.seal(index, f"{index:064x}")
    book.close()
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "journal.jsonl")


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
    log = journal.read(path)
    assert (log.damage, log.sealed, log.size, log.last_hash) == (None, 3, path.stat().st_size, previous)
    assert [g.hash for g in log.generations] == [line["hash"] for line in lines[2::2]]
    assert [g.weights_hash for g in log.generations] == [line["weights_hash"] for line in lines[2::2]]
    assert log.header.model_dump(exclude={"type", "previous", "format_version"}, exclude_none=True) == {
        name: value for name, value in HEADER.items() if value is not None
    }


def test_what_an_update_says(path):
    line = json.loads(path.read_text().splitlines()[3])
    assert line["members"] == [0, 0, 1, 1]
    assert line["signs"] == [1, -1, 1, -1]
    assert line["scores"] == [0.5, 0.25, -1.5, 2.0]
    assert line["rms_c"] == pytest.approx(math.sqrt((0.01 + 0.04 + 1 / 9) / 4), rel=1e-15)
    assert (line["index"], line["generation"], line["sigma"], line["step"]) == (1, 1, 0.001, 5e-4)


def test_nothing_in_it_depends_on_time_or_place(tmp_path):
    (tmp_path / "other").mkdir()
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "other" / "b.jsonl")
    assert a.read_bytes() == b.read_bytes()
    keys = {key for line in a.read_text().splitlines() for key in json.loads(line)}
    assert not [k for k in keys if re.search("time|date|seconds|host|path|pid|user", k)]


def test_each_line_is_on_disk_when_the_call_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(journal, "sync_folder", lambda folder: None)
    monkeypatch.setattr(journal.os, "fsync", lambda fd: synced.append((tmp_path / "j").read_bytes().count(b"\n")))
    write(tmp_path / "j", 1)
    assert synced == [1, 2, 3]


def test_an_existing_journal_is_never_overwritten(path):
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Journal(path, HEADER)
    assert path.read_bytes() == before


def fails_at(path, number, cut=False):
    """The damage is named by its line, what is before it is there, and it is reported up to where that is whole."""
    named = rf"{re.escape(str(path))}, line {number} "
    if number == 1:
        with pytest.raises(JournalError, match=named) as caught:
            journal.read(path)
        assert "\n" not in str(caught.value)
        return
    log = journal.read(path)
    assert log.damage is not None and re.match(named, log.damage.message) and "\n" not in log.damage.message
    assert (log.damage.line, log.damage.cut) == (number, cut)
    assert log.sealed == (number - 2) // 2 and len(log.generations) == (number - 1) // 2
    assert log.size == sum(len(line) for line in path.read_bytes().splitlines(keepends=True)[: number - 1])
    if log.sealed:
        lines = 2 * log.sealed + 1
        assert f"whole up to generation {log.sealed} (line {lines})" in log.damage.message
        assert f"keep its first {lines} lines to resume from there" in log.damage.message
    if cut:
        assert log.whole().damage is None
    else:
        with pytest.raises(JournalError, match=named):
            log.whole()
        with pytest.raises(JournalError, match=named):
            log.whole(log.sealed + 1)
        assert log.whole(log.sealed).generations == log.generations


def altered(number, change):
    return lambda lines: [*lines[: number - 1], change(lines[number - 1]), *lines[number:]]


def replaced(old, new):
    return lambda line: line.replace(old, new, 1)


def with_own_hash(line):
    record = json.loads(line) | {"step": 0.5}
    record["hash"] = own_digest(record)
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def swapped(n):
    return lambda lines: [*lines[: n - 1], lines[n], lines[n - 1], *lines[n + 1 :]]


def missing(n):
    return lambda lines: lines[: n - 1] + lines[n:]


def twice(n):
    return lambda lines: lines[:n] + lines[n - 1 :]


EDITS = {
    "hash": (rb'("hash":")(.)', lambda m: m[1] + (b"0" if m[2] != b"0" else b"1")),
    "previous": (rb'("previous":")(.)', lambda m: m[1] + (b"f" if m[2] != b"f" else b"e")),
    "type": (rb'"type":"\w+"', b'"type":"other"'), "added": (rb"^\{", b'{"added":1,'),
}  # fmt: skip
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "0.10000000000000002", "9" * 5000]
OTHERWISE = [(b'"step":0.0005', b'"step":5e-4'), (b'{"', b'{ "'), (b",0.25,", b",2.5e-1,")]
NO_RECORDS = [b"\n", b"[]\n", b"null\n", b"{}\n", b'"x"\n', b"[" * 100_000 + b"\n"]
DAMAGES = [
    *((f"{name} {n}", n, altered(n, lambda line, old=old, new=new: re.sub(old, new, line, count=1)))
      for name, (old, new) in EDITS.items() for n in range(1, 8)),
    *((number[:20], 4, altered(4, replaced(b"[0.1,", f"[{number},".encode()))) for number in NUMBERS),
    ("with its hash", 5, altered(4, with_own_hash)),
    *((f"{how.__name__} {n}", n + (how is twice), how(n)) for how in (swapped, missing, twice) for n in range(1, 7)),
    *((f"byte {byte}", 4, altered(4, lambda line, byte=byte: line[:29] + bytes([byte]) + line[30:]))
      for byte in (0x00, 0x80, 0xFF, ord("{"), ord("\n"))),
    *((f"no record {text[:6]!r}", 1, lambda lines, text=text: [text]) for text in NO_RECORDS),
    *((f"written otherwise {new!r}", 4, altered(4, replaced(old, new))) for old, new in OTHERWISE),
]  # fmt: skip
"""By name: the line that is named, and the damage to the lines."""


@pytest.mark.parametrize(("number", "damage"), [pytest.param(n, d, id=name) for name, n, d in DAMAGES])
def test_damage_is_named_by_its_line(path, number, damage):
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = damage(lines)
    assert damaged != lines
    path.write_bytes(b"".join(damaged))
    fails_at(path, number)


def test_a_cut_last_line_is_named_wherever_it_is_cut(path):
    raw = path.read_bytes()
    start = raw.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start + 1, len(raw)):
        path.write_bytes(raw[:cut])
        fails_at(path, 7, cut=True)
    path.write_bytes(raw[:start])
    log = journal.read(path)
    assert log.damage is None and log.sealed == 2 and log.generations[2].weights_hash is None


def test_any_clean_cut_is_a_shorter_run(path):
    lines = path.read_bytes().splitlines(keepends=True)
    for count in range(1, 8):
        path.write_bytes(b"".join(lines[:count]))
        log = journal.read(path)
        assert (log.damage, log.sealed, len(log.generations)) == (None, (count - 1) // 2, count // 2)


@given(
    st.lists(st.floats(-1e100, 1e100), min_size=2, max_size=30), st.floats(allow_nan=False, allow_infinity=False),
    st.floats(1e-300, 1e100), st.floats(0, 0.999), st.booleans(),
)  # fmt: skip
def test_an_update_comes_back_bit_for_bit(tmp_path_factory, coefficients, sigma, step, decay, antithetic):
    written = update(0, coefficients, sigma=sigma, step=step, decay=decay, antithetic=antithetic)
    file = tmp_path_factory.mktemp("j") / "journal.jsonl"
    book = Journal(file, HEADER)
    book.append(written, coefficients)
    book.close()
    recorded = journal.read(file).generations[0]
    got = recorded.update
    assert got == written
    for a, b in zip(got.coefficients, written.coefficients, strict=True):
        assert struct.pack("<d", a) == struct.pack("<d", b), "floats are exact, signed zeros too"
    assert struct.pack("<ddd", got.sigma, got.step, got.decay) == struct.pack("<ddd", sigma, step, decay)
    assert list(recorded.fitness_M) == coefficients


def test_a_number_that_is_not_finite_is_never_written(tmp_path):
    book = Journal(tmp_path / "j", HEADER)
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        book.append(update(coefficients=(math.nan, 0.0)), (0.0, 0.0))
    assert (tmp_path / "j").read_bytes() == before


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (1, {"format_version": 2}), (1, {"config": 3}), (1, {"weights_hash": "short"}), (1, {"config_hash": "0" * 64}),
        (1, {"config": {"model": {"name": "another"}}}), (1, {"dtype": "load"}), (1, {"evolved_parameters": 2**63}),
        (2, {"index": 1}), (2, {"signs": [1, 0, 1, -1]}), (2, {"members": [0, 0, 1]}), (2, {"coefficients": "abcd"}),
        (2, {"members": [0, 0, 1, 2**32]}), (2, {"generation": 1}),
        (2, {"members": [], "signs": [], "scores": [], "coefficients": []}),
        (4, {"step": None}), (4, {"scores": [10**400, 0, 0, 0]}), (4, {"more": 1}),
        (5, {"weights_hash": 7}), (5, {"index": 0}), (5, {"type": "update"}),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_is_named_even_where_the_chain_holds(path, number, change):
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[number - 1] |= change
    path.write_text(relinked(lines))
    fails_at(path, number)


def test_going_on_writes_what_one_process_would_have_written(path, tmp_path):
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in [*ends[2:6], ends[2] + 1, ends[3] + 40, ends[5] - 1]:  # between lines and within them
        path.write_bytes(whole[:size])
        log = journal.read(path).whole()
        book = Journal.resume(log)
        for index in range(log.sealed, 3):
            if index == len(log.generations) or index > log.sealed:
                book.append(update(index, antithetic=True), SCORES)
            book.seal(index, f"{index:064x}")
        book.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(("raw", "blank"), [(None, True), (b"", True), (b'{"type": "hea', True), (b"x\n", False)])
def test_a_journal_without_a_first_line_is_blank(tmp_path, raw, blank):
    if raw is not None:
        (tmp_path / "j").write_bytes(raw)
    assert journal.is_blank(tmp_path / "j") is blank
    if blank:
        with pytest.raises(JournalError):
            journal.read(tmp_path / "j")


SCORED_BY = [
    {"chunks": [{"members": [0, 1], "by": [2, 0]}, {"members": [2, 3], "by": [1]}], "expelled": {"3": "was wrong"}},
    {"chunks": [], "expelled": {}}, {"chunks": [{"members": [0], "by": []}], "expelled": {}},
    {"chunks": [{"members": [0], "by": ["a"]}], "expelled": {}},
    {"chunks": [{"members": [0], "by": [1]}], "expelled": [], "more": 1},
]  # fmt: skip


@pytest.mark.parametrize("by", SCORED_BY)
def test_read_accepts_scored_by_of_earlier_releases_in_its_own_form_alone(path, by):
    header, *lines = [json.loads(text) for text in path.read_text().splitlines()[:3]]
    path.write_text(relinked([header, lines[0] | {"scored_by": by}, lines[1]]))
    log = journal.read(path)
    if by is SCORED_BY[0]:
        assert log.sealed == 1 and log.damage is None
        Journal.resume(log).close()
    else:
        assert log.damage is not None and "line 2 has an invalid scored_by" in log.damage.message
