# SPDX-License-Identifier: Apache-2.0
"""Convert a GGUF file of a Llama or Qwen2 model to a Hugging Face folder.

    python recipes/gguf/convert.py FILE.gguf --to DIR

Needs `gguf` (pip install --no-deps gguf) and no network. transformers reads config, weights and tokenizer from the
file; this recipe refuses what transformers would read wrongly, and adds what it leaves out: the scaled frequencies of
Llama 3.1, the end tokens, SmolLM's splitting of digits.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

ARCHITECTURES = ("llama", "qwen2")
KEYS = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count", "vocab_size",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
    "attention.key_length", "attention.value_length", "tensor_data_layout",
)  # fmt: skip
"""Settings of an architecture that are converted. A file with another one is refused."""
SPLITS = ("llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "gpt-2", "smollm")
"""Values of tokenizer.ggml.pre, the rule by which text is split, that are converted correctly."""
BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
"""Control tokens that end a text in llama.cpp, next to the end token that the file names."""
ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CARD = """---
{head}
---

# {name}, dequantised

**These are not the original weights.** They are the weights of a GGUF file in {quantisation}, written as {dtype}.
Figures measured with this folder are not figures of the original model.

| | |
| --- | --- |
| made by | `recipes/gguf/convert.py` of evoalign, with transformers {transformers} and gguf {gguf} |
| from | `{file}`{origin} |
| SHA-256 of that file | `{sha256}` |
| tensors in that file | {tensors} |
| weights | {dtype}; {count:,} parameters, embeddings {tied} |
| tokenizer | of that file; {template} |
| licence | {licence} |
"""


def stop(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    sys.exit(print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr) or 2)


def read(source: Path) -> Any:
    """Open the file with the package gguf."""
    if not source.is_file():
        stop(f"{source} is no file")
    if importlib.util.find_spec("gguf") is None:
        stop("the package gguf is not installed: pip install --no-deps gguf")
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        stop(f"{source} is no whole GGUF file of version 2 or 3: {error}")


def metadata(reader: Any) -> dict[str, Any]:
    """Return the keys and values of the file."""
    return {key: field.contents() for key, field in reader.fields.items()}


def check(source: Path, found: Mapping[str, Any], reader: Any) -> None:
    """Stop if the file holds something that would not be converted correctly."""
    kind, what = found.get("general.architecture"), found.get("general.type", "model")
    if kind not in ARCHITECTURES or what != "model":
        stop(
            f"{source} is a GGUF of type {what!r}, architecture {kind!r}; only models of {' and '.join(ARCHITECTURES)}"
        )
    if found.get("split.count", 1) > 1 or re.search(r"-\d{5}-of-\d{5}\.gguf$", source.name):
        stop(f"{source} is one part of a split file; join the parts first: llama-gguf-split --merge FIRST_PART WHOLE")
    other = sorted(
        key for key, value in found.items()
        if key.startswith(f"{kind}.") and key.removeprefix(f"{kind}.") not in KEYS
        and (key.removeprefix(f"{kind}."), value) != ("rope.scaling.type", "none")
    )  # fmt: skip
    if other:
        stop(f"{source} sets {', '.join(other)}, which this recipe does not convert")
    width = found[f"{kind}.embedding_length"] // found[f"{kind}.attention.head_count"]
    width = found.get(f"{kind}.rope.dimension_count", width) if kind == "llama" else width
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if found.get(f"{kind}.{key}", width) != width:
            stop(f"{source} has {kind}.{key} {found[f'{kind}.{key}']}, and {width} dimensions per head; not converted")
    model, split, tokens = (found.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "tokens"))
    if not model or not tokens:
        stop(f"{source} has no tokenizer; convert a file with one")
    if model not in ("gpt2", "llama") or (model == "gpt2" and split not in SPLITS):
        stop(f"{source} has a tokenizer {model!r} that splits text as {split!r}; only 'llama', or {', '.join(SPLITS)}")
    rows = next((int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"), 0)
    if rows != len(tokens):
        stop(f"{source} has {len(tokens):,} tokens and {rows:,} embeddings; convert a file where both agree")


def tokenizer_of(source: Path, found: Mapping[str, Any]) -> Any:
    """Load the tokenizer with its chat template."""
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    split = found.get("tokenizer.ggml.pre")
    # llama.cpp's default where the file has no flag.
    bos = {"add_bos_token": True} if split in BOS_BY_DEFAULT and "tokenizer.ggml.add_bos_token" not in found else {}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, **bos)
    if split == "smollm":
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer


def config_of(source: Path, reader: Any) -> Any:
    """Load the config, with the scaling of Llama 3.1, of which the file holds only the factors per frequency."""
    import numpy as np
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    factors = next((np.array(t.data, dtype=np.float64) for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        theta = config.rope_parameters["rope_theta"]
        plain = theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        config.rope_parameters = {**ROPE, "rope_theta": theta, "factor": float(factors.max())}
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        if factors.shape != plain.shape or not np.allclose(plain / factors, scaled, rtol=1e-4, atol=0):
            stop(f"{source} has rope_freqs that are not those of Llama 3.1; not converted")
    return config


def model_of(source: Path, dtype: str, found: Mapping[str, Any], reader: Any) -> Any:
    """Load the model in `dtype`, with no trace of the quantisation in its config."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, config=config_of(source, reader), dtype=getattr(torch, dtype),
        output_loading_info=True,
    )  # fmt: skip
    inside = {tensor.name for tensor in reader.tensors} - {"rope_freqs.weight"}
    wanted = sum(1 for _ in model.parameters())
    if report["missing_keys"] or report["mismatched_keys"] or len(inside) != wanted:
        stop(f"{source} has {len(inside)} tensors where {model.config.model_type} of this shape has {wanted}")
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.config.name_or_path = found.get("general.name") or source.stem
    named, tokens = found.get("tokenizer.ggml.eos_token_id"), found["tokenizer.ggml.tokens"]
    kinds = found.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    ends = [n for n, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if token in ENDS and kind == 3]
    ids = list(dict.fromkeys([*([named] if named is not None else []), *ends]))
    model.generation_config.eos_token_id = ids if len(ids) > 1 else next(iter(ids), None)
    return model


def card_of(source: Path, found: Mapping[str, Any], reader: Any, model: Any, **facts: str) -> str:
    """Return the model card: what the folder is, and from which file it was made."""
    from gguf import LlamaFileType

    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    most = max((name for name in counts if name not in ("F32",)), key=lambda name: counts[name], default="F32")
    kind = found.get("general.file_type")
    kinds = {int(each): each.name for each in LlamaFileType}
    with source.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    base = facts.get("base_model") or found.get("general.base_model.0.repo_url", "").removeprefix(
        "https://huggingface.co/"
    )
    licence, languages = found.get("general.license"), found.get("general.languages")
    head = {
        "license": licence, "language": languages and f"[{', '.join(languages)}]", "base_model": base,
        "pipeline_tag": "text-generation",
    }  # fmt: skip
    return CARD.format(
        head="\n".join(f"{key}: {value}" for key, value in head.items() if value),
        name=base or model.config.name_or_path,
        quantisation=kinds.get(kind, most).removeprefix("MOSTLY_").removeprefix("ALL_") if kind is not None else most,
        dtype=str(model.dtype).removeprefix("torch."),
        file=source.name,
        origin=facts.get("origin", ""),
        sha256=sha256,
        tensors=", ".join(f"{count} {name}" for name, count in counts.most_common()),
        count=sum(weight.numel() for weight in model.parameters()),
        tied="tied" if model.config.tie_word_embeddings else "not tied",
        template="with its chat template" if "tokenizer.chat_template" in found else "it has no chat template",
        licence=licence or "not named in the file; that of the original model",
        **{name: version(name) for name in ("transformers", "gguf")},
    )


def convert(source: Path, to: Path, dtype: str, **facts: str) -> None:
    """Write the folder under another name and rename it, so that it is complete or absent."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    source = source.absolute()
    reader = read(source)
    found = metadata(reader)
    check(source, found, reader)
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its advice on speed is for weights that stay quantised
    to.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        model = model_of(source, dtype, found, reader)
        model.save_pretrained(aside)
        tokenizer_of(source, found).save_pretrained(aside)
        (aside / "README.md").write_text(card_of(source, found, reader, model, **facts), encoding="utf-8")
        aside.chmod(0o755)
        aside.rename(to)  # fails if a folder that is not empty was created there meanwhile
    except OSError as error:
        stop(f"{to} could not be written: {error}")
    finally:
        logging.set_verbosity(verbosity)
        shutil.rmtree(aside, ignore_errors=True)
    print(f"{found.get('general.name') or source.stem} in {dtype} is in {to}")


def new(word: str) -> Path:
    """Return the path of a folder that does not exist yet."""
    if os.path.lexists(word):
        stop(f"{word} exists already; name another folder, or remove it first")
    return Path(word).absolute()


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every converter."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--to", type=new, required=True, help="folder to write; must not exist")
    found.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return found


def main() -> None:
    """Read the arguments and convert."""
    words = parser(__doc__)
    words.add_argument("source", type=Path, help="the GGUF file")
    words.add_argument("--base-model", default="", help="hub name of the original model, for the card")
    args = words.parse_args()
    convert(args.source, args.to, args.dtype, base_model=args.base_model)


if __name__ == "__main__":
    main()
