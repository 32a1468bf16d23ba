# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped, killed, cut or damaged goes on as if nothing had happened, or says what is wrong."""

import json
import os
import re
import shutil
import signal
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import corruption
import kill_points
import pytest
from forked import Popen
from machine_dependent import skipped_elsewhere
from small_runs import read_rows, told_by

import evoalign
from evoalign.config import from_dict, load
from evoalign.engines.vllm.settings import VllmConfig
from evoalign.errors import CheckpointError, ConfigError, JournalError, ResumeError, RunExistsError, StoppedError
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.directory import saved_folders
from evoalign.rundir.identity import differences
from evoalign.rundir.own import load_own
from evoalign.training import replay as replaying

Traces = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains each space once."""
    return cache(lambda space: kill_points.train(space, tmp_path_factory.mktemp(space) / "run").path)


@pytest.fixture(scope="module", params=kill_points.SPACES)
def straight(request, trained):
    """A run that never stopped, and what it left."""
    folder = trained(request.param)
    return request.param, folder, kill_points.traces(folder)


@pytest.fixture(scope="module")
def lora(trained):
    return trained("lora")


@pytest.fixture
def copy(lora, tmp_path):
    return Path(shutil.copytree(lora, tmp_path / "run"))


def go_on(run, **sections):
    tree = kill_points.config("lora", run)
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return told_by(tree, resume=True)


def keep_lines(run, count):
    """Cut the journal after this many lines."""
    file = run / "journal.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:count]))


@pytest.mark.slow
@pytest.mark.first("-mid-save (weights)")
@pytest.mark.parametrize("point", kill_points.POINTS)
def test_killed_anywhere_it_ends_with_the_same_bits(straight, point, tmp_path):
    space, _, expected = straight
    kill_points.killed(space, point, 2, tmp_path / "run")
    kill_points.train(space, tmp_path / "run", resume=True)
    assert kill_points.traces(tmp_path / "run") == expected


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_killed_again_and_again(lora, tmp_path, half):
    """At every point, each time while it goes on from the death before."""
    for point in list(kill_points.POINTS)[half::2]:
        kill_points.killed("lora", point, 0, tmp_path / "run", resume=True)
    kill_points.train("lora", tmp_path / "run", resume=True)
    assert kill_points.traces(tmp_path / "run") == kill_points.traces(lora)


@pytest.mark.slow
def test_killed_before_the_journal_began(lora, tmp_path):
    for point in ("before the journal", "mid-journal-line (header)"):
        kill_points.killed("lora", point, 0, tmp_path / "run")
        kill_points.train("lora", tmp_path / "run", resume=point == "before the journal")
        assert kill_points.traces(tmp_path / "run") == kill_points.traces(lora)
        shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.last("lowrank", "full")
@pytest.mark.parametrize("space", kill_points.SPACES)
def test_random_damage_is_refused_by_name_or_recovered(space, tmp_path):
    found = corruption.outcomes(corruption.Bench(space, tmp_path), 40, 7)
    assert found.total() == 40
    assert {outcome for _, _, outcome in found} >= {"refused", "an older checkpoint"}


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(copy):
    keep_lines(copy, 7)
    folder = copy / "loras/generation_0003"
    (folder / "optimizer.safetensors").write_bytes(b"no")
    told = go_on(copy)
    assert f"warning: {folder / 'optimizer.safetensors'} was altered" in told
    assert kill_points.traces(copy)["journal"].count(b"\n") == 9


def test_a_damaged_evaluation_is_named_before_it_is_made_again(copy):
    keep_lines(copy, 3)
    file = copy / "results/completions/before.parquet"
    file.write_bytes(b"no")
    told = go_on(copy)
    assert f"warning: {file} was altered" in told and "budget.json was altered" not in told


@pytest.mark.slow
def test_a_saved_mean_of_another_run_is_passed_over(copy, tmp_path):
    other = kill_points.config("lora", tmp_path / "other") | {"seed": 6}
    told_by(other)
    whole = kill_points.traces(copy)
    for folder in saved_folders(copy):
        shutil.rmtree(folder)
    shutil.copytree(tmp_path / "other/loras", copy / "loras", dirs_exist_ok=True)
    keep_lines(copy, 7)
    assert "is not of this journal" in go_on(copy)
    assert kill_points.traces(copy)["journal"] == whole["journal"]


def test_an_altered_line_or_a_lost_journal_stops_it_and_the_lines_before_are_a_run(copy):
    path = copy / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], lines[5].replace(b'"sigma":0', b'"sigma":1'), *lines[6:]]))
    with pytest.raises(JournalError, match=r"line 6 was altered.*whole up to generation 2 \(line 5\)"):
        go_on(copy)
    whole = kill_points.traces(copy)
    path.write_bytes(b"".join(lines[:5]))
    go_on(copy)
    assert kill_points.traces(copy)["evaluation"] == whole["evaluation"]
    assert path.read_bytes() == b"".join(lines)
    path.unlink()  # which is no reason to begin anew
    with pytest.raises(JournalError, match="is missing or cut in its first line"):
        go_on(copy)
    assert saved_folders(copy)


def test_what_is_not_the_run_may_be_lost(copy):
    """Figures, metrics, manifest, config, the completions before: all of it is made again."""
    whole = kill_points.traces(copy)
    keep_lines(copy, 6)
    raw = (copy / "results/completions/before.parquet").read_bytes()
    for kept, broken in ((raw[: len(raw) // 2], b'{"generation": 0, "mea'), (None, None)):
        for name in ("config.yaml", "manifest.json"):
            (copy / name).unlink(missing_ok=True)
        shutil.rmtree(copy / "figures")
        for file, content in (("results/completions/before.parquet", kept), ("metrics.jsonl", broken)):
            (copy / file).unlink() if content is None else (copy / file).write_bytes(content)
        go_on(copy)
        found = kill_points.traces(copy)
        assert all(found[name] == whole[name] for name in ("journal", "evaluation", "rows"))
        assert (copy / "figures/evolution.png").is_file() or kept is None
        assert json.loads((copy / "manifest.json").read_text())["versions"]


def start(run):
    """The command line, with enough generations to be stopped in the middle."""
    tree = kill_points.config("lora", run)
    tree["es"]["num_generations"] = 400
    file = run.parent / "config.yaml"
    file.write_text(json.dumps(tree))
    with run.with_suffix(".err").open("wb") as err:
        process = Popen([sys.executable, "-m", "evoalign.cli", "train", str(file)], stderr=err)
    for _ in range(1200):
        time.sleep(0.05)
        if (run / "metrics.jsonl").is_file() or process.poll() is not None:
            return process
    raise AssertionError("it does not start")


@pytest.mark.slow
@pytest.mark.last("15-143")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_generation_saves_and_says_how_to_go_on(tmp_path, number, code):
    run = tmp_path / "run"
    process = start(run)
    process.send_signal(number)
    assert process.wait(60) == code
    err = run.with_suffix(".err").read_text()
    log = journal.read(run / "journal.jsonl")
    assert "stopping after this generation" in err
    assert f"stopped after generation {log.sealed} of 400; resume with: evoalign train {run} --resume" in err
    assert log.damage is None and log.sealed == len(log.generations) < 400
    assert checkpoint.verify(saved_folders(run)[-1]).generation == log.sealed
    assert len((run / "metrics.jsonl").read_text().splitlines()) == log.sealed


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once_and_loses_at_most_that_generation(tmp_path):
    process = start(tmp_path / "run")
    while process.poll() is None:  # the first may come between two generations
        process.send_signal(signal.SIGINT)
        time.sleep(0.005)
    assert process.poll() in (130, -signal.SIGINT), "the last one may come while Python ends"
    log = journal.read(tmp_path / "run/journal.jsonl").whole()
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert log.sealed >= 1 and 0 <= len(log.generations) - len(rows) <= 1


def test_stopped_and_gone_on_with_it_ends_the_same(lora, tmp_path):
    tree = kill_points.config("lora", tmp_path / "run")
    stops, before = [], signal.getsignal(signal.SIGTERM)

    def stop(generation):
        if generation.index in (0, 2, 3):  # 3 is the last one: its final test is left to the resumed run
            stops.append(generation.index)
            os.kill(os.getpid(), signal.SIGTERM)

    for expected in (1, 3, 4):
        with pytest.raises(StoppedError, match=f"stopped after generation {expected} of 4") as caught:
            told_by(tree, resume=True, on_generation=stop)
        assert caught.value.signal == signal.SIGTERM and ("max_hours" in str(caught.value)) == (expected < 4)
        assert not (tmp_path / "run/results/evaluation.json").exists()
    told_by(tree, resume=True, on_generation=stop)
    assert stops == [0, 2, 3] and kill_points.traces(tmp_path / "run") == kill_points.traces(lora)
    assert signal.getsignal(signal.SIGTERM) == before, "the handlers are as they were"


def test_a_stopped_run_ends_where_it_is_by_the_option_in_the_message(tmp_path):
    tree = kill_points.config("lora", tmp_path / "run")
    with pytest.raises(StoppedError) as caught:
        told_by(tree, on_generation=lambda generation: os.kill(os.getpid(), signal.SIGTERM))
    setting = re.search(r"--set (stopping\.max_hours=\S+)", str(caught.value))
    assert setting is not None
    told_by(load([tmp_path / "run/config.yaml"], [setting[1]]), resume=True)
    found = json.loads((tmp_path / "run/results/evaluation.json").read_text())
    assert found["generation"] == 1 and found["ending"]["reason"] == "time" and "reward" in found["after"]


def test_other_settings_or_another_engine_are_named(copy):
    for message, changes in (
        (
            "es.sigma is 0.01 in the run and 0.02 now; seed is 5 in the run and 8 now",
            {"es": {"sigma": 0.02}, "seed": 8},
        ),
        ("num_generations is 4 in the run and 3 now", {"es": {"num_generations": 3}}),
        ("engine.name is 'transformers' in the run and 'vllm' now", {"engine": {"name": "vllm"}}),
    ):
        with pytest.raises(ResumeError, match=message):
            go_on(copy, **changes)


def test_a_run_that_is_done_is_done_and_what_is_only_kept_or_told_may_change(copy):
    before = kill_points.traces(copy)
    assert "resumes after generation 4 of 4" in go_on(copy)
    assert kill_points.traces(copy) == before
    go_on(copy, checkpoint={"every": 0, "keep_last": 1}, evaluation={"every": 0}, checks={"control_every": 0})


@pytest.mark.slow
def test_a_run_that_ran_out_of_memory_may_take_smaller_batches(copy):
    keep_lines(copy, 5)
    told = go_on(copy, engine={"max_rows": 3}, seed=5)
    assert "warning: engine.max_rows is None in the run and 3 now" in told
    assert journal.read(copy / "journal.jsonl").sealed == 4


def test_settings_of_vllm_that_a_machine_decides_may_change():
    """Every one but those that choose the weights."""
    tree = {"es": {"sigma": 0.01}, "engine": {"name": "vllm"}}
    other = {
        "gpu_memory_gib": 24, "gpu_memory_utilization": 0.5, "kv_cache_gib": 2, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "max_model_len": 256, "enforce_eager": True, "attention_backend": "TRITON_ATTN",
        "population": "stock", "members": 3, "master": "host", "load_format": "dummy", "seed": 4,
    }  # fmt: skip
    split = {"tensor_parallel_size": 2}  # not with gpu_memory_gib
    assert set(other | split) == set(VllmConfig.model_fields) - {"name"}
    refused, warned = differences(from_dict({**tree, "engine": {"name": "vllm", **other}}), from_dict(tree))
    assert [line.split()[0] for line in refused] == ["engine.load_format", "engine.seed"]
    assert [line.split()[0] for line in warned] == sorted(f"engine.{n}" for n in set(other) - {"load_format", "seed"})
    assert "engine.max_num_seqs is 1024 in the run and 8 now" in warned
    refused, warned = differences(from_dict({**tree, "engine": {"name": "vllm", **split}}), from_dict(tree))
    assert (refused, warned) == ([], ["engine.tensor_parallel_size is 1 in the run and 2 now"])


@pytest.mark.slow
def test_a_longer_run_begins_as_the_shorter_one(tmp_path):
    def constant(output, generations):
        tree = kill_points.config("lora", output)
        tree["es"] = {"sigma": 0.01, "num_generations": generations, "population_size": 4}
        return tree

    told_by(constant(tmp_path / "long", 3))
    told_by(constant(tmp_path / "short", 2))
    told_by(constant(tmp_path / "short", 3), resume=True)
    assert kill_points.traces(tmp_path / "short")["journal"] == kill_points.traces(tmp_path / "long")["journal"]
    with pytest.raises(ResumeError, match="has 3 generations already"):
        told_by(constant(tmp_path / "short", 2), resume=True)


def test_another_base_model_a_planted_file_and_code_that_a_run_names_are_refused(copy, random_qwen2):
    log = journal.read(copy / "journal.jsonl")
    with pytest.raises(ResumeError, match="other base weights"), replaying.rebuilt(log, model=str(random_qwen2)):
        pass
    folder = saved_folders(copy)[-1]
    shutil.copy(folder / "adapter_model.safetensors", folder / "mean-00000.safetensors")
    with pytest.raises(CheckpointError, match="does not belong there"):
        checkpoint.verify(folder)
    with pytest.raises(CheckpointError):
        evoalign.evaluate(copy)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("name: conciseness", "name: somewhere:Task"))
    with pytest.raises(ConfigError, match=r"task\.name to .somewhere:Task"):
        load_own(copy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "every", "expected"),
    [
        ({"every": 1, "keep_last": 2, "keep_best": False}, 0, [5, 6]),
        ({"every": 2, "keep_last": 9, "keep_best": False}, 0, [2, 4, 6]),
        ({"every": 0, "keep_last": 1, "keep_best": False}, 1, [6]),
        ({"every": 0, "keep_last": 1, "keep_best": True}, 1, None),
    ],
)
def test_the_latest_and_the_best_stay(tmp_path, settings, every, expected):
    tree = kill_points.config("lora", tmp_path / "run") | {"checkpoint": settings}
    tree["es"] |= {"num_generations": 6}
    tree["evaluation"] |= {"every": every}
    told_by(tree)
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    scores = {row["generation"] + 1: row["validation"]["reward"] for row in rows if row["evaluation"]}
    if expected is None:
        best = max(scores, key=lambda g: (scores[g], -g))
        expected = sorted({best, 6})
        assert len(scores) == 5
    kept = [int(folder.name.removeprefix("generation_")) for folder in saved_folders(tmp_path / "run")]
    assert kept == expected


@pytest.mark.first("lora")
def test_replay_rebuilds_any_generation(straight, tmp_path):
    _, run, _ = straight
    log = journal.read(run / "journal.jsonl")
    hashes = [log.header.weights_hash, *(g.weights_hash for g in log.generations)]
    assert [replaying.replay(run, generation=g) for g in (0, 2, 4)] == hashes[::2]
    alone = tmp_path / "elsewhere.jsonl"
    shutil.copy(run / "journal.jsonl", alone)
    seen = []
    assert replaying.replay(alone, to=tmp_path / "mean", progress=lambda *at: seen.append(at)) == hashes[-1]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    ours, theirs = saved_folders(run)[-1], tmp_path / "mean"
    name = "adapter_model.safetensors" if (ours / "adapter_model.safetensors").exists() else "model.safetensors"
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert checkpoint.verify(theirs).weights_hash == hashes[-1]
    with pytest.raises(RunExistsError, match="not empty"):
        replaying.replay(alone, to=tmp_path / "mean")
    with pytest.raises(JournalError, match=r"has 4 whole generations; .*generation 5"):
        replaying.replay(alone, generation=5)


def test_replay_of_a_cut_journal_and_of_one_made_anew_around_another_coefficient(copy):
    from rundir.test_journal import relinked

    path = copy / "journal.jsonl"
    raw, hashes = path.read_bytes(), [g.weights_hash for g in journal.read(path).generations]
    path.write_bytes(raw[:-20])
    assert replaying.replay(copy) == hashes[2]
    path.write_bytes(raw.replace(b'"rms_c":', b'"rms_d":', 3))
    with pytest.raises(JournalError, match="line 2 was altered"):
        replaying.replay(copy)
    path.write_bytes(raw)
    lines = [{k: v for k, v in line.items() if k != "hash"} for line in read_rows(path)]
    lines[5]["coefficients"][0] += 1.0
    path.write_text(relinked(lines))
    with pytest.raises(ResumeError, match=r"generation 3 has weights_hash \w{12} here, and \w{12} in the journal"):
        replaying.replay(copy)
    assert replaying.replay(copy, generation=2) == hashes[1]


GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/*.jsonl"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_journals_of_every_release_replay(path):
    with skipped_elsewhere(path):
        assert replaying.replay(path) == journal.read(path).generations[-1].weights_hash


def test_there_are_golden_journals_of_this_format():
    for folder in ("0.1.0", "ordered"):
        assert {path.stem for path in GOLDEN if path.parent.name == folder} >= set(kill_points.SPACES)
    made_by = {path.stem.rpartition("-")[0] for path in GOLDEN if path.parent.name == "engines"}
    assert made_by == {"ray", "sglang", "static", "transformers", "vllm", "vllm-server"}
