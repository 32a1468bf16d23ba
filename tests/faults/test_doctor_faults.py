# SPDX-License-Identifier: Apache-2.0
"""What the doctor has to catch: each fault is a finding that says how to fix it, and hides no other check."""

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import caller
from doctor_runs import DATA, config, of, statuses
from families import ByLibrary
from kill_points import VALIDATION

import evoalign
from evoalign import engines
from evoalign.config import Config
from evoalign.cost import budget, estimate
from evoalign.errors import ModelError
from evoalign.models import tiny
from evoalign.preflight import doctor, plan
from evoalign.preflight.plan import Case, Finding
from evoalign.tasks.conciseness import Conciseness
from evoalign.version import install

pytestmark = pytest.mark.usefixtures("short_pieces")
Setup = Callable[[Path, Path, pytest.MonkeyPatch], dict[str, Any]]
"""Prepares a fault, in a folder, in a copy of the model or by a patch; returns sections of a config."""


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(tiny(), tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def sets(**tree: Any) -> Setup:
    return lambda tmp_path, folder, patch: tree


def model(change: Callable[[Path], object], **tree: Any) -> Setup:
    return lambda tmp_path, folder, patch: (change(folder), {"model": {"name": str(folder)}, **tree})[1]


def tokenizer(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "tokenizer_config.json", **changes)


def patched(owner: Any, name: str, value: Any, **tree: Any) -> Setup:
    return lambda tmp_path, folder, patch: (patch.setattr(owner, name, value), tree)[1]


def reward(body: str, more: str = "", isolated: bool = False, test: Mapping[str, str] | None = None) -> Setup:
    """Set a custom task whose reward function has this body, with rows of another form in the test split."""

    def setup(tmp_path: Path, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        (tmp_path / "mine.py").write_text(f"def reward(prompts, completions, **columns):\n    {body}\n{more}")
        rows = [{"prompt": f"Solve: {i} + 1 ="} | ({} if test is None else {"answer": "2"}) for i in range(10)]
        for name, found in (("rows", rows), ("test", [test] * 3)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        task = {"name": "custom", "rewards": [f"{tmp_path / 'mine.py'}:reward"],
                "train_data": str(tmp_path / "rows.jsonl"),
                "test_data": None if test is None else str(tmp_path / "test.jsonl")}  # fmt: skip
        return {"task": task, "grader": {"isolated": isolated}}

    return setup


class Ignores(ByLibrary):
    def _put_adapters(self, *_: Any) -> None:
        return


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def without_stop(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)


def raising(error: BaseException) -> Callable[..., Any]:
    def broken(*_: Any) -> Any:
        raise error

    return broken


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nand more")
LATER = ("memory", "disk", "engine", "canary", "generation")
LACKS = "failed: .*no module 'query'; the model has down_proj, gate_proj, k_proj"
VLLM = r"lower engine\.gpu_memory_utilization, engine\.kv_cache_gib or engine\.max_num_seqs; or "
FAULTS: dict[str, tuple[Setup, dict[str, str], int | None]] = {
    "an ignored adapter": (patched(engines, "create", Ignores),
                           {"canary": "failed: canary: member 0 ", "engine": "ok", "generation": "ok"}, 1),
    "modules that the model lacks": (sets(lora={"target_modules": ["query"]}), {
        "targets": LACKS, **dict.fromkeys(LATER, "skipped"), "prompt length": "ok"}, 1),
    "layers that the model lacks": (sets(lora={"target_layers": [99]}), {
        "targets": "failed: .*no layer 99; the model has layers 0 to 3", **dict.fromkeys(LATER, "skipped"),
        "prompt length": "ok"}, 1),
    "no chat template": (model(tokenizer(chat_template=None)), {
        "chat template": r"failed: .*no chat template.*task\.prompt: raw", "prompt length": "skipped", "canary": "ok"},
        None),
    "no chat template, raw": (model(tokenizer(chat_template=None), task={"prompt": "raw"}), {"chat template": "ok"}, 0),
    "a chat template that refuses": (model(tokenizer(chat_template="{{ raise_exception('no users here') }}")),
                                     {"chat template": r"failed: .*no users here.* \| "}, None),
    "no stop token": (model(without_stop), {"tokenizer": r"warning: .* \| .*max_tokens"}, 0),
    "no tokenizer": (model(without_tokenizer), {
        "tokenizer": "failed", "engine": r"skipped: .*tokenizer.* \| ", "targets": "ok", "disk": "ok"}, None),
    "long prompts": (sets(evaluation={"max_tokens": 2040}),
                     {"prompt length": r"failed: .*exceed the model's 2048 positions.* \| "}, None),
    "damaged weights": (model(lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100)),
                        {"engine": r"failed: .*does not load.* \| ", "canary": "skipped"}, None),
    "lost data": (sets(task={"train_data": "nowhere.json"}), {
        "task": r"failed: .*no data file nowhere\.json.* \| ", "gold answers": "skipped", "generation": "skipped",
        "canary": "ok"}, None),
    "an unforeseen error": (patched(Conciseness, "load_data", raising(ValueError("a bug of the user's own\nand more"))),
                            {"task": r"failed: ValueError: a bug of the user's own \| $", "canary": "ok"}, None),
    "gold answers that fall short": (patched(Conciseness, "gold", lambda self, example: "x" * 500),
                                     {"gold answers": r"warning: .*earns -4.* \| "}, None),
    "no gold answers": (patched(Conciseness, "gold", lambda self, example: None),
                        {"gold answers": r"ok: 10 of 10 examples have no gold answer \| "}, None),
    "KeyError": (reward("raise KeyError('answer')"), {"generation": r"failed: .*KeyError.* \| ", "canary": "ok"}, None),
    "nan": (reward("return [float('nan')] * len(completions)"),
            {"generation": r"failed: .*nan.* \| ", "canary": "ok"}, None),
    "too few": (reward("return [1.0]"), {"generation": r"failed: .*1 values for 4 .* \| ", "canary": "ok"}, None),
    "a column that the test split lacks": (
        reward("return [float(len(a)) for a in columns['answer']]", test={"prompt": "Solve: 2 + 1 ="}),
        {"generation": r"failed: the test split: .*answer.* \| "}, None),
    "a reward file that exits, isolated": (reward("return [0.0]", "import sys\nsys.exit()\n", isolated=True),
                                           {"task": "failed", "canary": "ok"}, 1),
    "a reward file that exits, not isolated": (reward("return [0.0]", "import sys\nsys.exit()\n"),
                                               {"task": "failed", "canary": "ok"}, 1),
    "too little memory": (patched(plan, "free_memory", lambda config: 1000, space="full"), {
        "memory": r"failed: .* \| .*space lora", "engine": r"skipped: .*memory.* \| "}, None),
    "too little memory for the cache": (patched(plan, "free_memory", lambda config: 2**30), {
        "memory": r"warning: .* \| set engine\.memory_gib to at most 0\.8$"}, None),
    **{f"out of memory, {engine} {space}": (
        patched(engines, "create", raising(OUT_OF_MEMORY), space=space, engine={"name": engine}),
        {"engine": rf"failed: .*Tried to allocate.* \| .*{advice}"}, None) for engine, space, advice in (
            ("transformers", "lora", r"lower engine\.memory_gib or engine\.max_rows; or "), ("vllm", "lora", VLLM),
            ("vllm", "full", r"engine\.max_num_seqs, or set engine\.master host; or "))},
    "no GPU": (sets(engine={"device": "cuda"}),
               {"engine": r"failed: .*engine\.device: cuda does not exist.* \| "}, None),
}  # fmt: skip
"""By name: the fault, a pattern for `status: detail | fix` of each of these checks, and the exit code if looked at."""


@pytest.mark.first("adapter", "lacks", "template", "stop", "no tokenizer", "long", "damaged", "lost", "error", "gold",
                   "KeyError", "exits, isolated", "memory", "GPU", others="slow")  # fmt: skip
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_finding_and_hides_no_other_check(name, tmp_path, folder, monkeypatch):
    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    setup, expected, code = FAULTS[name]
    found: dict[str, Finding] = {}
    for finding in doctor.findings(config(tmp_path, **setup(tmp_path, folder, monkeypatch))):
        found[finding.name] = finding
        if code is None and found.keys() >= expected.keys():
            break
    for check, pattern in expected.items():
        finding = found[check]
        assert re.match(pattern, f"{finding.status}: {finding.detail} | {finding.fix}"), finding
    if code is not None:
        assert doctor.verdict(list(found.values()))[1] == code
    if name == "an ignored adapter":
        assert doctor.verdict(list(found.values()))[0] == "verdict: not ready; 1 failed: canary"


def test_an_ignored_adapter_of_the_shipped_model(monkeypatch):
    monkeypatch.setattr(engines, "create", Ignores)
    assert of(doctor.findings(None), "canary").status == "failed"


def test_a_good_custom_reward(tmp_path, folder, monkeypatch):
    tree = reward("return [float(len(c)) for c in completions]", isolated=True)(tmp_path, folder, monkeypatch)
    found = doctor.doctor(config(tmp_path, **tree))
    assert set(statuses(found).values()) == {"ok"}, found


def last_of(made: Config, *checks: Callable[[Case], Any]) -> Finding:
    """Return the finding of the last check, after the others."""
    case = Case(made)
    return [check(case) for check in checks][-1]


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As that of Qwen3 does: before what an assistant said last stands a block of thoughts, here an empty one."""


def test_a_chat_template_that_writes_before_an_opened_answer(tmp_path, folder):
    rows = {"name": "countdown", "train_data": "data/tasks/countdown/countdown.json", "test_data": None}

    def found(prompt: str = "chat_opened") -> Finding:
        made = config(tmp_path, task=rows | {"prompt": prompt}, model={"name": str(folder)})
        return last_of(made, plan.check_task, plan.check_tokenizer, plan.check_chat_template)

    assert found().status == "ok"
    edit(folder / "tokenizer_config.json", chat_template=THINKS)
    assert found().status == "warning" and repr("<think>\n\n</think>\n\n") in found().detail
    assert found("chat").status == "ok"


def test_prompts_beyond_what_vllm_is_told_to_read(tmp_path):
    made = config(tmp_path, engine={"name": "vllm", "max_model_len": 30})
    finding = last_of(made, plan.check_task, plan.check_tokenizer, plan.check_lengths)
    assert finding.status == "failed" and "exceed engine.max_model_len 30" in finding.detail


@pytest.fixture
def no_wandb_account(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.chdir(home)
    return home


WANDB: dict[str, tuple[dict[str, str], str, str]] = {
    "nothing": ({}, "failed", "no key"), "a key": ({"WANDB_API_KEY": "a" * 40}, "ok", "has a key"),
    "offline": ({"WANDB_MODE": "offline"}, "ok", "wandb sync"), "login": ({}, "ok", "has a key"),
    "disabled": ({"WANDB_MODE": "disabled"}, "warning", "records nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", WANDB)
def test_whether_wandb_would_start(name, tmp_path, monkeypatch, no_wandb_account):
    pytest.importorskip("wandb")
    settings, status, words = WANDB[name]
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    if name == "login":
        (no_wandb_account / ".netrc").write_text(f"machine api.wandb.ai\n login user\n password {'b' * 40}\n")
    finding = plan.check_trackers(Case(config(tmp_path, tracking={"backends": ["wandb"]})))
    assert finding.status == status and words in finding.detail, finding
    assert status == "ok" or "WANDB_MODE" in finding.fix
    left = {p.name for p in no_wandb_account.iterdir()} - {".cache", ".netrc"}
    assert not left, "nothing is left but wandb's own cache"


def test_trackers_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    finding = plan.check_trackers(Case(config(tmp_path, tracking={"backends": ["wandb"]})))
    assert finding.status == "failed" and finding.fix.startswith(f"{install('wandb')}, or ")


def test_memory_of_vllm(tmp_path, monkeypatch):
    """The cache is what can be smaller; where weights, mean and members do not fit, what holds them."""
    found: list[Finding] = []
    for free in (2**30, 1000):
        monkeypatch.setattr(plan, "free_memory", lambda config, free=free: free)
        wanted = config(tmp_path, "full", engine={"name": "vllm"})
        found.append(last_of(wanted, plan.check_targets, plan.check_memory))
    assert found[0].status == "warning" and found[0].fix == "set engine.kv_cache_gib to at most 0.8"
    assert found[1].status == "failed" and "engine.master host" in found[1].fix
    assert "1.00 GiB for the cache" in found[1].detail


def test_memory_of_all_gpus_that_a_model_is_split_over(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**30, 80 * 2**30))
    split = {"name": "vllm", "tensor_parallel_size": 2}
    assert plan.free_memory(config(tmp_path, engine=split)) == 14 * 2**30
    assert plan.free_memory(config(tmp_path)) == 7 * 2**30


@pytest.mark.parametrize(("body", "messages", "fix"), [
    ("return [float(len(c)) for c in completions]", True, r"completion\[0\]\['content'\].*probe"),
    ("return [1.0 for c in completions]", False, "^run `evoalign probe`[^:]*$"),
    ("return [float(len(c[0]['content'])) for c in completions]", True, "^(?!.*probe)"),
])  # fmt: skip
def test_a_reward_that_takes_a_list_of_one_message_for_the_text(body, messages, fix, tmp_path, folder, monkeypatch):
    tree = reward(body)(tmp_path, folder, monkeypatch)
    prompts = [f"Solve: {i} + 1 =" for i in range(9)]
    rows = [{"prompt": [{"role": "user", "content": p}] if messages else p} for p in prompts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of(doctor.findings(config(tmp_path, sampling={"max_tokens": 16, "temperature": 1.0}, **tree)), "generation")
    assert ("all scored the same" in found.detail) == ("probe" in found.fix) and re.search(fix, found.fix)


@pytest.mark.parametrize(("space", "dtype", "helps", "not_here"), [
    ("full", "auto", {"space lora", "model.dtype bfloat16"}, set()),
    ("full", "bfloat16", {"space lora"}, {"bfloat16"}),
    ("lora", "auto", {"model.dtype bfloat16"}, {"space lora"}),
    ("lora", "bfloat16", {"a smaller model"}, {"space lora", "bfloat16"}),
    ("lowrank", "auto", {"a smaller model"}, {"space lora", "bfloat16"}),
])  # fmt: skip
def test_train_and_dry_run_refuse_what_doctor_refuses_for_memory(space, dtype, helps, not_here, tmp_path, monkeypatch):
    made = config(tmp_path, space)
    made = made.model_copy(update={"model": made.model.model_copy(update={"dtype": dtype})})
    finding = last_of(made, plan.check_targets, plan.check_memory)
    assert finding.status != "failed" and not any("memory: " in line for line in evoalign.dry_run(made))
    monkeypatch.setattr(budget, "free_on_host", lambda: 1000)
    monkeypatch.setattr(estimate, "free_on_host", lambda: 1000)
    monkeypatch.setattr(engines, "create", raising(AssertionError("the weights were loaded")))
    finding = last_of(made, plan.check_targets, plan.check_memory)
    line = f"memory: {finding.detail}; {finding.fix}"
    with pytest.raises(ModelError, match=f"^{re.escape(line)}$"):
        evoalign.train(made)
    assert f"warning: this machine is too small: {line}" in evoalign.dry_run(made)
    assert finding.status == "failed" and all(word in finding.fix for word in helps)
    assert not any(word in finding.fix for word in not_here)


def test_free_memory_of_this_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = budget.free_on_host()
    assert free is not None and 0 < free <= total


def test_a_cuda_build_without_a_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    finding = doctor.check_accelerators()
    assert finding.status == "warning" and "built for CUDA 13.0 and sees no GPU" in finding.detail
    assert "driver" in finding.fix


def test_the_probe_meets_a_full_disk():
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb", buffering=0) as file:
        plan.write_probe(file)


def test_a_quota_is_met_by_the_probe(tmp_path):
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
def small_disk(tmp_path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(small_disk, tmp_path):
    found = doctor.doctor(config(tmp_path, "full", output_dir=str(small_disk / "run")))
    assert of(found, "output").status == "failed" and "No space left" in of(found, "output").detail
    assert of(found, "disk").status == "failed" and "free in" in of(found, "disk").detail
    assert of(found, "canary").status == of(found, "generation").status == "ok"
    assert list(small_disk.iterdir()) == []


def test_a_disk_too_small_for_the_checkpoints(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 << 20))
    made = config(tmp_path, "full", checkpoint={"every": 1, "keep_last": 2})
    validated = made.model_copy(update={"task": made.task.model_copy(update=VALIDATION)})
    for tree, count in ((made, 3), (validated, 4)):  # without validation no best one is kept
        finding = last_of(tree, plan.check_task, plan.check_targets, plan.check_disk)
        assert finding.status == "failed" and f"for {count} checkpoints" in finding.detail
        assert "checkpoint.keep_last" in finding.fix


def test_an_output_directory_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    finding = of(doctor.findings(config(tmp_path, output_dir=str(tmp_path / "file/run"))), "output")
    assert finding.status == "failed" and "is a file" in finding.detail


@pytest.mark.slow
def test_several_faults_are_all_told_with_exit_code_1(tmp_path, folder, monkeypatch, capsys):
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
