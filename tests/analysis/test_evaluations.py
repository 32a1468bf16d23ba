# SPDX-License-Identifier: Apache-2.0
"""`evoalign eval RUN...`: each target with what it is of, and the mean over trained seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run

import evoalign
from evoalign import statistics
from evoalign.analysis.evaluations import TargetEvaluation, evaluate_each, expand, seed_means
from evoalign.config import from_dict
from evoalign.errors import ConfigError, DataError
from evoalign.evaluation import Evaluation, Scored

HALF_DONE = Path(__file__).parents[1] / "compatibility" / "half_done" / "lora_adam"
ES = {"num_generations": 1, "population_size": 2, "sigma": 0.05, "learning_rate": 0.025}


def judged(
    seed: int, rewards_E: list[float], prompt: str = "p", generation: int = 1, **sections: Any
) -> TargetEvaluation:
    """A run that earned `rewards_E`, one completion per example, each whole or empty by its sign."""
    measures_E = {"reward": tuple(rewards_E), "empty_share": tuple(float(r < 0) for r in rewards_E)}
    said = tuple(Scored(e, 0, 0, f"{prompt}{e}", None, "x", r, "stop", 1) for e, r in enumerate(rewards_E))
    measures = {name: float(np.mean(values)) for name, values in measures_E.items()}
    tree = {"output_dir": f"runs/{seed}", "model": {"name": "tiny"}, "es": ES, "evaluation": {"max_tokens": 4}}
    config = from_dict({**tree, "checks": {"control_every": 0, "canary_every": 0}, "seed": seed, **sections})
    evaluation = Evaluation(measures, measures_E, said)
    return TargetEvaluation(f"runs/{seed}", "test", "tiny", config, config.evaluation, "es", generation, evaluation)


SEEDS = {0: [1.0, 2.0, 4.0, -1.0], 1: [2.0, 2.0, 6.0, 0.0], 2: [0.0, 3.0, 5.0, 1.0]}


def test_the_mean_over_trained_seeds_has_an_interval_over_seeds_and_examples() -> None:
    (mean,) = seed_means([judged(seed, SEEDS[seed]) for seed in (2, 0, 1)])
    assert [run.config.seed for run in mean.runs] == [0, 1, 2] and mean.over == "new seeds and new examples"
    assert mean.measures["reward"] == statistics.crossed(list(SEEDS.values()))
    assert mean.measures["reward"].mean == pytest.approx(25 / 12) and mean.measures["reward"].items == 4
    unbounded = statistics.crossed([[float(r < 0) for r in row] for row in SEEDS.values()])
    low, high = mean.measures["empty_share"].low, mean.measures["empty_share"].high
    assert (unbounded.low or 0) < low == 0.0 and high is not None and 0 < high <= 1, "a share stays within 0 and 1"


def test_where_each_seed_has_other_examples_the_interval_is_over_seeds_alone() -> None:
    (mean,) = seed_means([judged(seed, row, prompt=str(seed)) for seed, row in SEEDS.items()])
    assert mean.over == "new seeds"
    assert mean.measures["reward"] == statistics.mean([float(np.mean(row)) for row in SEEDS.values()])


def test_runs_of_other_settings_or_of_another_length_are_no_seeds_of_each_other() -> None:
    wide = {"es": {**ES, "sigma": 0.1}}
    runs = [judged(0, SEEDS[0]), judged(1, SEEDS[1]), judged(2, SEEDS[2], **wide), judged(3, SEEDS[2], generation=7)]
    assert [[run.config.seed for run in mean.runs] for mean in seed_means(runs)] == [[0, 1]]
    twice = seed_means([judged(0, SEEDS[0]), judged(0, SEEDS[1]), judged(1, SEEDS[2])])[0].measures["reward"]
    assert twice.low is None and twice.why is not None and "0, 0, 1: a seed occurs twice" in twice.why


def test_what_cannot_be_judged_is_named_and_the_others_are_done() -> None:
    def judge(target: str) -> TargetEvaluation:
        if target == "bad":
            raise DataError("it is damaged")
        return judged(int(target), SEEDS[int(target)])

    told: list[TargetEvaluation] = []
    found = evaluate_each(["0", "bad", "1"], judge, told.append)
    assert found.failed == {"bad": "it is damaged"} and [t.config.seed for t in told] == [0, 1]
    assert len(found.means) == 1 and set(found.tree()) == {"targets", "means", "failed"}
    for bad, error in ((["bad"], DataError), (["bad", "bad"], ConfigError)):  # the only one: its own error
        with pytest.raises(error, match=r"^it is damaged$"):
            evaluate_each(bad, judge)


def test_a_folder_stands_for_its_runs_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = ("sweep/a/seed_0", "sweep/a/seed_1", "other")
    for file in (*(f"{run}/{name}" for run in runs for name in ("config.yaml", "journal.jsonl")), "model/config.json"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("{}" if file.startswith("model") else "")
    Path("empty").mkdir()
    found = expand(["other", "sweep", "./other", "sweep/a/seed_1", "model", "empty", "Qwen/Qwen2.5-0.5B"])
    assert found == ["other", "sweep/a/seed_0", "sweep/a/seed_1", "model", "empty", "Qwen/Qwen2.5-0.5B"]


@pytest.mark.slow
def test_the_published_protocol_over_runs(run: Run) -> None:
    """Of a run of an earlier release twice, resumed from two generations, and of a run that saved nothing."""
    for name in ("0", "1"):
        shutil.copytree(HALF_DONE, Path("runs", name))
    Path("runs/2").mkdir()
    Path("runs/2/config.yaml").write_text("es: {sigma: 0.1}\n")
    Path("runs/2/journal.jsonl").write_text("")
    warm = ["--samples", 2, "--temperature", 0.7, "--seeds", 44, "--set", "evaluation.max_tokens=3"]
    done = run("eval", "runs", *warm, "--output", "all.json")
    assert done.code == 1 and "runs/2 could not be evaluated" in done.err
    assert "runs/0 (seed 5, 2 done): model tiny, task conciseness, test split, 8 examples x 2 samples = 16" in done.out
    assert "2 runs, trained with seeds 5, 5" in done.out and "a seed occurs twice" in done.out
    found = json.loads(Path("all.json").read_text())
    overrides = {"samples": 2, "temperature": 0.7, "seeds": [44], "max_tokens": 3}
    alone = evoalign.evaluate("runs/0", overrides=overrides).measures
    assert [target["measures"] for target in found["targets"]] == [alone] * 2
    assert found["means"][0]["measures"]["reward"]["mean"] == pytest.approx(alone["reward"])
    one = run("eval", "runs/0", "--set", "evaluation.max_tokens=3", "--output", "one.json")
    assert one.code == 0 and "8 examples, greedy, at most" in one.out and "over new examples" in one.out
    told = json.loads(Path("one.json").read_text())
    assert (told["model"], told["task"], told["split"], told["seed"]) == ("tiny", "conciseness", "test", 5)
    assert told["drawn"]["temperature"] == 0 and len(told["completions"]) == 8
