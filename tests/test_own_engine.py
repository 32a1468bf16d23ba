# SPDX-License-Identifier: Apache-2.0
"""An engine from a file outside the package: a run's whole life with it, and whose word it takes to import it."""

import io
import json
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest
from command_line import caller
from rich.console import Console
from toy_engine import ToyEngine, ToySettings

import evoalign
from evoalign import engines, tokens
from evoalign.analysis.sweeping.cells import TrialConfig, make_run
from evoalign.config import from_dict, load, to_yaml
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import ConfigError, ResumeError
from evoalign.preflight import doctor
from evoalign.rundir import journal
from evoalign.rundir.own import load_own
from evoalign.setup import serve
from evoalign.testing import engines as contract
from evoalign.training import replay as replaying

TOY = Path(__file__).parent / "support/toy_engine.py"


MODEL = {"name": "tiny", "dtype": "float32"}
in_every_space = pytest.mark.parametrize("space", ["lora", "lowrank", "full"])


@pytest.fixture(scope="module", autouse=True)
def outside(tmp_path_factory, random_qwen2):
    """The import path of an engine in a file outside any package. All models here are small."""
    MODEL["name"] = str(random_qwen2)
    file = tmp_path_factory.mktemp("elsewhere") / "mine.py"
    shutil.copy(TOY, file)
    return f"{file}:ToyEngine"


def tree(output, name, space="lowrank", **changes):
    return {
        "output_dir": str(output), "seed": 5, "space": space, "model": dict(MODEL),
        "engine": {"name": name, **changes.pop("engine", {})},
        "es": {"sigma": 0.01, "learning_rate": 0.01, "num_generations": 3, "population_size": 4},
        "task": {"name": "conciseness", "batch_size": 2}, "checkpoint": {"every": 1, "keep_last": 2},
        "evaluation": {"max_tokens": 8}, "checks": {"control_every": 2, "canary_every": 2},
        "tracking": {"completions_every": 0}, **changes,
    }  # fmt: skip


def train(tree, **how):
    console = Console(file=io.StringIO(), width=300)
    evoalign.train(tree, console=console, **how)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def runs(outside, tmp_path_factory):
    """A finished run of each space."""
    folder = tmp_path_factory.mktemp("runs")
    for space in ("lora", "lowrank", "full"):
        train(tree(folder / space, outside, space))
    return {space: folder / space for space in ("lora", "lowrank", "full")}


@in_every_space
def test_a_run_learns_from_members_that_differ_and_is_replayed(space, runs):
    log = journal.read(runs[space] / "journal.jsonl")
    assert log.sealed == 3 and log.header.config["engine"]["sharpness"] == 20.0, "defaults are written out"
    assert all(any(g.update.coefficients) for g in log.generations), "every generation moves the mean"
    assert len({g.weights_hash for g in log.generations}) == 3
    assert replaying.replay(runs[space]) == log.generations[-1].weights_hash


@in_every_space
def test_a_run_that_was_cut_off_resumes_bit_for_bit(space, runs, outside, tmp_path):
    copy = Path(shutil.copytree(runs[space], tmp_path / "cut")) / "journal.jsonl"
    whole = copy.read_bytes().splitlines(True)
    copy.write_bytes(b"".join(whole[:5]))
    told = train(tree(copy.parent, outside, space, engine={"longest": 512}), resume=True)
    assert "warning: engine.longest is 4096 in the run and 512 now" in told
    wanted, found = ([json.loads(row)["hash"] for row in rows[1:]] for rows in (whole, copy.read_bytes().splitlines()))
    assert found == wanted


def test_a_setting_that_is_no_resource_makes_another_run(runs, outside, tmp_path):
    with pytest.raises(ResumeError, match=r"engine.sharpness is 20.0 in the run and 3.0 now"):
        train(tree(runs["lora"], outside, "lora", engine={"sharpness": 3.0}), resume=True)
    shutil.copytree(runs["lora"], tmp_path / "base/seed_5")
    for changes, done in (({}, True), ({"engine": {"sharpness": 3.0}}, False)):
        base = tree(tmp_path, outside, "lora", **changes)
        assert (make_run(base, TrialConfig("base", {}), 5, "es", tmp_path).evaluation() is not None) == done


def test_probe_doctor_and_dry_run(outside, tmp_path):
    mine, short = tree(tmp_path / "run", outside), tree(tmp_path / "run", outside, engine={"longest": 5})
    found = {finding.name: finding for finding in evoalign.doctor(mine)}
    assert not [f for f in found.values() if f.status == "failed"]
    assert "toy serves float32 on cpu" in found["engine"].detail and "fit the model's" in found["prompt length"].detail
    (length,) = (f for f in evoalign.doctor(short) if f.name == "prompt length")
    assert length.status == "failed" and "exceed engine.longest 5" in length.detail
    assert length in doctor.findings(from_dict(short)), "as the command line hands it on"
    assert evoalign.probe(mine, sigmas=[0.01, 10.0], members=4, examples=2).rungs[-1].changed_share > 0
    assert any(line.startswith("memory ") for line in evoalign.dry_run(mine))
    assert not (tmp_path / "run").exists()


def test_the_command_line_takes_it(outside, tmp_path, monkeypatch, capsys):
    run = caller(monkeypatch, capsys)
    config = tree(tmp_path / "run", outside, es={"sigma": 0.01, "num_generations": 1, "population_size": 4})
    (tmp_path / "mine.yaml").write_text(to_yaml(from_dict(config)))
    assert run("train", tmp_path / "mine.yaml", "--dry-run").code == 0
    assert run("train", tmp_path / "mine.yaml").code == 0
    assert run("replay", tmp_path / "run").code == 0
    wrong = run("train", tmp_path / "mine.yaml", "--overwrite", "--set", "engine.sharpnes=2")
    assert wrong.code == 2 and "unknown setting engine.sharpnes; did you mean engine.sharpness?" in wrong.err


def test_one_that_derives_from_one_that_is_shipped_is_not_that(tmp_path):
    file = tmp_path / "derived.py"
    file.write_text(
        "from evoalign.engines.transformers.engine import TransformersConfig, TransformersEngine\n"
        "class Settings(TransformersConfig):\n    name: str = 'mine'\n"
        "class Engine(TransformersEngine):\n    settings = Settings\n"
    )
    config = from_dict(tree(tmp_path, f"{file}:Engine"))
    with closing(engines.create(config, tokens.load(config.model))) as engine:
        assert type(engine).__module__ != TransformersEngine.__module__


def test_an_analysis_has_its_settings_and_needs_no_es(outside, tmp_path, monkeypatch, capsys):
    config = {key: value for key, value in tree(tmp_path, outside).items() if key in ("model", "task", "engine")}
    (tmp_path / "base.yaml").write_text(json.dumps(config))
    (tmp_path / "asks.py").write_text(
        "from dataclasses import make_dataclass\nfrom evoalign.analysis import Analysis, Finding\n"
        "class Asks(Analysis):\n"
        "    name, help, settings = 'asks', 'What the engine is set to.', make_dataclass('Nothing', [])\n"
        "    def run(self, targets, settings, config=None):\n"
        "        return Finding({}, [f'sharpness {config.engine.sharpness:g}'])\n"
    )
    done = caller(monkeypatch, capsys)("analyze", f"{tmp_path / 'asks.py'}:Asks", "x", "-c", tmp_path / "base.yaml")
    assert (done.code, done.out, done.err) == (0, "sharpness 20\n", "")


def test_what_is_served_knows_its_settings(outside, tmp_path):
    with closing(serve(from_dict(tree(tmp_path, outside)))) as served:
        assert served.config.engine.model_dump()["sharpness"] == 20.0


@pytest.mark.parametrize(
    ("name", "engine", "message"),
    [
        (None, {"longest": "far"}, r"engine.longest: .*valid integer.*'far'"),
        (None, {"device": "cpu"}, r"unknown setting engine.device; it belongs to engine transformers, and"),
        ("json:JSONDecoder", {}, r"engine.name: json:JSONDecoder has no class `settings`"),
        ("nowhere:Engine", {}, r"no module named 'nowhere'"),
    ],
)
def test_its_settings_are_checked_by_its_class(name, engine, message, outside, tmp_path):
    with pytest.raises(ConfigError, match=message):
        evoalign.dry_run(tree(tmp_path, name or outside, engine=engine))


def test_a_class_without_the_methods_of_engine_is_refused(tmp_path):
    file = tmp_path / "bare.py"
    file.write_text(
        "from evoalign.config import EngineSettings\n"
        "class Engine:\n    settings = type('Bare', (EngineSettings,), {})\n    def __init__(self, *_): ...\n"
    )
    config = from_dict(tree(tmp_path, f"{file}:Engine"))
    with pytest.raises(ConfigError, match=r"no method metrics, parts; derive it from evoalign\.engines\.Engine"):
        engines.create(config, tokens.load(config.model))


# --- whose word it takes --------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A config whose engine leaves a mark where it is imported."""
    (tmp_path / "evil_engine.py").write_text("from pathlib import Path\nPath('owned').touch()\nclass Engine: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tree(tmp_path / "run", "evil_engine:Engine", "lora")
    sys.modules.pop("evil_engine", None)


def test_reading_a_config_imports_nothing(hostile):
    config = from_dict(hostile)
    Path("c.yaml").write_text(to_yaml(config))
    assert load(["c.yaml"]) == config and config.engine.name == "evil_engine:Engine"
    assert not Path("owned").exists()
    with pytest.raises(ConfigError, match="has no class `settings`"):
        evoalign.dry_run(hostile)
    assert Path("owned").exists(), "the user's own config says what is imported"


def test_a_run_does_not_say_which_engine_is_imported(hostile):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(to_yaml(from_dict(hostile)))
    Path("run/journal.jsonl").touch()
    with pytest.raises(ConfigError, match=r"engine\.name to .evil_engine:Engine"):
        load_own(Path("run"))
    assert not Path("owned").exists()


def test_a_journal_is_replayed_without_its_engine(runs, hostile):
    """The updates have the same bits whatever engine it names."""
    log = journal.read(runs["lora"] / "journal.jsonl")
    log.header.config["engine"] = hostile["engine"]
    assert replaying.config_of(log).engine.name == "transformers"
    assert not Path("owned").exists()


# --- the public contract --------------------------------------------------------------------------------------------

MADE_UP = {"check_mean_is_plain", "check_members_are_their_own"}
"""Hold the answers against the real model's."""


@pytest.mark.parametrize("check", [c for c in contract.CHECKS if c.__name__ not in MADE_UP], ids=lambda c: c.__name__)
@in_every_space
@pytest.mark.first("lora-")
def test_it_keeps_the_contract(space, check):
    config = from_dict({"space": space, "model": dict(MODEL), "es": {"sigma": 0.05, "learning_rate": 0.025}})
    config = config.model_copy(update={"engine": ToySettings(name="toy_engine:ToyEngine")})
    with contract.started(ToyEngine, config) as bench:
        check(bench)
