# SPDX-License-Identifier: Apache-2.0
"""The section `scorer`: what it takes, what it writes, and what makes a run another."""

import pytest
import yaml

from evoalign.config import from_dict, load, to_yaml
from evoalign.errors import ConfigError
from evoalign.rundir.identity import config_hash, differences

LOCAL = {"name": "local", "reward": "models/reward", "cost": "models/cost"}
SERVICE = {"name": "service", "url": "http://127.0.0.1:8011", "token_env": "SCORER_TOKEN"}


def made(scorer=None):
    return from_dict({"es": {"sigma": 0.1}, **({} if scorer is None else {"scorer": scorer})})


def test_a_config_without_one_says_nothing_of_it():
    assert "scorer" not in yaml.safe_load(to_yaml(made()))
    assert "scorer" not in made().model_dump(mode="json")
    assert config_hash(made()) != config_hash(made(LOCAL))


@pytest.mark.parametrize("scorer", [LOCAL, SERVICE])
@pytest.mark.parametrize("changed", [True, False])
def test_what_is_written_is_read_as_the_same(scorer, changed, tmp_path):
    config = made(scorer)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config, changed=changed))
    assert load(file) == config
    written = yaml.safe_load(file.read_text())["scorer"]
    assert ("url" in written, "reward" in written) == (scorer is SERVICE, scorer is LOCAL)


SERVICES = ["url", "token_env", "timeout", "deadline", "concurrency"]
LOCALS = ["reward", "cost", "template", "max_tokens", "batch_size", "dtype", "device"]
OF_THE_OTHER = [
    *(({**SERVICE, key: 1}, rf"scorer\.{key} .* scorer\.name local, but .* is service") for key in LOCALS),
    *(({**LOCAL, key: 1}, rf"scorer\.{key} .* scorer\.name service, but .* is local") for key in SERVICES),
]


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        *OF_THE_OTHER,
        ({"name": "local"}, r"scorer\.reward"),
        ({"name": "service"}, r"scorer\.url"),
        ({"name": "service", "url": "ftp://x"}, r"scorer\.url"),
        ({"name": "service", "url": "http://user:pass@host"}, "looks like a secret"),
        ({"name": "service", "url": "http://h", "token_env": "not a name"}, r"scorer\.token_env"),
        ({**LOCAL, "templte": "x"}, r"unknown setting scorer\.templte; did you mean scorer\.template\?"),
        ({**LOCAL, "template": "{response} {prompt}"}, r"scorer\.template: write chat, or"),
        ({**LOCAL, "template": "{prompt}"}, r"scorer\.template: write chat, or"),
        ({**LOCAL, "max_tokens": 3}, r"scorer\.max_tokens"),
        ({**LOCAL, "device": "tpu"}, r"scorer\.device"),
        ({"name": "local", "reward": "a/b", "cost_revision": "v1"}, r"scorer\.cost_revision needs scorer\.cost"),
        ({**SERVICE, "reward_revision": "v1"}, r"scorer\.reward_revision 'v1' belongs to scorer\.name local"),
        ("local", "scorer: "),
    ],
)
def test_what_it_does_not_take_is_named(scorer, said):
    with pytest.raises(ConfigError, match=said):
        made(scorer)


def test_null_over_another_file_leaves_out_what_is_of_the_other_kind():
    assert made({**LOCAL, **SERVICE, "reward": None, "cost": None}) == made(SERVICE)
    assert made({**SERVICE, **LOCAL, "url": None, "token_env": None}) == made(LOCAL)


def test_models_make_another_run_and_where_a_service_is_does_not():
    moved = made({**SERVICE, "url": "http://127.0.0.1:9999", "timeout": 5})
    other, free = differences(moved, made(SERVICE))
    assert other == [] and len(free) == 2
    for changes, setting, batches in (({"cost": "models/other", "batch_size": 4}, "cost", 1),
                                      ({"reward_revision": "v1"}, "reward_revision", 0)):  # fmt: skip
        other, free = differences(made({**LOCAL, **changes}), made(LOCAL))
        assert [line.split()[0] for line in other] == [f"scorer.{setting}"] and len(free) == batches
    assert not {"reward_revision", "cost_revision"} & made(LOCAL).model_dump(mode="json")["scorer"].keys()
