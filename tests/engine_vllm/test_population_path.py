# SPDX-License-Identifier: Apache-2.0
"""The population path in vLLM, in float32: every form generates the same tokens as vLLM's LoRA kernels.

On a GPU decode steps replay CUDA graphs, and vLLM's kernels round to TF32, so that some completions differ from ours; a
term that is missing or belongs to another member would change nearly all. VLLM_USE_V2_MODEL_RUNNER=0 and 1 choose
between vLLM's two runners.
"""

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.lora_utils import LoraState, get_num_active_loras_for_dispatch
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from evoalign.engines.vllm import deep, population
from evoalign.engines.vllm.population import Rows
from evoalign.errors import ModelError
from evoalign.kernels import population as kernels
from evoalign.models import tiny

if ON_CPU := current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

MEMBERS = 30
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = ([5, 9, 17, 33, 2, 40], [11, 3, 60, 7, 21, 8, 90, 14, 2])


class PopulationWorker(Worker):
    """A worker that serves a population and lets a test write the slots."""

    def load_model(self, *args, **kwargs):
        self.settings = population.Settings(**self.vllm_config.additional_config["population"])
        with population.installed(self.settings):
            super().load_model(*args, **kwargs)
            population.register(self.model_runner)
            self.active = deep.attach(self.model_runner.get_model(), self.model_runner, self.settings)

    def es_active(self):
        return self.active

    def es_write(self, seed, strength, shapes):
        """Write this rank's part of new factors for all members, in place: the same for a seed, whatever the form."""
        is_scaled = self.active[0] != "stock"  # the kernels multiply by `scaling`
        fold, rank = strength * (1.0 if is_scaled else self.settings.scaling), self.settings.rank
        slots = population.stacked(self.model_runner.get_model())
        for index, name in enumerate(sorted(slots)):
            slot, (out, inner) = slots[name], shapes[name]
            source = torch.Generator().manual_seed(1000 * seed + index)
            a = torch.randn(MEMBERS, rank, inner, generator=source) * inner**-0.5
            b = torch.randn(MEMBERS, out, rank, generator=source) * fold
            slot.a[:, 0, :rank].copy_(a[:, :, slot.columns])
            slot.b[:, 0, :, :rank].copy_(b[:, slot.rows])
        return sorted(slots)


@dataclass
class Served:
    """An engine and the form that serves in it."""

    llm: LLM
    active: tuple[str, str]
    shapes: dict[str, tuple[int, int]]

    def write(self, seed):
        """Give every member new factors; return the names of their matrices."""
        return self.llm.collective_rpc("es_write", args=(seed, 0.3, self.shapes))[0]

    def answers(self, asks, length=8):
        """Return greedy tokens of each (member or -1, prompt) in one batch. Lengths differ, so that rows move up."""
        members = [None if m < 0 else LoRARequest(f"member{m}", m + 1, "resident") for m, _ in asks]
        sampling = [
            SamplingParams(temperature=0, max_tokens=length + m % 3, ignore_eos=True, detokenize=False) for m, _ in asks
        ]
        prompts = [{"prompt_token_ids": PROMPTS[p]} for _, p in asks]
        outputs = self.llm.generate(prompts, sampling, lora_request=members, use_tqdm=False)
        return {ask: list(o.outputs[0].token_ids) for ask, o in zip(asks, outputs, strict=True)}


PLACE = {"enforce_eager": True} if ON_CPU else {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 8, 64]},
    "attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.3,
}  # fmt: skip


def shapes_of(model):
    with safe_open(model / "model.safetensors", "pt") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118


@contextmanager
def serve(model, form, rank=1, slot_rank=1, targets=ALL, **more):
    """Start an engine with one slot per member. One at a time: they share vLLM's process groups."""
    asked = {"form": form, "rank": rank, "scaling": 0.5, "fixed": False}
    llm = LLM(
        str(model), worker_cls=f"{__name__}.{PopulationWorker.__name__}", dtype="float32",
        skip_tokenizer_init=True, enable_lora=True, max_loras=MEMBERS, max_cpu_loras=MEMBERS, max_lora_rank=slot_rank,
        lora_target_modules=targets and list(targets), kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False,
        max_num_seqs=64, max_model_len=64, max_num_batched_tokens=256, additional_config={"population": asked},
        **PLACE, **more,
    )  # fmt: skip
    try:
        yield Served(llm, llm.collective_rpc("es_active")[0], shapes_of(model))
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def random_model(folder, family, **more):
    """Save a random model of head dimension 32, without a tokenizer."""
    import transformers

    torch.manual_seed(3)
    common = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
        **more,
    }  # fmt: skip
    if family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    else:
        scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, rope_parameters=scaled))
    model.to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tiny": tiny(),
        "qwen3": random_model(folder / "qwen3", "qwen3"),
        "llama": random_model(folder / "llama", "llama"),
    }


def asked():
    """Return every member and the base model with each prompt."""
    return [(m, p) for p in range(len(PROMPTS)) for m in (*range(MEMBERS // 2), -1, *range(MEMBERS // 2, MEMBERS))]


def everything(served):
    """Return two generations of members by member and prompt, and the base model alone before, between and after."""
    base = [(-1, p) for p in range(len(PROMPTS))]
    found = [served.answers(base)]
    for seed in (1, 2):
        served.write(seed)
        found += [served.answers(asked()), served.answers(base)]
    return found


def agree(found, wanted):
    """Return whether completions are the same; on a GPU three in four."""
    same = sum(found[ask] == wanted[ask] for ask in wanted)
    return found.keys() == wanted.keys() and same >= len(wanted) * (1 if ON_CPU else 0.75)


def without_base(answers):
    """Drop rows of the base model, which vLLM before 0.33 on a CPU gives the last slot's adapter in mixed batches."""
    return {ask: tokens for ask, tokens in answers.items() if ask[0] >= 0}


def check_no_kernel_runs_for_the_base_model(served, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a kernel of the population ran for the base model")

    with monkeypatch.context() as broken:
        for kernel in ("add", "norm", "rotate", "gate"):
            broken.setattr(kernels, kernel, fail)
        assert served.answers([(-1, 0), (-1, 1)])
        with pytest.raises(AssertionError, match="a kernel of the population"):
            served.answers([(-1, 0), (3, 1)])


SLIM, WIDE = (1, 1), (3, 8)
"""Rank and slot rank: without padding, and with."""


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param("qwen3", WIDE, marks=pytest.mark.releases),
        # qwen3 has every part that a family may add; test_vllm_contract.py has rank 1 in the deep form.
        pytest.param("tiny", SLIM, marks=pytest.mark.long),
        pytest.param("llama", WIDE, marks=pytest.mark.long),
        pytest.param("tiny", WIDE, marks=pytest.mark.long),
        pytest.param("qwen3", SLIM, marks=pytest.mark.long),
        pytest.param("llama", SLIM, marks=pytest.mark.long),
    ],
)
def test_every_form_generates_the_same_tokens_as_vllm(models, family, ranks, monkeypatch):
    """Also for the base model; in a batch without members no population kernel runs."""
    with serve(models[family], "stock", *ranks) as served:
        base, first, _, second, _ = everything(served)
    assert len({tuple(t[:8]) for t in first.values()}) > MEMBERS, "members hardly differ, so the test is void"
    assert sum(first[ask] == second[ask] for ask in first) < MEMBERS
    for form in ("generic", "deep"):
        with serve(models[family], form, *ranks) as served:
            assert served.active == (form, "")
            found = everything(served)
            check_no_kernel_runs_for_the_base_model(served, monkeypatch)
        assert agree(without_base(found[1]), without_base(first)), form
        assert agree(without_base(found[3]), without_base(second)), form
        assert found[0] == found[2] == found[4] == base, form
        for mixed in (found[1], found[3]):
            assert agree({ask: mixed[ask] for ask in base}, base), form


@pytest.mark.parametrize(
    ("targets", "more", "why"),
    [
        pytest.param(  # test_vllm_engine.py has such an engine
            ("q_proj", "v_proj"), {}, "layer 0: self_attn.o_proj has no members: the target modules leave it out",
            marks=pytest.mark.long,
        ),
        (ALL, {"attention_bias": True}, "layer 0: self_attn.o_proj has a bias"),
    ],
)  # fmt: skip
def test_other_model_shapes_get_the_generic_form(tmp_path, targets, more, why):
    model = random_model(tmp_path / "model", "llama", **more)
    found = []
    for form in ("stock", "deep"):
        with serve(model, form, targets=targets) as served:
            assert served.active == (("stock", "") if form == "stock" else ("generic", why))
            names = served.write(1)
            found.append(without_base(served.answers(asked())))
    assert agree(found[1], found[0])
    assert {n.split(".")[-2] for n in names} >= set(targets)


@pytest.mark.releases
def test_attach_refuses_lora_on_an_embedding(models):
    with (
        pytest.raises(ModelError, match=r"put LoRA on model\.embed_tokens"),
        serve(models["llama"], "deep", targets=None),
    ):
        pass


@pytest.mark.long  # test_tensor_parallel.py compares the deep form on two workers with transformers
@pytest.mark.skipif(not ON_CPU and torch.cuda.device_count() < 2, reason="one GPU")
def test_two_ranks_hold_their_parts_of_the_members(tmp_path):
    """Two ranks that share the one key-value head; o_proj and down_proj are sums over both."""
    model = random_model(tmp_path / "model", "llama", num_key_value_heads=1)
    found = []
    for ranks, form in ((1, "generic"), (2, "deep")):
        with serve(model, form, 3, 8, tensor_parallel_size=ranks) as served:
            assert tuple(served.active) == (form, "")
            served.write(1)
            found.append(served.answers(asked()))
    assert agree(found[1], found[0])


@pytest.mark.releases
def test_second_runner_selects_rows_and_graphs_consistently():
    """For requests of members and of the base model; vLLM's function returns the graph that is replayed."""
    state, rows = LoraState(max_num_reqs=4), Rows(16, 3, torch.device("cpu"))
    runner = LoRAModelRunnerMixin()
    runner.lora_state = state
    population.replace_step(runner, rows)
    for index, member in enumerate((None, 2, None, 0)):
        lora = None if member is None else LoRARequest(f"m{member}", member + 1, "resident")
        state.add_request(f"r{index}", index, lora)
    config = SimpleNamespace(max_loras=3)
    for requests, members in (([3, 0, 1], [0, 0, -1, 2]), ([2, 0], [-1, -1, -1]), ([1], [2, 2])):
        names, counts = [f"r{i}" for i in requests], np.array([2, 1, 1][: len(requests)])
        active = get_num_active_loras_for_dispatch(config, state, names, dummy_run=False)
        runner._set_active_loras(*state.make_lora_inputs(names, np.array(requests), counts))
        assert rows.view(len(members)).tolist() == members
        assert rows.any == (active > 0)
