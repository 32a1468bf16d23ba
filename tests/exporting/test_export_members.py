# SPDX-License-Identifier: Apache-2.0
"""A member of any generation, exported, says token for token what that member said in the run's own engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import Bench
from small_runs import UNCHECKED
from test_export import PROMPTS, QUESTIONS, TOKENS, Runs, base, of_plain, plain, train
from typer.testing import CliRunner

from evoalign import cli
from evoalign.analysis.mixer import effective
from evoalign.analysis.targets import locate
from evoalign.config import load
from evoalign.errors import CheckpointError, ConfigError
from evoalign.exporting.export import export
from evoalign.rundir import journal
from evoalign.types import MEAN_PLAN, Plan, Request, Sampling

__all__ = ["base"]
GENERATION, MEMBER = 1, 3
"""A mean that has moved, and the half of a pair whose noise is taken away."""


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each space; of lora with momentum, so that a member is not what an update of its own would come to."""

    def made(space: str) -> Path:
        optimizer = {"optimizer": {"name": "momentum"}} if space == "lora" else {}
        parts = {"es": {"antithetic": True, **optimizer}, "checks": UNCHECKED}
        return train(tmp_path_factory.mktemp(space) / "run", str(base), space, **parts)

    return Runs(made)


def of_engine(run: Path, generation: int, member: int | None) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """What a member, or the mean around which it lies, says greedily in an engine of the run's config."""
    log = journal.read(run / "journal.jsonl")
    with Bench(load([run / "config.yaml"])) as bench:
        for recorded in log.generations[:generation]:
            bench.engine.apply(recorded.update)
        update = log.generations[generation].update
        plan = MEAN_PLAN if member is None else Plan(update.generation, update.sigma, (update.members[member],))
        prompts = [bench.tokens.encode([{"role": "user", "content": q}]) for q in QUESTIONS]
        requests = [Request(i, ids, Sampling(TOKENS)) for i, ids in enumerate(prompts)]
        found = {r.request: list(r.token_ids) for r in bench.engine.rollout(plan, requests)}
        return prompts, [found[i] for i in range(PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["adapter", "merged", "lowrank", "full"])
def test_greedy_tokens_equal_those_of_the_member(form: str, runs: dict[str, Path], base: Path, tmp_path: Path) -> None:
    run = runs["lora" if form in ("adapter", "merged") else form]
    merge = {"merge": True, "dtype": "float32"} if form == "merged" else {}
    folder = export(run, tmp_path / "out", generation=GENERATION, member=MEMBER, **merge)
    prompts, wanted = of_engine(run, GENERATION, MEMBER)
    assert of_plain(plain(folder, base if form == "adapter" else None), folder, prompts) == wanted
    for other in (of_engine(run, GENERATION, None)[1], of_engine(run, GENERATION, MEMBER - 1)[1]):
        apart = sum(a != b for a, b in zip(other, wanted, strict=True))
        assert apart > PROMPTS // 10, "the mean, and the other of the pair, have to say something else"


def test_a_low_rank_member_is_the_mean_and_its_product(runs: dict[str, Path], tmp_path: Path) -> None:
    """Dense, against the factors that the engine serves."""
    run = runs["lowrank"]
    folder = export(run, tmp_path / "out", generation=GENERATION, member=MEMBER)
    saved = plain(folder).state_dict()
    log = journal.read(run / "journal.jsonl")
    update = log.generations[GENERATION].update
    with Bench(load([run / "config.yaml"])) as bench:
        bench.engine.apply(log.generations[0].update)
        mean = dict(bench.engine.state())
        plan = Plan(update.generation, update.sigma, update.members)
        for name, weight in mean.items():
            adapter = bench.space.adapter(bench.layout, name, mean.__getitem__, plan, (update.members[MEMBER],))
            assert adapter is not None
            want = weight.double() + adapter.b[0].double() @ adapter.a[0].double()
            torch.testing.assert_close(saved[name].double(), want, rtol=0, atol=1e-6)
            assert not torch.equal(saved[name], weight)


def test_the_card_and_the_records_say_which_member(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["lora"]
    folder = export(run, tmp_path / "out", generation=GENERATION, member=MEMBER)
    card = (folder / "README.md").read_text()
    recorded = journal.read(run / "journal.jsonl").generations[GENERATION]
    assert f"one member of a population, not the result of its run**: member {MEMBER} of the 6" in card
    assert f"its fitness was {recorded.fitness_M[MEMBER]:.4g}" in card
    assert "was not compared with its base" in card
    assert f"evoalign export run --generation {GENERATION} --member {MEMBER}" in card
    again = export(folder / "run", tmp_path / "again", generation=GENERATION, member=MEMBER)
    weights = "adapter_model.safetensors"
    assert (again / weights).read_bytes() == (folder / weights).read_bytes()
    mean = export(run, tmp_path / "mean", generation=GENERATION)
    assert (mean / weights).read_bytes() != (folder / weights).read_bytes()


def test_an_exported_member_is_a_target_and_an_altered_one_is_none(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["lora"]
    folder = export(run, tmp_path / "out", generation=GENERATION, member=MEMBER)
    target = locate(str(folder), load([run / "config.yaml"]))
    assert effective(target, torch.float32)
    record = folder / "run" / "member.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"weights_hash": "0" * 64}))
    with pytest.raises(CheckpointError, match="does not hold the weights"):
        effective(target, torch.float32)


def test_members_that_do_not_exist_are_refused_by_name(runs: dict[str, Path], tmp_path: Path) -> None:
    run, out = runs["lora"], tmp_path / "out"
    cases: list[tuple[dict[str, int], str]] = [
        ({"generation": 2, "member": 0}, "no members of generation 2: its generations are 0 to 1"),
        ({"generation": 0, "member": 6}, "no member 6 in generation 0: its members are 0 to 5"),
        ({"member": 1}, "--member 1 needs --generation"),
    ]
    for asked, message in cases:
        with pytest.raises(ConfigError, match=message):
            export(run, out, **asked)
        assert not out.exists() and not [p for p in tmp_path.iterdir() if "rebuilt" in p.name]
    words = [str(run), "--to", str(out), "--generation", "0", "--member", "99"]
    result = CliRunner().invoke(cli.app, ["export", *words])
    assert result.exit_code != 0 and not out.exists()


def test_a_run_of_grpo_has_no_members(tmp_path: Path, runs: dict[str, Path]) -> None:
    run = tmp_path / "grpo"
    run.mkdir()
    (run / "config.yaml").write_bytes((runs["lora"] / "config.yaml").read_bytes())
    (run / "manifest.json").write_text(json.dumps({"method": "grpo"}))
    with pytest.raises(ConfigError, match="run of GRPO, which has no members"):
        export(run, tmp_path / "out", generation=0, member=0)
