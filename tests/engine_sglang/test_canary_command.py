# SPDX-License-Identifier: Apache-2.0
"""`evoalign canary` on a real SGLang: it blames only planted faults, and leaves nothing behind."""

import json
import math
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
import torch
from faulty_server import FAULTS, between, is_load
from safetensors.torch import load_file, save_file
from served import KEY
from typer.testing import CliRunner

from evoalign.cli import app
from evoalign.engines.server import adapters
from evoalign.engines.server.client import RefusedError
from evoalign.preflight import canary_session
from evoalign.preflight.canary import PROMPTS, examine

ALL = 17
"""Checks of an adapter on seven projections, including the name as model and the same folder."""
SIDES = {"self_attn.q_proj": (96, 96), "self_attn.v_proj": (96, 32), "mlp.down_proj": (288, 96)}
"""Input and output sizes of some modules of the tiny model."""
SHORT = ("The capital of France is", "Once upon a time")
"""Prompts for tests that do not need many."""
LONG = (SHORT[0], PROMPTS[-1])
"""The same with one that is longer than a block of the prefix cache."""


def examined(url, **more):
    return examine(url, **{"key": os.environ[KEY], **more})


def found(report, status="FAULT"):
    return {check.name for check in report.checks if check.status == status}


@pytest.fixture(autouse=True)
def nothing_is_left(url, tmp_path, monkeypatch, request):
    """Check that no file and no adapter is left, except on faulty servers that do not unload."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(adapters, "IN_MEMORY", place)
    monkeypatch.setattr(canary_session, "TOKENS", 4)
    before = on_it(url)
    yield
    assert not list(place.iterdir())
    assert on_it(url) == before or "planted_fault" in request.node.name


def on_it(url):
    """Return the adapters that the server lists."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {os.environ[KEY]}"})
    with urllib.request.urlopen(request) as said:
        return [row["id"] for row in json.loads(said.read())["data"] if row["parent"]]


def adapter(folder, rank=4, **config):
    """Write an adapter in PEFT's layout, on q_proj, v_proj and down_proj of all layers of the tiny model."""
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {}
    for layer in range(4):
        for module, sides in SIDES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, sides[0])
            tensors[f"{name}.lora_B.weight"] = 1e-3 * torch.randn(sides[1], rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {
        "r": rank,
        "lora_alpha": 6,
        "peft_type": "LORA",
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    } | config
    (folder / "adapter_config.json").write_text(json.dumps(own | config))
    return folder


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
@pytest.mark.last("chat", "completions")  # test_the_command has completions
def test_examine_blames_nothing_of_a_sound_server(url, api):
    report = examined(url, api=api, prompts=LONG)
    assert report.code == 0 and not report.faults, report
    names = {"rslora", "name as model"} - ({"name as model"} if api == "generate" else set())
    assert found(report, "warning") == names and not found(report, "not checked")
    assert len(report.checks) == ALL - (api == "generate")
    assert report.seconds < 60


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.first("no scaling")
def test_examine_finds_a_planted_fault_and_no_other(url, fault):
    make, wanted = FAULTS[fault]
    with between(url, os.environ[KEY], make()) as address:
        assert found(examine(address, prompts=SHORT)) == wanted


@pytest.mark.long
def test_rslora_is_a_fault_for_an_adapter_that_uses_it(url, tmp_path):
    """SGLang uses lora_alpha / r and ignores use_rslora."""
    plain, stable = adapter(tmp_path / "a"), adapter(tmp_path / "b", use_rslora=True)
    without, with_it = examined(url, adapters=[plain]), examined(url, adapters=[stable])
    assert found(without) == set() and "rslora" in found(without, "warning")
    assert found(with_it) == {"rslora"} and with_it.code == 1
    assert found(with_it, "not checked") == {"as given"}
    assert any("use_rslora false" in check.detail for check in with_it.faults)


def test_an_adapter_is_checked_with_its_own_config(url, tmp_path):
    """SGLang also ignores alpha_pattern."""
    one = adapter(tmp_path / "a")
    other = adapter(tmp_path / "b", alpha_pattern={"down_proj": 24})
    report = examined(url, adapters=[one, other], prompts=SHORT)
    assert found(report) == {f"as given of {other}"}
    assert {f"module q_proj of {one}", f"module down_proj of {other}", f"as given of {one}"} <= found(report, "ok")


def test_an_adapter_before_training_is_checked_with_noise(url, tmp_path):
    folder = adapter(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    save_file({n: t * ("lora_A" in n) for n, t in load_file(file).items()}, file)
    assert examined(url, adapters=[folder], prompts=SHORT).code == 0


def test_adapters_are_sent_as_tensors_where_the_server_sees_no_files(url):
    def blind(path, body, forward):
        return (400, b'{"error_message": "no such folder"}') if is_load(path) else forward(path, body)

    with between(url, os.environ[KEY], blind) as address:
        report = examine(address, prompts=SHORT)
        assert report.code == 0 and len(report.checks) == ALL - 1, "no folder can be overwritten"
        with pytest.raises(RefusedError, match="no such folder"):
            examine(address, folder="/dev/shm")


def test_an_adapter_that_cannot_be_served_gets_no_verdict(url, tmp_path):
    with pytest.raises(RefusedError, match="rank"):
        examined(url, adapters=[adapter(tmp_path / "a", rank=64)])


def test_an_interrupted_examination_unloads_its_adapters(url):
    def interrupt(check):
        if check.name == "at once":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examined(url, tell=interrupt, prompts=SHORT)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_signal_unloads_adapters_and_sets_the_exit_code(url, tmp_path, number):
    folder = tmp_path / "memory"
    command = [sys.executable, "-m", "evoalign.cli", "canary", url, "--key-variable", KEY, "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ok          applied: ")
        process.send_signal(number)
        assert process.wait(60) == 128 + number


def test_the_command(url, tmp_path):
    def said(*words):
        return CliRunner().invoke(app, ["canary", f"{url}/v1/", "--key-variable", KEY, *words])

    file = tmp_path / "new" / "report.json"
    right = said("--json", str(file), "--prompt", "One, two, three,", "--prompt", "A long time ago")
    assert right.exit_code == 0, right.output
    lines = right.stdout.splitlines()
    assert len(lines) == ALL + 1 and lines[-1].startswith("SGLang 0.5.") and "applies these adapters" in lines[-1]
    report = json.loads(file.read_text())
    assert report["code"] == 0 and len(report["checks"]) == ALL and math.isfinite(report["floor"])
    assert {c["name"] for c in report["checks"] if c["status"] != "ok"} == {"rslora", "name as model"}
    wrong = said("--as-model", "--prompt", "One, two, three,")
    assert wrong.exit_code == 1
    assert "FAULT       name as model: an adapter's name sent as `model` is answered by the base model" in wrong.stdout
