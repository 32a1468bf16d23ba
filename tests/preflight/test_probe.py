# SPDX-License-Identifier: Apache-2.0
"""The probe on the shipped model, and its recommendation from made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from evoalign import optimizer as optimizers
from evoalign.checks.control import Control
from evoalign.cli import app
from evoalign.config import from_dict
from evoalign.cost import estimate
from evoalign.errors import ConfigError
from evoalign.preflight import ladder as module
from evoalign.preflight.ladder import ETA, ProbeResult, Rung, lines, probe, recommend, table

DATA = Path(__file__).parents[2] / "data/tasks/countdown/countdown.json"
START = Control(0.4, 0.4, 0.0)


def tree(folder, space="lowrank", **changes):
    es = {"population_size": 8, "sigma": 0.01, "learning_rate": 0.005} | changes.pop("es", {})
    return {
        "output_dir": str(folder / "run"),
        "space": space,
        "task": {"name": "countdown", "train_data": str(DATA), "prompt": "short", "batch_size": 8},
        "es": {name: value for name, value in es.items() if value is not None},
        "engine": {"device": "cpu", "threads": 1},
        "evaluation": {"max_tokens": 40},
        **changes,
    }


def rung(width, gain, *, kept=1.0, spread=0.1, changed=0.5, broken=0.0):
    return Rung(width=width, changed_share=changed, spread=spread, drop=0.0, kept=kept, broken_share=broken, gain=gain)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A sigma that changes nothing, one that is good, and one that breaks everything."""
    folder = tmp_path_factory.mktemp("wide")
    told = []
    result = probe(tree(folder), sigmas=[10.0, 0.01, 1e-7, 0.005], members=8, examples=16, tell=told.append)
    return folder, told, result


def test_from_no_noise_to_far_too_much(wide):
    _, _, result = wide
    nothing, _, good, broken = result.rungs
    assert [r.width for r in result.rungs] == [1e-7, 0.005, 0.01, 10.0]
    assert (nothing.changed_share, nothing.spread, nothing.drop, nothing.gain) == (0.0, 0.0, 0.0, 0.0)
    assert nothing.kept == 1.0 and nothing.broken_share == result.broken_share
    assert 0 < good.changed_share < 0.9 and good.spread > 0 and 0.5 < good.kept <= 1.1
    assert broken.changed_share == 1.0 and broken.kept == 0.0 and broken.broken_share > 0.5
    assert broken.drop == pytest.approx(result.fitness)
    assert result.fitness > 0 and result.noise_floor == 0  # greedy, on the CPU


def test_what_is_recommended_on_the_shipped_model(wide):
    _, _, result = wide
    assert result.width in (0.005, 0.01)
    assert result.learning_rate == pytest.approx(ETA * result.width)
    assert f"es.sigma {result.width:g}" in result.reason and "es.learning_rate" in result.reason


def test_the_cost_is_told_before_and_nothing_is_written(wide):
    folder, told, result = wide
    assert told == [
        "probe: 4 widths x 8 members x 16 prompts: 544 completions of at most 40 tokens, as many as 8.5 generations of "
        "this config"
    ]
    assert result.completions == 544
    assert list(folder.iterdir()) == []


def test_the_figures_are_those_of_an_engine_asked_by_hand(tmp_path):
    """Spread, drop, changed share and gain of two rungs, computed here from the engine's own completions."""
    from evoalign import evolve
    from evoalign.setup import assemble
    from evoalign.types import MEAN_PLAN, Plan, population

    result = probe(tree(tmp_path), sigmas=[0.004, 0.012], members=6, examples=5)
    parts = assemble(from_dict(tree(tmp_path)))
    try:
        rows = evolve.batch(len(parts.data.train), 5, 0, 0)
        examples = [parts.data.train[row] for row in rows]
        prompts = [parts.tokens.encode(parts.task.prompt(e)) for e in examples]
        requests = evolve.requests_of(parts.config, range(5), prompts, 0)
        own = {r.request: r.text for r in parts.engine.rollout(MEAN_PLAN, requests)}
        mean = np.mean([parts.task.compute_reward(own[p].strip(), e) for p, e in enumerate(examples)])
        fitness, changed = [], []
        for width in (0.004, 0.012):
            texts = {
                (r.member.index, r.request): r.text
                for r in parts.engine.rollout(Plan(0, width, population(6, antithetic=True)), requests)
            }
            score = [[parts.task.compute_reward(texts[m, p].strip(), examples[p]) for p in range(5)] for m in range(6)]
            fitness.append(np.mean(score, axis=1))
            changed.append(np.mean([texts[m, p] != own[p] for m in range(6) for p in range(5)]))
    finally:
        parts.close()
    for k, got in enumerate(result.rungs):
        assert got.spread == pytest.approx(fitness[k].std())
        assert got.drop == pytest.approx(mean - fitness[k].mean())
        assert got.changed_share == pytest.approx(changed[k])
    near, far = ((f[0::2] - f[1::2]) / 2 for f in fitness)
    assert result.rungs[0].gain == pytest.approx(ETA * np.mean(near * near) / fitness[0].std())
    assert result.rungs[1].gain == pytest.approx(ETA * np.mean(far * near) * 3 / fitness[1].std())


@pytest.mark.parametrize("space", ["lora", "full"])
def test_other_spaces(tmp_path, space):
    result = probe(tree(tmp_path, space), sigmas=[1e-6, 1.0], members=4, examples=4)
    low, high = result.rungs
    assert low.changed_share == 0 and high.changed_share == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_multiplier_has_a_ladder_of_its_own(tmp_path):
    es = {"sigma": None, "noise_multiplier": 0.05, "learning_rate": 0.5}
    result = probe(tree(tmp_path, es=es), members=4, examples=4)
    assert result.setting == "noise_multiplier"
    assert result.rungs[0].width == pytest.approx(0.05 / 16) and result.rungs[-1].width == pytest.approx(0.8)
    assert len(result.rungs) == 9
    assert result.width is not None and result.learning_rate == ETA
    assert f"es.noise_multiplier {result.width:.4g}, es.learning_rate 0.5" in result.reason


def test_factors_that_both_move_have_no_pairs(tmp_path, monkeypatch):
    seen, judge = [], module.judge
    monkeypatch.setattr(module, "judge", lambda *given: seen.append(judge(*given)) or seen[-1])
    probe(tree(tmp_path, "lora", lora={"evolve": "ab", "rank": 2}), sigmas=[0.04, 0.08], members=6, examples=8)
    assert len(seen) == 2
    assert not np.array_equal(seen[1][0::2], seen[1][1::2])  # pairs would be the same model, (-B)(-A) = B A


def test_the_largest_gain_of_those_that_are_whole():
    rungs = [rung(0.001, 0.01), rung(0.002, 0.02), rung(0.004, 0.05), rung(0.008, 0.04), rung(0.016, 0.2, kept=0.5)]
    width, reason, warnings = recommend(rungs, "sigma", START, 1.0)
    assert (width, warnings) == (0.004, ())
    assert "es.sigma 0.004, es.learning_rate 0.002" in reason


def test_members_whose_texts_are_broken_do_not_count_as_whole():
    """Beside the widest noise of a reward without a bottom they seem to keep most of the fitness."""
    rungs = [rung(0.01, 0.05, broken=0.06), rung(0.04, 0.11, kept=0.8, broken=0.73)]
    assert recommend(rungs, "sigma", START, 1.0)[0] == 0.01
    assert recommend(rungs, "sigma", START, 1.0, broken=0.6)[0] == 0.04, "the model itself writes such texts"


def test_of_equal_gains_the_width_in_the_middle():
    rungs = [rung(0.001, 0.01), rung(0.002, 0.047), rung(0.004, 0.05), rung(0.008, 0.046), rung(0.016, 0.02)]
    assert recommend(rungs, "sigma", START, 1.0)[0] == 0.004
    assert recommend(rungs[:3], "sigma", START, 1.0)[0] == 0.002, "of two, the one that moves the model less"


@pytest.mark.parametrize(("gains", "end"), [((0.5, 0.1, 0.1), "smallest"), ((0.1, 0.2, 0.5), "largest")])
def test_the_end_of_the_ladder_is_told(gains, end):
    rungs = [rung(w, g) for w, g in zip((0.1, 0.2, 0.4), gains, strict=True)]
    width, _, warnings = recommend(rungs, "sigma", START, 1.0)
    assert width == (0.1 if end == "smallest" else 0.4)
    assert len(warnings) == 1 and f"the {end} of the ladder" in warnings[0]


@pytest.mark.parametrize(
    ("rungs", "start", "words"),
    [
        ([rung(1e-9, 0, spread=0, changed=0), rung(1e-8, 0, spread=0, changed=0)], START, "changes no completion"),
        ([rung(0.1, 0, spread=0), rung(0.2, 0, spread=0)], START, "the reward does not tell them apart"),
        ([rung(1, 0.2, kept=0.3), rung(2, 0.1, kept=0.1)], START, "already breaks the model"),
        ([rung(0.1, 0.2, spread=0.03), rung(0.2, 0.1, spread=0.03)], Control(0.4, 0.5, 0.03), "at the noise floor"),
        ([rung(0.1, -0.2), rung(0.2, -0.1)], START, "chance"),
        ([rung(1e-6, 0, spread=0, changed=0), rung(0.1, -0.2), rung(0.2, -0.1)], START, "chance"),
        (
            [rung(1e-6, 0, spread=0, changed=0), rung(1.0, 0, kept=0.1, changed=1.0)],
            START,
            "(0% of their completions change), and 1, the next, keeps 10% of the start's fitness; try widths between "
            "1e-06 and 1 with --sigmas",
        ),
        ([rung(0.01, 0, spread=0, changed=0.3), rung(1.0, 0, kept=0.1)], START, "try widths between 0.01 and 1 "),
        (
            [rung(0.01, 0, spread=0, changed=0), rung(0.1, 0), rung(1.0, 0, kept=0.1)],
            START,
            "0.1, the next, is the first that tells them apart; try widths between 0.01 and 0.1 ",
        ),
    ],
)
def test_no_signal(rungs, start, words):
    width, reason, warnings = recommend(rungs, "sigma", start, 1.0)
    assert width is None and reason == "no sigma of the ladder gives a signal to learn from"
    assert len(warnings) == 1 and words in warnings[0]


@pytest.mark.first("sgd")
@pytest.mark.parametrize(
    ("optimizer", "share", "words"),
    [
        ("sgd", 1.0, "(eta 0.5): in the middle"),
        ("adam", 1 / 8**0.5, "(eta 0.177, with this optimizer as far as 0.5 with sgd)"),
        ({"name": "momentum", "momentum": 0.8}, 0.2, "(eta 0.1, with this optimizer as far as 0.5 with sgd)"),
    ],
)
def test_the_learning_rate_is_that_of_the_optimizer(tmp_path, optimizer, share, words):
    settings = tree(tmp_path, "lora", es={"optimizer": optimizer})
    result = probe(settings, sigmas=[0.002, 0.004], members=8, examples=16)
    assert result.learning_rate == pytest.approx(share * ETA * result.width)
    assert words in result.reason and f"es.learning_rate {result.learning_rate:.4g} " in result.reason


@pytest.mark.parametrize("optimizer", ["adam", {"name": "momentum", "momentum": 0.8}])
def test_an_optimizer_reaches_as_far_as_is_said(optimizer):
    """Random gradients of a population of 100, each 1 / 10 of a member's noise: where the mean is after 400."""
    es = from_dict({"es": {"sigma": 0.01, "population_size": 100, "optimizer": optimizer}}).es
    moving = optimizers.create(es.optimizer)
    generator = torch.Generator().manual_seed(0)
    far, plain = torch.zeros(2000), torch.zeros(2000)
    for _ in range(400):
        gradient = torch.randn(2000, generator=generator) / 10
        far += moving.direction("w", gradient)
        plain += gradient
    assert float(far.norm() / plain.norm()) == pytest.approx(optimizers.reach(es), rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "eta", "words"),
    [
        ("sgd", 1.0, None),
        ("sgd", 2.5, "warning: eta 2.5 is outside 0.05 to 2.0 (the paper's is 0.5): steps overshoot"),
        ("adam", 0.5, "warning: eta 0.5, which adam makes 2.5, is outside 0.05 to 2.0"),
        ("adam", 0.02, None),
        ("momentum", 0.5, "warning: eta 0.5, which momentum makes 5, is outside"),
    ],
)
def test_the_warning_of_eta_knows_the_optimizer(optimizer, eta, words):
    es = {"sigma": 0.01, "learning_rate": eta * 0.01, "population_size": 25, "optimizer": optimizer}
    told = [line for line in estimate.step_lines(from_dict({"es": es}), None) if line.startswith("warning")]
    assert len(told) == (words is not None)
    assert words is None or told[0].startswith(words)


def test_nothing_to_learn():
    _, _, warnings = recommend([rung(0.1, 0.1), rung(0.2, 0.2), rung(0.4, 0.1)], "sigma", Control(1.0, 1.0, 0.0), 1.0)
    assert len(warnings) == 1 and "nothing to learn" in warnings[0]


def test_the_gain_falls_where_what_helps_far_away_does_not_help_nearer():
    """Fitness sin(x): at 4 members spread as much as at 1, and their order is the reverse of that at 2."""
    rng = np.random.default_rng(0)
    eps = rng.choice([-1.0, 1.0], 400) * (1 + 0.05 * rng.standard_normal(400))

    def climb(width):
        x = np.stack([width * eps, -width * eps], axis=1).ravel()
        return module._Climb(width, np.sin(x)[:, None], 1.0, 0.0)

    def measured(width):
        return module._rung(climb(width), climb(width / 2), 0.0, -1.0, paired=True)

    small, middle, large = (measured(width) for width in (0.05, 0.8, 4.0))
    assert small.gain == pytest.approx(ETA * 0.05, rel=0.01)  # linear: eta times the spread
    assert middle.gain > 10 * small.gain
    assert large.spread > middle.spread and large.gain < 0


@pytest.mark.parametrize(
    "wrong", [{"sigmas": [0.1]}, {"sigmas": [0.1, -1]}, {"sigmas": []}, {"sigmas": [0.1, float("nan")]},
              {"members": 7}, {"members": 2}, {"examples": 0}]
)  # fmt: skip
def test_refusals(tmp_path, wrong):
    with pytest.raises(ConfigError):
        probe(tree(tmp_path), **wrong)


def test_the_table_marks_the_recommended_one():
    rungs = (rung(0.1, 0.1), rung(0.2, 0.2))
    result = ProbeResult("sigma", 0.4, 0.0, 0.01, rungs, 0.2, 0.1, "because", ("careful",), 100)
    console = Console(width=120, record=True)
    console.print(table(result))
    marked = [line for line in console.export_text().splitlines() if "*" in line]
    assert len(marked) == 1 and " 0.2 " in marked[0]
    assert lines(result) == ["unperturbed: fitness 0.4, noise floor 0.01, broken 0.0%", "because", "warning: careful"]


def test_the_command(tmp_path):
    from evoalign.config import to_yaml

    config, out = tmp_path / "config.yaml", tmp_path / "deep/probe.json"
    config.write_text(to_yaml(from_dict(tree(tmp_path))))
    arguments = [
        "probe",
        str(config),
        "--sigmas",
        "1e-3,0.008",
        "--members",
        "4",
        "--examples",
        "4",
        "--json",
        str(out),
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.output.index("2 widths x 4 members x 4 prompts") < shown.output.index("gain a generation")
    written = json.loads(out.read_text())
    assert [r["width"] for r in written["rungs"]] == [0.001, 0.008]
    assert written["reason"] in shown.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "deep"]
    wrong = CliRunner().invoke(app, ["probe", str(config), "--sigmas", "a,b"])
    assert isinstance(wrong.exception, ConfigError)


def test_a_config_for_grpo_alone_is_told_that_a_probe_is_for_es() -> None:
    with pytest.raises(ConfigError, match=r"missing setting es.*for ES alone"):
        probe(from_dict({"grpo": {"max_steps": 1}}))
