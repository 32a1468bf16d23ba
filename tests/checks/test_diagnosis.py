# SPDX-License-Identifier: Apache-2.0
"""Synthetic runs, one for each cause and some healthy ones, and a real one; samples of the mean."""

import dataclasses
import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from evoalign import evolve
from evoalign.checks import diagnosis
from evoalign.checks.control import Control, control, control_of, reliability, requests_of
from evoalign.checks.diagnosis import SAMPLE, Diagnosis, changed_share, summary
from evoalign.checks.rules import causes
from evoalign.config import from_dict
from evoalign.engines.base import sampled_places
from evoalign.engines.transformers import TransformersEngine
from evoalign.report.rows import metrics_row
from evoalign.rollouts import collect
from evoalign.rundir.journal import Journal
from evoalign.rundir.method import placebo_command
from evoalign.setup import assemble
from evoalign.testing import engines as contract
from evoalign.training import saving
from evoalign.types import MEAN_PLAN, EvolvedTensor, Generation, Layout, Member, Rollout, Update, population

MEMBERS, PROMPTS, NUMBERS = 16, 8, 400
LAYOUT = Layout((EvolvedTensor("a", (10, 20), "a", 2.0), EvolvedTensor("b", (200,), "b", 1.0)), 0, "float32")
NAMES = ["red", "blue", "green", "small", "large", "seven", "eleven", "house", "river", "cloud", "stone", "candle"]
WORDS = np.array(NAMES)


def config(**changes):
    es = {"num_generations": 100, "population_size": MEMBERS, "sigma": 0.01, "learning_rate": 0.005}
    return from_dict({"es": es | changes.pop("es", {}), "task": {"batch_size": PROMPTS}, **changes})


def text(rng, length=10):
    return " ".join(rng.choice(WORDS, length))


def made_of(scores, index=0, total=100, coefficients=None, members=None, **fields):
    """A generation with these scores [members, prompts]."""
    scores = np.asarray(scores, dtype=float)
    members, coefficients = members or population(len(scores)), coefficients or (1.0,) * len(scores)
    return Generation(
        index=index, total=total, fitness_M=tuple(scores.mean(1)), scores_MP=tuple(map(tuple, scores)),
        update=Update(index, index, members, coefficients, 0.01, 0.005), weights_hash="", tokens=1, empty_share=0.0,
        truncated_share=0.0, seconds={}, **{"rows": tuple(range(scores.shape[1])), **fields},
    )  # fmt: skip


def rollouts_of(members, prompts, texts, finish="stop"):
    return tuple(
        Rollout(Member(m, m, 1), p, tuple(said.encode()), said, finish)
        for m in range(members) for p in range(prompts) for said in [texts(m, p)]
    )  # fmt: skip


class Run:
    """Feeds made-up generations: a mean fitness, a spread, texts and a movement of the mean."""

    def __init__(self, max_reward=math.inf, **changes):
        self.rng = np.random.default_rng(0)
        self.config = config(**changes)
        self.place = torch.zeros(NUMBERS)
        self.step = torch.zeros(NUMBERS)
        self.diagnosis = Diagnosis(self.config, LAYOUT, self.place, max_reward)
        self.index, self.warnings, self.rows = 0, [], []

    def generation(self, mean, spread=0.1, texts=None, control=None, along=0.0, jitter=0.02, finish="stop", **more):
        scores = more.get("scores")
        fitness = mean + spread * self.rng.standard_normal(MEMBERS)
        prompts = jitter * self.rng.standard_normal(PROMPTS)
        scores = fitness[:, None] + prompts[None, :] if scores is None else np.asarray(scores, dtype=float)
        coefficients = (0.0,) * MEMBERS if np.ptp(scores.mean(1)) == 0 else (1.0,) * MEMBERS
        rollouts = rollouts_of(MEMBERS, PROMPTS, texts or (lambda m, p: text(self.rng)), finish)
        made = made_of(scores, self.index, coefficients=coefficients, rollouts=rollouts)
        self.step = along * self.step + torch.from_numpy(self.rng.standard_normal(NUMBERS)).float() * any(coefficients)
        self.place = self.place + self.step
        row = self.diagnosis.update(made, self.place, control)
        self.rows.append({**metrics_row(made), "diagnosis": row})
        self.warnings += self.diagnosis.warnings()
        self.index += 1
        return row

    def all(self, means, **more):
        for mean in means:
            self.generation(mean, **more)
        return self


def words(m, p):
    """Each member says the same."""
    return WORDS[p]


def only(run, *parts):
    """Exactly one warning, which says all of these."""
    assert len(run.warnings) == 1, run.warnings
    for part in parts:
        assert part in run.warnings[0], run.warnings[0]
    assert "\n" not in run.warnings[0]


def test_a_healthy_run_learns_and_warns_of_nothing():
    run = Run()
    for k in range(60):
        run.generation(0.3 + 0.005 * k, control=Control(0.3, 0.32, 0.02) if k % 10 == 0 else None)
    assert run.warnings == []
    verdict, *rest = summary(run.diagnosis.history)
    assert verdict.startswith("learning: population fitness went from 0.3")
    assert "times the noise floor of 0.02" in rest[0]
    assert rest[1].startswith("movement of the evolved numbers: ") and "one member's noise from the start" in rest[1]
    assert not any(line.startswith("warning") for line in rest)


def test_a_run_that_is_flat_or_short_is_not_said_to_learn():
    run = Run().all([0.3] * 40)
    assert run.warnings == [] and summary(run.diagnosis.history)[0].startswith("not shown to learn")
    assert summary(Run().diagnosis.history) == ["no generation yet"]
    assert "too few to say" in summary(Run().all([0.3] * 5).diagnosis.history)[0]


def test_a_run_that_has_arrived_may_stand_still():
    run = Run(max_reward=0.0, task={}).all(np.linspace(-80, -4, 20), spread=8)
    for _ in range(30):
        run.generation(0, scores=np.zeros((MEMBERS, PROMPTS)), texts=words)
    assert run.warnings == []
    assert "scored the same" in summary(run.diagnosis.history)[1]


def test_a_solved_task_needs_no_wider_noise():
    """Nearly solved from the start but for one bad batch, then solved: members say the same, and rightly so."""
    run = Run(max_reward=1.0)
    for k in range(18):
        scores = np.ones((MEMBERS, PROMPTS))
        scores[0, 0] = k > 16
        if k == 7:
            scores[::2] = 0
        run.generation(0, scores=scores, texts=None if k == 7 else words)
    assert run.diagnosis.history.rises() is False
    assert run.warnings == []


FLAT, STILL = {"spread": 0, "jitter": 0}, {"spread": 0.02, "jitter": 0, "control": Control(0.3, 0.33, 0.02)}
UNDO, BEST = {"es": {"learning_rate": 0.02}}, {"scores": np.ones((MEMBERS, PROMPTS)), "texts": words}
BROKEN = {"scores": np.eye(MEMBERS, PROMPTS) * np.eye(MEMBERS, 1), "control": Control(0.4, 0.4, 0.0)}
DIFFER = {(0, 0), (1, 1), (2, 2)}
RISEN = [0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6]
MOMENTUM = {"name": "momentum", "momentum": 0.75}
CAUSES = {
    "sigma too small": ({}, [([0.3] * 12, {**FLAT, "texts": words})], [
        "only 0.0% of the completions differ", "es.sigma 0.1 with es.learning_rate 0.05"]),
    "sigma a little too small": (
        {"es": {"sigma": None, "noise_multiplier": 0.2, "learning_rate": 0.5}},
        [([0.3] * 12, {"texts": lambda m, p: "another" if (m, p) in DIFFER else WORDS[p]})],
        ["only 2.3% of the completions differ", "es.noise_multiplier 0.6"]),
    "a reward that tells nothing apart, but once": ({}, [([0.0], {}), ([0.0] * 12, FLAT)], [
        "% of the last 10 generations moved nothing", "though 94% of the completions differ", "partial credit",
        "task.batch_size"]),
    "sigma too large": ({"max_reward": 1.0}, [([0], BROKEN), ([0] * 11, {"scores": BROKEN["scores"]})], [
        "members keep 2% of the unperturbed model's fitness", "es.sigma 0.0025 with es.learning_rate 0.0013"]),
    "members a little worse than the mean": ({}, [([0.3] * 12, {"control": Control(0.38, 0.38, 0.0)})], []),
    "steps that undo each other": (UNDO, [([0.3] * 14, {"along": -0.6})], [
        "successive updates undo each other (cosine -0.5", "es.learning_rate 0.01 (eta 1 instead of 2)"]),
    # 16 members: an eta of 1 goes as far as one of 4, and is brought down to one of 0.5
    "steps of adam": ({"es": {"learning_rate": 0.01, "optimizer": "adam"}}, [([0.3] * 14, {"along": -0.6})], [
        "es.learning_rate 0.0013 (eta 0.12 instead of 1)"]),
    "steps of momentum": ({"es": {"learning_rate": 0.01, "optimizer": MOMENTUM}}, [([0.3] * 14, {"along": -0.6})], [
        "es.learning_rate 0.0013 (eta 0.12 instead of 1)"]),
    "steps that agree": ({}, [([0.3] * 30, {"along": 0.5})], []),
    "steps that have nothing to do with each other": ({}, [([0.3] * 30, {"along": 0.0})], []),
    "a fall from the best": ({}, [([*RISEN, *np.linspace(0.6, 0.2, 30)], {})], [
        "fitness fell from 0.59", "es.learning_rate 0.0025 (eta 0.25 instead of 0.5)", "es.population_size"]),
    "a collapse in the first steps": (
        {"es": {"learning_rate": 0.2}}, [([0.4, 0.1], {}), ([0.0] * 20, {**FLAT, "finish": "length"})],
        ["fitness fell from 0.3772 to 0.01", "es.learning_rate 0.005 (eta 0.5 instead of 20)"]),
    "jitter at the top": ({"task": {}}, [
        (np.linspace(-80, 0, 20), {"spread": 0.5}), ([0.0] * 5, {"spread": 0}), ([-0.3] * 15, {"spread": 0.1})], []),
    "an engine that does not repeat": ({}, [([0.3] * 12, STILL)], ["though decoding is greedy", "deterministic true"]),
    "members ranked by chance": ({"evaluation": {"temperature": 1.0}}, [([0.3] * 12, STILL)], [
        "members spread by 0.0", "scored twice differs by 0.02", "es.sigma 0.03", "task.batch_size 32"]),
    "completions cut off": ({"evaluation": {"max_tokens": 64}}, [([0.3] * 12, {"finish": "length"})], [
        "100% of the completions are cut off at 64 tokens", "sampling.max_tokens 128"]),
    "the first completions cut off": ({"evaluation": {"max_tokens": 64}}, [([0.3], {"finish": "length"})], [
        "100% of the completions are cut off at 64 tokens", "sampling.max_tokens 128"]),
    "nothing to learn": ({"max_reward": 1.0}, [([0] * 12, BEST)], [
        "100% of the completions earned the highest reward from the start", "harder data"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_with_the_setting_to_change_and_none_where_there_is_none(name):
    settings, parts, expected = CAUSES[name]
    run = Run(**settings)
    for means, more in parts:
        run.all(means, **more)
    if expected:
        only(run, *expected)
    assert bool(run.warnings) == bool(expected)
    assert name != "members ranked by chance" or "times the noise floor of 0.02" in summary(run.diagnosis.history)[1]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_constant_reward_is_named_early_and_in_a_run_of_any_length(length):
    run = Run(es={"num_generations": length}).all([1.0] * length, spread=0, jitter=0)
    only(run, "all members have earned the same so far (1), though 9", "task.rewards")
    assert summary(run.diagnosis.history)[-1] == f"warning: {run.warnings[0]}"
    told = Run().all([1.0] * 2, spread=0, jitter=0)
    assert told.warnings == []
    told.all([1.0] * 20, spread=0, jitter=0)
    only(told, "all members have earned the same so far")  # and it is said once


def test_what_is_not_a_constant_reward_is_not_called_one():
    same, solved = Run(), Run(max_reward=1.0, es={"num_generations": 4})
    same.all([1.0] * 4, spread=0, jitter=0, texts=words)  # nobody said anything else
    assert same.warnings == []
    solved.all([1.0] * 4, scores=np.ones((MEMBERS, PROMPTS)))
    only(solved, "earned the highest reward from the start")
    rare = Run().all([0.0] * 2, spread=0, jitter=0).all([0.1]).all([0.0] * 5, spread=0, jitter=0)
    assert rare.warnings == []


def test_a_drop_within_the_spread_has_lost_nothing():
    run, rare = Run(), np.zeros((MEMBERS, PROMPTS))
    rare[3] = 0.8  # mean 0.05, spread 0.19
    run.generation(0, scores=rare, control=Control(0.15, 0.15, 0.0))
    assert run.rows[0]["diagnosis"]["kept_share"] == pytest.approx(1 / 3)
    assert run.warnings == []
    run.generation(0, scores=rare, control=Control(0.3, 0.3, 0.0))  # this one has
    assert run.all([0.3]).warnings == []  # on average it keeps a half


def test_members_that_are_better_than_the_mean_keep_more_than_all():
    scores = np.full((MEMBERS, PROMPTS), 0.5)
    scores[0] = 0.1
    row = Run().generation(0, scores=scores, control=Control(0.3, 0.3, 0.0))
    assert row["kept_share"] == pytest.approx(0.375 / 0.2) and row["population_minus_mean"] == pytest.approx(0.175)
    lowest = Run().generation(0.5, spread=0.01, jitter=0, control=Control(0.1, 0.1, 0.0))
    assert lowest["kept_share"] is None  # the unperturbed model has the lowest score


def test_rows_of_earlier_releases_kept_no_more_than_all():
    old, after = Run().all([0.3] * 3, control=Control(0.5, 0.5, 0.0)).rows, Run()
    for row in old:
        del row["diagnosis"]["population_minus_mean_error"]
        row["diagnosis"]["kept_share"] = 1.0
    after.diagnosis.restore(old)
    assert after.all([0.3] * 9).warnings == []


def noisy(paired, pull=0.0, seed=0):
    """A first generation of 32 members with a linear term in the noise and, for each alike, `pull`."""
    rng = np.random.default_rng(seed)
    run = Run(es={"population_size": 32, "antithetic": paired})
    linear = rng.standard_normal(16).repeat(2) * np.tile([1, -1], 16) if paired else rng.standard_normal(32)
    scores = (0.3 + linear + 0.1 * rng.standard_normal(32) + pull)[:, None] + np.zeros((1, PROMPTS))
    made = made_of(scores, members=population(32, antithetic=paired))
    return run.diagnosis, run.diagnosis.update(made, torch.ones(NUMBERS), Control(0.3, 0.3, 0.0))


def test_what_it_advises_is_a_command_that_works(tmp_path):
    """Code that a run names is imported only where its config is named, and Python objects have no command."""
    run = tmp_path / "a run"
    own = from_dict({"output_dir": str(run), "task": {"name": "mine:Task"}, "es": {"sigma": 0.1}})
    assert placebo_command(run, own) == f"evoalign placebo '{run}' --config '{run}/config.yaml'"
    assert placebo_command(run, own, "reward") == f"evoalign.placebo('{run}', reward=...)"
    (line,) = noisy(True, pull=0.2)[0].warnings()
    assert "measure the share of the gain: evoalign placebo " in line and "RUN" not in line


def test_noise_that_earns_reward_by_itself_is_said():
    diagnosis, row = noisy(True, pull=0.2)
    (line,) = diagnosis.warnings()
    assert line.startswith("random members score better than the unperturbed model, by 0.2")
    assert summary(diagnosis.history)[-1] == f"warning: {line}"
    assert not any(line in said for said in summary(diagnosis.history, beats_noise=True)), (
        "placebos have said how much it is"
    )
    assert "es.sigma 0.0025" in line and "task.rewards" in line
    assert row["population_minus_mean_error"] == pytest.approx(0.1 / math.sqrt(32), rel=0.5)  # the pairs cancel 1
    assert noisy(False, pull=0.2)[0].warnings() == []  # as likely by chance: members differ by 1
    assert noisy(False)[1]["population_minus_mean_error"] == pytest.approx(1 / math.sqrt(32), rel=0.3)
    told = [noisy(paired, seed=seed)[0].warnings() for paired in (True, False) for seed in range(40)]
    assert not any(told)


def made_up(members, seed, drift=0.0):
    """Whether a run of 60 generations, members' fitness pure noise but for the drift, is said to fall."""
    rng, total = np.random.default_rng(seed), 60
    settings = config(es={"population_size": members}, task={})
    place, diagnosis, told = torch.zeros(NUMBERS), Diagnosis(settings, LAYOUT, torch.zeros(NUMBERS)), []
    for k in range(total):
        scores = rng.standard_normal((members, 1)) + 0.3 * rng.standard_normal((members, 4)) - drift * k
        place = place + torch.from_numpy(rng.standard_normal(NUMBERS)).float()
        made = made_of(scores, k, total)
        diagnosis.update(made, place)
        told += [line for line in diagnosis.warnings() if "fitness fell" in line]
    return bool(told)


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 30])
def test_pure_noise_is_hardly_ever_called_a_fall(members):
    assert sum(made_up(members, seed) for seed in range(60)) <= 2
    assert all(made_up(members, seed, drift=0.2) for seed in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_batches_of_unequal_difficulty_are_no_fall(seed):
    run = Run()
    run.rng = np.random.default_rng(seed)
    run.all([0.4] * 100, jitter=0.3)
    assert np.ptp([row["mean"] for row in run.rows]) > 0.3
    assert run.warnings == []


def test_an_engine_that_is_to_repeat_already_is_not_told_to():
    for told in (Run(deterministic=True), Run()):
        told.diagnosis.history.deterministic = True  # on the CPU, where nothing is set
        told.all([0.3] * 12, spread=0.02, jitter=0, control=Control(0.3, 0.33, 0.02))
        only(told, "the engine reports that it is deterministic", "task.batch_size 32")
        assert "set deterministic" not in told.warnings[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reward_that_varies_by_itself_is_no_fault_of_the_engine(temperature):
    run = Run(evaluation={"temperature": temperature})
    run.all([0.3] * 12, spread=0.02, jitter=0, control=Control(0.3, 0.33, 0.02, of_reward=0.06))
    only(
        run, "the reward gives the same text different scores (a standard deviation of 0.06 per completion)", "average"
    )
    assert "deterministic" not in run.warnings[0]
    assert "the noise floor of 0.02, of a reward that gives the same text" in summary(run.diagnosis.history)[1]
    after = Run(evaluation={"temperature": temperature})
    after.diagnosis.restore(json.loads(json.dumps(run.rows)))
    assert summary(after.diagnosis.history)[-1] == summary(run.diagnosis.history)[-1]


@pytest.mark.parametrize(
    ("said", "words", "rise"),
    [("", "empty", 0.01), ("word " * 20, "loops", 0.01), ("Fine {}.\nUser: and {}?", "chat turns", 0.01),
     ("I am sorry, but I cannot help with that request.", "one template", 0.01), ("", None, 0.0)],
)  # fmt: skip
def test_a_hacked_reward_is_named_with_its_sign_where_the_reward_rises(said, words, rise):
    run = Run()
    for k in range(40):

        def answer(m, p, share=k / 40):
            honest = text(run.rng)
            return said.format(honest, text(run.rng)) if run.rng.random() < share else honest

        run.generation(0.3 + rise * k, texts=answer)
    if words is None:
        assert run.warnings == []
    else:
        only(run, "the reward rises together with a sign of hacking, " + words, "task.rewards", "es.decay")


def test_a_short_run_is_compared_with_its_own_beginning():
    """16 generations: windows of ten would overlap, and show nothing."""
    run = Run()
    for k in range(16):
        run.generation(0.3 + 0.03 * k, texts=lambda m, p, k=k: "" if k > 9 else text(run.rng))
    only(run, "the reward rises together with a sign of hacking, empty (0% to ")
    assert "completions, first to last 5 generations: empty 0% to 100%" in summary(run.diagnosis.history)[3]


def test_the_summary_of_a_few_generations_compares_one_with_one():
    run = Run()
    for k in range(4):
        run.generation(0.3, texts=lambda m, p, k=k: "" if k > 2 else text(run.rng))
    assert summary(run.diagnosis.history)[3] == "completions, first to last generation: empty 0% to 100%"


def test_signs_that_nothing_shows_are_left_out_of_the_summary():
    run = Run()
    for k in range(40):
        run.generation(0.3, texts=lambda m, p, k=k: "" if (k, m, p) in {(0, 0, 0), (39, 1, 1)} else text(run.rng))
    assert run.rows[0]["diagnosis"]["empty_share"] == 1 / 128
    assert summary(run.diagnosis.history)[3] == "completions, first to last 10 generations: no signs of broken text"


@pytest.mark.parametrize(
    ("along", "said"),
    [(0.0, "(near 0, as usual: each is made of new noise)"), (0.9, "(they point the same way)"),
     (-0.9, "(they undo each other)")],
)  # fmt: skip
def test_what_a_cosine_means(along, said):
    assert summary(Run().all([0.3] * 30, along=along).diagnosis.history)[2].endswith(f"on average {said}")


def test_a_verdict_comes_before_learning():
    history = Run().all(0.3 + 0.01 * np.arange(40)).diagnosis.history
    assert summary(history)[0].startswith("learning: ")
    assert summary(history, "likely hacked")[0].startswith("likely hacked, judging by the completions; learning: ")


def test_gold_and_scripts_are_known_in_training():
    hebrew = "\u05d0\u05d1\u05d2 \u05d3\u05d4"
    settings = config()
    asked = Diagnosis(settings, LAYOUT, torch.zeros(NUMBERS), gold=lambda row: "yes, of course it is one",
                      known=frozenset({"LATIN"}))  # fmt: skip
    plain = Diagnosis(settings, LAYOUT, torch.zeros(NUMBERS))
    for said, name, shares in (("Yes, of course it is one.", "template", (0, 1)), (hebrew, "other_script", (1, 0))):
        made = made_of([[0.0] * 8, [1.0] * 8], rollouts=rollouts_of(2, 8, lambda m, p, said=said: said))
        found = tuple(d.update(made, torch.ones(NUMBERS))[f"{name}_share"] for d in (asked, plain))
        assert found == shares


def test_the_figures_of_a_row():
    run = Run(max_reward=1.0)
    scores = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    start = torch.arange(100.0)
    diagnosis = Diagnosis(run.config, LAYOUT, start, 1.0)
    rollouts = tuple(
        dataclasses.replace(r, finish_reason="length" if r.member.index == 3 else "stop")
        for r in rollouts_of(4, 2, lambda m, p: f"{m % 2} {p}")
    )
    made = made_of(scores, total=9, rows=(5, 3), rollouts=rollouts)
    step = torch.zeros(100)
    step[:4] = torch.tensor([3.0, 0, 4, 0])
    row = diagnosis.update(made, start + step, Control(0.9, 0.7, 0.05))
    assert row["spread"] == pytest.approx(np.std([0.5, 0, 1, 0]))
    # Columns 0.5 and 0.25: standard error over two prompts, and over four members.
    assert row["mean_error"] == pytest.approx(math.hypot(np.std([0.5, 0, 1, 0], ddof=1) / 2, 0.125))
    assert row["distance"] == pytest.approx(5 * math.sqrt(400 / 100))
    assert row["distance_sigmas"] == pytest.approx(10 / (0.01 * math.sqrt(200 * 4 + 200)))
    assert row["cosine"] is None
    assert row["noise_floor"] == pytest.approx(0.05)
    assert row["signal_to_noise"] == pytest.approx(row["spread"] / 0.05)
    assert row["population_minus_mean"] == pytest.approx(0.375 - 0.8)
    assert row["kept_share"] == pytest.approx(0.375 / 0.8)
    assert row["changed_share"] == 0.5
    assert row["solved_share"] == pytest.approx(3 / 8)
    assert row["truncated_share"] == 0.25
    turned = torch.zeros(100)
    turned[0] = 1.0
    again = diagnosis.update(made, start + step + turned, Control(0.9, 0.7, 0.07))
    assert again["cosine"] == pytest.approx(0.6)
    assert again["noise_floor"] == pytest.approx(math.sqrt((0.05**2 + 0.07**2) / 2))
    still = diagnosis.update(made, start + step + turned)
    assert (still["cosine"], still["population_minus_mean"]) == (None, None)
    json.dumps([row, again, still], allow_nan=False)


def test_without_rollouts_nothing_is_made_up():
    made = made_of([[0.0], [1.0]], rows=())
    assert changed_share(made) is None
    row = Run().diagnosis.update(made, torch.ones(NUMBERS))
    assert row["template_share"] is None and row["empty_share"] is None


def test_after_a_resume_it_goes_on_where_it_was():
    whole, first = Run(), Run()
    first.all([0.3] * 15, finish="length")
    second = Run()
    second.rng, second.place, second.step, second.index = first.rng, first.place, first.step, first.index
    second.diagnosis.restore(json.loads(json.dumps(first.rows)), first.place)
    second.all([0.3] * 15, finish="length")
    whole.all([0.3] * 30, finish="length")
    assert second.warnings == []  # told before
    assert second.rows[0]["diagnosis"]["cosine"] is None
    expected = [row["diagnosis"] for row in whole.rows[16:]]
    assert [row["diagnosis"] for row in second.rows[1:]] == expected
    only(whole, "cut off")  # once, and it stays in the summary
    assert sum("cut off" in line for line in summary(whole.diagnosis.history)) == 1
    verdicts = [summary(run.diagnosis.history) for run in (whole, second)]
    assert verdicts[0][0] == verdicts[1][0] and verdicts[0][3:] == verdicts[1][3:]


def test_a_resume_of_a_long_run_does_not_look_at_every_prefix_of_it(monkeypatch):
    looks = []
    monkeypatch.setattr(diagnosis, "causes", lambda history: looks.append(1) or causes(history))
    run = Run().all([0.3], finish="length")
    looks.clear()
    again = Diagnosis(run.config, LAYOUT, run.place)
    again.restore([{**run.rows[0], "generation": k} for k in range(3000)])
    assert 50 < len(looks) <= 101
    assert "cut off" in " ".join(summary(again.history)) and again.warnings() == []


def test_rows_that_were_rebuilt_from_the_journal_know_less():
    run = Run()
    run.all(0.3 + 0.02 * np.arange(30))
    bare = [{**row, "diagnosis": None, "empty_share": None, "truncated_share": None} for row in run.rows]
    after = Run()
    after.diagnosis.restore(bare)
    assert summary(after.diagnosis.history)[0].startswith("learning")
    assert after.generation(0.9)["cosine"] is None
    assert after.warnings == []


def test_the_noise_floor_is_the_standard_deviation_of_one_score():
    rng = np.random.default_rng(1)
    truth = rng.standard_normal(50)
    made = [control_of(*(truth + 0.3 * rng.standard_normal(50) for _ in range(2))) for _ in range(2000)]
    floor = math.sqrt(np.mean([control.floor**2 for control in made]))
    assert floor == pytest.approx(np.std([control.first for control in made]), rel=0.05)
    assert control_of([1.0, 2.0], [1.0, 2.0]) == (1.5, 1.5, 0.0, None)


def test_what_the_reward_alone_differs_by_is_that_of_texts_that_came_twice():
    first, second, same = [0.0, 1.0, 5.0, 2.0], [0.6, 0.8, 9.0, 2.0], [True, True, False, True]
    assert control_of(first, second, same).of_reward == pytest.approx(math.sqrt((0.36 + 0.04) / 3 / 2))
    assert control_of(first, second, [False] * 4).of_reward is None
    assert control_of([1.0, 2.0], [1.0, 2.0], [True, True]).of_reward == 0.0


def test_a_real_control_tells_a_reward_that_varies_from_the_engine():
    rng = np.random.default_rng(0)

    def chance(text, example):
        return float(rng.random())

    tree = quickstart()
    tree["task"] = {"name": "custom", "train_data": tree["task"]["test_data"]}
    tree["grader"] = {"isolated": False}
    parts = assemble(from_dict(tree), reward=chance)
    try:
        found = controlled(parts, parts.data.train, 0)
    finally:
        parts.close()
    assert found.of_reward == pytest.approx(math.sqrt(1 / 12), rel=0.5)  # a uniform draw's
    assert found.floor == pytest.approx(found.of_reward / math.sqrt(len(parts.data.train)))


def controlled(parts, examples, generation):
    requests = requests_of(parts.config, parts.task, parts.tokens, examples, generation)
    assert [request.index for request in requests] == list(range(2 * len(examples)))
    return control(parts.task.objective(), parts.task, collect(parts.engine, MEAN_PLAN, requests), examples)


def test_signs_are_searched_in_all_prompts_of_evenly_spaced_members():
    few, many = (completed(members, 100) for members in (4, 30))
    assert len(diagnosis._searched(few)) == 400
    searched = [(rollout.member.index, rollout.request) for rollout in diagnosis._searched(many)]
    assert searched == [(member, request) for member in (0, 6, 12, 18, 24) for request in range(100)]


def completed(members, prompts):
    everyone = population(members)
    rollouts = tuple(Rollout(member, request, (1,), "a", "stop") for member in everyone for request in range(prompts))
    scores, update = ((0.0,) * prompts,) * members, Update(0, 0, everyone, (0.0,) * members, 1.0, 1.0)
    return Generation(
        0, 1, (0.0,) * members, scores, update, "", 0, 0.0, 0.0, {}, None, tuple(range(prompts)), rollouts
    )


def quickstart(**es):
    data = Path(__file__).parents[2] / "data/tasks/conciseness"
    return {
        "task": {"name": "conciseness", "train_data": str(data / "conciseness_train.json"),
                 "test_data": str(data / "conciseness_test.json")},
        "lora": {"rank": 8, "alpha": 8, "target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": 14, "population_size": 12, "sigma": 0.05, "learning_rate": 0.025, "antithetic": True}
        | es,
        "engine": {"device": "cpu", "threads": 1},
        "evaluation": {"max_tokens": 60},
    }  # fmt: skip


def real(tree, folder):
    """A run of the shipped model, its warnings and rows."""
    parts = assemble(from_dict(tree))
    try:
        diagnosis = Diagnosis(parts.config, parts.layout, parts.engine.probe_weights(SAMPLE), parts.task.max_reward)
        book = Journal(folder / "journal.jsonl", saving.header(parts, None))
        warnings, rows = [], []
        for made in evolve.evolve(parts.run(book)):
            examples = [parts.data.train[row] for row in made.rows]
            seen = controlled(parts, examples, made.index)
            rows.append(diagnosis.update(made, parts.engine.probe_weights(SAMPLE), seen))
            warnings += diagnosis.warnings()
        book.close()
        return warnings, rows, diagnosis
    finally:
        parts.close()


@pytest.mark.slow
def test_a_real_run_that_learns(tmp_path):
    warnings, rows, diagnosis = real(quickstart(), tmp_path)
    # Noise alone makes answers shorter, and this reward asks for no more: of one that learns, that is all that is told.
    assert all("noise alone earns some of this reward" in warning for warning in warnings)
    assert summary(diagnosis.history)[0].startswith("learning")
    assert all(row["noise_floor"] == 0 for row in rows)  # greedy, on the CPU
    assert 0 < rows[0]["distance"] < rows[-1]["distance"]
    # One update's norm is eta * sqrt(sum of squared pair weights) / N of a member's; of independent ones it is about
    # eta / sqrt(N) = 0.14.
    assert 0.05 < rows[0]["distance_sigmas"] < 0.3
    assert all(row["cosine"] is None or abs(row["cosine"]) < 0.5 for row in rows)


@pytest.mark.slow
def test_a_real_run_with_hardly_any_noise(tmp_path):
    warnings, rows, _ = real(quickstart(sigma=1e-7, learning_rate=5e-8), tmp_path)
    assert len(warnings) == 1 and "the noise is too narrow" in warnings[0]
    assert all(row["changed_share"] == 0 for row in rows)


def test_a_real_control_draws_anew_when_sampling(tmp_path):
    tree = quickstart(num_generations=1)
    tree["evaluation"] |= {"temperature": 1.0}
    _, rows, _ = real(tree, tmp_path)
    first, second, floor = rows[0]["control"]
    assert first != second and floor > 0


def test_sampled_places_are_spread_by_size_in_step_with_no_row_and_all_where_they_are_few():
    layout = Layout((EvolvedTensor("a", (256, 300), "a"), EvolvedTensor("b", (7,), "b"),
                     EvolvedTensor("c", (256, 100), "c")), 0, "float32")  # fmt: skip
    places = dict(sampled_places(layout, 1024))
    assert sum(map(len, places.values())) == 1024
    assert len(places["a"]) == pytest.approx(768, abs=2) and len(places["c"]) == pytest.approx(256, abs=2)
    for name, columns in (("a", 300), ("c", 100)):
        assert places[name].max() < math.prod(layout[name].shape)
        assert len(set((places[name] % columns).tolist())) > 60
        assert torch.all(places[name][1:] >= places[name][:-1])
    again = dict(sampled_places(layout, 1024))
    assert all(torch.equal(places[name], again[name]) for name in places)
    places = dict(sampled_places(LAYOUT, 400))
    assert torch.equal(places["a"], torch.arange(200)) and torch.equal(places["b"], torch.arange(200))
    assert sum(map(len, dict(sampled_places(LAYOUT, 10**6)).values())) == 400


class SamplesTheServed(TransformersEngine):
    """Takes the served weights, rounded, for the mean."""

    def probe_weights(self, count):
        return super().probe_weights(count).to(torch.bfloat16).float()


class SamplesAView(TransformersEngine):
    """Gives the same memory out again."""

    def probe_weights(self, count):
        taken = super().probe_weights(count)
        kept = self.__dict__.setdefault("kept", {}).setdefault(len(taken), taken)
        return kept.copy_(taken)


@pytest.mark.parametrize("engine", [SamplesTheServed, SamplesAView])
def test_the_contract_finds_a_wrong_sample(random_qwen2, engine):
    tree = {"space": "lora", "model": {"name": str(random_qwen2)}, "engine": {"device": "cpu"},
            "es": {"sigma": 0.05, "learning_rate": 0.02}}  # fmt: skip
    with contract.started(engine, from_dict(tree)) as bench, pytest.raises(AssertionError):
        contract.check_sample(bench)


@pytest.mark.parametrize(("members", "prompts"), [(6, 4), (5, 6)])
def test_reliability_is_the_mean_over_split_halves_without_its_bias(members, prompts):
    """Alpha is the mean of Rulon's coefficient, 4 cov(half, other) / var(sum), over all splits of the prompts."""
    scores_MP = np.random.default_rng(0).standard_normal((members, prompts)) + np.arange(members)[:, None] / 2
    halves = []
    for half in combinations(range(prompts), prompts // 2):
        one = scores_MP[:, list(half)].sum(axis=1)
        other = scores_MP.sum(axis=1) - one
        halves.append(4 * np.cov(one, other, ddof=0)[0, 1] / (one + other).var())
    assert 1 - reliability(scores_MP) == pytest.approx((1 - np.mean(halves)) * (members - 3) / (members - 1))


@pytest.mark.parametrize("members", [6, 30])
@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_reliability_is_right_on_average_for_few_members(members, shared):
    rng, prompts = np.random.default_rng(0), 8
    true = prompts * shared**2 / (1 + prompts * shared**2)
    draws = [shared * rng.standard_normal((members, 1)) + rng.standard_normal((members, prompts)) for _ in range(2000)]
    assert np.mean([reliability(scores_MP) for scores_MP in draws]) == pytest.approx(true, abs=0.05)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[1.0], [2.0], [3.0], [4.0]], None),
        ([[1.0, 2.0]] * 4, None),
        ([[1.0, 2.0], [2.0, 1.0]] * 2, None),
        ([[1.0, 5.0], [2.0, 6.0], [4.0, 8.0]], None),
        ([[1.0, 5.0], [2.0, 6.0], [4.0, 8.0], [5.0, 9.0]], 1.0),
    ],
)
def test_reliability_of_one_prompt_and_of_equal_members_is_not_known(scores, expected):
    assert reliability(np.array(scores)) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("shared", "warned"), [(None, True), (0.2, False), (0.5, False)])
def test_ranks_that_do_not_hold_on_other_prompts_are_warned_about(shared, warned):
    """Where `shared` is None, what members gain on one half of the prompts they lose on the other."""
    run, rng = Run(), np.random.default_rng(1)
    for _ in range(30):
        scores = rng.standard_normal((MEMBERS, PROMPTS))
        if shared is None:
            scores[:, 1::2] = 0.3 * scores[:, 1::2] - scores[:, ::2]
        else:
            scores += shared * rng.standard_normal((MEMBERS, 1))
        run.generation(0, scores=scores, control=Control(0.0, 0.0, 0.0))
    found = np.mean([row["diagnosis"]["reliability"] for row in run.rows])
    assert any("reliability" in line for line in run.warnings) == warned
    (line,) = [line for line in summary(run.diagnosis.history) if line.startswith("signal:")]
    assert f"reliability {found:.2f}" in line and "noise floor" not in line
