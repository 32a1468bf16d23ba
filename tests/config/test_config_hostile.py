# SPDX-License-Identifier: Apache-2.0
"""Configs that were made to hang or crash whoever reads them, and slips that would pass unseen: one line each."""

import os
from pathlib import Path

import pytest
from command_line import caller

from evoalign.config import Config, from_dict, load
from evoalign.config.reading import YAML_CHARACTERS, YAML_DEPTH, parse_yaml
from evoalign.errors import ConfigError, shown
from evoalign.rundir.directory import RunDir
from evoalign.rundir.own import load_own

PLAIN = "es: {sigma: 0.1}\n"
LISTS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
MAPS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{{','.join(f'k{j}: *a{i - 1}' for j in range(10))}}}\n" for i in range(1, 9)
)
CHAIN = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {'{k: ' * 30}*a{i - 1}{'}' * 30}\n" for i in range(1, 26))
"""Shallow as it is written, and 750 deep when it is read."""
FILES = {
    "depth by aliases": (CHAIN + PLAIN + "grpo: {trl: {generation_kwargs: *a25}}\n", f"nests deeper than {YAML_DEPTH}"),
    "depth by aliases, in a part of one's own": (CHAIN + PLAIN + "space: {name: 'x:y', z: *a25}\n", "nests deeper"),
    "a width of none": ("es: {sigma: 0}\n", "es.sigma: Input should be greater than or equal to 1e-37 .given: 0"),
    "a mapping for a text": (
        f"{PLAIN}task: {{system_prompt: {{Two fields: intent}}}}\n",
        r"task\.system_prompt: .*'Two fields: \.\.' as a mapping: quote the text",
    ),
    "a day for a folder": (f"{PLAIN}output_dir: 2026-11-22\n", "given: .*2026, 11, 22.*; put it in quotes"),
    "dots and letters that nearly begin an address": (f"{PLAIN}seed: {'a.' * 100_000}\n", "given: 'a"),
    "one long text in many places": (
        f"{PLAIN}tracking: {{project: &x '{'a:' * 20_000}', name: *x}}\nk: [{'*x, ' * 900}]\n",
        "unknown setting k",
    ),
    "laughs as a value": (LISTS + PLAIN + "output_dir: *a8\n", "has more than 50,000 values"),
    "laughs as unknown settings": (LISTS + PLAIN, "has more than 50,000 values"),
    "laughs of mappings": (MAPS + PLAIN + "grpo: {trl: *a8}\n", "has more than 50,000 values"),
    "a list that holds itself": (f"{PLAIN}output_dir: &a [*a]\n", "refers to a value that contains it.*line 2"),
    "a mapping that holds itself": ("&a es: *a\nes: &b {sigma: *b}\n", "an alias refers to a value that contains it"),
    "brackets": ("output_dir: " + "[" * 3000, f"nests deeper than {YAML_DEPTH}"),
    "braces": ("output_dir: " + "{a: " * 3000, f"nests deeper than {YAML_DEPTH}"),
    "blocks": ("\n".join(" " * i + "- " for i in range(200)), f"nests deeper than {YAML_DEPTH}"),
    "size": (PLAIN + "# " + "x" * YAML_CHARACTERS, "settings take at most 524,288"),
    "a day that is none": (f"{PLAIN}output_dir: 2020-13-45\n", "'2020-13-45' is no timestamp.*line 2"),
    "a number without digits": (f"{PLAIN}seed: 0x_\n", "'0x_' is no int.*line 2"),
    "5,000 digits": (f"{PLAIN}seed: {'9' * 5000}\n", r"'9+\.\.\.9+' is no int"),
    "5,000 hexadecimal digits": (f"{PLAIN}seed: 0x{'9' * 5000}\n", "given: an integer of 20,000 bits"),
    "a tag that does not fit": (f"{PLAIN}seed: !!bool abc\n", "'abc' is no bool"),
    "a float that is none": (f"{PLAIN}seed: !!float abc\n", "'abc' is no float"),
    "a key twice": ("seed: 1\nes: {sigma: 0.1}\nseed: 2\n", "the key 'seed' is on line 1 already; keep one.*line 3"),
    "a section twice": (f"{PLAIN}es: {{sigma: 0.5}}\n", "the key 'es' is on line 1 already"),
    "a key twice below": ("es: {sigma: 0.1, sigma: 0.2}\n", "the key 'sigma' is on line 1 already"),
    "a key of any length": (PLAIN + "k" * 900 + ": 1\n", r"unknown setting k+ \.\.\.; known here"),
    "thousands of unknown keys": (PLAIN + "".join(f"k{i}: 1\n" for i in range(500)), "and 490 more settings"),
    "a value of any length": (f"{PLAIN}seed: {'x' * 100_000}\n", r"given: 'x+\.\.\.x+'"),
    "a nul in the data's path": (f'{PLAIN}task: {{train_data: "a\\0b"}}\n', "task.train_data: .*NUL"),
    "a nul in a path": (f'{PLAIN}output_dir: "a\\0b"\n', "output_dir: a path cannot contain NUL"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_short_words(name, tmp_path):
    text, message = FILES[name]
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load([tmp_path / "config.yaml"])
    said = str(caught.value)
    assert len(said) < 3000 and said.count("\n") <= 10 and all(len(line) <= 700 for line in said.split("\n"))


def test_a_strangers_run_is_read_in_the_same_way_and_anchors_that_help_are_taken(tmp_path):
    (tmp_path / "config.yaml").write_text(LISTS + PLAIN + "output_dir: *a8\n")
    with pytest.raises(ConfigError, match="has more than 50,000 values"):
        load_own(tmp_path)
    (tmp_path / "c.yaml").write_text("lora: &layers {target_layers: [0, 1]}\nes: {sigma: 0.1}\n"
                                     "lowrank: {<<: *layers, rank: 2, target_layers: [3]}\n")  # fmt: skip
    found = load([tmp_path / "c.yaml"])
    assert (found.lora.target_layers, found.lowrank.target_layers, found.lowrank.rank) == ([0, 1], [3], 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=2020-13-45", "'2020-13-45' is no timestamp"),
        ("seed=" + "[" * 3000, "nests deeper"),
        ("seed=&a [*a]", "refers to a value that contains it"),
        (".".join("a" * 2000) + "=1", r"--set .* \.\.\.': expected key=value"),
        ("a" * 10_000 + "=1", "unknown setting a"),
        ("es={sigma: 1, sigma: 2}", "the key 'sigma' is on line 1 already"),
    ],
)
def test_a_hostile_override_is_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load([], ["es.sigma=0.1", override])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


def test_a_path_of_any_length_is_a_short_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text(PLAIN)
    run = caller(monkeypatch, capsys)
    done = run("train", tmp_path / "config.yaml", "--set", f"output_dir={'x/' * 3000}", "--dry-run")
    assert done.code == 2 and "File name too long" in done.err and len(done.err) < 700
    with pytest.raises(ConfigError, match=r"aaa cannot be read \(File name too long\)"):
        load(["a" * 300])
    with pytest.raises(ConfigError, match=r"no config file 'a\\x00b'"):
        load(["a\0b"])
    with pytest.raises(ConfigError, match="output_dir ~nobody-of-that-name/x: there is no user of that name"):
        RunDir(Path("~nobody-of-that-name/x"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_is_waited_for_where_the_user_hands_it_over_alone(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="is not a file; give a YAML file"):
        load([tmp_path / "config.yaml"])
    read, write = os.pipe()
    os.write(write, b"es: {sigma: 0.25}\n")
    os.close(write)
    assert load([f"/dev/fd/{read}"]).es.sigma == 0.25
    os.close(read)
    with pytest.raises(ConfigError, match="/proc/self/fd/999 cannot be read"):
        load(["/proc/self/fd/999"])


def test_a_plain_value_is_shown_whole():
    assert [shown(v) for v in ("abc", 12, 0.5, [1, 2], None)] == ["'abc'", "12", "0.5", "[1, 2]", "None"]
    assert parse_yaml("{a: [1, b]}", "it") == {"a": [1, "b"]}


# --- bounds -----------------------------------------------------------------------------------------------------------


def numbers(schema, place=""):
    """Each number of a JSON schema, and where it stands."""
    if isinstance(schema, dict) and schema.get("type") in ("integer", "number") and "const" not in schema:
        yield place, schema
    for name, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if isinstance(value, dict | list):
            yield from numbers(value, f"{place}.{name}")


def test_every_number_has_bounds_on_both_sides():
    found = list(numbers(Config.model_json_schema()))
    assert len(found) > 50, "the walk finds the settings"
    for place, number in found:
        assert all({end, f"exclusive{end.capitalize()}"} & number.keys() for end in ("minimum", "maximum")), place


@pytest.mark.parametrize(
    "override",
    [
        "engine.threads=18446744073709551616", "engine.memory_gib=1e300", "es.sigma=5e-324", "es.sigma=1e308",
        "es.learning_rate=1e308", f"evaluation.seeds=[{2**200}]", "es.population_size=1000000000000",
        "es.num_generations=1000000000000000000000000000000", "evaluation.max_tokens=1000000000000",
        "evaluation.samples=1000000000", "lora.rank=100000000000", "lora.alpha=1e308", "lora.target_layers=[10000000]",
        "grader.timeout=1e308", "grader.retries=1000000000000", "evaluation.temperature=1e308",
        "evaluation.temperature=5e-324", "sampling.top_p=5e-324", "grpo.learning_rate=1e308", "grpo.beta=.inf",
        "checks.kl_prompts=10000000000000", "grpo.max_steps=10000000000", "task.reward_weights=[.nan]",
    ],
)  # fmt: skip
def test_a_number_beyond_sense_is_refused_with_its_bound(override):
    message = r"should be (less|greater) than|should be a (finite|valid)|at least"
    with pytest.raises(ConfigError, match=message) as caught:
        load([], ["es.sigma=0.1", override])
    assert str(caught.value).startswith(override.partition("=")[0]) and "\n" not in str(caught.value)


def test_what_some_use_is_within_the_bounds():
    from_dict({
        "es": {"sigma": 1e-9, "learning_rate": 1e-15, "population_size": 262_144, "num_generations": 10**6},
        "engine": {"threads": 1024, "memory_gib": 2048, "max_rows": 10**6}, "grader": {"timeout": 86_400},
        "evaluation": {"temperature": 2.0, "samples": 1024, "seeds": [0, 2**63 - 1], "max_tokens": 131_072},
    })  # fmt: skip
