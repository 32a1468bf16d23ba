# SPDX-License-Identifier: Apache-2.0
"""The comparisons, adapters and sessions of `evoalign canary`; tests/engine_* check real servers."""

import asyncio
import json
import math
import time
from contextlib import contextmanager

import pytest
import torch
from command_line import caller
from json_server import serving
from safetensors.torch import load_file, save_file

from evoalign import http, models
from evoalign.engines.server import client as client_module
from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import LostError, RefusedError
from evoalign.engines.server.dialect import ServerInfo
from evoalign.engines.server.sglang import SglangDialect
from evoalign.engines.server.vllm import VllmDialect
from evoalign.errors import ConfigError, EvoalignError
from evoalign.preflight import canary as canary_module
from evoalign.preflight.canary import Check, Examination, Report, examine
from evoalign.preflight.canary_adapters import random_adapter, read_adapter
from evoalign.preflight.canary_session import Completion, Prompter, Session, distance
from evoalign.types import Request, Sampling

NAME = "base_model.model.model.layers.{}.mlp.{}"


def completions(*tokens):
    return (Completion(tuple(t for t, _ in tokens), tuple(p for _, p in tokens)),)


def test_distance_ignores_ties_and_counts_sure_tokens():
    assert distance(completions(("a", -0.7), ("b", -1.0)), completions(("a", -0.7), ("b", -1.5))) == pytest.approx(0.25)
    tie = (("a", -0.7), ("b", -9.0)), (("c", -0.7), ("b", 0.0))
    assert distance(*(completions(*one) for one in tie)) == pytest.approx(0.0, abs=0.02)
    sure = distance(completions(("a", -0.05)), completions(("c", -0.05)))
    assert sure == pytest.approx(-0.05 - math.log(1 - math.exp(-0.05)))
    assert distance(completions(("a", 0.0)), completions(("c", -2.0))) == 8.0, "bounded"
    assert distance(completions(), completions()) == distance(completions(), completions(("a", -0.7))) == 0.0
    assert distance(completions(("a", -0.01)), completions()) == 1.0, "empty where the other is sure"


def test_distance_is_a_lower_bound_of_the_largest_change():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        one, other = torch.randn((2, 5), generator=generator).mul(2).log_softmax(-1)
        found = [completions((str(int(p.argmax())), float(p.max()))) for p in (one, other)]
        assert distance(*found) <= float((one - other).abs().max()) + 1e-6


class Stub:
    """A client whose server always sends the same reply."""

    url = "http://stub"

    def __init__(self, said):
        self.said, self.asked = said, []

    async def post(self, path, body, *, seconds):
        self.asked.append((path, body))
        return self.said


def ask(said, api, dialect=None, **more):
    client = Stub(said)
    prompter = Prompter(client, dialect or VllmDialect(), api, "base", **more)
    return asyncio.run(prompter.complete("Hello", "mine")), client.asked


def test_a_chat_with_null_content_is_an_empty_completion():
    null = {"choices": [{"message": {"content": None}, "logprobs": None}]}
    assert ask(null, "chat")[0] == Completion((), ())
    assert ask({"choices": [{"message": {"content": None}, "logprobs": {"content": None}}]}, "chat")[0].tokens == ()
    filled = {"choices": [{"message": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}]}
    assert ask(filled, "chat")[0] == Completion(("a",), (-0.5,))
    with pytest.raises(EvoalignError, match="log-probabilities"):
        ask({"choices": [{"message": {"content": "a"}, "logprobs": None}]}, "chat")


def test_each_dialect_names_adapters_in_its_own_field():
    said = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5]}}]}
    named = [ask(said, "completions", dialect, **more)[1][0][1] for dialect, more in (
        (VllmDialect(), {}), (SglangDialect(), {}), (SglangDialect(), {"as_model": True}),
    )]  # fmt: skip
    assert [(body["model"], body.get("lora_path")) for body in named] == [
        ("mine", None), ("base", "mine"), ("mine", None)
    ]  # fmt: skip


def test_chat_returns_token_ids_and_null_content_is_an_empty_completion():
    def said(choice, count=1):
        client = Stub({"choices": [{"finish_reason": "stop", **choice}], "usage": {"completion_tokens": count}})
        request = Request(0, (5, 6), Sampling(4), seed=7)
        (one,) = asyncio.run(SglangDialect("chat").generate(client, [request], "mine", [2]))
        ((path, body),) = client.asked
        assert path == "/v1/chat/completions" and body["lora_path"] == "mine" and body["input_ids"] == [5, 6]
        return one

    assert said({"message": {"content": None}}).token_ids == ()
    assert said({"message": {"content": "a"}, "response_token_ids": [3, 2]}).token_ids == (3, 2), "0.5.23"
    assert said({"message": {"content": None}, "token_ids": [3, 2]}).token_ids == (3, 2), "0.5.17"
    for message, count in (({"content": "a"}, 1), ({"content": None}, 9)):  # a parser removed the text
        with pytest.raises(LostError, match="token ids"):
            said({"message": message}, count)


def folder_with(folder, tensors, **config):
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {"r": 4, "lora_alpha": 6, "target_modules": ["up_proj", "down_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(own))
    return folder


def factors(rank=4):
    torch.manual_seed(0)
    shapes = {NAME.format(0, "up_proj"): (5, 7), NAME.format(0, "down_proj"): (7, 5)}
    return {
        f"{name}.lora_{factor}.weight": torch.randn(shape)
        for name, (inside, outside) in shapes.items()
        for factor, shape in (("A", (rank, inside)), ("B", (outside, rank)))
    }


def weights(adapter, module):
    """Return what an adapter adds to a module's weights, by PEFT's rule."""
    config, name = adapter.config, NAME.format(0, module)
    rank, alpha = config["r"], config.get("alpha_pattern", {}).get(module, config["lora_alpha"])
    a, b = (adapter.tensors[f"{name}.lora_{factor}.weight"].double() for factor in "AB")
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank) * b @ a


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"down_proj": 24}}])
def test_forms_of_an_adapter_are_equivalent(config, tmp_path):
    source = read_adapter(folder_with(tmp_path / "a", factors(), **config))
    given = {"use_rslora": False, **source.as_given(8.0).config}
    for module in ("up_proj", "down_proj"):
        wanted = weights(PeftAdapter(given, source.as_given(8.0).tensors), module)
        forms = [source.plain(8.0), source.plain(8.0, scale=4.0), source.plain(8.0, rslora=True)]
        for form in forms:
            torch.testing.assert_close(weights(form, module), wanted, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(weights(source.plain(8.0, sign=-1), module), -wanted, rtol=1e-5, atol=1e-4)
    only = source.plain(8.0, only="up_proj")
    assert weights(only, "up_proj").any() and not weights(only, "down_proj").any()
    assert all(f.config["r"] == f.config["lora_alpha"] for f in (only, source.plain(2.0)))


def test_gain_is_the_output_for_inputs_of_unit_variance(tmp_path):
    source = read_adapter(folder_with(tmp_path / "a", factors()))
    for name, module in source.modules.items():
        x = torch.randn((50_000, 5 if "up_proj" in name else 7), dtype=torch.float64)
        output = x @ weights(source.plain(1.0), name.rpartition(".")[2]).T
        assert module.gain == pytest.approx(float(output.pow(2).mean().sqrt()), rel=0.03)


def test_read_adapter_refuses_what_is_not_plain_lora(tmp_path):
    def refused(words, tensors, **config):
        folder = folder_with(tmp_path / words.replace(" ", "_"), tensors, **config)
        with pytest.raises(EvoalignError, match=words):
            read_adapter(folder)

    refused("use_dora", factors(), use_dora=True)
    refused("lm_head", {**factors(), "base_model.model.lm_head.weight": torch.ones(2, 2)})
    refused("one factor of two", {n: t for n, t in factors().items() if "up_proj.lora_B" not in n})
    refused("lora_alpha of", factors(), lora_alpha="much")
    refused("finite", {n: t * math.nan for n, t in factors().items()})
    pickled = folder_with(tmp_path / "pickled", factors())
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ConfigError, match="pickle"):
        read_adapter(pickled)


def test_random_adapter_has_the_shapes_of_the_model(tmp_path):
    source = random_adapter(str(models.tiny()), 4, ["q_proj", "up_proj"])
    assert source.projections == ["q_proj", "up_proj"] and len(source.modules) == 8
    weights = load_file(models.tiny() / "model.safetensors")
    for name, module in source.modules.items():
        shape = weights[f"{name.removeprefix('base_model.model.')}.weight"].shape
        assert (module.b.shape[0], module.a.shape[1]) == shape
    for model in (None, "somebody/else", str(tmp_path)):
        with pytest.raises(ConfigError, match="--adapter"):
            random_adapter(model, 4, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["http://127.0.0.1:9"], "does not answer"), (["ftp://127.0.0.1"], "address"),
     (["http://127.0.0.1:99999"], "address"), (["http://127.0.0.1:9", "--key-variable", "NOT_SET"], "NOT_SET"),
     (["http://127.0.0.1:9", "--server", "sglang"], "does not answer"),
     (["http://127.0.0.1:9", "--server", "other"], "--server other")],
)  # fmt: skip
def test_a_server_that_cannot_be_checked_is_exit_code_2(words, message, monkeypatch, capsys):
    monkeypatch.setattr(client_module, "BACKOFF", 0.01)
    done = caller(monkeypatch, capsys)("canary", *words)
    assert done.code == 2 and message in done.err


def test_a_connection_that_was_idle_is_not_reused(monkeypatch):
    """uvicorn closes it after 5 seconds: a request at that moment would count as a lost server."""
    came = []
    assert http.KEPT < 5
    monkeypatch.setattr(http, "KEPT", 0.2)
    with serving(lambda path, body, port: (200, came.append(port) or {}), client=True) as url:
        client = client_module.Client(url)
        for idle in (0.0, 0.0, 0.5):
            time.sleep(idle)
            client.call(client.get("/"))
        client.close()
    assert came[0] == came[1] != came[2]


"""Status of each path, by default 200; a list has one for each call, the last for all later ones."""


def server_with(statuses):
    """Run a server that accepts every request but these, and yield its address."""

    def reply(path, body):
        status = statuses.get(path, 200)
        if isinstance(status, list):
            status = status.pop(0) if len(status) > 1 else status[0]
        return status, {"success": True, "version": "1", "data": [{"id": "base", "owned_by": "sglang"}]}

    return serving(reply)


@contextmanager
def session_with(statuses, folder):
    with server_with(statuses) as url:
        client, dialect = client_module.Client(url), SglangDialect()
        prompter = Prompter(client, dialect, "completions", "base")
        session = Session(prompter, ServerInfo("1"), ["Hello"], folder, takes_tensors=True)
        yield session
        session.close()
        client.close()


LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
ADAPTER = PeftAdapter({}, {"a": torch.zeros(1)})


@pytest.mark.parametrize(
    ("statuses", "is_left"),
    [({}, False), ({UNLOAD: [500, 200]}, False), ({UNLOAD: [500, 400]}, False), ({UNLOAD: 500}, True),
     ({UNLOAD: 400}, True), ({LOAD: 400, UNLOAD: 400}, False), ({LOAD: 500, UNLOAD: 400}, False),
     ({LOAD: 500, UNLOAD: 500}, True)],
)  # fmt: skip
def test_close_returns_what_the_server_does_not_unload(statuses, is_left, tmp_path):
    """A failed unload is repeated at the end; an adapter that was refused is not left."""
    with session_with(statuses, tmp_path) as session:
        try:
            with session.loaded(ADAPTER, "evoalign-1"):
                pass
        except (LostError, RefusedError):
            assert LOAD in statuses
        assert session.close() == (["evoalign-1"] if is_left else [])


def test_examine_reports_adapters_left_on_the_server(tmp_path, monkeypatch):
    """Also where the examination ends with an error, after a check that loads an adapter."""
    seen = []

    def faulty(self, folders):
        with self._session.loaded(ADAPTER):
            yield Check("one", "ok", "loaded")
        raise KeyError("unexpected")

    monkeypatch.setattr(Examination, "checks", faulty)
    with server_with({UNLOAD: 500}) as url, pytest.raises(KeyError):
        examine(url, folder=tmp_path, tell=seen.append)
    assert [check.name for check in seen] == ["one", "unloaded"]
    assert seen[1].status == "warning" and "evoalign-canary-" in seen[1].detail
    monkeypatch.setattr(Examination, "checks", lambda *_: [])
    with server_with({}) as url:
        assert examine(url, folder=tmp_path).checks == ()


def test_an_unknown_name_may_get_an_error_but_not_end_the_server(tmp_path, monkeypatch):
    """A server that fails the request and is ready afterwards refuses it; one that is not ready gets no verdict."""
    monkeypatch.setattr(client_module, "BACKOFF", 0.01)
    path, health = "/v1/completions", "/health_generate"

    def unknown(statuses):
        with session_with(statuses, tmp_path) as session:
            return Examination(session, False)._unknown()

    assert unknown({path: 400}).detail.endswith("is refused")
    found = unknown({path: 500})
    assert found.status == "ok" and "500" in found.detail
    for of_health in (503, 404):
        with pytest.raises(LostError, match=r"/v1/completions .*500"):
            unknown({path: 500, health: of_health})


@pytest.mark.parametrize("debug", [False, True])
def test_an_unexpected_error_is_exit_code_2(debug, monkeypatch, capsys):
    def fail(*_, **__):
        raise KeyError("unexpected")

    monkeypatch.setattr(canary_module, "examine", fail)
    done = caller(monkeypatch, capsys)("canary", "http://127.0.0.1:9", *["--debug"][: int(debug)])
    assert done.code == 2 and "KeyError: 'unexpected'" in done.err and ("Traceback" in done.err) == debug


@pytest.mark.parametrize("status", ["ok", "FAULT"])
def test_verdict_removes_control_characters_of_the_server(status):
    report = Report("http://a", "SGLang \x1b[2J\n0", "completions", 0.0, (Check("a", status, "b"),), 1.0)
    assert report.verdict().startswith("SGLang ?[2J?0 ")
