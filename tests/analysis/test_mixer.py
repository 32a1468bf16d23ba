# SPDX-License-Identifier: Apache-2.0
"""One model set to any point between targets: weights against plain transformers, answers against `evaluate`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import caller
from families import build, unfused
from safetensors.torch import save_file
from small_runs import UNCHECKED

import evoalign
from evoalign import noise, tokens
from evoalign.analysis.base import BASE
from evoalign.analysis.divergence import divergence_of
from evoalign.analysis.mixer import EvalSettings, ModelMixer, Perturbation
from evoalign.analysis.targets import locate, placebo_hint
from evoalign.analysis.weights import chosen, parts_of
from evoalign.config import Config, from_dict, load
from evoalign.engines import weights_hash
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.models import tiny

ES = {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 1, "population_size": 4}
ASKED = EvalSettings(examples=5, max_tokens=8)
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def runs(trained: Path) -> dict[str, str]:
    return {name: str(trained / name) for name in ("lora", "full")}


def plain(folder: str | Path = tiny()) -> Any:  # noqa: B008
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def merged(run: str) -> Tensors:
    """The weights of a run of space lora, by PEFT."""
    from peft import PeftModel

    saved = locate(run, None).weights
    return dict(PeftModel.from_pretrained(plain(), str(saved)).merge_and_unload().named_parameters())


def tensors(mixer: ModelMixer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in mixer.model.named_parameters()}


def write(folder: Path, weights: Tensors) -> Path:
    """Weights as a checkpoint that evoalign did not write."""
    model = plain()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / name, folder)
    return folder


def of_task(**sections: Any) -> Config:
    model = {"name": "tiny", "dtype": "float32", **sections.pop("model", {})}
    return from_dict({"model": model, "es": ES, "evaluation": {"max_tokens": 8}, **sections})


def test_a_point_of_a_line_is_the_line_of_plain_weights(runs: dict[str, str], tmp_path: Path) -> None:
    """An adapter is merged before it is mixed with a checkpoint; the ends are the targets' own bits."""
    a, b = runs["lora"], runs["full"]
    with ModelMixer([a, b], None, ASKED) as mixer:
        lora, full = merged(a), dict(plain(locate(b, None).weights).named_parameters())
        for alpha in (0.0, 0.3, 1.0, 1.5, -0.5):
            mixer.write({a: 1 - alpha, b: alpha})
            for name, found in tensors(mixer).items():
                torch.testing.assert_close(found, (1 - alpha) * lora[name] + alpha * full[name], rtol=1e-5, atol=1e-6)
        mixer.write({b: 1.0, a: 0.0})
        assert all(torch.equal(found, full[name]) for name, found in tensors(mixer).items())
        mixer.write({BASE: 1.0})
        assert all(torch.equal(found, dict(plain().named_parameters())[n]) for n, found in tensors(mixer).items())
        with pytest.raises(EvoalignError, match="do not sum to 1"):
            mixer.write({a: 0.5, b: 0.6})
        mid = {n: (lora[n] + full[n]) / 2 for n in full}
        found = mixer.evaluate({a: 0.5, b: 0.5})
    config = load([Path(a) / "config.yaml"])
    theirs = evoalign.evaluate(write(tmp_path / "mid", mid), config=config, overrides={"max_tokens": 8})
    assert found.measures_E["reward"] == theirs.measures_E["reward"][:5]


def test_the_float32_mean_replaces_a_rounded_checkpoint(tmp_path: Path) -> None:
    name = str(shutil.copytree(tiny(), tmp_path / "saved"))
    fine = plain().model.norm.weight.detach() * 1.0001
    save_file({"model.norm.weight": fine}, tmp_path / "saved" / "mean-00000.safetensors")
    with ModelMixer([name], of_task(), ASKED) as mixer:
        mixer.write({name: 1.0})
        assert torch.equal(tensors(mixer)["model.norm.weight"], fine)


def test_noise_is_added_to_the_part_alone_rounded_once_and_is_gone_again_to_the_bit(runs: dict[str, str]) -> None:
    name = runs["full"]
    with ModelMixer([name], None, ASKED) as mixer:
        mixer.write({name: 1.0})
        before, clean = weights_hash(mixer.model.named_parameters()), tensors(mixer)
        mixer.write({name: 1.0}, Perturbation(0.05, 3, "attention"))
        for tensor, found in tensors(mixer).items():
            wanted = clean[tensor]
            if ".self_attn." in tensor:
                drawn = noise.normals(noise.key(0, "analysis", tensor), tuple(wanted.shape), 0, [3])[0]
                wanted = wanted + np.float32(0.05) * drawn
            assert torch.equal(found, wanted), tensor
        first = weights_hash(mixer.model.named_parameters())
        mixer.write({name: 1.0}, Perturbation(0.05, 4, "attention"))
        assert weights_hash(mixer.model.named_parameters()) not in (before, first), "another draw"
        mixer.write({BASE: 0.25, name: 0.75}, Perturbation(0.05, 3))
        mixer.write({name: 1.0}, Perturbation(0.05, 3, "attention"))
        assert weights_hash(mixer.model.named_parameters()) == first, "the same draw, whatever came before"
        mixer.write({name: 1.0})
        assert weights_hash(mixer.model.named_parameters()) == before
    with ModelMixer([BASE], of_task(model={"dtype": "bfloat16"}), ASKED) as mixer:  # float32 arithmetic, served weights
        mixer.write({BASE: 1.0}, Perturbation(0.01, 0))
        assert all(torch.equal(found, found.bfloat16().float()) for found in tensors(mixer).values())
        assert mixer.model.dtype == torch.float32
    with ModelMixer([name], None, EvalSettings(examples=5, max_tokens=8, seed=1)) as mixer:
        mixer.write({name: 1.0}, Perturbation(0.05, 3, "attention"))
        assert weights_hash(mixer.model.named_parameters()) != first


def test_a_noisy_model_answers_as_a_checkpoint_with_that_noise(runs: dict[str, str], tmp_path: Path) -> None:
    name = runs["lora"]
    with ModelMixer([name], None, ASKED) as mixer:
        found = mixer.evaluate({name: 1.0}, Perturbation(0.05, 1))
        folder = write(tmp_path / "noisy", tensors(mixer))
        assert mixer.evaluate({name: 1.0}).measures_E["reward"] != found.measures_E["reward"]
    theirs = evoalign.evaluate(folder, config=load([Path(name) / "config.yaml"]), overrides={"max_tokens": 8})
    assert found.measures_E["reward"] == theirs.measures_E["reward"][:5]


def test_the_divergence_of_a_target_is_that_of_the_analysis(runs: dict[str, str]) -> None:
    name = runs["full"]
    with ModelMixer([name], None, ASKED) as mixer:
        found = mixer.divergence({BASE: 1.0}, {name: 1.0})
        assert mixer.divergence({name: 1.0}, {name: 1.0}).nats_P.tolist() == [0.0] * 5
        assert (
            mixer.divergence({BASE: 1.0}, {name: 1.0}, Perturbation(1e-30, 0)).nats_P.tolist() == found.nats_P.tolist()
        )
    known, _ = divergence_of(locate(name, None), 5, 1)
    assert found.nats_P.sum() / found.tokens_P.sum() == pytest.approx(known.exact, rel=1e-6)
    assert found.draws_P.tolist() == [1.0] * 5 and known.exact > 0.01


def test_hacked_compares_with_the_base_and_the_best_target(runs: dict[str, str]) -> None:
    """An empty answer is broken by itself; one that is wrong counts where it earns as much as the best target's."""
    name = runs["lora"]
    with ModelMixer([name], None, EvalSettings(examples=8, max_tokens=8)) as mixer:
        own = mixer.evaluate({name: 1.0})
        best = max(said.reward for point in (BASE, name) for said in mixer.evaluate({point: 1.0}).completions)
        changed = [
            replace(said, text=f"Own answer {i}", right=False, reward=-99.0) for i, said in enumerate(own.completions)
        ]
        changed[1], changed[4] = replace(changed[1], text=""), replace(changed[4], reward=best)
        marked_E = mixer.hacked(replace(own, completions=tuple(changed)))
    assert marked_E.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]


def test_where_one_model_has_a_head_of_its_own_all_have(tmp_path: Path) -> None:
    """The base is tied; the checkpoint is not, and turns the signs of its last norm and its head: the same function."""
    own = write_negated(tmp_path / "negated")
    with ModelMixer([str(own)], of_task(), ASKED) as mixer:
        assert not mixer.tied and mixer.parts["unembedding"] == {"lm_head.weight"}
        assert mixer.parts["embeddings"] == {"model.embed_tokens.weight"}
        base, other = mixer.evaluate({BASE: 1.0}), mixer.evaluate({str(own): 1.0})
        assert [s.text for s in base.completions] == [s.text for s in other.completions]
        mixer.write({BASE: 1.0}, Perturbation(0.05, 0, "unembedding"))
        found = tensors(mixer)
        assert torch.equal(found["model.embed_tokens.weight"], plain().model.embed_tokens.weight)
        assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def write_negated(folder: Path) -> Path:
    """The tiny model with the signs of its last norm and of its head turned: logits are the same.

    Half-way to the tiny model itself both are 0 and so are all logits: there every token is as likely.
    """
    model = plain()
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach().clone())
        model.model.norm.weight.neg_()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_mixed_and_perturbed_under_their_own_names(family: str, tmp_path: Path) -> None:
    folder, other = build(family, tmp_path / "a"), build(family, tmp_path / "b", num_hidden_layers=2)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    model.save_pretrained(other)
    config = of_task(model={"name": str(folder)})
    with ModelMixer([str(other)], config, EvalSettings(examples=2, max_tokens=3)) as mixer:
        base = unfused(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        mixer.write({BASE: 0.5, str(other): 0.5})
        assert set(unfused(mixer.model)) == set(base)
        for name, found in unfused(mixer.model).items():
            torch.testing.assert_close(found.data, 1.125 * base[name].data)
        expert = next(n for n in base if ".experts.2." in n)
        mixer.write({BASE: 1.0}, Perturbation(0.1, 0, "mlp"))
        drawn = noise.normals(noise.key(0, "analysis", expert), tuple(base[expert].shape), 0, [0])[0]
        assert torch.equal(unfused(mixer.model)[expert].data, base[expert].data + np.float32(0.1) * drawn)
        mixer.evaluate({BASE: 1.0}, Perturbation(0.1, 0, "mlp"))
        assert expert in mixer.parts["mlp"] and not mixer.parts["mlp"] & mixer.parts["attention"]


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt_neox", "opt", "mpt"])
def test_parts_are_distinguished_in_every_family(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build(family, tmp_path / family))
    names, parts = {name for name, _ in model.named_parameters()}, parts_of(model)
    assert parts["all"] == names and parts["embeddings"]
    inside = parts["attention"] | parts["mlp"]
    assert not parts["attention"] & parts["mlp"] and parts["attention"] and parts["mlp"]
    assert not any("norm" in name for name in inside)
    left = names - inside - parts["embeddings"] - parts.get("unembedding", frozenset())
    assert all("norm" in name for name in left), left
    assert inside < parts["layer 0"] | parts["layer 1"] and not parts["layer 0"] & parts["layer 1"]
    assert ("unembedding" in parts) == (not model.config.tie_word_embeddings)
    assert chosen(parts, ["all", "layers", "all"]) == ["all", "layer 0", "layer 1"]
    with pytest.raises(ConfigError, match="no part 'head'"):
        chosen(parts, ["head"])


def test_an_adapter_of_peft_is_merged_by_its_own_settings(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "use_rslora": True}
    model: Any = get_peft_model(plain(), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(tmp_path)
    name = str(tmp_path)
    with ModelMixer([name], of_task(), ASKED) as mixer:
        mixer.write({name: 1.0})
        wanted = dict(model.merge_and_unload().named_parameters())
        assert not torch.equal(tensors(mixer)["model.layers.0.self_attn.q_proj.weight"],
                               dict(plain().named_parameters())["model.layers.0.self_attn.q_proj.weight"])  # fmt: skip
        assert all(torch.equal(found, wanted[n]) for n, found in tensors(mixer).items())


def test_other_shapes_name_the_tensor(tmp_path: Path) -> None:
    folder = build("qwen2", tmp_path / "wide", hidden_size=64)
    config = of_task(model={"name": str(build("qwen2", tmp_path / "base"))})
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight of shape \[1024, 64\].* \[1024, 32\]"):
        ModelMixer([str(folder)], config, ASKED)
    deep = build("qwen2", tmp_path / "deep", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"has model\.layers\.2\..*, which the base model has not"):
        ModelMixer([str(deep)], config, ASKED)


def test_wrong_targets_and_settings_are_refused(runs: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        ModelMixer([runs["lora"], runs["lora"]], None, ASKED)
    with pytest.raises(ConfigError, match="base alone names no model"):
        ModelMixer([BASE], None, ASKED)
    with pytest.raises(ConfigError, match="no validation split"):
        ModelMixer([runs["lora"]], None, EvalSettings(split="validation"))
    with pytest.raises(ConfigError, match="examples: 0"):
        ModelMixer([runs["lora"]], None, EvalSettings(examples=0))
    moved = shutil.copytree(runs["lora"], tmp_path / "moved")
    text = (moved / "config.yaml").read_text().replace("name: conciseness", "name: countdown")
    (moved / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not of the task"):
        ModelMixer([runs["lora"], str(moved)], None, ASKED)


def test_no_training_example_is_evaluated_whatever_the_config(tmp_path: Path) -> None:
    """Without test_data the seed parts the rows: that of the run counts, and runs of two seeds are refused."""
    file, small = tmp_path / "rows.json", {"evaluation": {"max_tokens": 4}, "checks": UNCHECKED}
    file.write_text(json.dumps([{"question": f"Is {i} odd?", "answer": "Yes" if i % 2 else "No"} for i in range(20)]))
    given = of_task(task={"name": "conciseness", "train_data": str(file)}, **small)
    for seed in (1, 2):
        evoalign.train({**given.model_dump(), "seed": seed, "output_dir": str(tmp_path / str(seed))})
    run, other = str(tmp_path / "1"), str(tmp_path / "2")
    with ModelMixer([run], given, ASKED) as mixer, ModelMixer([run], None, ASKED) as own:
        assert mixer.examples == own.examples
        assert mixer.examples != mixer.task.load_data(0).test, "the seed of the config parts them otherwise"
    with pytest.raises(ConfigError, match="trained with seed 2, which draws another test split than seed 1"):
        ModelMixer([run, other], given, ASKED)
    (held := tmp_path / "held.json").write_text(
        json.dumps([{"question": f"Is {i} even?", "answer": "No"} for i in range(9)])
    )
    apart = of_task(task={"name": "conciseness", "train_data": str(file), "test_data": str(held)}, **small)
    with ModelMixer([run, other], apart, ASKED) as mixer:
        assert len(mixer.examples) == ASKED.examples


def test_runs_of_one_seed_that_parted_their_rows_otherwise_are_refused(tmp_path: Path) -> None:
    """By the settings of the first, the second was trained on what is asked."""
    small = {"evaluation": {"max_tokens": 4}, "checks": UNCHECKED, "output_dir": str(tmp_path / "few")}
    task = {"name": "countdown", "split": "first_last", "train_size": 2, "test_size": 2000}
    few, many = of_task(task=task, **small), of_task(task={**task, "train_size": 2190, "test_size": 10}, **small)
    for name, config in (("few", few), ("many", many)):
        evoalign.train(
            {
                **config.model_dump(),
                "task": {**config.task.model_dump(), "test_size": 10, "batch_size": 2},
                "output_dir": str(tmp_path / name),
            }
        )
    saved = tmp_path / "few/config.yaml"
    saved.write_text(saved.read_text().replace("test_size: 10", "test_size: 2000"))  # so many take minutes
    with pytest.raises(ConfigError, match=r"many .*task\.train_size is 2190 .* and 2 now"):
        ModelMixer([str(tmp_path / "few"), str(tmp_path / "many")], None, ASKED)


def test_placebo_hint_names_runs_without_a_placebo(
    runs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, placebo = runs["lora"], str(tmp_path / "placebo")
    targets = {run: locate(run, None)}
    (line,) = placebo_hint(targets)
    assert line.startswith(f"{run}: no placebo is among the targets")
    assert placebo_hint({}) == []
    done = caller(monkeypatch, capsys)("replay", run, "--counterfactual", "shuffle", "--to", placebo)
    assert done.code == 0, done.err
    config = load([Path(run) / "config.yaml"])
    assert placebo_hint({**targets, placebo: locate(placebo, config)}) == []
    with ModelMixer([run, placebo], config, ASKED) as mixer:
        mixer.write({run: 1.0})
        own = tensors(mixer)
        mixer.write({placebo: 1.0})
        assert any(not torch.equal(found, own[name]) for name, found in tensors(mixer).items())


def test_put_weights_are_evaluated() -> None:
    """They are read anew each time they are put, and what they lack is the base model's."""
    norm = "model.norm.weight"
    with ModelMixer([BASE], from_dict({"model": {"name": "tiny"}}), ASKED) as mixer:
        own = mixer.mixed(norm, {BASE: 1.0})
        before = mixer.evaluate({BASE: 1.0})
        for factor in (-1.0, 1.0):
            mixer.put("mine", {norm: factor * own})
            assert torch.equal(mixer.mixed(norm, {"mine": 1.0}), factor * own)
            found = mixer.evaluate({"mine": 1.0})
            assert torch.equal(dict(mixer.model.named_parameters())[norm], factor * own) or factor == 1.0
            assert (found.completions == before.completions) == (factor == 1.0)
        with pytest.raises(ModelError, match=r"mine has model.norm.weight of shape \[1\]"):
            mixer.put("mine", {norm: own[:1]})
        with pytest.raises(ModelError, match=r"mine has nose\.weight, which the base model has not"):
            mixer.put("mine", {"nose.weight": own})


@torch.no_grad()
@pytest.mark.slow
def test_the_divergence_is_the_sum_over_all_answers_of_two_tokens(runs: dict[str, str]) -> None:
    """Each of the million answers counted: log-probabilities of plain transformers, weights of the saved checkpoint."""
    name = runs["full"]
    with ModelMixer([name], None, EvalSettings(examples=3, max_tokens=2, kl_tokens=10**6)) as mixer:
        samples, sums_N4 = mixer.drawn({BASE: 1.0}, {name: 1.0})
        stops = sorted(tokens.load(mixer.config.model).stop_ids)
    policy, base = plain(locate(name, None).weights), plain()
    nats_N = sums_N4[:, 3].numpy()
    for prompt in dict.fromkeys(sample.prompt_ids for sample in samples):
        first_2V, then_2VV = (torch.stack(found) for found in zip(*(both(m, prompt) for m in (policy, base))))  # noqa: B905
        goes_on_V = torch.ones(first_2V.shape[1])
        goes_on_V[stops] = 0
        p_V, gap_V = first_2V[0].exp(), first_2V[0] - first_2V[1]
        ended = ((1 - goes_on_V) * p_V * gap_V).sum()
        p_VV = p_V[:, None] * then_2VV[0].exp()
        whole = (goes_on_V[:, None] * p_VV * (gap_V[:, None] + then_2VV[0] - then_2VV[1])).sum()
        of_draw_V = (p_V * gap_V).sum() + goes_on_V * (then_2VV[0].exp() * (then_2VV[0] - then_2VV[1])).sum(1)
        assert float((p_V * of_draw_V).sum()) == pytest.approx(float(ended + whole), rel=1e-9), "what a draw is worth"
        assert float(ended + whole) > 1e-2
        for sample, nats in zip(samples, nats_N, strict=True):
            if sample.prompt_ids == prompt:
                assert nats == pytest.approx(float(of_draw_V[sample.token_ids[0]]), rel=1e-3, abs=1e-6)


def both(model: Any, prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the first token, [V], and of the second after each first one, [V, V]."""
    first_V = model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
    rows_VT = torch.tensor([[*prompt, v] for v in range(len(first_V))])
    then_VV = torch.cat([model(part).logits[:, -1] for part in rows_VT.split(256)])
    return first_V, then_VV.double().log_softmax(-1)
