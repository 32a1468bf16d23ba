# SPDX-License-Identifier: Apache-2.0
"""Every member's greedy tokens equal those of a plain transformers model with that member's weights written in.

Weights are rebuilt here from the normals alone, in float64, by the formulas of the documentation: neither the
adapters nor the update of the package take part. A token may differ only where the plain model's two best logits lie
within 1e-4 of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, PROMPTS, VOCABULARY, Bench, build, make_config, next_logits, requests, unfused

from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.spaces.base import Factors
from evoalign.types import MEAN, MEAN_PLAN, Member, Sampling, Update

TIE = 1e-4
TOKENS = 10
SPACES: dict[str, tuple[str, dict[str, Any]]] = {
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


class Rebuilt:
    """A plain model with the weights of any member, from the base weights, the normals and one update."""

    def __init__(self, bench: Bench, path: str | Path, update: Update, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.bench, self.update, self.config, self.device = bench, update, bench.config, device
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval().to(device)
        self.parameters = unfused(self.model)
        self.base = {n: p.detach().double().clone() for n, p in self.parameters.items()}
        self.scales = self._scales()
        self.moves: dict[str, torch.Tensor] = {}

    def become(self, member: Member, generation: int) -> Any:
        """Set the weights of a member."""
        with torch.no_grad():
            for name, weight in self._weights(member, generation):
                self.parameters[name].copy_(weight)
        return self.model

    def _weights(self, member: Member, generation: int) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self.bench.layout.tensors:
            if self.config.space.name == "lora":
                if tensor.name.endswith("lora_B.weight"):
                    a, b = (self._moved(tensor.module, f, member, generation) for f in "AB")
                    lora = self.config.lora
                    yield tensor.module, self.base[tensor.module] + lora.alpha / lora.rank * b @ a
            else:
                yield tensor.name, self.base[tensor.name] + self._change(tensor.name, member, generation)

    def _moved(self, module: str, factor: str, member: Member, generation: int) -> torch.Tensor:
        """Return a LoRA factor: its start, the update and the member's noise."""
        name = f"{module.removesuffix('.weight')}.lora_{factor}.weight"
        start = self.bench.space.start(self.bench.layout, name, "cpu").to(self.device).double()
        evolves = factor == "B" or self.config.lora.evolve == "ab"
        return start + self._change(name, member, generation) if evolves else start

    def _change(self, name: str, member: Member, generation: int) -> torch.Tensor:
        """Return the update's move and the member's noise, by the step convention."""
        if name not in self.moves:
            pairs = zip(self.update.members, self.update.coefficients, strict=True)
            total = sum(c * m.sign * self._noise(name, self.update.generation, m) for m, c in pairs)
            self.moves[name] = self.scales(name) * self.update.step * total / len(self.update.members)
        if member.is_mean:
            return self.moves[name]
        width = self.scales(name) * self.config.es.width
        return self.moves[name] + width * member.sign * self._noise(name, generation, member)

    def _noise(self, name: str, generation: int, member: Member) -> torch.Tensor:
        """Return one member's dense noise with unit variance."""
        normals = self.bench.space.noise(self.bench.layout, name, generation, [member.noise])
        if isinstance(normals, Factors):
            a, b = (factor[0].to(self.device).double() for factor in (normals.a, normals.b))
            return b @ a / math.sqrt(self.config.lowrank.rank)
        return normals[0].to(self.device).double()

    def _scales(self) -> Any:
        if self.config.es.noise_multiplier is None:
            return lambda name: 1.0
        of_layer: dict[str, list[float]] = {}
        for tensor in self.bench.layout.tensors:
            of_layer.setdefault(_layer(tensor.module), []).append(float(self.base[tensor.module].abs().mean()))
        return lambda name: sum(of_layer[_layer(name)]) / len(of_layer[_layer(name)])


def _layer(name: str) -> str:
    return next(part for part in name.split(".") if part.isdigit())


def check(model: Any, prompt: Sequence[int], got: Sequence[int], stop_ids: Sequence[int]) -> None:
    """Assert that each token is the likeliest in a plain forward, up to ties, and that a stop token is last."""
    logits = next_logits(model, prompt, got)
    chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() <= TIE
    assert not set(got[:-1]) & set(stop_ids)
    assert got[-1] in stop_ids or len(got) == TOKENS


def same_or_tied(model: Any, prompt: tuple[int, ...], got: Sequence[int], stop_ids: Sequence[int]) -> bool:
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


def run(
    config: Config,
    path: str | Path,
    prompts: Sequence[tuple[int, ...]],
    *,
    generate: bool = False,
    stop_ids: Sequence[int] | None = None,
) -> None:
    if config.engine.decoder == "auto":  # which may be the static one, that other tests ask for by name
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"decoder": "library"})})
    with Bench(config, stop_ids) as bench:
        rebuilt = Rebuilt(bench, path, bench.move())
        plan = bench.plan()
        cells = bench.ask(plan, requests(prompts, Sampling(TOKENS)))
        stop = bench.tokens.stop_ids
        equal: list[bool] = []
        for member in plan.members:
            model = rebuilt.become(member, plan.generation)
            for p, prompt in enumerate(prompts):
                got = cells[member.index, p].token_ids
                check(model, prompt, got, stop)
                if generate and member.index % len(prompts) == p:
                    equal.append(same_or_tied(model, prompt, got, stop))
        texts = {tuple(cells[m.index, p].token_ids for p in range(len(prompts))) for m in plan.members}
        told_apart = min(10, len(plan.members) - 1)
        assert len(texts) >= told_apart, "the noise is too small for this test to tell members apart"
        assert sum(equal) >= 0.9 * len(equal), "ties are rare"
        mean = bench.ask(MEAN_PLAN, requests(prompts, Sampling(TOKENS)))
        model = rebuilt.become(MEAN, 0)
        for p, prompt in enumerate(prompts):
            check(model, prompt, mean[-1, p].token_ids, stop)


def tiny_prompts(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return questions with the chat template (a shared prefix) and a raw line (none) of other lengths."""
    from evoalign import tokens

    loaded = tokens.load(config.model)
    chats = [[{"role": "user", "content": text}] for text in ("What is 3 + 4?", "Capital city of Italy:")]
    return tuple(map(loaded.encode, chats))


@pytest.mark.slow
@pytest.mark.last("[lora b]", "[lora ab]", "noise_multiplier", "[lowrank]", "[full]", "full, antithetic")
@pytest.mark.parametrize("name", SPACES)
def test_members_of_tiny_equal_plain_models(name: str) -> None:
    from evoalign.models import tiny

    space, sections = SPACES[name]
    config = make_config("tiny", space, **sections)
    run(config, tiny(), tiny_prompts(config), generate=True)


@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("decoder", ["library", "static"])
@pytest.mark.parametrize(("space", "sigma"), [("lora", 0.01), ("lowrank", 0.01), ("full", 0.003)])
def test_members_of_smollm2_equal_plain_models(space: str, sigma: float, decoder: str, smollm2: Path) -> None:
    es = {"sigma": sigma, "learning_rate": sigma / 2, "population_size": 4}
    config = make_config(smollm2, space, model={"dtype": "float32"}, es=es, engine={"decoder": decoder})
    run(config, smollm2, tiny_prompts(config), generate=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {family: build(family, place / family) for family in FAMILIES}


@pytest.mark.first(
    "llama-apart-False", "opt-apart-False", "qwen2-shared-True", "gemma2-shared-False", "mistral-apart-True",
    "gpt_neox-shared-False", "mpt-shared-True", others="long",
)  # fmt: skip
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_members_of_every_family_equal_plain_models(
    family: str, prompts: str, deterministic: bool, folders: dict[str, Path]
) -> None:
    """All linear projections, in a batch with padding that rows leave, with and without a shared prefix."""
    config = make_config(folders[family], deterministic=deterministic)
    run(config, folders[family], PROMPTS[prompts], stop_ids=range(0, VOCABULARY, 12))


@pytest.mark.first("llama-lora b, rank 4, antithetic-apart", "qwen2-lowrank", "qwen3-lora ab-shared", others="long")
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("name", ["lora b, rank 4, antithetic", "lora ab", "lowrank, rank 4, antithetic", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_members_of_the_static_decoder_equal_plain_models(
    family: str, name: str, prompts: str, folders: dict[str, Path]
) -> None:
    space, sections = SPACES[name]
    config = make_config(folders[family], space, engine={"decoder": "static"}, **sections)
    run(config, folders[family], PROMPTS[prompts], stop_ids=range(0, VOCABULARY, 12))


@pytest.mark.first("llama-lora")
@pytest.mark.parametrize("name", ["lora b, rank 4, antithetic", "lora ab", "lowrank, rank 4, antithetic", "full"])
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_every_space_works_on_other_families(family: str, name: str, folders: dict[str, Path]) -> None:
    space, sections = SPACES[name]
    run(make_config(folders[family], space, **sections), folders[family], PROMPTS["shared"])


def test_all_linear_projections_of_the_layers_are_targets(folders: dict[str, Path]) -> None:
    found = {}
    for family in ("qwen2", "gpt_neox", "opt"):
        with Bench(make_config(folders[family])) as bench:
            found[family] = {t.module.removesuffix(".weight").rsplit(".", 1)[-1] for t in bench.layout.tensors}
            assert len(bench.layout.tensors) == 2 * len(found[family])
    assert found["qwen2"] == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert found["gpt_neox"] == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert found["opt"] == {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}


def test_only_selected_layers_and_modules_evolve(folders: dict[str, Path]) -> None:
    section = {"target_layers": [1], "target_modules": ["query_key_value"]}
    config = make_config(folders["gpt_neox"], lora=section, es={"sigma": 0.3, "learning_rate": 0.1})
    with Bench(config) as bench:
        assert [t.module for t in bench.layout.tensors] == ["gpt_neox.layers.1.attention.query_key_value.weight"]
    run(config, folders["gpt_neox"], PROMPTS["apart"])


@pytest.mark.parametrize("space", ["lora", "lowrank"])
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_layers": [0, 7]}, "target_layers: no layer 7; the model has layers 0 to 1"),
        ({"target_modules": ["c_attn"]}, "target_modules: no module 'c_attn'; the model has dense, dense_4h_to_h, "),
    ],
)
def test_missing_targets_are_named_in_the_error(
    space: str, section: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError) as error:
        Bench(make_config(folders["gpt_neox"], space, **{space: section}))
    assert f"{space}.{message}" in str(error.value)
