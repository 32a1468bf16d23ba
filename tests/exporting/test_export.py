# SPDX-License-Identifier: Apache-2.0
"""Exported means and members, loaded by plain transformers and PEFT, give the tokens of the run's own engine."""

from __future__ import annotations

import functools
import io
import json
import os
import runpy
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
from command_line import Run, caller
from copied_runs import rebind
from families import Bench
from peft import PeftModel
from rich.console import Console
from safetensors import safe_open
from small_runs import UNCHECKED
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

import evoalign
from evoalign import cli
from evoalign.analysis.mixer import effective
from evoalign.analysis.targets import locate
from evoalign.config import from_dict, load, to_yaml
from evoalign.errors import CheckpointError, ConfigError, DataError, JournalError, ModelError, RunExistsError
from evoalign.exporting import card
from evoalign.exporting.export import dtype_in, export
from evoalign.models import tiny
from evoalign.report.tables import visible
from evoalign.rundir import checkpoint, journal, parquet
from evoalign.rundir.directory import saved_folders
from evoalign.tasks.countdown import SYSTEM
from evoalign.training.replay import replay
from evoalign.types import MEAN_PLAN, Plan, Request, Sampling

WIDTHS = {"lora": 0.05, "lowrank": 0.02, "full": 0.01}
PROMPTS = 50
TOKENS = 24
QUESTIONS = [f"What is {i % 10} {'+-*'[i % 3]} {i // 10}?" for i in range(PROMPTS)]


GENERATION, MEMBER = 1, 3
"""A mean that has moved, and the half of a pair whose noise is taken away."""
Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a folder, with decoding settings that change even greedy texts, as Qwen's do."""
    folder = tmp_path_factory.mktemp("secret") / "base"
    shutil.copytree(tiny(), folder)
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3,
                "eos_token_id": [2, 0], "pad_token_id": 0}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def train(output: Path, model: object, space: str, /, **sections: Mapping[str, Any]) -> Path:
    """Train in pairs; `lora` with momentum, so that a member is not what an update of its own gives."""
    es = {"sigma": WIDTHS[space], "learning_rate": WIDTHS[space], "num_generations": 2, "population_size": 6,
          "antithetic": True, "optimizer": {"name": "momentum" if space == "lora" else "sgd"}}  # fmt: skip
    tree: dict[str, Any] = {"output_dir": str(output), "seed": 1, "space": space, "es": es,
                            "model": {"name": str(model)}, "evaluation": {"max_tokens": 12}, "checks": UNCHECKED,
                            "checkpoint": {"every": 1, "keep_last": 1}}  # fmt: skip
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return evoalign.train(tree, console=Console(file=io.StringIO())).path


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the run of a space, trained when a test first takes it; `tiny` is one of the model of that name."""
    return functools.cache(
        lambda space: train(
            tmp_path_factory.mktemp(space) / "run", "tiny" if space == "tiny" else base, space.replace("tiny", "lora")
        )
    )


@pytest.fixture(scope="module")
def lora(runs: Callable[[str], Path]) -> Path:
    return runs("lora")


@pytest.fixture(scope="module")
def exported(runs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return the export of a space's run with some options, made once. Tests only read it."""
    return functools.cache(
        lambda space, **options: export(runs(space), tmp_path_factory.mktemp("exported") / "out", **options)
    )


def of_engine(
    run: Path, generation: int | None = None, member: int | None = None
) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Token ids of the prompts, and what the run's engine makes of them greedily with its last mean, with an earlier
    mean, or with a member around that."""
    log, plan = journal.read(run / "journal.jsonl"), MEAN_PLAN
    with Bench(load([run / "config.yaml"])) as bench:
        if generation is None:
            bench.engine.load(checkpoint.load(saved_folders(run)[-1], bench.layout)[0])
        for recorded in log.generations[: generation or 0]:
            bench.engine.apply(recorded.update)
        if member is not None and generation is not None:
            update = log.generations[generation].update
            plan = Plan(update.generation, update.sigma, (update.members[member],))
        prompts = [bench.tokens.encode([{"role": "user", "content": q}]) for q in QUESTIONS]
        requests = [Request(i, ids, Sampling(TOKENS)) for i, ids in enumerate(prompts)]
        found = {r.request: list(r.token_ids) for r in bench.engine.rollout(plan, requests)}
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
    rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def tensors(folder: Path, name: str = "adapter_model") -> dict[str, bytes]:
    with safe_open(folder / f"{name}.safetensors", framework="np") as file:
        return {key: file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118


def differing(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


# --- the same tokens ------------------------------------------------------------------------------------------------


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "adapter": ("lora", {}), "merged": ("lora", {"merge": True, "dtype": "float32"}), "lowrank": ("lowrank", {}),
    "full": ("full", {}),
}  # fmt: skip
"""Space and options of each form of an export."""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_equal_those_of_the_run(form: str, runs: Any, exported: Exported, base: Path) -> None:
    space, options = FORMS[form]
    folder = exported(space, **options)
    prompts, wanted = of_engine(runs(space))
    assert of_plain(plain(folder, base if form == "adapter" else None), folder, prompts) == wanted
    untrained = of_plain(plain(base), folder, prompts)
    assert differing(untrained, wanted) > PROMPTS // 4, "the run changed too little"
    assert {len(row) for row in wanted} != {TOKENS}, "no text ends by a stop token"


@pytest.mark.first("adapter", "lowrank")
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_equal_those_of_the_member(form: str, runs: Any, exported: Exported, base: Path) -> None:
    space, options = FORMS[form]
    folder = exported(space, generation=GENERATION, member=MEMBER, **options)
    prompts, wanted = of_engine(runs(space), GENERATION, MEMBER)
    assert of_plain(plain(folder, base if form == "adapter" else None), folder, prompts) == wanted
    for other in (None, MEMBER - 1):
        tokens = of_engine(runs(space), GENERATION, other)[1]
        assert differing(tokens, wanted) > PROMPTS // 10, "the mean, and the other of the pair, differ"


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


def test_a_merge_keeps_the_dtype_of_its_base_or_takes_the_given_one(lora: Path, tmp_path: Path) -> None:
    """The tiny model is in bfloat16, and the run served it in float32. The command and the card say what was lost."""

    def command(name: str, *options: str) -> tuple[Path, str]:
        done = CliRunner().invoke(cli.app, ["export", str(lora), "--to", str(tmp_path / name), *options])
        assert done.exit_code == 0, done.output
        first, then = done.stdout.splitlines()[-2:]
        assert "README.md has the code that loads it; evoalign eval " in then
        return tmp_path / name, first

    whole, text = command("float32", "--merge", "--dtype", "float32")
    assert text.endswith("weights in float32") and dtypes(whole) == {torch.float32}
    assert "saved here" not in (whole / "README.md").read_text()
    parts = dict(plain(whole).named_parameters())
    for dtype, loss in ((None, "0.4"), ("bfloat16", "0.4"), ("float16", "0.05")):
        folder, text = command(str(dtype), "--merge", *(["--dtype", dtype] if dtype else []))
        name = dtype or "bfloat16"
        lost = f"rounded to {name}, each by up to about {loss} %, after the run's results were measured"
        assert text.endswith(f"weights in {name}, {lost}" if dtype else f"--dtype for another), {lost}")
        assert dtypes(folder) == {getattr(torch, name)} and dtype_in(folder) == name
        assert json.loads((folder / "config.json").read_text())["dtype"] == name
        card_ = (folder / "README.md").read_text()
        assert f"rounded once to {name}" in card_ and f"from_pretrained(here, dtype='{name}')" in card_
        assert f"weights served in float32; saved here in {name}" in card_
        rounded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())
        assert all(torch.equal(rounded[n], p.to(rounded[n].dtype)) for n, p in parts.items())
    assert command("adapter", "--samples", "0")[1].endswith("weights in float32"), "an adapter is as it evolved"


def test_a_checkpoint_in_another_dtype_is_rounded_from_its_float32_mean(base: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", str(base), "lowrank", model={"dtype": "bfloat16"})
    mean = checkpoint.mean_of(saved_folders(run)[-1])
    folder = export(run, tmp_path / "out", dtype="float32")
    found = dict(plain(folder).named_parameters())
    assert mean and all(torch.equal(found[name], tensor) for name, tensor in mean.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in mean.values())
    assert dtypes(export(run, tmp_path / "same")) == {torch.bfloat16}


# --- forms and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", WIDTHS)
def test_export_has_the_files_of_its_form_and_only_the_adapters_base_keeps_a_path(
    space: str, runs: Any, exported: Exported, base: Path
) -> None:
    folder = exported(space)
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    both = {"README.md", "evolution.png", "generation_config.json", "run/config.yaml", "run/journal.jsonl"}
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    own = {"adapter_config.json", "adapter_model.safetensors"} if space == "lora" else model
    assert files.keys() - {"chat_template.jinja"} == both | own
    assert files["run/journal.jsonl"] == (runs(space) / "journal.jsonl").read_bytes()
    assert load([folder / "run/config.yaml"]).output_dir == "run"
    assert [p.name for p in folder.parent.iterdir()] == ["out"]
    leaks = {name for name, data in files.items() if str(base.parent).encode() in data}
    needed = {"run/config.yaml", "run/journal.jsonl"}  # replay needs the base
    assert leaks == (needed | {"adapter_config.json"} if space == "lora" else needed)
    assert str(runs(space).parent).encode() not in b"".join(files.values())
    if space == "lora":
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize("form", ["merged", "lowrank"])
def test_shards_have_an_index_and_load(form: str, exported: Exported) -> None:
    space, options = FORMS[form]
    whole = plain(exported(space, **options)).state_dict()
    folder = exported(space, **options, shard_size="500KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3 and all(shard.stat().st_size < 520_000 for shard in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {shard.name for shard in shards}
    again = plain(folder).state_dict()
    assert again.keys() == whole.keys() and all(torch.equal(again[k], whole[k]) for k in whole)


def test_an_earlier_generation_is_rebuilt_from_the_journal(
    lora: Path, base: Path, exported: Exported, tmp_path: Path
) -> None:
    assert [f.name for f in saved_folders(lora)] == ["generation_0002"]
    first = exported("lora", generation=1)
    text = (first / "README.md").read_text()
    seals = journal.read(lora / "journal.jsonl").generations
    assert f"after generation 1: `{seals[0].weights_hash}`" in text
    assert "not the end of its run" in text and "## Before and after\n\nThis mean was not compared" in text
    assert "*prompt*" not in text and "model-index" not in text, "they are of another mean"
    assert tensors(first) != tensors(exported("lora"))
    # One generation of the same settings is the same mean; it is trained, not rebuilt.
    other = train(tmp_path / "run", base, "lora", es={"num_generations": 1})
    assert tensors(export(other, tmp_path / "other")) == tensors(first)


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


def test_export_takes_revision_and_decoding_from_the_config(lora: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora, tmp_path / "run"))
    words = ["model.revision=abc123", "evaluation.temperature=0.6", "evaluation.top_p=0.9", "evaluation.seeds=[3, 4]"]
    (run / "config.yaml").write_text(to_yaml(load([run / "config.yaml"], words)))
    rebind(run)
    (tmp_path / "out").mkdir()  # an empty folder is taken
    folder = export(run, tmp_path / "out")
    assert json.loads((folder / "adapter_config.json").read_text())["revision"] == "abc123"
    assert "at revision `abc123`" in (folder / "README.md").read_text()
    settings = GenerationConfig.from_pretrained(folder)
    assert (settings.do_sample, settings.temperature, settings.top_p, settings.top_k) == (True, 0.6, 0.9, 0)
    assert settings.repetition_penalty == 1.0


# --- members --------------------------------------------------------------------------------------------------------


def test_a_low_rank_member_is_the_mean_and_its_product(runs: Any, exported: Exported) -> None:
    """Dense, against the factors that the engine serves."""
    saved = plain(exported("lowrank", generation=GENERATION, member=MEMBER)).state_dict()
    log = journal.read(runs("lowrank") / "journal.jsonl")
    update = log.generations[GENERATION].update
    with Bench(load([runs("lowrank") / "config.yaml"])) as bench:
        bench.engine.apply(log.generations[0].update)
        mean = dict(bench.engine.state())
        plan = Plan(update.generation, update.sigma, update.members)
        for name, weight in mean.items():
            adapter = bench.space.adapter(bench.layout, name, mean.__getitem__, plan, (update.members[MEMBER],))
            assert adapter is not None
            want = weight.double() + adapter.b[0].double() @ adapter.a[0].double()
            torch.testing.assert_close(saved[name].double(), want, rtol=0, atol=1e-6)
            assert not torch.equal(saved[name], weight)


def test_the_card_and_the_records_say_which_member(lora: Path, exported: Exported, tmp_path: Path) -> None:
    folder = exported("lora", generation=GENERATION, member=MEMBER)
    text = (folder / "README.md").read_text()
    fitness = journal.read(lora / "journal.jsonl").generations[GENERATION].fitness_M[MEMBER]
    assert f"one member of a population, not the result of its run**: member {MEMBER} of the 6" in text
    assert f"its fitness was {fitness:.4g}" in text and "was not compared with its base" in text
    assert f"evoalign export run --generation {GENERATION} --member {MEMBER}" in text
    again = export(folder / "run", tmp_path / "again", generation=GENERATION, member=MEMBER)
    assert tensors(again) == tensors(folder) != tensors(exported("lora", generation=GENERATION))


def test_an_exported_member_is_a_target_and_an_altered_one_is_none(
    lora: Path, exported: Exported, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported("lora", generation=GENERATION, member=MEMBER), tmp_path / "out"))
    target = locate(str(folder), load([lora / "config.yaml"]))
    assert effective(target, torch.float32)
    record = folder / "run" / "member.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"weights_hash": "0" * 64}))
    with pytest.raises(CheckpointError, match="does not hold the weights"):
        effective(target, torch.float32)


# --- refusals, which leave nothing ----------------------------------------------------------------------------------


def test_refusals_are_one_line_and_leave_nothing(lora: Path, runs: Any, tmp_path: Path) -> None:
    taken, file, grpo = tmp_path / "taken", tmp_path / "file", tmp_path / "grpo"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    file.write_text("mine")
    grpo.mkdir()
    (grpo / "config.yaml").write_bytes((lora / "config.yaml").read_bytes())
    (grpo / "manifest.json").write_text(json.dumps({"method": "grpo"}))
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RunExistsError, "taken exists and is not empty", {"to": taken}),
        (RunExistsError, "file exists and is not empty", {"to": file}),
        (ConfigError, "is no run directory", {"run": tmp_path}),
        (ConfigError, "leave out --merge", {"run": runs("full"), "merge": True}),
        (ConfigError, "--shard-size many: expected a size", {"shard_size": "many"}),
        (ConfigError, "--shard-size 0GB", {"shard_size": "0GB"}),
        (ConfigError, "--push a/b/c: Repo id must be", {"push": "a/b/c"}),
        (ConfigError, "--push what ever/x: Repo id must", {"push": "what ever/x"}),
        (ConfigError, "--push name: expected USER/NAME", {"push": "name"}),
        (ConfigError, "--dtype int8: expected one of float32, bfloat16, float16", {"merge": True, "dtype": "int8"}),
        (ConfigError, "--dtype float16 is for whole models", {"dtype": "float16"}),
        (JournalError, "generation -1", {"generation": -1}),
        (JournalError, "generation 3", {"generation": 3}),
        (ConfigError, "no members of generation 2: its generations are 0 to 1", {"generation": 2, "member": 0}),
        (ConfigError, "no member 6 in generation 0: its members are 0 to 5", {"generation": 0, "member": 6}),
        (ConfigError, "--member 1 needs --generation", {"member": 1}),
        (ConfigError, "run of GRPO, which has no members", {"run": grpo, "generation": 0, "member": 0}),
    ]
    for error, message, changes in cases:
        with pytest.raises(error) as caught:
            export(**{"run": lora, "to": out, **changes})
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert sorted(tmp_path.rglob("*")) == before
    words = [str(lora), "--to", str(out), "--generation", "0", "--member", "99"]
    assert CliRunner().invoke(cli.app, ["export", *words]).exit_code != 0
    assert sorted(tmp_path.rglob("*")) == before


def test_damage_is_refused_by_name(lora: Path, exported: Exported, tmp_path: Path) -> None:
    run, out = Path(shutil.copytree(lora, tmp_path / "run")), tmp_path / "out"
    weights = saved_folders(run)[-1] / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match="safetensors was altered"):
        export(run, out)
    # Whole, but of another run.
    shutil.rmtree(saved_folders(run)[-1])
    other = train(tmp_path / "other", "tiny", "lora", es={"sigma": 0.04})
    shutil.copytree(saved_folders(other)[-1], run / "loras/generation_0002")
    with pytest.raises(CheckpointError, match="generation_0002 is not the mean that"):
        export(run, out)
    shutil.rmtree(run / "loras")
    with pytest.raises(ModelError, match="saved no weights yet; name a generation"):
        export(run, out)
    assert not out.exists()
    assert tensors(export(run, out, generation=2)) == tensors(exported("lora"))


def test_a_merge_refuses_another_base(lora: Path, base: Path, exported: Exported, tmp_path: Path) -> None:
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
    assert tensors(folder, "model") == tensors(exported("lora", merge=True, dtype="float32"), "model")


@pytest.mark.long  # tests/faults/test_disk.py has it in this process
@pytest.mark.parametrize("limit", [1_000, 200_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(limit: int, runs: Any, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: small files fail first, or the weights alone."""
    resource = pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-m", "evoalign.cli", "export", str(runs("lowrank")), "--to", str(tmp_path / "out")],
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


def push(run: Path, to: Path, hub: Any) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's address is read when its library is imported."""
    environ = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test",
               "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(to.parent / "home")}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "evoalign.cli", "export", str(run), "--to", str(to), "--push", "me/model"],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


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


@pytest.mark.slow
def test_push_uploads_the_folder_and_keeps_it(runs: Any, hub: Any, tmp_path: Path) -> None:
    done = push(runs("tiny"), tmp_path / "out", hub)
    assert done.returncode == 0, done.stderr
    assert (hub.made["name"], hub.made["organization"], hub.made["visibility"]) == ("model", "me", "private")
    here = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(hub.files) == here and "adapter_model.safetensors" in here and "run/journal.jsonl" in here
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    text = "".join((tmp_path / "out" / f).read_text(errors="replace") for f in here)
    assert str(runs("tiny").parent) not in text


@pytest.fixture
def push_here(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`push` in this process, with what its library read from the environment of another."""
    from huggingface_hub import constants

    values = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
              "HF_TOKEN_PATH": str(tmp_path / "home/token")}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    return functools.partial(caller(monkeypatch, capsys), "export", "--to", tmp_path / "out", "--push", "me/model")


@pytest.mark.slow
def test_push_leaves_paths_of_this_machine_behind(
    lora: Path, base: Path, hub: Any, push_here: Run, tmp_path: Path
) -> None:
    done = push_here(lora, "--public")
    assert done.code == 0, done.err
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
    case: str, runs: Any, hub: Any, push_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    if case.endswith("token"):
        monkeypatch.setenv("HF_TOKEN", {"no token": "", "wrong token": "hf_other"}[case])
    else:
        name, value = {"offline": ("HF_HUB_OFFLINE", True), "no hub": ("ENDPOINT", "http://127.0.0.1:9")}[case]
        monkeypatch.setattr(constants, name, value)
    done = push_here(runs("tiny"))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "error: --push me/model failed: " in done.err
    assert f"hf upload me/model {tmp_path / 'out'}" in done.err
    assert "hf_other" not in done.err
    assert (tmp_path / "out/README.md").is_file() and not hub.files


# --- the card -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.last("full")
@pytest.mark.parametrize("space", ["tiny", "full"])
def test_the_code_on_the_card_runs(
    space: str, runs: Any, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(exported(space), tmp_path / "out"))
    (tmp_path / "load.py").write_text((folder / "README.md").read_text().split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    runpy.run_path("load.py")
    told = capsys.readouterr().out
    with Bench(load([runs(space) / "config.yaml"])) as bench:
        bench.engine.load(checkpoint.load(saved_folders(runs(space))[-1], bench.layout)[0])
        ids = bench.tokens.encode([{"role": "user", "content": "What is 3 + 5?"}])
        (wanted,) = bench.engine.rollout(MEAN_PLAN, [Request(0, ids, Sampling(12))])
    assert told == wanted.text + "\n"


def test_the_card_says_what_the_run_was(lora: Path, exported: Exported) -> None:
    text = (exported("lora") / "README.md").read_text()
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata["library_name"] == "peft" and "base_model" not in metadata and "license" not in metadata
    found = json.loads((lora / "results/evaluation.json").read_text())
    mean, low, high = found["change_mean_low_high"]["reward"]
    before, after = found["before"]["reward"], found["after"]["reward"]
    assert f"| {before:.4g} | {after:.4g} | {mean:+.4g} | {low:+.4g} to {high:+.4g} |" in text
    assert "2 training examples, 8 test examples" in text and torch.__version__ in text
    assert str(journal.read(lora / "journal.jsonl").generations[-1].weights_hash) in text
    assert replay(exported("lora") / "run/journal.jsonl", generation=2) in text, "the records rebuild the mean"
    hacked = bool(found["alarms"]["verdict"])
    assert ("model-index" in metadata) is not hacked, "a listing has no room for the warning"


def test_the_card_shows_the_figure_and_completions(lora: Path, exported: Exported) -> None:
    text = (exported("lora") / "README.md").read_text()
    figure = (lora / "figures/evolution.png").read_bytes()
    assert (exported("lora") / "evolution.png").read_bytes() == figure and "](evolution.png)" in text
    for name in ("before", "after"):
        for row in parquet.read(lora / f"results/completions/{name}.parquet")[:3]:
            assert f"*{name}, reward {row['reward']:.4g}*" in text
            assert row["prompt"].split("\n")[0] in text and visible(row["text"].split("\n")[0][:100]) in text
    assert text.count("*after, reward ") == 3
    none = (exported("lora", samples=0) / "README.md").read_text()
    assert "*prompt*" not in none and "of the test split, whatever" not in none


DAMAGED = {
    "split": ("evaluation", {"split": "<img src=x onerror=alert(1)>"}), "examples": ("evaluation", {"examples": "<b>"}),
    "settings": ("evaluation", {"settings": {"temperature": "<b>", "max_tokens": 1}}),
    "a measure": ("evaluation", {"after": {"reward": "<b>"}}), "alarms": ("evaluation", {"alarms": "<b>"}),
    "an interval": ("evaluation", {"change_mean_low_high": {"reward": ["<b>"]}}),
    "versions": ("manifest", {"versions": [["<b>"]]}), "hardware": ("manifest", {"hardware": {"gpus": "<b>"}}),
    "task": ("manifest", {"task": "<b>"}),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_export_refuses_values_that_no_run_writes(what: str, lora: Path, tmp_path: Path) -> None:
    name, changes = DAMAGED[what]
    run = Path(shutil.copytree(lora, tmp_path / "run"))
    (run / "SHA256SUMS").unlink(missing_ok=True)
    file = run / ("manifest.json" if name == "manifest" else "results/evaluation.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(DataError, match=rf"{file.name} is damaged"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
