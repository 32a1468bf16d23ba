# SPDX-License-Identifier: Apache-2.0
"""TRL's environments as tasks: tools, rewards, and the same class for ES and GRPO."""

import json
import random
from pathlib import Path

import pytest
from chat_templates import model
from small_runs import UNCHECKED, write_rows

import evoalign
from evoalign import setup, transcripts
from evoalign.config import from_dict
from evoalign.errors import ConfigError, ModelError, RewardError
from evoalign.evaluation import evaluate
from evoalign.rollouts import Encoded, collect, requests_of
from evoalign.tasks import create
from evoalign.tasks.environment import tools_of
from evoalign.types import Plan, population

ENVIRONMENT = '''
import random, sys, time

class IncrementEnv:
    """As in TRL's documentation."""

    def __init__(self):
        self._counter = 0

    def reset(self, **kwargs) -> str | None:
        self._counter = 0
        return f" The counter is {self._counter}."

    def increment(self, a: int) -> int:
        """
        Increment the integer by a specified value

        Args:
            a: The value to increment by

        Returns:
            The incremented integer.
        """
        if a > 100:
            raise ValueError("too much")
        self._counter += a
        return self._counter

    def get_reward(self) -> float:
        return float(self._counter)


class Dice(IncrementEnv):
    def reset(self, **kwargs):
        self._counter = random.randrange(10**6)

    def roll(self) -> int:
        """
        Roll a die.
        """
        self._counter = random.randrange(10**6)
        return self._counter


class Clock(IncrementEnv):
    def roll(self) -> str:
        """
        Tell the time.
        """
        return str(time.perf_counter_ns())


class Hanging(IncrementEnv):
    def roll(self) -> str:
        """
        Never return.
        """
        time.sleep(600)


class Patient(IncrementEnv):
    async def roll(self) -> str:
        """
        Wait.
        """
        return "waited"

    async def get_reward(self):
        return 2.0


class Heavy(IncrementEnv):
    def get_reward(self):
        return float("transformers" in sys.modules)


class NoReset:
    def act(self) -> str:
        """
        Act.
        """


class Untyped(IncrementEnv):
    def roll(self, x):
        """
        Roll.
        """


class Bare:
    def reset(self, **kwargs):
        self.seen = kwargs

    def act(self, what: str) -> str:
        """
        Act.

        Args:
            what: The thing.
        """
        self.what = what
        return "done"


def of_environment(environments, **kwargs):
    return [float(len(getattr(e, "what", ""))) for e in environments]


def of_text(completions, environments, word, **kwargs):
    return [float(word in c[-1]["content"]) for c, word in zip(completions, word)]
'''
ROWS = [{"prompt": f"Increment by {word}.", "word": word} for word in ("one", "two", "three", "four")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the environments, rows and the tiny model with a template that has tools."""
    trl = pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("environment")
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    model(folder / "model", template)
    (folder / "envs.py").write_text(ENVIRONMENT)
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def tree(name="IncrementEnv", **settings):
    task = {
        "name": "environment", "environment": f"envs.py:{name}", "train_data": "rows.jsonl", "split": "first_last",
        "train_size": 2, "test_size": 2, **settings.pop("task", {}),
    }  # fmt: skip
    return {
        "model": {"name": "model"}, "sampling": {"max_tokens": 8}, "checks": UNCHECKED,
        "es": {"population_size": 4, "num_generations": 2, "sigma": 0.05, "learning_rate": 0.02},
        **settings, "task": task,
    }  # fmt: skip


def call(name="increment", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted:
    """An engine whose members write what they are given, turn by turn."""

    def __init__(self, tokens, *turns):
        self.tokens, self.turns, self.prompts = tokens, turns, []

    def context(self):
        return None

    def rollout(self, plan, requests):
        from evoalign.types import Rollout

        turn = self.turns[min(len(self.prompts), len(self.turns) - 1)]
        self.prompts.append([self.tokens.tokenizer.decode(r.prompt_ids) for r in requests])
        for request in requests:
            for member in [request.member] if request.member else plan.members:
                yield Rollout(member, request.index, (1,), turn, "stop")


@pytest.fixture
def played():
    """Play the first row with a script; return the episode, its columns, and the prompts of each turn."""
    opened = []

    def run(config, *turns, members=1):
        parts = setup.assemble(from_dict(config))
        opened.append(parts)
        engine = Scripted(parts.tokens, *turns)
        asked = requests_of(parts.config, [0], Encoded(parts.task, parts.tokens, parts.data.train), 0)
        rollouts = collect(engine, Plan(0, 0.1, population(members)), asked)
        columns = parts.task.columns([r.text for r in rollouts], [parts.data.train[0]] * members)
        return rollouts[0], columns, engine.prompts

    yield run
    for parts in opened:
        parts.close()


def test_tools_change_the_environment_that_gives_the_reward(played):
    rollout, columns, prompts = played(tree(), call(a=3) + "\n" + call(a=4), call(a=5), "Done.")
    assert columns == {"IncrementEnv": [12.0]}
    replies = [m["content"] for m in transcripts.messages(rollout.text) if m["role"] == "tool"]
    assert replies == ["3", "7", "12"]
    assert len(rollout.later) == 2 and transcripts.turns(rollout.text)[-1] == "Done."
    assert "Increment by one. The counter is 0." in prompts[0][0]
    assert '"increment"' in prompts[0][0] and "The value to increment by" in prompts[0][0]
    assert prompts[1][0].startswith(prompts[0][0]) and "<tool_response>" in prompts[1][0]


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        (call("missing", a=1), "Tool missing not found"),
        (call(b=1), "unexpected keyword"),
        (call(a=101), "too much"),
        ('<tool_call>\n{"name": "increment", "arguments": {"a": 1\n</tool_call>', "JSON"),
    ],
)
def test_a_bad_call_is_answered_with_its_error(played, turn, reply):
    rollout, columns, prompts = played(tree(), turn, call(a=2), "Sorry.")
    _, answer, *_ = transcripts.messages(rollout.text)
    assert reply in answer["content"] and answer["content"].strip() in prompts[1][0]
    assert columns == {"IncrementEnv": [2.0]}


def test_calls_of_the_last_turn_are_made(played):
    rollout, columns, _ = played(tree(task={"episode": {"turns": 2}}), call(a=1))
    assert columns == {"IncrementEnv": [2.0]} and rollout.finish_reason == "length"


def test_an_episode_is_played_once_where_its_worker_lives(played):
    """An environment that is not deterministic can train: nothing is repeated, whatever is around the calls."""
    broken = '<tool_call>\n{"name": "roll", "arguments": {'
    _, columns, _ = played(
        tree("Clock"), f"  {call('roll')}", broken, f"{call('increment', a=4)} ", "Done.\n", members=2
    )
    assert columns == {"Clock": [4.0, 4.0]}


def test_random_numbers_are_those_of_the_row_for_all_members(played):
    first = played(tree("Dice"), call("roll"), "Done.", members=3)
    random.seed(1)
    again = played(tree("Dice"), call("roll"), "Done.")
    assert len(set(first[1]["Dice"])) == 1
    assert again[1]["Dice"] == first[1]["Dice"][:1] and again[0].text == first[0].text


def test_a_killed_worker_repeats_the_calls(played):
    parts = setup.assemble(from_dict(tree("Dice")))
    try:
        row = parts.data.train[0]
        made = {"type": "function", "function": {"name": "roll", "arguments": {}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [made]}
        text = transcripts.answered(call("roll"), [turn])
        [reply] = parts.task.replies([text], [row])
        whole = transcripts.join(transcripts.answered(call("roll"), [turn, *reply]), "Done.")
        before = parts.task.columns([whole], [row])
        parts.task._worker.kill()
        assert parts.task.columns([whole], [row]) == before == {"Dice": [float(reply[0]["content"])]}
    finally:
        parts.close()


def test_an_environment_that_is_not_deterministic_is_refused_when_repeated(played):
    rollout, _, _ = played(tree("Clock"), call("roll"), "Done.")
    with pytest.raises(RewardError, match="not deterministic"):
        create(from_dict(tree("Clock")).task).columns([rollout.text], [ROWS[0] | {"prompt": [
            {"role": "user", "content": ROWS[0]["prompt"]}]}])  # fmt: skip


def test_a_tool_that_hangs_stops_the_run_with_its_name(played):
    config = {**tree("Hanging"), "grader": {"timeout": 2, "retries": 0}}
    with pytest.raises(RewardError, match="hung"):
        played(config, call("roll"))


def test_coroutines_are_awaited(played):
    _, columns, prompts = played(tree("Patient"), call("roll"), "Done.")
    assert "waited" in prompts[1][0] and columns == {"Patient": [2.0]}


def test_a_worker_does_not_import_transformers(played):
    assert played(tree("Heavy"), call(a=1), "Done.")[1] == {"Heavy": [0.0]}


def test_reward_functions_get_environments_and_messages(played):
    config = tree("Bare", task={"rewards": ["envs.py:of_environment", "envs.py:of_text"]})
    _, columns, _ = played(config, call("act", what="three"), "one and done")
    assert columns == {"of_environment": [5.0], "of_text": [1.0]}


def test_rows_may_have_no_prompt(played, folder):
    write_rows(folder / "bare.jsonl", [{"word": row["word"]} for row in ROWS])
    _, columns, prompts = played(tree(task={"train_data": "bare.jsonl"}), call(a=1), "Done.")
    assert "The counter is 0." in prompts[0][0] and columns == {"IncrementEnv": [1.0]}


@pytest.mark.parametrize(
    ("name", "error"),
    [("NoReset", "reset"), ("Untyped", "roll"), ("Bare", "task.rewards"), ("of_text", "not a class"), ("X", "no 'X'")],
)
def test_what_is_no_environment_is_refused(name, error):
    with pytest.raises(ConfigError, match=error):
        _ = create(from_dict(tree(name)).task).tools


def test_a_model_without_tools_is_refused():
    with pytest.raises(ModelError, match="tool"):
        parts = setup.assemble(from_dict({**tree(), "model": {"name": "tiny"}}))
        try:
            Encoded(parts.task, parts.tokens, parts.data.train)
        finally:
            parts.close()


def test_tools_of_leaves_out_private_methods():
    class Some:
        def reset(self): ...
        def get_reward(self): ...
        def _hidden(self): ...
        def act(self): ...

    assert list(tools_of(Some)) == ["act"]


def test_train_and_grpo_take_the_same_class(tmp_path):
    result = evoalign.train({**tree(), "output_dir": str(tmp_path / "es")})
    assert "turns" in result.after.measures
    config = {k: v for k, v in tree().items() if k != "es"}
    grpo = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 24}
    result = evoalign.grpo({**config, "grpo": grpo, "output_dir": str(tmp_path / "grpo")})
    assert "turns" in result.after.measures


def test_grpo_needs_a_limit_of_all_turns(tmp_path):
    config = {k: v for k, v in tree().items() if k != "es"}
    with pytest.raises(ConfigError, match="max_completion_length"):
        evoalign.grpo({**config, "grpo": {"max_steps": 1}, "output_dir": str(tmp_path / "grpo")})


def test_evaluation_of_the_mean_plays_episodes():
    parts = setup.assemble(from_dict(tree()))
    try:
        found = evaluate(parts.engine, parts.tokens, parts.task, parts.data.test, parts.config.evaluation)
        assert {"reward", "turns"} <= found.measures.keys()
    finally:
        parts.close()
