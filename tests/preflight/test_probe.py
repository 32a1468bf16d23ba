# SPDX-License-Identifier: Apache-2.0
"""The probe on the shipped model: what it measures, recommends, shows and writes."""

import dataclasses
import json
import signal
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import caller
from rich.console import Console
from typer.testing import CliRunner

from evoalign import optimizer as optimizers
from evoalign import rollouts
from evoalign import shaping as shaping_module
from evoalign.cli import app
from evoalign.config import from_dict, load, to_yaml
from evoalign.cost import estimate
from evoalign.errors import ConfigError
from evoalign.preflight import probe as module
from evoalign.preflight.advice import ETA, texts
from evoalign.preflight.probe import probe
from evoalign.setup import assemble
from evoalign.types import MEAN_PLAN, Layout, Plan, population

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data/tasks/countdown/countdown.json"
QUICKSTART = ROOT / "configs/quickstart.yaml"
SHORT = {"max_tokens": 12}


def tree(folder, space="lowrank", **changes):
    es = {"population_size": 8, "sigma": 0.01, "learning_rate": 0.005} | changes.pop("es", {})
    return {
        "output_dir": str(folder / "run"), "space": space, "engine": {"device": "cpu", "threads": 1},
        "task": {"name": "countdown", "train_data": str(DATA), "prompt": "short", "batch_size": 8},
        "es": {name: value for name, value in es.items() if value is not None}, "evaluation": {"max_tokens": 40},
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Probe a sigma that changes nothing, useful ones, and one that breaks the model."""
    folder = tmp_path_factory.mktemp("wide")
    told = []
    result = probe(tree(folder), sigmas=[10.0, 0.01, 1e-7, 0.005], members=8, examples=16, tell=told.append)
    return folder, told, result


def test_probe_warns_if_the_model_itself_is_cut_off(tmp_path):
    asked = {"sigmas": [0.01, 0.02], "members": 4, "examples": 4}
    cut = probe(tree(tmp_path, sampling={"max_tokens": 3}), **asked)
    (told,) = [line for line in cut.warnings if "cut off at 3 tokens" in line]
    assert cut.truncated_share == 1 and told.startswith("100% of the unperturbed model")
    whole = probe(tree(tmp_path, sampling={"max_tokens": 40}), **asked)
    assert whole.truncated_share < 0.5 and not any("cut off at" in line for line in whole.warnings)


def test_probe_measures_from_no_noise_to_a_broken_model_and_says_its_cost(wide):
    folder, told, result = wide
    nothing, _, good, broken = result.rungs
    assert [r.width for r in result.rungs] == [1e-7, 0.005, 0.01, 10.0]
    assert (nothing.changed_share, nothing.spread, nothing.drop, nothing.gain) == (0.0, 0.0, 0.0, None)
    assert nothing.kept == 1.0 and nothing.broken_share == result.broken_share
    assert nothing.truncated_share == result.truncated_share and nothing.best_text == result.text
    assert 0 < good.changed_share < 0.9 and good.spread > 0 and 0.5 < good.kept <= 1.1
    assert broken.changed_share == 1.0 and broken.kept == 0.0
    assert broken.broken_share + broken.truncated_share > 0.5 and broken.median_text != result.text
    assert broken.drop == pytest.approx(result.fitness)
    assert result.fitness > 0 and result.noise_floor == 0  # greedy, on the CPU
    line, seconds = told
    assert seconds.startswith("about ")
    assert "4 widths x 8 members x 16 prompts: 544 completions of at most 40 tokens, as many as 8.5 generations" in line
    assert result.completions == 544 and list(folder.iterdir()) == [], "it writes nothing"


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    """Probe questions at a useful width, at twice that, and at one that breaks the model."""
    folder = tmp_path_factory.mktemp("brief")
    return probe(load([QUICKSTART], [f"output_dir={folder}/run"]), sigmas=[0.025, 0.05, 1.0], members=32, examples=16)


def test_probe_recommends_what_can_be_learned(brief):
    near, own, far = brief.rungs
    assert brief.width == 0.05 and ETA * 0.05 / 2**0.5 < brief.learning_rate < ETA * 0.05  # in pairs
    assert "es.sigma 0.05" in brief.reason and f"es.learning_rate {brief.learning_rate:.4g}" in brief.reason
    assert near.gain is None and own.chance < 0.01 and own.gain > own.gain_error > 0
    low, high = brief.gain_interval
    assert low < own.gain < high
    assert far.truncated_share > 0.3 and brief.truncated_share == 0, "its texts do not end, those of the start do"


def test_texts_are_shown_without_markup(brief):
    """The best and the median member of each width are shown."""
    for rung in brief.rungs:
        assert rung.best_text and rung.median_text
    assert len(brief.rungs[1].best_text) < len(brief.text), "the reward is brevity"
    odd = dataclasses.replace(brief, text="[bold]a\x1b[31m\nb", question="[red]?")
    console = Console(width=120, record=True)
    console.print(texts(odd))
    shown = console.export_text()
    assert "[bold]a\\x1b[31m\\nb" in shown and "answers to: [red]?" in shown
    assert shown.count("best") == shown.count("median") == 3


@pytest.mark.parametrize(("size", "members"), [(6, None), (8, 6)])
def test_a_shaping_for_another_number_of_members_is_refused_before_they_are_paid_for(
    size, members, tmp_path, monkeypatch
):
    (tmp_path / f"fixed_{size}.py").write_text(f"def fixed(scores): return scores.mean(1) - [0.1] * {size}\n")
    monkeypatch.syspath_prepend(tmp_path)
    steps = []
    with pytest.raises(ConfigError, match="--members"):
        config = tree(tmp_path, es={"shaping": f"fixed_{size}:fixed"})
        probe(config, sigmas=[0.004, 0.012], members=members, examples=16, on_step=steps.append)
    assert steps == []
    config = tree(tmp_path, es={"shaping": f"fixed_{size}:fixed"})
    probe(config, sigmas=[0.004, 0.012], members=size, examples=16, on_step=steps.append)
    assert len(steps) == 2


def test_probe_agrees_with_a_calculation_by_hand(tmp_path):
    """Spread, drop, changed share and gain of two widths, computed from the engine's completions."""
    result = probe(tree(tmp_path), sigmas=[0.004, 0.012], members=6, examples=5)
    parts = assemble(from_dict(tree(tmp_path)))
    try:
        rows = rollouts.batch(len(parts.data.train), 5, 0, 0)
        examples = [parts.data.train[row] for row in rows]
        prompts = rollouts.Encoded(parts.task, parts.tokens, examples)
        requests = rollouts.requests_of(parts.config, range(5), prompts, 0)
        own = {r.request: r.text for r in parts.engine.rollout(MEAN_PLAN, requests)}
        mean = np.mean([parts.task.compute_reward(own[p].strip(), e) for p, e in enumerate(examples)])
        fitness, changed, scores = [], [], []
        for width in (0.004, 0.012):
            texts = {
                (r.member.index, r.request): r.text
                for r in parts.engine.rollout(Plan(0, width, population(6, antithetic=True)), requests)
            }
            score = [[parts.task.compute_reward(texts[m, p].strip(), examples[p]) for p in range(5)] for m in range(6)]
            fitness.append(np.mean(score, axis=1))
            scores.append(np.array(score))
            changed.append(np.mean([texts[m, p] != own[p] for m in range(6) for p in range(5)]))
    finally:
        parts.close()
    for k, got in enumerate(result.rungs):
        assert got.spread == pytest.approx(fitness[k].std())
        assert got.drop == pytest.approx(mean - fitness[k].mean())
        assert got.changed_share == pytest.approx(changed[k])
        pairs = (fitness[k][0::2] + fitness[k][1::2]) / 2 - mean
        assert got.drop_error == pytest.approx(pairs.std(ddof=1) / 3**0.5)
    near, far = ((f[0::2] - f[1::2]) / 2 for f in scores)
    assert result.rungs[0].gain is None, "there is no smaller width to vouch for it"
    drift = max(0.0, mean - fitness[1].mean()) * ETA**2 / 8
    assert result.rungs[1].drift == pytest.approx(drift)
    both = [[far[k, p] * near[k, q] for p, q in permutations(range(5), 2)] for k in range(3)]
    assert result.rungs[1].gain + drift == pytest.approx(ETA * np.mean(both) * 3 / fitness[1].std())


@pytest.mark.last("lora")
@pytest.mark.parametrize("space", ["lora", "full"])
def test_probe_runs_in_other_spaces(tmp_path, space):
    result = probe(tree(tmp_path, space, sampling=SHORT), sigmas=[1e-6, 1.0], members=4, examples=4)
    low, high = result.rungs
    assert low.changed_share == 0 and high.changed_share == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_probe_of_noise_multiplier_has_its_own_ladder(tmp_path):
    es = {"sigma": None, "noise_multiplier": 0.05, "learning_rate": 0.5}
    result = probe(tree(tmp_path, es=es), members=4, examples=4)
    assert result.setting == "noise_multiplier"
    assert result.rungs[0].width == pytest.approx(0.05 / 16) and result.rungs[-1].width == pytest.approx(0.8)
    assert result.own_width == 0.05 == result.rungs[4].width
    assert len(result.rungs) == 9


def test_probe_of_ab_has_no_pairs(tmp_path, monkeypatch):
    seen, judge = [], module.judge
    monkeypatch.setattr(module, "judge", lambda *given: seen.append(judge(*given)) or seen[-1])
    probe(tree(tmp_path, "lora", lora={"evolve": "ab", "rank": 2}), sigmas=[0.04, 0.08], members=6, examples=8)
    assert len(seen) == 2
    assert not np.array_equal(seen[1][0::2], seen[1][1::2])  # pairs would be the same model, (-B)(-A) = B A


def run_of(prompts=4, paired=True, **es):
    config = from_dict({"space": "lora", "es": {"sigma": 0.01, "population_size": 8, **es}})
    return module.Training(config.es, prompts, paired)


@pytest.mark.first("linear0-True-True", "zscore")
@pytest.mark.parametrize("shaping", ["zscore", "ranks", "truncation", "centered", "identity"])
@pytest.mark.parametrize(("antithetic", "linear"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    "optimizer", ["sgd", {"name": "momentum", "momentum": 0.8}, "adam"], ids=lambda o: o if o == "adam" else "linear"
)
def test_recommended_step_is_that_of_sgd_with_zscores(shaping, antithetic, linear, optimizer):
    """Steps with the recommended rate; the reward is linear in the noise, or chance, and differs between prompts."""
    run = run_of(antithetic=antithetic, shaping=shaping, optimizer=optimizer, population_size=64)
    rng, steps, eta = np.random.default_rng(0), [], []
    for _ in range(200):
        noise = rng.standard_normal((64, 300))
        if antithetic:
            noise[1::2] = -noise[0::2]
        drawn = noise if linear else rng.standard_normal((64, 5))
        scores_MP = 0.6 + drawn[:, :4] + drawn[:, 4:5]
        found, _ = run.step(scores_MP)
        eta.append(found)
        coefficients = shaping_module.shape(scores_MP, shaping)
        steps.append(np.linalg.norm(found * coefficients @ noise[:, 20:]) / 64)
    if optimizer == "adam":
        assert eta[0] == pytest.approx(ETA / 8)
        return
    moved = 1 / 0.2 if optimizer != "sgd" else 1.0
    short = shaping == "truncation" and antithetic and linear  # the pair's coefficients correlate less than its fitness
    assert np.mean(steps) * moved == pytest.approx(ETA * (280 / 64) ** 0.5, rel=0.2 if short else 0.05)


@pytest.mark.parametrize("optimizer", ["adam", {"name": "momentum", "momentum": 0.8}])
def test_reach_is_the_distance_of_an_optimizer(optimizer):
    """Random gradients of a population of 100, each 1 / 10 of a member's noise: where the mean is after 400."""
    es = from_dict({"es": {"sigma": 0.01, "population_size": 100, "optimizer": optimizer}}).es
    moving = optimizers.create(es, Layout((), 0, "float32"))
    generator = torch.Generator().manual_seed(0)
    far, plain = torch.zeros(2000), torch.zeros(2000)
    for _ in range(400):
        gradient = torch.randn(2000, generator=generator) / 10
        far += moving.direction("w", gradient)
        plain += gradient
    assert float(far.norm() / plain.norm()) == pytest.approx(optimizers.reach(es), rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "eta", "words", "rate"),
    [
        ("sgd", 1.0, None, None),
        ("sgd", 2.5, "warning: eta 2.5 is outside 0.05 to 2.0 (the paper's is 0.5): steps overshoot", "0.005"),
        ("adam", 0.5, "warning: eta 0.5, which adam makes 2.5, is outside 0.05 to 2.0", "0.001"),
        ("adam", 0.02, None, None),
        ("momentum", 0.5, "warning: eta 0.5, which momentum makes 5, is outside", "0.0005"),
        ("ranks", 2.5, None, None),
        ("ranks", 0.1, "warning: eta 0.1, which ranks makes 0.03005, is outside", "0.017"),
        ("antithetic", 1.5, "warning: eta 1.5, which antithetic makes 2.121, is outside", "0.0035"),
    ],
)
def test_step_lines_warn_by_the_optimizers_reach(optimizer, eta, words, rate):
    odd = {"ranks": {"shaping": "ranks"}, "antithetic": {"antithetic": True}}.get(optimizer, {"optimizer": optimizer})
    es = {"sigma": 0.01, "learning_rate": eta * 0.01, "population_size": 24 if optimizer == "antithetic" else 25, **odd}
    told = [line for line in estimate.step_lines(from_dict({"es": es}), None) if line.startswith("warning")]
    assert len(told) == (words is not None)
    assert words is None or (told[0].startswith(words) and told[0].endswith(f"; set es.learning_rate to about {rate}"))


@pytest.mark.parametrize("shaping", ["centered", "identity"])
def test_step_lines_say_that_a_step_depends_on_the_scores(shaping):
    es = {"sigma": 0.01, "learning_rate": 1.0, "shaping": shaping}
    told = estimate.step_lines(from_dict({"es": es}), None)
    assert not any(line.startswith("warning") for line in told) and f"es.shaping {shaping} depend" in told[1]


def test_gain_falls_where_far_members_win_for_other_reasons():
    """Fitness sin(x): at 4 members spread as much as at 1, and their order is the reverse of that at 2."""
    rng = np.random.default_rng(0)
    eps = rng.choice([-1.0, 1.0], 400) * (1 + 0.05 * rng.standard_normal(400))

    def climb(width):
        x = np.stack([width * eps, -width * eps], axis=1).ravel()
        return module.WidthScores(width, np.sin(x)[:, None], 1.0, 0.0, 0.0, ("",) * len(x))

    def measured(width):
        return module.widths_of([climb(width / 2), climb(width)], np.zeros(1), run_of(1))[1]

    small, middle, large = (measured(width) for width in (0.05, 0.8, 4.0))
    assert small.gain == pytest.approx(ETA * 0.05, rel=0.01)  # linear: eta times the spread
    assert middle.gain > 10 * small.gain
    assert large.spread > middle.spread and large.gain < 0


def test_second_pass_has_new_members_at_two_neighbouring_widths(tmp_path, monkeypatch):
    plans, collect, steps = [], module.collect, []
    monkeypatch.setattr(module, "collect", lambda engine, plan, some: plans.append(plan) or collect(engine, plan, some))
    sigmas = [0.005, 0.01, 0.02, 0.04]
    asked = {"sigmas": sigmas, "members": 16, "examples": 8, "on_step": steps.append}
    result = probe(tree(tmp_path), **asked)
    members = [[m.index for m in plan.members] for plan in plans if len(plan.members) > 1]
    assert members[:4] == [list(range(8))] * 4 and members[4:] == [list(range(8, 24))] * 2
    near, far = (plan.sigma for plan in plans[-2:])
    assert sigmas.index(far) == sigmas.index(near) + 1
    assert [r.pairs for r in result.rungs] == [8 if r.width == far else 4 for r in result.rungs]
    assert [r.width for r in result.rungs if r.chance is not None] in ([far], [near, far])
    assert result.completions == (4 * 16 + 2) * 8 and [s.total for s in steps] == [6] * 6


@pytest.mark.parametrize(("agreement", "recommended"), [(0.4, 0.02), (1.0, 0.04)])
def test_the_smaller_tested_width_is_recommended_where_new_members_gain_less_at_the_larger(
    tmp_path, monkeypatch, agreement, recommended
):
    """A direction helps on all prompts at each width, but that of the larger one may hardly be that of the smaller."""
    rng = np.random.default_rng(0)
    effects, others = rng.standard_normal((2, 64))
    steps = {0.005: 0.02, 0.01: 0.04, 0.02: 0.08, 0.04: 0.1}

    def score(parts, width, members, prompted):
        kept = agreement if width == 0.04 and members[0].index > 0 else 1.0
        along = kept * effects + (1 - kept) * others
        effect_M = steps[width] * np.array([m.sign * along[m.noise] for m in members])
        noise_MP = 0.01 * rng.standard_normal((len(members), len(prompted.requests)))
        return module.WidthScores(width, 0.5 + effect_M[:, None] + noise_MP, 0.5, 0.0, 0.0, ("",) * len(members))

    monkeypatch.setattr(module, "_score", score)
    monkeypatch.setattr(module, "rewarded", lambda objective, task, rollouts, examples: np.full(len(examples), 0.5))
    result = probe(tree(tmp_path), sigmas=list(steps), members=64, examples=8)
    assert result.width == recommended
    assert [r.width for r in result.rungs if r.chance is not None] == [0.02, 0.04]


def test_enough_members_make_up_for_few_prompts():
    assert [module._enough(prompts, 64) for prompts in (64, 32, 30, 16, 2, 1)] == [32, 64, 68, 128, 128, 128]


def test_interrupted_probe_keeps_finished_widths(tmp_path, monkeypatch):
    """Both signals, during the third width; the handler of SIGTERM is restored."""
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        asked, judge = [], module.judge

        def seen(*given, number=number, asked=asked, judge=judge):
            asked.append(given)
            if len(asked) == 3:
                signal.raise_signal(number)
            return judge(*given)

        monkeypatch.setattr(module, "judge", seen)
        with pytest.raises(module.ProbeStoppedError) as stopped:
            probe(tree(tmp_path, sampling=SHORT), sigmas=[0.005, 0.01, 0.02, 0.04], members=4, examples=1)
        monkeypatch.setattr(module, "judge", judge)
        result = stopped.value.result
        assert stopped.value.signal == number and signal.getsignal(signal.SIGTERM) == before
        assert [r.width for r in result.rungs] == [0.005, 0.01] and result.completions == 2 + 2 * 4
        assert result.width is None and result.reason == "nothing is recommended: stopped after 2 of 4 widths"


@pytest.mark.parametrize("wrong", [
    {"sigmas": [0.1]}, {"sigmas": [0.1, -1]}, {"sigmas": []}, {"sigmas": [0.1, float("nan")]}, {"members": 7},
    {"members": 2}, {"examples": 0}, {"grpo": {"max_steps": 1}},
])  # fmt: skip
def test_probe_rejects_invalid_arguments_and_a_config_for_grpo(tmp_path, wrong):
    of_grpo = "grpo" in wrong
    with pytest.raises(ConfigError, match="missing setting es" if of_grpo else None):
        probe(from_dict(wrong)) if of_grpo else probe(tree(tmp_path), **wrong)


def test_probe_command_shows_and_writes_json(tmp_path):
    config, out, overlay = _written(tmp_path), tmp_path / "deep/probe.json", tmp_path / "deep/wide.yaml"
    arguments = ["probe", str(config), "--sigmas", "1e-3,0.008", "--members", "4", "--examples", "4"]
    shown = CliRunner().invoke(app, [*arguments, "--json", str(out), "--write", str(overlay)])
    assert shown.exit_code == 1, "nothing was recommended, and so nothing written"
    assert "nothing is recommended: " in shown.output and f"{overlay} is not written" in shown.output
    assert "about " in shown.output and "completions are as long" in shown.output
    assert shown.output.index("2 widths x 4 members x 4 prompts") < shown.output.index("width 1/2  0.001: ")
    assert shown.output.index("width 2/2  0.008: ") < shown.output.index("gain a generation")
    written = json.loads(out.read_text())
    assert [r["width"] for r in written["rungs"]] == [0.001, 0.008] and written["rungs"][0]["gain"] is None
    assert written["reason"] in shown.output and written["rungs"][1]["best_text"]
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.yaml", "deep", "probe.json"]
    again = CliRunner().invoke(app, [*arguments, "--write", str(overlay)])
    assert again.exit_code == 1 and json.loads(overlay.with_suffix(".json").read_text())["width"] is None
    wrong = CliRunner().invoke(app, ["probe", str(config), "--sigmas", "a,b"])
    assert isinstance(wrong.exception, ConfigError)


def test_probe_command_writes_an_overlay(tmp_path, monkeypatch, brief):
    monkeypatch.setattr(module, "probe", lambda *given, **named: brief)
    config, overlay = _written(tmp_path), tmp_path / "deep/wide.yaml"
    shown = CliRunner().invoke(app, ["probe", str(config), "--write", str(overlay)])
    assert shown.exit_code == 0 and f"--config {overlay}" in shown.output
    both = load([config, overlay])
    assert (both.es.sigma, both.es.learning_rate) == (brief.width, brief.learning_rate)
    text = overlay.read_text()
    again = CliRunner().invoke(app, ["probe", str(config), "--write", str(overlay)])
    assert isinstance(again.exception, ConfigError) and "exists already" in str(again.exception)
    assert overlay.read_text() == text
    (tmp_path / "taken.json").write_text("{}")
    for name in ("taken.yaml", "one.json"):  # the measurements would replace a file, or be replaced
        both = CliRunner().invoke(app, ["probe", str(config), "--write", str(tmp_path / name)])
        assert isinstance(both.exception, ConfigError)
    assert (tmp_path / "taken.json").read_text() == "{}" and not (tmp_path / "one.json").exists()
    mine = CliRunner().invoke(app, ["probe", str(config), "--write", str(config)])
    assert isinstance(mine.exception, ConfigError) and load([config]).es.sigma == 0.01


def test_probe_command_shows_finished_widths_after_ctrl_c(tmp_path, monkeypatch, capsys, brief):
    part = dataclasses.replace(brief, rungs=brief.rungs[:1], width=None, reason="nothing is recommended: stopped")

    def stopped(*given, **named):
        raise module.ProbeStoppedError(part, 2)

    monkeypatch.setattr(module, "probe", stopped)
    out, overlay = tmp_path / "probe.json", tmp_path / "wide.yaml"
    done = caller(monkeypatch, capsys)("probe", _written(tmp_path), "--json", out, "--write", overlay)
    assert done.code == 130
    assert [r["width"] for r in json.loads(out.read_text())["rungs"]] == [0.025] and not overlay.exists()


def _written(folder):
    config = folder / "config.yaml"
    config.write_text(to_yaml(from_dict(tree(folder))))
    return config


@pytest.mark.parametrize(("more", "long"), [([], False), (["--set", "es.num_generations=1"], True)])
def test_dry_run_prints_the_cost_and_warns_of_a_probe_longer_than_the_run(more, long, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(from_dict(tree(tmp_path / "run"))))
    arguments = ["probe", str(config), "--members", "64", "--examples", "4", "--dry-run", *more]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and "9 widths x 64 members x 4 prompts: 2,312 completions" in shown.output
    assert "time: the probe prints an estimate" in shown.output
    assert ("warning: that is" in shown.output) == long
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
