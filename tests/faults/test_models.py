# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers that are damaged, incomplete or of a kind that cannot be carried: one clear error each."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from families import COMMON, VOCABULARY, build, make_config
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import evoalign
from evoalign import engines, tokens
from evoalign.config import ModelConfig
from evoalign.engines.specs import specs_of_config
from evoalign.errors import EvoalignError, ModelError
from evoalign.models import templates, tiny
from evoalign.tokens import Tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build("llama", tmp_path / "model")


def load(folder: Path) -> Any:
    config = make_config(folder)
    return engines.create(config, tokens.load(config.model))


def rewrite(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, file, metadata={"format": "pt"})


def test_a_whole_model_loads(folder: Path) -> None:
    load(folder).close()


def test_a_tensor_that_is_missing_is_named(folder: Path) -> None:
    """The model library would start it at random and go on."""
    rewrite(folder, "model.layers.1.mlp.up_proj.weight", None)
    with pytest.raises(ModelError, match=r"files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    rewrite(folder, "model.layers.0.mlp.up_proj.weight", torch.zeros(3, 5))
    with pytest.raises(ModelError, match=r"up_proj\.weight is \(3, 5\) in its files, and \(48, 32\)"):
        load(folder)


@pytest.mark.parametrize("size", [0, 7, 1000, -1])
def test_weights_that_are_cut(size: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match="does not load"):
        load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "no_such_family"}'])
def test_a_config_that_is_none(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError):
        load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_tokenizer_that_is_none(content: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer"):
        load(folder)


def test_a_model_without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer that loads; are its files, such as tokenizer\.json, there"):
        load(folder)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="no folder"):
        tokens.load(ModelConfig(name=name))


def test_a_model_with_a_recurrent_state_is_refused(tmp_path: Path) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

    common = {k: v for k, v in COMMON.items() if k not in ("num_attention_heads", "num_key_value_heads")}
    lfm = Lfm2ForCausalLM(Lfm2Config(**COMMON, layer_types=["conv", "full_attention"]))
    mamba = MambaForCausalLM(MambaConfig(**common))
    for name, model in {"lfm2": lfm, "mamba": mamba}.items():
        model.save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny() / file, tmp_path / name)
        with pytest.raises(ModelError, match=rf"\({name}\) has a recurrent state"):
            load(tmp_path / name)


def test_a_model_without_linear_layers_takes_full_alone(tmp_path: Path) -> None:
    """GPT-2 has Conv1D in place of nn.Linear."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=1024, n_embd=32, n_layer=1, n_head=2, n_positions=512, eos_token_id=2, bos_token_id=2)
    ).save_pretrained(tmp_path / "gpt2")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / file, tmp_path / "gpt2")
    tree: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "model": {"name": str(tmp_path / "gpt2")},
        "es": {"sigma": 0.01, "learning_rate": 0.01, "num_generations": 1, "population_size": 2},
        "evaluation": {"max_tokens": 3},
    }
    for space in ("lora", "lowrank"):
        with pytest.raises(ModelError, match=r"no nn\.Linear matrix"):
            evoalign.train({**tree, "space": space})
        assert not (tmp_path / "run").exists()
    result = evoalign.train({**tree, "space": "full"}, console=Console(quiet=True))
    assert result.saved.is_dir()


def set_in(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


HOOKS = {
    "attention": ({"_attn_implementation": "evil/kernel"}, "_attn_implementation to 'evil/kernel'"),
    "attention, public": ({"attn_implementation": "evil/kernel@main:f"}, "attn_implementation to 'evil/kernel@main:f'"),
    "attention, inside": ({"_attn_implementation_internal": "evil/kernel"}, "_attn_implementation_internal"),
    "attention of parts": ({"attn_implementation": {"text_config": "evil/kernel"}}, "attn_implementation"),
    "attention of a part": ({"text_config": {"_attn_implementation": "evil/kernel"}}, "_attn_implementation"),
    "experts": ({"_experts_implementation": "evil/kernel"}, "_experts_implementation"),
    "kernels": ({"use_kernels": True}, "use_kernels to True"),
    "other weights": ({"transformers_weights": "other.safetensors.index.json"}, "transformers_weights"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_model_does_not_say_what_is_fetched_and_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model library asks a hub for the code of such a kernel, without a question."""
    from transformers.integrations import hub_kernels

    settings, message = HOOKS[name]
    set_in(folder / "config.json", **settings)
    fetched: list[object] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *words, **named: fetched.append(words), raising=False)
    for load_it in (load, lambda path: specs_of_config(make_config(path))):
        with pytest.raises(ModelError, match=f"config.json sets {message}") as caught:
            load_it(folder)
        assert "\n" not in str(caught.value) and fetched == []


@pytest.mark.parametrize("implementation", ["eager", "sdpa", None])
def test_the_librarys_own_attention_may_be_named(implementation: str | None, folder: Path) -> None:
    set_in(folder / "config.json", _attn_implementation=implementation, use_kernels=False)
    load(folder).close()


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"hidden_size": "x"},
        {"num_hidden_layers": -1},
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_one_line(settings: dict[str, Any], folder: Path) -> None:
    set_in(folder / "config.json", **settings)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"eos_token_id": 7', "\0"])
def test_a_generation_config_that_is_damaged_is_not_passed_over(text: str, folder: Path) -> None:
    """The library says of it what it says of one that is not there, and the model would stop elsewhere."""
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json is damaged") as caught:
        tokens.load(ModelConfig(name=str(folder)))
    assert str(caught.value).isprintable()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "x"])
def test_a_pipe_in_a_model_is_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for read in (load, lambda path: specs_of_config(make_config(path))):
        with pytest.raises(ModelError, match=f"'{name}' is a pipe or a device"):
            read(folder)


def test_what_waits_for_nobody_is_left_alone(folder: Path) -> None:
    """A model may lie among other things: a socket, a link to nothing, or to a name that cannot be."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "agent"))
        (folder / "nowhere").symlink_to(folder / "nothing")
        (folder / "long").symlink_to("x" * 300)
        (folder / "circle").symlink_to(folder / "circle")
        load(folder).close()


def test_an_index_may_name_a_folder_below(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts/one.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "parts/one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder).close()


def test_a_model_of_no_layers_by_another_name(tmp_path: Path) -> None:
    settings = GPT2Config(n_layer=0, n_embd=8, n_head=2, vocab_size=VOCABULARY, n_positions=64)
    GPT2LMHeadModel(settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"its config\.json has 0 layers"):
        specs_of_config(make_config(tmp_path))


@pytest.mark.parametrize("far", ["../outside.safetensors", "{}/outside.safetensors", "..\\outside.safetensors"])
def test_an_index_names_files_of_its_folder_alone(far: str, folder: Path) -> None:
    """A model that somebody sends takes no tensors from elsewhere on this machine."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, far.format(folder.parent))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="which is not in the folder; copy it there"):
        load(folder)


@pytest.mark.parametrize("eos", ["x", [1, "x", None], {"a": 1}, -1, 1.5, True], ids=str)
def test_a_stop_token_that_is_none(eos: object, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match=r"eos_token_id|generation_config\.json is damaged"):
        tokens.load(ModelConfig(name=str(folder)))


ENDLESS = {
    "a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** 9) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_chat_template_without_end_is_ended(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    (folder / "chat_template.jinja").write_text(ENDLESS[name])
    loaded = tokens.load(ModelConfig(name=str(folder)))
    with pytest.raises(ModelError, match=r"template takes more than 0\.5 s .* set task\.prompt: raw"):
        loaded.encode([{"role": "user", "content": "a"}])


@pytest.mark.timeout(60)
def test_what_renders_ends_with_an_interrupted_call_and_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever interrupts, a template without end takes no core for ever, nor where its owner was killed."""
    (folder / "chat_template.jinja").write_text(ENDLESS[sorted(ENDLESS)[0]])
    started: list[int] = []
    fork = os.fork

    def forked() -> int:
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", forked)

    def interrupt(end: object, most: int) -> bytes:
        raise KeyboardInterrupt

    loaded = tokens.load(ModelConfig(name=str(folder)))
    with monkeypatch.context() as patch:
        patch.setattr(templates, "_line", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loaded.encode([{"role": "user", "content": "a"}])
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)

    monkeypatch.setattr(templates, "SECONDS", -0.5)  # and half a second more is its own end
    monkeypatch.setattr(templates.socket.socket, "settimeout", lambda *_: None)
    with pytest.raises(ModelError, match="takes more than"):
        tokens.load(ModelConfig(name=str(folder))).encode([{"role": "user", "content": "a"}])
    with pytest.raises(ProcessLookupError):
        os.kill(started[1], 0)


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is bounded on Linux alone")
def test_a_chat_template_that_adds_millions_of_words_is_ended(folder: Path) -> None:
    """Its process would be done with them at once; the tokenizer, which has no bounds, would not."""
    (folder / "chat_template.jinja").write_text("{{ 'ab ' * 3000000 }}")
    with pytest.raises(ModelError, match="adds more than 1 MiB"):
        tokens.load(ModelConfig(name=str(folder))).encode([{"role": "user", "content": "x"}])


def test_a_chat_template_that_takes_all_memory(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'a' * 20000000000 }}")
    loaded = tokens.load(ModelConfig(name=str(folder)))
    with pytest.raises(ModelError, match=r"chat template refuses the prompt .*MemoryError"):
        loaded.encode([{"role": "user", "content": "a"}])


def test_a_guarded_template_gives_the_same_tokens_and_names_what_it_refuses(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    loaded = tokens.load(ModelConfig(name=str(folder)))
    plain = Tokens(loaded.tokenizer, loaded.stop_ids)
    for content in ("a", "Zoë \u2028 \U0001f600 \n" * 50, ""):
        messages = [{"role": "user", "content": content}]
        assert loaded.encode(messages) == plain.encode(messages)
        opened = [*messages, {"role": "assistant", "content": "so"}]
        assert loaded.encode(opened) == plain.encode(opened)
    with pytest.raises(ModelError, match=r"chat template refuses the prompt .* no tools"):
        loaded.encode([{"role": "tool", "content": "a"}])
    assert loaded.encode([{"role": "user", "content": "a"}])


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return tokens.load(ModelConfig(name=str(folder))).tokenizer


def test_a_chat_template_that_refuses_is_named(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ModelError, match=r"chat template refuses .* System role not supported"):
        Tokens(tokenizer, [2]).encode([{"role": "system", "content": "a"}])
    tokenizer.chat_template = "{{ messages[0].content.nothing() }}"
    with pytest.raises(ModelError, match=r"chat template refuses"):
        Tokens(tokenizer, [2]).encode([{"role": "user", "content": "a"}])


def test_messages_without_a_chat_template_are_joined(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    loaded = Tokens(tokenizer, [2])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}]
    assert loaded.encode(messages) == loaded.encode("Be brief.\n2 + 2 =")


def test_a_last_assistant_message_is_gone_on_from(tokenizer: Any) -> None:
    loaded = Tokens(tokenizer, [2])
    question = {"role": "user", "content": "2 + 2 ="}
    opened = loaded.encode([question, {"role": "assistant", "content": "The sum is"}])
    assert tokenizer.decode(list(opened)).endswith("The sum is")
    assert opened[: len(loaded.encode([question]))] == loaded.encode([question])


def test_a_prompt_without_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="has no tokens"):
        Tokens(tokenizer, [2]).encode("")


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(folder: Path) -> None:
    own = tokens.load(ModelConfig(name=str(folder))).tokenizer.eos_token_id
    for eos, wanted in ((7, {7, own}), ([7, 9], {7, 9, own}), (None, {own})):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert set(tokens.load(ModelConfig(name=str(folder))).stop_ids) == wanted
    (folder / "generation_config.json").unlink()
    assert set(tokens.load(ModelConfig(name=str(folder))).stop_ids) == {own}


def test_text_has_no_stop_token_and_keeps_its_spaces(tokenizer: Any) -> None:
    ids = tokenizer(" a  b , c")["input_ids"]
    stop = tokenizer("!")["input_ids"][0]
    loaded = Tokens(tokenizer, [stop])
    assert loaded.decode([*ids, stop]) == " a  b , c"
    assert loaded.decode([*ids, stop, *ids]) == " a  b , c! a  b , c"
    assert loaded.decode([]) == ""


def test_a_mean_that_does_not_fit_is_refused(folder: Path) -> None:
    from families import Bench

    with Bench(make_config(folder)) as bench:
        state = dict(bench.engine.state())
        name = next(iter(state))
        hashed = bench.engine.fingerprint()
        with pytest.raises(EvoalignError, match="saved mean does not fit"):
            bench.engine.load({n: t for n, t in state.items() if n != name})
        with pytest.raises(EvoalignError, match=r"is \(1,\), not"):
            bench.engine.load({**state, name: torch.zeros(1)})
        assert bench.engine.fingerprint() == hashed
        moved = {n: t + 1 for n, t in state.items()}
        bench.engine.load(moved)
        assert bench.engine.fingerprint() != hashed
        bench.engine.load(state)
        assert bench.engine.fingerprint() == hashed


FILES = {
    "q4.gguf": "is a file of GGUF",
    "model.safetensors": "is one file of a model; give model.name its folder",
    "pytorch_model.bin": "is a pickle, which is not read",
    "weights.pth": "is a pickle, which is not read",
    "model.onnx": "is an ONNX graph",
    "notes.txt": "is a file; give model.name the folder",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_the_place_of_a_model_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    for given in (str(tmp_path / name), name):
        with pytest.raises(ModelError, match=FILES[name]) as caught:
            tokens.load(ModelConfig(name=given))
        assert "\n" not in str(caught.value)


FOLDERS = {
    "gguf": (["model-q4.gguf", "README.md"], r"'model-q4\.gguf' is a file of GGUF"),
    "diffusers": (["model_index.json"], "diffusers"),
    "onnx": (["model.onnx"], r"'model\.onnx' is an ONNX graph"),
    "pickle": (["config.json", "pytorch_model.bin"], r"in 'pytorch_model\.bin', a pickle, which is not read"),
    "flax": (["config.json", "flax_model.msgpack"], "weights of Flax"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_form_is_named(name: str, tmp_path: Path) -> None:
    files, message = FOLDERS[name]
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=message) as caught:
        tokens.load(ModelConfig(name=str(tmp_path)))
    assert "\n" not in str(caught.value)


KINDS = {
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"is quantised \(bitsandbytes\)"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"is quantised \(gptq\)"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, r"is quantised \(awq\)"),
    "compressed": ({"quantization_config": {"quant_method": "compressed-tensors"}}, r"\(compressed-tensors\)"),
    "unsaid": ({"quantization_config": {"bits": 4}}, r"is quantised \(quantization_config in its config\.json\)"),
    "pictures": ({"vision_config": {"depth": 1}}, r"\(vision_config"),
    "encoder": ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM, an encoder"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "a classifier"),
    "headless": ({"architectures": ["LlamaModel"]}, "LlamaModel"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_cannot_be_trained_is_named(name: str, folder: Path) -> None:
    settings, message = KINDS[name]
    set_in(folder / "config.json", **settings)
    for load_it in (load, lambda path: specs_of_config(make_config(path))):
        with pytest.raises(ModelError, match=message) as caught:
            load_it(folder)
        assert "\n" not in str(caught.value)
