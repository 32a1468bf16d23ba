# SPDX-License-Identifier: Apache-2.0
"""Small models that score, with weights drawn here and the tokenizer of the tiny model that ships."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel

from evoalign.models import tiny

WORDS = "red blue seven river stone quick lamp green apple north why because never old".split()  # noqa: SIM905


def text(seed, words):
    """Return a text of `words` words that depends on the seed."""
    drawn = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[i] for i in drawn)


def pairs(count, seed=0):
    """Prompts and responses of very different lengths."""
    prompts = [text(seed + 2 * i, 1 + i % 13) for i in range(count)]
    return prompts, [text(seed + 2 * i + 1, (7 * i) % 41) for i in range(count)]


def tokenizer_into(folder, **changes):
    """The tiny model's tokenizer, its settings changed."""
    shutil.copy(tiny() / "tokenizer.json", folder)
    tree = json.loads((tiny() / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(tree))


def body_config(**changes):
    """Two layers, grouped queries."""
    tree = {
        "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**(tree | changes))


def safe_rlhf(folder, *, seed=0, scale=1.0, said=None):
    """A folder as Safe RLHF saves its models: `model.*`, `score_head.*` and `normalizer.*`, `LlamaForScore`."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    body = LlamaModel(body_config())
    tensors = {f"model.{name}": tensor.clone() for name, tensor in body.state_dict().items()}
    tensors |= {
        "score_head.weight": scale * torch.randn(1, 32) / 32**0.5,
        "score_head.bias": torch.randn(1),
        "normalizer.mean": torch.tensor([0.75]),
        "normalizer.var": torch.tensor([4.0]),
        "normalizer.count": torch.tensor([7]),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tree = body.config.to_dict() | {
        "architectures": ["LlamaForScore"], "score_dim": 1, "score_type": "reward", "score_bias": True,
        "do_normalize": False, "normalizer_type": None, "momentum": None, **(said or {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(tree))
    tokenizer_into(folder)
    return folder


def classifier(folder, *, labels=1, seed=1, **changes):
    """A folder with a sequence classifier of the model library."""
    torch.manual_seed(seed)
    LlamaForSequenceClassification(body_config(num_labels=labels, **changes)).save_pretrained(folder)
    tokenizer_into(folder)
    return folder


def change(folder, name, **changes):
    """Settings of a JSON file; None takes one out."""
    tree = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def without(folder, prefix):
    """Remove the tensors whose names begin so."""
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if not name.startswith(prefix)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def forward_by_hand(folder, ids):
    """The end score of a Llama body and a linear head, from the tensors alone: the paper's equations, one token row
    after another, in float64."""
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    heads, groups, width = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    size, eps = width // heads, config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    angles = torch.arange(len(ids)).double()[:, None] / theta ** (torch.arange(0, size, 2).double() / size)
    turn = torch.polar(torch.ones_like(angles), angles)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * tensors[name]

    def rotated(x):  # [tokens, heads, size]: halves are the two parts of complex numbers
        turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (h @ tensors[f"{at}self_attn.{part}_proj.weight"].T).view(len(ids), -1, size) for part in ("q", "k", "v")
        )
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (rotated(k), v))
        logits = torch.einsum("qhd,khd->hqk", rotated(q), k) / size**0.5
        logits = logits.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).reshape(len(ids), width)
        x = x + mixed @ tensors[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ tensors[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ tensors[at + "mlp.down_proj.weight"].T
    last = norm(x[-1], "model.norm.weight")
    return float(last @ tensors["score_head.weight"][0] + tensors["score_head.bias"][0])
