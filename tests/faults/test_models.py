# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers that are damaged, incomplete or of a kind that cannot be carried: one clear error each."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import COMMON, VOCABULARY, Bench, build, make_config
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import QuantizationMethod

import evoalign
from evoalign import engines, tokens
from evoalign.config import ModelConfig
from evoalign.engines.specs import specs_of_config
from evoalign.errors import EvoalignError, ModelError
from evoalign.models import templates, tiny
from evoalign.tokens import Tokens

WEIGHTS, GENERATION, TEMPLATE = "model.safetensors", "generation_config.json", "chat_template.jinja"
Read = Callable[[Path], Any]
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return build("llama", tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def loaded_tokens(folder: Path) -> Tokens:
    return tokens.load(ModelConfig(name=str(folder)))


def load(folder: Path) -> Any:
    return engines.create(make_config(folder), loaded_tokens(folder))


def specs(folder: Path) -> Any:
    return specs_of_config(make_config(folder))


def encoded(folder: Path) -> Any:
    return loaded_tokens(folder).encode(HELLO)


# --- what is changed in a model's folder ----------------------------------------------------------------------------


def tensor(name: str, value: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        del weights[name]
        save_file(weights | ({} if value is None else {name: value}), folder / WEIGHTS, metadata={"format": "pt"})

    return change


def cut(size: int) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def settings(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def only(*names: str) -> Change:
    """Leave nothing but these files."""
    return lambda folder: (shutil.rmtree(folder), folder.mkdir(), [(folder / name).write_text("{}") for name in names])


def pipe(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def index(place: str) -> Change:
    """Move the weights, and name where they are in an index."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        to = folder / place.format(folder.parent).replace("\\", "/")
        to.parent.mkdir(exist_ok=True)
        (folder / WEIGHTS).rename(to)
        tree = {"metadata": {}, "weight_map": dict.fromkeys(weights, place.format(folder.parent))}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(tree))

    return change


def quantised(**how: Any) -> Change:
    return settings(quantization_config=how)


def instead(family: str, **sizes: Any) -> Change:
    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
        kind(getattr(transformers, f"{family}Config")(**sizes)).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny() / file, folder)

    return change


def beside(name: str) -> Change:
    """Write a file that is given in the place of the folder."""
    return lambda folder: (folder / name).write_bytes(b"GGUF")


def file_named(name: str) -> tuple[Read, Read]:
    """Read it by its whole path, and by its name alone from where it is."""

    def near(folder: Path) -> Any:
        with contextlib.chdir(folder):
            return loaded_tokens(Path(name))

    return lambda folder: loaded_tokens(folder / name), near


HELLO = [{"role": "user", "content": "a"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = r"template takes more than 0\.5 s .* set task\.prompt: raw"
STATELESS = {k: v for k, v in COMMON.items() if k not in ("num_attention_heads", "num_key_value_heads")}
NO_LAYERS = {"n_layer": 0, "n_embd": 8, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 64}
UP, EVIL = "mlp.up_proj.weight", "evil/kernel"
ONE, BOTH = (load,), (load, specs)
PACKED = {"awq", "gptq", "fp8", "bitsandbytes", "modelopt"}
"""Values of `quant_method` that an engine serves."""
FAULTS: dict[str, tuple[Change, str, tuple[Read, ...]]] = {
    "a missing tensor": (tensor(f"model.layers.1.{UP}", None), rf"files lack model\.layers\.1\.{UP}", ONE),
    "another shape": (tensor(f"model.layers.0.{UP}", torch.zeros(3, 5)), rf"{UP} is \(3, 5\) .*, and \(48, 32\)", ONE),
    **{f"weights cut at {size}": (cut(size), "does not load", ONE) for size in (0, 7, 1000, -1)},
    **{f"config {content}": (text("config.json", content), ".", ONE)
       for content in ("", "{", "[]", "{}", '{"model_type": "no_such_family"}')},
    **{f"tokenizer {bad}": (text("tokenizer.json", bad), "tokenizer", ONE) for bad in ("", "{", "[]", "{}")},
    "no tokenizer": (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
                     r"no tokenizer that loads; are its files, such as tokenizer\.json, there", ONE),
    # what a config would have fetched and run: the model library asks a hub for the code of such a kernel
    "attention": (settings(_attn_implementation=EVIL), "config.json sets _attn_implementation to 'evil/kernel'", BOTH),
    "attention, public": (settings(attn_implementation="evil/kernel@main:f"),
                          "config.json sets attn_implementation to 'evil/kernel@main:f'", BOTH),
    "attention, inside": (settings(_attn_implementation_internal=EVIL), "sets _attn_implementation_internal", BOTH),
    "attention of parts": (settings(attn_implementation={"text_config": EVIL}), "sets attn_implementation", BOTH),
    "attention of a part": (settings(text_config={"_attn_implementation": EVIL}), "sets _attn_implementation", BOTH),
    "experts": (settings(_experts_implementation=EVIL), "config.json sets _experts_implementation", BOTH),
    "kernels": (settings(use_kernels=True), "config.json sets use_kernels to True", BOTH),
    "other weights": (settings(transformers_weights="other.safetensors.index.json"), "sets transformers_weights", BOTH),
    # settings that cannot be
    "hidden size": (settings(hidden_size="x"), ".", ONE),
    "layers": (settings(num_hidden_layers=-1), ".", ONE),
    # the library reads a damaged file as one that is not there, and the model would stop elsewhere
    **{f"generation config {content!r}": (text(GENERATION, content), r"generation_config\.json is damaged",
                                          (loaded_tokens,)) for content in ("", "{", "[]", '{"eos_token_id": 7', "\0")},
    **{f"stop token {eos}": (text(GENERATION, json.dumps({"eos_token_id": eos})),
                             r"eos_token_id|generation_config\.json is damaged", (loaded_tokens,))
       for eos in ("x", [1, "x", None], {"a": 1}, -1, 1.5, True)},
    # a model from elsewhere takes no tensors from elsewhere on this machine
    **{f"index {far}": (index(far), "which is not in the folder; copy it there", ONE)
       for far in ("../outside.safetensors", "{}/outside.safetensors", "..\\outside.safetensors")},
    # other forms
    "gguf": (only("model-q4.gguf", "README.md"), r"'model-q4\.gguf' is a file of GGUF", (loaded_tokens,)),
    "diffusers": (only("model_index.json"), "diffusers", (loaded_tokens,)),
    "onnx": (only("model.onnx"), r"'model\.onnx' is an ONNX graph", (loaded_tokens,)),
    "pickle": (only("config.json", "pytorch_model.bin"), r"in 'pytorch_model\.bin', a pickle, which is not read",
               (loaded_tokens,)),
    "flax": (only("config.json", "flax_model.msgpack"), "weights of Flax", (loaded_tokens,)),
    # kinds that cannot be trained
    **{f"quantised by {method}": (quantised(quant_method=method), rf"quantised by '{method}'.*, which no engine", BOTH)
       for method in sorted({method.value for method in QuantizationMethod} - PACKED - {"compressed-tensors"})},
    "quantised by modelopt": (quantised(quant_method="modelopt"), "which engine transformers does not serve", BOTH),
    **{f"compressed to {form}": (quantised(quant_method="compressed-tensors", format=form), message, BOTH)
       for form, message in (("nvfp4-pack-quantized", "which engine transformers does not serve; use engine vllm"),
                             ("mxfp4-pack-quantized", "which engine transformers does not serve; use engine vllm"),
                             ("marlin-24", "which no engine here serves"), ("naive-quantized", "no engine here"))},
    "compressed to no format": (quantised(quant_method="compressed-tensors"), "format unknown", BOTH),
    "compressed to several formats": (quantised(quant_method="compressed-tensors", format="pack-quantized",
                                                config_groups={"a": {"format": "marlin-24"}}), "format mixed", BOTH),
    **{f"not packed by {method}": (quantised(quant_method=method, bits=4), "its files have no packed weight", ONE)
       for method in sorted(PACKED - {"modelopt"})},
    "not packed in 4 bits": (quantised(quant_method="bitsandbytes", load_in_4bit=True), "no packed w|install", ONE),
    "a method without a name": (quantised(bits=4), "its quantization_config names no quant_method", BOTH),
    "pictures": (settings(vision_config={"depth": 1}), r"\(vision_config", BOTH),
    "encoder": (settings(architectures=["BertForMaskedLM"]), "BertForMaskedLM, an encoder", BOTH),
    "classifier": (settings(architectures=["LlamaForSequenceClassification"]), "a classifier", BOTH),
    "headless": (settings(architectures=["LlamaModel"]), "LlamaModel", BOTH),
    "lfm2": (instead("Lfm2", **COMMON, layer_types=["conv", "full_attention"]), r"\(lfm2\) has a recurrent state", ONE),
    "mamba": (instead("Mamba", **STATELESS), r"\(mamba\) has a recurrent state", ONE),
    "no layers, by another name": (instead("GPT2", **NO_LAYERS),
                                   r"its config\.json has 0 layers", (specs,)),
    **{f"no folder {name}": (lambda _: None, "no folder", (lambda _, name=name: tokens.load(ModelConfig(name=name)),))
       for name in ("./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c")},
    **{f"file {name}": (beside(name), message, file_named(name)) for name, message in (
        ("q4.gguf", "is a file of GGUF"), (WEIGHTS, "is one file of a model; give model.name its folder"),
        ("pytorch_model.bin", "is a pickle, which is not read"), ("weights.pth", "is a pickle, which is not read"),
        ("model.onnx", "is an ONNX graph"), ("notes.txt", "is a file; give model.name the folder"))},
    "a template with a loop": (text(TEMPLATE, LOOP), ENDLESS, (encoded,)),
    "a template with a power": (text(TEMPLATE, "{{ 9 ** (9 ** 9) }}"), ENDLESS, (encoded,)),
    # the tokenizer, which has no bounds, would take long
    "a template that adds words": (text(TEMPLATE, "{{ 'ab ' * 3000000 }}"), "adds more than 1 MiB", (encoded,)),
    "a template that takes all memory": (text(TEMPLATE, "{{ 'a' * 20000000000 }}"),
                                         r"chat template refuses the prompt .*MemoryError", (encoded,)),
    "a template that refuses": (text(TEMPLATE, "{{ raise_exception('System role not supported') }}"),
                                "chat template refuses .* System role not supported", (encoded,)),
    "a template of no method": (text(TEMPLATE, "{{ messages[0].content.nothing() }}"), "template refuses", (encoded,)),
    **{f"pipe {name}": (pipe(name), f"'{name}' is a pipe or a device", BOTH)
       for name in ("config.json", GENERATION, "tokenizer.json", WEIGHTS, "x")},
}  # fmt: skip
"""By name: the change, what the error matches, and what raises it."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_model_is_refused_in_one_line(name, folder, monkeypatch):
    from transformers.integrations import hub_kernels

    if name.startswith("pipe") and not hasattr(os, "mkfifo"):
        pytest.skip("no pipes")
    if name.endswith("adds words") and not Path("/proc/self/statm").is_file():
        pytest.skip("memory is bounded on Linux alone")
    if name in ("a template with a loop", "a template with a power"):
        monkeypatch.setattr(templates, "SECONDS", 0.5)
    fetched: list[object] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *words, **named: fetched.append(words), raising=False)
    change, message, readers = FAULTS[name]
    change(folder)
    for read in readers:
        with pytest.raises(ModelError, match=message) as caught:
            read(folder)
        assert str(caught.value).isprintable() and fetched == []


def harmless(folder: Path) -> None:
    """A model may lie among other things: a socket, a link to nothing, or to a name that cannot be."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "agent"))
    for name, target in {"nowhere": "nothing", "long": "x" * 300, "circle": "circle"}.items():
        (folder / name).symlink_to(target)


@pytest.mark.parametrize(
    "change",
    [lambda _: None, harmless, index("parts/one.safetensors"),
     *(settings(_attn_implementation=own, use_kernels=False) for own in ("eager", "sdpa", None))],
    ids=["whole", "harmless", "an index of a folder below", "eager", "sdpa", "no attention"],
)  # fmt: skip
def test_a_model_loads(change, folder):
    change(folder)
    load(folder).close()


def test_a_model_without_linear_layers_takes_full_alone(folder, tmp_path):
    """GPT-2 has Conv1D in place of nn.Linear."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 512, "eos_token_id": 2, "bos_token_id": 2}
    instead("GPT2", vocab_size=1024, **sizes)(folder)
    tree: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"), "evaluation": {"max_tokens": 3},
        "model": {"name": str(folder)},
        "es": {"sigma": 0.01, "learning_rate": 0.01, "num_generations": 1, "population_size": 2},
    }  # fmt: skip
    for space in ("lora", "lowrank"):
        with pytest.raises(ModelError, match=r"no nn\.Linear matrix"):
            evoalign.train({**tree, "space": space})
        assert not (tmp_path / "run").exists()
    assert evoalign.train({**tree, "space": "full"}, console=Console(quiet=True)).saved.is_dir()


# --- chat templates, tokens -----------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_what_renders_ends_with_an_interrupted_call_and_by_itself(folder, monkeypatch):
    """Whoever interrupts, a template without end takes no core for ever, nor where its owner was killed."""
    (folder / TEMPLATE).write_text(LOOP)
    started: list[int] = []
    fork = os.fork

    def forked() -> int:
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", forked)

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    loaded = loaded_tokens(folder)
    with monkeypatch.context() as patch:
        patch.setattr(templates, "_line", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loaded.encode(HELLO)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)

    monkeypatch.setattr(templates, "SECONDS", -0.5)  # and half a second more is its own end
    monkeypatch.setattr(templates.socket.socket, "settimeout", lambda *_: None)
    with pytest.raises(ModelError, match="takes more than"):
        loaded_tokens(folder).encode(HELLO)
    with pytest.raises(ProcessLookupError):
        os.kill(started[1], 0)


def test_a_signal_to_the_whole_group_leaves_what_renders_to_its_owner(folder, monkeypatch):
    """A run that is told to stop renders prompts until its generation is finished."""
    started: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: started.append(fork()) or started[-1])
    loaded = loaded_tokens(folder)
    before = loaded.encode(HELLO)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(started[-1], number)
        assert loaded.encode(HELLO) == before
    assert len(started) == 1


ORPHAN = """
import os, signal, time
from evoalign.models.templates import Renderer
started, fork = [], os.fork
os.fork = lambda: started.append(fork()) or started[-1]
renderer = Renderer(None, lambda *_: "text")
renderer([])
holder = fork()
if holder == 0:
    time.sleep(60)
    os._exit(0)
print(started[0], holder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads /proc")
def test_what_renders_ends_with_a_killed_owner_of_which_another_fork_lives():
    owner = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    renderer, holder = map(int, owner.stdout.readline().split())
    owner.wait()
    try:
        for _ in range(100):
            if not Path(f"/proc/{renderer}").is_dir() or "Z" in Path(f"/proc/{renderer}/stat").read_text().split()[2]:
                break
            time.sleep(0.2)
        else:
            pytest.fail("it lives on")
    finally:
        os.kill(holder, signal.SIGKILL)
        owner.stdout.close()


def test_a_guarded_template_gives_the_same_tokens_and_names_what_it_refuses(folder):
    (folder / TEMPLATE).write_text(
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    loaded = loaded_tokens(folder)
    plain = Tokens(loaded.tokenizer, loaded.stop_ids)
    for content in ("a", "Zoë \u2028 \U0001f600 \n" * 50, ""):
        messages = [{"role": "user", "content": content}]
        assert loaded.encode(messages) == plain.encode(messages)
        opened = [*messages, {"role": "assistant", "content": "so"}]
        assert loaded.encode(opened) == plain.encode(opened)
    with pytest.raises(ModelError, match=r"chat template refuses the prompt .* no critics"):
        loaded.encode([{"role": "critic", "content": "a"}])
    assert loaded.encode(HELLO)


@pytest.fixture(scope="module")
def tokenizer(whole) -> Any:
    return loaded_tokens(whole).tokenizer


def test_a_last_assistant_message_is_gone_on_from(tokenizer):
    loaded = Tokens(tokenizer, [2])
    question = {"role": "user", "content": "2 + 2 ="}
    opened = loaded.encode([question, {"role": "assistant", "content": "The sum is"}])
    assert tokenizer.decode(list(opened)).endswith("The sum is")
    assert opened[: len(loaded.encode([question]))] == loaded.encode([question])


def test_a_prompt_without_tokens_is_refused(tokenizer):
    with pytest.raises(ModelError, match="has no tokens"):
        Tokens(tokenizer, [2]).encode("")


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(folder, tokenizer):
    own = tokenizer.eos_token_id
    for eos, wanted in ((7, {7, own}), ([7, 9], {7, 9, own}), (None, {own})):
        (folder / GENERATION).write_text(json.dumps({"eos_token_id": eos}))
        assert set(loaded_tokens(folder).stop_ids) == wanted
    (folder / GENERATION).unlink()
    assert set(loaded_tokens(folder).stop_ids) == {own}


def test_text_has_no_stop_token_and_keeps_its_spaces(tokenizer):
    ids = tokenizer(" a  b , c")["input_ids"]
    stop = tokenizer("!")["input_ids"][0]
    loaded = Tokens(tokenizer, [stop])
    assert loaded.decode([*ids, stop]) == " a  b , c"
    assert loaded.decode([*ids, stop, *ids]) == " a  b , c! a  b , c"
    assert loaded.decode([]) == ""


def test_a_mean_that_does_not_fit_is_refused(folder):
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
