# SPDX-License-Identifier: Apache-2.0
"""A journal on another machine: what it says of the one it was made on, and what replay says where bits differ."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from command_line import caller
from small_runs import UNCHECKED, told_by

from evoalign import cli
from evoalign.config import from_dict
from evoalign.engines.transformers.engine import _computing_with
from evoalign.errors import MachineError, ResumeError
from evoalign.kernels import compiled, products
from evoalign.rundir import journal
from evoalign.spaces.base import MeanPart, Space
from evoalign.spaces.lowrank import LowRank
from evoalign.training import replay as replaying
from evoalign.training import saving

GOLDEN = Path(__file__).parents[1] / "golden"
OLD = GOLDEN / "0.1.0" / "lowrank.jsonl"


def config(folder, space="lowrank", generations=2, **more):
    return {
        "seed": 5, "output_dir": str(folder), "space": space, "task": {"name": "conciseness", "batch_size": 1},
        "model": {"name": "tiny"}, "engine": {"threads": 1, "device": "cpu"}, "sampling": {"max_tokens": 2},
        "evaluation": {"max_tokens": 1}, "lowrank": {"rank": 3, "target_modules": ["q_proj", "down_proj"]},
        "checks": UNCHECKED, "report": False, "tracking": {"completions_every": 0},
        "es": {"num_generations": generations, "population_size": 3, "antithetic": False, "sigma": 0.05,
               "learning_rate": 0.05}, **more,
    }  # fmt: skip


def train(folder, **more):
    told_by(config(folder, **more), resume=folder.exists())
    return folder


def rewritten(path, to, change):
    """A journal with another header, its hashes made anew."""
    previous, lines = journal.GENESIS, []
    for number, text in enumerate(path.read_text().splitlines()):
        line = {k: v for k, v in json.loads(text).items() if k != "hash"} | {"previous": previous}
        if number == 0:
            change(line)
        previous = journal._digest(line)
        lines.append(journal._dump(line | {"hash": previous}).decode())
    to.write_text("\n".join(lines) + "\n")
    return to


def as_before(header):
    """As releases wrote it that knew neither machine nor summation."""
    del header["machine"], header["summation"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("machines") / "run", checkpoint={"every": 1, "keep_last": 9})


def test_the_header_names_the_sum_and_the_machine(run):
    header = journal.read(run / "journal.jsonl").header
    assert header.summation == header.sums == "ordered"
    capability = torch.backends.cpu.get_cpu_capability()
    static = {"library": "static decoder"} if compiled.here() else {}
    assert header.machine == {"capability": capability, "threads": "1", **static}
    assert header.versions["torch"] == importlib.metadata.version("torch")


def test_the_threads_of_a_run_are_not_left_to_the_next_in_its_process(tmp_path):
    before = torch.get_num_threads()
    run = train(tmp_path / "run", generations=1, engine={"device": "cpu", "threads": before + 1})
    assert journal.read(run / "journal.jsonl").header.machine["threads"] == str(before + 1)
    assert torch.get_num_threads() == before
    asked = [ExitStack(), ExitStack()]
    for k, one in enumerate(asked, 1):
        one.enter_context(_computing_with(before + k))
    asked[0].close()
    asked[0].close()
    assert torch.get_num_threads() == before + 2, "an engine is still open"
    asked[1].close()
    assert torch.get_num_threads() == before


def test_an_old_journal_keeps_its_sum_also_for_what_is_added_to_it(made):
    log = journal.read(OLD)
    assert {r.update.summation for r in log.generations} == {log.header.sums} == {"library"}
    for space in ("lora", "full"):  # whose terms have always been added in order
        assert journal.read(OLD.with_name(f"{space}.jsonl")).header.sums == "ordered"
    engine = replaying.config_of(journal.read(made / "journal.jsonl")).engine
    assert (engine.device, engine.threads) == ("cpu", 1), "a library adds on the kind of device that it added on"
    assert replaying.config_of(journal.read(OLD.with_name("full.jsonl"))).engine.device == "auto"


@pytest.mark.parametrize(("device", "optimizer", "sums"), [
    ("cpu x86_64", "sgd", "library"), ("NVIDIA H200", "sgd", "ordered"), ("NVIDIA H200", "adam", "library"),
])  # fmt: skip
def test_which_sum_a_journal_had_that_does_not_say(tmp_path, device, optimizer, sums):
    def change(header):
        header["device"] = device
        header["config"]["es"]["optimizer"]["name"] = optimizer
        whole = json.dumps(header["config"], sort_keys=True).encode()
        header["config_hash"] = journal.hashlib.sha256(whole).hexdigest()

    assert journal.read(rewritten(OLD, tmp_path / "journal.jsonl", change)).header.sums == sums


def test_a_run_of_before_is_resumed_with_its_own_sum(tmp_path, monkeypatch):
    """And saved as it goes: its journal brings it back on this kind of machine alone."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr(LowRank, "summation", "library")
        train(run, generations=1)
        train(whole, generations=10)
    for folder in (run, whole):
        rewritten(folder / "journal.jsonl", folder / "journal.jsonl", as_before)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    train(run, generations=10)
    got, want = (journal.read(folder / "journal.jsonl").generations for folder in (run, whole))
    assert [g.weights_hash for g in got] == [g.weights_hash for g in want]
    assert {g.update.summation for g in got} == {"library"}
    assert [f.name for f in (run / "checkpoints").iterdir() if f.name.endswith("10")]


@pytest.mark.parametrize("summation", ["library", "own"])
def test_what_may_be_lost_with_its_machine_is_saved_by_default(summation):
    """Also of a space with a sum of its own, which says so."""
    for space, always in (("lora", 10), ("lowrank", 0), ("full", 0)):
        made = from_dict(config("runs/none", space))
        assert saving.every(made) == always and saving.every(made, summation) == 10
        assert saving.every(from_dict(config("runs/none", space, checkpoint={"every": 0})), summation) == 0

    class Own(LowRank):
        def gradient(self, *args):
            return super().gradient(*args).round(decimals=3)

    class Dense(Space):
        layout = None

        def accumulate(self, *args, **more):
            """Moves nothing."""

    made = from_dict(config("runs/none"))
    assert Own(made).summation == Dense(made).summation == "own" and Own(made).default_save_every == 10


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a library's sum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRank, "summation", "library")
        made = train(tmp_path_factory.mktemp("made") / "run", checkpoint={"every": 1, "keep_last": 9})
    assert replaying.replay(made) == journal.read(made / "journal.jsonl").generations[-1].weights_hash
    return made


@pytest.fixture
def elsewhere(made, monkeypatch):
    """That run, on a machine whose library adds in another order."""

    def other(self, layout, name, update, slices, total):
        for streams in reversed(list(self._weights(layout, name, update))):
            factors = self._served(layout, name, update, [streams], [1], slices, total.device)
            weight = self._weights(layout, name, update)[streams]
            total.add_((factors.b[0] * weight) @ factors.a[0])
        return total

    monkeypatch.setattr(LowRank, "_library_sum", other)
    return made


def test_a_sum_that_depends_on_the_machine_is_named_and_no_hash_claimed(elsewhere, tmp_path, monkeypatch, capsys):
    to = tmp_path / "to"
    for target in (elsewhere, elsewhere / "journal.jsonl"):
        said = caller(monkeypatch, capsys)("replay", target, "--to", to)
        assert said.code == cli.OTHER_MACHINE == 3
        assert "added by a library's matrix product, whose last bits depend on the machine" in said.err
        assert "the weights here are not the run's" in said.err
        assert 0 < float(said.err.split("the difference is ")[1].split(" of the distance moved")[0]) < 1e-5
        assert ("checkpoint generation_" if target.is_dir() else "summed in order") in said.err
        assert "weights_hash" not in said.out and not to.exists()


def test_another_update_is_no_matter_of_last_bits(elsewhere, monkeypatch):
    """Nor is one that the order of its sum has no bearing on."""
    for wrong in (lambda right: right * 1.5, lambda right: right * 0):

        def sums(self, layout, name, update, slices, total, wrong=wrong):
            self._add_products(layout, MeanPart(name, slices, total), update, len(update.members), 0.0)
            return total.copy_(wrong(total))

        monkeypatch.setattr(LowRank, "_library_sum", sums)
        for target in (elsewhere, elsewhere / "journal.jsonl"):
            with pytest.raises(ResumeError, match="but that is not why") as error:
                replaying.replay(target)
            assert not isinstance(error.value, MachineError)


def test_what_is_compared_was_saved_from_the_generation_on_that_differs(elsewhere, tmp_path):
    """And is whole: a damaged mean is no measure."""
    elsewhere = Path(shutil.copytree(elsewhere, tmp_path / "run"))
    first, second = sorted((elsewhere / "checkpoints").iterdir())
    next(second.glob("*.safetensors")).write_bytes(b"damaged")
    with pytest.raises(MachineError, match=f"differ from checkpoint {first.name},"):
        replaying.replay(elsewhere)
    next(first.glob("*.safetensors")).write_bytes(b"damaged")
    with pytest.raises(MachineError, match="summed in order"):
        replaying.replay(elsewhere)


def test_a_sum_that_may_not_depend_on_the_machine_is_another_error(run, monkeypatch):
    monkeypatch.setattr(products, "move", lambda *args: None)
    with pytest.raises(ResumeError, match="though it should not depend on the machine") as error:
        replaying.replay(run)
    assert not isinstance(error.value, MachineError)


SETTINGS = (
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "EVOALIGN_COMPILED": "0",
     "OMP_NUM_THREADS": "2"},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.last("avx2")
@pytest.mark.parametrize("settings", SETTINGS, ids=["least", "avx2"])
def test_other_instructions_come_to_the_same_weights(run, settings):
    program = "import sys\nfrom evoalign.training.replay import replay\nprint(replay(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(run / "journal.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings})
    assert done.stdout.strip() == journal.read(run / "journal.jsonl").generations[-1].weights_hash, done.stderr


@pytest.mark.skipif(not compiled.here(), reason="no C compiler made the library")
def test_a_run_that_goes_on_by_another_decoder_says_so(tmp_path, monkeypatch):
    """As where it was begun on a machine with a C compiler, and not where it was not."""
    for number, (library, warned) in enumerate((("1", False), ("1", False), ("0", True)), 1):
        monkeypatch.setenv("EVOALIGN_COMPILED", library)
        said = told_by(config(tmp_path / "run", generations=number), resume=number > 1)
        warning = "completions came from static decoder so far, and come from the usual library now"
        assert (warning in said) == warned, said
