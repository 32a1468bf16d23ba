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
from copied_runs import copy_run
from families import build, unfused
from safetensors.torch import save_file

import evoalign
from evoalign import noise, tokens
from evoalign.analysis.base import BASE
from evoalign.analysis.mixer import EvalSettings, ModelMixer, Perturbation
from evoalign.analysis.targets import locate, placebo_hint
from evoalign.analysis.weights import chosen, parts_of
from evoalign.config import Config, from_dict, load
from evoalign.engines import weights_hash
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.models import tiny
from evoalign.training.replay import replay

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


def write(folder: Path, weights: Tensors | Any) -> Path:
    """Weights, or a model, as a checkpoint that evoalign did not write."""
    model = weights if isinstance(weights, torch.nn.Module) else plain()
    if model is not weights:
        model.load_state_dict({**model.state_dict(), **weights})
        model.tie_weights()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / name, folder)
    return folder


def write_negated(folder: Path) -> Path:
    """The tiny model with the signs of its last norm and of its head turned: logits are the same.

    Half-way to the tiny model itself both are 0 and so are all logits: there every token is as likely.
    """
    model = plain()
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach().clone())
        model.model.norm.weight.neg_()
    return write(folder, model)


def of_task(**sections: Any) -> Config:
    model = {"name": "tiny", "dtype": "float32", **sections.pop("model", {})}
    return from_dict({"model": model, "es": ES, "evaluation": {"max_tokens": 8}, **sections})


def base_weights() -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in plain().named_parameters()}


def test_a_point_of_a_line_is_the_line_of_plain_weights(runs: dict[str, str], tmp_path: Path) -> None:
    """An adapter is merged before it is mixed with a checkpoint; the ends are the targets' own bits.

    A mix and a noisy model answer as checkpoints with those weights.
    """
    a, b = runs["lora"], runs["full"]
    with ModelMixer([a, b], None, ASKED) as mixer:
        lora, full = merged(a), dict(plain(locate(b, None).weights).named_parameters())
        for alpha in (0.0, 0.3, 1.0, 1.5, -0.5):
            mixer.write({a: 1 - alpha, b: alpha})
            for name, found in tensors(mixer).items():
                torch.testing.assert_close(found, (1 - alpha) * lora[name] + alpha * full[name], rtol=1e-5, atol=1e-6)
        for point, wanted in (({b: 1.0, a: 0.0}, full), ({BASE: 1.0}, base_weights())):
            mixer.write(point)
            assert all(torch.equal(found, wanted[name]) for name, found in tensors(mixer).items())
        with pytest.raises(EvoalignError, match="do not sum to 1"):
            mixer.write({a: 0.5, b: 0.6})
        mid = mixer.evaluate({a: 0.5, b: 0.5})
        noisy = mixer.evaluate({a: 1.0}, Perturbation(0.05, 1))
        write(tmp_path / "noisy", tensors(mixer))
        assert mixer.evaluate({a: 1.0}).measures_E["reward"] != noisy.measures_E["reward"]
    write(tmp_path / "mid", {n: (lora[n] + full[n]) / 2 for n in full})
    config = load([Path(a) / "config.yaml"])
    for name, found in (("mid", mid), ("noisy", noisy)):
        theirs = evoalign.evaluate(tmp_path / name, config=config, overrides={"max_tokens": 8})
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

    def written(mixer: ModelMixer, trial: int | None = None) -> str:
        mixer.write({name: 1.0}, None if trial is None else Perturbation(0.05, trial, "attention"))
        return weights_hash(mixer.model.named_parameters())

    with ModelMixer([name], None, ASKED) as mixer:
        before, clean = written(mixer), tensors(mixer)
        first = written(mixer, 3)
        for tensor, found in tensors(mixer).items():
            wanted = clean[tensor]
            if ".self_attn." in tensor:
                drawn = noise.normals(noise.key(0, "analysis", tensor), tuple(wanted.shape), 0, [3])[0]
                wanted = wanted + np.float32(0.05) * drawn
            assert torch.equal(found, wanted), tensor
        assert written(mixer, 4) not in (before, first), "another draw"
        mixer.write({BASE: 0.25, name: 0.75}, Perturbation(0.05, 3))
        assert written(mixer, 3) == first, "the same draw, whatever came before"
        assert written(mixer) == before
    with ModelMixer([BASE], of_task(model={"dtype": "bfloat16"}), ASKED) as mixer:  # float32 arithmetic, served weights
        mixer.write({BASE: 1.0}, Perturbation(0.01, 0))
        assert all(torch.equal(found, found.bfloat16().float()) for found in tensors(mixer).values())
        assert mixer.model.dtype == torch.float32
    with ModelMixer([name], None, EvalSettings(examples=5, max_tokens=8, seed=1)) as mixer:
        assert written(mixer, 3) != first


def test_hacked_compares_with_the_base_and_the_best_target(runs: dict[str, str]) -> None:
    """An empty answer is broken by itself; one that is wrong counts where it earns as much as the best target's."""
    name = runs["lora"]
    with ModelMixer([name], None, EvalSettings(examples=8, max_tokens=8)) as mixer:
        own = mixer.evaluate({name: 1.0})
        best = max(said.reward for point in (BASE, name) for said in mixer.evaluate({point: 1.0}).completions)
        wrong = {"right": False, "reward": -99.0}
        changed = [replace(said, text=f"Own answer {i}", **wrong) for i, said in enumerate(own.completions)]
        changed[1], changed[4] = replace(changed[1], text=""), replace(changed[4], reward=best)
        marked_E = mixer.hacked(replace(own, completions=tuple(changed)))
    assert marked_E.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]


def test_where_one_model_has_a_head_of_its_own_all_have(tmp_path: Path) -> None:
    """The base is tied; the checkpoint is not, and turns the signs of its last norm and its head: the same function."""
    own = str(write_negated(tmp_path / "negated"))
    with ModelMixer([own], of_task(), ASKED) as mixer:
        assert not mixer.tied and mixer.parts["unembedding"] == {"lm_head.weight"}
        assert mixer.parts["embeddings"] == {"model.embed_tokens.weight"}
        base, other = mixer.evaluate({BASE: 1.0}), mixer.evaluate({own: 1.0})
        assert [s.text for s in base.completions] == [s.text for s in other.completions]
        mixer.write({BASE: 1.0}, Perturbation(0.05, 0, "unembedding"))
        found = tensors(mixer)
        assert torch.equal(found["model.embed_tokens.weight"], base_weights()["model.embed_tokens.weight"])
        assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_mixed_and_perturbed_under_their_own_names(family: str, tmp_path: Path) -> None:
    folder, other = build(family, tmp_path / "a"), build(family, tmp_path / "b", num_hidden_layers=2)
    model = plain(other)
    for parameter in model.parameters():
        parameter.data.mul_(1.25)
    model.save_pretrained(other)
    with ModelMixer([str(other)], of_task(model={"name": str(folder)}), EvalSettings(2, max_tokens=3)) as mixer:
        base = unfused(plain(folder))
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
    model = plain(build(family, tmp_path / family))
    names, parts = {name for name, _ in model.named_parameters()}, parts_of(model)
    inside = parts["attention"] | parts["mlp"]
    assert parts["all"] == names and parts["embeddings"] and parts["attention"] and parts["mlp"]
    assert not parts["attention"] & parts["mlp"] and not any("norm" in name for name in inside)
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
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(tmp_path)
    with ModelMixer([str(tmp_path)], of_task(), ASKED) as mixer:
        mixer.write({str(tmp_path): 1.0})
        found, wanted = tensors(mixer), dict(model.merge_and_unload().named_parameters())
    assert all(torch.equal(tensor, wanted[n]) for n, tensor in found.items())
    moved = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(found[moved], base_weights()[moved])


def test_other_shapes_name_the_tensor(tmp_path: Path) -> None:
    config = of_task(model={"name": str(build("qwen2", tmp_path / "base"))})
    wide, deep = r"model\.embed_tokens\.weight of shape \[1024, 64\].* \[1024, 32\]", r"has model\.layers\.2\..*has not"
    for said, change in ((wide, {"hidden_size": 64}), (deep, {"num_hidden_layers": 3})):
        folder = build("qwen2", tmp_path / next(iter(change)), **change)
        with pytest.raises(ModelError, match=said):
            ModelMixer([str(folder)], config, ASKED)


def test_wrong_targets_and_settings_are_refused(runs: dict[str, str], tmp_path: Path) -> None:
    run = runs["lora"]
    moved = copy_run(Path(run), tmp_path / "moved", sets={"task.name": "countdown"})
    for targets, asked, said in (([run, run], ASKED, "given twice"), ([BASE], ASKED, "base alone names no model"),
                                 ([run], EvalSettings(split="validation"), "no validation split"),
                                 ([run], EvalSettings(examples=0), "examples: 0"),
                                 ([run, str(moved)], ASKED, r"no task in common: task\.name")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            ModelMixer(targets, None, asked)


def test_no_training_example_is_evaluated_whatever_the_config(runs: dict[str, str], tmp_path: Path) -> None:
    """Without test_data the seed parts the rows: that of the run counts, and runs of two seeds are refused."""
    rows = [{"question": f"Is {i} odd?", "answer": "Yes" if i % 2 else "No"} for i in range(20)]
    for name, some in (("rows", rows), ("other", rows[:9])):
        (tmp_path / f"{name}.json").write_text(json.dumps(some))
    task = {"name": "conciseness", "train_data": str(tmp_path / "rows.json")}
    run, other = (str(copy_run(Path(runs["lora"]), tmp_path / str(seed), seed=seed, sets={"task": task}))
                  for seed in (1, 2))  # fmt: skip
    given, apart = of_task(task=task), of_task(task={**task, "test_data": str(tmp_path / "other.json")})
    with ModelMixer([run], given, ASKED) as mixer, ModelMixer([run], None, ASKED) as own:
        assert mixer.examples == own.examples
        assert mixer.examples != mixer.task.load_data(0).test, "the seed of the config parts them otherwise"
    with pytest.raises(ConfigError, match="trained with seed 2, which draws another test split than seed 1"):
        ModelMixer([run, other], given, ASKED)
    with ModelMixer([run, other], apart, ASKED) as mixer:
        assert len(mixer.examples) == ASKED.examples


def test_runs_of_one_seed_that_parted_their_rows_otherwise_are_refused(runs: dict[str, str], tmp_path: Path) -> None:
    """By the settings of the first, the second was trained on what is asked."""
    few, many = (str(copy_run(Path(runs["lora"]), tmp_path / f"{train}", sets={"task": {
        "name": "countdown", "split": "first_last", "train_size": train, "test_size": test}}))
        for train, test in ((2, 2000), (2190, 10)))  # fmt: skip
    with pytest.raises(ConfigError, match=r"2190 .*task\.train_size is 2190 .* and 2 now"):
        ModelMixer([few, many], None, ASKED)


def test_placebo_hint_names_runs_without_a_placebo(runs: dict[str, str], tmp_path: Path) -> None:
    run, placebo = runs["lora"], str(tmp_path / "placebo")
    targets = {run: locate(run, None)}
    (line,) = placebo_hint(targets)
    assert line.startswith("No placebo is among the targets") and placebo_hint({}) == []
    replay(run, to=placebo, counterfactual="shuffle", seed=0)
    assert placebo_hint({**targets, placebo: locate(placebo, load([Path(run) / "config.yaml"]))}) == []


def test_put_weights_are_evaluated() -> None:
    """They are read anew each time they are put, and what they lack is the base model's."""
    norm = "model.norm.weight"
    with ModelMixer([BASE], from_dict({"model": {"name": "tiny"}}), ASKED) as mixer:
        own, before = mixer.mixed(norm, {BASE: 1.0}), mixer.evaluate({BASE: 1.0})
        for factor in (-1.0, 1.0):
            mixer.put("mine", {norm: factor * own})
            assert torch.equal(mixer.mixed(norm, {"mine": 1.0}), factor * own)
            found = mixer.evaluate({"mine": 1.0})
            assert torch.equal(dict(mixer.model.named_parameters())[norm], factor * own) or factor == 1.0
            assert (found.completions == before.completions) == (factor == 1.0)
        short, nose = (r"mine has model.norm.weight of shape \[1\]", r"mine has nose\.weight, which .* has not")
        for name, tensor, said in ((norm, own[:1], short), ("nose.weight", own, nose)):
            with pytest.raises(ModelError, match=said):
                mixer.put("mine", {name: tensor})


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decoder", ["auto", "static"])
def test_decoder_answers_with_the_weights_that_were_written(decoder: str, dtype: str, tmp_path: Path) -> None:
    """On a CPU the arithmetic is float32, also where the config serves the model in another dtype."""
    tree = {"output_dir": str(tmp_path), "task": {"name": "conciseness"}, "es": ES, "model": {"dtype": dtype}}
    found: list[list[tuple[str, ...]]] = []
    for name in ("library", decoder):
        config = from_dict(tree | {"engine": {"name": "transformers", "decoder": name}})
        with ModelMixer([BASE], config, ASKED) as mixer:
            drawn = [mixer.evaluate({BASE: 1.0}, noisy) for noisy in (None, Perturbation(0.3, 1))]
        found.append([tuple(one.text for one in each.completions) for each in drawn])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
