# SPDX-License-Identifier: Apache-2.0
"""Changes of weights, read by rows, against what the libraries themselves load, merge and save."""

import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from families import build, make_config, unfused
from quantised_models import quantise
from safetensors.torch import load_file, save_file

from evoalign.checks.distance import Base, Product, blocks, changes_of
from evoalign.errors import ModelError
from evoalign.models import tensors, tiny

NORM, UP = "model.norm.weight", "model.layers.2.mlp.up_proj.weight"


def live(path, **settings):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings)


def moved(path, seed=0):
    """The model with noise on each parameter."""
    model, generator = live(path), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def dense(change):
    """All rows, read in several blocks."""
    found = [change.rows(at).numpy() for at in blocks(change.shape, 50)]
    assert len(found) > 1 or change.shape[0] == 1 or np.prod(change.shape) <= 50
    return np.concatenate(found)


def check(found, model, base):
    """All changes are those of the models' own parameters, by their names in checkpoints."""
    new, old = unfused(model), unfused(base)
    assert set(found) == set(new)
    for name, change in found.items():
        expected = new[name].detach().double().numpy() - old[name].detach().double().numpy()
        np.testing.assert_allclose(dense(change), expected, rtol=0, atol=1e-12, err_msg=name)
        assert change.square() == pytest.approx(float((expected**2).sum()), rel=1e-9)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe", "mixtral"])
def test_changes_of_a_checkpoint_that_the_library_saved(family, tmp_path):
    """Tied and untied; the experts of a layer fused in the library and apart in its files, or fused there, too."""
    base = build(family, tmp_path / "base")
    model, opened = moved(base), Base(make_config(base))
    model.save_pretrained(tmp_path / "new", max_shard_size="20KB")
    assert len(list((tmp_path / "new").glob("*.safetensors"))) > 1
    sources = [tmp_path / "new", model]
    if family in ("qwen3_moe", "mixtral"):
        (tmp_path / "fused").mkdir()
        fused = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        assert any(p.ndim == 3 for p in fused.values())
        save_file(fused, tmp_path / "fused/model.safetensors")
        sources.append(tmp_path / "fused")
    for source in sources:
        check(changes_of(source, opened), model, live(base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounding_alone_changed_is_no_change(dtype, tmp_path):
    """A checkpoint in half precision of a base in float32, one number of which was trained."""
    model = live(tiny())
    model.save_pretrained(tmp_path / "base")
    rounded = model.to(dtype)
    with torch.no_grad():
        rounded.get_parameter(NORM)[3] += 1
    rounded.save_pretrained(tmp_path / "new", max_shard_size="200KB")
    found = changes_of(tmp_path / "new", Base(make_config(tmp_path / "base")))
    changed = {name: np.flatnonzero(dense(change)).tolist() for name, change in found.items() if change.square()}
    assert changed == {NORM: [3]}
    assert found[NORM].square() == pytest.approx(1, abs=0.02)


def test_files_are_opened_anew_and_read_the_same(tmp_path, monkeypatch):
    """What was read of a mapped file counts as memory until it is closed."""
    opened = []
    plain = tensors.open_file
    monkeypatch.setattr(tensors, "open_file", lambda file: (opened.append(file), plain(file))[1])
    monkeypatch.setattr(tensors, "MAPPED", 10_000)
    file = tiny() / "model.safetensors"
    own, found = load_file(file), tensors.Files([file])
    for name, tensor in own.items():
        assert torch.equal(found[name], tensor) and found.shape(name) == tuple(tensor.shape)
        assert torch.equal(found.rows(name, slice(3, 9)), tensor[3:9])
    assert len(opened) > 20


def adapted(path, **settings):
    """An adapter made by PEFT."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(live(path), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    return model


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_an_adapter_of_peft_is_its_merged_weights_less_the_base(settings, tmp_path):
    model = adapted(tiny(), r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], **settings)
    model.save_pretrained(tmp_path)
    found = changes_of(tmp_path, Base(make_config("tiny")))
    assert all(isinstance(change, Product) and change.a.shape[0] == 4 for change in found.values())
    check_merged(found, model, tiny(), 12)


def check_merged(found, model, base, count):
    old = {name: p.detach().clone() for name, p in live(base).named_parameters()}
    new = {name: p.detach() - old[name] for name, p in model.merge_and_unload().named_parameters()}
    assert set(found) == {name for name, change in new.items() if bool(change.any())} and len(found) == count
    for name, change in found.items():
        np.testing.assert_allclose(dense(change), new[name].numpy(), rtol=0, atol=2e-6, err_msg=name)


def test_layers_that_keep_their_weights_the_other_way_round(tmp_path):
    """GPT-2's are [in, out], and one of them is square: a change taken for its transpose has the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    model.save_pretrained(tmp_path / "base")
    adapter = adapted(tmp_path / "base", r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    adapter.save_pretrained(tmp_path / "adapter")
    found = changes_of(tmp_path / "adapter", Base(make_config(tmp_path / "base")))
    assert found["transformer.h.0.attn.c_proj.weight"].shape == (16, 16)
    check_merged(found, adapter, tmp_path / "base", 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda s: s.update({UP: s[UP][:, :50].clone()}), rf"{UP} has shape \[288, 50\], not \[288, 96\]"),
     (lambda s: s.pop(NORM), f"has no {NORM}"),
     (lambda s: s.update({UP.replace("2", "4"): s[UP].clone()}), "has no model.layers.4.mlp.up_proj")],
    ids=["shape", "missing", "more"],
)  # fmt: skip
def test_a_checkpoint_of_another_model(change, said, tmp_path):
    shutil.copytree(tiny(), tmp_path / "new")
    state = load_file(tmp_path / "new/model.safetensors")
    change(state)
    save_file(state, tmp_path / "new/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        changes_of(tmp_path / "new", Base(make_config("tiny")))


@pytest.mark.parametrize(
    ("factor", "change", "said"),
    [("lora_A", lambda t: t[:, :50].clone(), r"q_proj.weight .*not \[96, 50\]"),
     ("lora_B", lambda t: t[:, :2].clone(), r"q_proj.lora_A.weight \[4, 96\] and its lora_B \[96, 2\] do not fit"),
     ("lora_B", lambda _: None, r"has no model.layers.0.self_attn.q_proj.lora_B.weight"),
     (None, "pissa", r"more than plain LoRA .*pissa.*merge it with PEFT"),  # its base is another one from the start
     (None, "lm_head", r"no lm_head.weight of shape \[1024, 96\]")],
    ids=["shape", "ranks", "missing", "pissa", "tied head"],
)  # fmt: skip
def test_an_adapter_of_another_model_or_form_is_refused(factor, change, said, tmp_path):
    modules = ["q_proj", *(["lm_head"] if change == "lm_head" else [])]
    adapted(tiny(), r=4, lora_alpha=6, target_modules=modules).save_pretrained(tmp_path, save_embedding_layers=False)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    if factor:
        state, name = load_file(file), f"base_model.model.model.layers.0.self_attn.q_proj.{factor}.weight"
        state[name] = change(state[name])
        save_file({n: t for n, t in state.items() if t is not None}, file)
    elif change == "pissa":
        config.write_text(config.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    with pytest.raises(ModelError, match=said):
        changes_of(tmp_path, Base(make_config("tiny")))


@pytest.mark.parametrize("case", ["pack-quantized, 4 bits", "awq", "gptq, act order", "fp8, blocks", "int-quantized"])
def test_a_quantised_base_is_measured_by_its_unpacked_numbers(case, tmp_path):
    """Blocks of rows of one tensor are unpacked once."""
    numbers = quantise(case, tiny(), tmp_path / "packed")
    for dtype in (None, torch.bfloat16):
        opened = Base(make_config(tmp_path / "packed"), dtype)
        assert opened.files[UP] is opened.files[UP]
        for name in opened.specs:
            wanted = numbers[name].to(opened.served(name).dtype)
            assert torch.equal(opened.served(name), wanted), name
            assert opened.square(name) == pytest.approx(float(wanted.double().square().sum()), rel=1e-9)


def test_a_quantised_base_that_lacks_a_tensor_or_is_not_read_as_numbers_is_refused(tmp_path):
    folder = tmp_path / "packed"
    quantise("pack-quantized, 4 bits", tiny(), folder)
    found = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in found.items() if name != NORM}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"have no {NORM} of shape"):
        Base(make_config(folder))
    parts = {f"{UP}_{part}": found[f"{UP}_{part}"].repeat(2, 1) for part in ("packed", "scale")}
    parts[f"{UP}_shape"] = found[f"{UP}_shape"] * torch.tensor([2, 1])
    save_file(found | parts, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"its {UP} is unpacked to shape"):
        Base(make_config(folder)).square(UP)
    tree = json.loads((folder / "config.json").read_text())
    tree["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"is quantised \(bitsandbytes, 4 bits\), and its weights are not read"):
        Base(make_config(folder))


def test_threads_read_several_files_at_once(tmp_path, monkeypatch):
    live(tiny()).save_pretrained(tmp_path, max_shard_size="500KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    own, names = tensors.open_file, random.Random(0).sample(list(whole), len(whole))
    monkeypatch.setattr(tensors, "open_file", lambda file: (time.sleep(0.001), own(file))[1])
    found = tensors.Files(shards)
    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(found.__getitem__, names))
    assert len(shards) > 2 and all(torch.equal(tensor, whole[name]) for name, tensor in zip(names, read, strict=True))
