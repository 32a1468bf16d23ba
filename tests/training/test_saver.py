# SPDX-License-Identifier: Apache-2.0
"""Means that a thread writes while the run goes on."""

import threading

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from evoalign import setup
from evoalign.config import from_dict
from evoalign.errors import CheckpointError, EvoalignError
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import Mark
from evoalign.training import saver as module
from evoalign.training import saving
from evoalign.training.saver import Saver
from evoalign.types import Update, population

MARKS = [Mark(generation, str(generation) * 64, "0" * 64) for generation in range(3)]


@pytest.fixture(params=["lora", "lowrank", "full"])
def served(request):
    es = {"sigma": 0.01, "population_size": 4, "optimizer": "momentum"} if request.param == "lora" else {"sigma": 0.01}
    model = {"name": "tiny", "dtype": "bfloat16" if request.param == "full" else "float32"}
    found = setup.serve(from_dict({"model": model, "space": request.param, "es": es}))
    yield found
    found.engine.close()


def move(served, generation):
    members = population(4)
    served.engine.apply(Update(generation, generation, members, (1.0, -1.0, 0.5, -0.5), 0.01, 0.01))


def tensors(folder):
    return {(file.name, name): t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same(folder, other):
    assert sorted(f.name for f in folder.iterdir()) == sorted(f.name for f in other.iterdir())
    found, wanted = tensors(folder), tensors(other)
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
    for file in folder.glob("*.json"):
        assert file.name == checkpoint.RECORD or file.read_bytes() == (other / file.name).read_bytes()


def test_a_mean_written_while_the_next_one_is_made_has_the_bits_of_one_written_at_once(served, tmp_path, monkeypatch):
    gate, loads, write = threading.Event(), list[threading.Thread](), saving.write
    load = AutoModelForCausalLM.from_pretrained

    def noted(*given, **options):
        loads.append(threading.current_thread())
        return load(*given, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    monkeypatch.setattr(saving, "write", lambda *given, **options: (gate.wait(60), write(*given, **options)))
    saver, written = Saver(served), []
    for generation in (1, 2):
        gate.set()
        move(served, generation)
        saving.save(served, tmp_path / f"at_once_{generation}", MARKS[generation])
        gate.clear()
        saver.save(tmp_path / f"{generation}", MARKS[generation], lambda: written.append(1))
        move(served, 7)  # before the thread has begun to write
        assert len(written) == generation - 1
        gate.set()
        saver.wait()
        assert_same(tmp_path / f"{generation}", tmp_path / f"at_once_{generation}")
        assert checkpoint.verify(tmp_path / f"{generation}") == MARKS[generation]
    saver.close()
    once = 1 if served.space.evolves_model else 0
    assert len(written) == 2 and len(loads) == 3 * once, "two at once, and one of the saver"
    assert {*loads} <= {threading.main_thread()}, "loading sets torch's default dtype for all threads"


def test_the_next_mean_is_not_copied_over_one_that_is_being_written(served, tmp_path, monkeypatch):
    gate, write = threading.Event(), saving.write
    saving.save(served, tmp_path / "at_once", MARKS[1])
    monkeypatch.setattr(saving, "write", lambda *given, **options: (gate.wait(60), write(*given, **options)))
    saver = Saver(served)
    saver.save(tmp_path / "first", MARKS[1], lambda: None)
    move(served, 1)
    second = threading.Thread(target=saver.save, args=(tmp_path / "second", MARKS[2], lambda: None))
    second.start()
    second.join(0.2)
    gate.set()
    second.join()
    saver.free()
    saver.close()
    assert_same(tmp_path / "first", tmp_path / "at_once")
    assert checkpoint.verify(tmp_path / "second") == MARKS[2]


def test_saving_never_changes_the_umask_of_other_threads(served, tmp_path, monkeypatch):
    monkeypatch.setattr("os.umask", lambda mask: pytest.fail("the umask is that of all threads"))
    saving.save(served, tmp_path / "a", MARKS[1])


def test_an_error_of_the_thread_is_raised_by_the_next_call(served, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write", full)
    saver = Saver(served)
    saver.save(tmp_path / "a", MARKS[1], lambda: None)
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    saver.check()
    saver.save(tmp_path / "b", MARKS[2], lambda: None)
    with pytest.raises(OSError, match="No space left"):
        saver.save(tmp_path / "c", MARKS[1], lambda: None)
    saver.close()


@pytest.mark.parametrize(
    ("raised", "expected", "value"),
    [
        (MemoryError(), EvoalignError, r"checkpoint\.every 0"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), EvoalignError, r"checkpoint\.every 0"),
        (RuntimeError("a mistake"), RuntimeError, "a mistake"),
    ],
)
def test_running_out_of_memory_in_the_thread_names_the_setting(raised, expected, value, served, tmp_path, monkeypatch):
    def write(*given):
        raise raised

    monkeypatch.setattr(saving, "write", write)
    saver = Saver(served)
    saver.save(tmp_path / "a", MARKS[1], lambda: None)
    with pytest.raises(expected, match=value):
        saver.wait()
    saver.close()


def test_a_mean_that_does_not_fit_the_host_twice_is_written_at_once(served, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_on_host", lambda: 1000)
    saver, written = Saver(served), []
    saver.save(tmp_path / "a", MARKS[1], lambda: written.append(1))
    assert written == [1] and checkpoint.verify(tmp_path / "a") == MARKS[1]
    saver.save(tmp_path / "a", MARKS[1], lambda: written.append(2))
    assert written == [1, 2], "it is there, and not written again"
    saver.close()
    with pytest.raises(CheckpointError):
        checkpoint.verify(tmp_path / "b")
