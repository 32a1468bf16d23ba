# SPDX-License-Identifier: Apache-2.0
"""Runs from elsewhere, made by someone who wants to run code, kill the process or write on the terminal."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import digest, relinked
from families import build, make_config
from safetensors.torch import load_file, save_file

from evoalign import engines, tokens
from evoalign import setup as parts
from evoalign.errors import CheckpointError, EvoalignError, JournalError, ModelError
from evoalign.models.files import WholeModel, load_whole
from evoalign.rundir import checkpoint, files, journal, parquet
from evoalign.spaces.lora import Lora
from evoalign.training import replay as replaying

GOLDEN = Path(__file__).parents[1] / "golden" / "0.1.0"
ESC = "\x1b]0;owned\x07\x1b[2J"


# --- code -----------------------------------------------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path("owned").touch()
def reward(completions, **kwargs): return [0.0] * len(completions)
"""
CODE = {
    "reward": "task: {name: custom, rewards: ['evil.py:reward']}",
    "task": "task: {name: 'evil:Task'}",
    "space": "space: {name: 'evil:Space'}",
}


@pytest.fixture(params=list(CODE))
def named(request, tmp_path) -> str:
    """A run that names code, in the folder of that code; how its config says so."""
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(f"es: {{sigma: 0.01}}\n{CODE[request.param]}\n")
    (tmp_path / "run/journal.jsonl").touch()
    (tmp_path / "mine.yaml").write_text("evaluation: {max_tokens: 4}\n")
    (tmp_path / "code.yaml").write_text(CODE[request.param] + "\n")
    return request.param


@pytest.mark.parametrize("words", [[], ["-c", "mine.yaml"], ["-s", "evaluation.max_tokens=4"]], ids=str)
def test_a_run_does_not_say_what_code_runs(words, named, run, tmp_path):
    done = run("eval", "run", *words)
    assert done.code == 2 and "'evil" in done.err and "--config run/config.yaml" in done.err
    if named == "space" and not words:  # another task does not bring it
        done = run("eval", "run", "--task", "conciseness")
        assert done.code == 2 and "space.name to 'evil:Space'" in done.err
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("file", ["run/config.yaml", "./run/../run/config.yaml", "code.yaml"])
def test_the_users_own_word_for_it_is_taken(file, named, run):
    """The next thing in the way is that this run has no weights, or that there is no such module to import."""
    for words in (["-c", file], ["-c", "mine.yaml", "-c", file]):
        done = run("eval", "run", *words)
        assert done.code == 2, done.err
        assert "run is a run without a checkpoint" in done.err or "no module named 'evil'" in done.err, (
            "tried to load it"
        )


def test_weights_in_pickle_form_are_not_read(tmp_path):
    folder = build("llama", tmp_path / "model")
    config = make_config(folder)
    served = parts.serve(config)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"in 'pytorch_model\.bin', a pickle, which is not read") as caught:
        engines.create(config, tokens.load(config.model))
    assert "\n" not in str(caught.value)
    (folder / "pytorch_model.bin").rename(folder / "weights.bin")
    with pytest.raises(ModelError, match=r"it has no model\.safetensors.*convert it to safetensors"):
        load_whole(str(folder), None, torch.float32, "mine")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        WholeModel(str(folder), None, torch.float32)(tmp_path / "saved", served.engine.state())
    served.close()


@pytest.mark.parametrize(("index", "message"), [(None, "names 'weights.bin'; convert it"), ("[]", "is damaged")])
def test_an_index_that_names_pickles(index, message, tmp_path):
    """The model library would unpickle them, whatever it was asked for."""
    folder = build("llama", tmp_path / "model")
    config, weights = make_config(folder), load_file(folder / "model.safetensors")
    torch.save(weights, folder / "weights.bin")
    (folder / "model.safetensors").unlink()
    whole = json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "weights.bin")})
    (folder / "model.safetensors.index.json").write_text(whole if index is None else index)
    with pytest.raises(ModelError, match=message):
        engines.create(config, tokens.load(config.model))
    with pytest.raises(ModelError, match=message):
        load_whole(str(folder), None, torch.float32, "mine")


# --- journals whose chain was made anew -----------------------------------------------------------------------------


def forge(file: Path, source: str = "lora", header: Mapping[str, Any] = {}, update: Mapping[str, Any] = {}) -> Path:
    """A golden journal with other values (dotted names) in its header and first update, and every hash made right."""
    lines = [json.loads(text) for text in (GOLDEN / f"{source}.jsonl").read_text().splitlines()]
    for line, changes in ((lines[0], header), (lines[1], update)):
        for name, value in changes.items():
            *path, last = name.split(".")
            place = line
            for part in path:
                place = place[part]
            place[last] = value
    lines[0]["config_hash"] = digest(lines[0]["config"])
    file.write_text(relinked(lines))
    return file


def test_a_forged_journal_is_read(tmp_path):
    """Else the tests below would prove nothing."""
    same = forge(tmp_path / "j")
    assert same.read_bytes() == (GOLDEN / "lora.jsonl").read_bytes()
    log = journal.read(forge(tmp_path / "k", header={"config.seed": 6}, update={"sigma": 0.5}))
    assert log.damage is None and log.sealed == 4


HEADERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a rank beyond memory": ("lora", {"config.lora.rank": 10**9}, r"lora.rank: 1000000000 exceeds"),
    "a rank beyond integers": ("lora", {"config.lora.rank": 10**30}, r"lora.rank: Input should be less than or equal"),
    "a low rank beyond memory": ("lowrank", {"config.lowrank.rank": 10**9}, r"lowrank.rank: 1000000000 exceeds"),
    "a config without es": ("lora", {"config": {}}, r"line 1 holds an invalid config: missing setting es"),
    "two wrong settings": (
        "lora", {"config.seed": -1, "config.lora.rank": 0}, r"line 1 .*invalid config: seed: .*; lora\.rank: ",
    ),
    "nobody's home": ("lora", {"config.model.name": "~nobody-of-that-name/model"}, "no user of that name"),
    "a nul in a name": ("lora", {"config.model.name": "./a\0b"}, "no folder"),
    "code": ("lora", {"config.space": {"name": "evil:Space"}}, r"space\.name to 'evil:Space'"),
    "control characters": ("lora", {"config.model.name": f"./{ESC}"}, "no folder"),
    "control characters in a setting": ("lora", {"config.task.name": "countdown", f"config.{ESC}": 1}, "unknown"),
    "a line that breaks": ("lora", {"config.space": {"name": "a:b\n\x1b[1A"}}, r"space\.name"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_one_line(name, run, tmp_path):
    source, header, message = HEADERS[name]
    file = forge(tmp_path / "journal.jsonl", source, header)
    done = run("replay", file)
    assert done.code == 2
    with pytest.raises(EvoalignError, match=message):
        replaying.replay(file)
    assert done.err.replace("\n", "").isprintable() and done.err.count("\n") <= 2, done.err
    shown = run("journal", file)
    assert shown.code == 0 and "\x1b" not in shown.out + shown.err


UPDATES: dict[str, tuple[str, dict[str, Any], str]] = {
    "noise of no number": ("lora", {"members": [0, 1, 2, 2**32]}, "line 2 has an invalid members.3"),
    "a generation of no number": ("lora", {"generation": 2**70}, "line 2 has an invalid generation"),
    "another generation": ("lora", {"generation": 3}, "generation 3 is not index 0"),
    "nobody": ("lora", {"members": [], "signs": [], "scores": [], "coefficients": []}, "line 2 has an invalid members"),
    "a decay unheard of": ("full", {"decay": 0.01}, "an update has decay 0.01, but es.decay is 0"),
    "noise of no width": ("lowrank", {"sigma": 0.0}, "generation 1 has weights_hash"),
    "numbers that overflow": (
        "lora", {"coefficients": [1e308] * 4, "scores": [1e308] * 4}, "generation 1 has weights_hash",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.filterwarnings("error")
def test_a_hostile_update_is_one_line(name, run, tmp_path):
    source, update, message = UPDATES[name]
    header = {"config.es.decay": 0.0} if "decay" in update else {}
    done = run("replay", forge(tmp_path / "journal.jsonl", source, header, update))
    assert done.code == 2 and done.err.count("\n") == 1 and message in done.err, done.err
    shown = run("journal", tmp_path / "journal.jsonl")
    assert shown.code in (0, 2) and "Traceback" not in shown.err


def test_settings_that_only_cost_are_not_taken_over(tmp_path):
    engine = {"name": "transformers", "device": "cuda:7", "threads": 4096, "memory_gib": 1e6, "max_rows": 10**9}
    file = forge(tmp_path / "j", header={"config.engine": engine})
    config = replaying.config_of(journal.read(file))
    assert config.engine == type(config.engine)()
    threads = torch.get_num_threads()
    assert replaying.replay(file) == journal.read(file).generations[-1].weights_hash
    assert torch.get_num_threads() == threads


def test_a_config_that_is_not_the_one_of_its_hash(tmp_path):
    file = tmp_path / "j"
    first = json.loads((GOLDEN / "lora.jsonl").read_text().splitlines()[0])
    first["config"]["seed"] = 6
    file.write_text(relinked([first]))
    with pytest.raises(JournalError, match=r"line 1 has an invalid record: .*config_hash is not that of config"):
        journal.read(file)


@pytest.mark.parametrize("depth", [10, 200, 300, 330, 400, 500, 900, 970, 980, 990, 1100])
def test_a_config_nested_deep_is_one_line(depth, tmp_path):
    """Written by hand: the library would not write what is so deep."""
    nested = '{"model":' * depth + "0" + "}" * depth
    fields = json.loads((GOLDEN / "lora.jsonl").read_text().splitlines()[0])
    fields["config_hash"] = hashlib.sha256(nested.replace(":", ": ").encode()).hexdigest()
    texts = {k: json.dumps(v, sort_keys=True, separators=(",", ":")) for k, v in fields.items()} | {"config": nested}

    def dumped() -> str:
        return "{" + ",".join(f'"{k}":{texts[k]}' for k in sorted(texts)) + "}"

    del texts["hash"]
    texts["hash"] = json.dumps(hashlib.sha256(dumped().encode()).hexdigest())
    (tmp_path / "j").write_text(dumped() + "\n")
    with pytest.raises(EvoalignError):
        replaying.replay(tmp_path / "j")


@pytest.mark.parametrize("field", ["device", "versions.torch", "versions.evil", "config.model.name", "space"])
def test_a_journal_never_writes_on_the_terminal(field, run, tmp_path):
    value = f"{ESC}\u202e\x9b2J [bold]"
    done = run("journal", forge(tmp_path / "j", header={field: value}))
    assert done.code == 0 and "\\x1b]0;owned\\x07" in done.out and "[bold]" in done.out
    assert not set(done.out) & set("\x1b\x07\x9b\u202e")


def test_a_setting_that_writes_on_the_terminal(tmp_path):
    with pytest.raises(JournalError, match=r"invalid \\u001b\]0;owned") as caught:
        journal.read(forge(tmp_path / "j", header={ESC: 1}))
    assert str(caught.value).isprintable()


def test_a_model_section_that_is_none(run, tmp_path):
    assert run("journal", forge(tmp_path / "j", header={"config.model": [1]})).code == 0


def test_memory_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    """A real allocation that no machine grants."""
    monkeypatch.setattr(Lora, "start", lambda *_: torch.empty(2**46, dtype=torch.float32))
    with pytest.raises(ModelError, match=r"space lora evolves do not fit the memory; lower lora\.rank"):
        parts.serve(make_config("tiny"))


def test_other_errors_of_the_engine_are_not_called_memory(monkeypatch):
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("something else")

    monkeypatch.setattr(Lora, "start", broken)
    with pytest.raises(RuntimeError, match="something else"):
        parts.serve(make_config("tiny"))


# --- saved means ----------------------------------------------------------------------------------------------------

MARK = checkpoint.Mark(1, "a" * 64, "b" * 64, 0.5, validation=0.25)


@pytest.fixture
def saved(tmp_path) -> Path:
    with files.filled(tmp_path / "mean") as folder:
        save_file({"w": torch.zeros(2)}, folder / checkpoint.ADAPTER)
        checkpoint.seal(folder, MARK)
    assert checkpoint.verify(tmp_path / "mean") == MARK == checkpoint.mark_of(tmp_path / "mean")
    return tmp_path / "mean"


RECORDS: dict[str, object] = {
    "no record": [], "a text": "x", "a deep one": None, "a generation in words": {"generation": "1"},
    "a generation that is true": {"generation": True}, "a generation that is none": {"generation": -1},
    "a generation beyond words": {"generation": 2**40}, "a generation that is a list": {"generation": [1]},
    "a hash of no length": {"weights_hash": ""}, "a place that is none": {"journal": None},
    "a reward in words": {"reward": "1"}, "a reward beyond floats": {"reward": 10**400},
    "a validation reward in words": {"validation": "1"}, "a validation reward beyond floats": {"validation": 10**400},
    "files as a list": {"files": ["a"]}, "files as a text": {"files": "a"}, "files without hashes": {"files": {"a": 1}},
    "another folder's file": {"files": {"../secret": "0" * 64}}, "the folder above": {"files": {"..": "0" * 64}},
    "a file anywhere": {"files": {"/etc/passwd": "0" * 64}}, "a file of Windows": {"files": {"a\\b": "0" * 64}},
    "a name with a nul": {"files": {"a\0b": "0" * 64}}, "a name that writes": {"files": {ESC: "0" * 64}},
    "a name that breaks": {"files": {"a\n": "0" * 64}}, "a name without an end": {"files": {"a" * 10_000: "0" * 64}},
    "more": {"more": 1}, "a key of the class": {"__dataclass_self__": 1}, "another release": {"format_version": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_an_odd_record_is_passed_over(name, saved):
    """CheckpointError is what a resumed run passes a checkpoint over for."""
    (saved.parent / "secret").write_text("")
    file, change = saved / checkpoint.RECORD, RECORDS[name]
    if isinstance(change, dict):
        record = {k: v for k, v in json.loads(file.read_text()).items() if k != "hash"} | change
        file.write_text(checkpoint._record_text(record))  # pyright: ignore[reportPrivateUsage]
    else:
        file.write_text("[" * 100_000 if change is None else json.dumps(change))
    with pytest.raises(CheckpointError, match=r"evoalign\.json is missing or damaged") as caught:
        checkpoint.verify(saved)
    assert checkpoint.mark_of(saved) is None
    assert str(caught.value).isprintable()


def test_an_optimizers_state_of_another_shape_is_passed_over(tmp_path):
    served = parts.serve(make_config("tiny", es={"optimizer": "adam"}))
    layout, state = served.layout, dict(served.engine.state())
    served.close()
    first = layout.tensors[0].name

    def saved(slots: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor] = state) -> Path:
        save_file({checkpoint.PEFT_PREFIX + k: v for k, v in state.items()}, tmp_path / checkpoint.ADAPTER)
        save_file({**slots}, tmp_path / checkpoint.OPTIMIZER)
        return tmp_path

    good = {f"mean:{first}": torch.zeros(layout[first].shape), f"count:{first}": torch.zeros(())}
    assert checkpoint.load(saved(good), layout)[1].keys() == good.keys()
    odd = {f"mean:{first}": (3,), "mean:other": (2, 1), "count:x": (2,), "": (1,)}
    cases = [({name: torch.zeros(shape)}, state) for name, shape in odd.items()]
    for slots, tensors in [*cases, (good, {k: v[:0] for k, v in state.items()})]:
        with pytest.raises(CheckpointError, match=r"has shape \(.*\), not"):
            checkpoint.load(saved(slots, tensors), layout)


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
@pytest.mark.skipif(os.name != "posix", reason="no umask")
def test_saved_files_are_as_open_as_the_user_wants(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        with files.filled(tmp_path / "mean") as folder:
            save_file({"w": torch.zeros(2)}, folder / "a.safetensors")
            (folder / "b.json").write_text("{}")
        assert os.umask(umask) == umask, "it is put back"
    finally:
        os.umask(before)
    assert {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "mean").iterdir()} == {mode}


def test_a_full_disk_leaves_no_halves(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    files.write_text(tmp_path / "a", "old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_text(tmp_path / "a", "new")
    with pytest.raises(OSError, match="No space"):
        parquet.write(tmp_path / "b.parquet", [{"x": 1}])
    with pytest.raises(OSError, match="No space"), files.filled(tmp_path / "c") as folder:
        (folder / "d").write_text("e")
    assert [f.name for f in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


# --- the journal as a table -----------------------------------------------------------------------------------------


def test_a_table_for_a_pipe_is_not_cut(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copy(GOLDEN / "lora.jsonl", tmp_path / "j")
    done = run("journal", "j")
    log = journal.read(tmp_path / "j")
    for recorded in log.generations:
        row = next(line for line in done.out.splitlines() if str(recorded.weights_hash)[:16] in line)
        assert "…" not in row and row.split("│")[1].strip() == str(recorded.update.generation + 1)
