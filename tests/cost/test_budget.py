# SPDX-License-Identifier: Apache-2.0
"""Costs of a run: FLOPs compared with the operations that torch runs, tokens with a count by hand."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import flop_counts
import pytest
from families import build
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from small_runs import UNCHECKED
from transformers import AutoConfig, AutoTokenizer

from evoalign import train
from evoalign.cost import budget, flops
from evoalign.cost.budget import Cost
from evoalign.cost.flops import Adapted, Matrix, ModelShape
from evoalign.engines.specs import specs_of
from evoalign.errors import ModelError, StoppedError
from evoalign.models import tiny
from evoalign.rundir import parquet
from evoalign.types import Generation, TensorSpec

EXACT = 1e-6
"""Required within 2 %; the counts agree exactly."""
TINY: dict[str, int] = {"layers": 4, "hidden": 96, "inner": 288, "keys": 32, "vocabulary": 1024}


def shape(**changes: Any) -> ModelShape:
    """Two layers of one matrix each."""
    matrices = tuple(Matrix(f"layers.{i}.q_proj.weight", 6, 10, i) for i in range(2))
    fields: dict[str, Any] = {
        "matrices": matrices, "head": Matrix("lm_head.weight", 50, 10, None), "attention": 8,
        "windows": (None, None), "parameters": 620, **changes,
    }  # fmt: skip
    return ModelShape(**fields)


def tiny_shape() -> ModelShape:
    model = flop_counts.tiny_model()
    return flops.shape_of(model.config, specs_of(model, lambda _: 0.0))


ES = {"num_generations": 3, "population_size": 4, "learning_rate": 0.01, "sigma": 0.02}


def run(folder: Path, hook: Any = None, resume: bool = False, **changes: Any) -> None:
    """Train for some seconds; `es` adds to the section."""
    tree: dict[str, Any] = {
        "output_dir": str(folder), "task": {"name": "conciseness"}, "model": {"name": "tiny"},
        "evaluation": {"max_tokens": 12}, "checks": UNCHECKED, **changes, "es": ES | changes.get("es", {}),
    }  # fmt: skip
    train(tree, on_generation=hook, resume=resume, console=Console(quiet=True))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Generation]]:
    """A run that is evaluated after two of three generations."""
    folder, seen = tmp_path_factory.mktemp("cost") / "run", list[Generation]()
    run(folder, seen.append, evaluation={"max_tokens": 12, "every": 2}, lora={"rank": 2})
    return folder, seen


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def totals_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results" / "budget.json").read_text())


def test_formula_gives_the_example_of_the_docs() -> None:
    """A prompt of ten tokens and three generated: twelve are inputs, and the head is applied three times."""
    t = TINY
    layer = 2 * t["hidden"] ** 2 + 2 * t["hidden"] * t["keys"] + 3 * t["hidden"] * t["inner"]
    linear, head = t["layers"] * layer, t["hidden"] * t["vocabulary"]
    keys = sum(range(1, 13))
    by_hand = 2 * linear * 12 + 4 * t["hidden"] * t["layers"] * keys + 2 * head * 3
    assert (layer, linear, head, keys, by_hand) == (107_520, 430_080, 98_304, 78, 11_031_552)
    assert flops.forward_flops(tiny_shape(), 10, 3) == by_hand


@pytest.mark.long
def test_the_formula_against_what_the_engine_and_training_run() -> None:
    for row in flop_counts.tiny_rows():
        assert abs(row.error) < EXACT, row


@pytest.mark.first("llama")
@pytest.mark.parametrize("family", sorted(flops.FAMILIES))
def test_the_formula_against_every_family(family: str) -> None:
    for row in flop_counts.family_rows(family):
        assert abs(row.error) < EXACT, row


@pytest.mark.slow
@pytest.mark.last("all weights, beta", "two passes")
@pytest.mark.parametrize("case", list(flop_counts.CASES))
def test_the_formula_against_real_steps_of_trl(case: str) -> None:
    pytest.importorskip("trl")
    row = flop_counts._trl_row(case, dict(flop_counts.CASES[case]))
    assert abs(row.error) < EXACT, row


def test_every_family_of_the_formula_is_measured() -> None:
    assert set(flop_counts.FAMILY) == flops.FAMILIES


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_keys_that_attention_sees(start: int, tokens: int, window: int | None) -> None:
    by_hand = sum(min(p + 1, window or math.inf) for p in range(start, start + tokens))
    assert flops.keys_seen(start, tokens, window) == by_hand


def test_prompts_in_pieces_cost_what_they_cost_at_once_and_a_common_prefix_is_computed_once() -> None:
    model, narrow = shape(windows=(None, 5)), shape(windows=(None, 9))
    whole = flops.sequence_flops(model, 0, 20, 1)
    assert whole == flops.sequence_flops(model, 0, 7, 0) + flops.sequence_flops(model, 7, 13, 1)
    prompts = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 7, 8)]
    for model, saved in ((shape(), 5), (narrow, 0)):  # not beyond a window
        apart = sum(flops.sequence_flops(model, 0, len(p), 1) for p in prompts)
        again = flops.sequence_flops(model, 0, saved, 0)
        assert flops.rollout_flops(model, prompts, [1, 1], None, 10) == apart - again


def test_shape_of_rejects_unknown_models_and_experts() -> None:
    model = flop_counts.small("llama")
    specs = specs_of(model, lambda _: 0.0)
    for name in ("mixtral", "gpt2", "deepseek_v3", "bamba"):
        with pytest.raises(ModelError, match=name):
            flops.shape_of(AutoConfig.for_model(name), specs)
    experts = TensorSpec("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 8), "other", 0, 0.0)
    with pytest.raises(ModelError, match="experts"):
        flops.shape_of(model.config, [*specs, experts])


def test_costs_add_up_and_keep_unknown_parts() -> None:
    a = Cost(1, 2, 3, 4, 5.0, 6.0, 7.0, 8.0, 90)
    b = Cost(10, 20, 30, 40, 50.0, None, 70.0, 80.0, 9)
    assert a + b == Cost(11, 22, 33, 44, 55.0, None, 77.0, 88.0, 90)
    assert sum([a, a], Cost()).forward_flops == 10.0
    assert (a + Cost(peak_memory_bytes=None)).peak_memory_bytes is None
    assert budget.cost_of(json.loads(json.dumps(b.as_dict()))) == b
    assert budget.cost_of({"prompts": 1}) is None
    idle = budget.time_cost(2.0, 4, None)
    assert idle == Cost(wall_seconds=2.0, device_seconds=8.0, peak_memory_bytes=None), "idle devices count"


def test_tokens_of_a_run_are_those_of_a_count_by_hand(done: tuple[Path, list[Generation]]) -> None:
    folder, seen = done
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny())
    rows, totals = rows_of(folder), totals_of(folder)
    assert len(rows) == len(seen) == 3
    for row, generation in zip(rows, seen, strict=True):
        cost, seconds = row["budget"], row["seconds"]
        assert cost["completions"] == len(generation.rollouts) == 4 * cost["prompts"]
        assert cost["generated_tokens"] == sum(len(r.token_ids) for r in generation.rollouts)
        assert cost["prompt_tokens"] == sum(len(generation.prompts[r.request]) for r in generation.rollouts)
        assert cost["wall_seconds"] == pytest.approx(seconds["rollout"] + seconds["score"] + seconds["update"])
        assert cost["device_seconds"] == cost["wall_seconds"]
        assert cost["backward_flops"] == 0 < cost["forward_flops"]
        assert cost["peak_memory_bytes"] > 2**26
    assert (totals["method"], totals["devices"], totals["rows"], totals["rows_missing"]) == ("es", 1, 3, 0)
    for key in ("completions", "prompt_tokens", "generated_tokens", "forward_flops"):
        assert totals["training"][key] == sum(row["budget"][key] for row in rows)
    files = [parquet.read(folder / f"results/completions/{name}.parquet") for name in ("before", "after")]
    evaluation = totals["evaluation"]
    assert evaluation["completions"] == 3 * len(files[0])  # start, after two generations, end
    between = evaluation["generated_tokens"] - sum(c["tokens"] for file in files for c in file)
    assert 0 < between == round(rows[1]["evaluation"]["tokens"] * len(files[0]))
    asked = [[{"role": "user", "content": c["prompt"]}] for c in files[0]]
    by_hand = sum(len(tokenizer.apply_chat_template(a, add_generation_prompt=True)["input_ids"]) for a in asked)
    assert evaluation["prompt_tokens"] == 3 * by_hand


def test_flops_of_a_run_are_the_formula_over_its_rollouts(done: tuple[Path, list[Generation]]) -> None:
    """Count by hand: the common prefix once per member, each prompt and completion, members and update."""
    folder, seen = done
    model = tiny_shape()
    adapted = Adapted(2, frozenset(m.name for m in model.matrices))
    generation, row = seen[0], rows_of(folder)[0]
    first, second = generation.prompts
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    spent = 0
    for member in range(4):
        shared = common if common >= 4 else 0
        spent += flops.sequence_flops(model, 0, shared, 1, adapted) if shared else 0
        for request, prompt in enumerate(generation.prompts):
            n = next(len(r.token_ids) for r in generation.rollouts if (r.member.index, r.request) == (member, request))
            spent += flops.sequence_flops(model, shared, len(prompt) - shared, 1, adapted)
            spent += flops.sequence_flops(model, len(prompt), n - 1, n - 1, adapted)
    numbers = 2 * sum(m.rows for m in model.matrices)  # of B, which alone evolves
    assert row["budget"]["forward_flops"] == spent + 2 * numbers * (4 + 4)


@pytest.mark.slow
@pytest.mark.parametrize(("space", "factors"), [("lora", True), ("lowrank", False)])
def test_the_mean_has_factors_where_it_is_an_adapter(space: str, factors: bool, tmp_path: Path) -> None:
    """Count by hand: the mean of `lowrank` is in the weights."""
    run(tmp_path / "run", space=space)
    model, tokenizer = tiny_shape(), AutoTokenizer.from_pretrained(tiny())
    adapted = Adapted(1, frozenset(m.name for m in model.matrices)) if factors else None
    spent = 0
    for name in ("before", "after"):
        file: list[Any] = parquet.read(tmp_path / f"run/results/completions/{name}.parquet")
        asked = [[{"role": "user", "content": c["prompt"]}] for c in file]
        prompts = [tuple(tokenizer.apply_chat_template(a, add_generation_prompt=True)["input_ids"]) for a in asked]
        spent += flops.rollout_flops(model, prompts, [c["tokens"] for c in file], adapted)
    assert totals_of(tmp_path / "run")["evaluation"]["forward_flops"] == spent


def test_a_pair_shares_its_noise_and_nothing_moves_without_variance(tmp_path: Path) -> None:
    seen: list[Generation] = []
    still = {"num_generations": 1, "learning_rate": 1e-12, "sigma": 1e-12}
    run(tmp_path / "still", seen.append, es=still)
    run(tmp_path / "pairs", seen.append, es={"num_generations": 1, "antithetic": True})
    assert [generation.zero_variance for generation in seen] == [True, False]
    model = tiny_shape()
    adapted = Adapted(1, frozenset(m.name for m in model.matrices))
    for folder, generation, times in (("still", seen[0], 4), ("pairs", seen[1], 4 + 2)):
        answers = 0
        for member in range(4):
            asked = [r for r in generation.rollouts if r.member.index == member]
            prompts = [generation.prompts[r.request] for r in asked]
            answers += flops.rollout_flops(model, prompts, [len(r.token_ids) for r in asked], adapted)
        numbers = sum(m.rows for m in model.matrices)
        assert rows_of(tmp_path / folder)[0]["budget"]["forward_flops"] == answers + 2 * numbers * times


@pytest.mark.slow
def test_resumed_run_adds_costs_and_counts_missing_rows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder)
    before = totals_of(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    old = {k: v for k, v in json.loads(lines[1]).items() if k not in ("budget", "divergence")}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(old)}\n{lines[2]}\n")  # the first is lost
    run(folder, resume=True, es={"num_generations": 5})
    rows, after = rows_of(folder), totals_of(folder)
    assert [row["budget"] is None for row in rows] == [True, True, False, False, False]
    assert rows[0]["tokens"] is None and rows[1]["tokens"] == old["tokens"]
    assert (after["rows"], after["rows_missing"]) == (5, 2)
    assert after["training"]["generated_tokens"] == sum(row["tokens"] for row in rows[2:])
    a_time = before["evaluation"]["completions"] // 2
    assert after["evaluation"]["completions"] == 3 * a_time


def test_stopped_run_writes_its_budget(tmp_path: Path) -> None:
    def stop(_: Generation) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(StoppedError):
        run(tmp_path / "run", stop)
    totals = totals_of(tmp_path / "run")
    assert totals["rows"] == 1
    assert totals["training"]["generated_tokens"] == rows_of(tmp_path / "run")[0]["tokens"]


def test_evaluation_cost_is_unknown_without_its_file(done: tuple[Path, list[Generation]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done[0], folder)
    (folder / "results" / "budget.json").write_text("{")
    run(folder, resume=True, evaluation={"max_tokens": 12, "every": 2}, lora={"rank": 2})
    assert totals_of(folder)["evaluation"] is None
    assert totals_of(folder)["training"]["generated_tokens"] > 0


def test_run_of_an_unknown_model_has_no_flops(tmp_path: Path) -> None:
    model = {"name": str(build("mpt", tmp_path / "mpt"))}
    run(tmp_path / "run", model=model, space="full", es={"num_generations": 1, "population_size": 2})
    totals = totals_of(tmp_path / "run")
    assert totals["training"]["forward_flops"] is None and totals["evaluation"]["forward_flops"] is None
    assert totals["training"]["generated_tokens"] > 0
    assert "mpt" in totals["note"]


def test_a_step_of_grpo_is_its_parts() -> None:
    model = shape()
    lengths, completions = [5, 5, 7], [3, 4, 1]
    round_ = budget.grpo_generation(model, lengths, completions, prompts=2, reference=True, old_logprobs=True)
    step = budget.grpo_update(model, lengths, completions, checkpointing=False)
    passes = [flops.sequence_flops(model, 0, p + c, c) for p, c in zip(lengths, completions, strict=True)]
    drawn = [flops.forward_flops(model, p, c) for p, c in zip(lengths, completions, strict=True)]
    assert (round_.prompts, round_.completions, round_.prompt_tokens, round_.generated_tokens) == (2, 3, 17, 8)
    assert round_.forward_flops == sum(drawn) + 2 * sum(passes) and round_.backward_flops == 0
    assert (step.prompts, step.generated_tokens, step.forward_flops) == (0, 0, sum(passes))
    head = 2 * model.head.numbers * sum(completions)
    assert step.backward_flops == 2 * sum(passes) + head + flops.ADAM_FLOPS * model.parameters
    elsewhere = budget.grpo_generation(
        model, lengths, completions, prompts=2, reference=False, old_logprobs=False, generation_flops=1000
    )
    assert elsewhere.forward_flops == 1000


def test_factors_take_less_backward_and_the_reference_has_none() -> None:
    model, adapted = shape(), Adapted(2, frozenset({"layers.1.q_proj.weight"}))
    plain, judged = (
        budget.grpo_generation(model, [5], [3], prompts=1, reference=judges, old_logprobs=False, adapted=adapted)
        for judges in (False, True)
    )
    assert judged.forward_flops is not None and plain.forward_flops is not None
    assert judged.forward_flops - plain.forward_flops == flops.sequence_flops(model, 0, 8, 3)
    # Attention of the upper layer, the head's input twice (its logits are not kept), and three products of factors:
    # the input of q_proj takes no gradient.
    attention, head = 2 * 4 * 8 * sum(range(1, 9)), 2 * 2 * model.head.numbers * 3
    factors = 8 * (4 * 2 * (6 + 10) - 2 * 2 * 10)
    step = budget.grpo_update(model, [5], [3], checkpointing=False, adapted=adapted)
    assert step.backward_flops == attention + head + factors + flops.ADAM_FLOPS * 2 * (6 + 10)


def test_without_a_formula_a_step_of_grpo_counts_tokens_alone() -> None:
    round_ = budget.grpo_generation(None, [5], [3], prompts=1, reference=True, old_logprobs=True)
    step = round_ + budget.grpo_update(None, [5], [3], checkpointing=True)
    assert (step.forward_flops, step.backward_flops, step.generated_tokens) == (None, None, 3)


def test_the_file_formats_name_every_field(done: tuple[Path, list[Generation]]) -> None:
    text = (Path(__file__).parents[2] / "docs/reference/files.md").read_text(encoding="utf-8")
    of_row, of_run = (
        text.split(f"{title}\n", 1)[1].split("\n## ")[0] for title in ("### budget", "## results/budget.json")
    )
    assert all(f"`{name}`" in of_row for name in Cost().as_dict())
    assert all(f"`{name}`" in of_run for name in totals_of(done[0]))
