# SPDX-License-Identifier: Apache-2.0
"""SGLang generates the tokens and journals of the in-process engine, and refuses what it does not support."""

import io
import json
from pathlib import Path
from statistics import median

import pytest
from quantised_models import quantise
from rich.console import Console
from served import KEY, QUESTIONS, answers, attached, config, opened
from small_runs import UNCHECKED

import evoalign
from evoalign import engines, tokens
from evoalign.config import load
from evoalign.engines.server.client import RefusedError
from evoalign.engines.server.settings import ServerSettings
from evoalign.errors import ConfigError, DataError, EvoalignError, ModelError
from evoalign.models import tiny
from evoalign.types import MEAN, Plan, Request, Sampling, population

ROOT = Path(__file__).parents[2]
TIE = 1e-4
"""Log-probabilities closer than this are a tie, which another order of sums may decide differently."""


def ties(one, other):
    """Return 0 where two completions are the same, 1 where they differ at a near tie. Raises AssertionError."""
    lines = zip(one.token_ids, one.logprobs, other.token_ids, other.logprobs, strict=False)
    for token, p, token_other, p_other in lines:
        assert p == pytest.approx(p_other, abs=1e-3)
        if token != token_other:
            assert abs(p - p_other) < TIE, (one, other)
            return 1
    assert len(one.token_ids) == len(other.token_ids)
    return 0


def compare(members, sigma, *configs):
    """Compare a population's completions over two engines. Raises AssertionError."""
    plan = Plan(3, sigma, (*population(members, antithetic=True), MEAN))
    said = []
    for settings in configs:
        with opened(settings, logprobs=True) as (engine, requests):
            said.append(answers(engine, plan, requests))
    theirs, ours = said
    assert theirs.keys() == ours.keys() and len(ours) == (members + 1) * len(QUESTIONS)
    assert sum(ties(theirs[key], ours[key]) for key in ours) <= 0.01 * len(ours)
    assert len({r.text for r in ours.values()}) > len(QUESTIONS), "all members generate the same"


@pytest.mark.parametrize("space", ["lora", "lowrank"])
def test_thirty_members_generate_the_same_as_in_process(url, space):
    compare(30, 0.05, attached(url, space), config(space, "transformers"))


@pytest.mark.parametrize("space", ["lora", "lowrank"])
@pytest.mark.real
def test_eight_members_of_a_published_model_generate_the_same_as_in_process(smollm2, space):
    model = {"name": str(smollm2), "dtype": "float32"}
    es = {"sigma": 0.01, "learning_rate": 0.005, "population_size": 8}
    compare(8, 0.01, *(config(space, name, model=model, es=es) for name in ("sglang", "transformers")))


def test_members_over_an_awq_base_answer_as_in_process(tmp_path):
    quantise("awq", tiny(), tmp_path / "awq")
    more = {"model": {"name": str(tmp_path / "awq"), "dtype": "float16"}, "es": {"sigma": 0.05, "population_size": 6}}
    plan, found = Plan(3, 0.05, (*population(6, antithetic=True), MEAN)), []
    for name in ("sglang", "transformers"):
        with opened(config(name=name, **more), logprobs=True) as (engine, requests):
            found.append(answers(engine, plan, requests))
    theirs, ours = found
    apart = [abs(theirs[key].logprobs[0] - ours[key].logprobs[0]) for key in ours]
    members = [
        abs(theirs[key].logprobs[0] - theirs[MEAN.index, key[1]].logprobs[0]) for key in theirs if key[0] != MEAN.index
    ]
    assert median(apart) < 0.1 < median(members)  # in float16


def run(folder, engine, generations):
    """Return the journal of a short training."""
    console = Console(file=io.StringIO(), width=200)
    tree = {
        "output_dir": str(folder), "seed": 1,
        "task": {"name": "conciseness"}, "model": {"name": "tiny", "dtype": "float32"},
        "lora": {"rank": 8, "alpha": 8, "target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"num_generations": generations, "population_size": 30, "sigma": 0.025, "learning_rate": 0.0125},
        "evaluation": {"max_tokens": 32}, "checks": UNCHECKED, "engine": engine,
    }  # fmt: skip
    evoalign.train(tree, console=console)
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("generations", [3, pytest.param(10, marks=pytest.mark.long)])
def test_a_run_has_the_same_journal_as_in_process(url, generations, tmp_path):
    theirs = run(tmp_path / "theirs", {"name": "sglang", "url": url, "key_variable": KEY}, generations)
    ours = run(tmp_path / "ours", {"name": "transformers", "device": "cpu"}, generations)
    assert len({line["weights_hash"] for line in theirs if "weights_hash" in line}) > generations // 2
    assert [line.get("coefficients") for line in theirs] == [line.get("coefficients") for line in ours]
    assert [line.get("weights_hash") for line in theirs[1:]] == [line.get("weights_hash") for line in ours[1:]]
    rows = [json.loads(line) for line in (tmp_path / "theirs/metrics.jsonl").read_text().splitlines()]
    assert all(row["engine"].keys() >= {"running", "queue", "cache_used"} for row in rows)
    assert evoalign.replay(tmp_path / "theirs") == theirs[-1]["weights_hash"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora": {"rank": 16}}, ["rank 8 at most"]),
        ({"space": "full"}, ["space full", "engine vllm"]),
        ({"model": {"name": "tiny", "dtype": "bfloat16"}}, ["serves float32", "set model.dtype float32"]),
        ({"engine": {"url": "http://127.0.0.1:9", "start_timeout": 0.5}}, ["http://127.0.0.1:9"]),
        ({"engine": {"key_variable": "ANOTHER"}}, ["engine.key_variable"]),
        ({"engine": {"key_variable": None}}, ["engine.key_variable"]),
        ({"engine": {"key_variable": "NOT_SET"}}, ["engine.key_variable"]),
        (None, ["/no/such/python"]),
    ],
)
def test_unsupported_settings_are_refused_by_name(url, more, words, monkeypatch):
    monkeypatch.setenv("ANOTHER", "wrong")
    settings = config(engine={"python": "/no/such/python"}) if more is None else attached(url, **more)
    with pytest.raises((ConfigError, ModelError)) as said, opened(settings):
        pass
    assert all(word in str(said.value) for word in words), said.value


def test_a_server_of_the_model_in_full_precision_is_not_one_of_the_quantised_base(url, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerSettings, "packed_in_float32", True)  # the server at the URL serves float32
    quantise("awq", tiny(), tmp_path / "awq")
    settings = attached(url, model={"name": str(tmp_path / "awq"), "dtype": "float32"})
    with pytest.raises(ModelError, match=r"serves other weights than model .*awq"), opened(settings):
        pass


def test_rollout_refuses_a_prompt_that_is_too_long(url):
    with opened(attached(url)) as (engine, requests):
        long = Request(0, requests[0].prompt_ids * 60, Sampling(200))
        with pytest.raises(DataError, match=r"512 positions"):
            list(engine.rollout(Plan(0, 0.0, (MEAN,)), [long]))


def test_a_refused_adapter_does_not_count_as_a_lost_server(url):
    """The error quotes the server, which is not started again."""
    with opened(attached(url)) as (engine, requests):
        engine._store.put = lambda name, adapter: Path("/no/such/folder")
        with pytest.raises(RefusedError, match=r"/load_lora_adapter .*no/such/folder"):
            list(engine.rollout(Plan(0, 0.05, population(2)), requests))
        assert engine.connection.losses == 0


@pytest.mark.long  # tests/engines/test_server_process.py covers another process
def test_an_engine_that_fails_to_start_leaves_only_its_log(tmp_path):
    settings = config(engine={"arguments": ["--no-such-flag"]})
    with pytest.raises(EvoalignError, match=r"exit code 2\): .*no-such-flag") as said:
        engines.create(settings, tokens.load(settings.model))
    log = Path(str(said.value).rpartition("(its log: ")[2].rstrip(")"))
    assert log.is_file(), "the message names it"
    log.unlink()


def test_the_published_lora_population_config_runs(url, tmp_path):
    """On the tiny model and for one generation."""
    sets = [
        "model.name=tiny", "model.dtype=float32", "es.num_generations=1", "lora.target_layers=[0,1,2,3]",
        f"output_dir={tmp_path / 'run'}", "engine.name=sglang", f"engine.url={url}", f"engine.key_variable={KEY}",
    ]  # fmt: skip
    result = evoalign.train(load([ROOT / "configs/experiments/conciseness_lora_7b.yaml"], sets))
    assert (tmp_path / "run/loras/generation_0001/adapter_model.safetensors").is_file()
    assert result.before.measures.keys() == result.after.measures.keys()
