# SPDX-License-Identifier: Apache-2.0
"""The static decoder with CUDA graphs against the library decoder, and whole runs. Skipped without a GPU.

Random models of the three families, all projections evolved; float32 without TF32, and bfloat16. Run alone, without
pytest, in a process that says so:

    python tests/gpu/test_static_graphs.py bits lowrank     # a digest of what members said
"""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, cast

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from families import PROMPTS, VOCABULARY, Bench, build, make_config

import evoalign
from evoalign.config import from_dict
from evoalign.engines.transformers import static
from evoalign.types import MEAN_PLAN, Request, Rollout, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GREEDY, WARM, NUCLEUS = Sampling(40), Sampling(40, temperature=0.8), Sampling(40, temperature=0.8, top_p=0.95)
DATA = Path(__file__).parents[2] / "data" / "tasks" / "countdown" / "countdown.json"
STOPS = range(0, VOCABULARY, 40)
Cells = dict[tuple[int, int], Rollout]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {family: build(family, place / family) for family in ("qwen2", "llama", "qwen3")}


def asked(prompts: str, sampling: Sampling, samples: int = 2) -> list[Request]:
    return [
        Request(samples * i + k, prompt, sampling, 7 * i + k, logprobs=True)
        for i, prompt in enumerate(PROMPTS[prompts])
        for k in range(samples)
    ]


def bench_of(folder: Path, space: str, decoder: str, dtype: str = "float32", **tree: Any) -> Bench:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    engine = {"device": "cuda", "decoder": decoder, **tree.pop("engine", {})}
    members = 10 if space == "full" else 30  # which are decoded one by one
    wide = {"sigma": 0.3} if space in ("norms", "steering") else {}  # else a few numbers change no text
    tree = {"es": {"population_size": members, **wide}, "model": {"dtype": dtype}, **tree}
    return Bench(make_config(folder, space, engine=engine, **tree), STOPS)


def cells(bench: Bench, requests: Sequence[Request]) -> Cells:
    bench.move()
    return bench.ask(bench.plan(), requests) | bench.ask(MEAN_PLAN, requests)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, NUCLEUS], ids=["greedy", "sampled", "nucleus"])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize(
    ("family", "space"),
    [
        ("qwen2", "lora"),
        ("qwen2", "lowrank"),
        ("qwen2", "full"),
        ("llama", "lora"),
        ("qwen3", "lowrank"),
        ("qwen2", "norms"),
        ("qwen3", "norms"),
        ("qwen2", "steering"),
    ],
)
def test_static_decoder_equals_the_library_decoder(
    family: str, space: str, prompts: str, sampling: Sampling, folders: dict[str, Path]
) -> None:
    found: list[Cells] = []
    for decoder in ("library", "static"):
        with bench_of(folders[family], space, decoder, lora={"rank": 4}, lowrank={"rank": 2}) as bench:
            found.append(cells(bench, asked(prompts, sampling)))
            assert bench.facts.library == ("static decoder" if decoder == "static" else "")
    wanted, got = found
    assert len({len(r.token_ids) for r in wanted.values()}) > 3, "rows have to leave at different steps"
    # Of likelihoods that are nearly the same the last bits decide which comes first, and so which is drawn: more often
    # than which of two is the highest.
    odd = [key for key in wanted if wanted[key].token_ids != got[key].token_ids]
    assert len(odd) <= len(wanted) * (0.01 if sampling.temperature == 0 else 0.05)
    for key in wanted:
        alike = sum(takewhile(bool, map(eq, wanted[key].token_ids, got[key].token_ids)))
        logprobs = [cast(tuple[float, ...], of[key].logprobs)[:alike] for of in (got, wanted)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    differs = sum(got[key].token_ids != got[-1, key[1]].token_ids for key in got if key[0] >= 0)
    assert differs > len(got) / 2, "members have to differ from the mean"


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_bfloat16_error_is_at_most_that_of_the_library_decoder(space: str, folders: dict[str, Path]) -> None:
    """Return log-probabilities of the float32 tokens, for texts that agree with them so far."""
    wanted = _forced(folders["qwen2"], space, "library", "float32")
    errors = {}
    for decoder in ("library", "static"):
        got = _forced(folders["qwen2"], space, decoder, "bfloat16")
        errors[decoder] = float(sum((got[k] - wanted[k]).square().sum() for k in wanted)) ** 0.5
    assert errors["static"] <= 1.1 * errors["library"], errors


def _forced(folder: Path, space: str, decoder: str, dtype: str) -> dict[tuple[int, int], torch.Tensor]:
    """Return log-probabilities of the first token after many prompts, where all have read the same."""
    prompts = [PROMPTS["apart"][i % 3][i // 9 :] + PROMPTS["apart"][(i + 1) % 3][: i % 9] for i in range(27)]
    requests = [Request(i, p, Sampling(2), logprobs=True) for i, p in enumerate(prompts)]
    with bench_of(folder, space, decoder, dtype) as bench:
        bench.move()
        found = bench.ask(bench.plan(), requests)
    return {k: torch.tensor(r.logprobs[:1]) for k, r in found.items() if r.logprobs}


@pytest.mark.parametrize("space", ["lora", "lowrank", "norms", "full"])
def test_two_deterministic_processes_give_the_same_bits(space: str) -> None:
    command = [sys.executable, __file__, "bits", space]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert len(said[0].split()[-1]) == 64 and said[0].split()[-1] == said[1].split()[-1]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_batch_limits_do_not_change_completions(sampling: Sampling, folders: dict[str, Path]) -> None:
    found: list[Cells] = []
    for rows in (None, 7):
        with bench_of(folders["qwen2"], "lowrank", "static", engine={"max_rows": rows}) as bench:
            for between in (Sampling(3), Sampling(90, 0.5), sampling):
                last = bench.ask(bench.plan(), asked("apart", between))
            found.append(last)
    odd = [key for key in found[0] if found[0][key].token_ids != found[1][key].token_ids]
    assert len(odd) <= len(found[0]) * (0.01 if sampling.temperature == 0 else 0.05)


def test_an_early_look_does_not_change_completions(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host finds rows that have ended while the GPU computes the next step, or afterwards."""
    found: list[Cells] = []
    for later in (0, 1):
        monkeypatch.setitem(static.LOOKS, "cuda", (4, later))
        with bench_of(folders["qwen2"], "lowrank", "static", engine={"max_rows": 100}) as bench:
            bench.move()
            found.append(bench.ask(bench.plan(), asked("apart", WARM, samples=9)))
    assert len({len(r.token_ids) for r in found[0].values()}) > 3, "rows have to leave at different steps"
    odd = [key for key in found[0] if found[0][key].token_ids != found[1][key].token_ids]
    assert len(odd) <= len(found[0]) * 0.05


def test_an_evaluation_runs_the_graphs_of_training(folders: dict[str, Path]) -> None:
    with bench_of(folders["qwen2"], "lowrank", "static") as bench:
        plan, memories, graphs = bench.plan(), [], []
        for samples, members in ((4, plan), (118, MEAN_PLAN), (4, plan)):  # 360, 354 and 360 rows
            bench.ask(members, asked("apart", Sampling(3), samples=samples))
            memory = cast(Any, bench.engine)._static._memory
            memories.append(memory)
            graphs.append([key for key in memory.graphs if key[1].temperature == 0])
    assert memories[0] is memories[1] is memories[2] and graphs[0] == graphs[1] == graphs[2] and graphs[0]


def test_memory_is_constant_over_many_generations(folders: dict[str, Path]) -> None:
    with bench_of(folders["qwen2"], "lowrank", "static") as bench:
        held = []
        gc.collect()  # what other tests left would be freed on the way
        for generation in range(200):
            bench.ask(bench.plan(generation), asked("shared", WARM))
            if generation % 10 == 9:
                bench.ask(MEAN_PLAN, asked("apart", GREEDY, samples=9))
                held.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    allocated, free = zip(*held[2:], strict=True)
    assert max(allocated) - min(allocated) < 2**20 and max(free) - min(free) < 2**25


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_a_run_uses_the_static_decoder_by_default(space: str, tmp_path: Path) -> None:
    es = {"sigma": 0.01, "learning_rate": 0.005, "population_size": 8, "num_generations": 4}
    task = {"name": "countdown", "train_data": str(DATA), "split": "first_last", "train_size": 8, "test_size": 8}
    tree = {"output_dir": str(tmp_path / "run"), "space": space, "es": es, "engine": {"device": "cuda"}, "task": task}
    result = evoalign.train(from_dict({**tree, "evaluation": {"max_tokens": 32}}))
    assert result is not None
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert "static decoder" in journal.splitlines()[0] and len(journal.splitlines()) >= 5


def test_a_run_names_why_the_library_decodes(tmp_path: Path) -> None:
    with bench_of(build("gemma2", tmp_path / "gemma2"), "lowrank", "auto") as bench:
        assert bench.facts.library == "" and "Gemma2ForCausalLM is not of" in bench.facts.note


def test_out_of_memory_is_one_error_with_the_settings_to_change(folders: dict[str, Path]) -> None:
    with bench_of(folders["qwen2"], "lowrank", "static", engine={"memory_gib": 64}) as bench:
        few = asked("apart", GREEDY)
        wanted = bench.ask(bench.plan(), few)
        hog = torch.empty(torch.cuda.mem_get_info()[0] - 2**29, dtype=torch.uint8, device="cuda")
        many = [Request(i, PROMPTS["apart"][i % 3], Sampling(200), i) for i in range(700)]
        with pytest.raises(torch.OutOfMemoryError):
            bench.ask(bench.plan(), many)
        del hog
        assert bench.ask(bench.plan(), few) == wanted, "and goes on"


if __name__ == "__main__" and sys.argv[1:2] == ["bits"]:
    import tempfile

    with tempfile.TemporaryDirectory() as place_:
        folder_ = build("qwen2", Path(place_) / "m")
        with bench_of(folder_, sys.argv[2], "static", deterministic=True) as bench_:
            said_ = cells(bench_, asked("apart", GREEDY))
            warm_ = bench_.ask(bench_.plan(), asked("shared", WARM))
    said_ |= {(m + 1000, i): r for (m, i), r in warm_.items()}
    text = repr([(k, r.token_ids, r.logprobs) for k, r in sorted(said_.items())])
    print(hashlib.sha256(text.encode()).hexdigest())
