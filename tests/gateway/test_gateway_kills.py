# SPDX-License-Identifier: Apache-2.0
"""Harnesses, guards and trainers killed by SIGKILL at moments of a run: its scores, its journal, and what is left.

    OMP_NUM_THREADS=1 PYTHONPATH=tests/support:tests/gateway python tests/gateway/test_gateway_kills.py  # a line each

A moment is a number of lines in the log that the harnesses write, and some hundredths of a second.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import kill_points
import pyarrow.parquet
import pytest
from small_runs import UNCHECKED, read_rows, write_rows

import evoalign
from evoalign.tasks.harness import scores_of

MEMBERS, GENERATIONS, TRAINED, PATIENCE = 4, 2, 2, 120.0
WORDS = ("one", "two", "three", "four")
HARNESS = """
import json, os, random, subprocess, sys, time, urllib.request

url, key, row = sys.argv[1:]
word, messages = json.load(open(row))["word"], []

def log(event):
    line = json.dumps({"event": event, "word": word, "pid": os.getpid(), "life": int(os.environ["LIFE"])}) + "\\n"
    with open(os.environ["HARNESS_LOG"], "a") as file:
        file.write(line)

log("begin")
if word == "one":  # as a sandbox does it, in a session of its own
    subprocess.Popen(["sleep", "600"], start_new_session=True)
for turn in range(2):
    time.sleep(random.uniform(0, 0.02))
    messages.append({"role": "user", "content": f"say {word}, {turn}"})
    body = json.dumps({"model": "any", "messages": messages}).encode()
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, head)) as reply:
        messages.append({"role": "assistant", "content": json.load(reply)["choices"][0]["message"]["content"]})
    log("answer")
score = sum(len(m["content"]) for m in messages if m["role"] == "assistant")
print(json.dumps({"reward": score + (random.random() if os.environ["IS_RANDOM"] else 0), "turns": 2}))
log("end")
"""
EVENTS = 4
LINES = EVENTS * (TRAINED * MEMBERS * GENERATIONS + 2 * (len(WORDS) - TRAINED))
"""Lines of the log of an undisturbed run: `EVENTS` of each episode; the mean is evaluated before and after."""
VICTIMS = (("harness",), ("trainer",), ("guard",), ("guard", "trainer"))
kill_points.PROCESSES.set_forkserver_preload(
    [*kill_points.PRELOADED, "evoalign.gateway.server", "evoalign.analysis.runs"]
)


def settings(is_deterministic):
    return {
        "output_dir": "run", "deterministic": is_deterministic, "checks": UNCHECKED, "sampling": {"max_tokens": 6},
        "es": {"population_size": MEMBERS, "num_generations": GENERATIONS, "sigma": 0.05, "learning_rate": 0.02},
        "evaluation": {"max_tokens": 6},
        "task": {"name": "harness", "command": f"{sys.executable} -S harness.py {{base_url}} {{api_key}} {{example}}",
                 "train_data": "rows.jsonl", "split": "first_last", "train_size": TRAINED,
                 "test_size": len(WORDS) - TRAINED, "episode": {"concurrency": 3}},
    }  # fmt: skip


def _train(folder, life, is_random):
    """Train in a process of its own; the second life resumes."""
    from matplotlib.figure import Figure

    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for handle in (1, 2):
        os.dup2(log, handle)
    os.chdir(folder)
    tempfile.tempdir = None
    own = {"TMPDIR": f"{folder}/tmp", "HARNESS_LOG": f"{folder}/played", "LIFE": f"{life}"}
    os.environ.update({**own, "IS_RANDOM": "yes" if is_random else ""})
    Figure.savefig = lambda self, file, **options: file.write(b"one pixel")
    evoalign.train(json.loads(Path("config.json").read_text()), resume=life > 0)


class Trial:
    """A run in a folder, some of whose processes are killed."""

    def __init__(self, folder, is_deterministic):
        self.folder, self.is_deterministic, self.life = folder, is_deterministic, 0
        (folder / "tmp").mkdir(parents=True)
        (folder / "harness.py").write_text(HARNESS)
        write_rows(folder / "rows.jsonl", [{"word": word} for word in WORDS])
        (folder / "config.json").write_text(json.dumps(settings(is_deterministic)))

    def start(self):
        """Start the trainer; after the first time, resume."""
        given = (self.folder, self.life, not self.is_deterministic)
        self.trainer = kill_points.PROCESSES.Process(target=_train, args=given)
        self.trainer.start()
        self.life += 1

    def finish(self):
        self.trainer.join(PATIENCE)
        assert self.trainer.exitcode == 0, (self.folder / "log").read_text()[-3000:]
        assert self.left() == ([], [])

    def lines(self):
        file = self.folder / "played"
        return read_rows(file) if file.is_file() else []

    def processes(self, of=b""):
        """Running processes that were started with this trial's folder in their environment."""
        found, own = [], os.fsencode(f"{self.folder}/")
        for process in Path("/proc").glob("[0-9]*"):
            try:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and own in (process / "environ").read_bytes():
                    found += [int(process.name)] if of in (process / "cmdline").read_bytes() else []
            except OSError:
                continue
        return found

    def left(self):
        return self.processes(), list((self.folder / "tmp").glob("evoalign-episode-*"))

    def wait(self, until):
        deadline = time.monotonic() + PATIENCE
        while not (found := until()):
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.02)
        return found

    def kill(self, victim):
        """Kill one of its processes, unless the run ends first. Return the line that a harness began with."""
        if victim == "trainer":
            self.trainer.kill()
            self.trainer.join()
            return None
        found = self.wait(lambda: self._struck(victim) or self.trainer.exitcode is not None)
        if victim == "guard" and found is not True:
            self.wait(lambda: set(self.guards()) - {found} or self.trainer.exitcode is not None)  # another one starts
        return found if victim == "harness" and found is not True else None

    def _struck(self, victim):
        """Kill the latest harness or guard that runs. Return its first line or process id; None if there is none."""
        for found in reversed(self._running() if victim == "harness" else self.guards()):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(found["pid"] if victim == "harness" else found, signal.SIGKILL)
                return found
        return None

    def guards(self):
        return self.processes(b"guarding")

    def _running(self):
        lines, alive = self.lines(), self.processes()
        ended = {line["pid"] for line in lines if line["event"] == "end"}
        return [x for x in lines if x["event"] == "begin" and x["pid"] in alive and x["pid"] not in ended]


def records(run):
    """The generation whose finished episodes a run has kept, and their rewards by member and request."""
    try:
        text = (run / "results/episodes.jsonl").read_text()
    except FileNotFoundError:
        return 0, {}
    head, *lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    keys = [json.loads(line["key"]) for line in lines]
    found = {
        (key[0]["index"], key[1]): scores_of(line["text"])["reward"] for key, line in zip(keys, lines, strict=True)
    }
    assert len(found) == len(lines)
    return head["generation"], found


def begun(trial, life=None):
    """How often each training row was begun."""
    lines = [x["word"] for x in trial.lines() if x["event"] == "begin" and life in (None, x["life"])]
    return {word: lines.count(word) for word in WORDS[:TRAINED]}


def updates_of(run):
    file = run / "journal.jsonl"
    text = file.read_text() if file.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if row["type"] == "update"]


def rewards_of(run, generation):
    """The rewards that an update was made of, by member and request."""
    table = pyarrow.parquet.read_table(run / f"results/completions/rewards_{generation:04}.parquet")
    rewards = table["reward"].to_pylist()
    assert len(rewards) == MEMBERS * TRAINED
    return {divmod(place, TRAINED): reward for place, reward in enumerate(rewards)}


def one(folder, kills, draw, is_deterministic=True, journal=None):
    """Kill victims, each at a moment from 0 to 1 of a run; check what it comes to. Return a row about it."""
    trial = Trial(folder, is_deterministic)
    trial.start()
    killed = []
    try:
        for victim, moment in kills:
            trial.wait(lambda least=int(moment * LINES): len(trial.lines()) >= least)
            time.sleep(draw.uniform(0, 0.05))
            row = {"victims": [victim for victim, _ in kills], "lines": len(trial.lines())}
            killed.append(trial.kill(victim))
        row |= {"deterministic": is_deterministic, "exit": trial.trainer.exitcode}
        return row | (_resumed(trial) if victim == "trainer" else _undeterred(trial, killed)) | _result(trial, journal)
    finally:
        trial.trainer.kill()


def _resumed(trial):
    """Check what is left of a trainer that was killed, and what the second one plays again."""
    began, run = time.monotonic(), trial.folder / "run"
    trial.wait(lambda: trial.left() == ([], []))
    gone = time.monotonic() - began
    done, (generation, kept) = len(updates_of(run)), records(run)
    kept = kept if generation == done else {}
    trial.start()
    trial.finish()
    expected = dict.fromkeys(WORDS[:TRAINED], MEMBERS * (GENERATIONS - done))
    for _, request in kept:
        expected[WORDS[request]] -= 1
    assert begun(trial, life=1) == expected
    if kept:
        rewards = rewards_of(run, generation)
        assert {key: rewards[key] for key in kept} == kept
    return {"updates": done, "kept": len(kept), "again": sum(expected.values()), "gone after": round(gone, 1)}


def _undeterred(trial, killed):
    """Check what a run played, one of whose harnesses or guards was killed."""
    trial.finish()
    expected, found = dict.fromkeys(WORDS[:TRAINED], MEMBERS * GENERATIONS), begun(trial)
    ended = {line["pid"] for line in trial.lines() if line["event"] == "end"}
    for line in killed:
        word = None if line is None else line["word"]
        # One that had written its last line may have ended before the signal, or was killed before its exit.
        if word in expected and (line["pid"] not in ended or found[word] > expected[word]):
            expected[word] += 1
    assert found == expected
    return {"again": sum(expected.values()) - TRAINED * MEMBERS * GENERATIONS}


def _result(trial, journal):
    """Check that the journal has every score once, is replayed to its hash, and where given equals another one."""
    run, updates = trial.folder / "run", updates_of(trial.folder / "run")
    assert len(updates) == GENERATIONS
    for generation, update in enumerate(updates):
        rewards = rewards_of(run, generation)
        means = [sum(rewards[m, i] for i in range(TRAINED)) / TRAINED for m in range(MEMBERS)]
        assert update["scores"] == pytest.approx(means, abs=1e-9)
    assert evoalign.replay(run)
    assert journal is None or (run / "journal.jsonl").read_bytes() == journal
    return {"journal": "the same" if journal is not None else "replayed"}


def undisturbed(folder):
    trial = Trial(folder, is_deterministic=True)
    trial.start()
    trial.finish()
    assert len(trial.lines()) == LINES
    return (folder / "run/journal.jsonl").read_bytes()


def trials(folder, count):
    """Kill at this many moments, evenly over the run; yield a row of each. A half of the harnesses draw a number."""
    draw, journal = random.Random(count), undisturbed(folder / "undisturbed")
    for place in range(count):
        victims, moment = VICTIMS[place % len(VICTIMS)], place / count
        is_deterministic = place // len(VICTIMS) % 2 == 0
        kills, expected = [(victim, moment) for victim in victims], journal if is_deterministic else None
        yield one(folder / f"{place}", kills, draw, is_deterministic, expected)
        shutil.rmtree(folder / f"{place}")


def test_a_run_whose_processes_are_killed_has_the_journal_of_another(tmp_path):
    journal = undisturbed(tmp_path / "undisturbed")
    kills = [("harness", 0.2), ("guard", 0.3), ("trainer", 0.7)]
    row = one(tmp_path / "killed", kills, random.Random(0), journal=journal)
    assert row["exit"] == -signal.SIGKILL and row["kept"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_processes_killed_at_40_moments_change_no_score_and_leave_nothing(tmp_path):
    rows = list(trials(tmp_path, 40))
    assert sum(row["exit"] == -signal.SIGKILL for row in rows if "trainer" in row["victims"]) >= 18


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as main_folder:
        for shown in trials(Path(main_folder), 40):
            print(json.dumps(shown), flush=True)
