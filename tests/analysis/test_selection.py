# SPDX-License-Identifier: Apache-2.0
"""Rules on one generation against computations by hand; merges against dense arithmetic; the gate on planted gains."""

import json
import re
import zlib
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_adapters import adapter
from small_runs import UNCHECKED

import evoalign
from evoalign import shaping
from evoalign.analysis.selection import command
from evoalign.analysis.selection.rules import best, corp_weights, elected, merged
from evoalign.config import from_dict
from evoalign.errors import ConfigError, JournalError, RunExistsError
from evoalign.evolve import sigma_at, step_at
from evoalign.models.adapters import plain_factors
from evoalign.rundir import checkpoint, checksums, journal
from evoalign.rundir.journal import Journal
from evoalign.setup import assemble, serve
from evoalign.tasks.countdown import answer_value
from evoalign.training import saving
from evoalign.training.replay import member_state, save_member
from evoalign.types import Member, Update, population

FITNESS = (0.2, 0.9, 0.5, 0.9, 0.1, 0.7)
TOP3 = [1, 3, 5]
MODULES = {"target_layers": [3], "target_modules": ["down_proj"]}
SPACES = {
    "lora": {"space": "lora"},
    "lora, ab": {"space": "lora", "lora": {"evolve": "ab", "rank": 2, "init_scale": 3.0, **MODULES}},
    "lowrank": {"space": "lowrank"},
    "full": {"space": "full", "full": {"exclude": ["embed", "layers.0", "layers.1", "layers.2", "mlp", "norm"]}},
    "norms": {"space": "norms"},
    "subspace": {"space": {"name": "subspace", "dimension": 30}},
    "singular": {"space": "singular"},
}


def tree(**more):
    return {
        "seed": 3, "space": "lora", "model": {"name": "tiny"}, "engine": {"threads": 1, "device": "cpu"},
        "task": {"name": "countdown", "prompt": "short", "train_size": 8, "validation_size": 8, "test_size": 6},
        "lora": {"rank": 2, **MODULES}, "lowrank": {"rank": 2, **MODULES}, "evaluation": {"max_tokens": 24},
        "es": {"num_generations": 2, "population_size": 6, "sigma": 0.05, "learning_rate": 0.03}, **more,
    }  # fmt: skip


def recorded(file, config, fitness=FITNESS, generations=1):
    """Write the journal of a run whose fitness is planted."""
    es = config.es
    with closing(assemble(config)) as parts, closing(Journal(file, saving.header(parts, None))) as found:
        for g in range(generations):
            members = population(es.population_size, antithetic=es.antithetic)
            c = tuple(map(float, shaping.shape(np.array(fitness)[:, None], es.shaping)))
            update = Update(g, g, members, c, sigma_at(config, g), step_at(config, g), es.decay)
            found.append(update, tuple(fitness))
            parts.engine.apply(update)
            found.seal(g, parts.engine.fingerprint())
    return file


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("planted") / "journal.jsonl", from_dict(tree()), generations=2)


# --- rules ---


def test_best_breaks_ties_by_the_lower_index():
    assert best(FITNESS, 3) == TOP3 and best(FITNESS, 6) == [1, 3, 5, 2, 0, 4]
    assert best([1.0] * 5, 2) == [0, 1]


@pytest.mark.parametrize(
    ("answers", "place"),
    [(["7", "8", "8"], 1), (["7", "8", "8", "7"], 0), ([None, None, "9"], 2), ([None, None], None), ([], None),
     (["1", "2", "3"], 0), ([None, "5", None, "4", "4"], 3)],
)  # fmt: skip
def test_elected_is_the_first_completion_of_the_most_frequent_answer(answers, place):
    assert elected(answers) == place


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=9))
def test_elected_answer_has_no_fewer_votes_than_any_other(answers):
    place, votes = elected(answers), Counter(a for a in answers if a is not None)
    assert (place is None) == (not votes)
    if place is not None:
        won = answers[place]
        assert votes[won] == max(votes.values()) and answers.index(won) == place
        assert not any(votes[a] == votes[won] for a in answers[:place] if a is not None)


def test_corp_weights_by_hand():
    """Members 0 and 1 are a pair, of which the second one pulls against the first; member 2 is alone."""
    members = [Member(0, 0, 1), Member(1, 0, -1), Member(2, 1, 1), Member(3, 1, -1)]
    fitness = [1.0, 0.8, 0.9, 0.0]
    logits = np.array([2.0, 1.6, 1.8])  # beta 2, rewards already from 0 to 1
    first = np.exp(logits) / np.exp(logits).sum()
    direction = np.array([first[0] - first[1], first[2]])
    cosines = np.array([direction[0], -direction[0], direction[1]]) / np.linalg.norm(direction)
    rest = 1 - cosines**2
    z = (cosines - cosines.mean()) / cosines.std() - (rest - rest.mean()) / rest.std()
    want = np.exp(logits + z) / np.exp(logits + z).sum()
    np.testing.assert_allclose(corp_weights(fitness, members, [0, 2, 1], 2.0), want[[0, 2, 1]], rtol=1e-12)
    assert want[2] > want[0] > want[1], "the member along the direction gains, the one against it loses"


@given(
    st.lists(st.integers(0, 20).map(float), min_size=4, max_size=12).filter(lambda f: max(f) > min(f)),
    st.floats(0.1, 50), st.floats(0.01, 100), st.floats(-50, 50),
)  # fmt: skip
def test_corp_weights_do_not_depend_on_the_scale_of_the_reward(fitness, beta, factor, shift):
    chosen = best(fitness, 4)
    found = corp_weights(fitness, population(len(fitness)), chosen, beta)
    assert found.sum() == pytest.approx(1.0) and (found >= 0).all()
    other = corp_weights([factor * f + shift for f in fitness], population(len(fitness)), chosen, beta)
    np.testing.assert_allclose(found, other, rtol=1e-3, atol=1e-6)


def test_corp_weights_of_a_pair_that_cancels_are_equal():
    members = population(4, antithetic=True)
    assert corp_weights([1.0, 1.0, 0.0, 0.0], members, [0, 1], 5.0).tolist() == [0.5, 0.5]


def test_merged_is_the_weighted_sum_of_the_perturbations():
    update = Update(0, 0, population(4, antithetic=True), (1.0,) * 4, 0.1, 7.0, 0.5)
    found = merged(update, [2, 1], np.array([0.75, 0.25]), 2.0)
    assert found.members == (update.members[2], update.members[1]) and found.coefficients == (1.5, 0.5)
    assert (found.step, found.decay, found.sigma) == (0.2, 0.0, 0.1)


# --- votes ---


def test_vote_equals_the_members_own_evaluations_by_hand(planted, tmp_path):
    """Each member is saved and evaluated alone; its answers are counted here."""
    found = command.select(planted, top=[3], vote=True).numbers
    rows = {row["name"]: row for row in found["rows"]}
    config, log = from_dict(tree()), journal.read(planted)
    answers, right = [], []
    for member in TOP3:
        save_member(log, tmp_path / str(member), 0, member)
        scored = evoalign.evaluate(tmp_path / str(member), config=config).completions
        with closing(assemble(config)) as parts:
            numbers = [parts.data.test[s.example]["numbers"] for s in scored]
        answers.append([answer_value(s.text, n) for s, n in zip(scored, numbers, strict=True)])
        right.append([float(s.right) for s in scored])
    right = np.array(right)
    assert found["ranked"] == TOP3
    assert rows["best member"]["per_prompt"] == right[0].tolist()
    assert rows["mean of the top 3"]["per_prompt"] == pytest.approx(right.mean(0).tolist())
    assert rows["pass@3 of the members"]["per_prompt"] == right.max(0).tolist()
    by_hand = []
    for prompt, given_ in enumerate(zip(*answers, strict=True)):
        votes = Counter(answer for answer in given_ if answer is not None)
        first = next((i for i, a in enumerate(given_) if a is not None and votes[a] == max(votes.values())), None)
        by_hand.append(0.0 if first is None else float(right[first][prompt]))
    assert rows["vote of the top 3"]["per_prompt"] == by_hand
    assert any(by_hand) or any(map(any, right)), "some completion is right, so that the comparison says something"
    samples = rows["self-consistency at 3, temperature 0.7"]
    assert samples["test_completions"] == rows["vote of the top 3"]["test_completions"] == 18
    assert found["training_completions"] == 6 * 8


def test_vote_with_planted_answers(planted, monkeypatch):
    """Members answer as planted: the vote is right where two of three are, and the tie goes to the best member."""
    texts = {1: "5 6 7", 3: "5 9 8", 5: "4 9 9"}  # of members 1, 3, 5 (best first) to three prompts; 5, 9, 9 are right
    wanted = ["5", "9", "9"]

    class Task:
        name = "planted"

        def final_answer(self, text, example):
            return text

        def clean(self, text):
            return text

        def handed(self, example):
            return example

    def scored(words):
        return [
            SimpleNamespace(example=e, text=word, right=word == want)
            for e, (word, want) in enumerate(zip(words.split(), wanted, strict=True))
        ]

    of_prompts = command._by_prompt([SimpleNamespace(completions=scored(texts[m])) for m in TOP3])
    selection = object.__new__(command._Selection)
    selection.parts = SimpleNamespace(task=Task())
    assert selection._voted(of_prompts, [{}] * 3).tolist() == [1.0, 1.0, 0.0]


def test_select_chooses_among_several_by_the_validation_split_alone(planted):
    found = command.select(planted, top=[1, 3], vote=True)
    assert found.numbers["validation_completions"] == 3 * 8
    line = next(line for line in found.sentences if "K was chosen on the validation split (1: " in line)
    values = {int(k): float(v) for k, v in (part.split(": ") for part in line.split("split (")[1][:-1].split(", "))}
    count = min(k for k in values if values[k] == max(values.values()))
    assert line.startswith(f"vote of the top {count}: ")
    assert any(row["name"] == f"vote of the top {count}" for row in found.numbers["rows"])


def test_select_reports_ties_at_the_last_place(planted):
    said = command.select(planted, top=[1], vote=True).sentences
    assert "top 1: 2 members tie at fitness 0.9; the first 1 by index are taken" in said


def test_select_begins_at_the_mean_before_the_generation(planted, monkeypatch):
    evaluate, seen = command.evaluation.evaluate, []

    def spied(engine, *rest):
        seen.append(engine.fingerprint())
        return evaluate(engine, *rest)

    monkeypatch.setattr(command.evaluation, "evaluate", spied)
    log = journal.read(planted)
    for generation, wanted in enumerate((log.header.weights_hash, log.generations[0].weights_hash)):
        seen.clear()
        found = command.select(planted, top=[2], vote=True, generation=generation)
        assert seen == [wanted, wanted] and found.numbers["generation"] == generation, "the base and its samples"


# --- merges ---


@pytest.mark.first("lora, ab", "lowrank", "full", "subspace")
@pytest.mark.parametrize("name", SPACES)
def test_average_equals_dense_arithmetic(name, tmp_path):
    more = dict(SPACES[name])
    if name == "singular":
        folder = adapter(tmp_path / "adapter", {f"model.layers.{i}.mlp.up_proj.weight": up_proj() for i in range(4)})
        more["model"] = {"name": str(folder), "base": "tiny"}
    config = from_dict(tree(**more))
    file, to = recorded(tmp_path / "journal.jsonl", config), tmp_path / "merged"
    found = command.select(file, top=[3], merge="mean", to=to, config=config)
    log = journal.read(file)
    with closing(serve(config)) as served:
        layout, evolves_model = served.layout, served.space.evolves_model
        states = [dict(member_state(served, log.generations[0], Member(m, m, 1))) for m in TOP3]
        states = [{n: t.double().clone() for n, t in state.items()} for state in states]
    if evolves_model or name == "subspace":
        merged_state, _ = checkpoint.load(to, layout)
        for tensor in layout.tensors:
            mean = sum(state[tensor.name] for state in states) / 3
            torch.testing.assert_close(merged_state[tensor.name].double(), mean, rtol=0, atol=1e-6)
            assert (mean - states[0][tensor.name]).abs().max() > 1e-3
    if not evolves_model:
        parts = []
        for member in TOP3:
            save_member(log, tmp_path / str(member), 0, member)
            scaling, factors = plain_factors(tmp_path / str(member))
            parts.append({n: scaling * (b.double() @ a.double()) for n, (a, b) in factors.items()})
        scaling, factors = plain_factors(to)
        for weight, (a, b) in factors.items():
            mean = sum(part[weight] for part in parts) / 3
            torch.testing.assert_close(scaling * (b.double() @ a.double()), mean, rtol=0, atol=1e-6)
            assert mean.abs().max() > 1e-4
            assert a.shape[0] == layout.rank * (1 if name in ("lora", "subspace") else 3)
    mark = checkpoint.verify(to)
    assert mark.counterfactual == "average of the top 3, generation 0"
    if name in ("lora", "lora, ab", "lowrank"):
        measured = evoalign.evaluate(to, config=config)
        values = {row["name"]: row["value"]["mean"] for row in found.numbers["rows"]}
        assert name == "lora, ab" or values["average of the top 3"] == measured.measures["right"]


def up_proj():
    from evoalign.engines.specs import specs_of_config

    specs = specs_of_config(from_dict({"model": {"name": "tiny"}}))
    return next(s.shape for s in specs if s.name == "model.layers.3.mlp.up_proj.weight")


def scores_of_weights(direction, slope, seed, seen):
    """Return an evaluation whose reward is the mean's projection on a direction, plus noise of each prompt's own."""

    def evaluate(engine, tokens, task, examples, settings):
        seen.append(frozenset(map(repr, examples)))
        mean = torch.cat([tensor.flatten() for name, tensor in engine.state() if "lora_B" in name])
        key = [seed, zlib.crc32(repr(examples[0]).encode()), int(mean.double().abs().sum() * 1e9)]
        values = slope * float(mean.double() @ direction) + np.random.default_rng(key).normal(size=len(examples))
        found = SimpleNamespace(measures_E={"reward": tuple(values)}, completions=[None] * len(examples))
        return found

    return evaluate


def members_of(config):
    with closing(serve(config)) as served:
        name = served.layout.tensors[0].name
        return served.space.noise(served.layout, name, 0, range(6)).flatten(1).double()


def corp_of(file, monkeypatch, direction, slope, seed, to, top=(4,)):
    seen = []
    monkeypatch.setattr(command.evaluation, "evaluate", scores_of_weights(direction, slope, seed, seen))
    found = command.select(file, top=top, merge="corp", to=to)
    _, gating, *choosing = seen[: 2 + 42 * len(top)]
    assert len({*choosing}) == 1 and not choosing[0] & gating and len(choosing[0] | gating) == 60
    assert seen[2 + 42 * len(top)] == gating, "rows that chose do not decide"
    return found.numbers["rows"][-1], found.sentences


def test_corp_commits_a_planted_gain_and_refuses_a_planted_null(tmp_path, monkeypatch):
    """The fitness is the projection on a direction, which the reward also rewards, or does not."""
    config = from_dict(tree(task={**tree()["task"], "validation_size": 60}, evaluation={"max_tokens": 1}))
    noise = members_of(config)
    direction = noise[[1, 3]].sum(0) / noise[[1, 3]].sum(0).norm()
    fitness = [float(n @ direction) for n in noise]
    file = recorded(tmp_path / "journal.jsonl", config, fitness)
    row, said = corp_of(file, monkeypatch, direction, 1.0, 0, tmp_path / "merged", [2, 4])
    assert row["committed"] and row["name"] == "corp" and row["value"]["mean"] > 5
    assert checkpoint.verify(tmp_path / "merged").counterfactual == "corp, generation 0"
    assert any(
        line.startswith("corp (top ") and line.endswith(f"committed; saved in {tmp_path / 'merged'}") for line in said
    )
    with closing(serve(config)) as served:
        state, _ = checkpoint.load(tmp_path / "merged", served.layout)
        step = state[served.layout.tensors[0].name].double().flatten()
    count, beta, scale = re.search(r"top (\d), beta ([\d.]+), scale ([\d.]+)", " ".join(said)).groups()
    chosen = best(fitness, int(count))
    weights = torch.tensor(corp_weights(fitness, population(6), chosen, float(beta)))
    torch.testing.assert_close(step, float(scale) * 0.05 * (weights @ noise[chosen]), rtol=0, atol=1e-5)
    committed = 0
    for seed in range(20):
        row, said = corp_of(file, monkeypatch, direction, 0.0, seed, tmp_path / f"null{seed}")
        committed += row["committed"]
        if not row["committed"]:
            assert row["name"] == "corp, refused by its gate: the base" and row["minus_base"]["mean"] == 0
            assert not (tmp_path / f"null{seed}").exists()
            assert any(
                f"the mean stays as it is and {tmp_path / f'null{seed}'} is not written" in line for line in said
            )
    assert committed <= 3, "an interval of 95 % lets 1 in 40 nulls pass"


# --- the command, and what it refuses ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = tree(checks=UNCHECKED, report=False, output_dir=str(folder))
    evoalign.train(config | {"sampling": {"max_tokens": 24}})
    return folder


def test_command_reports_and_saves(trained, run):
    done = run("select", trained, "--top", "3", "--vote", "--merge", "mean", "--to", "merged")
    assert done.code == 0 and "vote of the top 3" in done.out and "average of the top 3" in done.out
    file = trained / "results" / "select_vote_mean.json"
    tree_ = json.loads(file.read_text())
    assert [row["name"] for row in tree_["numbers"]["rows"]] == [
        "base", "best member", "mean of the top 3", "vote of the top 3", "self-consistency at 3, temperature 0.7",
        "pass@3 of the members", "pass@3 of the samples", "average of the top 3",
    ]  # fmt: skip
    assert checksums.verify(trained, "results/select_vote_mean.json") and f"saved in {file}" in done.err
    done = run("eval", "merged", "--config", trained / "config.yaml")
    assert done.code == 0 and "right" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", "3"], "nothing to do: give --vote, --merge mean or --merge corp"),
        (["--top", "7", "--vote"], "--top 7: generation 0 has 6 members; set 1 to 6"),
        (["--top", "0", "--vote"], "--top 0: generation 0 has 6 members"),
        (["--top", "", "--vote"], "--top is empty"),
        (["--top", "a", "--vote"], "--top 'a': expected integers"),
        (["--top", "3", "--vote", "-g", "9"], "has no members of generation 9: its generations are 0 to 1"),
        (["--top", "3", "--vote", "--to", "x"], "--to saves a merged model; give --merge"),
        (["--top", "3", "--vote", "--temperature", "0"], "--temperature 0: samples for a vote need"),
    ],
)
def test_command_refuses(words, message, trained, run):
    done = run("select", trained, *words)
    assert done.code == 2 and message in done.err


def test_select_refuses_runs_without_usable_scores(planted, tmp_path, trained):
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "manifest.json").write_text(json.dumps({"format_version": 1, "method": "grpo"}))
    with pytest.raises(JournalError, match="is a run of GRPO and has no journal"):
        command.select(tmp_path / "grpo", top=[1], vote=True)
    lines = planted.read_bytes().splitlines(keepends=True)
    for kept, message in ((1, "it has no generation yet"), (2, "0 whole generations")):
        (tmp_path / f"{kept}.jsonl").write_bytes(b"".join(lines[:kept]))
        with pytest.raises((ConfigError, JournalError), match=message):
            command.select(tmp_path / f"{kept}.jsonl", top=[1], vote=True)
    with pytest.raises(ConfigError, match=r"have the same fitness, 0\.5: there are no best ones"):
        command.select(recorded(tmp_path / "equal.jsonl", from_dict(tree()), [0.5] * 6), top=[1], vote=True)
    with pytest.raises(JournalError, match="nowhere does not exist; give a run directory"):
        command.select(tmp_path / "nowhere", top=[1], vote=True)
    adam = from_dict(tree(es={**tree()["es"], "optimizer": "adam"}))
    with pytest.raises(ConfigError, match=r"es\.optimizer adam"):  # before what another generation could mend
        command.select(recorded(tmp_path / "adam.jsonl", adam, [0.5] * 6), top=[1], merge="mean")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(RunExistsError, match="is not empty"):
        command.select(planted, top=[1], merge="mean", to=tmp_path / "taken")


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({"task": {**tree()["task"], "validation_size": None}}, {"merge": "corp"},
         "--merge corp decides on the validation split, and task countdown has none: set task.validation_size"),
        ({"task": {**tree()["task"], "validation_size": None}}, {"vote": True, "top": [1, 2]},
         "--top 1,2 chooses on the validation split"),
        ({"task": {"name": "conciseness"}}, {"vote": True}, "task conciseness has no final answers to vote on"),
        ({"es": {**tree()["es"], "optimizer": "adam"}}, {"merge": "mean"}, "es.optimizer adam would change the step"),
        ({"task": {**tree()["task"], "settings": {"temperature": [0.5, 1.0]}}}, {"merge": "mean"},
         "drew task.settings.temperature"),
        (SPACES["lora, ab"], {"merge": "corp"}, "members of space lora are no linear function of the noise"),
        (SPACES["lora, ab"], {"merge": "mean"}, "an adapter of a larger rank, which is saved and not evaluated"),
    ],
)  # fmt: skip
def test_select_refuses_what_it_cannot_compute(more, options, message, tmp_path):
    file = recorded(tmp_path / "journal.jsonl", from_dict(tree(**more)))
    with pytest.raises(ConfigError, match=message):
        command.select(file, **{"top": [2], **options})
