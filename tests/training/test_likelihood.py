# SPDX-License-Identifier: Apache-2.0
"""The task `likelihood`: given completions are scored as a plain forward scores them, and MeZO's step is exact."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from small_runs import UNCHECKED
from transformers import AutoModelForCausalLM

import evoalign
from evoalign import tasks, tokens
from evoalign.analysis.evaluations import evaluate_one
from evoalign.checks import diagnosis
from evoalign.config import TaskConfig, from_dict
from evoalign.episodes import Given
from evoalign.errors import ConfigError, EvoalignError, RewardError
from evoalign.models.origin import model_path
from evoalign.preflight import doctor
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.directory import RunDir
from evoalign.setup import serve, task_and_data
from evoalign.tokens import Tokens
from evoalign.training.train import dry_run
from evoalign.types import MEAN_PLAN, Episode, Example, Plan, Request, Rollout, Sampling, population

SIGMA, RATE = 0.01, 0.02
TREE = {
    "space": "full", "full": {"exclude": []}, "seed": 3, "model": {"name": "tiny", "dtype": "float32"},
    "task": {"name": "likelihood", "train_size": 4, "test_size": 4}, "engine": {"decoder": "library"},
    "checks": UNCHECKED, "checkpoint": {"every": 1},
    "es": {"sigma": SIGMA, "learning_rate": RATE, "num_generations": 1, "population_size": 2, "antithetic": True,
           "shaping": "identity"},
}  # fmt: skip


def plain():
    return AutoModelForCausalLM.from_pretrained(model_path(from_dict(TREE).model), dtype=torch.float32).eval()


def loss_of(model, known: Tokens, rows: list[Example]) -> float:
    """Return the mean over rows of the mean cross-entropy of the target and the end of the turn, by a plain forward."""
    losses = []
    for row in rows:
        prompt = known.encode([{"role": "user", "content": row["prompt"]}])
        target = [*known.tokenizer(row["target"], add_special_tokens=False)["input_ids"], known.tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + target])
        with torch.no_grad():
            losses.append(float(model(input_ids=torch.tensor([[*prompt, *target]]), labels=labels).loss))
    return sum(losses) / len(losses)


def test_a_generation_is_the_step_of_mezo(tmp_path):
    """W <- W - lr (L+ - L-) / (2 epsilon) z with epsilon = sigma and lr = learning_rate sigma (arXiv 2305.17333)."""
    run = evoalign.train(TREE | {"output_dir": str(tmp_path / "run")})
    config = from_dict(TREE)
    known, rows = tokens.load(config.model), tasks.create(config.task).load_data(3).train
    served = serve(config)
    start = {name: tensor.clone() for name, tensor in served.engine.state()}
    z = {t.name: served.space.noise(served.layout, t.name, 0, [0])[0] for t in served.layout.tensors}
    served.engine.close()
    losses = []
    for sign in (1, -1):
        model = plain()
        for name, parameter in model.named_parameters():
            parameter.data.add_(z[name], alpha=sign * SIGMA)
        losses.append(loss_of(model, known, rows))
    recorded = journal.read(tmp_path / "run" / "journal.jsonl").generations[0]
    assert recorded.fitness_M == pytest.approx([-loss for loss in losses], abs=1e-5)
    projected = (losses[0] - losses[1]) / (2 * SIGMA)
    assert abs(projected) > 0.01
    saved = checkpoint.load(run.saved, served.layout)[0]
    for name, before in start.items():
        want = -(RATE * SIGMA) * projected * z[name]
        assert torch.allclose(saved[name] - before, want, atol=2e-7, rtol=2e-3), name


def test_no_line_is_about_sampling(tmp_path):
    """Of a dry run, a run, its page's summary and its evaluation: nothing is generated."""
    tree = TREE | {"output_dir": str(tmp_path / "run"), "es": TREE["es"] | {"num_generations": 4}}
    out = io.StringIO()
    evoalign.train(tree, console=Console(file=out, width=300))
    card = (evoalign.export(tmp_path / "run", tmp_path / "export") / "README.md").read_text()
    summary = diagnosis.summary(diagnosis.history_of(RunDir(tmp_path / "run").rows, from_dict(tree)))
    lines = [*dry_run(tree | {"output_dir": str(tmp_path / "other")}), *out.getvalue().splitlines(), *summary]
    lines += [line for line in card.splitlines() if line.startswith("Means over")]
    lines += [evaluate_one(tmp_path / "run", None).decoding]
    lines = [line for line in lines if not line.startswith(("completions  ", "memory "))]  # a folder; a bound
    odd = re.compile("completion|at most|greedy|temperature|truncated|empty")
    assert [line for line in lines if odd.search(line)] == []
    assert "4 generations of 8 targets (2 members x 4 prompts); the first one" in "\n".join(lines)
    assert "sample targets" in out.getvalue() and lines[-1] == "4 examples, whose given targets are scored"


def test_doctor_gives_one_time_for_targets(tmp_path):
    *_, found = doctor.doctor(from_dict(TREE | {"output_dir": str(tmp_path / "run")}))
    assert found.name == "generation" and "8 targets scored -" in found.detail, found
    assert "completions" not in found.detail and "at most" not in found.detail, found


def test_the_loss_of_the_targets_falls(tmp_path):
    es = TREE["es"] | {"num_generations": 40, "sigma": 0.002, "learning_rate": 0.02}
    found = evoalign.train(TREE | {"es": es, "output_dir": str(tmp_path / "run"), "checkpoint": {"every": 0}})
    fitness = [sum(g.fitness_M) / 2 for g in journal.read(found.path / "journal.jsonl").generations]
    assert fitness[-1] > fitness[0] + 0.1, fitness


@pytest.mark.parametrize("space", ["lora", "steering"])
def test_given_tokens_have_the_log_probabilities_with_which_they_were_generated(space):
    """Of rows of different lengths, by members."""
    served = serve(from_dict(TREE | {"space": space, "es": TREE["es"] | {"sigma": 0.1}}))
    plan = Plan(0, 0.1, population(2))
    prompts = [tuple(range(5, 15)), tuple(range(7, 30))]
    asked = [Request(i, ids, Sampling(6 + i, 1.0), seed=i, logprobs=True) for i, ids in enumerate(prompts)]
    drawn = list(served.engine.rollout(plan, asked))
    for one in drawn:
        request = Request(0, prompts[one.request], Sampling(9), 0, True, one.token_ids)
        again = {r.member: r for r in served.engine.rollout(plan, [request])}[one.member]
        assert again.token_ids == one.token_ids
        assert again.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    served.engine.close()


@pytest.mark.parametrize("engine", ["transformers", {"decoder": "static"}, "vllm", "ray"])
def test_engines_that_would_generate_are_refused_before_a_model_is_loaded(engine):
    with pytest.raises(ConfigError, match=r"set engine\.name transformers and engine\.decoder library"):
        task_and_data(from_dict(TREE | {"engine": engine}), None, None)
    ray = {"name": "ray", "replica": {"name": "transformers", "decoder": "library"}}
    task_and_data(from_dict(TREE | {"engine": ray}), None, None)[0].close()


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("task.samples", {"task": TREE["task"] | {"samples": 2}, "sampling": {"temperature": 1.0}}),
        ("evaluation.samples", {"evaluation": {"temperature": 1.0, "samples": 2}}),
        ("evaluation.seeds", {"evaluation": {"temperature": 1.0, "seeds": [1, 2]}}),
    ],
)
def test_samples_that_would_be_the_same_are_refused(name, sections):
    with pytest.raises(ConfigError, match=f"task likelihood samples nothing: remove {name}$"):
        task_and_data(from_dict(TREE | sections), None, None)


def test_completions_that_are_generated_are_no_scores():
    served = serve(from_dict(TREE | {"engine": {"decoder": "static"}}))
    with pytest.raises(ConfigError, match=r"set engine\.decoder library"):
        list(served.engine.rollout(MEAN_PLAN, [Request(0, (5, 6), Sampling(9), 0, True, (7, 8))]))
    served.close()
    config = from_dict(TREE)
    task = tasks.create(config.task)
    row = task.load_data(3).train[0]
    member = population(2)[0]
    other = SimpleNamespace(rollout=lambda *_: iter([Rollout(member, 0, (5, 6), "ab", "stop", (-1.0, -1.0))]))
    player = Given(task, tokens.load(config.model))
    with pytest.raises(EvoalignError, match=r"set engine\.name transformers and engine\.decoder library"):
        list(player.play(other, Plan(0, 0.1, (member,)), [Request(0, (5,), Sampling(4), episode=Episode(player, row))]))


def test_a_text_has_no_likelihood():
    with pytest.raises(RewardError, match="scores log-probabilities"):
        tasks.create(TaskConfig(name="likelihood")).compute_reward("Tokyo", {"prompt": "a", "target": "b"})


def test_grpo_is_refused(tmp_path):
    tree = {name: value for name, value in TREE.items() if name not in ("es", "space", "full")}
    with pytest.raises(ConfigError, match="likelihood"):
        evoalign.grpo(tree | {"grpo": {"num_generations": 4}, "output_dir": str(tmp_path / "run")})
