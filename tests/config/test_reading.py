# SPDX-License-Identifier: Apache-2.0
"""Files from anywhere: what is no plain file is refused before it is opened, and JSON that no program writes too."""

import os

import pytest

from evoalign.config.reading import DEPTH, MissingError, parse, read_bytes, read_json, read_object
from evoalign.errors import DataError

ODD = {
    "nothing": (b"", "Expecting value"),
    "half": (b'{"a": [1, 2', "Expecting"),
    "another encoding": (b'{"a": "\xff\xfe"}', "not UTF-8"),
    "600 levels": (b"[" * 600 + b"]" * 600, f"deeper than {DEPTH} levels"),
    "600 levels of objects": (b'{"a":' * 600 + b"1" + b"}" * 600, f"deeper than {DEPTH} levels"),
    "a hundred thousand levels": (b"[" * 100_000, f"deeper than {DEPTH} levels"),
    "5,000 digits": (b"9" * 5_000, "more than 64 bits"),
    "a number beyond words": (b'{"generation": 1' + b"0" * 20 + b"}", "more than 64 bits"),
    "NaN": (b'{"a": NaN}', "not finite"),
    "infinity": (b"[-Infinity]", "not finite"),
    "a number beyond floats": (b"[1e999]", "not finite"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_json_is_one_line_that_names_the_file_and_the_mend(name, tmp_path):
    text, why = ODD[name]
    file = tmp_path / "manifest.json"
    file.write_bytes(text)
    with pytest.raises(DataError, match=why) as caught:
        read_json(file)
    said = str(caught.value)
    assert said.startswith(f"{file} is damaged (") and said.endswith("; put it back from a copy")
    assert "\n" not in said and len(said) < len(str(file)) + 200


def test_plain_json_is_read_as_it_is(tmp_path):
    deep = [1.5, -(2**64) + 1, None, True, "\U0001f600"]
    text = '[1.5, -18446744073709551615, null, true, "\\ud83d\\ude00"]'
    for _ in range(DEPTH - 1):
        deep, text = {"a": deep}, '{"a": ' + text + "}"
    (tmp_path / "a").write_text(text)
    assert read_json(tmp_path / "a") == deep
    assert parse(b"[" + b"[]," * 1000 + b"[]]", "here") == [[]] * 1001
    assert str(parse(b"[NaN, 1e999]", "here", finite=False)) == "[nan, inf]"


def test_half_a_surrogate_becomes_text_that_can_be_written_and_a_list_is_no_object(tmp_path):
    found = parse(b'{"\\udcff": ["a\\ud800"]}', "here")
    (key, (value,)), *_ = found.items()
    assert value.startswith("a") and (key + value).encode("utf-8")
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(DataError, match="holds no JSON object"):
        read_object(tmp_path / "a")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, why in {
        "pipe": "is not a file", "folder": "is not a file", "device": "is not a file",
        "circle": "cannot be read", "nowhere": "link to nothing", "a\0b": "cannot be read",
    }.items():  # fmt: skip
        with pytest.raises(DataError, match=why) as caught:
            read_bytes(tmp_path / name)
        assert not isinstance(caught.value, MissingError)
    with pytest.raises(MissingError, match="is missing; look again"):
        read_bytes(tmp_path / "none", mend="look again")
    with pytest.raises(DataError, match="larger than 1 KiB"):
        (tmp_path / "long").write_bytes(b"x" * 1025)
        read_bytes(tmp_path / "long", 1024)
    (tmp_path / "link").symlink_to(tmp_path / "long")
    assert read_bytes(tmp_path / "link") == b"x" * 1025
