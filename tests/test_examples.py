# SPDX-License-Identifier: Apache-2.0
"""The examples run, as a person would run them, with fewer generations."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from small_runs import UNCHECKED, told_by, write_rows

from evoalign import tasks
from evoalign.config import TaskConfig, load
from evoalign.errors import RewardError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.last("quickstart")
@pytest.mark.parametrize(
    ("name", "said", "runs"),
    [
        ("quickstart", [r"^reward -\d+\.\d -> -\d+\.\d$", r"^the adapter is in .*generation_0002"], [""]),
        ("solver_task", [r"^reward -\d\.\d\d -> -\d\.\d\d$", r'^  "operators": "[-+*]{3}",$'], [""]),
        ("own_engine", [r"^space full: \d\d checks passed$"], []),
        ("custom_task", [r"^words \d+\.\d -> \d+\.\d$", r"^reward -?\d\.\d\d -> -?\d\.\d\d$"], ["task", "reward"]),
    ],
)
def test_example(
    name: str, said: list[str], runs: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    random_qwen2: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The checks of an own engine take a smaller model than the example's. `custom_task` starts as a process."""
    file = EXAMPLES / f"{name}.py"
    if name == "own_engine":
        source, changed = re.subn('(?<="name": )"tiny"', repr(str(random_qwen2)), file.read_text(encoding="utf-8"))
        assert changed == 1
        file = tmp_path_factory.mktemp("example") / file.name
        file.write_text(source, encoding="utf-8")
    words = [str(file), *(["--generations", "2", "--output", "run"] if runs else [])]
    if name in ("quickstart", "custom_task"):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        out, err = done.stdout, done.stderr
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
        out, err = capfd.readouterr()
    assert "Loading weights" not in err, "a progress bar"
    for pattern in said:
        assert re.search(pattern, out, re.MULTILINE), out
    for run in runs:
        assert len((tmp_path / "run" / run / "journal.jsonl").read_text().splitlines()) == 5
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if runs else [])


def test_no_example_is_left_out() -> None:
    """tests/test_es_loop.py has es_loop."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"quickstart", "custom_task", "judge_reward", "es_loop", "own_engine", "solver_task", "gepa_texts"}


# --- texts by GEPA ----------------------------------------------------------------------------------------------------

REWARD = """
def suits(prompts, completions, place, **columns):
    liked = ({"one": 3, "both": 0.4}, {"other": 2, "both": 1.4})
    return [sum(v for word, v in liked[k // 2].items() if word in p.split()) - 3 for p, k in zip(prompts, place)]
"""
PLACES = ("Egypt", "Chad", "Peru", "Oman")
LONG = "{prompt} other " + 3000 * "long "
TEXTS = ["no place", "{prompt} both", "{prompt} one", "{prompt} other", LONG]


@pytest.fixture
def propose_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the example on four places, with a reflecting function. `more` are further fields of the task."""
    pytest.importorskip("gepa")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Where is {name}?", "place": k} for k, name in enumerate(PLACES)]
    Path("reward.py").write_text(REWARD)

    def run(reflect: Callable[[str], str], *words: str, **more: Any) -> Any:
        data = write_rows(tmp_path / "rows.jsonl", rows)
        config = {
            "output_dir": "run",
            "task": {"name": "custom", "prompt": "raw", "train_data": data, "test_data": data,
                     "rewards": [f"{tmp_path / 'reward.py'}:suits"], "settings": {"temperature": [0.0, 0.5]}, **more},
            "es": {"num_generations": 1, "population_size": 4, "sigma": 0.01, "learning_rate": 0.005},
            "evaluation": {"max_tokens": 4}, "checks": UNCHECKED, "grader": {"isolated": False}, "report": False,
        }  # fmt: skip
        Path("config.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.setitem(sys.modules, "of_test", SimpleNamespace(reflect=reflect))
        Path("reflecting.py").write_text("from of_test import reflect")
        monkeypatch.setattr(sys, "argv", ["", "config.yaml", "--reflect", "reflecting.py:reflect", *words])
        runpy.run_path(str(EXAMPLES / "gepa_texts.py"), run_name="__main__")
        return load([tmp_path / "with_texts.yaml"], [f"output_dir={tmp_path / 'run'}"])

    return run


@pytest.mark.slow
def test_texts_of_gepa_are_options_of_a_run(propose_texts: Any) -> None:
    """`both` is not on the front, as each prompt has a better text. A text without {prompt} or room is no option."""
    seen: list[str] = []

    def reflect(prompt: str) -> str:
        seen.append(prompt)
        return f"A better text:\n```\n{TEXTS[len(seen) % len(TEXTS)]}\n```"

    made = propose_texts(reflect, "--calls", "100")
    assert made.task.settings["form"].text == ["{prompt}", "{prompt} one", "{prompt} other"]
    assert made.task.settings["temperature"].options == [0.0, 0.5]
    code: dict[str, Any] = {}
    exec(REWARD, code)
    rewards = set[float]()
    for prompt in seen:
        read = re.findall(r"(Where is (\w+)\?.*)(?s:.*?)reward (\S+),", prompt)
        assert len(read) == 3 and len({name for _, name, _ in read}) > 1, "completions of one row"
        for asked, name, reward in read:
            rewards.add(float(reward))
            assert [pytest.approx(float(reward))] == code["suits"]([asked], [""], [PLACES.index(name)])
    assert len(rewards) > 2
    assert "probability" in told_by(made)
    assert "settings/form/2" in Path("run/journal.jsonl").read_text()


@pytest.mark.slow
def test_failures_of_the_reflecting_model_are_reported(
    propose_texts: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some texts were proposed, of which `--texts 1` keeps the best."""
    texts = iter(3 * TEXTS[:4])

    def reflect(prompt: str) -> str:
        text = next(texts, None)
        if text is None:
            raise RuntimeError("quota exhausted")
        return f"```\n{text}\n```"

    made = propose_texts(reflect, "--calls", "100", "--texts", "1")
    assert made.task.settings["form"].text == ["{prompt}", "{prompt} one"]
    assert re.search(r"^--reflect failed \d+ times, .*quota exhausted", capsys.readouterr().out, re.MULTILINE)
    Path("with_texts.yaml").unlink()
    with pytest.raises(SystemExit, match=r"no text scored better(?s:.*)--reflect failed \d+ times, .*quota exhausted"):
        propose_texts(reflect, "--calls", "20")
    assert not Path("with_texts.yaml").exists()
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(SystemExit, match=r"--reflect failed \d+ times, .*litellm"):
        propose_texts(reflect, "--calls", "20", "--reflect", "openai/a-model")


@pytest.mark.slow
@pytest.mark.parametrize("longer", ["nothing", "test prompt", "other option"])
def test_a_form_without_room_on_any_split_or_under_any_option_is_refused(
    longer: str, propose_texts: Any, tmp_path: Path
) -> None:
    """The form fits the training prompts under the first options."""
    words = 500 * " long"
    form, more = "{prompt} one" + words, dict[str, Any]()
    if longer == "test prompt":
        more["test_data"] = write_rows(tmp_path / "test.jsonl", [{"prompt": f"Where is{words}?", "place": 0}])
    if longer == "other option":
        more["settings"] = {"end": {"text": ["{prompt}", "{prompt}" + words]}}
    with nullcontext() if longer == "nothing" else pytest.raises(SystemExit, match="no text scored better"):
        made = propose_texts(lambda prompt: f"```\n{form}\n```", "--calls", "20", **more)
        assert made.task.settings["form"].text == ["{prompt}", form]


@pytest.mark.parametrize(
    ("words", "more", "error"),
    [
        (["--output", "out/deep.yaml"], {}, r"--output out/deep\.yaml: make its folder first"),
        (["--output", "reward.py"], {}, r"--output reward\.py: exists; name another"),
        (["--reflect", "absent.py:reflect"], {}, r"--reflect.*absent\.py"),
        ([], {"rewards": ["absent.py:suits"]}, r"absent\.py"),
        ([], {"settings": {"form": {"text": ["{prompt}"]}}}, r"has task\.settings\.form already"),
    ],
)
def test_what_gepa_could_not_use_is_refused_at_the_start(
    words: list[str], more: dict[str, Any], error: str, propose_texts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def reflect(prompt: str) -> str:
        raise AssertionError("the model was asked")

    with pytest.raises(SystemExit) as raised:
        propose_texts(reflect, *words, **more)
    assert raised.value.code == 2 and re.search(error, capsys.readouterr().err)


# --- a judge that fails as judges do ----------------------------------------------------------------------------------

KEY = "sk-test-0123456789abcdefghij"


class Judging:
    """A real HTTP server on this machine. `answer` makes status and text of the number of a request and its body."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], tuple[int, str]], seconds: float = 0.0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = self._now = 0
        lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(owner.asked)
                    owner.asked.append(body)
                    owner.keys.append(self.headers["Authorization"])
                    owner._now += 1
                    owner.most = max(owner.most, owner._now)
                time.sleep(seconds)
                status, text = answer(number, body)
                with lock:
                    owner._now -= 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                if status == 429:
                    self.send_header("Retry-After", "0")
                with suppress(ConnectionError):  # who asked may have gone
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False  # so that none is left to the tests that follow
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self) -> Judging:
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def says(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def good(number: int, body: dict[str, Any]) -> tuple[int, str]:
    """A score that follows from the answer, so that one in another's place shows."""
    return says(f"Score: {len(body['messages'][1]['content']) % 10}")


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("judge_reward", EXAMPLES / "judge_reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def graded(example: Any, server: Judging, cache: Path, answers: Sequence[str], **settings: Any) -> list[float]:
    judge = example.Judge(server.url, "judge", KEY, cache, **{"wait": 0.01, "retries": 3, "timeout": 5, **settings})
    return asyncio.run(judge.grade([example.question("Why?", answer) for answer in answers]))


def test_what_passes_is_asked_again_and_nothing_is_asked_twice(example: Any, tmp_path: Path) -> None:
    trouble = [(500, "oh"), (429, "slow down"), (200, "not json"), says("Ten out of ten!"), (200, '{"choices": []}')]
    cache = tmp_path / "cache.sqlite"
    answers = ["a" * n for n in (1, 2, 3, 1, 2)]
    lengths = [len(example.question("Why?", answer)[1]["content"]) % 10 / 10 for answer in answers]
    with Judging(lambda n, body: trouble[n] if n < len(trouble) else good(n, body)) as server:
        assert graded(example, server, cache, answers) == lengths
        assert len(server.asked) == 3 + len(trouble)
        assert graded(example, server, cache, answers) == lengths
        assert len(server.asked) == 3 + len(trouble)
        assert set(server.keys) == {f"Bearer {KEY}"}
    assert KEY.encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_no_more_are_under_way_than_may_be(example: Any, tmp_path: Path) -> None:
    with Judging(good, seconds=0.03) as server:
        graded(example, server, tmp_path / "cache", [str(n) for n in range(12)], concurrency=3)
        assert server.most == 3 and len(server.asked) == 12


@pytest.mark.parametrize(
    ("answer", "said", "asked"),
    [
        (lambda n, body: (503, f"busy {KEY}"), r"no score in 3 attempts; the last: status 503: 'busy \*\*\*'", 3),
        (lambda n, body: says("Score: 11"), r"no score in 3 attempts; the last: the reply 'Score: 11' has no score", 3),
        (lambda n, body: says("Score: 3 or Score: 9"), r"has no score", 3),
        (lambda n, body: (401, "who are you?"), r"refuses: status 401: 'who are you\?'", 1),
        (lambda n, body: (time.sleep(0.4), says("Score: 1"))[1], r"the last: no answer within 0.2 s", 3),
    ],
)  # fmt: skip
def test_a_failure_of_the_judge_is_never_a_reward(
    example: Any, answer: Any, said: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Judging(answer) as server:
        for name, value in (("URL", server.url), ("MODEL", "judge"), ("KEY", KEY), ("CACHE", str(tmp_path / "cache"))):
            monkeypatch.setenv(f"JUDGE_{name}", value)
        limits = {"wait": 0.01, "retries": 2, "timeout": 0.2 if "0.2 s" in said else 60}
        made = functools.partial(example.Judge, **limits)
        monkeypatch.setattr(example, "Judge", made)
        task = tasks.create(TaskConfig(name="custom"), [example.helpful])
        with pytest.raises(RewardError, match=rf"reward function helpful failed: JudgeError: .*{said}") as error:
            task.rewards(["because"], [{"prompt": "Why?"}])
        assert len(server.asked) == asked
        assert KEY not in str(error.value) and KEY not in json.dumps(error.value.failed)


@pytest.mark.slow
def test_the_judge_rewards_a_run(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["judge_reward.py", "--generations", "1", "--output", "run"])
    with Judging(lambda n, body: (500, "") if n == 3 else good(n, body)) as server:
        for name, value in {"URL": server.url, "MODEL": "judge", "KEY": KEY}.items():
            monkeypatch.setenv(f"JUDGE_{name}", value)
        example.main()
        assert re.search(r"^reward \d\.\d\d -> \d\.\d\d$", capsys.readouterr().out, re.MULTILINE)
        asked = len(server.asked)
        answers = pq.read_table(tmp_path / "run/results/completions/before.parquet").to_pylist()
        judge = example.Judge(server.url, "judge", KEY, tmp_path / "judge_cache.sqlite")
        again = asyncio.run(judge.grade([example.question(row["prompt"], row["text"].strip()) for row in answers]))
        assert again == [row["reward"] for row in answers] and len(server.asked) == asked
    said = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert KEY.encode() not in said
