# SPDX-License-Identifier: Apache-2.0
"""Model folders: what loads has the weights of its file, its settings, stop tokens and chat template, bit for bit."""

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fuzzing import REFUSED, VALUES, FaultError, check, damage, judged, places, put, wrong_in
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from evoalign import tokens
from evoalign.config import from_dict
from evoalign.engines.specs import specs_of_config
from evoalign.engines.transformers.engine import load_model
from evoalign.models import templates, tiny

Tree = dict[str, Any]
WEIGHTS, INDEX, TEMPLATE = "model.safetensors", "model.safetensors.index.json", "chat_template.jinja"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why {{ 1 }}?"}]
TEMPLATES = {
    "{{ messages[1]['content'] }}": "Why {{ 1 }}?",
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}": "[system]Be brief.[user]Why {{ 1 }}?",
    "A{# no #}{{ messages|length }}{% if add_generation_prompt %}>{% endif %}": "A2>",
}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}a"
WRONG_TEMPLATES = (
    "{{ raise_exception('no\nno') }}", "{{ messages[9]['content'] }}", "{% if %}", "{{ 1 / 0 }}", "{{ [].__class__ }}",
    "", "{{ ''.join(messages) }}", "{% include 'a' %}", "{{ cycler.__init__.__globals__ }}", ENDLESS,
)  # fmt: skip
TEMPLATE_SECONDS = 4.0
"""That a template without an end may take here: less than a case may."""
KEPT = (
    "rms_norm_eps", "num_hidden_layers", "num_attention_heads", "hidden_act", "vocab_size", "max_position_embeddings",
)  # fmt: skip
"""Settings that are held against the file."""
SETTINGS: tuple[Tree, ...] = (
    {"rms_norm_eps": 1e-5}, {"max_position_embeddings": 64}, {"more": {"a": [1]}}, {"initializer_range": 0.5},
    {"architectures": None}, {"use_cache": False}, {"hidden_act": "gelu"}, {"dtype": None},
    {"transformers_version": "4.50.0"},
)  # fmt: skip
"""A setting that is None is removed."""
WRONG_SETTINGS: tuple[Tree | None, ...] = (
    {"num_hidden_layers": 2}, {"hidden_size": 32}, {"model_type": "nothing"}, {"vocab_size": 512},
    {"transformers_weights": WEIGHTS}, None, {"attn_implementation": "someone/kernel"}, {"num_attention_heads": 0},
    {"hidden_act": "none"}, {"use_kernels": True}, {"vocab_size": -5},
)  # fmt: skip
"""None: no setting at all."""
STOPS: tuple[Any, ...] = (3, [3], [3, 5], [])
WRONG_STOPS: tuple[Any, ...] = (-1, "a", [1.5], [[3]], {"a": 1}, True)


class ModelFolders:
    """A case: a one-layer model with other settings, weights, stop tokens or template; or one that is wrong."""

    aim = ""

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self.whole, self.folder = folder / "whole", folder / "model"
        torch.manual_seed(0)
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=1024, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True,
            )
        ).save_pretrained(self.whole)  # fmt: skip
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny() / name, self.whole)
        self.weights = load_file(self.whole / WEIGHTS)

    def attempt(self, draw: random.Random) -> bool:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        asked = self._change(draw)
        wrong = wrong_in(draw, self.aim, ["settings", "weights", "stops", "template", "value", "bytes", "files"])
        known: bool | None = not wrong
        if wrong:
            known = self._break(draw, wrong)
        with mock.patch.object(templates, "SECONDS", TEMPLATE_SECONDS):
            found = judged(self._read, valid=known)
        if found is REFUSED:
            return False
        model, loaded, text = found
        named = _tensors(self.folder)
        for name, parameter in model.named_parameters():
            raw = named.get(name)
            held = raw is not None and raw == parameter.detach().contiguous().numpy().tobytes()
            check(held, f"{name} is not what the file holds")
        settings = json.loads((self.folder / "config.json").read_text())
        for name in KEPT:
            check(name not in settings or settings[name] == getattr(model.config, name), f"{name} is another")
        stops = _stops(self.folder / "generation_config.json")
        own = {*stops, loaded.tokenizer.eos_token_id}
        check(set(stops) <= set(loaded.stop_ids) <= own, f"stops are {loaded.stop_ids}, not {stops}")
        check(asked is None or wrong in ("template", "bytes", "value") or text == asked, f"the prompt is {text!r}")
        return True

    def _read(self) -> tuple[Any, tokens.Tokens, str]:
        config = from_dict({"model": {"name": str(self.folder), "dtype": "float32"}})
        loaded = tokens.load(config.model)
        model = load_model(config.model, torch.float32)
        specs_of_config(config)
        return model, loaded, loaded.decode(loaded.encode(ASKED))

    def _change(self, draw: random.Random) -> str | None:
        """Valid changes; the prompt that they make, where that is known."""
        config, asked = self.folder / "config.json", None
        tree = json.loads(config.read_text())
        for change in draw.sample(SETTINGS, draw.randint(0, 3)):
            tree = {name: value for name, value in (tree | change).items() if value is not None or name not in change}
        config.write_text(json.dumps(tree, indent=draw.choice([None, 2]), sort_keys=draw.choice([True, False])))
        if draw.choice([True, False]):
            generation = {"eos_token_id": draw.choice(STOPS), "do_sample": False}
            (self.folder / "generation_config.json").write_text(json.dumps(generation))
        if draw.choice([True, False]):
            template = draw.choice(sorted(TEMPLATES))
            (self.folder / TEMPLATE).write_text(template)
            asked = TEMPLATES[template]
        form = draw.choice(["same", "other", "shards"])
        if form != "same":
            factor = draw.choice([-1.0, 0.0, 3.0])
            weights = {name: tensor * factor for name, tensor in self.weights.items()}
            save_file(weights, self.folder / WEIGHTS, draw.choice([{"format": "pt"}, {"format": "pt", "a": "é"}]))
            if form == "shards":
                self._shard(weights)
        return asked

    def _shard(self, weights: dict[str, torch.Tensor]) -> None:
        names = sorted(weights)
        (self.folder / WEIGHTS).unlink()
        of = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in sorted(set(of.values())):
            part = {name: weights[name] for name in names if of[name] == file}
            save_file(part, self.folder / file, metadata={"format": "pt"})
        (self.folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": of}))

    def _break(self, draw: random.Random, wrong: str) -> bool | None:
        """An invalid change; False where it has to be refused."""
        config = self.folder / "config.json"
        if wrong == "settings":
            change = draw.choice(WRONG_SETTINGS)
            config.write_text(json.dumps({} if change is None else json.loads(config.read_text()) | change))
            return False
        if wrong == "stops":
            (self.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": draw.choice(WRONG_STOPS)}))
            return False
        if wrong == "template":
            (self.folder / TEMPLATE).write_text(draw.choice(WRONG_TEMPLATES))
            return None
        files = sorted(f for f in self.folder.iterdir() if f.suffix in (".json", ".safetensors"))
        if wrong == "value":
            file = draw.choice([f for f in files if f.suffix == ".json" and f.name != "tokenizer.json"])
            tree = json.loads(file.read_text())
            file.write_text(json.dumps(put(tree, draw.choice(sorted(places(tree), key=str)), draw.choice(VALUES))))
            return None
        if wrong == "weights":
            return self._break_weights(draw, draw.choice([f for f in files if f.suffix == ".safetensors"]))
        file = draw.choice(files)
        if wrong == "files":
            file.unlink()
            return None if file.name in ("generation_config.json", "tokenizer_config.json") else False
        file.write_bytes(damage(draw, file.read_bytes()))
        return None

    def _break_weights(self, draw: random.Random, file: Path) -> bool:
        raw, weights = file.read_bytes(), load_file(file)
        name = draw.choice(sorted(weights))
        how = draw.choice(["lacks", "shape", "length", "huge", "header", "empty", "nested"])
        if how == "lacks":
            save_file({n: t for n, t in weights.items() if n != name} or {"x": torch.zeros(1)}, file, {"format": "pt"})
        elif how == "shape":
            save_file({**weights, name: torch.zeros(3, 5)}, file, metadata={"format": "pt"})
        elif how == "nested":
            header = b"[" * 5000
            file.write_bytes(struct.pack("<Q", len(header)) + header)
        else:
            bad = {"length": raw[:-4], "huge": struct.pack("<Q", 2**63) + raw[8:], "header": raw[:8] + b"x" + raw[9:]}
            file.write_bytes(bad.get(how, b""))
        return False


def _tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor, by a reader of its own: eight bytes of length, a header of JSON, the data."""
    found: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = raw[8 + size + start : 8 + size + end]
    return found


def _stops(file: Path) -> list[int]:
    try:
        found = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError):
        raise FaultError("silent", f"{file.name}, which cannot be read, was passed over") from None
    return found if isinstance(found, list) else [] if found is None else [found]
