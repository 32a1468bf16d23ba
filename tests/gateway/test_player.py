# SPDX-License-Identifier: Apache-2.0
"""Harnesses that play episodes through the gateway: who answers them, what they score, and what is left of them."""

import json
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import forked
import httpx
import pytest
from small_runs import UNCHECKED, read_rows, write_rows

import evoalign
from evoalign import setup, transcripts
from evoalign.checks import gateway as gateway_canary
from evoalign.config import from_dict
from evoalign.errors import CanaryError, ConfigError, RewardError
from evoalign.gateway import batches, player
from evoalign.gateway.player import Harnesses
from evoalign.gateway.process import FailedError, Processes, reported
from evoalign.rollouts import Encoded, collect, requests_of
from evoalign.tasks.harness import Harness, finished, scores_of
from evoalign.types import MEAN_PLAN, Episode, Plan, Request, population
from test_episodes import ROWS, SETTINGS, Dialogue

HARNESS = '''
import json, os, sys, time, urllib.error, urllib.request
from pathlib import Path

def chat(url, key, messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, head)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def say(url, key, example, turns=1):
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"say {example['word']}"})
        messages.append({"role": "assistant", "content": chat(url, key, messages)})
    return messages

def right(url, key, example):
    return {"reward": len(say(url, key, example)[-1]["content"]), "extra": 2}

def flaky(url, key, example):
    """Fails the first time for each row."""
    mark = Path("tried-" + example["word"])
    if not mark.exists():
        mark.touch()
        raise RuntimeError("not yet")
    return right(url, key, example)

def broken(url, key, example):
    raise RuntimeError("no sandbox")

def leaks(url, key, example):
    raise RuntimeError(f"no sandbox for {key}")

def exposed(url, key, example):
    return float(key in " ".join(sys.orig_argv))

def heavy(url, key, example):
    return float(any(name in sys.modules for name in ("evoalign.config", "numpy")))

def endless(url, key, example):
    return say(url, key, example, turns=1000)

def slow(url, key, example):
    time.sleep(600)

def forking(url, key, example):
    """Leaves a process behind, in a session of its own."""
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(f"child-{child.pid}").touch()
    return 1.0

def wrong(url, key, example):
    print('{"reward": NaN}')
    sys.exit(0)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "harness.py").write_text(HARNESS)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def tree(command="harness.py:right", **settings):
    task = {
        "name": "harness", "command": command, "train_data": "rows.jsonl", "split": "first_last",
        "train_size": 2, "test_size": 2, **settings.pop("task", {}),
    }  # fmt: skip
    return {**SETTINGS, "checks": UNCHECKED, **settings, "task": task}


def play(config, plan=MEAN_PLAN, drive=None):
    """Play the training rows once."""
    parts = setup.assemble(from_dict(config))
    try:
        asked = requests_of(parts.config, [0, 1], Encoded(parts.task, parts.tokens, parts.data.train), 0)
        if drive is not None:
            how = Harnesses(parts.task, parts.tokens, drive)
            asked = [Request(r.index, (), r.sampling, r.seed, episode=Episode(how, r.episode.example)) for r in asked]
        return collect(parts.engine, plan, asked)
    finally:
        parts.close()


def talk(turns=3):
    """A harness in a thread that has the conversations of `Dialogue`."""

    def drive(url, key, example, seconds):
        messages = [{"role": "user", "content": f"say {example['word']}"}]
        with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=600) as client:
            for turn in range(1, turns + 1):
                reply = client.post(f"{url}/chat/completions", json={"model": "m", "messages": messages})
                text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": f"{example['word']} again, {turn}"})
        return '{"reward": 1}'

    return drive


def spoken(rollouts):
    return {(r.member.index, r.request): transcripts.turns(r.text) for r in rollouts}


def _same_as_in_process(members, rows, temperature, concurrency=64):
    sampling = {"max_tokens": 6, "temperature": temperature}
    inside = from_dict({**SETTINGS, "sampling": sampling})
    task = Dialogue(inside.task.model_copy(update={"name": "own:Dialogue"}))
    parts = setup.assemble(inside, task=task)
    try:
        plan = Plan(0, 0.3, population(members))
        examples = [{"word": f"{row}"} for row in range(rows)]
        asked = requests_of(parts.config, range(rows), Encoded(parts.task, parts.tokens, examples), 0)
        expected = collect(parts.engine, plan, asked)
        limits = {"concurrency": concurrency}
        harness = Harness(inside.task.model_copy(update={"name": "harness", "command": "x", "episode": None}))
        harness.config = harness.config.model_validate({**harness.config.model_dump(), "episode": limits})
        how = Harnesses(harness, parts.tokens, talk())
        through = [Request(r.index, (), r.sampling, r.seed, episode=Episode(how, r.episode.example)) for r in asked]
        found = collect(parts.engine, plan, through)
    finally:
        parts.close()
    assert spoken(found) == spoken(expected)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert len({r.text for r in found}) > members


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_conversations_through_the_gateway_have_the_tokens_of_those_in_process(temperature):
    _same_as_in_process(4, 3, temperature)


@pytest.mark.slow
@pytest.mark.last("64-64")
@pytest.mark.parametrize(("rows", "concurrency"), [(4, 16), (64, 64)])
def test_many_conversations_of_30_members_are_those_in_process(rows, concurrency):
    """There are more of them than are played at once."""
    _same_as_in_process(30, rows, 0.0, concurrency)


def test_a_run_trains_and_reports_the_columns_of_the_harness(folder):
    result = evoalign.train({**tree(), "output_dir": "run"})
    assert {"reward", "reward/extra"} <= result.after.measures.keys()
    assert result.after.measures["reward/extra"] == 2
    text = result.after.completions[0].text
    assert scores_of(text)["reward"] == len(transcripts.turns(text)[0])
    assert transcripts.messages(text)[-1]["prompt"] == [{"role": "user", "content": "say three"}]


def test_a_failed_harness_is_tried_again(folder):
    rollouts = play(tree("harness.py:flaky"))
    assert [scores_of(r.text)["extra"] for r in rollouts] == [2, 2]
    assert len(list(folder.glob("tried-*"))) == 2


def test_a_harness_that_keeps_failing_stops_the_run_and_is_no_score(folder):
    with pytest.raises(RewardError, match=r"unperturbed model on the row \{'word': .*no sandbox"):
        play({**tree("harness.py:broken"), "grader": {"retries": 0}})


def test_what_a_failed_harness_wrote_is_kept(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(RewardError, match=r"its stderr is in .*\.txt") as error:
        play({**tree("harness.py:leaks"), "grader": {"retries": 0}})
    (kept,) = folder.glob("evoalign_harness_*.txt")
    assert "Traceback" in kept.read_text() and "no sandbox" in kept.read_text()
    assert "sk-" not in kept.read_text() + str(error.value)


def test_the_key_is_no_argument_of_a_function_s_process(folder):
    assert [scores_of(r.text) for r in play(tree("harness.py:exposed"))] == [{"reward": 0}] * 2


def test_a_function_s_process_imports_little(folder):
    assert [scores_of(r.text) for r in play(tree("harness.py:heavy"))] == [{"reward": 0}] * 2


@pytest.mark.parametrize(
    ("command", "mend"), [("./missing.sh {example}", "fix task.command"), ("here.py {example}", r"\./here\.py")]
)
def test_a_command_that_cannot_be_started_is_named_and_not_tried_again(folder, command, mend):
    Path("here.py").write_text("print(1)\n")
    with pytest.raises(RewardError, match=rf"cannot be started: .*\(1 attempts.*{mend}"):
        play(tree(command))


def test_each_completion_of_a_request_is_a_turn(folder):
    def drive(url, key, example, seconds):
        statuses = []
        with httpx.Client(timeout=60, headers={"Authorization": f"Bearer {key}"}) as client:
            for n in (2, 2, 1):
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": n}
                statuses.append(client.post(f"{url}/chat/completions", json=body).status_code)
        assert statuses == [200, 400, 200]
        return '{"reward": 1}'

    rollouts = play(tree(task={"episode": {"turns": 3, "at_limit": 0}}), drive=drive)
    assert [len(r.later) for r in rollouts] == [3, 3]


def test_an_episode_is_cut_off_as_its_last_completion_is(folder):
    assert {r.finish_reason for r in play({**tree(), "sampling": {"max_tokens": 2}})} == {"length"}


@pytest.mark.parametrize("slow", ["engine", "server"])
def test_a_request_that_its_client_gave_up_is_answered_the_same_when_it_is_repeated(slow, folder, monkeypatch):
    """It gets the completion of the same turn, also where the server learns of both requests at once."""
    own, found, hung, loops = batches.answer, {}, set(), []

    def answer(engine, plan, tokens, waiting, **named):
        for one in waiting:
            loops.append(one.loop)
            text = one.chat.messages[-1]["content"]
            if impatient and slow == "engine" and one.order[2] == 1 and text not in hung:
                hung.add(text)
                while not one.reply.done():  # its client is still there
                    time.sleep(0.01)
        own(engine, plan, tokens, waiting, **named)

    def sent(url, key, text):
        client = HTTPConnection(urlsplit(url).netloc, timeout=60)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        client.request("POST", f"{urlsplit(url).path}/chat/completions", body, headers)
        return client

    def drive(url, key, example, seconds):
        for text in (f"{example['word']} {turn}" for turn in range(3)):
            is_free = threading.Event()
            if impatient and text.endswith("1"):
                if slow == "server":
                    loops[-1].call_soon_threadsafe(is_free.wait, 60)
                with closing(sent(url, key, text)):
                    while slow == "engine" and text not in hung:
                        time.sleep(0.01)
            with closing(sent(url, key, text)) as client:
                is_free.set()
                reply = client.getresponse()
                assert reply.status == 200, reply.read()
        return '{"reward": 1}'

    monkeypatch.setattr(batches, "answer", answer)
    settings = {**tree(task={"episode": {"turns": 3}}), "sampling": {"max_tokens": 6, "temperature": 1.0}}
    for impatient in (False, True):
        found[impatient] = play(settings, drive=drive)
    assert len(hung) == (2 if slow == "engine" else 0)
    assert [(r.text, r.later) for r in found[True]] == [(r.text, r.later) for r in found[False]]


@pytest.mark.parametrize(
    ("command", "limits", "named"),
    [
        ("harness.py:endless", {"turns": 2}, "task.episode.turns"),
        ("harness.py:endless", {"tokens": 7, "turns": 50}, "task.episode.tokens"),
        ("harness.py:slow", {"seconds": 0.5}, "task.episode.seconds"),
    ],
)
def test_limits_of_an_episode(folder, command, limits, named):
    config = {**tree(command, task={"episode": limits}), "grader": {"retries": 0}}
    with pytest.raises(RewardError, match=named):
        play(config)
    rollouts = play(tree(command, task={"episode": {**limits, "at_limit": -1}}))
    assert [scores_of(r.text) for r in rollouts] == [{"reward": -1}] * 2
    assert {r.finish_reason for r in rollouts} == {"length"}
    if "turns" in limits and len(limits) == 1:
        assert [len(r.later) for r in rollouts] == [2, 2]


def test_a_late_request_of_an_attempt_that_ended_is_refused(folder):
    keys, lock = {}, threading.Lock()

    def drive(url, key, example, seconds):
        with lock:
            old = keys.setdefault(example["word"], key)
        if old == key:
            raise FailedError("lost its connection")
        with httpx.Client(timeout=60) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            late = client.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {old}"})
        assert late.status_code == 401
        return '{"reward": 3}'

    assert [scores_of(r.text) for r in play(tree(), drive=drive)] == [{"reward": 3}] * 2


def test_scores_by_post_and_by_file(folder):
    def drive(url, key, example, seconds):
        with httpx.Client(timeout=60, headers={"x-api-key": key}) as client:
            assert client.post(f"{url}/score", json={"format": 1}).status_code == 400
            assert client.post(f"{url}/score", json={"reward": 0.25, "format": 1}).status_code == 200
        return "no score here"

    posted = tree(task={"score": "post"})
    with pytest.raises(RewardError, match=r"task\.score: post"):  # its output is not read
        play({**posted, "grader": {"retries": 0}}, drive=lambda *_: '{"reward": 1}')
    assert [scores_of(r.text) for r in play(posted, drive=drive)] == [{"reward": 0.25, "format": 1}] * 2
    command = """sh -c 'echo "{{\\"reward\\": 7}}" > $EVOALIGN_SCORE; echo "{{\\"reward\\": 1}}"'"""
    assert [scores_of(r.text) for r in play(tree(command, task={"score": "file"}))] == [{"reward": 7}] * 2
    assert [scores_of(r.text) for r in play(tree(command))] == [{"reward": 1}] * 2  # the file is not read


@pytest.mark.parametrize(
    ("output", "scores"),
    [
        ('{"reward": 1}', {"reward": 1}),
        ('log\n{"reward": 0.5, "steps": 3, "note": "x", "ok": true}\nbye\n', {"reward": 0.5, "steps": 3}),
        ("0.25\n", {"reward": 0.25}),
        ("", None),
        ('{"score": 1}', None),
        ('{"reward": NaN}', None),
        ('{"reward": "1"}', None),
        ("[" * 100_000, None),
    ],
)
def test_reported_reads_the_last_score(output, scores):
    if scores is None:
        with pytest.raises(FailedError):
            reported(output)
    else:
        assert reported(output) == scores


def test_a_score_that_is_not_finite_is_a_failure(folder):
    with pytest.raises(RewardError, match="not finite"):
        play({**tree("harness.py:wrong"), "grader": {"retries": 0}})


@pytest.mark.parametrize("command", ["./x.sh {secret}", "./x.sh {", "./x.sh 'a"])
def test_a_command_with_unknown_placeholders_is_refused(command):
    with pytest.raises(ConfigError, match=r"task\.command"):
        setup.task_and_data(from_dict(tree(command)), None, None)


def test_grpo_refuses_a_harness(folder):
    config = {k: v for k, v in tree().items() if k != "es"}
    with pytest.raises(ConfigError, match="GRPO cannot train task harness"):
        evoalign.grpo({**config, "grpo": {"max_steps": 1}, "output_dir": "grpo"})


def test_processes_of_a_harness_are_killed_with_it(folder):
    play(tree("harness.py:forking"))
    children = [int(file.name.removeprefix("child-")) for file in folder.glob("child-*")]
    assert len(children) == 2
    deadline = time.monotonic() + 60  # what is killed is gone a moment later
    while any(_lives(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_guard_that_was_killed_is_replaced():
    with Processes() as processes:
        first = processes._guard
        first.kill()
        first.wait(60)
        assert processes.run(["true"], "http://x/v1", "key", {}, 60, by_file=False) == ""
        assert processes._guard is not first and _lives(processes._guard.pid)


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_run_keeps_its_finished_episodes(folder):
    """SIGKILL in the middle of a generation; the resumed run plays the others alone, and its journal is whole."""
    counted = 'def counted(url, key, example):\n    with open("played", "a") as file: file.write("x\\n")\n'
    counted += "    time.sleep(0.3)\n    return right(url, key, example)\n"
    (folder / "harness.py").write_text(HARNESS + counted)
    write_rows(folder / "config.yaml", [{**tree("harness.py:counted", task={"episode": {"concurrency": 1}}),
                                         "output_dir": "run"}])  # fmt: skip
    child = forked.Popen([sys.executable, "-m", "evoalign.cli", "train", "config.yaml"])
    record, deadline = folder / "run/results/episodes.jsonl", time.monotonic() + 300
    while not (record.is_file() and len(record.read_text().splitlines()) >= 4) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL
    kept = len(read_rows(record)) - 1
    time.sleep(3)  # a harness that was starting has written its line, or was killed
    played = len((folder / "played").read_text().splitlines())
    assert 3 <= kept < 8
    evoalign.train(json.loads((folder / "config.yaml").read_text()), resume=True)
    again = len((folder / "played").read_text().splitlines()) - played
    assert again == 8 - kept + 8 + 2  # the rest, the second generation, and the test split at the end
    assert evoalign.replay(folder / "run")


@pytest.mark.parametrize("fault", [None, "keys", "replies"])
def test_the_canary_finds_completions_of_another_member(folder, monkeypatch, fault):
    if fault == "keys":
        begin = player._Backend.begin

        def mixed(self, job):
            other = {0: 2, 2: 0}.get(job.member.index)
            members = {m.index: m for m in gateway_canary.MEMBERS}
            wrong = job if other is None else type(job)(members[other], job.request, job.example)
            return begin(self, wrong)

        monkeypatch.setattr(player._Backend, "begin", mixed)
    elif fault == "replies":
        answer = batches._answer

        def first_of_all(tokens, chat, read, rollout, kept=[]):  # noqa: B006 (the fault is to remember)
            kept.append(rollout)
            return answer(tokens, chat, read, kept[0])

        monkeypatch.setattr(batches, "_answer", first_of_all)
    config = {**tree(), "checks": {**UNCHECKED, "canary_every": 1}, "output_dir": "run"}
    if fault is None:
        evoalign.train(config)
        return
    with pytest.raises(CanaryError, match="through the gateway"):
        evoalign.train(config)


def test_serial_answers_do_not_depend_on_what_waits(folder):
    one = play({**tree(), "deterministic": True}, Plan(0, 0.1, population(3)), talk())
    other = play({**tree(), "deterministic": True, "task": {**tree()["task"], "episode": {"concurrency": 1}}},
                 Plan(0, 0.1, population(3)), talk())  # fmt: skip
    assert [(r.text, r.token_ids) for r in one] == [(r.text, r.token_ids) for r in other]


def test_finished_records_what_is_new_to_each_call():
    first = [{"role": "user", "content": "a"}]
    second = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    other = [{"role": "user", "content": "another agent"}]
    text = finished([(first, "b"), (second, "d"), (other, "e")], {"reward": 1})
    assert transcripts.turns(text) == ["b", "d", "e"]
    assert [m["content"] for m in transcripts.messages(text)[:-1]] == ["b", "c", "d", "another agent", "e"]
    assert finished([], {"reward": 2}) and scores_of(finished([], {"reward": 2})) == {"reward": 2}
