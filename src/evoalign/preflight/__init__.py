# SPDX-License-Identifier: Apache-2.0
"""`evoalign doctor`: whether this machine, and this config on it, will train; told check by check, with what fixes it.

Every check that can still run does: one that failed hides none but those that need what it could not make. Nothing is
trained, and nothing is left behind: what is written to the output directory is one file that is deleted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.preflight import grpo, machine, plan, work
from evoalign.preflight.case import NEEDS_FLAG, Case, Finding, run_check
from evoalign.setup import ConfigLike, as_config


def doctor(config: ConfigLike | None = None) -> list[Finding]:
    """Whether this machine, and a config on it, will train: all findings, in order. Trains and leaves nothing.

    Without a config: this machine, and the shipped model end to end. Raises ConfigError for a config that cannot be.
    """
    return list(findings(None if config is None else as_config(config)))


def findings(config: Config | None) -> Iterator[Finding]:
    """As `doctor`, each as soon as it is known."""
    yield from environment()
    case = Case(as_config(config or Config()))
    checks = CONFIGURED if case.method == "es" else CONFIGURED_FOR_GRPO
    try:
        for name, check in SHIPPED if config is None else checks:
            yield run_check(name, lambda check=check: check(case), case.config.engine.smaller(case.config))
    finally:
        case.close()


def environment() -> Iterator[Finding]:
    """What does not depend on a config."""
    for name, check in (
        ("versions", machine.check_versions),
        ("accelerators", machine.check_accelerators),
        ("extras", machine.check_extras),
    ):
        yield run_check(name, check)


def refused(error: ConfigError) -> Finding:
    """A config that is not valid, with all that is wrong in it."""
    return Finding("config", "failed", str(error))


def verdict(found: Sequence[Finding]) -> tuple[str, int]:
    """One line, and the exit code: 1 where something failed; warnings are allowed."""
    of: dict[str, list[str]] = {}
    for finding in found:
        of.setdefault(finding.status, []).append(finding.name)
    failed, warned = of.get("failed", []), of.get("warning", [])
    notes = f"; {len(warned)} to look at: {', '.join(warned)}" if warned else ""
    if failed:
        return f"verdict: not ready; {len(failed)} failed: {', '.join(failed)}{notes}", 1
    flag = "".join(f" ({f.fix})" for f in found if f.fix.endswith(NEEDS_FLAG))
    return f"verdict: ready{flag}; {len(of.get('ok', []))} checks passed{notes}", 0


Check = Callable[[Case], Finding]
SHIPPED: tuple[tuple[str, Check], ...] = (
    ("tokenizer", plan.check_tokenizer),
    ("targets", plan.check_targets),
    ("memory", plan.check_memory),
    ("engine", work.check_engine),
    ("canary", work.check_canary),
)
"""The shipped model end to end."""
CONFIGURED: tuple[tuple[str, Check], ...] = (
    ("config", plan.check_config),
    ("trackers", plan.check_trackers),
    ("output", plan.check_output),
    ("task", plan.check_task),
    ("gold answers", plan.check_gold),
    ("tokenizer", plan.check_tokenizer),
    ("chat template", plan.check_chat_template),
    ("prompt length", plan.check_lengths),
    ("targets", plan.check_targets),
    ("memory", plan.check_memory),
    ("disk", plan.check_disk),
    ("engine", work.check_engine),
    ("canary", work.check_canary),
    ("generation", work.check_generation),
)
"""Cheapest first."""
CONFIGURED_FOR_GRPO: tuple[tuple[str, Check], ...] = (
    ("config", grpo.check_config),
    ("trl", grpo.check_trl),
    ("trackers", plan.check_trackers),
    ("output", plan.check_output),
    ("task", plan.check_task),
    ("gold answers", plan.check_gold),
    ("round", grpo.check_round),
    ("tokenizer", plan.check_tokenizer),
    ("chat template", plan.check_chat_template),
    ("prompt length", plan.check_lengths),
    ("targets", grpo.check_targets),
    ("memory", grpo.check_memory),
    ("disk", grpo.check_disk),
    ("engine", grpo.check_engine),
    ("canary", grpo.check_canary),
    ("generation", grpo.check_generation),
)
