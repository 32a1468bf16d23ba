# SPDX-License-Identifier: Apache-2.0
"""What a run directory from elsewhere may set: no program, address, secret, folder, hub name or code of its choice.

Each setting that leads out of a run is forged into a real one, for each command that takes a run. What it leads to is
watched: a program that leaves a file, an address that counts its connections, a folder that stays empty.
"""

import contextlib
import json
import shutil
import socket
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from chains import digest, relinked
from forked import runs_of_sweeps
from pydantic import BaseModel
from small_runs import hashes_of

import evoalign
from evoalign.config import Config, ModelConfig, from_dict, load, outside
from evoalign.config.engines import ENGINES
from evoalign.config.outside import Inside, Outside
from evoalign.config.spaces import SECTIONS
from evoalign.errors import ConfigError, EvoalignError
from evoalign.models.origin import origin
from evoalign.rundir import journal
from evoalign.rundir.own import load_own
from evoalign.tasks.safety_rows import Settings as SafetySettings
from evoalign.training.replay import rebuilt

DATA = Path(__file__).parents[2] / "data" / "tasks" / "conciseness"
SECRET = "s3cretVALUE0123456789"

# --- every setting is marked ------------------------------------------------------------------------------------------


def sections() -> list[type[BaseModel]]:
    """Every section that a config may have, those of all engines and tasks that are shipped among them."""
    pending: list[Any] = [Config, SafetySettings, *SECTIONS.values(), *(ENGINES[name] for name in ENGINES)]
    seen: set[type[BaseModel]] = set()
    while pending:
        found = pending.pop()
        if isinstance(found, type) and issubclass(found, BaseModel):
            if found not in seen:
                seen.add(found)
                pending += [info.annotation for info in found.model_fields.values()]
        else:
            pending += get_args(found)
    return sorted(seen, key=lambda section: section.__name__)


def holds_text(annotation: Any) -> bool:
    """Whether a type can hold text of any kind, at any depth: no number, flag, choice or section."""
    origin = get_origin(annotation)
    if origin is Literal:
        return False
    if origin is Annotated:
        return holds_text(get_args(annotation)[0])
    if origin in (Union, types.UnionType, list, tuple, dict):
        return any(map(holds_text, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel | bool | int | float | types.NoneType):
        return False
    return annotation is not Ellipsis


def test_sections_finds_those_of_all_engines_and_tasks():
    names = {section.__name__ for section in sections()}
    assert {"Config", "TaskConfig", "ObjectiveConfig", "SglangConfig", "RayConfig", "TrackingConfig"} <= names
    assert len(names) > 25


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_setting_that_holds_text_is_marked(section):
    for name, info in section.model_fields.items():
        marks = [m for m in info.metadata if isinstance(m, Inside | Outside)]
        assert len(marks) == holds_text(info.annotation), f"{section.__name__}.{name}: mark it as INSIDE or Outside"


# --- a forged run for each of them ------------------------------------------------------------------------------------


class Trap:
    """A program, an address and a folder that a forged run names; `sprung` says which of them was used."""

    def __init__(self, folder: Path) -> None:
        self.proof, self.folder = folder / "started", folder / "written"
        self.program, self.module = folder / "program", folder / "evil.py"
        self.program.write_text(f"#!/bin/sh\ntouch {self.proof}\necho 1\n")
        self.program.chmod(0o755)
        self.module.write_text(f"open({str(self.proof)!r}, 'w').close()\nclass Task: pass\n")
        self.calls: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2)
                try:
                    self.calls.append(connection.recv(4096))
                    connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                except OSError:
                    pass

    @property
    def sprung(self) -> list[str]:
        used = {"program or code": self.proof.exists(), "address": self.calls, "folder": self.folder.exists()}
        return [name for name, value in used.items() if value]

    def close(self) -> None:
        self._socket.close()


Forged = Callable[..., Path]
CODE = "{evil}:Task"
FORGED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "engine.python": ("", {"engine": {"name": "sglang", "python": "{program}", "start_timeout": 2}}),
    "engine.arguments": ("", {"engine": {"name": "vllm-server", "arguments": ["--host", "0.0.0.0"]}}),
    "engine.url": ("", {"engine": {"name": "sglang", "url": "{url}", "start_timeout": 2}}),
    "engine.key_variable": ("", {"engine": {"name": "vllm-server", "url": "{url}", "key_variable": "AWS_KEY"}}),
    "engine.ca_file": ("", {"engine": {"name": "sglang", "url": "{url}", "ca_file": "{program}"}}),
    "engine.adapter_folder": ("", {"engine": {"name": "sglang", "adapter_folder": "{folder}", "start_timeout": 2}}),
    "engine.address": ("", {"engine": {"name": "ray", "address": "127.0.0.1:1"}}),
    "engine.replica.python": ("", {"engine": {"name": "ray", "replica": {"name": "sglang", "python": "{program}"}}}),
    "engine.replica.arguments": ("", {"engine": {"name": "ray", "replica": {"name": "sglang", "arguments": ["-v"]}}}),
    "engine.replica.adapter_folder": (
        "", {"engine": {"name": "ray", "replica": {"name": "sglang", "adapter_folder": "{folder}"}}},
    ),
    "engine.name": ("", {"engine": {"name": CODE}}),
    "space.name": ("", {"space": {"name": CODE}}),
    "task.name": ("", {"task": {"name": CODE}}),
    "task.objective.name": ("", {"task": {"objective": {"name": CODE}}}),
    "task.fitness": ("", {"task": {"fitness": CODE}}),
    "task.rewards": ("", {"task": {"name": "custom", "rewards": ["{program}"]}}),
    "task.command": ("", {"task": {"name": "harness", "command": "{program}", "train_size": 4, "test_size": 4}}),
    "task.environment": ("", {"task": {"name": "environment", "environment": CODE}}),
    "task.train_data": ("", {"task": {"train_data": "hub:nobody/of-that-name"}}),
    "task.test_data": ("", {"task": {"test_data": "hub:nobody/of-that-name"}}),
    "task.validation_data": ("", {"task": {"validation_data": "hub:nobody/of-that-name"}}),
    "model.name": ("model", {"model": {"name": "nobody/of-that-name"}}),
    "model.base": ("model", {"model": {"name": "nobody/of-that-name", "base": "nobody/another"}}),
    "scorer.url": ("", {"scorer": {"name": "service", "url": "{url}", "deadline": 1}}),
    "scorer.token_env": ("", {"scorer": {"name": "service", "url": "{url}", "token_env": "AWS_KEY", "deadline": 1}}),
    "scorer.reward": ("", {"scorer": {"name": "local", "reward": "nobody/of-that-name"}}),
    "scorer.cost": ("", {"scorer": {"name": "local", "reward": "{folder}", "cost": "nobody/of-that-name"}}),
    "tracking.backends": ("training", {"tracking": {"backends": ["wandb"]}}),
    "es.shaping": ("training", {"es": {"shaping": CODE}}),
    "grpo.trl.vllm_server_base_url": ("training", {"grpo": {"trl": {"vllm_server_base_url": "{url}"}}}),
}  # fmt: skip
"""By setting: what reads it (`training` alone, the `model` also by what rebuilds weights, or all that score), and the
settings of the run."""
SCORING = {
    "eval": ("eval", "{run}"), "placebo": ("placebo", "{run}", "--shuffles", "1"),
    "resume": ("train", "{run}", "--resume"), "resume its config": ("train", "{run}/config.yaml", "--resume"),
    "doctor": ("doctor", "{run}/config.yaml"), "probe": ("probe", "{run}/config.yaml"),
    "analyze": ("analyze", "robustness", "{run}"), "sweep": ("sweep", "{run}/config.yaml", "--seeds", "0,1"),
}  # fmt: skip
TRAINING = ("resume", "resume its config", "doctor", "probe", "sweep")
REBUILDING = {"replay": ("replay", "{run}"), "export": ("export", "{run}", "--to", "{here}/export")}
READING = {
    "report": ("report", "{run}"), "journal": ("journal", "{run}"), "compare": ("compare", "{run}", "{made}"),
    "judge": ("judge", "ask", "A={run}", "B={made}", "--judge-model", "m", "--endpoint", "http://127.0.0.1:9/v1",
              "--dry-run"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return evoalign.train({
        "output_dir": str(tmp_path_factory.mktemp("outside") / "run"), "space": "lora", "model": {"name": "tiny"},
        "task": {"name": "conciseness", "train_data": str(DATA / "questions_train.json"),
                 "test_data": str(DATA / "questions_test.json"), "train_size": 4, "test_size": 4},
        "lora": {"rank": 1, "target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": 2, "population_size": 4, "sigma": 0.02, "learning_rate": 0.01},
        "evaluation": {"max_tokens": 4}, "checks": {"placebo": 0}, "report": False,
    }).path  # fmt: skip


@pytest.fixture
def trap(tmp_path, monkeypatch) -> Iterator[Trap]:
    monkeypatch.setenv("AWS_KEY", SECRET)
    found = Trap(tmp_path)
    yield found
    found.close()


def filled(value: Any, names: Mapping[str, object]) -> Any:
    if isinstance(value, str):
        return value.format(**names)
    if isinstance(value, Mapping):
        return {key: filled(inner, names) for key, inner in value.items()}
    return [filled(inner, names) for inner in value] if isinstance(value, list | tuple) else value


def changed(config: dict[str, Any], changes: Mapping[str, Any], trap: Trap) -> dict[str, Any]:
    names = {"program": trap.program, "evil": trap.module, "folder": trap.folder, "url": trap.url}
    found = filled(changes, names)
    old = {section: {} if section in ("engine", "scorer") else config.get(section) or {} for section in found}
    return config | {section: {**old[section], **settings} for section, settings in found.items()}


@pytest.fixture
def forged(made: Path, trap: Trap, tmp_path: Path) -> Forged:
    """A function from a setting of `FORGED`, or from changes, to a copy of a run whose config sets something else."""

    def of(setting: str | Mapping[str, Any], name: str = "forged", **more: Any) -> Path:
        changes = FORGED[setting][1] if isinstance(setting, str) else setting
        to = Path(shutil.copytree(made, tmp_path / name))
        config = yaml.safe_load((to / "config.yaml").read_text()) | more
        (to / "config.yaml").write_text(yaml.safe_dump(changed(config, changes, trap)))
        rewrite(to / "journal.jsonl", changes if "model" in changes else {})
        (to / "manifest.json").write_text(json.dumps({"format_version": 1, "method": "es"}))
        return to

    return of


def rewrite(file: Path, changes: Mapping[str, Any]) -> None:
    """Set something else in the config that a journal begins with, and make its chain of hashes anew, as anyone can."""
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    for section, found in changes.items():
        lines[0]["config"][section] |= found
    lines[0]["config_hash"] = digest(lines[0]["config"])
    file.write_text(relinked(lines))


@pytest.fixture
def command(made, run, tmp_path) -> Callable[[str, Path], Any]:
    words = SCORING | REBUILDING | READING
    return lambda name, path: run(*filled(list(words[name]), {"run": path, "made": made, "here": tmp_path}))


def cases() -> list[Any]:
    """Every command for one setting of each kind of the sections, and one command for every other setting."""
    whole = ("engine.python", "engine.url", "scorer.token_env", "task.name", "model.name", "tracking.backends")
    found: list[Any] = []
    for setting, (readers, _) in FORGED.items():
        names = [*(TRAINING if readers == "training" else SCORING), *(REBUILDING if readers == "model" else ())]
        found += [pytest.param(setting, n, id=f"{setting}-{n}") for n in (names if setting in whole else names[:1])]
    return found


def test_forged_settings_are_all_marked_ones(made, trap):
    """Every marked setting of any section is forged here; of a replica's those that are not its own engine's too."""
    tree = yaml.safe_load((made / "config.yaml").read_text())
    configs = [from_dict(changed(tree, changes, trap)) for _, changes in FORGED.values()]
    wanted = {place for config in configs for place, _, _ in outside.marked(config)}
    assert wanted == FORGED.keys()
    infos = [(name, info) for section in sections() for name, info in section.model_fields.items()]
    fields = {name for name, info in infos if any(isinstance(m, Outside) for m in info.metadata)}
    assert fields <= {place.rpartition(".")[2] for place in FORGED} | {"trl"}


@pytest.mark.parametrize(("setting", "name"), cases())
@pytest.mark.first("eval", "resume")
def test_command_refuses_forged_setting(setting, name, forged, trap, command):
    path = forged(setting)
    before = hashes_of(path)
    done = command(name, path)
    said = done.err + done.out
    assert done.code == (1 if name == "doctor" else 2), said
    lines = [line for line in said.splitlines() if f"{setting} " in line]
    assert len(lines) == 1 and len(done.err.splitlines()) == (0 if name == "doctor" else 1), said
    assert SECRET not in said and trap.sprung == []
    assert hashes_of(path) == before


@pytest.mark.parametrize("name", [*READING, *REBUILDING])
@pytest.mark.parametrize("setting", ["engine.python", "engine.url", "scorer.token_env", "task.name"])
def test_command_that_does_not_read_forged_setting_does_not_follow_it(setting, name, forged, trap, command):
    command(name, forged(setting))
    assert trap.sprung == []


def test_journal_alone_names_no_code(made, trap, run, tmp_path):
    """`placebo JOURNAL` takes its config from the journal, whose chain of hashes anyone can make anew."""
    file = Path(shutil.copy(made / "journal.jsonl", tmp_path))
    rewrite(file, {"task": {"name": f"{trap.module}:Task"}})
    done = run("placebo", file)
    assert done.code == 2 and "task.name " in done.err and trap.sprung == []


# --- what the user gives is taken -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["--config", "--set"])
def test_setting_given_by_the_user_is_followed(by, forged, trap, run):
    path = forged("scorer.url")
    value = path / "config.yaml" if by == "--config" else f"scorer={{name: service, url: '{trap.url}', deadline: 1}}"
    done = run("eval", path, by, value)
    assert "scorer.url " not in done.err, done.err


@pytest.mark.parametrize("words", [[], ["--config", "{run}/config.yaml"]], ids=["alone", "with its own config"])
@pytest.mark.parametrize("named", ["{run}", "{run}/config.yaml"])
def test_output_dir_of_a_run_is_where_the_run_is(named, words, forged, trap, run):
    """So that a resume writes into the run, whatever its config says: the run may have been moved."""
    path = forged({}, output_dir=str(trap.folder))
    begin = ["train", *filled([named, "--resume", *words], {"run": path})]
    done = run(*begin, "--set", "es.num_generations=3")
    assert done.code == 0, done.err
    assert trap.sprung == [] and len((path / "metrics.jsonl").read_text().splitlines()) == 3
    assert "output_dir: other" in run(*begin, "--set", "output_dir=other", "--dry-run").out


@pytest.mark.slow
@pytest.mark.parametrize("named", ["{run}", "{run}/config.yaml"])
def test_sweep_of_a_run_is_next_to_the_run(named, forged, trap, run, tmp_path):
    """The sweep's run is a process that is started anew in one case, and a fork in the other."""
    path = forged({}, output_dir=str(trap.folder / "x"))
    with contextlib.nullcontext() if named == "{run}" else runs_of_sweeps():
        done = run("sweep", named.format(run=path), "--seeds", "0", "--jobs", "1")
    assert done.code == 0 and trap.sprung == [] and (tmp_path / "forged_sweep/sweep.json").is_file(), done.err


# --- what comes by another way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eval", "placebo", "replay", "export", "resume", "doctor"])
@pytest.mark.parametrize("inner", ["adapter", "run", "run with a damaged adapter"])
def test_model_folder_of_a_run_names_no_model_to_download(inner, name, forged, command, tmp_path):
    """A folder in `model.name` has a base: that of an adapter, or the model of a run in it."""
    base = tmp_path / "base"
    if inner == "adapter":
        base.mkdir()
        (base / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/of-that-name"}')
    else:
        forged("model.name", "base")
    if inner == "run with a damaged adapter":
        (base / "adapter_config.json").write_text("{")
    done = command(name, forged({"model": {"name": str(base)}}))
    assert done.code == (1 if name == "doctor" else 2) and f"model.name to '{base}'" in done.err + done.out


def test_model_whose_saved_mean_is_a_link_is_that_of_the_other_run(forged):
    other, inner = forged("model.name", "other"), forged({}, "inner")
    assert not list(outside.marked(ModelConfig(name=str(inner))))
    (inner / "loras/generation_0099").symlink_to(other / "loras/generation_0002")
    assert [place for place, _, _ in outside.marked(ModelConfig(name=str(inner)))] == ["name"]


def test_config_next_to_the_manifest_of_another_program_is_the_users_own(run, tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "config.yaml").write_text("es: {sigma: 0.1, learning_rate: 0.05}\noutput_dir: runs/mine\n")
    done = run("train", tmp_path / "config.yaml", "--dry-run")
    assert done.code == 0 and "output_dir: runs/mine" in done.out, done.err


def test_settings_of_code_are_given_with_it(tmp_path):
    """A user who names the engine's class does not take the run's program for it."""
    tree = {"es": {"sigma": 0.1}, "engine": {"name": "x:Y", "python": "./evil.sh"}, "space": {"name": "x:Z", "a": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "journal.jsonl").touch()
    names = ["engine.name=mine:Engine", "space.name=mine:Space"]
    with pytest.raises(ConfigError, match=r"space\.a to 1 .*engine\.python to './evil\.sh'"):
        load_own(tmp_path, overrides=names)
    config = load_own(tmp_path, overrides=[*names, "engine.python=python3", "space.a=2"])
    assert config.engine.model_dump()["python"] == "python3"


def test_config_next_to_a_link_to_no_journal_is_that_of_a_run(trap, run, tmp_path):
    (tmp_path / "forged").mkdir()
    tree = {"es": {"sigma": 0.1}, "task": {"name": "custom", "rewards": [str(trap.program)]}}
    (tmp_path / "forged/config.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "forged/journal.jsonl").symlink_to("missing")
    done = run("train", tmp_path / "forged/config.yaml", "--resume")
    assert done.code == 2 and "task.rewards to " in done.err and trap.sprung == []


@pytest.mark.parametrize("by", ["base", "cell", "name"])
def test_folder_of_a_sweep_names_no_code(by, made, trap, run, tmp_path):
    """`--to` may be a sweep from elsewhere, whose sweep.json has a base config and cells."""
    shutil.copy(made / "config.yaml", tmp_path / "base.yaml")
    whole = yaml.safe_load((made / "config.yaml").read_text())
    base, code = {k: v for k, v in whole.items() if k not in ("seed", "output_dir")}, f"{trap.module}:Engine"
    cells = [{"name": "base", "settings": {}, "seeds": [0]}]
    if by != "base":
        settings = {"engine.name": code} if by == "cell" else {"es.sigma": 0.03}
        cells.append({"name": "other" if by == "cell" else "../outside", "settings": settings, "seeds": [0]})
    tree = {"format_version": 1, "method": "es", "search": None, "cells": cells,
            "base": base | ({"engine": {"name": code}} if by == "base" else {})}  # fmt: skip
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").write_text(json.dumps(tree))
    done = run("sweep", tmp_path / "base.yaml", "--to", tmp_path / "sweep", "--seeds", "0")
    assert done.code == 2 and trap.sprung == [], done.err
    assert by != "cell" or "engine.name to " in done.err


# --- ways out that stay open ------------------------------------------------------------------------------------------


def test_placebo_takes_the_place_of_the_model_for_its_name(forged, run):
    done = run("placebo", forged("model.name"), "--model", "tiny", "--shuffles", "1")
    assert done.code == 0, done.err


def test_analysis_takes_the_model_of_the_config_that_is_given(made, forged, run):
    path = forged("model.name")
    refused = run("analyze", "trajectory", path)
    assert refused.code == 2 and "model.name to " in refused.err
    done = run("analyze", "trajectory", path, "--config", made / "config.yaml")
    assert done.code == 0, done.err
    log = journal.read(path / "journal.jsonl")
    with pytest.raises(ConfigError, match=r"model\.name"), rebuilt(log, generation=0):
        pass
    with rebuilt(log, generation=0, model=load([made / "config.yaml"]).model) as (served, _):
        assert served.config.model.name == "tiny"


def test_base_of_a_run_that_the_user_names_is_followed(forged, monkeypatch):
    """As that of any adapter: who names a run as a model wants its base."""
    asked: list[str] = []
    monkeypatch.setattr("evoalign.models.origin.find", lambda path, name, revision: asked.append(path))
    origin(ModelConfig(name=str(forged("model.name"))))
    assert set(asked) == {"nobody/of-that-name"}


@pytest.mark.parametrize("by", ["command", "python"])
def test_config_without_a_run_is_the_users_own(by, forged, trap, run, tmp_path):
    path = forged("task.rewards", output_dir=str(tmp_path / "new"))
    if by == "command":
        for name in ("journal.jsonl", "manifest.json"):
            (path / name).unlink()
        run("train", path / "config.yaml")
    else:
        with contextlib.suppress(EvoalignError):
            evoalign.train(path / "config.yaml")
    assert trap.sprung == ["program or code"]


def test_commands_of_a_card_are_taken(made, run, tmp_path):
    """Its reader has the export alone, and may not have the base in the cache."""
    assert run("export", made, "--to", tmp_path / "export").code == 0
    page = (tmp_path / "export/README.md").read_text()
    again = next(line for line in page.splitlines() if line.startswith("evoalign train "))
    assert run(*again.split()[1:], "--dry-run").code == 2  # from another folder
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path / "export")
        assert run(*again.split()[1:], "--dry-run").code == 0


@pytest.mark.parametrize(("kind", "setting"), [("models", "model.name"), ("datasets", "task.train_data")])
def test_hub_name_is_followed_where_its_files_are_here(kind, setting, tmp_path, monkeypatch):
    """So that a run of one's own on a model of the hub is evaluated as it is: nothing is downloaded for it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    section, name = setting.split(".")
    tree = {"es": {"sigma": 0.1}, section: {name: "hub:" * (kind == "datasets") + "some/repository"}}
    config = Config.model_validate(tree)
    assert [place for place, _, _ in outside.marked(config)] == [setting]
    (tmp_path / f"{kind}--some--repository").mkdir()
    assert list(outside.marked(config)) == []


def test_data_of_a_shipped_task_are_not_marked():
    assert list(outside.marked(Config.model_validate({"es": {"sigma": 0.1}, "task": {"name": "gsm8k"}}))) == []
