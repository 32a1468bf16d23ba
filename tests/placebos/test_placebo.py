# SPDX-License-Identifier: Apache-2.0
"""A gain split in drift and signal: by hand, by simulation, and of a run whose journal is replayed."""

import json
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from small_runs import told_by
from typer.testing import CliRunner

import evoalign
from evoalign import cli
from evoalign.analysis.compare.comparison import compare
from evoalign.analysis.compare.runs import read
from evoalign.analysis.compare.tables import _drift, end_grid
from evoalign.analysis.sweeping.cells import Run, TrialConfig
from evoalign.analysis.sweeping.results import collect, placebo_of, table
from evoalign.config import from_dict, load
from evoalign.cost.estimate import placebos_in_a_tenth
from evoalign.errors import ConfigError, DataError, JournalError, ResumeError, StoppedError
from evoalign.exporting.card import placebo_lines
from evoalign.placebos.counterfactual import Follower, choice_of
from evoalign.placebos.estimates import (
    Distances,
    PlaceboResults,
    Placebos,
    Split,
    beyond_drift,
    distance_line,
    drift_together,
    off_task_lines,
    parse,
    reward_lines,
    sentence,
    split,
)
from evoalign.placebos.file import PLACEBO
from evoalign.placebos.run import PlacebosStoppedError
from evoalign.rundir import checksums
from evoalign.types import EvolvedTensor, Layout, TensorSpec

BEFORE = [-10.0, -8.0, -12.0, -10.0, -9.0]
REAL = [-2.0, -1.0, -3.0, -4.0, -2.0]
PLACEBOS = [[-6.0, -5.0, -8.0, -7.0, -6.0], [-5.0, -3.0, -6.0, -6.0, -4.0], [-1.0, -1.0, -3.0, -3.0, -2.0]]


def test_a_gain_is_split_by_hand():
    found = split(BEFORE, REAL, PLACEBOS, [-10.0] * 5)
    assert (found.before, found.real, found.flip, found.items) == (-9.8, -2.4, -10.0, 5)
    assert found.placebos == pytest.approx((-6.4, -4.8, -2.0)) and found.mean == pytest.approx(-4.4)
    assert found.sd == pytest.approx(np.std([-6.4, -4.8, -2.0], ddof=1))
    assert (found.reached, found.p) == (1, 0.5), "the third one is above the run: (1 + 1) / (1 + 3)"
    assert (found.gain.mean, found.drift.mean) == (pytest.approx(7.4), pytest.approx(5.4))
    assert found.beside is not None and found.beside.mean == pytest.approx(2.0) and found.share is not None
    assert found.share.mean == pytest.approx(5.4 / 7.4)
    gains = np.array(REAL) - BEFORE
    assert (found.gain.low, found.gain.high) == pytest.approx(stats.t.interval(0.95, 4, gains.mean(), stats.sem(gains)))
    for part in (found.drift, found.beside, found.share):
        assert part.low is not None and part.high is not None and part.low < part.mean < part.high
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["share"]["mean"] == found.share.mean


def test_off_the_task_one_more_placebo_is_no_doing_of_the_rewards():
    """Placebos differ among each other: the interval about their mean leaves out most runs that are one of them."""
    rng, said = np.random.default_rng(0), 0
    for _ in range(200):
        items_E = rng.normal(0, 0.1, 40)
        real, *placebos = (items_E + rng.normal(0, 1) + rng.normal(0, 0.1, 40) for _ in range(9))
        said += "no effect of the rewards" not in off_task_lines(split(items_E, real, placebos))[-1]
    assert 0 < said < 20
    ramp = [items_E + 0.01 * k + rng.normal(0, 0.001, 40) for k in range(20)]
    *_, line = off_task_lines(found := split(items_E, items_E - 1 + rng.normal(0, 0.001, 40), ramp))
    assert found.beside is not None and found.beside.high is not None and found.beside.high < -0.8
    assert line.startswith("the run minus the mean placebo: -1.0") and found.as_dict()["beside"]["n"] == 20
    assert line.endswith(", two-sided p 0.095")


@pytest.mark.parametrize(
    ("placebos", "real", "said"),
    [([0.1 * k for k in range(20)], 1.85, "not shown to be more than drift"),
     ([0.0] * 4 + [0.1], 0.9, "5 placebos cannot show whether it is more than drift, 20 can: "),
     ([0.01 * k for k in range(20)], 0.9, "more than drift: 0 of 20 "), ([0.5, 0.6, 0.7], 0.1, "not shown")],
)  # fmt: skip
def test_one_more_placebo_is_not_called_more_than_drift(placebos, real, said):
    """An interval about the mean placebo leaves out most placebos, and with them a run that is no more than one."""
    rng = np.random.default_rng(0)
    items_E = rng.normal(0, 0.1, 50)
    found = split(items_E * 0, items_E * 0 + real, [items_E * 0 + p + rng.normal(0, 0.001, 50) for p in placebos])
    assert beyond_drift(found).startswith(said)


def test_placebos_that_tie_reach_the_run_and_a_share_needs_a_gain_that_is_sure():
    assert split([0.0] * 4, [1.0, 0, 1, 0], [[0.0, 1, 0, 1], [0.0] * 4]).reached == 1
    found = split(BEFORE, [-20.0, 2.0, -13.0, -6.0, -8.0], PLACEBOS)
    assert found.share is None and found.as_dict()["share"] is None
    assert "is not significant, so no drift share" in sentence(found)
    one = split([-1.0], [0.0], [[-0.5], [-0.4], [-0.3]])
    assert one.share is None and one.gain.low is None


def test_sentences_have_the_figures_and_the_share_or_why_there_is_none():
    found, one = split(BEFORE, REAL, PLACEBOS, [-11.0] * 5), split(BEFORE, REAL, PLACEBOS[:1])
    for figures in ("3 placebos", "-4.4 on average (-6.4 to -2), from -9.8", "reached -2.4: about 73% of the gain"):
        assert figures in sentence(found)
    assert beyond_drift(found).startswith("not shown to be more than drift: 1 of 3 placebos reach the run, one-sided p")
    assert reward_lines(found)[2:] == ["all signs flipped: -11"]
    assert one.sd is None and len(reward_lines(one)) == 2 and "reached -6.4, from -9.8" in sentence(one)
    assert sentence(one).endswith("the placebo gained 3.4, the run gained 7.4; one placebo gives no drift share")
    assert "of the loss would have come without signal" in sentence(split(REAL, BEFORE, [[b - 1 for b in REAL]] * 3))
    assert "about 0% of the gain" in sentence(split(BEFORE, REAL, [[b - 1e-6 for b in BEFORE]] * 3)), "and not -0%"
    known, line = distance_line(Distances(2.0, 1.6, (1.5, 1.7))), distance_line(Distances(2.0, None, ()))
    assert "start: 2; 1.6 expected" in known and "(x 1.25); placebos 1.6 (1.5 to 1.7)" in known
    assert "start: 2; there is no formula" in line and "placebos" not in line


@pytest.mark.parametrize("count", [5, 20])
def test_nothing_is_promised_of_a_run_without_a_gain(count):
    """The noise breaks the model, the run is above all its placebos, and yet no better than the start, or worse."""
    rng = np.random.default_rng(0)
    before, broken = rng.normal(0, 0.1, 50), [rng.normal(-3, 0.1, 50) for _ in range(count)]
    worse = split(before, before + rng.normal(-1, 0.1, 50), broken)
    assert worse.real - worse.mean > 1.5 and not worse.reached
    assert beyond_drift(worse).startswith("no gain: the run fell below the start, and the placebos further; 0 of ")
    same = split(before, before + rng.normal(0, 0.1, 50), broken)
    assert beyond_drift(same).startswith(
        "the gain of the run is not significant: it is above the placebos because they fell below the start; 0 of "
    )
    near = split(before, before + np.tile([-3.0, 3.2], 25), [before for _ in range(count)])
    assert near.real > near.mean and beyond_drift(near).startswith("the gain of the run is not significant; 0 of ")


def test_a_share_outside_of_0_to_100_percent_has_words():
    rng = np.random.default_rng(0)

    def said(real, placebo, count=19):
        before = rng.normal(0, 0.1, 50)
        placebos = [rng.normal(placebo, 0.1, 50) for _ in range(count)]
        return sentence(split(before, before + rng.normal(real, 0.1, 50), placebos))

    for real, placebo, moved, more, few in (
        (1, -2.27, "lost 2.2", "noise alone does harm, and all of the gain is signal", "no part of the gain is shown"),
        (1, 2, "gained", "noise alone gains more than the run", "noise alone may explain all of the gain"),
        (-1, -2, "lost", "noise alone does more harm than the run", "noise alone may explain all of the loss"),
        (-1, 0.5, "gained", "noise alone brings a gain, and all of the loss is signal", "no part of the loss is shown"),
    ):
        found = said(real, placebo)
        assert found.endswith(more) and f": the placebos {moved}" in found and "%" not in found, "not as a share"
        for count in (2, 5):  # so few may all be luck, and say nothing of noise at large
            assert f": {few}" in said(real, placebo, count)
    for placebo in (-2.27, 0.5, 2):
        assert said(1, placebo, count=1).endswith("; one placebo gives no drift share")
    assert "% of the gain would have come without signal (95 % interval " in said(1, 0.5)


@pytest.mark.parametrize("reaches", [False, True])
def test_a_gain_is_not_all_signal_where_the_share_is_not_sure_or_a_placebo_reaches_it(reaches):
    """In the second case noise surely does harm in the mean, and yet one of the placebos is above the run."""
    before = np.random.default_rng(0).normal(0, 0.01 if reaches else 0.1, 50)
    harmful = [*[before - 2 + before[::-1]] * 29, before + 1.5]
    unsure = [before + p for p in np.linspace(-1, 0.9, 19)]
    found = split(before, before + 1 + before[::-1], harmful if reaches else unsure)
    assert found.share is not None and found.share.high is not None and found.share.mean < 0
    assert (found.share.high < 0) == reaches == bool(found.reached)
    assert sentence(found).endswith(": no part of the gain is shown to come without signal")


def test_task_fitness_without_a_placebo_is_damage():
    reward = split(np.zeros(5), np.ones(5), [np.zeros(5)]).as_dict()
    whole = {"name": "fitness/f1", "before": 0.1, "real": 0.2, "placebos": []}
    with pytest.raises(DataError, match=r"damaged \(placebo.fitness.placebos\)"):
        parse({"reward": reward, "fitness": whole}, "results/evaluation.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placebos", "items", "most"), [(3, 8, 0.99), (5, 200, 0.985), (20, 50, 0.975)], ids=["3x8", "5x200", "20x50"]
)
def test_the_intervals_hold_a_further_placebo_drift_and_share(placebos, items, most):
    """Of 400 simulated runs whose items are answered by all: 95 % is 92 to 98 %; with few placebos it is more."""
    random, held = np.random.default_rng(0), np.zeros(3)
    for _ in range(400):
        hard = random.normal(-10, 3, size=items)
        real = hard + 6 + random.normal(0, 2, size=items)
        lucky = random.normal(0, 1.5, size=(placebos, 1))
        shuffled = hard + 3 + lucky + random.normal(0, 2, size=(placebos, items))
        found = split(hard, real, shuffled)
        further = split(hard, hard + 3 + random.normal(0, 1.5) + random.normal(0, 2, size=items), shuffled)
        for i, (part, truth) in enumerate(((further.beside, 0.0), (found.drift, 3.0), (found.share, 0.5))):
            assert part is not None and part.low is not None and part.high is not None
            held[i] += part.low <= truth <= part.high
    assert (held / 400 >= 0.92).all() and (held / 400 <= most).all(), held / 400


def command(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def tree(folder, **more):
    return {
        "output_dir": str(folder), "seed": 2, "task": {"name": "conciseness"}, "engine": {"threads": 1},
        "lora": {"rank": 4, "alpha": 4, "target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": 2, "population_size": 4, "sigma": 0.2, "learning_rate": 0.2},
        "evaluation": {"max_tokens": 8}, "checks": {"control_every": 0, "placebo": 0},
        "tracking": {"completions_every": 0}, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placebo") / "run"
    told_by(tree(folder))
    return folder


def test_the_command_says_what_saved_counterfactuals_earn(run, tmp_path):
    """Each placebo is the mean that `replay --to` saves, evaluated as any adapter is."""
    run = shutil.copytree(run, tmp_path / "run")
    result = command("placebo", run, "--shuffles", 2, "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    assert "2 placebos (the same noise, shuffled coefficients) reached" in result.output
    found = json.loads((tmp_path / "found.json").read_text())
    written = results(run)
    assert found["reward"]["real"] == written["after"]["reward"]
    assert found["reward"]["before"] == written["before"]["reward"]
    rewards = []
    for name, seed in (("shuffle", 0), ("shuffle", 1), ("flip", 0)):
        to = tmp_path / f"{name}{seed}"
        evoalign.replay(run, counterfactual=name, seed=seed, to=to)
        rewards.append(evoalign.evaluate(to, config=run / "config.yaml").measures["reward"])
    assert [*found["reward"]["placebos"], found["reward"]["flip"]] == rewards
    assert len({*rewards, found["reward"]["real"]}) > 2, "they do not differ"
    assert found["distance"]["real"] > 0 and len(found["distance"]["placebos"]) == 2


@pytest.mark.slow
def test_the_command_shows_a_counterfactual_beside_the_run(run, tmp_path):
    arguments, flip = ([run, "--counterfactual", name] for name in ("shuffle", "flip"))
    arguments += ["-g", 1]
    result = command("replay", *arguments, "--seeds", "0,3")
    assert result.exit_code == 0, result.output
    said = [line.partition(":")[0] for line in result.stdout.splitlines()]
    assert said[:4] == ["the start", "the run itself", "shuffle, seed 0", "shuffle, seed 3"]
    assert "the first step is exact" in result.stdout and "conditional on the recorded path" in result.stdout
    for wrong, message in (
        ([*arguments, "--seeds", "0,1", "--to", tmp_path / "two"], "takes one mean"),
        ([*flip, "--seeds", "1"], "flip has no seed"), ([*arguments, "--seeds", ""], "at least one seed"),
        ([*flip, "-g", "9"], "has 2 whole generations"),
    ):  # fmt: skip
        failed = command("replay", *wrong)
        assert isinstance(failed.exception, ConfigError | JournalError) and message in str(failed.exception)
    assert not (tmp_path / "two").exists()


@pytest.mark.slow
def test_another_task_is_split_as_well_and_the_result_has_each_measure(run, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("task: {name: countdown, test_size: 3}\nevaluation: {max_tokens: 4}\n")
    found = evoalign.placebo(run, shuffles=1, generation=1, off_task=other)
    assert found.off_task is not None and found.off_task.items == 3 and found.reward.items == 8
    assert any(line.startswith("off-task: reward ") for line in found.lines())
    assert isinstance(found, Placebos) and isinstance(found.reward, Split)
    assert (found.generation, found.seeds) == (1, (0,)) and "reward" in found.measures
    assert found.columns["reward"].placebos == pytest.approx(found.reward.placebos)
    assert found.as_dict()["each"].keys() == found.measures.keys() and "off_task" in found.as_dict()


def test_what_is_not_that_run_is_refused(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    file = copy / "config.yaml"
    file.write_text(file.read_text().replace("population_size: 4", "population_size: 6"))
    with pytest.raises(ConfigError, match=r"edited since .*: es.population_size is 4 in the run and 6 now"):
        evoalign.placebo(copy, shuffles=1)
    with pytest.raises(ResumeError, match=r"made with other settings: es.population_size is 4 in the run and 6 now"):
        evoalign.placebo(run, shuffles=1, config=file)
    with pytest.raises(ConfigError, match="0 shuffles"):
        evoalign.placebo(run, shuffles=0)
    with pytest.raises(JournalError, match="GRPO"):
        (tmp_path / "grpo").mkdir()
        (tmp_path / "grpo/manifest.json").write_text('{"method": "grpo"}')
        (tmp_path / "grpo/config.yaml").write_text("grpo: {}")
        evoalign.placebo(tmp_path / "grpo")


@pytest.mark.parametrize(("done", "number"), [(2, signal.SIGINT), (3, signal.SIGINT), (4, signal.SIGTERM)])
def test_placebo_keeps_what_was_evaluated_before_a_signal(run, done, number):
    def stop(evaluated: int, total: int) -> None:
        if evaluated == done:
            signal.raise_signal(number)

    with pytest.raises(StoppedError) as stopped:
        evoalign.placebo(run, shuffles=5, progress=stop)
    assert stopped.value.signal == number
    found = stopped.value.result if isinstance(stopped.value, PlacebosStoppedError) else None
    assert (0 if found is None else len(found.seeds)) == done - 2
    if found is not None:
        whole = evoalign.placebo(run, shuffles=done - 2)
        assert found.columns == whole.columns and found.reward == replace(whole.reward, flip=None)


def measure(folder, *more):
    """What the command says of what it keeps."""
    done = command("placebo", folder, *more)
    assert done.exit_code == 0, done.output
    return done.stderr


def shown(folder):
    """What stands in the card, and in the comparison at the end."""
    evoalign.export(folder, folder.parent / "card")
    text = (folder.parent / "card/README.md").read_text()
    shutil.rmtree(folder.parent / "card")
    return text.partition("**Signal and drift.**")[2].partition("\n")[0]


def test_what_the_command_finds_is_kept_for_cards_and_comparisons(ended, tmp_path):
    folder = shutil.copytree(ended[0], tmp_path / "run")
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    assert "Reward: 2 placebos" in shown(folder)
    assert "not saved: --generation" in measure(folder, "--shuffles", "1", "-g", "1")
    assert "is a journal, not a run directory" in measure(folder / "journal.jsonl", "--shuffles", "1")
    assert not (folder / PLACEBO).exists()
    assert f"saved in {folder / PLACEBO}" in measure(folder, "--shuffles", "3")
    kept = json.loads((folder / PLACEBO).read_text())
    assert kept["reward"]["placebos"][:2] == results(folder)["placebo"]["reward"]["placebos"]
    assert kept["format_version"] == 1 and kept["seeds"] == [0, 1, 2]
    assert set((folder / "SHA256SUMS").read_text().splitlines()) > set(sums) and checksums.verify(folder)
    assert checksums.verify(folder, PLACEBO)
    assert "Reward: 3 placebos" in shown(folder)
    found = read(folder).placebo
    assert found is not None and found.reward.as_dict() == kept["reward"] and found.fitness is None
    assert "has 3 placebos; delete it to save these" in measure(folder, "--shuffles", "1")
    assert json.loads((folder / PLACEBO).read_text()) == kept
    (folder / "results/evaluation.json").unlink()
    assert "not saved: " in measure(folder, "--shuffles", "3")


def test_a_card_tells_nobody_to_measure_more():
    """Who reads it has no run. With fewer than 19, p cannot be below 5 %."""
    some = split([0.0] * 9, [0.9, 1.0, 1.1] * 3, [[0.0, 0.1, 0.2] * 3] * 4)
    assert beyond_drift(some).startswith(
        "4 placebos cannot show whether it is more than drift, 20 can: 0 of 4 placebos"
    )
    (_, said) = placebo_lines({"placebo": {"reward": some.as_dict()}})
    assert "; 4 placebos cannot show whether it is more than drift: 0 of 4" in said and "20" not in said
    many = split([0.0] * 9, [0.9, 1.0, 1.1] * 3, [[0.0, 0.1, 0.2] * 3] * 20)
    for own, other in ((some, many), (many, some)):
        (_, said) = placebo_lines({"placebo": {"reward": own.as_dict()}}, PlaceboResults(other))
        assert "Reward: 20 placebos" in said
    assert placebo_lines({}, PlaceboResults(some)), "of a run that measured none itself"


def forged(file, **changes):
    with checksums.recorded(file.parents[1], PLACEBO):
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGE = {
    "damaged (format_version)": lambda f: forged(f, format_version=2),
    "damaged (reward.placebos)": lambda f: forged(f, reward={**json.loads(f.read_text())["reward"], "placebos": []}),
    "damaged (reward)": lambda f: forged(f, reward=3),
    "damaged (it holds no JSON object)": lambda f: f.write_text("[]"),
    "was altered": lambda f: f.write_text(f.read_text().replace('"seeds"', '"seed"')),
    "does not belong to ": lambda f: forged(f, journal="0" * 64),
    "has other evaluation settings than ": lambda f: forged(f, settings={"max_tokens": 9}),
    "is not a file": lambda f: (f.unlink(), f.mkdir()),
}


def test_what_is_kept_is_refused_by_name_where_it_is_not_the_runs(ended, tmp_path):
    whole = shutil.copytree(ended[0], tmp_path / "whole")
    measure(whole, "--shuffles", "3")
    for number, (why, change) in enumerate(DAMAGE.items()):
        folder = shutil.copytree(whole, tmp_path / str(number))
        change(folder / PLACEBO)
        for reader in (read, lambda run: evoalign.export(run, tmp_path / "card")):
            with pytest.raises(DataError) as raised:
                reader(folder)
            assert str(raised.value).startswith(str(folder / PLACEBO)) and why in str(raised.value)
            assert str(raised.value).endswith("delete it and run `evoalign placebo` again")
    assert "saved in" in measure(folder / ".." / "0", "--shuffles", "3"), "and the command writes it anew"


@pytest.mark.slow
def test_a_run_that_goes_on_takes_away_what_was_kept(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    measure(folder, "--shuffles", "1")
    longer = tree(folder)
    told_by(longer, resume=True)
    assert (folder / PLACEBO).exists(), "it was at its end"
    longer["es"]["num_generations"] = 3
    told_by(longer, resume=True)
    assert not (folder / PLACEBO).exists() and read(folder).steps == 3


def results(folder):
    return json.loads((folder / "results/evaluation.json").read_text())


def train(folder, placebos=2, resume=False):
    return told_by(tree(folder, checks={"control_every": 0, "placebo": placebos}), resume=resume)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The same run with two placebos at its end, and what it said."""
    folder = tmp_path_factory.mktemp("placebo") / "ended"
    return folder, train(folder)


def test_a_training_ends_with_its_placebos_and_the_budget_has_them(run, ended):
    """The ones that the command measures; and nothing else of the run is another."""
    folder, told = ended
    assert "evaluating 2 placebos: the run with shuffled coefficients" in told and "mean placebo" in told
    found, alone = results(folder), evoalign.placebo(run, shuffles=2)
    assert found["placebo"]["reward"]["placebos"] == list(alone.reward.placebos)
    assert found["placebo"]["distance"] == {**alone.as_dict()["distance"], "flip": None}
    assert found["placebo"]["seeds"] == [0, 1] and checksums.verify(folder)
    assert sentence(alone.reward) in told and distance_line(alone.distance) in told
    without = results(run)
    assert "placebo" not in without and {k: v for k, v in found.items() if k != "placebo"} == without
    for file in ("journal.jsonl", "loras/generation_0002/adapter_model.safetensors"):
        assert (run / file).read_bytes() == (folder / file).read_bytes()
    # two more evaluations of the test split, and twice the updates that lead there
    without, found = (json.loads((f / "results/budget.json").read_text())["evaluation"] for f in (run, folder))
    assert found["completions"] == without["completions"] + 2 * (without["completions"] // 2), "before and after"
    assert found["prompt_tokens"] == 2 * without["prompt_tokens"]
    assert found["forward_flops"] > 1.5 * without["forward_flops"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["failure", "stop"])
def test_placebos_that_end_early_cost_nothing_and_are_made_up_for(kind, run, ended, tmp_path, monkeypatch):
    follow, calls = Follower.follow, []

    def ends(self, other):
        calls.append(1)
        if kind == "failure":
            raise torch.OutOfMemoryError("no room\nat all")
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return follow(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(Follower, "follow", ends)
        told = train(tmp_path / "run")
    why = {"failure": "no room", "stop": "stopped"}[kind]
    (line,) = [line for line in told.splitlines() if line.startswith("warning: placebos ")]
    assert f"({why})" in line and "resume with" in line
    assert len(calls) == 1 and results(tmp_path / "run") == results(run) and checksums.verify(tmp_path / "run")
    train(tmp_path / "run", resume=True)
    assert results(tmp_path / "run") == results(ended[0])


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, AssertionError])
def test_results_are_there_before_the_placebos(error, run, tmp_path, monkeypatch):
    """Whatever ends the process there, a mistake of the code too, takes nothing with it but what is measured next."""
    seen, folder = [], tmp_path / "run"

    def dies(self, other):
        seen.append(checksums.verify(folder))
        raise error

    monkeypatch.setattr(Follower, "follow", dies)
    with pytest.raises(error):
        train(folder)
    found, whole = results(folder), results(run)
    assert seen == [True] and checksums.verify(folder)
    assert found.pop("measuring") is True and "measuring" not in whole
    assert {**found, "alarms": None} == {**whole, "alarms": None} and found["alarms"]


def test_a_sweep_makes_up_for_placebos_that_a_run_died_in(ended, tmp_path):
    folder = shutil.copytree(ended[0], tmp_path / "run")
    config = load([folder / "config.yaml"])
    assert Run(TrialConfig("base", {}), config.seed, folder, config, "es").evaluation() is not None
    file = folder / "results/evaluation.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "measuring": True}))
    assert Run(TrialConfig("base", {}), config.seed, folder, config, "es").evaluation() is None


def test_runs_together_have_one_share_of_drift(ended):
    """Drift of all over gain of all: a run whose gain may be 0 counts, and has no share of its own."""
    found = read(ended[0])
    unsure = [b + g for b, g in zip(BEFORE, [4.0, -4.0, 1.0, -1.0, 0.5], strict=True)]
    some, none = split(BEFORE, REAL, PLACEBOS), split(BEFORE, unsure, [BEFORE] * 3)
    assert some.share is not None and none.share is None

    def shown(*splits):
        return _drift([replace(found, placebo=one and PlaceboResults(one)) for one in splits], "reward")

    assert shown(some, none) == f"{5.4 / (7.4 + 0.1):.0%}"
    assert shown(some, none, None) == f"{5.4 / (7.4 + 0.1):.0%} (of 2)"
    assert shown() == shown(None) == "-"


def test_compare_reports_no_share_of_drift_where_placebo_reports_none(ended):
    found = read(ended[0])

    def shown(before, real, placebos):
        return _drift([replace(found, placebo=PlaceboResults(split(before, real, placebos)))], "reward")

    unsure = [b + g for b, g in zip(BEFORE, [4.0, -4.0, 1.0, -1.0, 0.5], strict=True)]
    lower, higher = [[b + g for b in BEFORE] for g in (-0.2, 9.0)]
    assert shown(BEFORE, unsure, [lower] * 3) == "no significant gain", "and not -200%"
    assert shown(REAL, BEFORE, PLACEBOS) == "no significant gain"
    assert shown(BEFORE, REAL, PLACEBOS[:1]) == "not known from one placebo"
    assert (shown(BEFORE, REAL, [lower] * 3), shown(BEFORE, REAL, [higher] * 3)) == ("none shown", "may be all")
    assert shown(BEFORE, REAL, [[b - 1e-6 for b in BEFORE]] * 3) == "0%", "and not -0%"


def test_the_table_of_a_sweep_has_the_drift_of_each_cell(run, ended, tmp_path):
    """By what was kept where that is more, as a comparison has it; and shares in per cent."""
    other = shutil.copytree(ended[0], tmp_path / "other")
    measure(other, "--shuffles", "3")
    runs = [
        Run(TrialConfig(cell, {}), 2, folder, load([folder / "config.yaml"]), "es")
        for cell, folder in (("a", ended[0]), ("a", other), ("b", run))
    ]
    runs[1] = replace(runs[1], seed=3)
    cells = collect(runs, {}, {})
    found = [read(r.path) for r in runs]
    kept = [one.placebo.reward for one in found[:2] if one.placebo]
    shown = f"{drift_together([(one.mean - one.before, one.real - one.before) for one in kept]):.0%}"
    assert f"{cells[0]['drift_share']:.0%}" == shown and cells[1]["drift_share"] is None
    assert [r["placebo"] and r["placebo"]["placebos"] for c in cells for r in c["runs"]] == [2, 3, None]
    head, _, *rows = table(cells, "reward").splitlines()
    assert head.endswith("| share of the gain that would have come without signal, all runs pooled |")
    assert rows[0].endswith(f"| {shown} |") and rows[1].endswith("|  |")
    hacked = head.split(" | ").index("hacked")
    assert rows[0].split(" | ")[hacked] == f"{cells[0]['mean']['hacked_share']:.1%} ± {0:.1%}"
    assert placebo_of(runs[0], {**results(ended[0]), "placebo": {"reward": 3}}) is None
    both = collect([runs[0], replace(runs[2], cell=TrialConfig("a", {}), seed=3)], {}, {})
    assert table(both, "reward").splitlines()[2].endswith(" (of 1) |")


def test_few_enough_for_a_tenth_by_counts_alone():
    """By hand: 8 members x 10 prompts x 20 generations are 1,600 completions of 10 + 20 tokens."""
    specs = [TensorSpec("w", (100, 100), "linear", 0, 0.1)]
    layout = Layout((EvolvedTensor("w.lora_B", (100, 1), "w"),), 0, "float32", rank=1)
    es = {"num_generations": 20, "population_size": 8, "sigma": 0.1}

    def count(test, tokens=20, es=es, **evaluation):
        tree = {"es": es, "sampling": {"max_tokens": 20}, "evaluation": {"max_tokens": tokens, **evaluation}}
        return placebos_in_a_tenth(from_dict(tree), specs, layout, [10] * 10, [10] * test)

    assert [count(n) for n in (10, 32, 53, 80, 160, 161)] == [5, 4, 2, 1, 0, 0], "and their updates"
    assert count(40, tokens=80) == 1, "90 tokens each for 30: 4 by completions, and 1 by FLOPs"
    assert count(10, temperature=1.0, samples=4, seeds=[0, 1]) == 1
    wide = [TensorSpec("w", (5, 5), "linear", 0, 0.1)]
    config = from_dict({"es": es, "sampling": {"max_tokens": 20}, "evaluation": {"max_tokens": 20}})
    assert placebos_in_a_tenth(config, wide, layout, [10] * 10, [10] * 10) == 0, "here the noise costs as much"


def test_comparisons_and_cards_say_it(ended):
    folder, _ = ended
    found, own = read(folder), results(folder)["placebo"]["reward"]
    assert found.placebo is not None and found.placebo.reward.placebos == tuple(own["placebos"])
    rows = {row[0]: row[1] for row in end_grid(compare(folder)).rows}
    assert rows["reward of the mean placebo"] == f"{own['mean']:.4g}"
    assert "is not significant, so no drift share" in sentence(found.placebo.reward)
    assert rows["share of the gain that would have come without signal, all runs pooled"] == "no significant gain"
    said = placebo_lines(results(folder))
    assert said[1].startswith("**Signal and drift.** Reward: 2 placebos (the same noise, shuffled coefficients)")
    assert placebo_lines({"after": {}}) == [], "a run of before, or of GRPO"
    for wrong in ({"reward": {**own, "items": "many"}}, {"reward": {**own, "placebos": []}}, {}, 3, {"reward": None}):
        with pytest.raises(DataError, match=r"results/evaluation.json is damaged \(placebo"):
            placebo_lines({"placebo": wrong})


@pytest.mark.parametrize(
    ("es", "more", "reason", "validates", "parts"),
    [({}, {}, None, True, []),
     ({}, {"stopping": {"patience": 2}}, "plateau", False, ["its end after 2 of 9 generations (stopping.patience)"]),
     ({}, {"stopping": {"patience": 2, "max_hours": 1}}, "time", False, []),
     ({}, {"stopping": {"patience": 2}}, None, False, []),
     ({"sigma_schedule": {"name": "plateau", "patience": 2}}, {}, None, False, ["its sigma (es.sigma_schedule"]),
     ({"sigma_schedule": {"name": "plateau", "patience": 2}}, {"stopping": {"patience": 2}}, "plateau", True,
      ["its end after 2 of 9 generations (stopping.patience) and its sigma", "at the last mean"]),
     ({}, {"evaluation": {"every": 2}}, None, True, ["at the last mean"])],
)  # fmt: skip
def test_what_a_run_chose_by_its_own_rewards_is_said_once(es, more, reason, validates, parts):
    tree = {"es": {"num_generations": 9, "sigma": 0.1, **es}, "evaluation": {"every": 2 if es or more else 0}, **more}
    config = from_dict({**tree, "checkpoint": {"keep_best": validates}})
    log = SimpleNamespace(ending=None if reason is None else SimpleNamespace(reason=reason), sealed=2)
    line = choice_of(SimpleNamespace(config=config), log, validates=validates)
    assert (line is None) == (not parts) and all(part in (line or "") for part in parts)
    found = Placebos(2, (0,), split(BEFORE, REAL, PLACEBOS), Distances(1.0, None, ()), {}, note=line)
    assert found.lines().count(line) == bool(parts) and found.as_dict().get("note") == line


def test_results_of_earlier_releases_are_read_and_their_conditional_interval_is_not(ended, tmp_path):
    """They have `signal`, and the first of them no `beside`."""
    tree = split(BEFORE, REAL, PLACEBOS).as_dict()
    old = {**tree, "signal": {"mean": 2.0, "n": 3, "low": 1.9, "high": 2.1, "why": None, "items": 5}}
    assert parse({"reward": old}, "file").reward == split(BEFORE, REAL, PLACEBOS)
    first = {name: value for name, value in old.items() if name != "beside"}
    said = beyond_drift(parse({"reward": first}, "file").reward)
    assert said.endswith("; +2 above the mean placebo")
    folder = shutil.copytree(ended[0], tmp_path / "run")
    measure(folder, "--shuffles", "3")
    kept = json.loads((folder / PLACEBO).read_text())["reward"]
    forged(folder / PLACEBO, reward={**kept, "signal": old["signal"]})
    found = read(folder).placebo
    assert found is not None and found.reward.as_dict() == kept
