# SPDX-License-Identifier: Apache-2.0
"""Checks of a config for GRPO, where they differ from those for ES."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from evoalign import engines, evaluation, tracking
from evoalign.baselines import planning, settings
from evoalign.cost import estimate
from evoalign.cost.estimate import gib
from evoalign.engines.specs import on_gpu, specs_of_config
from evoalign.preflight import plan
from evoalign.preflight.case import Case, Finding, IdleError, need
from evoalign.preflight.work import generation_finding, rollout_duration, run_text, seconds_text, timed, try_splits
from evoalign.rollouts import batch, collect, rewards_of
from evoalign.rundir.identity import versions
from evoalign.training import heading
from evoalign.types import MEAN_PLAN, Member, Request, Rollout, Sampling
from evoalign.version import install

PASS = 3
"""A forward and a backward pass take about three times as long as a forward pass."""


def check_config(case: Case) -> Finding:
    """Report the step sizes that follow from the settings, and settings that are unlikely to be intended."""
    config = case.config
    if config.grpo.samples_members:
        _ = config.es  # raises ConfigError if missing: members come from the sections es and space
    first, *warnings = planning.step_lines(config)
    detail = f"GRPO, task {config.task.name}, model {config.model.name}; {first}"
    shown = " ".join(line.removeprefix("warning: ") for line in warnings)
    return Finding("config", "warning" if warnings else "ok", detail, shown)


def check_trl(case: Case) -> Finding:
    """Check that TRL is installed and knows the settings that are passed to it."""
    if not tracking.is_installed("trl"):
        return Finding("trl", "failed", "GRPO needs the extra grpo", install("grpo"))
    from evoalign.baselines.trainer import GRPOConfig, check_release

    check_release()
    on_cpu = not estimate.on_gpu(case.config)
    settings.arguments(case.config, Path("trainer"), on_cpu=on_cpu, known=settings.fields_of(GRPOConfig))
    return Finding("trl", "ok", f"TRL {versions('grpo')['trl']} knows all its settings and has what evoalign uses")


def check_round(case: Case) -> Finding:
    """Check that prompts and completions per step divide evenly, and that the objective suits GRPO."""
    data, grpo = need(case.data, "task"), case.config.grpo
    settings.check_objective(case.config, need(case.task, "task").objective())
    settings.check_prompts(case.config, len(data.train))
    size = settings.round_size(grpo)
    return Finding("round", "ok", f"{size} completions of {size // grpo.num_generations} of {len(data.train)} prompts")


def check_targets(case: Case) -> Finding:
    """Report how many parameters are trained."""
    specs = specs_of_config(case.config)
    count = planning.trained(case.config, specs)
    case.specs = specs
    return Finding("targets", "ok", f"model of {planning.parameters(specs):,} numbers, {count:,} are trained")


def check_memory(case: Case) -> Finding:
    """Compare weights, gradients and optimizer state with the free memory. Activations are not included."""
    wanted = planning.memory(case.config, need(case.specs, "targets"))
    detail, free = planning.memory_words(case.config, wanted), plan.free_memory(case.config)
    if free is None:
        return Finding("memory", "ok", f"{detail}; free memory is not known")
    if wanted.kept > free:
        case.fits = False
        fix = "set grpo.tune lora, or choose a smaller model"
        return Finding("memory", "failed", f"{detail}; {gib(free)} free", fix)
    return Finding("memory", "ok", f"{detail}; {gib(free)} free")


def check_disk(case: Case) -> Finding:
    """Check for room for the policies kept and two trainer states: one is deleted once the next is complete."""
    config = case.config
    policy, state = planning.checkpoint_bytes(config, need(case.specs, "targets"))
    kept = config.checkpoint.keep_last + heading.keeps_best(config, case.data) if state else 1
    what = f"{kept + 1} checkpoints of {gib(policy)}" + (
        f" and 2 states of the trainer of {gib(state)}" if state else ""
    )
    return plan.room_on_disk(config, policy * (kept + 1) + 2 * state, what)


def check_engine(case: Case) -> Finding:
    """Load the model in the engine that GRPO's evaluations use."""
    tokens_ = need(case.tokens, "tokenizer")
    need(case.specs, "targets")
    need(case.fits or None, "memory")
    began = time.perf_counter()
    case.engine = engines.create(case.config.as_policy(adapter=False), tokens_)
    ready = seconds_text(time.perf_counter() - began)
    return Finding("engine", "ok", f"the model answers in {case.config.model.trained_dtype}, ready in {ready}")


def check_canary(case: Case) -> Finding:
    """Skip the canary: only ES has members."""
    raise IdleError("GRPO has no members")


def check_generation(case: Case) -> Finding:
    """Score a group of completions of one prompt and a few rows of the evaluated splits; estimate a step's duration.

    A step's completions are timed as a generation of ES is, its training passes by a forward pass times `PASS`.
    """
    engine, tokens_ = need(case.engine, "engine"), need(case.tokens, "tokenizer")
    task, data, config = need(case.task, "task"), need(case.data, "task"), case.config
    failed = try_splits(data, lambda rows: evaluation.evaluate(engine, tokens_, task, rows, config.evaluation))
    if failed is not None:
        return failed
    grpo, prompt = config.grpo, tokens_.encode(task.prompt(data.train[0]))
    sampling = Sampling(settings.longest(config), grpo.temperature, grpo.top_p)
    began = time.perf_counter()
    rollouts = collect(engine, MEAN_PLAN, [Request(i, prompt, sampling, i) for i in range(grpo.num_generations)])
    answered = time.perf_counter()
    rewards = rewards_of(task, [r.text for r in rollouts], [data.train[0]] * len(rollouts))
    took, scoring = time.perf_counter() - began, time.perf_counter() - answered
    size = settings.round_size(grpo) * settings.rounds(grpo)
    rows = batch(len(data.train), size // grpo.num_generations, config.seed, 0)
    prompts = [tokens_.encode(task.prompt(data.train[row])) for row in rows]
    asked = [Request(i, prompts[i // grpo.num_generations % len(prompts)], sampling, i) for i in range(size)]
    lengths = [len(r.token_ids) for r in rollouts]

    def ask(members: Sequence[Member], some: Sequence[Request]) -> list[Rollout]:
        return collect(engine, MEAN_PLAN, some)

    gpu, steps = on_gpu(config), settings.cycle(grpo)
    found = rollout_duration(ask, MEAN_PLAN.members, asked, lengths, on_gpu=gpu)
    said = [(*prompts[i % len(prompts)], *r.token_ids) for i, r in enumerate(rollouts)]
    # Vary the first token by row: an engine computes a common prefix only once, and training does not.
    micro = [(i % 64, *said[i % len(said)][1:]) for i in range(grpo.per_device_train_batch_size)]
    reads = [Request(i, ids, Sampling(1), i) for i, ids in enumerate(micro)]
    passed, _ = timed(lambda: collect(engine, MEAN_PLAN, reads), gpu)
    rest = PASS * passed * grpo.gradient_accumulation_steps
    rest += scoring * size / len(rewards) / steps
    detail = (
        f"a group of {len(rewards)} completions scored {min(rewards):g} to {max(rewards):g} in {seconds_text(took)}; a "
        f"step takes about {seconds_text(found.usual / steps + rest)} if completions are as long as these (mean "
        f"{sum(lengths) / len(lengths):.0f} tokens), and at most about {seconds_text(found.most / steps + rest)} if "
        f"all have {sampling.max_tokens:,}, where a training pass takes {PASS} times as long as a forward pass; "
        f"{run_text(grpo.max_steps, 'steps', found.usual / steps + rest)}"
    )
    return generation_finding(detail, rollouts, rewards)
