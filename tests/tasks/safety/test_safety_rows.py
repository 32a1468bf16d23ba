# SPDX-License-Identifier: Apache-2.0
"""Which rows train: by their two safety labels, with no prompt in two splits."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_runs import jsonl, lines

from evoalign.config import TaskConfig
from evoalign.config.load import parse_overrides
from evoalign.errors import ConfigError, DataError
from evoalign.tasks.safety import Safety
from evoalign.tasks.safety_rows import GROUPS, Settings, counts
from evoalign.training.heading import shared_lines

SIZES = {"TT": 150, "FF": 140, "FT": 40, "TF": 30}


def row(group, number, prompt=None):
    return {
        "prompt": prompt or f"Question {number} of {group}?", "response_0": "a", "response_1": "b",
        "is_response_0_safe": group[0] == "T", "is_response_1_safe": group[1] == "T",
        "better_response_id": 0, "safer_response_id": 1, "response_0_severity_level": 2,
    }  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """Training rows in mixed order, and a test file of prompts alone."""
    rows = [row(group, i) for group, n in SIZES.items() for i in range(n)]
    rows = [rows[(i * 97) % len(rows)] for i in range(len(rows))]
    return {
        "train_data": jsonl(tmp_path / "train.jsonl", rows),
        "test_data": jsonl(tmp_path / "test.jsonl", [{"prompt": f"Asked of {i}?"} for i in range(10)]),
    }


def loaded(seed=0, **task):
    made = Safety(TaskConfig.model_validate({"name": "safety", **task}))
    return made.load_data(seed), made


def groups(rows):
    return dict(Counter("".join("T" if r[f"is_response_{i}_safe"] else "F" for i in (0, 1)) for r in rows))


def asked(rows):
    return [" ".join(r["prompt"].split()) for r in rows]


def test_the_published_shares(files):
    data, task = loaded(protocol="published_250", **files)
    assert groups(data.train) == {"TT": 100, "FF": 116, "FT": 19, "TF": 15}
    assert len(data.train) == 250 and len(data.test) == 10
    assert "training rows by their labels: 100 TT, 116 FF, 19 FT, 15 TF" in task.notes
    assert len(set(asked(data.train))) == 250


def test_exactly_the_published_rows_train_whole(tmp_path):
    """Rows whose prompt is in the test split too: they are kept, and the overlap is reported."""
    amounts = {"TT": 100, "FF": 116, "FT": 19, "TF": 15}
    rows = [row(group, i) for group, n in amounts.items() for i in range(n)]
    rows[3]["prompt"] = rows[1]["prompt"]
    prompts = [rows[1]["prompt"], f" {rows[120]['prompt']} ", rows[120]["prompt"], "Else?"]
    files = {
        "train_data": jsonl(tmp_path / "train.jsonl", rows),
        "test_data": jsonl(tmp_path / "test.jsonl", [{"prompt": one} for one in prompts]),
        "validation_data": jsonl(tmp_path / "validation.jsonl", [{"prompt": p} for p in (rows[7]["prompt"], "New?")]),
    }
    for seed in (0, 1):
        data, task = loaded(seed, protocol="published_250", **files)
        assert list(data.train) == rows and len(data.test) == 4 and asked(data.validation) == ["New?"]
    assert any("keeps 3 training rows with 2 prompts of the test split, which has 3" in note for note in task.notes)
    (warning,) = (line for line in shared_lines(task, data) if "test prompts are training" in line)
    assert warning.startswith("warning: 2 of 4 test prompts")
    with pytest.raises(DataError, match=r"needs 100 TT, but .* 97 TT after 4 rows with prompts of another split"):
        more = {"train_data": jsonl(tmp_path / "more.jsonl", [*rows, row("FF", 900)])}
        loaded(**files | more, protocol="published_250")


def test_seed_determines_the_selection(files):
    shares = {"TT": 5, "FF": 5}
    first, again, other = (loaded(seed, shares=shares, **files)[0].train for seed in (1, 1, 2))
    assert list(first) == list(again) and asked(first) != asked(other)
    assert groups(other) == {"TT": 5, "FF": 5}
    order = asked(lines(Path(files["train_data"])))
    places = [order.index(prompt) for prompt in asked(first)]
    assert places == sorted(places)


@given(st.dictionaries(st.sampled_from(GROUPS), st.integers(1, 100), min_size=1), st.integers(1, 1000))
def test_fractions_are_apportioned(weights, total):
    """To whole numbers that add up and are each less than one off."""
    shares = {group: n / sum(weights.values()) for group, n in weights.items()}
    found = counts(TaskConfig(train_size=total), Settings.model_validate({"shares": shares}))
    assert found is not None and sum(found.values()) == total
    assert all(abs(found[group] - share * total) < 1 for group, share in shares.items())


def test_rows_are_unchanged_without_shares(files):
    data, task = loaded(train_size=7, **files)
    first = lines(Path(files["train_data"]))[:7]
    assert list(data.train) == first and not task.notes
    other = jsonl(Path(files["test_data"]).with_name("other.jsonl"), [{"prompt": "New?"}])
    data, _ = loaded(train_data=files["test_data"], test_data=other)  # prompts alone are enough
    assert len(data.train) == 10


def test_no_prompt_is_in_two_splits(tmp_path):
    """The test split is kept whole; what is left out is counted; white space makes no other prompt."""
    train = [row("TT", i, f"Ask {i}") for i in range(8)] + [row("TT", 9, " Ask   0 "), row("TT", 9, "Ask 2")]
    files = {
        "train_data": jsonl(tmp_path / "train.jsonl", train),
        "validation_data": jsonl(tmp_path / "validation.jsonl", [{"prompt": p} for p in ("Ask 1", "Ask\n3", "Else")]),
        "test_data": jsonl(tmp_path / "test.jsonl", [{"prompt": p} for p in ("Ask 0", "Ask 1", "Ask 1")]),
    }
    data, task = loaded(**files)
    assert asked(data.test) == ["Ask 0", "Ask 1", "Ask 1"]
    assert asked(data.validation) == ["Ask 3", "Else"]
    assert asked(data.train) == ["Ask 2", "Ask 4", "Ask 5", "Ask 6", "Ask 7", "Ask 2"]
    assert list(task.notes) == [
        "1 validation rows are left out: their prompts are also the test split's",
        "4 training rows are left out: their prompts are also those of another split",
        "6 training rows have 5 different prompts: some repeat",
        "3 test rows have 2 different prompts: some repeat",
    ]


def test_validation_rows_share_no_prompt_with_training_rows(files):
    data, _ = loaded(shares={"TT": 20, "FF": 20}, validation_size=30, **files)
    other, _ = loaded(1, shares={"TT": 20, "FF": 20}, validation_size=30, **files)
    assert (len(data.train), len(data.validation)) == (40, 30)
    assert not set(asked(data.train)) & set(asked(data.validation))
    assert asked(data.validation) != asked(other.validation)
    with pytest.raises(DataError, match=r"task\.validation_size is 350, but only 320 rows"):
        loaded(shares={"TT": 20, "FF": 20}, validation_size=350, **files)


def test_one_file_is_split_and_selected_from(files):
    data, _ = loaded(3, train_data=files["train_data"], shares={"TT": 0.5, "FF": 0.5}, train_size=21, test_size=50)
    assert groups(data.train) == {"TT": 11, "FF": 10} and len(data.test) == 50


def test_shares_merge_with_earlier_configs(files):
    """Single shares are changed and the others stay; the error says what they come to, and 0 takes one away."""

    def over(*sets):
        file = {"task": {**files, "name": "safety", "shares": {"TT": 45, "FF": 3, "TF": 1}}}
        return Safety(TaskConfig.model_validate(parse_overrides(file, [f"task.{one}" for one in sets])["task"]))

    told = r"{TT: 0\.5, FF: 0\.5, TF: 1}, merged from all configs and --set, .* TF: 0"
    with pytest.raises(ConfigError, match=told):
        over("shares={TT: 0.5, FF: 0.5}")
    assert groups(over("shares={TT: 40, TF: 0}").load_data(0).train) == {"TT": 40, "FF": 3}
    halves = over("shares={TT: 0.5, FF: 0.5, TF: 0}", "train_size=20")
    assert groups(halves.load_data(0).train) == {"TT": 10, "FF": 10}


def test_labels_may_be_text_and_files_parquet(tmp_path):
    from pyarrow import Table, parquet

    text = ["prompt,is_response_0_safe,is_response_1_safe", "a,True,False", "b,false,true", "c,TRUE,true"]
    (tmp_path / "rows.csv").write_text("\n".join(text))
    test = jsonl(tmp_path / "test.jsonl", [{"prompt": "x"}])
    data, _ = loaded(train_data=str(tmp_path / "rows.csv"), test_data=test, shares={"TT": 1, "FT": 1})
    assert asked(data.train) == ["b", "c"]
    parquet.write_table(Table.from_pylist([row("TF", 0), row("FF", 1)]), tmp_path / "rows.parquet")
    data, _ = loaded(train_data=str(tmp_path / "rows.parquet"), test_data=test, shares={"FF": 1})
    assert asked(data.train) == ["Question 1 of FF?"] and data.train[0]["response_0_severity_level"] == 2


@pytest.mark.parametrize(("settings", "error", "told"), [
    ({"shares": {"TT": 500}}, DataError, "too few training rows: 150 TT of 500; lower task.shares"),
    ({"shares": {"TT": 0.4, "FF": 0.4}}, ConfigError, "neither whole counts nor fractions that add up to 1"),
    ({"shares": {"XX": 4}}, ConfigError, "task.shares.XX"),
    ({"shares": {"TT": 0.5, "FF": 0.5}}, ConfigError, "are fractions; set task.train_size"),
    ({"shares": {"TT": 5}, "train_size": 6}, ConfigError, "task.shares {TT: 5} is 5 rows, but task.train_size is 6"),
    ({"shares": {"TT": 0}}, ConfigError, "{TT: 0}, merged from all configs and --set"),
    ({"shares": {"TT": 5}, "protocol": "published_250"}, ConfigError, "both select training rows"),
    ({"protocol": "published_251"}, ConfigError, "task.protocol"),
    ({"shares": {"TT": 5}, "split": "first_last"}, ConfigError, "task.split first_last both"),
    ({"sharse": {"TT": 5}}, ConfigError, r"unknown setting task\.sharse; did you mean task\.shares\?"),
    ({"fitness": "own_fitness:letters"}, ConfigError, "task.fitness is not for task safety"),
])  # fmt: skip
def test_invalid_selections_raise_errors(files, settings, error, told):
    with pytest.raises(error, match=told):
        loaded(**files, **settings)


UNLABELLED = {"prompt": "Why?", "is_response_0_safe": True}


@pytest.mark.parametrize(("rows", "settings", "told"), [
    ([{"question": "a"}], {}, r"line 1: no prompt; found question; set task.columns: {prompt: question}"),
    ([{"prompt": "a"}, {"prompt": "  "}], {}, r"line 2: prompt is '\s+'; expected a text"),
    ([{"prompt": ["a"]}], {}, "expected a text"), ([{"prompt": "x"}], {}, "every training prompt is also"),
    ([UNLABELLED], {"shares": {"TT": 1}}, r"a training row \('Why\?'\) has no is_response_1_safe"),
    *(([{**UNLABELLED, "is_response_1_safe": bad}], {"shares": {"TT": 1}},
       r"a training row \('Why\?'\) has is_response_1_safe") for bad in (None, "perhaps")),
    ([row(group, i) for group in ("TT", "FF", "FT", "TF") for i in range(110)], {"protocol": "published_250"},
     "protocol published_250 needs 116 FF, but the training data have 110 FF; .* task.shares"),
])  # fmt: skip
def test_invalid_rows_raise_data_error(rows, settings, told, tmp_path):
    test = jsonl(tmp_path / "test.jsonl", [{"prompt": "x"}])
    with pytest.raises(DataError, match=told):
        loaded(train_data=jsonl(tmp_path / "rows.jsonl", rows), test_data=test, **settings)
