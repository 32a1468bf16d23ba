# SPDX-License-Identifier: Apache-2.0
"""Runs that start from an adapter, a run or an export: from the very weights that PEFT makes of it."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from copied_runs import rebind
from families import build
from peft import LoraConfig, PeftModel, get_peft_model
from quantised_models import quantise
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_runs import UNCHECKED
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

import evoalign
from evoalign.config import ModelConfig, from_dict
from evoalign.engines import weights_hash
from evoalign.errors import CheckpointError, ConfigError, ModelError, ResumeError
from evoalign.exporting.export import export
from evoalign.models import origin, tiny
from evoalign.models.files import load_whole
from evoalign.rundir import checkpoint, files, journal
from evoalign.rundir.directory import saved_folders
from evoalign.setup import serve
from evoalign.training.replay import replay
from evoalign.training.resolve import evaluate
from evoalign.training.train import dry_run

IDS = torch.tensor([[5, 17, 200, 31, 8, 990, 44]])


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVOALIGN_CACHE", str(folder))
        yield folder


def base_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)


def adapter(folder: Path, base: Path | None = None, /, strength: float = 1.0, **settings: Any) -> Path:
    """A LoRA adapter of random numbers over the tiny model, or another, as PEFT saves it."""
    torch.manual_seed(3)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **settings}
    model: Any = AutoModelForCausalLM.from_pretrained(base or tiny(), dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **chosen))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * strength * (0.02 if "lora_" in name else 0.002))
    adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def of_peft(folder: Path, base: Path | None = None) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(base or tiny(), dtype=torch.float32)
    return logits(PeftModel.from_pretrained(model, str(folder)))


def config(output: Path, model: Mapping[str, Any] | str, space: str = "lora", **sections: Any) -> dict[str, Any]:
    es = {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 2, "population_size": 4}
    named = {"name": model} if isinstance(model, str) else dict(model)
    return {
        "output_dir": str(output), "seed": 1, "space": space, "model": named, "es": es, "evaluation": {"max_tokens": 4},
        "task": {"name": "conciseness", "train_size": 1, "test_size": 2}, "checkpoint": {"every": 1, "keep_last": 2},
        "checks": UNCHECKED | {"placebo": 1}, **sections,
    }  # fmt: skip


def train(tree: Mapping[str, Any], **options: Any) -> tuple[Path, str]:
    said = io.StringIO()
    return evoalign.train(tree, console=Console(file=said, width=2000), **options).path, said.getvalue()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(tmp_path_factory.mktemp("plain") / "adapter")


@pytest.fixture(scope="module")
def run(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return train(config(tmp_path_factory.mktemp("run") / "first", str(plain)))


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "pattern": {"target_modules": r".*\.0\..*(q|k)_proj"},
    "saved": {"modules_to_save": ["norm", "lm_head"]},
    "words": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"], "lora_dropout": 0.0},
    "tokens": {"trainable_token_indices": {"embed_tokens": [5, 17]}},
    "tokens listed": {"trainable_token_indices": [5, 17]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [5, 17], "embed_tokens": [5, 200]}},
    "tied tokens": {"trainable_token_indices": [5, 17], "ensure_weight_tying": True},
    "tied words": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tied head": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "tied and saved": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}
"""Forms of adapters. The tiny model's head shares the weight of its embedding."""
TIED = [form for form in FORMS if form.startswith(("tokens", "tied", "words", "head"))]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_run_starts_from_is_what_peft_makes_of_it(form: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", **FORMS[form])
    wanted, base = of_peft(folder), logits(base_model())
    assert (wanted - base).abs().max() > 0.05, "the adapter does nothing"
    merged = AutoModelForCausalLM.from_pretrained(origin.model_path(ModelConfig(name=str(folder))), dtype="auto")
    assert merged.dtype == torch.float32
    assert torch.allclose(logits(merged), wanted, atol=2e-5)


def made_gemma3(folder: Path) -> Path:
    """A Gemma 3 model, which shares head and embedding and scales the embedding."""
    torch.manual_seed(7)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    ids = {"vocab_size": 1024, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **ids, num_key_value_heads=2))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / file, folder)
    return folder


@pytest.mark.parametrize("form", TIED)
def test_adapters_of_tied_weights_merge_as_peft_applies_them_on_gemma3(form: str, tmp_path: Path) -> None:
    base = made_gemma3(tmp_path / "base")
    folder = adapter(tmp_path / "adapter", base, **FORMS[form])
    merged = AutoModelForCausalLM.from_pretrained(origin.model_path(ModelConfig(name=str(folder))), dtype="auto")
    assert torch.allclose(logits(merged), of_peft(folder, base), atol=1e-5)


RESIZED: dict[str, dict[str, Any]] = {
    "only resized": {},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "words saved": {"modules_to_save": ["embed_tokens"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "added tokens": {"trainable_token_indices": [5, 1025, 1026]},
    "words and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


def resized(folder: Path, base: Path, **settings: Any) -> torch.Tensor:
    """Save an adapter whose tokenizer has 8 added tokens, and return the logits of its model in PEFT."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(1032)
    adapted = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "target_modules": ["q_proj"], **settings})
    )
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    adapted.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    tokenizer.add_tokens([f"<new {i}>" for i in range(8)])
    tokenizer.save_pretrained(folder)
    return logits(adapted)


@pytest.mark.parametrize("family", ["tiny", "llama"])
@pytest.mark.parametrize("form", RESIZED)
def test_adapters_with_added_tokens_merge_as_peft_applies_them(form: str, family: str, tmp_path: Path) -> None:
    base = tiny() if family == "tiny" else build("llama", tmp_path / "base")
    wanted = resized(tmp_path / "adapter", base, **RESIZED[form])
    path = origin.model_path(ModelConfig(name=str(tmp_path / "adapter"), base=str(base)))
    merged = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert merged.config.vocab_size == 1032 and len(AutoTokenizer.from_pretrained(path)) == 1032
    assert torch.allclose(logits(merged), wanted, atol=3e-5)


def test_added_tokens_without_rows_of_the_head_are_refused(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    resized(tmp_path / "adapter", base, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ModelError, match=r"vocabulary of 1,032, its base has 1,024, .* no rows of lm_head"):
        origin.model_path(ModelConfig(name=str(tmp_path / "adapter"), base=str(base)))


def prefixed(file: Path, prefix: str, below: str = "") -> None:
    named = {f"{below}{prefix}{key.removeprefix(below)}": tensor for key, tensor in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["base_model.model.", "_orig_mod.", "module.", "_fsdp_wrapped_module.", "other."])
def test_prefixes_of_wrappers_are_named(prefix: str, plain: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny(), tmp_path / "model"))
    prefixed(model / "model.safetensors", prefix)
    with pytest.raises(ModelError, match=re.escape(f"its files have '{prefix}model.")) as caught:
        load_whole(str(model), None, torch.float32, str(model))
    assert "save" in str(caught.value) and "fetch it again" not in str(caught.value)
    folder = Path(shutil.copytree(plain, tmp_path / "adapter"))
    prefixed(folder / WEIGHTS, prefix, "base_model.model.")
    with pytest.raises(ModelError, match=re.escape(f"base_model.model.{prefix}")):
        origin.model_path(ModelConfig(name=str(folder)))


def test_the_weights_are_kept_in_the_dtype_that_is_asked_for_rounded_once(plain: Path) -> None:
    parts = {
        dtype: dict(AutoModelForCausalLM.from_pretrained(path, dtype="auto").named_parameters())
        for dtype in ("float32", "bfloat16")
        if (path := origin.model_path(ModelConfig(name=str(plain), dtype=dtype)))
    }
    for name, whole in parts["float32"].items():
        assert torch.equal(parts["bfloat16"][name], whole.bfloat16())
    assert any(not torch.equal(p, p.bfloat16().float()) for p in parts["float32"].values())


@pytest.mark.first("form0", "form3")
@pytest.mark.parametrize("form", [
    {"use_rslora": True, "lora_alpha": 60}, {"trainable_token_indices": [*range(200, 1000)]},
    {"modules_to_save": ["norm"]}, {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
])  # fmt: skip
def test_evaluate_scores_an_adapter_of_any_form_as_peft_merges_it(form: dict[str, Any], tmp_path: Path) -> None:
    """evoalign's own space holds a plain one; another is merged for it."""
    folder, tree = adapter(tmp_path / "adapter", strength=10, **form), config(tmp_path / "x", "tiny")
    PeftModel.from_pretrained(base_model(), str(folder)).merge_and_unload().save_pretrained(tmp_path / "merged")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (tiny() / file).is_file():
            shutil.copy(tiny() / file, tmp_path / "merged")
    found, wanted, base = (evaluate(f, config=tree) for f in (folder, tmp_path / "merged", tiny()))
    assert found.completions == wanted.completions != base.completions


def test_an_adapter_that_changes_is_merged_anew(plain: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(plain, tmp_path / "mine"))
    first = origin.model_path(ModelConfig(name=str(mine)))
    assert first == origin.model_path(ModelConfig(name=str(plain))), "the same bytes, the same model"
    adapter(mine, lora_alpha=3)
    assert origin.model_path(ModelConfig(name=str(mine))) != first


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json", "tokenizer.json", "merged.json", "cut short"])
def test_a_merged_model_that_lost_a_file_is_made_anew(lost: str, plain: Path) -> None:
    model = ModelConfig(name=str(plain))
    folder = Path(origin.model_path(model))
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    if lost == "cut short":
        (folder / "model.safetensors").write_bytes(whole["model.safetensors"][:-1])
    else:
        (folder / lost).unlink()
    (folder / "left.txt").write_text("of somebody else")
    assert origin.described(model) == (str(tiny()), None), "what is not whole says nothing of the model"
    assert origin.model_path(model) == str(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    (folder / "left.txt").write_text("of somebody else")
    assert origin.model_path(model) == str(folder) and (folder / "left.txt").is_file(), "nothing is lost: it stays"
    (folder / "left.txt").unlink()


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_of_the_hub_is_fetched_with_its_weights(
    weights: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into one folder; a pickle is fetched where there is nothing else, and refused as what it is."""
    asked: list[str] = []

    def find(path: str, name: str, revision: str | None) -> Path | None:
        asked.append(name)
        there = {"adapter_config.json": "adapter_config.json", weights: "adapter_model.safetensors"}
        return shutil.copy(plain / there[name], tmp_path / name) if name in there else None

    monkeypatch.setattr(origin, "find", find)
    model = ModelConfig(name=f"who/{weights.replace('.', '_')}", base="tiny")
    if weights.endswith(".bin"):
        with pytest.raises(ModelError, match="its weights are a pickle, which is not read"):
            origin.origin(model)
    else:
        assert origin.origin(model).adapters == (tmp_path,)
        assert "adapter_model.bin" not in asked, "what would be refused is not fetched beside what is read"


def test_a_run_says_where_it_starts_and_its_journal_has_the_merged_weights(run: tuple[Path, str], plain: Path) -> None:
    path, said = run
    (line,) = [line for line in said.split("\n") if line.startswith("start: ")]
    assert f"adapter {plain} (LORA, rank 4)" in line and f"merged into {tiny()}" in line
    model: Any = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(plain)).merge_and_unload()
    header = journal.read(path / "journal.jsonl").header
    assert header.model_hash == weights_hash(merged.named_parameters())
    assert header.model_hash != weights_hash(base_model().named_parameters())
    start = json.loads((path / "manifest.json").read_text())["start"]
    assert start == {"base": "tiny", "merged": ["adapter adapter (LORA, rank 4)"]}, "no folder of this machine"


def test_such_a_run_resumes_replays_and_is_scored(run: tuple[Path, str], plain: Path, tmp_path: Path) -> None:
    path, _ = run
    mine = Path(shutil.copytree(path, tmp_path / "run"))
    found = replay(path)
    assert found == journal.read(path / "journal.jsonl").generations[-1].weights_hash
    tree = config(mine, str(plain))
    train({**tree, "es": {**tree["es"], "num_generations": 3}}, resume=True)
    assert len(journal.read(mine / "journal.jsonl").generations) == 3 and replay(mine, generation=2) == found
    ours = json.loads((path / "results/evaluation.json").read_text())["after"]["reward"]
    assert evaluate(path).measures["reward"] == ours
    assert evaluate(saved_folders(path)[-1], config=config(tmp_path / "x", "tiny")).measures["reward"] == ours
    assert replay(path, model=str(Path(shutil.copytree(plain, tmp_path / "moved")))) == found
    with pytest.raises(ResumeError, match="other base weights"):
        replay(path, model="tiny")


def test_the_finished_run_has_its_placebo(run: tuple[Path, str]) -> None:
    found = json.loads((run[0] / "results/evaluation.json").read_text())
    assert len(found["placebo"]["reward"]["placebos"]) == 1


def test_what_such_a_run_hands_out_is_whole(run: tuple[Path, str], plain: Path, tmp_path: Path) -> None:
    path, _ = run
    with pytest.raises(ConfigError, match=r"merged into its base, and an adapter .* add --merge"):
        export(path, tmp_path / "adapter")
    folder = export(path, tmp_path / "out", merge=True, dtype="float32")
    start: Any = PeftModel.from_pretrained(base_model(), str(plain)).merge_and_unload()
    wanted = logits(PeftModel.from_pretrained(start, str(saved_folders(path)[-1])))
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert torch.allclose(logits(exported), wanted, atol=2e-4)
    assert (wanted - of_peft(plain)).abs().max() > 1e-2
    assert dict(exported.named_parameters()).keys() == dict(base_model().named_parameters()).keys()
    text = (folder / "README.md").read_text()
    assert "a fine-tuned adapter, merged into `tiny`" in text
    # And that is again a model to start from.
    with_it = serve(from_dict(config(tmp_path / "x", str(folder))))
    assert with_it.facts.model_hash == weights_hash(exported.named_parameters())
    with_it.close()


@pytest.mark.parametrize("space", ["lora", "full"])
def test_a_run_starts_from_the_mean_of_another(space: str, run: tuple[Path, str], tmp_path: Path) -> None:
    first = run[0] if space == "lora" else train(config(tmp_path / "first", "tiny", "full"))[0]
    saved = saved_folders(first)
    with_it = serve(from_dict(config(tmp_path / "x", str(first))))
    again = serve(from_dict(config(tmp_path / "x", str(saved[-1]))))
    earlier = serve(from_dict(config(tmp_path / "x", str(saved[0]), "full")))
    hashes = [served.facts.model_hash for served in (with_it, again, earlier)]
    assert hashes[0] == hashes[1] != hashes[2]
    if space == "full":
        assert hashes[0] == journal.read(first / "journal.jsonl").generations[-1].weights_hash
    (line,) = origin.lines(ModelConfig(name=str(first)))
    assert f"run {first}, after generation 2" in line
    for served in (with_it, again, earlier):
        served.close()


def test_adapters_of_experts_are_merged_into_each_experts_own_matrix(tmp_path: Path) -> None:
    base = build("qwen3_moe", tmp_path / "base")
    path, _ = train(config(tmp_path / "run", str(base), lora={"rank": 2}))
    saved = saved_folders(path)[-1]
    merged = AutoModelForCausalLM.from_pretrained(origin.model_path(ModelConfig(name=str(path))), dtype="auto")
    assert torch.allclose(logits(merged), of_peft(saved, base), atol=2e-4)
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(merged) - logits(plain)).abs().max() > 1e-2
    assert any(".experts." in name for name in checkpoint.load_adapter(saved))


def test_a_dry_run_merges_nothing(cache: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", r=3)
    before = set((cache / "merged").iterdir())
    lines = dry_run(config(tmp_path / "run", str(folder)))
    assert any(line.startswith("start: adapter") for line in lines) and set((cache / "merged").iterdir()) == before


def test_the_base_may_be_elsewhere(plain: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(plain, tmp_path / "mine"))
    settings = json.loads((mine / "adapter_config.json").read_text())
    (mine / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "/not/here/base"}))
    with pytest.raises(ModelError, match=r"over '/not/here/base', by its adapter_config\.json.*model\.base") as caught:
        origin.model_path(ModelConfig(name=str(mine)))
    assert "\n" not in str(caught.value)
    found = ModelConfig(name=str(mine), base="tiny")
    assert "model.base tiny is not used" in origin.lines(ModelConfig(name="tiny", base="tiny"))[0]
    state = [AutoModelForCausalLM.from_pretrained(origin.model_path(m), dtype="auto").state_dict()
             for m in (found, ModelConfig(name=str(plain)))]  # fmt: skip
    assert all(torch.equal(state[0][name], state[1][name]) for name in state[1])
    assert "base" not in ModelConfig(name="x").model_dump(), "configs of before stay as they are"


def test_an_adapter_over_a_quantised_base_is_merged_into_full_precision_alone(plain: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    quantise("awq", tiny(), packed)
    mine = Path(shutil.copytree(plain, tmp_path / "mine"))
    settings = json.loads((mine / "adapter_config.json").read_text())
    (mine / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(packed)}))
    for base in (None, str(packed)):
        with pytest.raises(ModelError, match=r"over .*packed, which is quantised \(.*\), and .* set model\.base to"):
            origin.origin(ModelConfig(name=str(mine), base=base))
    start, warning = origin.lines(ModelConfig(name=str(mine), base="tiny"))
    assert start.startswith("start: adapter")
    assert warning.startswith("warning: the adapter was trained on a quantised base (AWQ, 4 bits, groups of 16)")
    assert origin.record(ModelConfig(name=str(mine), base="tiny")).keys() == {"start"}
    assert len(origin.lines(ModelConfig(name=str(plain)))) == 1


def changed(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))

    return change


WEIGHTS = "adapter_model.safetensors"


def in_six_bits(folder):
    """Write weights in a number format that safetensors lists and torch does not have."""
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + b"abc")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "not LoRA": (changed(peft_type="PROMPT_TUNING"), r"peft_type 'PROMPT_TUNING'.*merge it with PEFT"),
    "code": (changed(megatron_config={"a": 1}, megatron_core="os"), "sets megatron_config"),
    "unknown": (changed(use_warp_drive=True), "sets use_warp_drive"),
    "layers": (changed(layer_replication=[[0, 2]]), "sets layer_replication"),
    "pissa": (changed(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4'"),
    "other rank": (changed(r=5), "does not fit model .*size mismatch"),
    "other modules": (changed(target_modules=["q_proj"]), "has no 'base_model.model.*down_proj"),
    "more modules": (changed(target_modules=["q_proj", "down_proj", "up_proj"]), "has no '.*up_proj"),
    "no base": (changed(base_model_name_or_path=None), "names no base; name it there, or with model.base"),
    "circle": (lambda f: changed(base_model_name_or_path=str(f))(f), "more than 16 deep, or in a circle"),
    "pickle": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "its weights are a pickle, which is not read"),
    "six bits": (in_six_bits, r"adapter_model\.safetensors does not load: "),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "a model too": (
        lambda f: shutil.copy(tiny() / "model.safetensors", f),
        r"both a model and an adapter .*model\.base",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_cannot_be_merged_is_refused_by_name(name: str, plain: Path, tmp_path: Path) -> None:
    spoil, message = REFUSED[name]
    folder = Path(shutil.copytree(plain, tmp_path / "adapter"))
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        origin.model_path(ModelConfig(name=str(folder)))
    assert "\n" not in str(caught.value)


def test_a_run_that_saved_nothing_or_was_altered_is_none_to_start_from(run: tuple[Path, str], tmp_path: Path) -> None:
    mine = Path(shutil.copytree(run[0], tmp_path / "run"))
    weights = saved_folders(mine)[-1] / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match="was altered"):
        origin.model_path(ModelConfig(name=str(mine)))
    shutil.rmtree(mine / "loras")
    with pytest.raises(ModelError, match="is a run that saved no weights yet"):
        origin.model_path(ModelConfig(name=str(mine)))


def test_a_run_from_elsewhere_does_not_say_what_is_imported(run: tuple[Path, str], tmp_path: Path) -> None:
    mine = Path(shutil.copytree(run[0], tmp_path / "run"))
    text = (mine / "config.yaml").read_text()
    (mine / "config.yaml").write_text(text.replace("name: conciseness", "name: no_such_package.module:Task"))
    rebind(mine)
    assert origin.origin(ModelConfig(name=str(mine))).adapters[-1] == saved_folders(mine)[-1]


@pytest.mark.slow
def test_grpo_starts_from_the_same_weights_and_es_from_what_it_made(plain: Path, tmp_path: Path) -> None:
    grpo = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "tune": "lora"}
    tree = {
        name: value for name, value in config(tmp_path / "grpo", str(plain)).items() if name not in ("es", "checks")
    }
    tree["task"] = {**tree["task"], "train_size": 2}
    said = io.StringIO()
    run = evoalign.grpo({**tree, "grpo": grpo}, console=Console(file=said, width=2000)).path
    assert f"start: adapter {plain} (LORA, rank 4)" in said.getvalue()
    with_it = serve(from_dict(config(tmp_path / "x", str(run))))
    exported = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "out", merge=True, dtype="float32"))
    assert torch.allclose(logits(with_it.engine.model), logits(exported.float()), atol=2e-4)
    with_it.close()


def test_runs_that_begin_at_once_wait_for_the_one_that_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "PATIENCE", 0.01)
    config = ModelConfig(name=str(adapter(tmp_path / "adapter", r=3)))
    found = origin.origin(config)
    folder = origin.folder_of(found, config.dtype)
    with ThreadPoolExecutor() as pool:
        with files.scratch(folder.with_name(f".{folder.name}.tmp")):  # as a process that is filling it, and dies
            others = [pool.submit(origin.merged, found, config.dtype) for _ in range(2)]
            time.sleep(0.1)
            assert not any(other.done() for other in others)
        assert {other.result() for other in others} == {folder}
    assert (folder / "model.safetensors").is_file() and [p.name for p in folder.parent.glob(".*")] == []
