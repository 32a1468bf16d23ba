# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evoalign.config import Config, from_dict, load, to_yaml
from evoalign.config.schema import schema as json_schema
from evoalign.errors import ConfigError

FIELD = """
output_dir: "data/es_conciseness_v1"
seed: 33
task: {name: "conciseness", train_data: "data/tasks/conciseness/conciseness_train.json", test_data: "data/tasks/conciseness/conciseness_test.json"}
model: {name: "Qwen/Qwen2.5-7B-Instruct"}
lora: {rank: 1, alpha: 2, target_layers: [0,1,2,3,4,5,6,7,8,9], target_modules: ["q_proj","k_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"]}
es: {num_generations: 30, population_size: 30, learning_rate: 0.01, noise_multiplier: 0.1}
evaluation: {max_tokens: 100, temperature: 0.0}
"""  # noqa: E501  (as it circulates)


def config(**sections: Any) -> Config:
    return from_dict({"es": {"sigma": 0.001}, **sections})


def error(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, "base.yaml", "seed: 1\nes: {sigma: 0.001, population_size: 8}\nmodel: {name: tiny}\n")


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_yaml_of_the_field_loads_unchanged(tmp_path: Path) -> None:
    c = load([write(tmp_path, "field.yaml", FIELD)])
    assert (c.output_dir, c.seed, c.model.name) == ("data/es_conciseness_v1", 33, "Qwen/Qwen2.5-7B-Instruct")
    assert (c.lora.rank, c.lora.alpha, c.lora.target_layers) == (1, 2.0, list(range(10)))
    assert c.lora.target_modules is not None
    assert c.lora.target_modules[0] == "q_proj"
    assert (c.es.noise_multiplier, c.es.sigma, c.es.width, c.es.eta) == (0.1, None, 0.1, 0.01)
    assert (c.evaluation.max_tokens, c.evaluation.temperature) == (100, 0.0)
    assert (c.space.name, c.lora.evolve, c.engine.name) == ("lora", "b", "transformers")


def test_the_field_yaml_runs_on_another_model(tmp_path: Path) -> None:
    c = load([write(tmp_path, "field.yaml", FIELD)], ["model.name=tiny", "lora.target_layers=[0, 1, 2]"])
    assert (c.model.name, c.lora.target_layers, c.lora.rank) == ("tiny", [0, 1, 2], 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings"),
        ("- 1\n- 2\n", "holds no settings"),
        ("es: [1, 2\n", "is not YAML"),
        ("es:\n\tsigma: 1\n", "is not YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "bad.yaml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        load([path])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evoalign init"):
        load([tmp_path / "none.yaml"])


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load([tmp_path])


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load([tmp_path / "bad.yaml"])


# --- merging ----------------------------------------------------------------------------------------------------------


def test_later_files_win_key_by_key(base: Path, tmp_path: Path) -> None:
    more = write(tmp_path, "more.yaml", "es: {population_size: 16}\nmodel: {dtype: float32}\n")
    c = load([base, more])
    assert (c.es.population_size, c.es.sigma, c.seed) == (16, 0.001, 1)
    assert (c.model.name, c.model.dtype) == ("tiny", "float32")


def test_a_later_list_replaces_an_earlier_one(base: Path, tmp_path: Path) -> None:
    first = write(tmp_path, "1.yaml", "lora: {target_layers: [0, 1, 2]}\n")
    second = write(tmp_path, "2.yaml", "lora: {target_layers: [5]}\n")
    assert load([base, first, second]).lora.target_layers == [5]


def test_overrides_win_over_files_and_later_over_earlier(base: Path) -> None:
    c = load([base], ["es.population_size=32", "seed=7", "seed=8"])
    assert (c.es.population_size, c.seed, c.es.sigma) == (32, 8, 0.001)


def test_the_later_width_replaces_the_earlier_one(base: Path, tmp_path: Path) -> None:
    c = load([base], ["es.noise_multiplier=0.1"])
    assert (c.es.sigma, c.es.noise_multiplier) == (None, 0.1)
    more = write(tmp_path, "more.yaml", "es: {noise_multiplier: 0.2}\n")
    assert load([base, more], ["es.sigma=0.5"]).es.width == 0.5


def test_both_widths_in_one_file_are_refused(tmp_path: Path) -> None:
    both = write(tmp_path, "both.yaml", "es: {sigma: 0.1, noise_multiplier: 0.1}\n")
    with pytest.raises(ConfigError, match=r"exactly one of es\.sigma and es\.noise_multiplier"):
        load([both])


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("es.sigma=0.003", lambda c: c.es.sigma == 0.003),
        ("es.sigma=1e-3", lambda c: c.es.sigma == 0.001),
        ("es.sigma=2.5E-3", lambda c: c.es.sigma == 0.0025),
        ("tracking.name='1e-3'", lambda c: c.tracking.name == "1e-3"),
        ("es.antithetic=true", lambda c: c.es.antithetic is True),
        ("task.batch_size=null", lambda c: c.task.batch_size is None),
        ("lora.target_modules=[q_proj, v_proj]", lambda c: c.lora.target_modules == ["q_proj", "v_proj"]),
        ("lora={rank: 4, alpha: 8}", lambda c: (c.lora.rank, c.lora.alpha) == (4, 8.0)),
        ("es.sigma_schedule=cosine", lambda c: c.es.sigma_schedule.name == "cosine"),
        ("es.sigma_schedule.floor=0.2", lambda c: c.es.sigma_schedule.floor == 0.2),
        ("output_dir=runs/a=b", lambda c: c.output_dir == "runs/a=b"),
        ("output_dir=C:\\runs", lambda c: c.output_dir == "C:\\runs"),
        ("space=full", lambda c: c.space.name == "full"),
    ],
)
def test_an_override_is_a_yaml_value(override: str, read: Any, base: Path) -> None:
    assert read(load([base], [override]))


def test_an_override_below_a_section_given_by_its_name(tmp_path: Path) -> None:
    """`space: lora` and `es.optimizer: adam` are short for a section with that name."""
    short = write(tmp_path, "short.yaml", "space: lora\nes: {sigma: 0.1, optimizer: adam, sigma_schedule: cosine}\n")
    c = load([short], ["es.optimizer.beta1=0.5", "es.sigma_schedule.floor=0.3"])
    assert (c.es.optimizer.name, c.es.optimizer.beta1) == ("adam", 0.5)
    assert (c.es.sigma_schedule.name, c.es.sigma_schedule.floor) == ("cosine", 0.3)


@pytest.mark.parametrize("override", ["es.sigma", "=1", ".=1", "es.sigma=[1", "es..sigma=1"])
def test_a_malformed_override_is_one_line(override: str, base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load([base], [override])
    assert override in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_in_a_file_may_have_an_exponent_without_a_dot(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as a string; people write it all the same."""
    c = load([write(tmp_path, "exponent.yaml", "es: {sigma: 1e-3, learning_rate: 5e-4}\n")])
    assert (c.es.sigma, c.es.learning_rate) == (0.001, 0.0005)


def test_settings_of_another_name_do_not_survive_it(tmp_path: Path) -> None:
    adam = write(tmp_path, "adam.yaml", "es: {sigma: 0.1, optimizer: {name: adam, beta1: 0.5}}\n")
    c = load([adam], ["es.optimizer=momentum"])
    assert (c.es.optimizer.name, c.es.optimizer.beta1) == ("momentum", 0.9)


def test_files_are_not_changed_by_loading(base: Path) -> None:
    before = base.read_bytes()
    load([base], ["seed=9"])
    assert base.read_bytes() == before


# --- unknown keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"es": {"sigma": 0.1, "learning_rat": 1.0}},
            "unknown setting es.learning_rat; did you mean es.learning_rate?",
        ),
        ({"ouput_dir": "x"}, "unknown setting ouput_dir; did you mean output_dir?"),
        ({"evaluatoin": {}}, "unknown setting evaluatoin; did you mean evaluation?"),
        ({"task": {"bach": 4}}, "unknown setting task.bach; did you mean task.batch_size?"),
        (
            {"engine": {"name": "ray", "threads": 1}},
            "unknown setting engine.threads; it belongs to the engine in each replica: engine.replica.threads",
        ),
        ({"population_size": 8}, "unknown setting population_size; did you mean es.population_size?"),
        ({"lora": {"max_tokens": 8}}, "unknown setting lora.max_tokens; did you mean sampling.max_tokens?"),
        ({"engine": {"device_map": 1}}, "unknown setting engine.device_map; did you mean engine.device?"),
    ],
)
def test_an_unknown_key_gets_the_nearest_name(sections: dict[str, Any], message: str) -> None:
    assert error(**sections) == message


@pytest.mark.parametrize(
    ("section", "name", "here"),
    [
        ("evaluation", "samples_per_generation", "task.batch_size"),
        ("evaluation", "test_samples", "task.test_size"),
        ("es", "perturb_scale", "es.noise_multiplier, a tenth of it"),
        ("es", "init_scale", "lora.init_scale, with lora.evolve ab"),
    ],
)
def test_a_setting_of_the_lora_population_code_is_told_its_name_here(section: str, name: str, here: str) -> None:
    told = error(**{section: {"sigma": 0.1, name: 2} if section == "es" else {name: 2}})
    assert told.startswith(f"unknown setting {section}.{name}; here it is {here}")
    assert "did you mean" not in told


def test_removed_setting_is_named_with_what_to_do() -> None:
    told = error(evaluation={"beside_members": True})
    assert told.startswith("unknown setting evaluation.beside_members; ") and "removed" in told


def test_an_unknown_key_far_from_all_gets_the_list() -> None:
    assert error(model={"xyzzy": 1}).startswith("unknown setting model.xyzzy; known here: base, dtype, name")


def test_a_section_that_is_not_used_is_checked_all_the_same() -> None:
    assert "lowrank.rank" in error(space="lora", lowrank={"rank": 0})
    assert "unknown setting full.excluded" in error(space="lora", full={"excluded": []})


def test_all_mistakes_are_said_at_once() -> None:
    lines = error(es={"sigma": 0.1, "population_size": 1}, seed=-1, model={"nam": "x"}).splitlines()
    assert len(lines) == 3


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("population", [1, 0, -3])
def test_a_population_of_fewer_than_two_is_refused(population: int) -> None:
    assert error(es={"sigma": 0.1, "population_size": population}).startswith("es.population_size: ")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("es", "sigma", 0),
        ("es", "sigma", -0.1),
        ("es", "sigma", float("nan")),
        ("es", "sigma", float("inf")),
        ("es", "sigma", "wide"),
        ("es", "learning_rate", 0),
        ("es", "num_generations", 0),
        ("es", "num_generations", 1.5),
        ("es", "shaping", "softmax"),
        ("es", "decay", 1.0),
        ("es", "decay", -0.1),
        ("es", "optimizer", "lion"),
        ("es", "sigma_schedule", "step"),
        ("es", "sigma_schedule", {"name": "cosine", "floor": 0}),
        ("lora", "rank", 0),
        ("lora", "alpha", 0),
        ("lora", "target_layers", []),
        ("lora", "target_layers", [-1]),
        ("lora", "target_modules", []),
        ("lora", "target_modules", 3),
        ("lora", "evolve", "a"),
        ("lowrank", "rank", 0),
        ("task", "prompt", "long"),
        ("task", "split", "random"),
        ("task", "batch_size", 0),
        ("task", "train_size", 0),
        ("task", "rewards", 3),
        ("model", "dtype", "int8"),
        ("model", "trust_remote_code", True),
        ("engine", "name", "vlm"),
        ("engine", "memory_gib", 0),
        ("engine", "max_rows", 0),
        ("evaluation", "max_tokens", 0),
        ("evaluation", "temperature", -1),
        ("evaluation", "temperature", float("nan")),
        ("evaluation", "temperature", float("inf")),
        ("evaluation", "top_p", 0),
        ("evaluation", "top_p", 1.1),
        ("evaluation", "samples", 0),
        ("evaluation", "seeds", []),
        ("evaluation", "seeds", ["x"]),
        ("evaluation", "stop", [""]),
        ("sampling", "stop", [""]),
        ("evaluation", "every", -1),
    ],
)
def test_a_value_out_of_range_names_the_setting(section: str, key: str, value: Any) -> None:
    sections: dict[str, Any] = {"es": {"sigma": 0.1}}
    sections[section] = {**sections.get(section, {}), key: value}
    with pytest.raises(ConfigError) as caught:
        from_dict(sections)
    assert str(caught.value).startswith(f"{section}.{key}")
    assert "\n" not in str(caught.value)


def test_the_message_shows_the_value_given() -> None:
    assert error(es={"sigma": 0.1, "shaping": "softmax"}).endswith("(given: 'softmax')")


@pytest.mark.parametrize(("key", "value"), [("seed", -1), ("seed", 2**63), ("seed", 1.5), ("format_version", 2)])
def test_top_level_values(key: str, value: Any) -> None:
    assert error(**{key: value}).startswith(f"{key}: ")


def test_a_section_that_is_no_mapping() -> None:
    assert error(lora=3).startswith("lora: ")
    assert error(sampling=None).startswith("sampling: ")
    assert error(evaluation=None).startswith("evaluation: ")
    assert error(es=[1]).startswith("es: ")


def test_es_is_needed_and_so_is_one_width() -> None:
    with pytest.raises(ConfigError, match="missing setting es; es needs at least sigma or noise_multiplier"):
        _ = from_dict({}).es
    told = error(es={})
    assert told.startswith("es: set exactly one of es.sigma and es.noise_multiplier; to begin with, es.sigma: 0.01 in")
    assert "evoalign probe" in told


def test_antithetic_pairs_need_an_even_population() -> None:
    assert "even es.population_size, not 7" in error(es={"sigma": 0.1, "antithetic": True, "population_size": 7})
    assert config(es={"sigma": 0.1, "antithetic": True, "population_size": 8}).es.antithetic


@pytest.mark.parametrize("space", ["lowrank", "full"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_optimizers_with_state_are_for_lora(space: str, optimizer: str) -> None:
    es = {"sigma": 0.1, "optimizer": optimizer}
    assert "keeps state of the size of the model" in error(space=space, es=es)
    assert config(space="lora", es=es).es.optimizer.name == optimizer


def test_a_space_by_name_or_as_a_section() -> None:
    assert config(space="full").space.name == "full"
    assert config(space={"name": "full"}).space.name == "full"
    assert "unknown space 'fulll'" in error(space="fulll")


def test_settings_of_ones_own_space_and_of_no_other() -> None:
    own = config(space={"name": "package.module:Space", "depth": 3}).space
    assert own.options == {"depth": 3}
    assert "lora has its settings in the section lora" in error(space={"name": "lora", "rank": 3})


def test_a_step_in_units_of_the_noise() -> None:
    assert config(es={"sigma": 0.001, "learning_rate": 0.0005}).es.eta == 0.5
    assert config(es={"noise_multiplier": 0.1, "learning_rate": 0.01}).es.eta == 0.01


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_config_does_not_change() -> None:
    c = config()
    with pytest.raises(ValueError, match="frozen"):
        c.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        c.es.sigma = 3.0  # type: ignore[misc]


def test_the_saved_config_is_the_resolved_one_and_loads_the_same(tmp_path: Path) -> None:
    c = load([write(tmp_path, "field.yaml", FIELD)], ["es.optimizer=adam", "es.sigma_schedule=cosine"])
    text = to_yaml(c)
    assert load([write(tmp_path, "saved.yaml", text)]) == c
    saved = yaml.safe_load(text)
    assert saved["format_version"] == 1
    assert set(saved) == {info.alias or name for name, info in Config.model_fields.items()} - {"stopping", "scorer"}, (
        "unset"
    )
    assert saved["es"]["shaping"] == "zscore", "defaults are written out"


def test_a_saved_config_of_ones_own_space_loads_the_same(tmp_path: Path) -> None:
    c = config(space={"name": "package.module:Space", "depth": 3})
    assert load([write(tmp_path, "saved.yaml", to_yaml(c))]) == c


def test_from_dict_leaves_its_argument_alone() -> None:
    tree: dict[str, Any] = {"es": {"sigma": 0.1}, "space": "lora"}
    from_dict(tree)
    assert tree == {"es": {"sigma": 0.1}, "space": "lora"}


def test_importing_the_config_imports_no_torch() -> None:
    code = (
        "import sys, evoalign.config\n"
        "for engine in evoalign.config.ENGINES:\n"
        "    evoalign.config.from_dict({'es': {'sigma': 1}, 'engine': engine})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_pairs_of_ab_never_learn():
    tree = {"space": "lora", "lora": {"evolve": "ab"}, "es": {"sigma": 0.01, "antithetic": True}}
    with pytest.raises(ConfigError, match="can never learn"):
        from_dict(tree)
    assert from_dict({**tree, "space": "lowrank"}).lora.evolve == "ab"


@pytest.mark.parametrize(
    ("tree", "es", "grpo"),
    [
        ({}, {"lowrank", "full", "grpo"}, {"lora", "lowrank", "full", "space", "es"}),
        ({"grpo": {"tune": "lora"}}, {"lowrank", "full", "grpo"}, {"lowrank", "full", "space", "es"}),
        (
            {"space": "lowrank", "grpo": {"rollouts": "es"}},
            {"lora", "full", "grpo"},
            {"lora", "full"},
        ),
        ({"space": "my.module:Space"}, {"grpo"}, {"lora", "lowrank", "full", "space", "es"}),
    ],
)
def test_sections_that_a_method_does_not_read(tree: dict[str, Any], es: set[str], grpo: set[str]) -> None:
    config = from_dict({"es": {"sigma": 0.01}, **tree})
    assert (set(config.unused(grpo=False)), set(config.unused(grpo=True))) == (es, grpo)
    again = yaml.safe_load(to_yaml(config, without=config.unused(grpo=False)))
    assert from_dict(again) == config.model_copy(update={"grpo": from_dict(again).grpo})


ONE = {
    "task.rewards": "rewards.py:brief", "tracking.backends": "tensorboard", "sampling.stop": "</answer>",
    "evaluation.stop": "</answer>", "lora.target_modules": "down_proj", "full.exclude": "norm",
}  # fmt: skip


@pytest.mark.parametrize(("setting", "name"), ONE.items())
def test_one_name_needs_no_list(setting: str, name: str, tmp_path: Path) -> None:
    """In a file, with --set and for an editor, and the run is the one that a list gives."""
    section, field = setting.split(".")
    file = tmp_path / "one.yaml"
    file.write_text(f"es: {{sigma: 0.1}}\n{section}:\n  {field}: {name}\n")
    found = load([file])
    assert getattr(getattr(found, section), field) == [name]
    assert load([file], [f"{setting}={name}"]) == load([file], [f"{setting}=[{name}]"]) == found
    known = json_schema()
    model = known["$defs"][known["properties"][section]["$ref"].rpartition("/")[2]]
    kinds = [choice.get("type") for choice in model["properties"][field]["anyOf"]]
    assert {"string", "array"} <= set(kinds)
