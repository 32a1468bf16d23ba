# SPDX-License-Identifier: Apache-2.0
"""Quantised bases in this process: their numbers, what is refused, and a run on one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import PROMPTS, Bench, build, make_config, requests
from quantised_models import CASES, quantise
from safetensors.torch import load_file, save_file
from small_runs import UNCHECKED, told_by
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import evoalign
from evoalign import engines, tokens
from evoalign.config import ModelConfig
from evoalign.engines import weights_hash
from evoalign.engines.specs import specs_of_config
from evoalign.engines.transformers.engine import is_base, load_model
from evoalign.errors import ConfigError, ModelError
from evoalign.models import unpack
from evoalign.models.files import INDEX, MODEL, load_whole
from evoalign.models.forms import quantised
from evoalign.models.origin import described
from evoalign.models.quantised import files_hash
from evoalign.rundir import journal
from evoalign.types import Sampling

FORMS = {case.partition(",")[0] for case in CASES}
Q = "model.layers.1.mlp.up_proj."


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return build("llama", tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def made(source, tmp_path):
    """Return a function that quantises the model: its folder and its weights."""

    def make(case: str) -> tuple[Path, dict[str, torch.Tensor]]:
        return tmp_path / "packed", quantise(case, source, tmp_path / "packed")

    return make


def change(folder: Path, tensors=(), **settings) -> None:
    """Replace tensors, None removes one, and settings of the quantization_config."""
    found = load_file(folder / MODEL) | dict(tensors)
    save_file({k: t for k, t in found.items() if t is not None}, folder / MODEL, metadata={"format": "pt"})
    tree = json.loads((folder / "config.json").read_text())
    tree["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(tree))


def load(folder: Path, dtype=torch.float32):
    return load_whole(str(folder), None, dtype, "mine")


@pytest.mark.parametrize("case", CASES)
def test_weights_are_read_to_the_bit(case, made):
    folder, wanted = made(case)
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype)
        found = dict(model.named_parameters())
        assert found.keys() == wanted.keys() and model.dtype == dtype
        assert [n for n in wanted if not torch.equal(found[n], wanted[n].to(dtype))] == []
        assert all(p.is_contiguous() for p in found.values()) and not hasattr(model.config, "quantization_config")


def test_the_layout_of_gptq_has_a_newer_name(made):
    folder, wanted = made("gptq, v2")
    tree = json.loads((folder / "config.json").read_text())
    tree["quantization_config"]["format"] = tree["quantization_config"].pop("checkpoint_format")
    (folder / "config.json").write_text(json.dumps(tree))
    found = dict(load(folder).named_parameters())
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_every_form_of_the_engine_is_tested():
    assert make_config().engine.quantised == FORMS == unpack.FORMS


def test_experts_of_a_mixture_are_read(tmp_path):
    source = build("qwen3_moe", tmp_path / "whole")
    wanted = quantise("pack-quantized, 4 bits", source, tmp_path / "packed")
    found = load(tmp_path / "packed").model.layers[1].mlp.experts
    for part, rows in (("gate_proj", slice(0, 16)), ("up_proj", slice(16, 32))):
        assert torch.equal(found.gate_up_proj[3, rows], wanted[f"model.layers.1.mlp.experts.3.{part}.weight"])


WORD = torch.zeros(5, 5, dtype=torch.int32)
DAMAGES = {
    "no scale": ("pack-quantized, 4 bits", {"weight_scale": None}, rf"lack {Q}weight_scale"),
    "no shape": ("pack-quantized, 4 bits", {"weight_shape": None}, rf"lack {Q}weight_shape"),
    "another shape": ("pack-quantized, 4 bits", {"weight_shape": torch.tensor([48, 40])}, r"weight_packed' of shape"),
    "words of floats": ("pack-quantized, 4 bits", {"weight_packed": torch.zeros(48, 4)}, r"weight_packed' in F32"),
    "no zero points": ("pack-quantized, 4 bits, asymmetric", {"weight_zero_point": None}, "lack .*zero_point"),
    "groups": ("pack-quantized, 4 bits", {"weight_scale": torch.ones(48, 3)}, "3 groups for 32 columns"),
    "order": ("gptq, act order", {"g_idx": torch.full((32,), 2, dtype=torch.int32)}, "groups that are none of its 2"),
    "no order": ("gptq, act order", {"g_idx": None}, "lack .*g_idx"),
    "zero point of 16": ("gptq, 4 bits", {"qzeros": torch.full((2, 6), -1, dtype=torch.int32)}, "zero point of 16"),
    "zeros of awq": ("awq", {"qzeros": WORD}, r"qzeros' of shape \(5, 5\) instead of \(2, 6\)"),
    "words of awq": ("awq", {"qweight": WORD}, r"scales' of shape \(2, 48\) instead of \(2, 40\)"),
    "blocks": ("fp8, blocks", {"weight_scale_inv": torch.ones(2, 2)}, r"of shape \(2, 2\) instead of \(3, 1\)"),
    "fp8 without scale": ("fp8, tensor", {"weight_scale": None}, "weight' in F8_E4M3"),
    "weight beside a packed one": ("awq", {"weight": torch.ones(48, 32)}, "up_proj.weight' beside"),
    "a bias that no layer has": ("awq", {"bias": torch.ones(48)}, "up_proj.bias', which transformers leaves out"),
    "scales of another part": ("awq", {"act.scales": torch.ones(48)}, "scales' of a weight that is not"),
    "a packed tensor of no layout": ("awq", {"gate": torch.ones(4, 4).to(torch.float8_e4m3fn)}, "gate' in F8_E4M3"),
    "another weight": ("awq", dict.fromkeys(("qweight", "qzeros", "scales")), rf"files lack {Q}weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused(name, made):
    case, parts, message = DAMAGES[name]
    folder, _ = made(case)
    change(folder, {Q + part: tensor for part, tensor in parts.items()})
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert str(caught.value).isprintable()


FIRST = "pack-quantized, 4 bits"
SETTINGS = {
    "bits 3": ("gptq, 4 bits", {"bits": 3}),
    "checkpoint_format 'marlin'": ("gptq, 4 bits", {"checkpoint_format": "marlin"}),
    "is_marlin_format": ("gptq, 4 bits", {"is_marlin_format": True}),
    "format 'gptq_p'": ("gptq, 4 bits", {"checkpoint_format": None, "format": "gptq_p"}),
    "format 'llm-awq'": ("awq", {"version": None, "format": "llm-awq"}),
    "dynamic": ("gptq, 4 bits", {"dynamic": {"-:x": {}}}),
    "version 'gemv'": ("awq", {"version": "GEMV"}),
    "transform_config": (FIRST, {"transform_config": {"config_groups": {"R1": {}}}}),
    "sparsity_config 'sparse-24-bitmask'": (FIRST, {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    "version '4'": ("awq", {"version": 4}),
    "sparsity_config 'x'": (FIRST, {"sparsity_config": "x"}),
    "num_bits 3": (FIRST, {"config_groups": {"a": {"format": "pack-quantized", "weights": {"num_bits": 3}}}}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_packing_that_is_not_read_is_refused(setting, made):
    case, settings = SETTINGS[setting]
    folder, _ = made(case)
    change(folder, **settings)
    with pytest.raises(
        ModelError, match=rf"with {setting}.*, which is not read here; use engine vllm, or set"
    ) as caught:
        load(folder)
    assert str(caught.value).isprintable()
    with pytest.raises(ModelError, match=f"with {setting}"):  # a dry run, before a file is opened
        specs_of_config(make_config(folder))


@pytest.mark.parametrize("case", ["fp8, tensor", "bitsandbytes, 8 bits", "awq", "pack-quantized, 4 bits"])
@pytest.mark.parametrize("inner", [False, True])
def test_packed_files_without_a_quantization_config_are_refused(case, inner, made):
    folder, _ = made(case)
    tree = json.loads((folder / "config.json").read_text())
    own = tree.pop("quantization_config")
    (folder / "config.json").write_text(
        json.dumps(tree | ({"text_config": {"quantization_config": own}} if inner else {}))
    )
    with pytest.raises(
        ModelError, match="in text_config, which is not read" if inner else "config.json no quantization"
    ):
        load(folder)


def test_fused_fp8_experts_are_refused(tmp_path):
    folder = build("qwen3_moe", tmp_path / "model")
    tensors = load_file(folder / MODEL)
    for name in [name for name in tensors if ".experts." in name]:
        tensors.pop(name)
    place = "model.layers.{}.mlp.experts.{}"
    for layer in (0, 1):
        for part, shape in (("gate_up_proj", (4, 32, 32)), ("down_proj", (4, 32, 16))):
            tensors[place.format(layer, part)] = torch.ones(shape).to(torch.float8_e4m3fn)
            tensors[place.format(layer, f"{part}_scale_inv")] = torch.ones(4, 1, 1)
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(1)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})
    tree = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"in F8_E4M3|not packed in a known way"):
        load(folder)


def test_a_packed_head_of_a_tied_model_is_refused(made):
    folder, _ = made("awq")
    whole = load_file(folder / MODEL)
    parts = {f"lm_head.{part}": whole[Q + part].clone() for part in ("qweight", "qzeros", "scales")}
    whole.pop("lm_head.weight", None)
    save_file(whole | parts, folder / MODEL, metadata={"format": "pt"})
    tree = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"packed lm_head.weight, and tie_word_embeddings"):
        load(folder)


def test_biases_of_zeros_that_no_layer_has_are_left_out(made):
    folder, wanted = made("gptq, 4 bits")
    change(folder, {Q + "bias": torch.zeros(48)})
    assert torch.equal(load(folder).get_parameter(Q + "weight"), wanted[Q + "weight"])


@pytest.mark.parametrize("value", [None, 0, "ab", [128], [0, 4], ["x", "y"], {"a": 1}])
def test_odd_blocks_are_refused_in_one_line(value, made):
    folder, _ = made("fp8, blocks")
    change(folder, weight_block_size=value)
    with pytest.raises(ModelError, match="instead of"):
        load(folder)


def test_spaces_that_move_weights_and_the_width_by_weights_are_refused(made):
    folder, _ = made("awq")
    configs = [make_config(folder, space) for space in ("full", "lowrank", "norms")]
    configs.append(make_config(folder, es={"noise_multiplier": 0.1}))
    for config in configs:
        for read in (specs_of_config, lambda c: engines.create(c, tokens.load(c.model))):
            with pytest.raises(ConfigError, match=r"is quantised \(AWQ, 4 bits, groups of 16\)"):
                read(config)


def test_noise_is_that_of_the_base_in_full_precision(source, made):
    folder, _ = made("gptq, 4 bits")
    with Bench(make_config(source)) as plain, Bench(make_config(folder)) as packed:
        assert packed.layout == plain.layout
        plan, shown = plain.plan(), []
        for bench in (plain, packed):
            bench.move()
            mean = dict(bench.engine.state())
            adapters = [
                bench.space.adapter(bench.layout, m, mean.__getitem__, plan, plan.members[:3])
                for m in bench.layout.modules
            ]
            shown.append([t for a in adapters if a is not None for t in (a.a, a.b)] + list(mean.values()))
        assert all(map(torch.equal, *shown)) and len(shown[0]) > 20


def test_a_run_is_replayed_and_resumed_to_the_bit(made, tmp_path):
    folder, _ = made("pack-quantized, 4 bits, asymmetric")
    tree = {
        "output_dir": str(tmp_path / "whole"), "seed": 5, "space": "lora", "model": {"name": str(folder)},
        "es": {"sigma": 0.05, "learning_rate": 0.05, "num_generations": 2, "population_size": 4},
        "task": {"name": "conciseness", "batch_size": 2}, "checkpoint": {"every": 1}, "checks": UNCHECKED,
        "evaluation": {"max_tokens": 4}, "sampling": {"max_tokens": 4},
    }  # fmt: skip
    assert "compressed-tensors, packed integers, 4 bits" in told_by(tree)
    halted = {**tree, "output_dir": str(tmp_path / "halted")}
    told_by({**halted, "es": {**tree["es"], "num_generations": 1}})
    told_by(halted, resume=True)
    whole, resumed = (journal.read(tmp_path / name / "journal.jsonl") for name in ("whole", "halted"))
    assert whole.header.model_hash == files_hash(str(folder), None, "mine")
    assert len({g.weights_hash for g in whole.generations} | {whole.header.weights_hash}) == 3
    assert [g.weights_hash for g in resumed.generations] == [g.weights_hash for g in whole.generations]
    assert evoalign.replay(tmp_path / "whole") == whole.generations[-1].weights_hash


def test_files_hash_depends_on_tensors_and_how_they_are_read(made, tmp_path):
    folder, _ = made("awq")
    whole = load_file(folder / MODEL)
    first = files_hash(str(folder), None, "mine")
    parts = [{k: t for i, (k, t) in enumerate(whole.items()) if i % 2 == n} for n in range(2)]
    (folder / MODEL).unlink()
    for n, part in enumerate(parts):
        save_file(part, folder / f"{n}.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {k: f"{n}.safetensors" for n, p in enumerate(parts) for k in p}})
    )
    assert files_hash(str(folder), None, "mine") == first
    whole[Q + "scales"].view(torch.int16)[0, 0] ^= 1
    save_file(whole, folder / MODEL)
    assert files_hash(str(folder), None, "mine") != first
    whole[Q + "scales"].view(torch.int16)[0, 0] ^= 1
    save_file(whole, folder / MODEL)
    assert files_hash(str(folder), None, "mine") == first
    change(folder, group_size=8)  # the same files, read otherwise
    assert files_hash(str(folder), None, "mine") != first


@pytest.fixture(scope="module")
def four_bits(source, tmp_path_factory) -> Path:
    """The model in NF4 with packed scales, made by bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("four_bits") / "model"
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16"
    )
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=how, dtype="bfloat16", device_map="cpu")
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder)
    return folder


def test_weights_of_bitsandbytes_stay_packed(source, four_bits):
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    asked = requests(PROMPTS["apart"], Sampling(6, temperature=0.0))
    with Bench(make_config(source)) as plain, Bench(make_config(four_bits)) as packed:
        assert [replace(spec, mean_abs=None) for spec in plain.engine.specs()] == [
            replace(spec, mean_abs=None) for spec in packed.engine.specs()
        ]
        assert {s.name for s in packed.engine.specs() if s.mean_abs is None} == set(packed.layout.modules)
        linears = {f"{n}.weight": m for n, m in packed.model.named_modules() if isinstance(m, Linear4bit)}
        assert linears.keys() == set(packed.layout.modules) and "stay packed" in packed.facts.note
        for name, weight in plain.model.named_parameters():
            own = packed.model.get_parameter(name)
            weight.data.copy_(dequantize_4bit(own.data, own.quant_state) if name in linears else own)
        plain.move(), packed.move()
        texts = [{key: r.token_ids for key, r in b.ask(b.plan(), asked).items()} for b in (plain, packed)]
        assert texts[0] == texts[1] and len(set(texts[0].values())) > 30


@pytest.mark.parametrize("part", ["absmax", "nested_absmax", "quant_map"])
def test_parts_of_bitsandbytes_of_another_size_are_refused(part, four_bits, tmp_path):
    """Its library would read beyond the end of a short one."""
    folder = tmp_path / "model"
    shutil.copytree(four_bits, folder)
    whole = load_file(folder / MODEL)
    own = whole[f"{Q}weight.{part}"]
    whole[f"{Q}weight.{part}"] = own[: len(own) // 2].clone() if len(own) > 1 else torch.cat([own, own])
    save_file(whole, folder / MODEL, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="do not fit"):
        load(folder)


def test_bitsandbytes_is_named_if_it_is_not_installed(made, monkeypatch):
    folder, _ = made("bitsandbytes, 8 bits")
    change(folder, load_in_8bit=False, load_in_4bit=True)
    monkeypatch.setattr("evoalign.models.four_bits.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'not installed: pip install "evoalign\[bitsandbytes\]"'):
        load(folder)


def test_a_mixture_is_known_by_its_weights_or_its_files(source, tmp_path):
    for folder, by_files in ((build("qwen3_moe", tmp_path / "mixture"), True), (source, False)):
        config = ModelConfig(name=str(folder))
        model = load_model(config, torch.float32)
        assert is_base(weights_hash(model.named_parameters()), config, model)
        assert is_base(files_hash(*described(config), "mine"), config, model) == by_files
        with torch.no_grad():
            model.model.norm.weight[0] += 1
        assert not is_base(weights_hash(load_model(config, torch.float32).named_parameters()), config, model)


@pytest.mark.parametrize("value", [None, 0, True, "x", [], {"a": 1}, [[]], 10**30])
@pytest.mark.parametrize(
    "place", ["", "quant_method", "format", "config_groups", "group", "weights", "num_bits", "group_size"]
)
def test_odd_settings_are_described_or_refused(place, value):
    weights = {"num_bits": 4, "group_size": 32}
    group = {"weights": weights, "format": None}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group": group}}
    for owner in (settings, settings["config_groups"], group, weights):
        if place in owner:
            owner[place] = value
    try:
        found = quantised("m", {"quantization_config": settings if place else value})
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert found is None or (found.bits in (None, 4, 0, 10**30) and "True" not in found.words)
