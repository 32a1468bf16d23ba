# SPDX-License-Identifier: Apache-2.0
"""What the doctor has to catch: each fault is a finding that says how to fix it, and hides no other check."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import caller
from doctor_runs import DATA, config, of, statuses
from families import ByLibrary
from kill_points import VALIDATION

from evoalign import engines
from evoalign.models import tiny
from evoalign.preflight import doctor, plan
from evoalign.preflight.plan import Case, Finding
from evoalign.tasks.conciseness import Conciseness
from evoalign.types import Member, Plan
from evoalign.version import install

pytestmark = pytest.mark.usefixtures("short_pieces")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny(), tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def task_of(tmp_path: Path, reward: str) -> dict[str, Any]:
    """A custom task whose reward function has this body."""
    (tmp_path / "mine.py").write_text(f"def reward(prompts, completions, **columns):\n    {reward}\n")
    rows = [{"prompt": f"Solve: {i} + 1 ="} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "custom", "rewards": [f"{tmp_path / 'mine.py'}:reward"], "train_data": str(tmp_path / "rows.jsonl"),
        "test_data": None,
    }  # fmt: skip


class Ignores(ByLibrary):
    def _put_adapters(self, plan: Plan, members: Sequence[Member]) -> None:
        return


def test_an_ignored_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "create", Ignores)
    found = doctor.doctor(config(tmp_path))
    assert of(found, "canary").status == "failed"
    assert of(found, "canary").detail.startswith("canary: member 0 ")
    assert statuses(found)["engine"] == statuses(found)["generation"] == "ok"
    assert doctor.verdict(found) == ("verdict: not ready; 1 failed: canary", 1)


def test_an_ignored_adapter_of_the_shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "create", Ignores)
    assert of(doctor.findings(None), "canary").status == "failed"


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["query"]}, "no module 'query'; the model has down_proj, gate_proj, k_proj"),
        ({"target_layers": [99]}, "no layer 99; the model has layers 0 to 3"),
    ],
)
def test_modules_and_layers_that_the_model_lacks(tmp_path: Path, lora: dict[str, Any], message: str) -> None:
    found = doctor.doctor(config(tmp_path, lora=lora))
    assert of(found, "targets").status == "failed" and message in of(found, "targets").detail
    assert {of(found, name).status for name in ("memory", "disk", "engine", "canary", "generation")} == {"skipped"}
    assert of(found, "prompt length").status == "ok"


def test_a_missing_chat_template(tmp_path: Path, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    found = doctor.doctor(config(tmp_path, model={"name": str(folder)}))
    finding = of(found, "chat template")
    assert finding.status == "failed" and "no chat template" in finding.detail
    assert "task.prompt: raw" in finding.fix
    assert statuses(found)["canary"] == "ok"
    raw = doctor.doctor(config(tmp_path, model={"name": str(folder)}, task={"prompt": "raw"}))
    assert of(raw, "chat template").status == "ok" and doctor.verdict(raw)[1] == 0


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As that of Qwen3 does: before what an assistant said last stands a block of thoughts, here an empty one."""


def test_a_chat_template_that_writes_before_an_opened_answer(tmp_path: Path, folder: Path) -> None:
    rows = {"name": "countdown", "train_data": "data/tasks/countdown/countdown.json", "test_data": None}

    def found(prompt: str = "chat_opened") -> Finding:
        case = Case(config(tmp_path, task=rows | {"prompt": prompt}, model={"name": str(folder)}))
        for check in (plan.check_task, plan.check_tokenizer):
            check(case)
        return plan.check_chat_template(case)

    assert found().status == "ok"
    edit(folder / "tokenizer_config.json", chat_template=THINKS)
    assert found().status == "warning" and repr("<think>\n\n</think>\n\n") in found().detail
    assert found("chat").status == "ok"


def test_a_chat_template_that_refuses_the_messages(tmp_path: Path, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="{{ raise_exception('no users here') }}")
    finding = of(doctor.findings(config(tmp_path, model={"name": str(folder)})), "chat template")
    assert finding.status == "failed" and "no users here" in finding.detail


def test_no_stop_token_is_a_warning(tmp_path: Path, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    found = doctor.doctor(config(tmp_path, model={"name": str(folder)}))
    assert of(found, "tokenizer").status == "warning" and "max_tokens" in of(found, "tokenizer").fix
    assert doctor.verdict(found)[1] == 0


def test_prompts_beyond_the_models_positions(tmp_path: Path) -> None:
    finding = of(doctor.findings(config(tmp_path, evaluation={"max_tokens": 2040})), "prompt length")
    assert finding.status == "failed"
    assert "exceed the model's 2048 positions" in finding.detail


def test_prompts_beyond_what_vllm_is_told_to_read(tmp_path: Path) -> None:
    case = Case(config(tmp_path, engine={"name": "vllm", "max_model_len": 30}))
    for check in (plan.check_task, plan.check_tokenizer):
        check(case)
    finding = plan.check_lengths(case)
    assert finding.status == "failed" and "exceed engine.max_model_len 30" in finding.detail


def test_a_model_without_a_tokenizer(tmp_path: Path, folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    found = doctor.doctor(config(tmp_path, model={"name": str(folder)}))
    assert of(found, "tokenizer").status == "failed"
    assert of(found, "engine").status == "skipped" and "tokenizer" in of(found, "engine").detail
    assert of(found, "targets").status == of(found, "disk").status == "ok"


def test_damaged_weights(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    found = doctor.doctor(config(tmp_path, model={"name": str(folder)}))
    assert of(found, "engine").status == "failed" and "does not load" in of(found, "engine").detail
    assert of(found, "canary").status == "skipped"


def test_lost_data(tmp_path: Path) -> None:
    found = doctor.doctor(config(tmp_path, task={"train_data": "nowhere.json"}))
    assert of(found, "task").status == "failed" and "no data file nowhere.json" in of(found, "task").detail
    assert of(found, "gold answers").status == of(found, "generation").status == "skipped"
    assert of(found, "canary").status == "ok"


def test_an_error_that_nobody_foresaw_hides_no_other_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, seed: int) -> Any:
        raise ValueError("a bug of the user's own\nand more")

    monkeypatch.setattr(Conciseness, "load_data", broken)
    found = doctor.doctor(config(tmp_path))
    assert of(found, "task") == Finding("task", "failed", "ValueError: a bug of the user's own")
    assert of(found, "canary").status == "ok"


def test_gold_answers_that_fall_short_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conciseness, "gold", lambda self, example: "x" * 500)
    finding = of(doctor.findings(config(tmp_path)), "gold answers")
    assert finding.status == "warning" and "earns -4" in finding.detail


def test_missing_gold_answers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conciseness, "gold", lambda self, example: None)
    finding = of(doctor.findings(config(tmp_path)), "gold answers")
    assert finding.status == "ok" and finding.detail == "10 of 10 examples have no gold answer"


@pytest.mark.first("KeyError")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('answer')", "KeyError"),
        ("return [float('nan')] * len(completions)", "nan"),
        ("return [1.0]", "1 values for 4 completions"),
    ],
)
def test_a_reward_that_fails(tmp_path: Path, body: str, message: str) -> None:
    found = doctor.doctor(config(tmp_path, task=task_of(tmp_path, body), grader={"isolated": False}))
    assert of(found, "generation").status == "failed" and message in of(found, "generation").detail
    assert of(found, "canary").status == "ok"


def test_a_good_reward_of_ones_own(tmp_path: Path) -> None:
    found = doctor.doctor(config(tmp_path, task=task_of(tmp_path, "return [float(len(c)) for c in completions]")))
    assert set(statuses(found).values()) == {"ok"}, found


def test_a_column_that_the_test_split_lacks(tmp_path: Path) -> None:
    task = task_of(tmp_path, "return [float(len(a)) for a in columns['answer']]")
    for name, rows in {
        "rows": {"prompt": "Solve: 1 + 1 =", "answer": "2"},
        "test": {"prompt": "Solve: 2 + 1 ="},
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(3 * (json.dumps(rows) + "\n"))
    task |= {"test_data": str(tmp_path / "test.jsonl")}
    found = doctor.doctor(config(tmp_path, task=task, grader={"isolated": False}))
    assert of(found, "generation").status == "failed", found
    assert of(found, "generation").detail.startswith("the test split: ") and "answer" in of(found, "generation").detail


@pytest.mark.first("True")
@pytest.mark.parametrize("isolated", [True, False])
def test_a_reward_file_that_ends_the_process(tmp_path: Path, isolated: bool) -> None:
    task = task_of(tmp_path, "return [0.0] * len(completions)")
    with (tmp_path / "mine.py").open("a") as file:
        file.write("import sys\nsys.exit()\n")
    found = doctor.doctor(config(tmp_path, task=task, grader={"isolated": isolated}))
    assert of(found, "task").status == "failed", found
    assert of(found, "canary").status == "ok" and doctor.verdict(found)[1] == 1


@pytest.fixture
def no_wandb_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({}, "failed", "no key"),
        ({"WANDB_API_KEY": "a" * 40}, "ok", "has a key"),
        ({"WANDB_MODE": "offline"}, "ok", "wandb sync"),
        ({"WANDB_MODE": "disabled"}, "warning", "records nothing"),
    ],
)
def test_whether_wandb_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wandb_account: Path, settings: dict[str, str], status: str,
    words: str,
) -> None:  # fmt: skip
    pytest.importorskip("wandb")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    finding = plan.check_trackers(Case(config(tmp_path, tracking={"backends": ["wandb"]})))
    assert finding.status == status and words in finding.detail, finding
    assert status == "ok" or "WANDB_MODE" in finding.fix
    assert not [p for p in no_wandb_account.iterdir() if p.name != ".cache"], "nothing is left but wandb's own cache"


def test_a_key_that_wandb_login_left(tmp_path: Path, no_wandb_account: Path) -> None:
    pytest.importorskip("wandb")
    (no_wandb_account / ".netrc").write_text(f"machine api.wandb.ai\n login user\n password {'b' * 40}\n")
    finding = plan.check_trackers(Case(config(tmp_path, tracking={"backends": ["wandb"]})))
    assert finding.status == "ok" and "has a key" in finding.detail, finding


def test_trackers_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    finding = plan.check_trackers(Case(config(tmp_path, tracking={"backends": ["wandb"]})))
    assert finding.status == "failed" and finding.fix.startswith(f"{install('wandb')}, or ")


def test_too_little_memory_stops_it_from_loading_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "free_memory", lambda config: 1000)
    found = doctor.doctor(config(tmp_path, "full"))
    assert of(found, "memory").status == "failed" and "space lora" in of(found, "memory").fix
    assert of(found, "engine").status == "skipped" and "memory" in of(found, "engine").detail


def test_too_little_memory_for_the_cache_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "free_memory", lambda config: 2**30)
    finding = of(doctor.findings(config(tmp_path)), "memory")
    assert finding.status == "warning" and finding.fix == "set engine.memory_gib to at most 0.8"


@pytest.mark.parametrize(
    ("engine", "space", "advice"),
    [
        ("transformers", "lora", "lower engine.memory_gib or engine.max_rows; or "),
        ("vllm", "lora", "lower engine.gpu_memory_utilization, engine.kv_cache_gib or engine.max_num_seqs; or "),
        ("vllm", "full", "engine.max_num_seqs, or set engine.master host; or "),
    ],
)
def test_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, space: str, advice: str) -> None:
    def full(config: Any, tokens: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nand more")

    monkeypatch.setattr(engines, "create", full)
    finding = of(doctor.findings(config(tmp_path, space, engine={"name": engine})), "engine")
    assert finding.status == "failed" and "Tried to allocate" in finding.detail and advice in finding.fix


def test_memory_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is what can be smaller; where weights, mean and members do not fit, what holds them."""
    wanted = config(tmp_path, "full", engine={"name": "vllm"})
    found: list[Finding] = []
    for free in (2**30, 1000):
        monkeypatch.setattr(plan, "free_memory", lambda config, free=free: free)
        case = Case(wanted)
        plan.check_targets(case)
        found.append(plan.check_memory(case))
    assert found[0].status == "warning" and found[0].fix == "set engine.kv_cache_gib to at most 0.8"
    assert found[1].status == "failed" and "engine.master host" in found[1].fix
    assert "1.00 GiB for the cache" in found[1].detail


def test_memory_of_all_gpus_that_a_model_is_split_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**30, 80 * 2**30))
    split = {"name": "vllm", "tensor_parallel_size": 2}
    assert plan.free_memory(config(tmp_path, engine=split)) == 14 * 2**30
    assert plan.free_memory(config(tmp_path)) == 7 * 2**30


def test_free_memory_of_this_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = plan._free_on_host()
    assert free is not None and 0 < free <= total


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    finding = of(doctor.findings(config(tmp_path, engine={"device": "cuda"})), "engine")
    assert finding.status == "failed" and "engine.device: cuda does not exist" in finding.detail


def test_a_cuda_build_without_a_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    finding = doctor.check_accelerators()
    assert finding.status == "warning" and "built for CUDA 13.0 and sees no GPU" in finding.detail
    assert "driver" in finding.fix


def test_the_probe_meets_a_full_disk() -> None:
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb", buffering=0) as file:
        plan.write_probe(file)


def test_a_quota_is_met_by_the_probe(tmp_path: Path) -> None:
    """A limit that no file system statistic shows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (plan.PROBE_BYTES // 2, hard))
    try:
        finding = plan.check_output(Case(config(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert finding.status == "failed" and "1.0 MiB cannot be written" in finding.detail
    assert "raise the quota" in finding.fix
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    found = doctor.doctor(config(tmp_path, "full", output_dir=str(small_disk / "run")))
    assert of(found, "output").status == "failed" and "No space left" in of(found, "output").detail
    assert of(found, "disk").status == "failed" and "free in" in of(found, "disk").detail
    assert of(found, "canary").status == of(found, "generation").status == "ok"
    assert list(small_disk.iterdir()) == []


def test_a_disk_too_small_for_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 << 20))
    made = config(tmp_path, "full", checkpoint={"every": 1, "keep_last": 2})
    validated = made.model_copy(update={"task": made.task.model_copy(update=VALIDATION)})
    for tree, count in ((made, 3), (validated, 4)):  # without validation no best one is kept
        case = Case(tree)
        for check in (plan.check_task, plan.check_targets):
            check(case)
        finding = plan.check_disk(case)
        assert finding.status == "failed" and f"for {count} checkpoints" in finding.detail
    assert "checkpoint.keep_last" in finding.fix


def test_an_output_directory_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = of(doctor.findings(config(tmp_path, output_dir=str(tmp_path / "file/run"))), "output")
    assert finding.status == "failed" and "is a file" in finding.detail


@pytest.mark.slow
def test_several_faults_are_all_told_with_exit_code_1(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    file = tmp_path / "c.yaml"
    tree = {
        "output_dir": "/dev/full/run", "task": DATA, "model": {"name": str(folder)},
        "lora": {"target_modules": ["qkv"]}, "es": {"sigma": 0.05, "learning_rate": 0.025},
    }  # fmt: skip
    file.write_text(json.dumps(tree))
    monkeypatch.chdir(tmp_path)
    done = caller(monkeypatch, capsys)("doctor", file)
    assert done.code == 1 and not done.err, done.err
    assert done.out.splitlines()[-1] == "verdict: not ready; 3 failed: output, chat template, targets"
