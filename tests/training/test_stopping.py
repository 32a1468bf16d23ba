# SPDX-License-Identifier: Apache-2.0
"""Runs that end, or narrow their noise, by what the validation split says on the way."""

import io
import json
import shutil

import pytest
from rich.console import Console
from small_runs import UNCHECKED, read_rows, told_by, write_rows

import evoalign
from evoalign.analysis.compare.groups import settings_of
from evoalign.analysis.sweeping import cells
from evoalign.config import from_dict, load
from evoalign.errors import ConfigError, JournalError
from evoalign.report.tables import journal_table
from evoalign.rundir import journal
from evoalign.rundir.identity import identity
from evoalign.tracking.base import last_step
from evoalign.training import stopping
from evoalign.training.train import dry_run

ASKED = ["What is 3 plus 4?", "Name a colour:", "Capital of France:"]
STILL = {"name": "plateau", "patience": 2, "factor": 0.5, "floor": 0.3}


def falling(prompts, completions, split, **_):
    """Members are told apart in training; on the validation split all earn the same, whatever they say."""
    return [float(len(set(text))) if part == "train" else 1.0 for text, part in zip(completions, split, strict=True)]


def rows(folder, split):
    return write_rows(folder / f"{split}.jsonl", ({"prompt": prompt, "split": split} for prompt in ASKED))


def config(folder, name="run", generations=9, **more):
    data = {f"{split}_data": rows(folder, split) for split in ("train", "test", "validation")}
    return {
        "output_dir": str(folder / name), "task": {"name": "custom", **data}, "grader": {"isolated": False},
        "es": {"sigma": 0.1, "learning_rate": 0.1, "num_generations": generations, "population_size": 4,
               **more.pop("es", {})},
        "sampling": {"max_tokens": 6}, "evaluation": {"max_tokens": 6, "every": 1},
        "checkpoint": {"every": 0, "keep_last": 9}, "checks": UNCHECKED,
        "tracking": {"completions_every": 0}, "report": False, **more,
    }  # fmt: skip


def train(tree, **options):
    return told_by(tree, reward=falling, **options)


def lines(run):
    return read_rows(run / "journal.jsonl")


def results(run):
    return json.loads((run / "results/evaluation.json").read_text())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that ends on a plateau, with a sigma that was halved on another before."""
    folder = tmp_path_factory.mktemp("stopped")
    tree = config(folder, es={"sigma_schedule": STILL}, stopping={"patience": 6}, checks=UNCHECKED | {"placebo": 1},
                  tracking={"completions_every": 0, "backends": ["tensorboard"]})  # fmt: skip
    return folder / "run", train(tree), tree


def test_what_waits_is_counted_from_the_best_reward_on():
    rewards = [1.0, 1.0, 1.5, 1.4, 1.5, 1.6, 1.0]
    assert [stopping.waited(rewards[:n], 0.0) for n in range(8)] == [0, 0, 1, 0, 1, 2, 0, 1]
    assert [stopping.waited(rewards[:n], 0.2) for n in range(8)] == [0, 0, 1, 0, 1, 2, 3, 4]
    assert [stopping.plateaus(rewards[:n], 2, 0.2) for n in range(8)] == [0, 0, 0, 0, 0, 1, 1, 2]
    assert stopping.waited([-5.0, -4.0], 1.0) == 1, "by more than min_delta, and not by as much"


def test_a_run_ends_on_a_plateau_as_one_that_is_done_and_its_sigma_was_lowered_at_each(stopped):
    run, told, _ = stopped
    log = journal.read(run / "journal.jsonl")
    assert (log.sealed, log.ending, log.damage) == (7, journal.Ending("plateau", 6.0), None)
    assert log.validated == [1.0] * 7, "the first one sets the mark, and six bring nothing better"
    assert "ends after generation 7 of 9: 6 evaluations of the validation split without a better reward" in told
    assert "ends before generation 9 once 6 evaluations in a row " in told
    found = results(run)
    assert (found["generation"], found["ending"]) == (7, {"reason": "plateau", "limit": 6.0})
    assert found["weights_hash"] == log.generations[-1].weights_hash and found["placebo"]["seeds"] == [0]
    assert (run / "loras/generation_0007/adapter_model.safetensors").is_file()
    assert lines(run)[-1]["type"] == "end" and lines(run)[-2]["type"] == "validation"
    updates = [recorded.update for recorded in log.generations]
    assert [update.sigma for update in updates] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.03, 0.03], "down to floor x sigma"
    assert len({update.step for update in updates}) == 1


def test_it_replays_exports_is_shown_and_a_sweep_takes_it_for_done_until_its_limit_is_another(stopped, tmp_path):
    run, _, tree = stopped
    log = journal.read(run / "journal.jsonl")
    assert evoalign.replay(run) == log.generations[-1].weights_hash
    out = io.StringIO()
    journal_table(log, Console(file=out, width=200))
    assert "6 evaluations without a better reward" in out.getvalue()
    evoalign.export(run, tmp_path / "card")
    card = (tmp_path / "card/README.md").read_text()
    assert "The run ended after 7 of 9 generations, as its settings say." in card
    assert last_step(from_dict({**tree, "task": {**tree["task"], "rewards": ["a:b"]}}), run) == 7
    for patience, done in ((6, True), (7, False)):
        settings = load([run / "config.yaml"], [f"stopping.patience={patience}"])
        found = cells.Run(cells.TrialConfig("cell", {}), 0, run, settings, "es").evaluation()
        assert (found is not None) == done
    assert "stopping.patience" in settings_of(load([run / "config.yaml"]), "es")


@pytest.mark.first("validation", "end")
@pytest.mark.parametrize("cut", ["update", "seal", "validation", "end"])
def test_resumed_wherever_it_died_it_has_the_same_journal(stopped, tmp_path, cut):
    """After the last line of its kind, and with nothing else than the journal left of what came later."""
    run, _, tree = stopped
    again = tmp_path / "run"
    shutil.copytree(run, again)
    kinds = [line["type"] for line in lines(run)]
    last = len(kinds) - kinds[::-1].index(cut)
    text = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (again / "journal.jsonl").write_bytes(b"".join(text[:last]))
    if cut != "end":
        rows_kept = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:6]
        (again / "metrics.jsonl").write_bytes(b"".join(rows_kept))
        shutil.rmtree(again / "results")
        shutil.rmtree(again / "loras")
    told = train({**tree, "output_dir": str(again)}, resume=True)
    assert (again / "journal.jsonl").read_bytes() == (run / "journal.jsonl").read_bytes()
    assert results(again)["after"] == results(run)["after"]
    assert "unusable" not in told and "ends after generation 7 of 9" in told


def test_a_run_that_ended_goes_on_with_a_larger_limit(stopped, tmp_path):
    """And is then, but for the line that says where it had ended, the run that had it from the start."""
    run, _, tree = stopped
    again = tmp_path / "run"
    shutil.copytree(run, again)
    told = train({**tree, "output_dir": str(again), "stopping": {"patience": 7}}, resume=True)
    assert "resumes after generation 7 of 9" in told and "ends after generation 8 of 9" in told
    assert "set aside" not in told
    whole = tmp_path / "whole"
    train({**tree, "output_dir": str(whole), "stopping": {"patience": 7}})
    ours, theirs = ([{**line, "hash": None, "previous": None} for line in lines(run)] for run in (again, whole))
    assert [line for line in ours if line["type"] != "end" or line["index"] == 7] == theirs
    assert results(again)["ending"] == {"reason": "plateau", "limit": 7.0}
    assert journal.read(again / "journal.jsonl").generations[6].ending == journal.Ending("plateau", 6.0)


def test_a_run_ends_after_a_time_that_adds_up_over_resumes(tmp_path):
    tree = config(tmp_path, generations=30, stopping={"max_hours": 1e-6})
    tree["task"] = {k: v for k, v in tree["task"].items() if k != "validation_data"}
    tree["evaluation"] = {"max_tokens": 6}
    told = train(tree)
    run = tmp_path / "run"
    assert "ends after generation 1 of 30: its generations took 1e-06 hours (stopping.max_hours)" in told
    assert [line["type"] for line in lines(run)] == ["header", "update", "seal", "end"]
    before = (run / "journal.jsonl").read_bytes()
    (run / "metrics.jsonl").unlink()  # what it took is not known any more, that it ended is
    assert "ends after generation 1 of 30" in train(tree, resume=True)
    assert (run / "journal.jsonl").read_bytes() == before
    row = {**json.loads((run / "metrics.jsonl").read_text()), "seconds": {"rollout": 3600.0, "other": 0.5}}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert "ends after generation 1 of 30: its generations took 1 hours" in train(
        {**tree, "stopping": {"max_hours": 1.0}}, resume=True
    ), "an hour and a half second are more than the new limit, too"
    assert "ends after generation 2 of 30" in train({**tree, "stopping": {"max_hours": 1.00014}}, resume=True)
    assert journal.read(run / "journal.jsonl").ending == journal.Ending("time", 3600.504)
    assert evoalign.replay(run) == results(run)["weights_hash"]


def test_a_patience_set_later_counts_from_there_as_the_journal_does(tmp_path):
    """What it goes by is in the journal, where a reward comes from the day on that a setting asks for it."""
    tree = config(tmp_path, generations=4)
    train(tree)
    run = tmp_path / "run"
    log = journal.read(run / "journal.jsonl")
    assert log.sealed == 4 and log.validated == [], "four evaluations, and nothing asked for them"
    longer = {**tree, "es": {**tree["es"], "num_generations": 20}, "stopping": {"patience": 2}}
    told = train(longer, resume=True)
    (line,) = [line for line in told.splitlines() if "earlier evaluations" in line]
    assert "stopping.patience" in line and "3 earlier evaluations" in line
    assert line.endswith("count from generation 4 on")
    log = journal.read(run / "journal.jsonl")
    recorded = [i for i, generation in enumerate(log.generations, 1) if generation.validation is not None]
    assert recorded == [4, 5, 6] and "ends after generation 6 of 20" in told

    without = {key: value for key, value in longer.items() if key != "stopping"}
    train({**without, "es": {**tree["es"], "num_generations": 8}}, resume=True)
    told = train({**longer, "stopping": {"patience": 4}}, resume=True)
    (line,) = [line for line in told.splitlines() if "earlier evaluations" in line]
    assert "4 earlier evaluations" in line and "count from" not in line
    assert "ends after generation 9 of 20" in told, "of 4, 5, 6, 8 and 9, which the journal has, four brought nothing"
    kept = (run / "journal.jsonl").read_bytes()
    (run / "metrics.jsonl").unlink()
    assert "ends after generation 9 of 20" in train({**longer, "stopping": {"patience": 4}}, resume=True)
    assert (run / "journal.jsonl").read_bytes() == kept, "it is the journal's rewards that decide, and no others"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stopping": {"patience": 2}, "evaluation": {"every": 0}}, "stopping.patience needs .*evaluation.every"),
        ({"es": {"sigma_schedule": STILL}, "evaluation": {"every": 0}}, "plateau needs .*evaluation.every"),
        ({"es": {"sigma_schedule": "plateau"}}, "set patience"),
        ({"es": {"sigma_schedule": {"name": "cosine", "patience": 2}}}, "patience is only for name: plateau, not"),
        ({"es": {"learning_rate_schedule": STILL}}, "es.learning_rate_schedule: plateau is only for es.sigma_schedule"),
        ({"stopping": {}}, "set patience, max_hours or both"),
        ({"stopping": {"max_hours": 0}}, "stopping.max_hours"),
        ({"stopping": {"patience": 1, "min_delta": -1}}, "stopping.min_delta"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path, more, said):
    with pytest.raises(ConfigError, match=said):
        from_dict(config(tmp_path, **more))


def test_it_needs_a_validation_split_no_test_split_stands_in_and_grpo_refuses_it(tmp_path):
    for more in ({"stopping": {"patience": 2}}, {"es": {"sigma_schedule": STILL}}):
        tree = config(tmp_path, **more)
        del tree["task"]["validation_data"]
        with pytest.raises(ConfigError, match=r"task custom .*task\.validation_size"):
            train(tree)
        assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"the section stopping is for ES: a run of GRPO ends after grpo\.max_steps"):
        evoalign.grpo(config(tmp_path, stopping={"patience": 2}), reward=falling)


def test_where_a_run_ends_is_no_part_of_its_identity_and_what_its_sigma_follows_is(tmp_path):
    def made(**more):
        tree = config(tmp_path, **more)
        return from_dict({**tree, "task": {**tree["task"], "rewards": [f"{__file__}:falling"]}})

    plain = identity(made())
    assert identity(made(stopping={"patience": 2})) == plain and "stopping" not in made().model_dump()
    assert "every" not in plain["evaluation"] and "num_generations" not in plain["es"]
    by_plateau = identity(made(es={"sigma_schedule": STILL}))
    assert by_plateau["evaluation"]["every"] == 1 and "num_generations" not in by_plateau["es"]
    assert plain["es"]["sigma_schedule"] == {"name": "constant", "floor": 0.1}
    (line,) = [line for line in dry_run(made(stopping={"patience": 2, "max_hours": 3})) if "ends before" in line]
    assert "2 evaluations in a row" in line and line.endswith(", or its generations have taken 3 hours")


def test_lines_that_do_not_belong_are_refused(stopped, tmp_path):
    text = (stopped[0] / "journal.jsonl").read_bytes().splitlines(keepends=True)
    early = tmp_path / "journal.jsonl"
    early.write_bytes(b"".join([*text[:2], *text[3:]]))  # a validation without its seal
    with pytest.raises(JournalError, match=r"line 3 was altered .*no whole generation: keep its first line "):
        journal.read(early).whole()
    early.write_bytes(b"".join([*text[:4], text[4][:-9] + b"\n"]))
    with pytest.raises(JournalError, match=r"line 5 .*whole up to generation 1 \(line 4\): keep its first 4 lines"):
        journal.read(early).whole()
