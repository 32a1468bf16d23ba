# SPDX-License-Identifier: Apache-2.0
"""The section `grpo`: fields of TRL under `trl` or in their old place, arguments to TRL, and the hash of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import caller
from quantised_models import quantise

from evoalign.analysis.sweeping.cells import make_cells
from evoalign.baselines.planning import dry_run
from evoalign.baselines.settings import SET, arguments, check, fields_of
from evoalign.baselines.train import grpo
from evoalign.config import Config, from_dict, load, parse_overrides, to_yaml
from evoalign.config.grpo import ALLOWED, ASKED, OF_TRL, GrpoConfig
from evoalign.config.outside import EVALUATION_SKIPS
from evoalign.errors import ConfigError
from evoalign.models import tiny
from evoalign.rundir.identity import config_hash, differences
from evoalign.rundir.own import load_own

OLD = Path(__file__).parents[1] / "compatibility"
FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "trl_arguments.json").read_text(encoding="utf-8"))
"""Arguments to TRL, hash and resolved sections of all configs of release 0.1.0 and two more.

They are from when all fields of TRL were in `grpo` itself.
"""


def as_it_is(name: str) -> Config:
    frozen = FROZEN[name]
    return from_dict({"grpo": frozen["given"]}) if "given" in frozen else load([OLD / name])


def as_it_was(name: str) -> Config:
    """Return the config from the resolved sections of a run directory of release 0.1.0."""
    tree = as_it_is(name).model_dump(mode="json")
    return from_dict(yaml.safe_load(yaml.safe_dump({**tree, **{k: FROZEN[name][k] for k in ("grpo", "model")}})))


def test_every_old_config_of_grpo_is_frozen() -> None:
    files = [f for f in (OLD / "configs").rglob("*.yaml") if f.parent.name != "sweeps"]
    grpo = {str(f.relative_to(OLD)) for f in files if "grpo" in load([f]).model_fields_set}
    assert grpo == {name for name in FROZEN if "given" not in FROZEN[name]}
    plain, given = FROZEN["defaults"]["grpo"], FROZEN["every field"]["given"]
    assert {*OF_TRL} <= {name for name in given if given[name] != plain[name]}


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("read", [as_it_is, as_it_was], ids=["config", "run"])
def test_arguments_and_hashes_equal_the_frozen_ones(name: str, read: Any) -> None:
    trl = pytest.importorskip("trl")
    config, known = read(name), fields_of(trl.GRPOConfig)
    for device, expected in FROZEN[name]["arguments"].items():
        found = arguments(config, Path("runs/a"), on_cpu=device == "cpu", known=known)
        assert found == expected
        assert {n: type(v) for n, v in found.items()} == {n: type(v) for n, v in expected.items()}
    assert config_hash(config, "grpo") == FROZEN[name]["config_hash"]
    assert differences(config, as_it_was(name), "grpo") == ([], [])


def test_fields_of_trl_move_into_their_section() -> None:
    old = from_dict({"grpo": {"loss_type": "grpo", "epsilon": "1e-1", "trl": {"min_p": 0.1}}})
    assert old.grpo.trl == {"loss_type": "grpo", "epsilon": 0.1, "min_p": 0.1}
    assert old == from_dict({"grpo": {"trl": {"loss_type": "grpo", "epsilon": 0.1, "min_p": 0.1}}})
    assert old == from_dict(yaml.safe_load(to_yaml(old)))
    assert not {*OF_TRL} & GrpoConfig.model_fields.keys()


def test_fields_of_trl_are_still_attributes() -> None:
    grpo = from_dict({"grpo": {"loss_type": "grpo"}}).grpo
    assert {name: getattr(grpo, name) for name in OF_TRL} == {**OF_TRL, "loss_type": "grpo"}
    assert not hasattr(grpo, "los_type")


def test_later_file_overrides_either_place_of_a_field(tmp_path: Path) -> None:
    files = [tmp_path / "old.yaml", tmp_path / "new.yaml"]
    files[0].write_text("grpo: {loss_type: grpo, trl: {top_k: 3}}\n")
    files[1].write_text("grpo: {trl: {loss_type: bnpo}}\n")
    assert load(files).grpo.trl == {"loss_type": "bnpo", "top_k": 3}
    assert load(files[::-1]).grpo.trl == {"loss_type": "grpo", "top_k": 3}
    assert load(files, ["grpo.loss_type=dapo", "grpo.trl.top_k=4"]).grpo.trl == {"loss_type": "dapo", "top_k": 4}
    assert parse_overrides({"grpo": {"trl": {"bf16": True}}}, ["grpo.bf16=false"]) == {"grpo": {"trl": {"bf16": False}}}


@pytest.mark.parametrize(
    ("grpo", "message"),
    [
        ({"loss_type": "grpo", "trl": {"loss_type": "dapo"}}, "are the same setting: take grpo.loss_type out"),
        ({"loss_type": "ppo"}, "grpo.trl: loss_type is one of grpo, bnpo, .*, not 'ppo'"),
        ({"trl": {"scale_rewards": "all"}}, "grpo.trl: scale_rewards is one of group, batch, none, not 'all'"),
        ({"trl": {"epsilon": "wide"}}, "grpo.trl: epsilon is a number of 0 or more, not 'wide'"),
        ({"weight_decay": -0.1}, "grpo.trl: weight_decay is a number of 0 or more, not -0.1"),
        ({"trl": {"delta": float("nan")}}, "grpo.trl: delta is a number of 0 or more"),
        ({"trl": 3}, "grpo.trl: "),
        ({"los_type": "grpo"}, r"unknown setting grpo.los_type; did you mean grpo.trl.loss_type\?"),
    ],
)
def test_config_refuses_values_that_trl_would_refuse_later(grpo: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        from_dict({"grpo": grpo})
    assert "\n" not in str(error.value)


def test_a_sweep_reads_a_field_by_its_old_name() -> None:
    (cell,) = make_cells({"grpo": {}}, [{"grpo.epsilon": "1e-1"}, {"grpo.epsilon": 0.1}], "grpo")
    assert (cell.name, cell.settings) == ("epsilon=0.1", {"grpo.epsilon": 0.1})


def test_trust_remote_code_can_only_be_false() -> None:
    said = from_dict({"es": {"sigma": 1}, "model": {"trust_remote_code": False}})
    assert said == from_dict({"es": {"sigma": 1}}) and "trust_remote_code" not in to_yaml(said)
    es = from_dict({"es": {"sigma": 0.01, "learning_rate": 0.005}})
    assert config_hash(es) == "93c0aefcc9fce28292041f7809b49980424b64acc2bb75bcfcb714cb61835f44", "as in old journals"
    with pytest.raises(ConfigError, match=r"^model.trust_remote_code cannot be set: .* never run$"):
        from_dict({"es": {"sigma": 1}, "model": {"trust_remote_code": True}})


@pytest.mark.parametrize(
    "name",
    [
        "hub_model_id", "hub_strategy", "push_to_hub", "log_completions_hub_repo", "report_to", "output_dir",
        "logging_dir", "resume_from_checkpoint", "trackio_space_id", "project", "do_train", "local_rank",
        "restore_callback_states_from_checkpoint", "trust_remote_code", "model_init_kwargs", "loss_typ",
        "chat_template_kwargs",
    ],
)  # fmt: skip
def test_check_refuses_fields_unrelated_to_training(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^grpo\.trl\.{name}\b"):
        check(from_dict({"grpo": {"trl": {name: "x"}}}))


def test_allowed_fields_are_fields_of_trl() -> None:
    trl = pytest.importorskip("trl")
    gone = {"adafactor", "group_by_length", "max_prompt_length", "vllm_guided_decoding_regex"}
    assert (ALLOWED | ASKED) - fields_of(trl.GRPOConfig).keys() <= gone
    assert not ALLOWED & ASKED and OF_TRL.keys() <= ALLOWED
    assert not (ALLOWED | ASKED) & (SET.keys() | GrpoConfig.model_fields.keys())
    check(from_dict({"grpo": {"trl": {"deepspeed": {"zero_optimization": {"stage": 2}}, "min_p": 0.1}}}))


@pytest.mark.parametrize("trl", [{"weight_decay": 1e308}, {"min_p": -1e300}, {"optim_args": {"a": [1, 2**200]}}])
def test_numbers_of_trl_are_bounded(trl: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"beyond 1e\+12"):
        from_dict({"grpo": {"trl": trl}})


REACHING = {
    "deepspeed": "/tmp/zero.json", "vllm_server_base_url": "http://elsewhere:8000", "vllm_server_host": "elsewhere",
    "accelerator_config": "/tmp/accelerate.json", "generation_kwargs": {"custom_generate": "evil/code"},
}  # fmt: skip


@pytest.mark.parametrize("name", REACHING)
def test_resume_asks_for_a_config_when_the_runs_own_reaches_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that the user passes is trusted, and fails only for what it requests."""
    (tmp_path / "config.yaml").write_text(to_yaml(from_dict({"grpo": {"trl": {name: REACHING[name]}}})))
    (tmp_path / "manifest.json").write_text('{"method": "grpo"}')
    run = caller(monkeypatch, capsys)
    done = run("grpo", tmp_path, "--resume", "--dry-run")
    assert done.code == 2 and f"grpo.trl.{name} " in done.err, done.err
    own = tmp_path / "config.yaml"
    assert f"--config {own}" in done.err and done.err.count("\n") == 1
    assert run("grpo", own, "--resume", "--dry-run").err == done.err
    again = run("grpo", tmp_path, "--resume", "--dry-run", "--config", own)
    assert f"grpo.trl.{name} " not in again.err
    load_own(tmp_path, skip=EVALUATION_SKIPS)  # an evaluation does not read the section


def test_check_release_raises_when_a_method_is_missing() -> None:
    """Overriding a method that TRL no longer has would have no effect, without an error."""
    trainer = pytest.importorskip("evoalign.baselines.trainer")
    trainer.check_release()
    methods = {name: lambda self: None for name in trainer.OVERRIDDEN if name != "_tokenize_prompts"}
    with pytest.raises(ConfigError, match=r"has no OtherTrainer\._tokenize_prompts,"):
        trainer.check_release(type("OtherTrainer", (), methods))
    own = {name for name in vars(trainer.Trainer) if name.startswith("_") and not name.startswith("__")}
    assert own == set(trainer.OVERRIDDEN), "each private method that is overridden is looked for"


@pytest.mark.parametrize("start", [grpo, dry_run])
def test_a_quantised_base_is_refused_before_anything_is_written(start: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    quantise("awq", tiny(), tmp_path / "packed")
    tree = {"output_dir": str(tmp_path / "run"), "model": {"name": str(tmp_path / "packed")}, "grpo": {"max_steps": 1}}
    with pytest.raises(ConfigError, match=r"is quantised .*4 bits.*TRL trains full-precision weights.*set model\.name"):
        start(tree)
    assert not (tmp_path / "run").exists()
