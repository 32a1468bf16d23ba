# SPDX-License-Identifier: Apache-2.0
"""What `evoalign canary` compares, and which adapters it compares it of; tests/engine_* ask real servers."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evoalign import http, models
from evoalign.cli import main
from evoalign.engines.server import canary as canary_module
from evoalign.engines.server import client as client_module
from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.asking import Answer, Asker, apart
from evoalign.engines.server.canary import Report, examine
from evoalign.engines.server.dialect import Said, Server
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.engines.server.examination import Check, Examination
from evoalign.engines.server.session import Session
from evoalign.engines.server.sources import folder_of, made, read
from evoalign.engines.sglang.dialect import SglangDialect
from evoalign.engines.vllm_server.dialect import VllmDialect
from evoalign.errors import ConfigError, EvoalignError
from evoalign.types import Request, Sampling

NAME = "base_model.model.model.layers.{}.mlp.{}"


def answer(*tokens: tuple[str, float]) -> tuple[Answer, ...]:
    return (Answer(tuple(t for t, _ in tokens), tuple(p for _, p in tokens)),)


def test_answers_that_part_at_a_tie_are_alike_and_sure_ones_are_not() -> None:
    assert apart(answer(("a", -0.7), ("b", -1.0)), answer(("a", -0.7), ("b", -1.5))) == pytest.approx(0.25)
    assert apart(answer(("a", -0.7), ("b", -9.0)), answer(("c", -0.7), ("b", 0.0))) == pytest.approx(0.0, abs=0.02)
    sure = apart(answer(("a", -0.05)), answer(("c", -0.05)))
    assert sure == pytest.approx(-0.05 - math.log(1 - math.exp(-0.05)))
    assert apart(answer(("a", 0.0)), answer(("c", -2.0))) == 8.0, "bounded"


def test_the_distance_is_a_lower_bound_of_how_far_any_token_moves() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        one, other = torch.randn((2, 5), generator=generator).mul(2).log_softmax(-1)
        said = [answer((str(int(p.argmax())), float(p.max()))) for p in (one, other)]
        assert apart(*said) <= float((one - other).abs().max()) + 1e-6


def test_an_answer_that_ended_at_once_counts_where_the_other_was_sure() -> None:
    assert apart(answer(), answer()) == 0.0
    assert apart(answer(), answer(("a", -0.7))) == 0.0
    assert apart(answer(("a", -0.01)), answer()) == 1.0


class Stub:
    """A client whose server says one thing."""

    url = "http://stub"

    def __init__(self, said: Any) -> None:
        self.said, self.asked = said, list[tuple[str, Any]]()

    async def post(self, path: str, body: Any, *, seconds: float | None) -> Any:
        self.asked.append((path, body))
        return self.said


def ask(said: Any, api: Any, dialect: Any = None, **more: Any) -> tuple[Answer, list[Any]]:
    client = Stub(said)
    asker = Asker(client, dialect or VllmDialect(), api, "base", **more)  # type: ignore[arg-type]
    return asyncio.run(asker.answer("Hello", "mine")), client.asked


def test_a_chat_whose_content_is_null_is_an_empty_completion() -> None:
    null = {"choices": [{"message": {"content": None}, "logprobs": None}]}
    assert ask(null, "chat")[0] == Answer((), ())
    assert ask({"choices": [{"message": {"content": None}, "logprobs": {"content": None}}]}, "chat")[0].tokens == ()
    told = {"choices": [{"message": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}]}
    assert ask(told, "chat")[0] == Answer(("a",), (-0.5,))
    with pytest.raises(EvoalignError, match="no log-probabilities"):
        ask({"choices": [{"message": {"content": "a"}, "logprobs": None}]}, "chat")


def test_an_adapter_is_named_as_each_server_wants_it() -> None:
    said = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5]}}]}
    named = [ask(said, "completions", dialect, **more)[1][0][1] for dialect, more in (
        (VllmDialect(), {}), (SglangDialect(), {}), (SglangDialect(), {"as_model": True}),
    )]  # fmt: skip
    assert [(body["model"], body.get("lora_path")) for body in named] == [
        ("mine", None), ("base", "mine"), ("mine", None)
    ]  # fmt: skip


def test_a_chat_answers_a_population_in_token_ids_and_null_is_an_empty_completion() -> None:
    def said(choice: dict[str, Any], count: int = 1) -> Said:
        client = Stub({"choices": [{"finish_reason": "stop", **choice}], "usage": {"completion_tokens": count}})
        request = Request(0, (5, 6), Sampling(4), seed=7)
        (one,) = asyncio.run(SglangDialect("chat").generate(client, [request], "mine", [2]))  # type: ignore[arg-type]
        ((path, body),) = client.asked
        assert path == "/v1/chat/completions" and body["lora_path"] == "mine" and body["input_ids"] == [5, 6]
        return one

    assert said({"message": {"content": None}}).token_ids == ()
    assert said({"message": {"content": "a"}, "response_token_ids": [3, 2]}).token_ids == (3, 2), "0.5.23"
    assert said({"message": {"content": None}, "token_ids": [3, 2]}).token_ids == (3, 2), "0.5.17"
    for message, count in (({"content": "a"}, 1), ({"content": None}, 9)):  # to a parser something was said
        with pytest.raises(LostError, match="no token ids"):
            said({"message": message}, count)


def folder_with(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {"r": 4, "lora_alpha": 6, "target_modules": ["up_proj", "down_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(own))
    return folder


def factors(rank: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {NAME.format(0, "up_proj"): (5, 7), NAME.format(0, "down_proj"): (7, 5)}
    return {
        f"{name}.lora_{factor}.weight": torch.randn(shape)
        for name, (inside, outside) in shapes.items()
        for factor, shape in (("A", (rank, inside)), ("B", (outside, rank)))
    }


def weights(adapter: PeftAdapter, module: str) -> torch.Tensor:
    """What an adapter of one rank adds to a module's weights, by PEFT's rule."""
    config, name = adapter.config, NAME.format(0, module)
    rank, alpha = config["r"], config.get("alpha_pattern", {}).get(module, config["lora_alpha"])
    a, b = (adapter.tensors[f"{name}.lora_{factor}.weight"].double() for factor in "AB")
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank) * b @ a


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"down_proj": 24}}])
def test_forms_of_an_adapter_come_to_the_same(config: dict[str, Any], tmp_path: Path) -> None:
    source = read(folder_with(tmp_path / "a", factors(), **config))
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


def test_the_gain_of_a_module_is_what_it_makes_of_unit_variance(tmp_path: Path) -> None:
    source = read(folder_with(tmp_path / "a", factors()))
    for name, module in source.modules.items():
        x = torch.randn((50_000, 5 if "up_proj" in name else 7), dtype=torch.float64)
        made_of_it = x @ weights(source.plain(1.0), name.rpartition(".")[2]).T
        assert module.gain == pytest.approx(float(made_of_it.pow(2).mean().sqrt()), rel=0.03)


def test_what_is_not_plain_lora_is_refused(tmp_path: Path) -> None:
    def refused(words: str, tensors: dict[str, torch.Tensor], **config: Any) -> None:
        folder = folder_with(tmp_path / words.replace(" ", "_"), tensors, **config)
        with pytest.raises(EvoalignError, match=words):
            read(folder)

    refused("DoRA", factors(), use_dora=True)
    refused("no factor of LoRA", {**factors(), "base_model.model.lm_head.weight": torch.ones(2, 2)})
    refused("one factor of two", {n: t for n, t in factors().items() if "up_proj.lora_B" not in n})
    refused("lora_alpha of", factors(), lora_alpha="much")
    refused("finite", {n: t * math.nan for n, t in factors().items()})
    pickled = folder_with(tmp_path / "pickled", factors())
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ConfigError, match="a pickle, which is not read"):
        read(pickled)


def test_the_shapes_of_a_model_are_those_of_its_config(tmp_path: Path) -> None:
    source = made(folder_of(str(models.tiny())), 4, ["q_proj", "up_proj"])
    assert source.projections == ["q_proj", "up_proj"] and len(source.modules) == 8
    weights = load_file(models.tiny() / "model.safetensors")
    for name, module in source.modules.items():
        shape = weights[f"{name.removeprefix('base_model.model.')}.weight"].shape
        assert (module.b.shape[0], module.a.shape[1]) == shape
    for model in (None, "somebody/else", str(tmp_path)):
        with pytest.raises(ConfigError, match="by --adapter DIR"):
            folder_of(model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:9"], "does not answer"),
        (["ftp://127.0.0.1"], "is no address of a server"),
        (["http://127.0.0.1:99999"], "is no address of a server"),
        (["http://127.0.0.1:9", "--key-variable", "NOT_SET"], "there is no NOT_SET in the environment"),
        (["http://127.0.0.1:9", "--server", "sglang"], "does not answer"),
        (["http://127.0.0.1:9", "--server", "other"], "--server other: use auto, sglang or vllm"),
    ],
)
def test_who_cannot_be_asked_is_exit_code_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client_module, "BACKOFF", 0.01)
    monkeypatch.setattr("sys.argv", ["evoalign", "canary", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn closes it after 5 seconds: a request that goes out at that moment would be a lost server."""
    came = list[int]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            came.append(self.client_address[1])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    assert http.KEPT < 5
    monkeypatch.setattr(http, "KEPT", 0.2)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        client = client_module.Client(f"http://127.0.0.1:{server.server_address[1]}")
        for idle in (0.0, 0.0, 0.5):
            time.sleep(idle)
            client.call(client.get("/"))
        client.close()
        server.shutdown()
    assert came[0] == came[1] != came[2]


Statuses = dict[str, int | list[int]]
"""Of paths, where it is not 200; of a list one for each call, the last for all that follow."""


@contextmanager
def server_with(statuses: Statuses) -> Generator[str]:
    """The address of a server that says yes to everything but to these."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status = statuses.get(self.path, 200)
            if isinstance(status, list):
                status = status.pop(0) if len(status) > 1 else status[0]
            said = {"success": True, "version": "1", "data": [{"id": "base", "owned_by": "sglang"}]}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        do_GET = do_POST

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def session_with(statuses: Statuses, folder: Path) -> Generator[Session]:
    with server_with(statuses) as url:
        client, dialect = client_module.Client(url), SglangDialect()
        asker = Asker(client, dialect, "completions", "base")
        session = Session(client, "sglang", asker, Server("1"), ["Hello"], folder)
        yield session
        session.close()
        client.close()


LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
ADAPTER = PeftAdapter({}, {"a": torch.zeros(1)})


@pytest.mark.parametrize(
    ("statuses", "is_left"),
    [
        ({}, False),
        ({UNLOAD: [500, 200]}, False),
        ({UNLOAD: [500, 400]}, False),
        ({UNLOAD: 500}, True),
        ({UNLOAD: 400}, True),
        ({LOAD: 400, UNLOAD: 400}, False),
        ({LOAD: 500, UNLOAD: 400}, False),
        ({LOAD: 500, UNLOAD: 500}, True),
    ],
)
def test_what_a_server_does_not_let_go_of_is_known(statuses: Statuses, is_left: bool, tmp_path: Path) -> None:
    """It is tried again at the end; what was refused, or is not there any more, is not left."""
    with session_with(statuses, tmp_path) as session:
        try:
            with session.loaded(ADAPTER, "evoalign-1"):
                pass
        except (LostError, RefusedError):
            assert LOAD in statuses
        assert session.close() == (["evoalign-1"] if is_left else [])


def faulty(self: Examination, folders: Any) -> Iterator[Check]:
    """A check that loads an adapter, and one with a fault of its own."""
    with self._session.loaded(ADAPTER):
        yield Check("one", "ok", "loaded")
    raise KeyError("what nobody foresaw")


def test_what_is_left_on_a_server_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the examination ends with an error."""
    told = list[Check]()
    monkeypatch.setattr(Examination, "checks", faulty)
    with server_with({UNLOAD: 500}) as url, pytest.raises(KeyError):
        examine(url, folder=tmp_path, tell=told.append)
    assert [check.name for check in told] == ["one", "unloaded"]
    assert told[1].status == "warning" and "evoalign-canary-" in told[1].detail
    monkeypatch.setattr(Examination, "checks", lambda *_: [])
    with server_with({}) as url:
        assert examine(url, folder=tmp_path).checks == ()


def unknown(statuses: Statuses, folder: Path) -> Check:
    with session_with(statuses, folder) as session:
        return Examination(session, False)._unknown()


def test_an_unknown_name_is_no_reason_to_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers with an error of its own and is well refuses it in its way; who is not well has no verdict."""
    monkeypatch.setattr(client_module, "BACKOFF", 0.01)
    path, health = "/v1/completions", "/health_generate"
    assert unknown({path: 400}, tmp_path).detail.endswith("is refused")
    found = unknown({path: 500}, tmp_path)
    assert found.status == "ok" and "fails with status 500" in found.detail
    for of_health in (503, 404):
        with pytest.raises(LostError, match="/v1/completions fails with status 500"):
            unknown({path: 500, health: of_health}, tmp_path)


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_that_nobody_foresaw_is_no_fault_of_a_server(
    debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Report:
        raise KeyError("what nobody foresaw")

    monkeypatch.setattr(canary_module, "examine", fail)
    monkeypatch.setattr("sys.argv", ["evoalign", "canary", "http://127.0.0.1:9", *["--debug"][: int(debug)]])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "KeyError: 'what nobody foresaw'" in said
    assert ("Traceback" in said) == debug


@pytest.mark.parametrize("status", ["ok", "FAULT"])
def test_a_verdict_writes_nothing_on_a_terminal_that_a_server_chose(status: Any) -> None:
    report = Report("http://a", "SGLang \x1b[2J\n0", "completions", 0.0, (Check("a", status, "b"),), 1.0)
    assert report.verdict().startswith("SGLang ?[2J?0 ")
