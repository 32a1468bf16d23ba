# SPDX-License-Identifier: Apache-2.0
"""Settings that are searched with the weights: draws, the gradient of the logits, what a member is asked, resume."""

import json
import math
import shutil
from collections.abc import Mapping
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from small_runs import UNCHECKED, read_rows, told_by, write_rows

import evoalign
from evoalign import tokens
from evoalign.analysis.evaluations import evaluate_one
from evoalign.checks import divergence, prompts
from evoalign.config import TaskConfig, from_dict, load
from evoalign.config.joint import SettingConfig, likeliest
from evoalign.errors import ConfigError, DataError, ResumeError
from evoalign.models.origin import model_config
from evoalign.rundir import journal
from evoalign.setup import assemble, task_and_data
from evoalign.tasks import Data, Task
from evoalign.tasks.joint import SPAN, Settings
from evoalign.types import Example, Update, population

REWARD = """
def marked(text, example):
    return (example["style"] == "b") + 0.01 * len(text) - (example["temperature"] > 0)
"""
SETTINGS = {
    "style": ["a", "b"],
    "temperature": {"ordinal": [0.0, 0.4, 0.8]},
    "form": {"text": ["{prompt}", "Question: {prompt}"]},
}


def of(rate: float = 1.0, **settings: Any) -> Settings:
    made = {
        n: SettingConfig.model_validate(s if isinstance(s, dict) else {"categorical": s}) for n, s in settings.items()
    }
    return Settings(made, seed=3, rate=rate)


def update(coefficients: list[float], *, antithetic: bool = False, generation: int = 0) -> Update:
    members = population(len(coefficients), antithetic=antithetic)
    return Update(generation, generation, members, tuple(coefficients), sigma=1.0, step=1.0)


def config(folder: Path, **sections: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Which city is the capital of {place}?"} for place in ("Egypt", "France", "Spain", "Italy")]
    (folder / "reward.py").write_text(REWARD)
    data = write_rows(folder / "rows.jsonl", rows)
    tree: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "task": {"name": "custom", "train_data": data, "test_data": data, "settings": SETTINGS,
                 "rewards": [f"{folder / 'reward.py'}:marked"]},
        "lora": {"rank": 2, "alpha": 2, "target_modules": ["down_proj"]},
        "es": {"num_generations": 4, "population_size": 8, "sigma": 0.02, "learning_rate": 0.01, "antithetic": True,
               "settings_learning_rate": 2.0},
        "evaluation": {"max_tokens": 8, "every": 2},
        "checks": UNCHECKED, "grader": {"isolated": False}, "report": False,
    }  # fmt: skip
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree


# --- draws ---


def test_draws_are_a_function_of_counters_and_pairs_share_them() -> None:
    settings = of(style=["a", "b", "c"], size=[1, 2])
    drawn = settings.draw(5, population(400, antithetic=True))
    assert drawn == of(style=["a", "b", "c"], size=[1, 2]).draw(5, population(400, antithetic=True))
    assert drawn[::2] == drawn[1::2]
    assert drawn[10:20] == settings.draw(5, population(400, antithetic=True)[10:20])
    assert drawn != settings.draw(6, population(400, antithetic=True))
    assert [settings.chosen(n)["style"] for n in drawn] != [settings.chosen(n)["size"] for n in drawn]


def test_frequencies_are_the_probabilities() -> None:
    settings = of(style=["a", "b", "c"])
    settings.logits["style"] = [-1.0, 0.0, -2.5]
    weights = [math.exp(x) for x in (-1.0, 0.0, -2.5)]
    assert settings.probabilities("style") == pytest.approx([w / sum(weights) for w in weights], rel=1e-15)
    drawn = settings.draw(0, population(20_000))
    for k, probability in enumerate(settings.probabilities("style")):
        assert drawn.count(k) / 20_000 == pytest.approx(probability, abs=4 * math.sqrt(0.25 / 20_000))


def test_draws_have_these_bits() -> None:
    """On every machine: uniforms are exact, and the exponential is exactly rounded."""
    settings = of(style=["a", "b", "c"])
    settings.logits["style"] = [-0.3, 0.0, -0.7]
    assert settings.draw(1, population(16)) == [0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 2, 0, 1, 1, 1]
    assert [p.hex() for p in settings.probabilities("style")] == [
        "0x1.530d82332d8acp-2",
        "0x1.c9ac61a6bcf66p-2",
        "0x1.c68c384c2afdep-3",
    ]


def test_a_combination_has_one_number() -> None:
    settings = of(style=["a", "b", "c"], size=[1, 2], on=[True, False])
    found = [tuple(settings.chosen(n).values()) for n in range(12)]
    assert set(found) == set(product("abc", (1, 2), (True, False)))
    assert found[0] == ("a", 1, True)
    settings.logits.update(style=[-1.0, -2.0, 0.0], size=[-1.0, 0.0])
    assert settings.chosen(settings.mode()) == {"style": "c", "size": 2, "on": True}


# --- the gradient ---


def expected(values: list[float], logits: list[float], members: int) -> list[float]:
    """The mean move of the logits over all draws of `members` options, each with its exact probability.

    A member's coefficient is the value of its option: then the gradient of the mean value is p_k (v_k - mean).
    """
    total = [0.0] * len(values)
    for drawn in product(range(len(values)), repeat=members):
        settings = of(style=[*range(len(values))])
        settings.logits["style"] = [*logits]
        probability = math.prod(settings.probabilities("style")[k] for k in drawn)
        settings.draw = lambda generation, members, drawn=drawn: [*drawn]
        settings.move(update([values[k] for k in drawn]))
        moved = [after - before for after, before in zip(settings.logits["style"], logits, strict=True)]
        shift = sum(moved) / len(moved)  # only differences of logits count
        total = [t + probability * (m - shift) for t, m in zip(total, moved, strict=True)]
    return total


@pytest.mark.parametrize("members", [2, 3, 4])
def test_move_is_an_unbiased_estimate_of_the_gradient(members: int) -> None:
    values, logits = [0.3, -0.2, 0.9], [0.0, -0.4, -1.1]
    settings = of(style=["a", "b", "c"])
    settings.logits["style"] = logits
    p = settings.probabilities("style")
    mean = sum(q * v for q, v in zip(p, values, strict=True))
    gradient = [q * (v - mean) for q, v in zip(p, values, strict=True)]
    assert expected(values, logits, members) == pytest.approx(gradient, abs=1e-12)


def test_a_pair_counts_once_and_coefficients_need_no_centre() -> None:
    alone, pairs = of(style=["a", "b"]), of(style=["a", "b"])
    alone.move(update([10.5, 10.0, 11.5, 9.0]))
    start = of(style=["a", "b"])
    pairs.draw = lambda generation, members: start.draw(generation, members)
    pairs.move(update([1.0, 0.0, 0.5, -0.5, 2.0, 1.0, -0.5, -1.5], antithetic=True))
    assert pairs.logits == alone.logits != of(style=["a", "b"]).logits


def test_nothing_moves_where_all_draw_the_same_or_score_the_same() -> None:
    settings = of(style=["a", "b"])
    settings.draw = lambda generation, members: [1] * len(members)
    settings.move(update([0.1, 0.2, 0.7, -0.3]))
    assert settings.logits == {"style": [0.0, 0.0]}
    settings = of(style=["a", "b"])
    settings.move(update([0.0] * 6))
    assert settings.mode() == 0 and settings.logits == {"style": [0.0, 0.0]}


def test_an_ordinal_setting_moves_its_neighbours_too() -> None:
    settings = of(size={"ordinal": [1, 2, 3, 4, 5]})
    settings.draw = lambda generation, members: [4, 0, 2]
    settings.move(update([1.0, -1.0, 0.0]))
    steps = [b - a for a, b in zip(settings.logits["size"], settings.logits["size"][1:], strict=False)]
    # The gradient in each difference of neighbours: (1/2) sum c_i [x_i above it], over 4 neighbours.
    assert steps == pytest.approx([float(Fraction(1, 2) / 4)] * 4, abs=1e-15)


def test_no_option_is_lost() -> None:
    settings = of(rate=100.0, style=["a", "b"])
    settings.draw = lambda generation, members: [0, 1]
    settings.move(update([1.0, -1.0]))
    assert settings.logits == {"style": [0.0, -SPAN]}
    assert settings.probabilities("style")[1] > 0.017


# --- rows and prompts ---


def test_rows_have_the_settings_and_the_form_of_the_prompt() -> None:
    settings = of(style=["a", "b"], form={"text": ["{prompt}", "Q: {prompt}"]})
    rows: list[Any] = [
        {"prompt": "One?"},
        {"prompt": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}]},
    ]
    spread = settings.under(settings.under(rows, 1))
    assert len(spread) == 8
    assert spread[0] == {"prompt": "One?", "style": "a", "form": "{prompt}"}
    assert spread[6] == {"prompt": "Q: One?", "style": "b", "form": "Q: {prompt}"}
    assert spread[7]["prompt"] == [{"role": "user", "content": "Q: Two?"}, {"role": "assistant", "content": "2"}]
    assert rows[1]["prompt"][0]["content"] == "Two?"
    assert [*settings.under(rows, 3)] == spread[6:]


def test_a_row_that_cannot_have_the_settings_is_refused() -> None:
    with pytest.raises(DataError, match=r"task\.settings\.style is also a column"):
        _ = of(style=["a", "b"]).under([{"style": "z"}], 0)[0]
    with pytest.raises(DataError, match=r"changes the column prompt.*use custom"):
        _ = of(form={"text": ["{prompt}"]}).under([{"question": "z"}], 0)[0]


# --- configs ---


@pytest.mark.parametrize(
    ("settings", "more", "error"),
    [
        ({"style": []}, {}, "at least 1 item"),
        ({"style": ["a", "a"]}, {}, "repeat one"),
        ({"style": {"ordinal": [1], "text": ["{prompt}"]}}, {}, "a list of options"),
        ({"form": {"text": ["Q:"]}}, {}, "has no {prompt}"),
        ({"a-b": [1, 2]}, {}, "should match pattern"),
        ({"completions": [1, 2]}, {}, "another argument of reward functions"),
        ({"temperature": [0.5, -1]}, {}, "task.settings.temperature: -1: Input should be greater"),
        ({"temperature": ["hot"]}, {}, "task.settings.temperature: 'hot'"),
        ({"max_tokens": [4, 500]}, {}, "max_tokens: 500 exceeds"),
        ({"temperature": [0, 1]}, {"task": {"samples": 2}, "sampling": {"temperature": 1.0}}, "repeats a greedy"),
        ({"style": ["a", "b"]}, {"es": {"population_size": 2}}, "two draws to compare"),
        ({"style": ["a", "b"]}, {"task": {"fitness": "m.py:f"}}, "task.fitness scores rows without"),
        ({n: [*range(100)] for n in "abcde"}, {}, "10,000,000,000 combinations"),
    ],
)
def test_invalid_settings_are_refused(settings: Any, more: dict[str, Any], error: str, tmp_path: Path) -> None:
    tree = config(tmp_path)
    for name, section in more.items():
        tree[name] = {**tree.get(name, {}), **section}
    tree["task"]["settings"] = settings
    with pytest.raises(ConfigError) as raised:
        from_dict(tree)
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("task", "settings", "error"),
    [
        ({"objective": "lagrangian"}, {"style": ["a", "b"]}, "may read the rows, which differ by member"),
        ({"name": "likelihood", "rewards": []}, {"temperature": [0.1, 0.7]}, "remove task.settings.temperature"),
    ],
)
def test_a_task_that_settings_do_not_suit_is_refused(
    task: dict[str, Any], settings: dict[str, Any], error: str, tmp_path: Path
) -> None:
    tree = config(tmp_path)
    tree["task"] = {**tree["task"], **task, "settings": settings}
    if task.get("name"):
        del tree["task"]["train_data"], tree["task"]["test_data"]
        tree["engine"] = {"decoder": "library"}
    with pytest.raises(ConfigError, match=error):
        task_and_data(from_dict(tree), None, None)


@pytest.mark.parametrize(
    ("parameters", "settings", "unread"),
    [
        ("completions, style, **kwargs", {"style": ["a"], "temprature": [0.1, 0.7]}, ""),
        ("text, example", {"temprature": [0.1, 0.7]}, ""),
        (
            "completions, style=None",
            {"style": ["a", "b"], "temperature": [0.1, 0.7], "form": {"text": ["{prompt}"]}},
            "",
        ),
        ("completions, style", {"style": ["a"], "temprature": [0.1, 0.7]}, "temprature"),
        (None, {"temprature": [0.1, 0.7]}, "temprature"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(
    parameters: str | None, settings: dict[str, Any], unread: str, tmp_path: Path
) -> None:
    tree = config(tmp_path, task={"settings": settings})
    (tmp_path / "reward.py").write_text(f"def marked({parameters}):\n    return 0.0\n")
    if parameters is None:
        tree["task"] = {"name": "conciseness", "settings": settings}
    if unread:
        with pytest.raises(ConfigError, match=rf"task\.settings\.{unread} has no effect.*did you mean temperature\?"):
            task_and_data(from_dict(tree), None, None)
    else:
        task_and_data(from_dict(tree), None, None)


def test_a_script_and_a_task_of_the_users_may_read_any_setting(tmp_path: Path) -> None:
    script = tmp_path / "reward.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    tree = config(tmp_path, task={"settings": {"styel": ["a", "b"]}, "rewards": [str(script)]})
    task_and_data(from_dict(tree), None, None)
    task_and_data(from_dict(tree), Shown(TaskConfig(name="custom")), None)


def test_the_longest_options_have_to_fit_the_model(tmp_path: Path) -> None:
    tree = config(tmp_path)
    tree["task"]["settings"] = {
        "form": {"text": ["{prompt}", "Think. {prompt} Again: {prompt}", "Answer in one word: {prompt}"]},
        "style": ["a", "b"],
        "other": {"text": ["{prompt}" + 9 * " more", "{prompt}"]},
    }
    task, data = task_and_data(from_dict(tree), None, None)
    known = tokens.load(from_dict(tree).model)
    every = Settings.of(from_dict(tree)).under(data.train)
    longest = max(len(known.encode(task.prompt(row))) for row in every)
    assert f"longest prompt {longest} tokens and sampling.max_tokens 8 fit the model's" in prompts.check(
        from_dict(tree), known, task, data
    )
    room = model_config(from_dict(tree).model).max_position_embeddings - longest
    tree["evaluation"]["max_tokens"] = room
    prompts.check(from_dict(tree), known, task, data)
    tree["evaluation"]["max_tokens"] = room + 1
    with pytest.raises(ConfigError, match=r"or task\.settings\.form 'Think\. "):
        prompts.check(from_dict(tree), known, task, data)


def test_grpo_refuses_what_it_would_not_search(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.settings.style \['a', 'b'\] is for ES"):
        evoalign.grpo(config(tmp_path, grpo={"num_generations": 4}))


def test_a_saved_mean_has_the_likeliest_options_and_their_sampling(tmp_path: Path) -> None:
    found = from_dict(config(tmp_path))
    state = {"settings/style/0": -1.0, "settings/style/1": 0.0, "settings/temperature/2": 0.5}
    assert likeliest(found.task.settings, {}) == {"style": "a", "temperature": 0.0, "form": "{prompt}"}
    assert likeliest(found.task.settings, state) == {"style": "b", "temperature": 0.8, "form": "{prompt}"}
    only = found.fixed(state)
    assert only.task.settings["style"].options == ["b"]
    assert only.evaluation.temperature == only.sampling.temperature == 0.8
    assert only.evaluation.max_tokens == 8


# --- runs ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("joint")
    generations: list[Any] = []
    text = told_by(config(folder), on_generation=generations.append)
    return folder, generations, text


def test_members_are_asked_and_scored_by_their_own_settings(trained: Any) -> None:
    folder, generations, text = trained
    found = from_dict(config(folder))
    settings = Settings.of(found)
    rows, known = read_rows(folder / "rows.jsonl"), tokens.load(found.model).tokenizer
    for generation in generations:
        drawn = tuple(map(settings.chosen, settings.draw(generation.index, generation.update.members)))
        assert generation.settings == drawn
        for m, chosen in enumerate(drawn):
            member = [r for r in generation.rollouts if r.member.index == m]
            for rollout, score in zip(member, generation.scores_MP[m], strict=True):
                own = (chosen["style"] == "b") + 0.01 * len(rollout.text.strip()) - (chosen["temperature"] > 0)
                assert score == pytest.approx(own)
            own_prompts = generation.prompts[m * len(rows) : (m + 1) * len(rows)]
            assert [known.decode(ids) for ids in own_prompts] == [
                known.apply_chat_template(
                    [{"role": "user", "content": chosen["form"].replace("{prompt}", row["prompt"])}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                for row in rows
            ]
        settings.move(generation.update)
        assert generation.objective == settings.state
    assert {c["form"] for g in generations for c in g.settings} == {"{prompt}", "Question: {prompt}"}
    table = pq.read_table(folder / "run/results/completions/generation_0000.parquet").to_pylist()
    assert all(("Question: " in row["prompt"]) == (row["settings/form"] != "{prompt}") for row in table)
    assert "setting style: 'b', which members draw with probability" in text


def test_the_result_is_that_of_the_likeliest_options(trained: Any) -> None:
    folder, _, _ = trained
    results = json.loads((folder / "run/results/evaluation.json").read_text())
    chosen = results["chosen_settings"]
    assert chosen["style"] == "b"
    assert json.loads((folder / "run/loras/generation_0004/settings.json").read_text()) == chosen
    again = evoalign.evaluate(folder / "run", config=str(folder / "run/config.yaml"))
    assert again.measures["reward"] == results["after"]["reward"]
    assert results["after"]["reward"] - results["before"]["reward"] > 0.5
    asked = load([folder / "run/config.yaml"], ["evaluation.temperature=0.3"])
    assert evaluate_one(folder / "run", asked).drawn.temperature == chosen["temperature"] == 0
    to = evoalign.export(folder / "run", folder / "exported")
    assert json.loads((to / "settings.json").read_text()) == chosen
    assert json.loads((to / "generation_config.json").read_text())["do_sample"] == (chosen["temperature"] > 0)


def test_an_exported_member_has_the_options_it_drew(trained: Any) -> None:
    folder, generations, _ = trained
    for member in (2, 5):
        to = evoalign.export(folder / "run", folder / f"member{member}", generation=3, member=member)
        assert json.loads((to / "settings.json").read_text()) == generations[3].settings[member]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_resumed_run_has_the_same_bits(trained: Any, kept: int, tmp_path: Path) -> None:
    """Both where the checkpoint has the generation and where the journal rebuilds it."""
    folder, generations, _ = trained
    for name in ("rows.jsonl", "reward.py"):
        shutil.copy(folder / name, tmp_path / name)
    run = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    shutil.rmtree(run / "loras")
    (run / "journal.jsonl").write_bytes(b"".join(lines[: 1 + 2 * kept]))
    tree = config(folder)
    tree["output_dir"] = str(run)
    text, settings = told_by(tree, resume=True), Settings.of(from_dict(tree))
    settings.restore({name: generations[kept - 1].objective[name] for name in settings.state})
    assert all(line in text for line in settings.lines())
    assert (run / "journal.jsonl").read_bytes() == (folder / "run" / "journal.jsonl").read_bytes()
    ours, theirs = (json.loads((p / "results/evaluation.json").read_text()) for p in (run, folder / "run"))
    assert (ours["after"], ours["chosen_settings"]) == (theirs["after"], theirs["chosen_settings"])


def test_replay_reaches_the_weights_and_the_settings(trained: Any, tmp_path: Path) -> None:
    folder, _, _ = trained
    log = journal.read(folder / "run/journal.jsonl")
    assert evoalign.replay(folder / "run", generation=3, to=tmp_path / "mean") == log.generations[2].weights_hash
    found = json.loads((tmp_path / "mean/settings.json").read_text())
    assert found == likeliest(from_dict(config(folder)).task.settings, log.generations[2].objective)


def test_a_run_is_not_resumed_with_other_settings(trained: Any, tmp_path: Path) -> None:
    folder, _, _ = trained
    tree = config(folder)
    tree["task"] = {**tree["task"], "settings": {**SETTINGS, "style": ["b", "a"]}}
    with pytest.raises(ResumeError, match=r"task\.settings"):
        told_by(tree, resume=True)
    settings = Settings.of(from_dict(tree))
    with pytest.raises(ResumeError, match="but the run recorded settings/other/0"):
        settings.restore({"settings/other/0": 0.0})


def test_settings_are_the_same_in_the_workers_process(trained: Any, tmp_path: Path) -> None:
    folder, _, _ = trained
    tree = config(folder, grader={"isolated": True})
    tree["output_dir"] = str(tmp_path / "run")
    told_by(tree)
    ours, theirs = (journal.read(p / "journal.jsonl").generations for p in (tmp_path / "run", folder / "run"))
    assert [g.objective for g in ours] == [g.objective for g in theirs]
    assert [g.weights_hash for g in ours] == [g.weights_hash for g in theirs]


class Shown(Task):
    """Style b earns 1; a point is the style that its row has."""

    name = "shown"

    def load_data(self, seed: int) -> Data:
        rows = [{"prompt": "Which city is the capital of Egypt?"}]
        return Data(train=rows, test=rows)

    def prompt(self, example: Example) -> str:
        return example["prompt"]

    def compute_reward(self, text: str, example: Example) -> float:
        return float(example["style"] == "b")

    def point(self, text: str, example: Example, rewards: Mapping[str, float | None]) -> Mapping[str, Any]:
        return {"style": example["style"]}


def test_parts_are_of_the_prompt_that_the_member_was_asked(tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()

    class Parted(Shown):
        def parts(self, texts: Any, examples: Any) -> Any:
            seen.update((row["form"], row["prompt"]) for row in examples)
            return {}

    tree = config(tmp_path)
    tree["task"] = {"name": "custom", "settings": SETTINGS}
    evoalign.train(tree, task=Parted(TaskConfig()))
    asked = "Which city is the capital of Egypt?"
    assert seen == {("{prompt}", asked), ("Question: {prompt}", f"Question: {asked}")}


def test_a_column_that_is_not_json_is_refused_where_settings_change_the_row(tmp_path: Path) -> None:
    class Paired(Shown):
        def load_data(self, seed: int) -> Data:
            rows = [{"prompt": "Which city is the capital of Egypt?", "pair": (1, 2)}]
            return Data(train=rows, test=rows)

    tree = config(tmp_path, grader={"isolated": True})
    tree["task"] = {"name": "custom", "settings": {"style": ["a", "b"]}}
    with pytest.raises(DataError, match=r"column 'pair' has a tuple, .* that task\.settings change, .* return a list"):
        evoalign.train(tree, task=Paired(TaskConfig()))


def test_points_and_kl_are_of_the_likeliest_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = config(tmp_path)
    tree["task"] = {"name": "custom", "settings": {"style": ["a", "b"]}}
    result = evoalign.train(tree, task=Shown(TaskConfig()))
    assert [result.before.measures["reward"], result.after.measures["reward"]] == [0.0, 1.0]
    for name, style in (("points_before", "a"), ("points", "b")):
        lines = (tmp_path / "run" / "results" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["style"] for line in lines] == [style]
    drawn: list[Any] = []
    monkeypatch.setattr(divergence, "draw", lambda *given: drawn.extend(row["style"] for row in given[3]) or [])
    parts = assemble(from_dict(tree), Shown(TaskConfig()))
    parts.restore({"settings/style/0": -1.0, "settings/style/1": 0.0})
    divergence.measure(parts, cast("Any", SimpleNamespace(divergence=lambda *_: None)))
    parts.close()
    assert drawn == ["b"]
