# SPDX-License-Identifier: Apache-2.0
"""Commands on a GRPO run: eval, export, resume, doctor and dry run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Run, caller
from copied_runs import rebind
from doctor_runs import statuses
from grpo_runs import completions, grpo, rows, with_sections
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from small_runs import UNCHECKED, hashes_of
from transformers import AutoModelForCausalLM

import evoalign
from evoalign.baselines import planning
from evoalign.config import from_dict, load
from evoalign.engines.specs import specs_of_config
from evoalign.errors import CheckpointError, ConfigError, JournalError, ModelError, ResumeError
from evoalign.exporting.source import private_paths, public
from evoalign.models import tiny
from evoalign.preflight import doctor
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import saved_folders
from evoalign.setup import serve
from evoalign.training import resolve as targets
from evoalign.version import install

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

ES = {"num_generations": 1, "population_size": 4, "sigma": 0.05, "learning_rate": 0.025}


def config(output: Path, **sections: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "output_dir": str(output),
        "task": {"name": "conciseness"},
        "evaluation": {"max_tokens": 8, "every": 1},
        "checkpoint": {"every": 1},
        "checks": UNCHECKED,
        "lora": {"rank": 2, "alpha": 4},
        "grpo": {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 4, "learning_rate": 0.02,
                 "lr_scheduler_type": "constant", "rollouts": "engine"},
    }  # fmt: skip
    return with_sections(tree, sections)


def written(folder: Path, tree: dict[str, Any]) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each `grpo.tune`, by configs that have no section es."""
    found: dict[str, Path] = {}
    for tune, rate in (("full", 0.02), ("lora", 0.3)):
        own = {"tune": tune, "learning_rate": rate}
        tree = config(tmp_path_factory.mktemp(tune) / "run", grpo=own, space="full")  # space is of no matter to GRPO
        found[tune] = grpo(tree).path
    return found


@pytest.fixture(scope="module")
def es_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = config(tmp_path_factory.mktemp("es") / "run", es=ES)
    return evoalign.train(tree, console=Console(quiet=True)).path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 300)


def texts(path: Path, which: str) -> list[tuple[str, float]]:
    return [(row["text"], row["reward"]) for row in completions(path, which)]


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_eval_repeats_the_runs_own_evaluation(tune: str, runs: dict[str, Path], run: Run, tmp_path: Path) -> None:
    done = run("eval", runs[tune], "--output", tmp_path / "found.json")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "found.json").read_text())
    ours = [(c["text"], c["reward"]) for c in found["completions"]]
    assert ours == texts(runs[tune], "after")
    assert ours != texts(runs[tune], "before"), "the run changed nothing"
    assert found["measures"] == json.loads((runs[tune] / "results/evaluation.json").read_text())["after"]


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_eval_completions_equal_those_of_the_run(tune: str, runs: dict[str, Path], tmp_path: Path) -> None:
    here = shutil.copytree(runs[tune], tmp_path / "run")
    (here / "config.yaml").write_text(yaml.safe_dump({**config(here, grpo={"tune": tune}), "engine": "vllm"}))
    rebind(here)
    found, adapter = targets.resolve_target(here, None)
    assert (found.model.dtype, found.engine.name) == ("float32", "transformers")
    assert (adapter is None) == (tune == "full")
    asked, _ = targets.resolve_target(here, {**config(here), "engine": "vllm", "model": {"dtype": "bfloat16"}})
    assert (asked.model.dtype, asked.engine.name) == ("bfloat16", "vllm")


def test_a_model_is_served_with_a_config_for_grpo_alone(tmp_path: Path) -> None:
    served = serve(from_dict(config(tmp_path / "x")))
    assert served.layout.rank == 2 and served.config.es_ is None
    served.close()


def test_eval_accepts_samples_and_settings(runs: dict[str, Path], run: Run, tmp_path: Path) -> None:
    words = ("--samples", 3, "--temperature", 1, "--split", "train", "-s", "evaluation.max_tokens=4")
    done = run("eval", runs["lora"], *words, "--output", tmp_path / "found.json")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "found.json").read_text())["completions"]
    assert len(found) == 3 * 2 and max(c["tokens"] for c in found) <= 4


def test_eval_a_model_with_a_config_for_grpo_alone(run: Run, tmp_path: Path, runs: dict[str, Path]) -> None:
    file = written(tmp_path, config(tmp_path / "new"))
    done = run("eval", "tiny", "-c", file, "--output", tmp_path / "found.json")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(c["text"], c["reward"]) for c in found["completions"]] == texts(runs["full"], "before")


def test_eval_refuses_an_altered_policy_or_one_of_es(runs: dict[str, Path], es_run: Path, tmp_path: Path) -> None:
    here = shutil.copytree(runs["lora"], tmp_path / "run")
    (last := saved_folders(here)[-1] / "adapter_config.json").write_text(last.read_text().replace("4", "8"))
    for what in (lambda: targets.evaluate(here), lambda: evoalign.export(here, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"adapter_config.json was altered"):
            what()
    shutil.rmtree(here / "loras")
    shutil.copytree(es_run / "loras", here / "loras")
    for what in (lambda: targets.evaluate(here), lambda: evoalign.export(here, tmp_path / "out")):
        with pytest.raises(CheckpointError, match="is not from a run of GRPO"):
            what()


def first_text(model: Any, folder: Path, path: Path) -> str:
    """Return the completion of the first test prompt by plain transformers."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "GenerationConfig" in code
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny())
    example = evoalign.evaluate(path).completions[0]
    chat = [{"role": "user", "content": example.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    settings = GenerationConfig.from_pretrained(folder, max_new_tokens=8)
    output = model.generate(**inputs, generation_config=settings)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("form", ["full", "adapter", "merged"])
def test_export_has_the_results_of_the_run(form: str, runs: dict[str, Path], run: Run, tmp_path: Path) -> None:
    path, out = runs["full" if form == "full" else "lora"], tmp_path / "out"
    done = run("export", path, "--to", out, *(["--merge", "--dtype", "float32"] if form == "merged" else []))
    assert done.code == 0 and "weights in float32" in done.out, done.err
    model = AutoModelForCausalLM.from_pretrained(tiny() if form == "adapter" else out, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, out) if form == "adapter" else model
    assert first_text(model, out, path) == texts(path, "after")[0][0]
    # fmt: off
    files = {
        "adapter": {"adapter_config.json", "adapter_model.safetensors"},
        "full": {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"},
    }["adapter" if form == "adapter" else "full"]
    # fmt: on
    here = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert here == files | {"README.md", "evolution.png", "generation_config.json", "run/config.yaml"}
    assert load([out / "run/config.yaml"]).grpo == load([path / "config.yaml"]).grpo


def test_card_names_grpo(runs: dict[str, Path], tmp_path: Path) -> None:
    import trl

    text = (evoalign.export(runs["lora"], tmp_path / "out") / "README.md").read_text()
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert {"grpo", "trl", "lora"} <= set(metadata["tags"]) and not {"gradient-free"} & set(metadata["tags"])
    assert f"by GRPO (Shao et al., arXiv 2402.03300) with TRL {trl.__version__} and evoalign" in text
    assert "2 steps, 4 x 1 completions per step and device in groups of 2, drawn by evoalign's engine" in text
    assert "LoRA of rank 2" in text and "learning rate 0.3 (constant)" in text
    assert "evoalign grpo run/config.yaml" in text and "It is not the end of its run" not in text
    assert "weights trained in float32" in text and f"trl {trl.__version__}" in text
    found = json.loads((runs["lora"] / "results/evaluation.json").read_text())
    assert f"| {found['before']['reward']:.4g} | {found['after']['reward']:.4g} |" in text
    for word in ("replay", "journal", "sigma", "no gradients", str(runs["lora"].parent)):
        assert word not in text.split("## Configuration")[0], word


def test_an_earlier_step_is_exported_where_it_was_saved(runs: dict[str, Path], run: Run, tmp_path: Path) -> None:
    folder = evoalign.export(runs["lora"], tmp_path / "one", generation=1)
    wanted = load_file(runs["lora"] / "loras/generation_0001/adapter_model.safetensors")
    found = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    text = (folder / "README.md").read_text()
    assert "**It is not the end of its run**: the policy after step 1 of 2." in text and "was not compared" in text
    done = run("export", runs["lora"], "--to", tmp_path / "none", "-g", 7)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "no weights after step 7" in done.err and "--generation takes 1, 2" in done.err
    assert not (tmp_path / "none").exists()


def test_export_raises_when_impossible(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo.tune full.*leave out --merge"):
        evoalign.export(runs["full"], tmp_path / "out", merge=True)
    here = shutil.copytree(runs["full"], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    for what in (lambda: evoalign.export(here, tmp_path / "out"), lambda: targets.evaluate(here)):
        with pytest.raises(ModelError, match=str(here)):
            what()
    assert not (tmp_path / "out").exists()


def test_a_merge_with_another_base_is_refused_where_the_run_wrote_down_its_base(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    here = shutil.copytree(runs["lora"], tmp_path / "run")
    manifest = json.loads((here / "manifest.json").read_text())
    manifest["engine"]["model_hash"] = "0" * 64
    (here / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="has other weights than the base"):
        evoalign.export(here, tmp_path / "out", merge=True)


def test_paths_in_settings_of_trl_stay_at_home(tmp_path: Path) -> None:
    ours = from_dict(config(tmp_path / "x", grpo={"trl": {"deepspeed": "/home/me/zero.json"}}))
    assert private_paths(ours) == ["/home/me/zero.json"]
    assert public(ours).grpo.trl["deepspeed"] == "zero.json"


def test_a_run_of_grpo_has_no_journal(runs: dict[str, Path], run: Run) -> None:
    for command in ("journal", "replay"):
        done = run(command, runs["full"])
        assert done.code == 2 and done.err.count("\n") == 1
        assert "has no journal: its updates are gradients" in done.err and "evoalign export" in done.err
    with pytest.raises(JournalError, match="no journal"):
        evoalign.replay(runs["lora"])


def test_resume_raises_on_a_run_of_the_other_method(
    runs: dict[str, Path], es_run: Path, run: Run, tmp_path: Path
) -> None:
    file = written(tmp_path, config(tmp_path / "x", es=ES))
    for command, other, right in (("train", runs["full"], "grpo"), ("grpo", es_run, "train")):
        before = hashes_of(other)
        for words in (
            [other, "--resume"], [other / "config.yaml", "--resume"], [other],
            [file, "--resume", "-s", f"output_dir={other}"], [file, "-s", f"output_dir={other}"],
            [file, "--resume", "--dry-run", "-s", f"output_dir={other}"],
        ):  # fmt: skip
            done = run(command, *words)
            assert done.code == 2 and done.err.count("\n") == 1, done.err
            assert f"evoalign {right} {other} --resume" in done.err
        assert hashes_of(other) == before
    with pytest.raises(ResumeError, match="holds a run of GRPO"):
        evoalign.train(config(runs["full"], es=ES), resume=True)


def test_overwrite_moves_a_run_of_the_other_method_aside(runs: dict[str, Path], tmp_path: Path) -> None:
    here = shutil.copytree(runs["lora"], tmp_path / "run")
    quiet = Console(quiet=True)
    evoalign.train(config(here, es=ES), overwrite=True, console=quiet)
    assert (here / "journal.jsonl").is_file() and not (here / "loras/generation_0002").exists()
    (aside,) = tmp_path.glob("run.*")
    assert (aside / "loras/generation_0002").is_dir() and not (aside / "journal.jsonl").exists()
    evoalign.grpo(config(here), overwrite=True, console=quiet)
    assert not (here / "journal.jsonl").exists() and (here / "checkpoints/generation_0002").is_dir()


@pytest.mark.parametrize(
    ("command", "flags", "hint"),
    [*[("train", f, "evoalign grpo CONFIG") for f in ([], ["--dry-run"], ["--resume"])],
     *[("grpo", f, "") for f in ([], ["--dry-run"])]],
)  # fmt: skip
def test_train_requires_a_section_es_and_grpo_that_of_a_method(
    command: str, flags: list[str], hint: str, run: Run, tmp_path: Path
) -> None:
    tree = config(tmp_path / "new", model={"name": str(tmp_path / "none")})
    if command == "grpo":
        del tree["grpo"]
    done = run(command, written(tmp_path, tree), *flags)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "missing setting es" in done.err and hint in done.err
    assert not (tmp_path / "new").exists()


def test_doctor_accepts_a_config_for_grpo_only(tmp_path: Path) -> None:
    short = config(tmp_path / "runs/new", grpo={"num_generations": 4}, sampling={"max_tokens": 2})
    found = doctor.doctor(from_dict(short))
    assert [f.name for f in found[3:]] == [name for name, _ in doctor.checks_of("grpo")]
    odd = {name: status for name, status in statuses(found[3:]).items() if status != "ok"}
    assert odd == {"canary": "skipped", "generation": "warning"}  # a few tokens end no completion
    told = {f.name: f for f in found}
    assert told["canary"].status == "skipped" and "no members" in told["canary"].detail
    assert "a group of 4 completions scored" in told["generation"].detail
    assert re.search(r"a step takes about [\d.]+ s if .* at most about [\d.]+ s", told["generation"].detail)
    assert doctor.verdict(found)[1] == 0
    assert not list(tmp_path.iterdir())


def test_the_doctor_finds_what_grpo_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"per_device_train_batch_size": 64, "trl": {"loss_typ": 1}, "tune": "lora"}
    tree = config(tmp_path / "new", grpo=wrong, lora={"target_layers": [99]})
    found = {f.name: f for f in doctor.doctor(from_dict(tree))}
    assert found["config"].status == "warning" and "num_generations 2" in found["config"].fix
    assert found["trl"].status == "failed" and "loss_type" in found["trl"].detail
    assert found["round"].status == "failed" and "needs 32 prompts" in found["round"].detail
    assert found["targets"].status == "failed" and "99" in found["targets"].detail
    assert found["engine"].status == found["disk"].status == "skipped"
    monkeypatch.setattr("evoalign.tracking.is_installed", lambda name: name != "trl")
    found = {f.name: f for f in doctor.doctor(from_dict(config(tmp_path / "new")))}
    assert found["trl"].status == "failed" and found["trl"].fix == install("grpo")


def test_the_doctor_names_the_command_that_needs_a_flag(runs: dict[str, Path]) -> None:
    found = doctor.doctor(load([runs["lora"] / "config.yaml"]))
    assert statuses(found)["output"] == "warning"
    line, code = doctor.verdict(found)
    assert code == 0 and "ready (grpo needs --resume or --overwrite)" in line


def test_doctor_examines_a_config_of_both_methods_as_es(tmp_path: Path) -> None:
    found = doctor.doctor(from_dict(config(tmp_path / "new", es=ES)))
    assert [f.name for f in found[3:]] == [name for name, _ in doctor.checks_of("es")]
    assert doctor.verdict(found)[1] == 0


def test_dry_run_prints_steps_and_memory_and_writes_no_files(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, config(tmp_path / "new"))
    words = ("-s", "grpo.max_steps=10", "-s", "grpo.gradient_accumulation_steps=2", "-s", "grpo.beta=0.1",
             "-s", "grpo.per_device_train_batch_size=2")  # fmt: skip
    done = run("grpo", file, "--dry-run", "--evaluate-every", 3, *words)
    assert done.code == 0, done.err
    shown = done.out.split("\n\n")[1]
    assert yaml.safe_load(done.out.split("\n\n")[0])["evaluation"]["every"] == 3
    assert "completions 4 per step (2 prompts x 2), 40 in total" in shown
    assert "tokens at most 32 per step, 320 in total" in shown
    assert "warning: grpo.num_generations 2" in shown and "note:" not in shown and "refused" not in shown
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny()).parameters())
    assert f"{weights / 1e6:.3f} M trained" in shown
    of = {"float32 weights": 4, "gradients": 4, "AdamW's two moments": 8, "copies of the base model": 4}
    for name, each in of.items():
        assert f"{name} {each * weights / 2**20:.1f} MiB" in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml"]


def test_dry_run_prints_defaults_without_a_section_grpo(tmp_path: Path) -> None:
    tree = config(tmp_path / "new", es=ES)
    assert not planning.default_lines(from_dict(tree))
    del tree["grpo"]
    (line,) = [told for told in planning.dry_run(tree) if told.startswith("note: the config has no section grpo")]
    assert "learning rate 1e-06, 100 steps, groups of 8" in line


def test_dry_run_says_that_rewards_are_random(tmp_path: Path) -> None:
    tree = config(tmp_path / "new")
    assert not [line for line in planning.dry_run(tree) if "random rewards" in line]
    tree["grpo"]["reward"] = "random"
    (line,) = [line for line in planning.dry_run(tree) if "random rewards" in line]
    assert "grpo.reward: random" in line and line in planning.step_lines(from_dict(tree))


MEMBERS = {"rollouts": "es", "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4, "num_generations": 4}


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"grpo": MEMBERS, "es": {**ES, "antithetic": True}, "space": "lowrank"},
         "by es: 4 greedy members (antithetic pairs) of space lowrank, sigma 0.05 (constant), 3 prompts per step"),
        ({"grpo": MEMBERS, "es": {**ES, "antithetic": False}, "space": "lowrank"}, "(no antithetic pairs)"),
        ({"grpo": {"max_steps": 5, "num_iterations": 2}}, "completions 4 per 2 steps (2 prompts x 2), 12 in total"),
    ],
)  # fmt: skip
def test_dry_run_describes_members_and_rounds(sections: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    assert wanted in "\n".join(planning.dry_run(config(tmp_path / "new", **sections)))


def test_the_memory_of_an_adapter_is_that_of_its_factors(runs: dict[str, Path], tmp_path: Path) -> None:
    ours = from_dict(config(tmp_path / "x", grpo={"tune": "lora", "beta": 0.1}, checks={"kl_every": 1}))
    specs = specs_of_config(ours)
    saved = load_file(saved_folders(runs["lora"])[-1] / "adapter_model.safetensors")
    count = sum(tensor.numel() for tensor in saved.values())
    need = planning.memory(ours, specs)
    assert (need.adapter, need.gradients, need.moments) == (4 * count, 4 * count, 8 * count)
    assert need.reference == need.weights == 4 * planning.parameters(specs)  # one for checks.kl_every, none for beta
    policy, state = planning.checkpoint_bytes(ours, specs)
    sizes = (sum(t.nbytes for t in saved.values()), 3 * 4 * count)
    assert (policy, state) == sizes
    other = from_dict(config(tmp_path / "x", grpo={"optim": "adamw_8bit"}))
    assert planning.memory(other, specs).moments is None
    assert "state of adamw_8bit not counted" in planning.memory_lines(other, specs)[1]


def test_rate_lines_note_unusual_rates_of_large_models(tmp_path: Path) -> None:
    def lines(rate: float, count: float, tune: str = "full") -> list[str]:
        tree = config(tmp_path / "x", grpo={"learning_rate": rate, "tune": tune})
        return planning.rate_lines(from_dict(tree), int(count))

    assert [bool(lines(rate, 5e8)) for rate in (1e-8, 2e-7, 1e-6, 5e-5, 1e-3)] == [True, False, False, False, True]
    assert not lines(1e-3, 5e5) and not lines(1e-3, 5e8, "lora")


def test_dry_run_lists_reasons_to_refuse(runs: dict[str, Path], tmp_path: Path) -> None:
    told = planning.dry_run(config(runs["full"], grpo={"per_device_train_batch_size": 64}))
    assert told[0].startswith("would be refused: output_dir") and f"evoalign grpo {runs['full']}" in told[0]
    assert "needs 32 prompts" in told[1]
    told = planning.dry_run(config(tmp_path / "x", grpo={"rollouts": "es"}))
    assert told[0].startswith("would be refused: missing setting es")


def test_a_dry_run_of_a_resume(runs: dict[str, Path], run: Run) -> None:
    done = run("grpo", runs["full"], "--resume", "--dry-run", "-s", "grpo.max_steps=9")
    assert done.code == 0 and "resumes after step 2 of 9" in done.out, done.err
    done = run("grpo", runs["full"], "--resume", "--dry-run", "-s", "grpo.beta=0.5")
    assert done.code == 2 and "other settings: grpo.beta is 0.0 in the run and 0.5 now" in done.err
    # The steps belong to what a run is only with a schedule, which the run has not.
    scheduled = ("-s", "grpo.lr_scheduler_type=linear")
    done = run("grpo", runs["full"], "--resume", "--dry-run", *scheduled, "-s", "grpo.max_steps=9")
    assert "grpo.max_steps is 2 in the run and 9 now" in done.err and "None" not in done.err
    done = run("grpo", runs["full"], "--resume", *scheduled)
    assert done.code == 2 and "'constant' in the run" in done.err and "max_steps" not in done.err


def test_the_manifest_of_grpo_has_the_release_of_trl(runs: dict[str, Path], es_run: Path) -> None:
    import trl

    assert json.loads((runs["full"] / "manifest.json").read_text())["versions"]["trl"] == trl.__version__
    assert "trl" not in json.loads((es_run / "manifest.json").read_text())["versions"]


def test_files_page_names_the_fields_of_grpo(runs: dict[str, Path]) -> None:
    text = (Path(__file__).parents[2] / "docs/reference/files.md").read_text(encoding="utf-8")
    part = text.split("### grpo\n")[1].split("### ")[0]
    firsts = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    assert {name for row in rows(runs["full"]) for name in row["grpo"]} == set(re.findall(r"`(\w+)`", "".join(firsts)))
    manifest = text.split("## manifest.json\n")[1].split("## ")[0]
    assert all(f"`{name}`" in manifest for name in json.loads((runs["full"] / "manifest.json").read_text()))
    columns = set(completions(runs["full"], 0)[0])
    assert columns == {"generation", "score", "prompt", "target", "rendered", "text", "finish_reason", "tokens"}


def test_trackers_end_where_the_run_ends(runs: dict[str, Path], es_run: Path, tmp_path: Path) -> None:
    from evoalign.tracking.base import last_step

    both = from_dict(config(tmp_path / "x", es={**ES, "num_generations": 30}))
    assert (last_step(both, runs["full"]), last_step(both, es_run)) == (2, 30)


def test_evaluate_every_sets_the_interval(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, config(tmp_path / "new", evaluation={"every": 0}, tracking={"backends": ["tensorboard"]}))
    done = run("grpo", file, "--evaluate-every", 1)
    assert done.code == 0, done.err
    assert rows(tmp_path / "new")[0]["evaluation"] is not None
    assert checkpoint.verify(tmp_path / "new/checkpoints/generation_0002").generation == 2
    assert list((tmp_path / "new/logs/tensorboard").iterdir())
