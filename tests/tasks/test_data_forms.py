# SPDX-License-Identifier: Apache-2.0
"""Data formats: the rows that each loads as, or the error."""

import csv
import gzip
import io
import json
import re

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from evoalign.config import TaskConfig
from evoalign.errors import DataError, EvoalignError
from evoalign.tasks import create

ROWS = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": 'a "b",\nc', "answer": "ü"}]
ASKED = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Ho"}
SYSTEM = {"role": "system", "content": "Be brief."}
ALPACA = {"instruction": "Add them.", "input": "2 and 2", "output": "4"}
TURNS = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]


def length(completions, **_):
    return [float(len(c)) for c in completions]


def lines(rows=ROWS):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows=ROWS, delimiter=",", index=False):
    """As the csv module quotes, with pandas' unnamed index or without."""
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow([""] * index + list(rows[0]))
    writer.writerows([str(i)] * index + list(row.values()) for i, row in enumerate(rows))
    return out.getvalue().encode()


def packed(rows=ROWS):
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def file(name, content):
    def write(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return name

    return write


def jsonl(*rows):
    return file("rows.jsonl", lines(list(rows)))


def folder(name, **files):
    """A folder of files, whose names have `__` for a slash and `_` before the ending."""

    def write(place):
        for file_name, content in files.items():
            stem, _, suffix = file_name.replace("__", "/").partition("_")
            file(f"set/{stem}.{suffix.replace('_', '.')}", content)(place)
        (place / "set").mkdir(exist_ok=True)
        return name

    return write


def saved(name, **parts):
    """Output of save_to_disk: several splits, or one data set."""

    def write(place):
        made = {part: datasets.Dataset.from_list(rows) for part, rows in parts.items()}
        (made["only"] if "only" in made else datasets.DatasetDict(made)).save_to_disk(str(place / "set"))
        return name

    return write


CARD = b"""---
configs:
- {config_name: main, data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]}
- {config_name: other, data_files: [{split: train, path: other.jsonl}]}
---
"""


def hub(name, *, configs=True):
    """A data set as the hub has it. The library takes a folder of the name for it, so that no network is needed."""

    def write(place):
        there = place / "who"
        if configs:
            file("what/README.md", CARD)(there)
            file("what/main/test.jsonl", lines(ROWS[1:]))(there)
        file("what/main/train.jsonl", lines(ROWS))(there)
        file("what/other.jsonl", lines(ROWS[:1]))(there)
        return name

    return write


def script(place):
    file("who/what/what.py", b"from pathlib import Path\nPath('was_run').touch()\nimport datasets\n")(place)
    file("who/what/rows.jsonl", lines())(place)
    return "hub:who/what"


QUESTIONS = [{"question": "2 + 2 =", "target": "4", "n": 1}]
MAPPED = {"prompt": "question", "answer": "target"}
FORMS = [
    ("JSON lines", file("rows.jsonl", lines()), {}, ROWS),
    ("with a mark, blank lines and CR LF", file("a", b"\xef\xbb\xbf\n" + lines().replace(b"\n", b"\r\n\n")), {}, ROWS),
    ("a JSON list", file("rows.json", json.dumps(ROWS, indent=1).encode()), {}, ROWS),
    ("gzip by content", file("rows.jsonl", gzip.compress(lines())), {}, ROWS),
    ("a gzipped list", file("rows.json.gz", gzip.compress(json.dumps(ROWS).encode())), {}, ROWS),
    ("CSV", file("rows.csv", table()), {}, ROWS),
    ("CSV is text", file("n.csv", b"prompt,answer\nHi,007\nHo,\n"), {},
     [{"prompt": "Hi", "answer": "007"}, {"prompt": "Ho", "answer": ""}]),
    ("gzipped CSV", file("rows.csv.gz", gzip.compress(table())), {}, ROWS),
    ("TSV", file("rows.tsv", table(delimiter="\t")), {}, ROWS),
    ("CSV with an index", file("i.csv", table(index=True)), {},
     [{"Unnamed: 0": str(i), **row} for i, row in enumerate(ROWS)]),
    ("parquet by content", file("rows.bin", packed()), {}, ROWS),
    ("saved to disk", saved("set", only=ROWS), {}, ROWS),
    ("saved splits", saved("set", train=ROWS, test=ROWS[:1]), {}, ROWS),
    ("a saved split", saved("set:test", train=ROWS, test=ROWS[:1]), {}, ROWS[:1]),
    ("shards", folder("set", b_parquet=packed(ROWS[1:]), a_parquet=packed(ROWS[:1])), {}, ROWS),
    ("shards of a split", folder("set:test", data__train_jsonl=lines(ROWS[:1]), data__test_jsonl_gz=gzip.compress(
        lines(ROWS[1:]))), {}, ROWS[1:]),
    ("the train shards alone", folder("set", train_csv=table(ROWS[:1]), test_csv=table(), README_md=b"# Data"), {},
     ROWS[:1]),
    ("hub, config and split", hub("hub:who/what:main:test"), {}, ROWS[1:]),
    ("hub, a part of a split", hub("hub:who/what:main:train[:1]"), {}, ROWS[:1]),
    ("columns", jsonl(*QUESTIONS), {"columns": MAPPED}, [{"prompt": "2 + 2 =", "answer": "4", "n": 1}]),
    ("columns that swap", jsonl({"prompt": "4", "answer": "2 + 2 ="}), {"columns": {"prompt": "answer",
     "answer": "prompt"}}, [{"answer": "4", "prompt": "2 + 2 ="}]),
    ("messages", jsonl({"messages": [SYSTEM, ASKED, SAID]}), {},
     [{"messages": [SYSTEM, ASKED, SAID], "prompt": [SYSTEM, ASKED], "completion": "Ho"}]),
    ("messages of several turns", jsonl({"messages": [ASKED, SAID, ASKED, SAID], "completion": "own"}), {},
     [{"messages": [ASKED, SAID, ASKED, SAID], "completion": "own", "prompt": [ASKED, SAID, ASKED]}]),
    ("messages that end with a question", jsonl({"messages": [ASKED, SAID, ASKED]}), {},
     [{"messages": [ASKED, SAID, ASKED], "prompt": [ASKED, SAID, ASKED]}]),
    ("a prompt beside messages", jsonl({"prompt": "Hi", "messages": [ASKED, SAID]}), {},
     [{"prompt": "Hi", "messages": [ASKED, SAID]}]),
    ("ShareGPT", jsonl({"conversations": TURNS}), {},
     [{"conversations": TURNS, "prompt": [SYSTEM, ASKED], "completion": "Ho"}]),
    ("messages under another name", jsonl({"chat": [ASKED]}), {"columns": {"messages": "chat"}},
     [{"messages": [ASKED], "prompt": [ASKED]}]),
    ("ShareGPT's system column", jsonl({"system": "Be brief.", "conversations": TURNS[1:]}), {},
     [{"system": "Be brief.", "conversations": TURNS[1:], "prompt": [SYSTEM, ASKED], "completion": "Ho"}]),
    ("a system message and column", jsonl({"system": "Be long.", "messages": [SYSTEM, ASKED]}), {},
     [{"system": "Be long.", "messages": [SYSTEM, ASKED], "prompt": [SYSTEM, ASKED]}]),
    ("OpenAI's weights", jsonl({"messages": [{**ASKED, "weight": 0}, {**SAID, "weight": 1}]}), {},
     [{"messages": [{**ASKED, "weight": 0}, {**SAID, "weight": 1}], "prompt": [ASKED], "completion": "Ho"}]),
    ("Alpaca without an input", jsonl({"instruction": "Hi", "input": ""}), {"columns": {"prompt": "instruction"}},
     [{"prompt": "Hi", "input": ""}]),
    ("Alpaca's input, left out", jsonl(ALPACA), {"columns": {"prompt": "instruction", "unread": "input"}},
     [{"prompt": "Add them.", "unread": "2 and 2", "output": "4"}]),
    ("content in parts", jsonl({"prompt": [{"role": "user", "content": [{"type": "text", "text": t} for t in "Hi"]}]}),
     {}, [{"prompt": [ASKED]}]),
    # what is refused
    ("Alpaca's input", jsonl(ALPACA), {"columns": {"prompt": "instruction"}},
     "line 1: input is '2 and 2', which is not in the prompt (the column instruction); write one column with both"),
    ("Alpaca as it is", jsonl(ALPACA), {}, "line 1: input is '2 and 2', which is not in the prompt"),
    ("a system column of a text", jsonl({"prompt": "Hi", "system": "Be brief."}), {},
     "system is 'Be brief.', which is not in the prompt"),
    ("a history of a text", jsonl({"prompt": "Hi", "history": [["a", "b"]]}), {}, "history is [['a', 'b']], which is"),
    ("a text column named message", file("a.csv", b"message,intent,city\nHi,a,b\n"), {},
     "no prompt; found message, intent, city; set task.columns: {prompt: message}"),
    ("a list named message", jsonl({"message": [ASKED]}), {}, "found message; set task.columns: {messages: message}"),
    ("a number in a message", jsonl({"messages": [{**ASKED, "index": 3}]}), {}, "its index is 3; expected {'role'"),
    ("no file", lambda _: "none.jsonl", {}, "no data file none.jsonl (looked from "),
    ("an address", lambda _: "https://a.b/c", {}, "https://a.b/c: URLs are not supported; download the file"),
    ("CSV by another name", file("rows.txt", table()), {}, "rows.txt, line 1: not JSON at column 1"),
    ("CSV with a field too many", file("a.csv", b"prompt\nHi, you\n"), {},
     "a.csv, line 2: 2 fields, but the first line names 1; quote the text"),
    ("CSV that names a column twice", file("a.csv", b"a,a\n"), {},
     "a.csv: duplicate column 'a' in the first line; rename one"),
    ("CSV with an open quote", file("a.csv", b'prompt\n"Hi\n'), {}, "a.csv, line 2: not CSV: unexpected end of data"),
    ("CSV without rows", file("a.csv", b"prompt\n"), {}, "a.csv has no rows"),
    ("gzip that is cut", file("a.jsonl.gz", gzip.compress(lines())[:-12]), {}, "a.jsonl.gz is a damaged gzip file: "),
    ("gzipped parquet", file("a.gz", gzip.compress(packed())), {}, "a.gz is a gzipped parquet file"),
    ("a list with a comma too many", file("a.json", b'[{"prompt": "Hi"},]'), {}, "a.json: not JSON at column "),
    ("a list and more", file("a.json", b'[{"prompt": "Hi"}] 3'), {}, "a.json: not JSON at column 20: Extra data"),
    ("a split that is not saved", saved("set:dev", train=ROWS, test=ROWS), {},
     "set has no split dev; there are test, train: write set:test"),
    ("a split of one data set", saved("set:dev", only=ROWS), {}, "set is a data set without splits; remove :dev"),
    ("a split without shards", folder("set:dev", train_jsonl=lines()), {},
     "set has no split dev; there are train: write set:train"),
    ("shards of several configs", folder("set", a__train_jsonl=lines(), b__train_jsonl=lines()), {},
     "set has files in several folders (a, b)"),
    ("shards of several kinds", folder("set", a_jsonl=lines(), b_csv=table()), {},
     "set has files of several formats (.csv, .jsonl)"),
    ("an empty folder", folder("set"), {}, "set has no JSON, JSONL, CSV, TSV or parquet files; give a file, or"),
    ("hub without a config", hub("hub:who/what"), {}, "cannot load hub:who/what: ValueError: Config name is missing"),
    ("hub with too many names", lambda _: "hub:a:b:c:d", {},
     "'hub:a:b:c:d' is not the name of a data set; write hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT"),
    ("hub with code", script, {}, "cannot load hub:who/what: RuntimeError: Dataset scripts are no longer supported"),
    ("no prompt", jsonl(*QUESTIONS), {}, "rows.jsonl, line 1: no prompt; found question, target, n; set task.columns: "
     "{prompt: question}"),
    ("no prompt, and some named", jsonl({"Instruction": "Hi", "b": 1}), {"columns": {"answer": "b"}},
     "rows.jsonl, line 1: no prompt; found Instruction, b; set task.columns: {answer: b, prompt: Instruction}"),
    ("no prompt, a conversation", jsonl({"conversation": [ASKED]}), {},
     "no prompt; found conversation; set task.columns: {messages: conversation}"),
    ("no prompt, nothing like it", jsonl({"xyz": "Hi"}), {},
     "no prompt; found xyz; set task.columns: {prompt: COLUMN}, with its name in place of COLUMN"),
    ("an unknown column", jsonl(*QUESTIONS), {"columns": {"prompt": "questions"}}, "rows.jsonl, line 1: "
     "task.columns: no column 'questions' for prompt (did you mean question?); found question, target, n"),
    ("an unknown column of a reward", jsonl(*QUESTIONS), {"columns": {"prompt": "question", "answer": "gold"}},
     "rows.jsonl: task.columns: no column 'gold' for answer; found question, target, n"),
    ("columns that collide", jsonl({"prompt": "Hi", "question": "Ho"}), {"columns": {"prompt": "question"}},
     "line 1: task.columns renames 'question' to prompt, but there is a column prompt; rename that one too, as in "
     "{prompt: question, own_prompt: prompt}"),
    ("a row with a column of the task's own name in place of the other", jsonl({"question": "Hi"}, {"prompt": "Ho"}),
     {"columns": {"prompt": "question"}},
     "rows.jsonl, line 2: task.columns: no column 'question' for prompt; found prompt"),
    ("an answer alone", jsonl({"messages": [SAID]}), {}, "line 1: messages has only an assistant message"),
    ("messages as text", jsonl({"messages": "Hi"}), {}, "line 1: messages is 'Hi'; expected a list of messages"),
    ("ShareGPT's tools", jsonl({"conversations": [{"from": "function_call", "value": "f()"}]}), {},
     "line 1: a message is from 'function_call'; expected human, gpt or system"),
    ("a picture", jsonl({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]}), {},
     "line 1: a message has a part of type 'image_url'; only parts of type 'text' are read"),
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("write", "settings", "outcome"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_load_accepts_or_rejects_each_format(write, settings, outcome, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = str(write(tmp_path))
    task = made(train_data=source, test_data=source, **settings)
    if not isinstance(outcome, str):
        assert list(task.load_data(0).train) == outcome
        return
    with pytest.raises(EvoalignError) as caught:
        task.load_data(0)
    assert outcome in str(caught.value) and str(caught.value).isprintable()
    assert not (tmp_path / "was_run").exists()


def test_text_outside_the_prompt_is_noted_unless_a_reward_or_the_prompt_has_it(tmp_path):
    row = {"prompt": "Who won?", "context": "The cup of 1930.", "passage": "Who won?"}
    path = str(tmp_path / jsonl(row)(tmp_path))
    task = made(train_data=path, test_data=path)
    task.load_data(0)
    assert ["context" in note and "passage" not in note for note in task.notes] == [True]
    task = made(reward=lambda completions, context: [0.0 for _ in completions], train_data=path, test_data=path)
    task.load_data(0)
    assert not task.notes


def made(name="custom", reward=length, **settings):
    return create(TaskConfig(name=name, **settings), [reward] if name == "custom" else None)


def test_columns_rejects_renaming_a_column_twice():
    with pytest.raises(ValidationError, match="prompt and question both rename the column q"):
        TaskConfig(columns={"prompt": "q", "question": "q"})
    assert not {"columns", "system_prompt"} & TaskConfig().model_dump().keys()  # old configs are as they were


@pytest.mark.parametrize(("name", "row", "columns", "lacks"), [
    ("conciseness", {"Instruction": "Hi", "output": "Ho"}, {"prompt": "Instruction", "target": "output"}, ""),
    ("conciseness", {"question": "Hi", "output": "Ho"}, {}, "{prompt: question, target: output}"),
    ("countdown", {"nums": [1, 2], "target": 3}, {"numbers": "nums"}, ""),
    ("countdown", {"nums": [1, 2], "target": 3}, {}, "found nums, target; set task.columns: {numbers: nums}"),
])  # fmt: skip
def test_every_task_renames_columns(name, row, columns, lacks, tmp_path):
    path = str(tmp_path / jsonl(row)(tmp_path))
    task = made(name, prompt="chat", columns=columns, train_data=path, test_data=path)
    if lacks:
        with pytest.raises(DataError, match=re.escape(lacks)):
            task.load_data(0)
    else:
        (found,) = task.load_data(0).test
        assert list(found.values()) == list(row.values()) and task.prompt(found)[-1]["role"] == "user"


def test_rewards_get_the_last_assistant_message_as_completion_column(tmp_path):
    def right(completions, completion):
        return [float(c[0]["content"] == a) for c, a in zip(completions, completion, strict=True)]

    path = str(tmp_path / jsonl({"messages": [ASKED, SAID]})(tmp_path))
    task = made(reward=right, train_data=path, test_data=path, gold="completion")
    (row,) = task.load_data(0).test
    assert task.rewards(["Ho", "Hu"], [row, row]) == [1.0, 0.0]
    assert task.gold(row) == "Ho"


def test_system_prompt_is_prepended_if_there_is_none_and_hidden_from_rewards():
    seen = []

    def spy(prompts, completions):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    task, row = made(reward=spy, prompt="chat", system_prompt="Be brief."), {"prompt": "Hi"}
    assert task.prompt(row) == [SYSTEM, ASKED] and row == {"prompt": "Hi"}
    task.rewards(["a", "b"], [row, {"prompt": [ASKED]}])
    assert seen == ["Hi", [ASKED]]
    chat = made(system_prompt="Be brief.")
    assert chat.prompt({"prompt": [ASKED]}) == [SYSTEM, ASKED]
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Be long."}, ASKED]
        assert chat.prompt({"prompt": own}) == own
    concise = made("conciseness", system_prompt="Be brief.")
    assert concise.prompt({"prompt": "Hi", "target": "Ho"}) == [SYSTEM, ASKED]
    found = made("countdown", prompt="chat_opened", system_prompt="Be brief.").prompt({"numbers": [1], "target": 1})
    assert found[0] == SYSTEM and [m["role"] for m in found] == ["system", "user", "assistant"]
