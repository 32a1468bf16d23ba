# SPDX-License-Identifier: Apache-2.0
"""The formula for FLOPs against a count of the operations that torch runs, on the tiny model and on small ones.

    python tests/support/flop_counts.py [--families] [--trl]

Counted are the rollouts of the real engine, a member's update, and teacher-forced passes forward and backward.
`FlopCounterMode` is torch's; what it leaves out is added: SDPA's kernel for the CPU, which it does not know and so
counts as nothing (here: of each query, the keys up to its own), and the products in place that the engine uses.
`--families` goes through every family that the formula knows, with random weights, `--trl` through real steps of TRL.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from evoalign import engines, tokens
from evoalign import setup as parts
from evoalign.config import Config, from_dict
from evoalign.cost import budget, flops
from evoalign.cost.flops import Adapted, ModelShape
from evoalign.engines.specs import specs_of
from evoalign.types import MEAN_PLAN, Plan, Request, Sampling, Update, population

aten = torch.ops.aten
BOUND = 0.02
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
FAMILY: dict[str, dict[str, Any]] = {
    "gemma": {**GROUPED, "head_dim": 24},
    "gemma2": {**GROUPED, "head_dim": 24, "sliding_window": 128},
    "gemma3_text": {**GROUPED, "head_dim": 24, "sliding_window": 128},
    "gpt_neox": {},
    "granite": GROUPED,
    "llama": {**GROUPED, "tie_word_embeddings": False},
    "mistral": {**GROUPED, "sliding_window": 128},
    "olmo2": GROUPED,
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 64, "intermediate_size": ...},
    "phi3": GROUPED,
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 24},
    "smollm3": GROUPED,
}
"""What each family adds to or, by `...`, takes from the settings of a small model."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `formula` and `counted` are FLOPs."""

    name: str
    formula: float
    counted: float

    @property
    def error(self) -> float:
        """Of the formula, as a share of what was counted."""
        return self.formula / self.counted - 1


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count what runs inside. A causal kernel counts the keys up to each query's own position."""
    more = {
        aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
        aten.baddbmm_: _baddbmm,
        aten.addmm_: _addmm,
    }
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        yield counter


def _sdpa(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    rows, heads, queries, width = query
    keys = key[2]
    seen = queries * keys - queries * (queries - 1) // 2
    return 4 * rows * heads * seen * width


def _sdpa_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _sdpa(query, key, value)


def _baddbmm(total: Any, left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch, rows, inner = left
    return 2 * batch * rows * inner * right[2]


def _addmm(total: Any, left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def rollout_row(space: str, prompts: Sequence[tuple[int, ...]], members: int, length: int, name: str) -> Row:
    """The engine's rollout of the tiny model. No token ends a completion, so that all rows stay to the end."""
    config = config_of(space)
    tokens_ = tokens.load(config.model)
    engine: Any = engines.create(config, tokens_)
    try:
        engine._decoder.stop = torch.tensor([], dtype=torch.int64)
        space_, layout, _ = parts.start(config, engine)
        meter = budget.Meter(config, engine.specs(), space_, layout, "cpu")
        assert meter.shape is not None
        requests = [Request(i, p, Sampling(length)) for i, p in enumerate(prompts)]
        plan = Plan(0, config.es.width, population(members)) if members else MEAN_PLAN
        with counting() as counter:
            rollouts = list(engine.rollout(plan, requests))
        assert {len(r.token_ids) for r in rollouts} == {length}
        adapted = adapted_of(layout, space) if members or space == "lora" else None
        formula = flops.rollout_flops(meter.shape, prompts, [length] * len(prompts), adapted)
        return Row(f"{name}, space {space}, {max(1, members)} members", max(1, members) * formula, counted(counter))
    finally:
        engine.close()


def update_row(members: int, antithetic: bool) -> Row:
    """The products by which `lowrank` moves the mean: torch does the elementwise rest outside of products."""
    config = config_of("lowrank")
    engine = engines.create(config, tokens.load(config.model))
    try:
        space, layout, _ = parts.start(config, engine)
        who = population(members, antithetic=antithetic)
        # Summed by the library's product, which is counted: that of ordered sums is none that torch knows.
        update = Update(
            0, 0, who, tuple(float(i + 1) for i in range(members)), config.es.width, 1e-3, summation="library"
        )
        with counting() as counter:
            engine.apply(update)
        streams = members // 2 if antithetic else members
        elementwise = 2 * flops.noise_numbers(space, layout) * (members + streams)
        formula = flops.es_flops(space, layout, members, streams) - elementwise
        return Row(f"update, lowrank, {members} members{', in pairs' * antithetic}", formula, counted(counter))
    finally:
        engine.close()


def counted(counter: FlopCounterMode) -> int:
    return counter.get_total_flops()


def adapted_of(layout: Any, space: str) -> Adapted | None:
    return Adapted(layout.rank, frozenset(t.module for t in layout.tensors)) if space != "full" else None


def config_of(space: str) -> Config:
    """The tiny model, greedily, with a population in this space."""
    return from_dict({
        "output_dir": "unused", "space": space, "task": {"name": "conciseness"}, "model": {"name": "tiny"},
        "engine": {"decoder": "library"},  # of which torch counts the operations
        "lora": {"rank": 4}, "lowrank": {"rank": 4}, "evaluation": {"max_tokens": 16},
        "es": {"num_generations": 1, "population_size": 4, "learning_rate": 0.01, "sigma": 0.02},
    })  # fmt: skip


def teacher_rows(name: str, build: Callable[[], Any], length: int = 48) -> list[Row]:
    """Plain forward and backward of a model: all weights, with checkpointing, and factors."""
    cases: dict[str, tuple[Sequence[str] | str | None, bool]] = {
        "all weights": (None, False),
        "all weights, checkpointing": (None, True),
        "factors": ("all-linear", False),
        "factors, checkpointing": ("all-linear", True),
    }
    rows: list[Row] = []
    for case, (targets, checkpointing) in cases.items():
        model = build().train()
        shape = flops.shape_of(model.config, specs_of(model, lambda _: 0.0))
        model, adapted = with_factors(model, shape, targets) if targets else (model, None)
        if checkpointing:
            model.gradient_checkpointing_enable()
            if adapted:
                model.enable_input_require_grads()
        ids = torch.randint(3, 500, (2, length), generator=torch.Generator().manual_seed(0))
        with counting() as counter:
            loss = model(ids, use_cache=False).logits.float().logsumexp(-1).sum()
            forward = counted(counter)
            loss.backward()
        back = counted(counter) - forward
        rows += [
            Row(f"{name}, {case}, forward", 2 * flops.sequence_flops(shape, 0, length, length, adapted), forward),
            Row(
                f"{name}, {case}, backward",
                2 * flops.backward_flops(shape, length, length, adapted, checkpointing=checkpointing),
                back,
            ),
        ]
    return rows


def with_factors(model: Any, shape: ModelShape, targets: Any, rank: int = 4) -> tuple[Any, Adapted]:
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
    named = [n.removeprefix("base_model.model.") for n, m in peft.named_modules() if hasattr(m, "lora_A")]
    return peft, Adapted(rank, frozenset(f"{n}.weight" for n in named))


def generation_row(name: str, build: Callable[[], Any], prompt: int = 24, length: int = 12) -> Row:
    """transformers' own generate with a cache, prompts of one length, no token to stop at."""
    model = build().eval()
    shape = flops.shape_of(model.config, specs_of(model, lambda _: 0.0))
    ids = torch.randint(3, 500, (2, prompt), generator=torch.Generator().manual_seed(0))
    with counting() as counter, torch.no_grad():
        out = model.generate(ids, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out.shape[1] == prompt + length
    return Row(f"{name}, generate", 2 * flops.forward_flops(shape, prompt, length), counted(counter))


def small(family: str) -> Any:
    """A small model of a family, random weights. All attend by SDPA: transformers keeps Gemma 2 from it, whose capped
    scores take as many products."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("counted", attend)
    settings = {k: v for k, v in {**SMALL, **FAMILY[family]}.items() if v is not ...}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), attn_implementation="counted")


def tiny_model() -> Any:
    from transformers import AutoModelForCausalLM

    from evoalign.models import tiny

    return AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)


def family_rows(family: str) -> list[Row]:
    return [generation_row(family, lambda: small(family)), *teacher_rows(family, lambda: small(family))]


def tiny_rows() -> list[Row]:
    apart = [tuple(range(3 + i, 33 + i)) for i in range(4)]
    alike = [tuple(range(3, 27)) + tuple(range(40 + i, 46 + i)) for i in range(4)]
    rows = [rollout_row(space, apart, 3, 16, "rollout") for space in ("lora", "lowrank", "full")]
    rows += [rollout_row("lora", alike, 3, 16, "rollout, prompts that begin alike")]
    rows += [rollout_row("lowrank", [*apart, *apart], 2, 16, "rollout, each prompt twice")]
    rows += [rollout_row(space, apart, 0, 16, "the mean") for space in ("lora", "lowrank")]
    rows += [update_row(8, antithetic) for antithetic in (False, True)]
    return [*rows, *teacher_rows("tiny", tiny_model), generation_row("tiny", tiny_model)]


CASES: Mapping[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, beta, checkpointing": {"beta": 0.04, "gradient_checkpointing": True},
    "all weights, two passes to a round": {"num_iterations": 2},
    "factors, beta": {"beta": 0.04, "factors": True},
}


def trl_rows() -> list[Row]:
    """Real steps of TRL's GRPOTrainer on the CPU, where its head sees all positions."""
    return [_trl_row(name, dict(case)) for name, case in CASES.items()]


def _trl_row(name: str, case: dict[str, Any]) -> Row:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from evoalign.models import tiny

    factors, steps, group = case.pop("factors", False), 2, 4
    completions: list[int] = []

    def reward(completion_ids: Any, **columns: Any) -> list[float]:
        completions.extend(map(len, completion_ids))
        return [float(i % 3) for i in range(len(completion_ids))]

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(tiny())
        model = tiny_model()
        # No token ends a completion, so that there is no padding.
        model.generation_config.eos_token_id = None
        prompt = "Say it in one word: what"
        length = len(tokenizer(prompt)["input_ids"])
        settings = GRPOConfig(
            output_dir=folder, max_steps=steps, num_generations=group, per_device_train_batch_size=2 * group,
            max_completion_length=12, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            temperature=1.0, **{"beta": 0.0, "gradient_checkpointing": False, **case},
            generation_kwargs={"min_new_tokens": 12},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward, args=settings, train_dataset=Dataset.from_dict({"prompt": [prompt] * 8}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, target_modules="all-linear") if factors else None,
        )  # fmt: skip
        base = tiny_model()
        shape = flops.shape_of(base.config, specs_of(base, lambda _: 0.0))
        adapted = with_factors(base, shape, "all-linear")[1] if factors else None
        with counting() as counter:
            trainer.train()
    rounds = len(completions) // (2 * group)
    iterations = case.get("num_iterations", 1)
    drawn = budget.grpo_generation(
        shape, [length] * len(completions), completions, prompts=2 * rounds, reference=case.get("beta", 0) != 0,
        old_logprobs=iterations > 1, adapted=adapted, all_logits=True,
    )  # fmt: skip
    update = budget.grpo_update(
        shape, [length] * len(completions), completions, adapted=adapted, all_logits=True,
        checkpointing=case.get("gradient_checkpointing", False),
    )  # fmt: skip
    trained = adapted.numbers(shape) if adapted else shape.parameters
    adam = flops.ADAM_FLOPS * trained  # elementwise: torch counts none of it
    spent = update.forward_flops + update.backward_flops - adam  # type: ignore[operator]
    formula = drawn.forward_flops + iterations * spent  # type: ignore[operator]
    return Row(f"TRL, {steps} steps, {name}", formula, counted(counter))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--trl", action="store_true")
    options = parser.parse_args()
    rows = tiny_rows()
    rows += [row for family in sorted(FAMILY) for row in family_rows(family)] if options.families else []
    rows += trl_rows() if options.trl else []
    print("| what | formula | counted | error |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.formula:,.0f} | {row.counted:,.0f} | {100 * row.error:+.2f} % |")
    worst = max(rows, key=lambda row: abs(row.error))
    print(f"\nlargest error {100 * worst.error:+.2f} %: {worst.name}")
    if abs(worst.error) > BOUND:
        raise SystemExit(f"above {100 * BOUND:g} %")


if __name__ == "__main__":
    main()
