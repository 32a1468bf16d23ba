# SPDX-License-Identifier: Apache-2.0
"""Every member's greedy tokens equal those of a plain transformers model with that member's weights written in.

Weights are rebuilt here from the normals alone, in float64, by the formulas of the documentation: neither the
adapters nor the update of the package take part. A token may differ only where the plain model's two best logits lie
within 1e-4 of each other.
"""

import math
import shutil
from collections import Counter

import pytest
import torch
from families import FAMILIES, PROMPTS, VOCABULARY, Bench, make_config, next_logits, requests, unfused
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from evoalign import tokens
from evoalign.errors import ConfigError
from evoalign.models import tiny
from evoalign.models.origin import model_path
from evoalign.spaces.base import Factors
from evoalign.types import MEAN, MEAN_PLAN, Sampling

TIE = 1e-4
TOKENS = 10
SPACES = {
    "lora b": ("lora", {"lora": {"rank": 1, "alpha": 2}}),
    "lora b, rank 4, antithetic": ("lora", {"lora": {"rank": 4, "alpha": 2}, "es": {"antithetic": True}}),
    "lora ab": ("lora", {"lora": {"evolve": "ab"}, "es": {"sigma": 0.3, "learning_rate": 0.3}}),
    "lora ab, rank 4": ("lora", {"lora": {"evolve": "ab", "rank": 4}, "es": {"sigma": 0.2, "learning_rate": 0.2}}),
    "lora b, noise_multiplier": ("lora", {"es": {"noise_multiplier": 0.5, "learning_rate": 0.5}}),
    "lowrank": ("lowrank", {}),
    "lowrank, rank 4, antithetic": ("lowrank", {"lowrank": {"rank": 4}, "es": {"antithetic": True}}),
    "full": ("full", {"es": {"sigma": 0.02, "learning_rate": 0.01}}),
    "full, antithetic": ("full", {"es": {"sigma": 0.02, "learning_rate": 0.01, "antithetic": True}}),
}
EACH = ["lora b, rank 4, antithetic", "lora ab", "lowrank, rank 4, antithetic", "full"]
STOPS = range(0, VOCABULARY, 12)


class Rebuilt:
    """A plain model with the weights of any member, from the base weights, the normals and one update."""

    def __init__(self, bench, update, device="cpu"):
        path = model_path(bench.config.model)
        self.bench, self.update, self.config, self.device = bench, update, bench.config, device
        self.model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval().to(device)
        self.parameters = unfused(self.model)
        self.base = {n: p.detach().double().clone() for n, p in self.parameters.items()}
        self.scales = self._scales()
        self.moves = {}

    def become(self, member, generation):
        """Set the weights of a member."""
        with torch.no_grad():
            for name, weight in self._weights(member, generation):
                self.parameters[name].copy_(weight)
        return self.model

    def _weights(self, member, generation):
        for tensor in self.bench.layout.tensors:
            if self.config.space.name == "lora":
                if tensor.name.endswith("lora_B.weight"):
                    a, b = (self._moved(tensor.module, f, member, generation) for f in "AB")
                    lora = self.config.lora
                    yield tensor.module, self.base[tensor.module] + lora.alpha / lora.rank * b @ a
            else:
                yield tensor.name, self.base[tensor.name] + self._change(tensor.name, member, generation)

    def _moved(self, module, factor, member, generation):
        """Return a LoRA factor: its start, the update and the member's noise."""
        name = f"{module.removesuffix('.weight')}.lora_{factor}.weight"
        start = self.bench.space.start(self.bench.layout, name, "cpu").to(self.device).double()
        evolves = factor == "B" or self.config.lora.evolve == "ab"
        return start + self._change(name, member, generation) if evolves else start

    def _change(self, name, member, generation):
        """Return the update's move and the member's noise, by the step convention."""
        if name not in self.moves:
            pairs = zip(self.update.members, self.update.coefficients, strict=True)
            total = sum(c * m.sign * self._noise(name, self.update.generation, m) for m, c in pairs)
            self.moves[name] = self.scales(name) * self.update.step * total / len(self.update.members)
        if member.is_mean:
            return self.moves[name]
        width = self.scales(name) * self.config.es.width
        return self.moves[name] + width * member.sign * self._noise(name, generation, member)

    def _noise(self, name, generation, member):
        """Return one member's dense noise with unit variance."""
        normals = self.bench.space.noise(self.bench.layout, name, generation, [member.noise])
        if isinstance(normals, Factors):
            a, b = (factor[0].to(self.device).double() for factor in (normals.a, normals.b))
            return b @ a / math.sqrt(self.config.lowrank.rank)
        return normals[0].to(self.device).double()

    def _scales(self):
        if self.config.es.noise_multiplier is None:
            return lambda name: 1.0
        of_layer = {}
        for tensor in self.bench.layout.tensors:
            of_layer.setdefault(_layer(tensor.module), []).append(float(self.base[tensor.module].abs().mean()))
        return lambda name: sum(of_layer[_layer(name)]) / len(of_layer[_layer(name)])


def _layer(name):
    return next(part for part in name.split(".") if part.isdigit())


def check(model, prompt, got, stop_ids):
    """Assert that each token is the likeliest in a plain forward, up to ties, and that a stop token is last."""
    logits = next_logits(model, prompt, got)
    chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() <= TIE
    assert not set(got[:-1]) & set(stop_ids)
    assert got[-1] in stop_ids or len(got) == TOKENS


def same_or_tied(model, prompt, got, stop_ids):
    """Return whether the tokens are those of plain `generate`; a difference must begin at a tie."""
    whole = torch.tensor([prompt])
    out = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=TOKENS, do_sample=False,
                         eos_token_id=list(stop_ids), pad_token_id=0)  # fmt: skip
    wanted = out[0, len(prompt) :].tolist()
    if wanted == list(got):
        return True
    first = next(i for i, (w, g) in enumerate(zip(wanted, got, strict=False)) if w != g)
    best = next_logits(model, prompt, wanted)[first].topk(2).values
    assert best[0] - best[1] <= TIE, (prompt, wanted, got)
    return False


def plain_logprobs(model, prompt, token_ids):
    """Return the log-probability of each token in a plain forward."""
    logits = next_logits(model, prompt, token_ids).log_softmax(-1)
    return logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def run(config, prompts, *, generate=False, stop_ids=None):
    if config.engine.decoder == "auto":  # which may be the static one, that other tests ask for by name
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"decoder": "library"})})
    with Bench(config, stop_ids) as bench:
        rebuilt, plan, stop = Rebuilt(bench, bench.move()), bench.plan(), bench.tokens.stop_ids
        cells, equal = bench.ask(plan, requests(prompts, Sampling(TOKENS))), []
        for member in plan.members:
            model = rebuilt.become(member, plan.generation)
            for p, prompt in enumerate(prompts):
                got = cells[member.index, p].token_ids
                check(model, prompt, got, stop)
                if generate and member.index % len(prompts) == p:
                    equal.append(same_or_tied(model, prompt, got, stop))
        texts = {tuple(cells[m.index, p].token_ids for p in range(len(prompts))) for m in plan.members}
        assert len(texts) >= min(10, len(plan.members) - 1), "the noise is too small to distinguish members"
        assert sum(equal) >= 0.9 * len(equal), "ties are rare"
        mean = bench.ask(MEAN_PLAN, requests(prompts, Sampling(TOKENS)))
        model = rebuilt.become(MEAN, 0)
        for p, prompt in enumerate(prompts):
            check(model, prompt, mean[-1, p].token_ids, stop)


def run_chats(config):
    """Run with questions in the chat template, which have a shared prefix."""
    chats = [[{"role": "user", "content": text}] for text in ("What is 3 + 4?", "Capital city of Italy:")]
    run(config, tuple(map(tokens.load(config.model).encode, chats)), generate=True)


def run_space(folder, name, prompts="shared", *, stops=STOPS, **tree):
    space, sections = SPACES[name]
    run(make_config(folder, space, **tree, **sections), PROMPTS[prompts], stop_ids=stops)


@pytest.mark.slow
@pytest.mark.last("[lora b]", "[lora ab]", "noise_multiplier", "[lowrank]", "[full]", "full, antithetic")
@pytest.mark.parametrize("name", SPACES)
def test_members_of_tiny_equal_plain_models(name):
    space, sections = SPACES[name]
    run_chats(make_config("tiny", space, **sections))


@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("decoder", ["library", "static"])
@pytest.mark.parametrize(("space", "sigma"), [("lora", 0.01), ("lowrank", 0.01), ("full", 0.003)])
def test_members_of_smollm2_equal_plain_models(space, sigma, decoder, smollm2):
    es = {"sigma": sigma, "learning_rate": sigma / 2, "population_size": 4}
    run_chats(make_config(smollm2, space, model={"dtype": "float32"}, es=es, engine={"decoder": decoder}))


@pytest.mark.first(
    "llama-apart-False", "opt-apart-False", "qwen2-shared-True", "gemma2-shared-False", "mistral-apart-True",
    "gpt_neox-shared-False", "mpt-shared-True",
)  # fmt: skip
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_members_of_every_family_equal_plain_models(family, prompts, deterministic, folders):
    """All linear projections, in a batch with padding that rows leave, with and without a shared prefix."""
    run(make_config(folders[family], deterministic=deterministic), PROMPTS[prompts], stop_ids=STOPS)


@pytest.mark.first("llama-lora b, rank 4, antithetic-apart", "qwen2-lowrank", "qwen3-lora ab-shared")
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_members_of_the_static_decoder_equal_plain_models(family, name, prompts, folders):
    run_space(folders[family], name, prompts, engine={"decoder": "static"})


@pytest.mark.first("llama-lora", "gpt_neox-full")
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_every_space_works_on_other_families(family, name, folders):
    run_space(folders[family], name, stops=None)


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen2", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("gpt_neox", "query_key_value dense dense_h_to_4h dense_4h_to_h"),
        ("opt", "q_proj k_proj v_proj out_proj fc1 fc2"),
    ],
)
def test_all_linear_projections_of_the_layers_are_targets(family, modules, folders):
    with Bench(make_config(folders[family])) as bench:
        found = Counter(t.module.removesuffix(".weight").rsplit(".", 1)[-1] for t in bench.layout.tensors)
    assert found == dict.fromkeys(modules.split(), 2)


def test_only_selected_layers_and_modules_evolve(folders):
    section = {"target_layers": [1], "target_modules": ["query_key_value"]}
    config = make_config(folders["gpt_neox"], lora=section, es={"sigma": 0.3, "learning_rate": 0.1})
    with Bench(config) as bench:
        assert [t.module for t in bench.layout.tensors] == ["gpt_neox.layers.1.attention.query_key_value.weight"]
    run(config, PROMPTS["apart"])


@pytest.mark.parametrize("space", ["lora", "lowrank"])
def test_modules_of_gpt2_are_named_as_no_linear_matrices(space, tmp_path):
    sizes = {"vocab_size": 1024, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    ids = {"eos_token_id": 2, "bos_token_id": 2, "pad_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes, **ids)).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / file, tmp_path)
    with pytest.raises(ConfigError, match=r"no module 'c_attn'; .*no nn\.Linear matrix.*use space full"):
        Bench(make_config(tmp_path, space, **{space: {"target_modules": ["c_attn"]}}))


@pytest.mark.parametrize("space", ["lora", "lowrank"])
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_layers": [0, 7]}, "target_layers: no layer 7; the model has layers 0 to 1"),
        ({"target_modules": ["c_attn"]}, "target_modules: no module 'c_attn'; the model has dense, dense_4h_to_h, "),
    ],
)
def test_missing_targets_are_named_in_the_error(space, section, message, folders):
    with pytest.raises(ConfigError) as error:
        Bench(make_config(folders["gpt_neox"], space, **{space: section}))
    assert f"{space}.{message}" in str(error.value)
