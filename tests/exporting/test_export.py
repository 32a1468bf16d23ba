# SPDX-License-Identifier: Apache-2.0
"""Exported means, loaded by plain transformers and PEFT, say token for token what the run's own engine says."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml
from families import Bench
from peft import PeftModel
from rich.console import Console
from safetensors import safe_open
from small_runs import UNCHECKED
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

import evoalign
from evoalign import cli
from evoalign.config import from_dict, load, to_yaml
from evoalign.errors import CheckpointError, ConfigError, JournalError, ModelError, RunExistsError
from evoalign.exporting import card
from evoalign.exporting.export import dtype_in, export
from evoalign.models import tiny
from evoalign.report.tables import visible
from evoalign.rundir import checkpoint, journal, parquet
from evoalign.rundir.directory import saved_folders
from evoalign.tasks.countdown import SYSTEM
from evoalign.types import MEAN_PLAN, Request, Sampling

SPACES = ["lora", "lowrank", "full"]
WIDTHS = {"lora": 0.05, "lowrank": 0.02, "full": 0.01}
PROMPTS = 100
TOKENS = 24
QUESTIONS = [f"What is {i % 10} {'+-*'[i % 3]} {i // 10}?" for i in range(PROMPTS)]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a folder of its own, with decoding settings that change even greedy texts, as Qwen's do."""
    folder = tmp_path_factory.mktemp("secret") / "base"
    shutil.copytree(tiny(), folder)
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3,
                "eos_token_id": [2, 0], "pad_token_id": 0}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def train(output: Path, model: str, space: str, /, **sections: Mapping[str, Any]) -> Path:
    es = {"sigma": WIDTHS[space], "learning_rate": WIDTHS[space], "num_generations": 2, "population_size": 6}
    tree: dict[str, Any] = {"output_dir": str(output), "seed": 1, "space": space, "es": es,
                            "model": {"name": model}, "evaluation": {"max_tokens": 12}, "checks": UNCHECKED,
                            "checkpoint": {"every": 1, "keep_last": 1}}  # fmt: skip
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return evoalign.train(tree, console=Console(file=io.StringIO())).path


class Runs(dict[str, Path]):
    """Runs by space, each trained when a test first takes it."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        self._make = make

    def __missing__(self, space: str) -> Path:
        return self.setdefault(space, self._make(space))


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Runs(lambda space: train(tmp_path_factory.mktemp(space) / "run", str(base), space))


@pytest.fixture(scope="module")
def lora(runs: dict[str, Path]) -> Path:
    return runs["lora"]


def of_engine(run: Path) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Token ids of the prompts, and what the run's engine makes of them greedily with its last mean."""
    with Bench(load([run / "config.yaml"])) as bench:
        state, _ = checkpoint.load(saved_folders(run)[-1], bench.layout)
        bench.engine.load(state)
        prompts = [bench.tokens.encode([{"role": "user", "content": q}]) for q in QUESTIONS]
        requests = [Request(i, ids, Sampling(TOKENS)) for i, ids in enumerate(prompts)]
        found = {r.request: list(r.token_ids) for r in bench.engine.rollout(MEAN_PLAN, requests)}
        return prompts, [found[i] for i in range(PROMPTS)]


def plain(folder: Path, base: Path | None = None) -> Any:
    """A model as its card says; `base` is that of an adapter."""
    model = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder) if base else model


def of_plain(model: Any, folder: Path, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Greedy tokens of plain `generate`, the stop token included, padding on the right left out."""
    settings = GenerationConfig.from_pretrained(folder, max_new_tokens=TOKENS)
    stop = settings.eos_token_id
    assert isinstance(stop, list)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    rows: list[list[int]] = output[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


# --- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["adapter", "merged", "lowrank", "full"])
def test_greedy_tokens_equal_those_of_the_run(form: str, runs: dict[str, Path], base: Path, tmp_path: Path) -> None:
    run = runs["lora" if form in ("adapter", "merged") else form]
    merge = {"merge": True, "dtype": "float32"} if form == "merged" else {}
    folder = export(run, tmp_path / "out", **merge)
    prompts, wanted = of_engine(run)
    model = plain(folder, base if form == "adapter" else None)
    assert of_plain(model, folder, prompts) == wanted
    untrained = of_plain(plain(base), folder, prompts)
    assert sum(a != b for a, b in zip(untrained, wanted, strict=True)) > PROMPTS // 4, "the run changed too little"
    assert {len(row) for row in wanted} != {TOKENS}, "no text ends by a stop token"


def test_a_sampled_run_exports_its_own_decoding(base: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", str(base), "lora", evaluation={"temperature": 0.6, "top_p": 0.9, "seeds": [3, 4]})
    settings = GenerationConfig.from_pretrained(export(run, tmp_path / "out"))
    assert (settings.do_sample, settings.temperature, settings.top_p, settings.top_k) == (True, 0.6, 0.9, 0)
    assert settings.repetition_penalty == 1.0


@pytest.mark.slow
def test_a_merge_rounds_once_to_the_served_dtype(base: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", str(base), "lora", model={"dtype": "bfloat16"}, lora={"rank": 4, "alpha": 2})
    folder = export(run, tmp_path / "out", merge=True)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    state = checkpoint.load_adapter(saved_folders(run)[-1])
    merged, start = (dict(AutoModelForCausalLM.from_pretrained(f, dtype="auto").named_parameters())
                     for f in (folder, base))  # fmt: skip
    changed = total = odd = 0
    for name, weight in merged.items():
        wanted = start[name].double()
        if f"{(module := name.removesuffix('.weight'))}.lora_A.weight" in state:
            b, a = (state[f"{module}.lora_{factor}.weight"].double() for factor in "BA")
            wanted = wanted + 2 / 4 * (b @ a)
            changed += int((weight != start[name]).sum())
        assert weight.dtype == torch.bfloat16
        total, odd = total + weight.numel(), odd + int((weight != wanted.bfloat16()).sum())
    assert changed > 100_000
    # The nearest bfloat16 of the sum in float64, but for ties that float32 sees otherwise.
    assert odd < 1e-4 * total


def dtypes(folder: Path) -> set[torch.dtype]:
    return {p.dtype for p in AutoModelForCausalLM.from_pretrained(folder, dtype="auto").parameters()}


def test_a_merge_keeps_the_dtype_of_its_base_and_another_is_asked_for(lora: Path, tmp_path: Path) -> None:
    """The tiny model is in bfloat16, and the run served it in float32."""
    whole = export(lora, tmp_path / "float32", merge=True, dtype="float32")
    parts = dict(plain(whole).named_parameters())
    for dtype in (None, "bfloat16", "float16"):
        folder = export(lora, tmp_path / str(dtype), merge=True, dtype=dtype)
        said = dtype or "bfloat16"
        assert dtypes(folder) == {getattr(torch, said)} and dtype_in(folder) == said
        assert json.loads((folder / "config.json").read_text())["dtype"] == said
        text = (folder / "README.md").read_text()
        assert f"rounded once to {said}" in text and f"from_pretrained(here, dtype='{said}')" in text
        assert f"weights served in float32; saved here in {said}" in text
        rounded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())
        assert all(torch.equal(rounded[n], p.to(rounded[n].dtype)) for n, p in parts.items())
    assert dtypes(whole) == {torch.float32} and "saved here" not in (whole / "README.md").read_text()


def test_a_checkpoint_in_another_dtype_is_rounded_from_its_float32_mean(base: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", str(base), "lowrank", model={"dtype": "bfloat16"})
    mean = checkpoint.mean_of(saved_folders(run)[-1])
    folder = export(run, tmp_path / "out", dtype="float32")
    found = dict(plain(folder).named_parameters())
    assert mean and all(torch.equal(found[name], tensor) for name, tensor in mean.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in mean.values())
    assert dtypes(export(run, tmp_path / "same")) == {torch.bfloat16}


# --- forms and files ------------------------------------------------------------------------------------------------


def test_the_files_of_an_export(runs: dict[str, Path], tmp_path: Path) -> None:
    both = {"README.md", "evolution.png", "generation_config.json", "run/config.yaml", "run/journal.jsonl"}
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for space in SPACES:
        folder = export(runs[space], tmp_path / space)
        names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"chat_template.jinja"}
        own = {"adapter_config.json", "adapter_model.safetensors"} if space == "lora" else model
        assert names == both | own
        journal_ = (runs[space] / "journal.jsonl").read_bytes()
        assert (folder / "run/journal.jsonl").read_bytes() == journal_
        assert load([folder / "run/config.yaml"]).output_dir == "run"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(SPACES)


@pytest.mark.parametrize("form", ["merged", "lowrank"])
def test_shards_have_an_index_and_load(form: str, runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["lora" if form == "merged" else form]
    merge = {"merge": True, "dtype": "float32"} if form == "merged" else {}
    whole = plain(export(run, tmp_path / "whole", **merge)).state_dict()
    folder = export(run, tmp_path / "shards", **merge, shard_size="500KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3 and all(shard.stat().st_size < 520_000 for shard in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {shard.name for shard in shards}
    again = plain(folder).state_dict()
    assert again.keys() == whole.keys() and all(torch.equal(again[k], whole[k]) for k in whole)


def test_an_earlier_generation_is_rebuilt_from_the_journal(runs: dict[str, Path], tmp_path: Path) -> None:
    for space in SPACES:
        assert [f.name for f in saved_folders(runs[space])] == ["generation_0002"]
    first = export(runs["lora"], tmp_path / "first", generation=1)
    log = journal.read(runs["lora"] / "journal.jsonl")
    text = (first / "README.md").read_text()
    assert f"after generation 1: `{log.generations[0].weights_hash}`" in text
    assert "not the end of its run" in text and "## Before and after\n\nThis mean was not compared" in text
    last = export(runs["lora"], tmp_path / "last")
    assert tensors(first) != tensors(last)
    # One generation of the same settings is the same mean; it is trained, not rebuilt.
    other = train(tmp_path / "run", load([runs["lora"] / "config.yaml"]).model.name, "lora", es={"num_generations": 1})
    assert tensors(export(other, tmp_path / "other")) == tensors(first)
    with pytest.raises(JournalError, match="generation 3"):
        export(runs["lora"], tmp_path / "third", generation=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "last", "other", "run"]


def test_the_card_compares_the_mean_that_it_is_of(lora: Path, tmp_path: Path) -> None:
    """An evaluation of another mean, or one that does not say of which, gives no table."""
    run = Path(shutil.copytree(lora, tmp_path / "run"))
    file = run / "results/evaluation.json"
    (run / "SHA256SUMS").unlink()
    found, seals = json.loads(file.read_text()), journal.read(run / "journal.jsonl").generations
    for kept, table in [(seals[1].weights_hash, True), (seals[0].weights_hash, False), (None, False)]:
        file.write_text(json.dumps({**found, "generation": 2, "weights_hash": kept}))
        text = (export(run, tmp_path / f"out{kept}") / "README.md").read_text()
        assert ("| measure |" in text, "was not compared with its base" in text) == (table, not table)
        assert ("**not verified**" in text) == table


def tensors(folder: Path, name: str = "adapter_model") -> dict[str, bytes]:
    with safe_open(folder / f"{name}.safetensors", framework="np") as file:
        return {key: file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118


# --- paths of this machine ------------------------------------------------------------------------------------------


def test_only_the_adapters_base_keeps_a_path(runs: dict[str, Path], base: Path, tmp_path: Path) -> None:
    for space in SPACES:
        folder = export(runs[space], tmp_path / space)
        leaks = [p.name for p in folder.rglob("*") if p.is_file() and str(base.parent).encode() in p.read_bytes()]
        told = ["config.yaml", "journal.jsonl"]  # replay needs the base
        assert sorted(leaks) == sorted(told + (["adapter_config.json"] if space == "lora" else []))
        assert str(runs[space].parent) not in "".join(
            p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file()
        )
    settings = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)


def test_the_revision_of_the_base_is_recorded(lora: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(lora, run)
    (run / "config.yaml").write_text(to_yaml(load([run / "config.yaml"], ["model.revision=abc123"])))
    folder = export(run, tmp_path / "out")
    assert json.loads((folder / "adapter_config.json").read_text())["revision"] == "abc123"
    assert "at revision `abc123`" in (folder / "README.md").read_text()


# --- refusals, which leave nothing ----------------------------------------------------------------------------------


def test_refusals_are_one_line_and_leave_nothing(lora: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    file.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RunExistsError, "taken exists and is not empty", {"to": taken}),
        (RunExistsError, "file exists and is not empty", {"to": file}),
        (ConfigError, "is no run directory", {"run": tmp_path}),
        (ConfigError, "leave out --merge", {"run": runs["full"], "merge": True}),
        (ConfigError, "--shard-size many: expected a size", {"shard_size": "many"}),
        (ConfigError, "--shard-size 0GB", {"shard_size": "0GB"}),
        (ConfigError, "--push a/b/c: Repo id must be", {"push": "a/b/c"}),
        (ConfigError, "--push what ever/x: Repo id must", {"push": "what ever/x"}),
        (ConfigError, "--push name: expected USER/NAME", {"push": "name"}),
        (ConfigError, "--dtype int8: expected one of float32, bfloat16, float16", {"merge": True, "dtype": "int8"}),
        (ConfigError, "--dtype float16 is for whole models", {"dtype": "float16"}),
        (JournalError, "generation -1", {"generation": -1}),
    ]
    for error, message, changes in cases:
        with pytest.raises(error) as caught:
            export(**{"run": lora, "to": out, **changes})
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(lora: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (export(lora, tmp_path / "out") / "README.md").is_file()


def test_damage_is_refused_by_name(lora: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(lora, run)
    weights = saved_folders(run)[-1] / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match="safetensors was altered"):
        export(run, tmp_path / "out")
    # Whole, but of another run.
    shutil.rmtree(saved_folders(run)[-1])
    other = train(tmp_path / "other", "tiny", "lora", es={"sigma": 0.04})
    shutil.copytree(saved_folders(other)[-1], run / "loras/generation_0002")
    with pytest.raises(CheckpointError, match="generation_0002 is not the mean that"):
        export(run, tmp_path / "out")
    shutil.rmtree(run / "loras")
    with pytest.raises(ModelError, match="saved no weights yet; name a generation"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert tensors(export(run, tmp_path / "out", generation=2)) == tensors(export(lora, tmp_path / "whole"))


def test_a_merge_refuses_another_base(lora: Path, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "base"
    shutil.copytree(base, other)
    model = AutoModelForCausalLM.from_pretrained(other, dtype="auto")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    model.generation_config = GenerationConfig()
    model.save_pretrained(other)
    with pytest.raises(ModelError, match="other weights than the base of"):
        export(lora, tmp_path / "out", merge=True, model=str(other))
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    moved = shutil.copytree(base, tmp_path / "moved")
    folder = export(lora, tmp_path / "out", merge=True, model=str(moved), dtype="float32")
    again = export(lora, tmp_path / "again", merge=True, dtype="float32")
    assert tensors(folder, "model") == tensors(again, "model")


@pytest.mark.long  # tests/faults/test_disk.py has it in this process
@pytest.mark.parametrize("limit", [1_000, 200_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(limit: int, runs: dict[str, Path], tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: small files fail first, or the weights alone."""
    resource = pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-m", "evoalign.cli", "export", str(runs["lowrank"]), "--to", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "nothing was exported" in done.stderr and "too large" in done.stderr
    assert not list(tmp_path.iterdir())


# --- the hub --------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as making a repository and one commit needs. `server.files` holds what was committed."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.calls.append(self.path)
        if self.headers.get("Authorization") != "Bearer hf_test":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            server.made = json.loads(body)
            self.answer({"url": f"{server.url}/me/model"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            self.answer({"files": modes})
        elif self.path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            server.files |= {line["value"]["path"]: line["value"] for line in lines if line["key"] == "file"}
            self.answer({"commitUrl": f"{server.url}/me/model/commit/0123", "commitOid": "0123"})
        else:
            self.answer({"error": self.path}, 404)

    def do_GET(self) -> None:
        server: Any = self.server
        server.calls.append(self.path)
        self.answer({"id": "me/model", "sha": "0123", "siblings": [], "xetEnabled": False})

    def answer(self, tree: Mapping[str, Any], status: int = 200) -> None:
        raw = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.calls, server.files, server.made = [], {}, None
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def push(run: Path, to: Path, hub: Any, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's address is read when its library is imported."""
    environ = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test",
               "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(to.parent / "home"), **environ}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "evoalign.cli", "export", str(run), "--to", str(to), "--push", "me/model", *options],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tiny") / "run", "tiny", "lora")


def test_the_card_counts_examples_where_no_code_of_others_makes_them() -> None:
    def found(**sections: Any) -> tuple[tuple[int, int, int] | None, bool, str | None]:
        return card._task_facts(from_dict({"es": {"sigma": 0.01}, "task": {"name": "conciseness"}, **sections}))

    counts, *_ = found()
    assert counts is not None and min(counts[:2]) > 0 and counts[2] == 0
    none = "nowhere:Part"
    parts = {"engine": "nowhere:Engine", "space": "nowhere:Space", "tracking": {"backends": ["nowhere:Lines"]}}
    assert found(**parts)[0] == counts
    assert found(task={"name": "conciseness", "objective": none})[0] is None
    assert found(task={"name": none})[0] is None
    for more, system in (({}, None), ({"system_prompt": "Be brief."}, "Be brief.")):
        assert found(task={"name": "conciseness", **more})[1:] == (True, system)
        assert found(task={"name": "custom", "rewards": "r.py:r", "prompt": "chat", **more})[1:] == (True, system)
    assert found(task={"name": "countdown", "prompt": "chat"})[2] == SYSTEM  # the task's own
    assert found(task={"name": "countdown", "prompt": "short"})[1:] == (False, None)


def test_it_is_said_that_weights_were_rounded_and_what_to_do_next(tiny_run: Path, tmp_path: Path) -> None:
    def said(*options: str) -> str:
        done = CliRunner().invoke(
            cli.app, ["export", str(tiny_run), "--to", str(tmp_path / "-".join(options)), *options]
        )
        assert done.exit_code == 0, done.output
        first, then = done.stdout.splitlines()[-2:]
        assert "README.md has the code that loads it; evoalign eval " in then
        return first

    lost = ", rounded to bfloat16, each by up to about 0.4 %, after the run's results were measured"
    assert said("--merge", "--dtype", "bfloat16").endswith(f"weights in bfloat16{lost}")
    assert said("--merge").endswith(f"--dtype for another){lost}")
    assert said("--merge", "--dtype", "float32").endswith("weights in float32")
    assert said("--samples", "0").endswith("weights in float32"), "an adapter is as it evolved"


@pytest.mark.slow
def test_push_uploads_the_folder_and_keeps_it(tiny_run: Path, hub: Any, tmp_path: Path) -> None:
    done = push(tiny_run, tmp_path / "out", hub)
    assert done.returncode == 0, done.stderr
    assert (hub.made["name"], hub.made["organization"], hub.made["visibility"]) == ("model", "me", "private")
    here = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(hub.files) == here and "adapter_model.safetensors" in here and "run/journal.jsonl" in here
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    assert str(tiny_run.parent) not in "".join((tmp_path / "out" / f).read_text(errors="replace") for f in here)


@pytest.mark.slow
def test_push_leaves_paths_of_this_machine_behind(lora: Path, base: Path, hub: Any, tmp_path: Path) -> None:
    done = push(lora, tmp_path / "out", hub, "--public")
    assert done.returncode == 0, done.stderr
    assert hub.made["visibility"] == "public"
    assert set(hub.files) == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "evolution.png", "generation_config.json",
    }  # fmt: skip
    assert str(base.parent).encode() not in b"".join((tmp_path / "out" / f).read_bytes() for f in hub.files)
    assert "so they are not here" in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
@pytest.mark.last("no token", "offline", "wrong token")
@pytest.mark.parametrize("case", ["no token", "wrong token", "offline", "no hub"])
def test_a_push_that_fails_is_one_line_and_the_export_stays(
    case: str, tiny_run: Path, hub: Any, tmp_path: Path
) -> None:
    environ = {"no token": {"HF_TOKEN": ""}, "wrong token": {"HF_TOKEN": "hf_other"},
               "offline": {"HF_HUB_OFFLINE": "1"}, "no hub": {"HF_ENDPOINT": "http://127.0.0.1:9"}}  # fmt: skip
    done = push(tiny_run, tmp_path / "out", hub, **environ[case])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "error: --push me/model failed: " in done.stderr
    assert f"hf upload me/model {tmp_path / 'out'}" in done.stderr
    assert "hf_other" not in done.stderr
    assert (tmp_path / "out/README.md").is_file() and not hub.files


# --- the card -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.last("full")
@pytest.mark.parametrize("form", ["adapter", "full"])
def test_the_code_on_the_card_runs(form: str, tiny_run: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    folder = export(tiny_run if form == "adapter" else runs["full"], tmp_path / "out")
    text = (folder / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "load.py").write_text(code)
    done = subprocess.run([sys.executable, "load.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tiny_run if form == "adapter" else runs["full"]
    with Bench(load([run / "config.yaml"])) as bench:
        bench.engine.load(checkpoint.load(saved_folders(run)[-1], bench.layout)[0])
        ids = bench.tokens.encode([{"role": "user", "content": "What is 3 + 5?"}])
        (wanted,) = bench.engine.rollout(MEAN_PLAN, [Request(0, ids, Sampling(12))])
    assert done.stdout == wanted.text + "\n"


def test_the_card_says_what_the_run_was(tiny_run: Path, tmp_path: Path) -> None:
    text = (export(tiny_run, tmp_path / "out") / "README.md").read_text()
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata["library_name"] == "peft" and "base_model" not in metadata and "license" not in metadata
    found = json.loads((tiny_run / "results/evaluation.json").read_text())
    mean, low, high = found["change_mean_low_high"]["reward"]
    before, after = found["before"]["reward"], found["after"]["reward"]
    assert f"| {before:.4g} | {after:.4g} | {mean:+.4g} | {low:+.4g} to {high:+.4g} |" in text
    assert "2 training examples, 8 test examples" in text
    assert str(journal.read(tiny_run / "journal.jsonl").generations[-1].weights_hash) in text
    assert found["alarms"]["verdict"] and "model-index" not in metadata, "a listing has no room for the warning"


def test_the_card_shows_the_figure_and_what_the_model_said(tiny_run: Path, tmp_path: Path) -> None:
    text = (export(tiny_run, tmp_path / "out") / "README.md").read_text()
    figure = (tiny_run / "figures/evolution.png").read_bytes()
    assert (tmp_path / "out/evolution.png").read_bytes() == figure and "](evolution.png)" in text
    said = {name: parquet.read(tiny_run / f"results/completions/{name}.parquet") for name in ("before", "after")}
    for name, rows in said.items():
        for row in rows[:3]:
            assert f"*{name}, reward {row['reward']:.4g}*" in text
            assert row["prompt"].split("\n")[0] in text and visible(row["text"].split("\n")[0][:100]) in text
    assert text.count("*after, reward ") == 3
    none = (export(tiny_run, tmp_path / "none", samples=0) / "README.md").read_text()
    assert "*prompt*" not in none and "of the test split, whatever" not in none
    early = (export(tiny_run, tmp_path / "early", generation=1) / "README.md").read_text()
    assert "*prompt*" not in early and "model-index" not in early, "it is of another mean"
    assert torch.__version__ in text


def test_the_records_rebuild_the_mean(tiny_run: Path, tmp_path: Path) -> None:
    from evoalign.training.replay import replay

    folder = export(tiny_run, tmp_path / "out")
    found = replay(folder / "run/journal.jsonl", generation=2)
    assert found in (folder / "README.md").read_text()
