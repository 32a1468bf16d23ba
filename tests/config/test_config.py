# SPDX-License-Identifier: Apache-2.0
import math
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from evoalign.config import Config, from_dict, load, to_yaml
from evoalign.config.load import parse_overrides
from evoalign.config.schema import schema as json_schema
from evoalign.errors import ConfigError

FIELD = Path(__file__).parents[2] / "configs/experiments/conciseness_lora_7b.yaml"
"""As it circulates: test_configs_shipped.py has a copy."""
BASE = "seed: 1\nes: {sigma: 0.001, population_size: 8}\nmodel: {name: tiny}\n"


def config(**sections):
    return from_dict({"es": {"sigma": 0.001}, **sections})


def error(call, *given):
    with pytest.raises(ConfigError) as caught:
        call(*given)
    return str(caught.value)


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def values(c, settings):
    return {setting: attrgetter(setting)(c) for setting in settings}


# --- files and overrides ----------------------------------------------------------------------------------------------


def test_the_yaml_of_the_field_loads_unchanged():
    expected = {
        "output_dir": "data/es_conciseness_v1", "seed": 33, "model.name": "Qwen/Qwen2.5-7B-Instruct", "lora.rank": 1,
        "lora.alpha": 2.0, "lora.target_layers": list(range(10)), "es.noise_multiplier": 0.1, "es.sigma": None,
        "es.width": 0.1, "es.eta": 0.01, "evaluation.max_tokens": 100, "evaluation.temperature": 0.0,
        "space.name": "lora", "lora.evolve": "b", "engine.name": "transformers",
    }  # fmt: skip
    c = load([FIELD])
    assert values(c, expected) == expected and c.lora.target_modules[0] == "q_proj"
    c = load([FIELD], ["model.name=tiny", "lora.target_layers=[0, 1, 2]"])
    assert (c.model.name, c.lora.target_layers, c.lora.rank) == ("tiny", [0, 1, 2], 1)


LOADED = [
    (["es: {population_size: 16}\nmodel: {dtype: float32}"], [], {
        "es.population_size": 16, "es.sigma": 0.001, "seed": 1, "model.name": "tiny", "model.dtype": "float32"}),
    (["lora: {target_layers: [0, 1, 2]}", "lora: {target_layers: [5]}"], [], {"lora.target_layers": [5]}),
    ([], ["es.population_size=32", "seed=7", "seed=8"], {"es.population_size": 32, "seed": 8, "es.sigma": 0.001}),
    ([], ["es.noise_multiplier=0.1"], {"es.sigma": None, "es.noise_multiplier": 0.1}),
    (["es: {noise_multiplier: 0.2}"], ["es.sigma=0.5"], {"es.width": 0.5}),
    ([], ["es.sigma=0.003"], {"es.sigma": 0.003}), ([], ["es.sigma=1e-3"], {"es.sigma": 0.001}),
    ([], ["es.sigma=2.5E-3"], {"es.sigma": 0.0025}), ([], ["tracking.name='1e-3'"], {"tracking.name": "1e-3"}),
    ([], ["es.antithetic=true"], {"es.antithetic": True}), ([], ["task.batch_size=null"], {"task.batch_size": None}),
    ([], ["lora.target_modules=[q_proj, v_proj]"], {"lora.target_modules": ["q_proj", "v_proj"]}),
    ([], ["lora={rank: 4, alpha: 8}"], {"lora.rank": 4, "lora.alpha": 8.0}),
    ([], ["es.sigma_schedule=cosine"], {"es.sigma_schedule.name": "cosine"}),
    ([], ["es.sigma_schedule.floor=0.2"], {"es.sigma_schedule.floor": 0.2}),
    ([], ["output_dir=runs/a=b"], {"output_dir": "runs/a=b"}),
    ([], ["output_dir=C:\\runs"], {"output_dir": "C:\\runs"}), ([], ["space=full"], {"space.name": "full"}),
    # a name is short for a section with that name, and YAML 1.1 reads 1e-3 as a string
    (["space: lora\nes: {optimizer: adam, sigma_schedule: cosine}"],
     ["es.optimizer.beta1=0.5", "es.sigma_schedule.floor=0.3"],
     {"es.optimizer.name": "adam", "es.optimizer.beta1": 0.5, "es.sigma_schedule.name": "cosine",
      "es.sigma_schedule.floor": 0.3}),
    (["es: {sigma: 1e-3, learning_rate: 5e-4}"], [], {"es.sigma": 0.001, "es.learning_rate": 0.0005}),
    (["es: {optimizer: {name: adam, beta1: 0.5}}"], ["es.optimizer=momentum"],
     {"es.optimizer.name": "momentum", "es.optimizer.beta1": 0.9}),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "overrides", "expected"), LOADED)
def test_later_files_and_overrides_win_key_by_key(texts, overrides, expected, tmp_path):
    files = [write(tmp_path, f"{number}.yaml", text) for number, text in enumerate([BASE, *texts])]
    assert values(load(files, overrides), expected) == expected
    assert files[0].read_text() == BASE


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no settings"), ("- 1\n- 2\n", "holds no settings"), ("es: [1, 2\n", "is not YAML"),
     ("es:\n\tsigma: 1\n", "is not YAML"), ("a: !!python/object/apply:os.getcwd []\n", "is not YAML"),
     (b"seed: \xff\xfe\n", "is not YAML"), (None, "evoalign init"), ("a folder", "is a folder"),
     ("es: {sigma: 0.1, noise_multiplier: 0.1}\n", r"exactly one of es\.sigma and es\.noise_multiplier")],
)  # fmt: skip
def test_a_file_that_is_no_config_is_one_line(text, message, tmp_path):
    path = tmp_path if text == "a folder" else tmp_path / "bad.yaml"
    if text is not None and path != tmp_path:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load([path])
    assert (str(path) in str(caught.value) or "exactly" in message) and "\n" not in str(caught.value)


def test_null_removes_the_learning_rate_of_an_earlier_file(tmp_path):
    file = write(tmp_path, "a.yaml", "es: {sigma: 0.1, learning_rate: 0.02}\n")
    assert load([file], ["es.learning_rate=null"]).es == load([file], ["es.learning_rate=0.0005"]).es
    with pytest.raises(ConfigError, match=r"remove es\.learning_rate \(--set es\.learning_rate=null does\)"):
        load([file], ["es.optimizer=cma"])
    assert load([file], ["es.optimizer=cma", "es.learning_rate=null"]).es.eta == 1


@pytest.mark.parametrize("override", ["es.sigma", "=1", ".=1", "es.sigma=[1", "es..sigma=1"])
def test_a_malformed_override_is_one_line(override):
    told = error(load, [FIELD], [override])
    assert override in told and "\n" not in told


# --- unknown keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "unknown", "meant"),
    [
        ({"es": {"sigma": 0.1, "learning_rat": 1.0}}, "es.learning_rat", "es.learning_rate"),
        ({"ouput_dir": "x"}, "ouput_dir", "output_dir"), ({"evaluatoin": {}}, "evaluatoin", "evaluation"),
        ({"task": {"bach": 4}}, "task.bach", "task.batch_size"),
        ({"population_size": 8}, "population_size", "es.population_size"),
        ({"lora": {"max_tokens": 8}}, "lora.max_tokens", "sampling.max_tokens"),
        ({"engine": {"device_map": 1}}, "engine.device_map", "engine.device"),
    ],
)  # fmt: skip
def test_an_unknown_key_gets_the_nearest_name(sections, unknown, meant):
    assert error(lambda: config(**sections)) == f"unknown setting {unknown}; did you mean {meant}?"


@pytest.mark.parametrize(
    ("section", "name", "here"),
    [
        ("evaluation", "samples_per_generation", "here it is task.batch_size"),
        ("evaluation", "test_samples", "here it is task.test_size"),
        ("es", "perturb_scale", "here it is es.noise_multiplier, a tenth of it"),
        ("es", "init_scale", "here it is lora.init_scale, with lora.evolve ab"),
        ("evaluation", "beside_members", "it was removed"), ("model", "xyzzy", "known here: base, dtype, name"),
        ("full", "excluded", "did you mean"),
        ("engine", "threads", "set engine.replica.threads"),
    ],
)  # fmt: skip
def test_an_unknown_key_far_from_all_is_told_its_name_here_or_gets_the_list(section, name, here):
    own = {"es": {"sigma": 0.1}, "engine": {"name": "ray"}}.get(section, {})
    told = error(lambda: config(**{section: {**own, name: 2}}))
    assert told.startswith(f"unknown setting {section}.{name}; ")
    assert here.removeprefix("it was ") in told and ("did you mean" in told) == (section == "full")


def test_all_mistakes_are_said_at_once_also_of_sections_that_are_not_used():
    told = error(lambda: config(es={"sigma": 0.1, "population_size": 1}, seed=-1, model={"nam": "x"}))
    assert len(told.splitlines()) == 3
    assert "lowrank.rank" in error(lambda: config(space="lora", lowrank={"rank": 0}))


# --- values -----------------------------------------------------------------------------------------------------------

WRONG = {
    "es.sigma": [0, -0.1, math.nan, math.inf, "wide"], "es.learning_rate": [0], "es.num_generations": [0, 1.5],
    "es.shaping": ["softmax"], "es.decay": [1.0, -0.1], "es.optimizer": ["lion"], "es.population_size": [1, 0, -3],
    "es.sigma_schedule": ["step", {"name": "cosine", "floor": 0}], "lora.rank": [0], "lora.alpha": [0],
    "lora.target_layers": [[], [-1]], "lora.target_modules": [[], 3], "lora.evolve": ["a"], "lowrank.rank": [0],
    "task.prompt": ["long"], "task.split": ["random"], "task.batch_size": [0], "task.train_size": [0],
    "task.rewards": [3], "model.dtype": ["int8"], "model.trust_remote_code": [True], "engine.name": ["vlm"],
    "engine.memory_gib": [0], "engine.max_rows": [0], "evaluation.max_tokens": [0],
    "evaluation.temperature": [-1, math.nan, math.inf], "evaluation.top_p": [0, 1.1], "evaluation.samples": [0],
    "evaluation.seeds": [[], ["x"]], "evaluation.stop": [[""]], "sampling.stop": [[""]], "evaluation.every": [-1],
    "seed": [-1, 2**63, 1.5], "format_version": [2], "lora": [3], "sampling": [None], "evaluation": [None], "es": [[1]],
}  # fmt: skip


@pytest.mark.parametrize(("setting", "value"), [(name, value) for name, wrong in WRONG.items() for value in wrong])
def test_a_value_out_of_range_names_the_setting(setting, value):
    section, dot, key = setting.partition(".")
    tree = {"es": {"sigma": 0.1}}
    tree[section] = {**tree.get(section, {}), key: value} if dot else value
    told = error(from_dict, tree)
    assert told.startswith(setting if dot else f"{setting}: ") and "\n" not in told
    assert value != "softmax" or told.endswith("(given: 'softmax')")


def test_es_is_needed_and_so_is_one_width():
    with pytest.raises(ConfigError, match="missing setting es; es needs at least sigma or noise_multiplier"):
        _ = from_dict({}).es
    told = error(lambda: config(es={}))
    assert told.startswith("es: set exactly one of es.sigma and es.noise_multiplier; to begin with, es.sigma: 0.01 in")
    assert "evoalign probe" in told


def test_pairs_need_an_even_population_and_never_learn_with_ab():
    pairs = {"sigma": 0.1, "antithetic": True}
    assert "even es.population_size, not 7" in error(lambda: config(es={**pairs, "population_size": 7}))
    assert config(es={**pairs, "population_size": 8}).es.antithetic
    assert "can never learn" in error(lambda: config(space="lora", lora={"evolve": "ab"}, es=pairs))
    assert config(space="lowrank", lora={"evolve": "ab"}, es=pairs).lora.evolve == "ab"


@pytest.mark.parametrize("space", ["lowrank", "full"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_optimizers_with_state_are_for_lora(space, optimizer):
    es = {"sigma": 0.1, "optimizer": optimizer}
    assert "keeps state of the size of the model" in error(lambda: config(space=space, es=es))
    assert config(space="lora", es=es).es.optimizer.name == optimizer


def test_a_space_is_a_name_or_a_section_and_settings_are_for_ones_own_alone():
    assert config(space="full").space.name == config(space={"name": "full"}).space.name == "full"
    assert "unknown space 'fulll'" in error(lambda: config(space="fulll"))
    assert config(space={"name": "package.module:Space", "depth": 3}).space.options == {"depth": 3}
    assert "lora has its settings in the section lora" in error(lambda: config(space={"name": "lora", "rank": 3}))


def test_a_step_is_in_units_of_the_noise():
    assert config(es={"sigma": 0.001, "learning_rate": 0.0005}).es.eta == 0.5


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_config_does_not_change_nor_does_what_it_is_made_of():
    tree = {"es": {"sigma": 0.1}, "space": "lora"}
    c = from_dict(tree)
    assert tree == {"es": {"sigma": 0.1}, "space": "lora"}
    for part, name in ((c, "seed"), (c.es, "sigma")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(part, name, 3)


def test_the_saved_config_is_the_resolved_one_and_loads_the_same(tmp_path):
    c = load([FIELD], ["es.optimizer=adam", "es.sigma_schedule=cosine"])
    saved = yaml.safe_load(to_yaml(c))
    unset = {"stopping", "scorer"}
    assert saved["format_version"] == 1 and saved["es"]["shaping"] == "zscore", "defaults are written out"
    assert set(saved) == {info.alias or name for name, info in Config.model_fields.items()} - unset
    for made in (c, config(space={"name": "package.module:Space", "depth": 3})):
        assert load([write(tmp_path, "saved.yaml", to_yaml(made))]) == made


def test_importing_the_config_imports_no_torch():
    code = (
        "import sys, evoalign.config\n"
        "for engine in evoalign.config.ENGINES:\n"
        "    evoalign.config.from_dict({'es': {'sigma': 1}, 'engine': engine})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("tree", "es", "grpo"),
    [
        ({}, {"lowrank", "full", "grpo"}, {"lora", "lowrank", "full", "space", "es"}),
        ({"grpo": {"tune": "lora"}}, {"lowrank", "full", "grpo"}, {"lowrank", "full", "space", "es"}),
        ({"space": "lowrank", "grpo": {"rollouts": "es"}}, {"lora", "full", "grpo"}, {"lora", "full"}),
        ({"space": "my.module:Space"}, {"grpo"}, {"lora", "lowrank", "full", "space", "es"}),
    ],
)
def test_sections_that_a_method_does_not_read(tree, es, grpo):
    config = from_dict({"es": {"sigma": 0.01}, **tree})
    assert (set(config.unused(grpo=False)), set(config.unused(grpo=True))) == (es, grpo)
    for left_out in (es, grpo):
        kept = (yaml.safe_load(to_yaml(config, without=left_out, changed=changed)) for changed in (False, True))
        assert not any(left_out & set(tree) for tree in kept)
    again = yaml.safe_load(to_yaml(config, without=config.unused(grpo=False)))
    assert from_dict(again) == config.model_copy(update={"grpo": from_dict(again).grpo})


ONE = {
    "task.rewards": "rewards.py:brief", "tracking.backends": "tensorboard", "sampling.stop": "</answer>",
    "evaluation.stop": "</answer>", "lora.target_modules": "down_proj", "full.exclude": "norm",
}  # fmt: skip


@pytest.mark.parametrize(("setting", "name"), ONE.items())
def test_one_name_needs_no_list(setting, name, tmp_path):
    """In a file, with --set and for an editor, and the run is the one that a list gives."""
    section, field = setting.split(".")
    file = write(tmp_path, "one.yaml", f"es: {{sigma: 0.1}}\n{section}:\n  {field}: {name}\n")
    found = load([file])
    assert values(found, [setting]) == {setting: [name]}
    assert load([file], [f"{setting}={name}"]) == load([file], [f"{setting}=[{name}]"]) == found
    known = json_schema()
    model = known["$defs"][known["properties"][section]["$ref"].rpartition("/")[2]]
    assert {"string", "array"} <= {choice.get("type") for choice in model["properties"][field]["anyOf"]}


def test_a_text_that_yaml_reads_as_a_mapping_is_to_be_quoted():
    text = "task.system_prompt=Read it. Two fields: intent (a, b)"
    with pytest.raises(ConfigError, match=r"task\.system_prompt: .*as a mapping: quote the text") as caught:
        from_dict(parse_overrides({"es": {"sigma": 0.1}}, [text]))
    quoted = text.replace("=", '="') + '"'
    assert quoted[:30] in str(caught.value)
    config = from_dict(parse_overrides({"es": {"sigma": 0.1}}, [quoted]))
    assert config.task.system_prompt == "Read it. Two fields: intent (a, b)"
