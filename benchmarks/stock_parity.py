# SPDX-License-Identifier: Apache-2.0
"""Greedy texts of an exported adapter in stock vLLM on its base, against the engine of the run itself.

    python benchmarks/stock_parity.py RUN --prompts 200 --tokens 128

Exports the mean of a finished run of space `lora` on engine vllm, answers the first prompts of its test split with the
run's engine, and then in a plain `vllm.LLM` with the adapter as vLLM loads it from its files, twice: all prompts in one
batch, and in batches of 8. Counts the prompts with the same tokens. Where tokens differ, `gap` is the difference of the
two best log-probabilities of stock vLLM at the first token that does; the gaps at which the two batch shapes of stock
vLLM differ say how large a gap rounding alone crosses. `base` counts the prompts that the base answers as the adapter
does, which a comparison has to be able to see.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import vllm_shapes as v

PIECE = 8
Answers = list[tuple[list[int], list[float]]]
"""Tokens of each prompt, and the gap of the two best log-probabilities at each of them."""


def ours(options: argparse.Namespace, folder: Path) -> None:
    """Answer with the engine of the run and its saved mean; leave prompts, tokens and the exported adapter."""
    from evoalign import setup
    from evoalign.config import load
    from evoalign.exporting.export import export
    from evoalign.rundir import checkpoint
    from evoalign.rundir.directory import saved_folders
    from evoalign.types import MEAN_PLAN, Request, Sampling

    config = load([options.run / "config.yaml"])
    task, data = setup.task_and_data(config, None, None)
    served = setup.serve(config)
    prompts = [served.tokens.encode(task.prompt(example)) for example in data.test[: options.prompts]]
    requests = [Request(i, prompt, Sampling(options.tokens), 0) for i, prompt in enumerate(prompts)]
    served.engine.load(checkpoint.load(saved_folders(options.run)[-1], served.layout)[0])
    found = {r.request: list(r.token_ids) for r in served.engine.rollout(MEAN_PLAN, requests)}
    export(options.run, folder / "adapter")
    settings = served.engine.llm.llm_engine.vllm_config  # type: ignore[attr-defined]
    kept = {
        "prompts": [list(prompt) for prompt in prompts], "ours": [found[i] for i in range(len(prompts))],
        "stop": list(served.tokens.stop_ids), "model": settings.model_config.model, "rank": served.layout.rank,
        "dtype": str(served.engine.dtype).removeprefix("torch."), "note": served.facts.note,
    }  # fmt: skip
    (folder / "ours.json").write_text(json.dumps(kept), encoding="utf-8")


def stock(options: argparse.Namespace, folder: Path) -> None:
    """Answer in plain vLLM, with the adapter in two batch shapes and without it."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    asked = json.loads((folder / "ours.json").read_text(encoding="utf-8"))
    longest = max(map(len, asked["prompts"])) + options.tokens
    llm = LLM(
        asked["model"], dtype=asked["dtype"], max_model_len=longest, enable_lora=True, max_loras=1,
        max_lora_rank=max(8, asked["rank"]), skip_tokenizer_init=True, generation_config="vllm",
        **({} if v.has_gpu() else {"kv_cache_memory_bytes": 2**28, "enforce_eager": True}),
    )  # fmt: skip
    how = SamplingParams(
        temperature=0, max_tokens=options.tokens, logprobs=2, stop_token_ids=asked["stop"], ignore_eos=True,
        detokenize=False,
    )  # fmt: skip

    def answer(size: int, adapter: bool) -> Answers:
        request = LoRARequest("exported", 1, str(folder / "adapter")) if adapter else None
        found: Answers = []
        for start in range(0, len(asked["prompts"]), size):
            prompts: Any = [{"prompt_token_ids": ids} for ids in asked["prompts"][start : start + size]]
            for output in llm.generate(prompts, how, lora_request=request, use_tqdm=False):
                one = output.outputs[0]
                best = [sorted((c.logprob for c in place.values()), reverse=True)[:2] for place in one.logprobs or ()]
                found.append((list(one.token_ids), [first - second for first, second in best]))
        return found

    kept = {"batch": answer(len(asked["prompts"]), True), "pieces": answer(PIECE, True)}
    kept["base"] = answer(len(asked["prompts"]), False)
    (folder / "stock.json").write_text(json.dumps(kept), encoding="utf-8")


def apart(one: list[list[int]], other: Answers) -> list[float]:
    """Return the gap of `other` at the first token in which two answers differ, of each prompt that has one."""
    found: list[float] = []
    for ids, (others, gaps) in zip(one, other, strict=True):
        if ids != others:
            place = next((i for i, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), None)
            found.append(float("inf") if place is None else gaps[place])
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", dest="file", default="runs/stock_parity.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evoalign_") as name:
        folder = Path(name)
        for part in (ours, stock):
            if not v.apart(part, options, folder, limit=400):
                raise SystemExit(f"{part.__name__} did not end well: see above")
        asked, found = (json.loads((folder / f"{part}.json").read_text(encoding="utf-8")) for part in ("ours", "stock"))
    count, gaps = len(asked["prompts"]), apart(asked["ours"], found["batch"])
    shapes = apart([ids for ids, _ in found["pieces"]], found["batch"])
    crossed = max((gap for gap in shapes if math.isfinite(gap)), default=0.0)
    row = {
        "benchmark": "stock_parity", "machine": v.machine(), "note": asked["note"], "prompts": count,
        "tokens": options.tokens, "same": count - len(gaps), "gaps": gaps, "shapes_same": count - len(shapes),
        "shape_gaps": shapes, "within": sum(gap <= crossed for gap in gaps),
        "base_same": count - len(apart([ids for ids, _ in found["base"]], found["batch"])),
    }  # fmt: skip
    Path(options.file).parent.mkdir(parents=True, exist_ok=True)
    v.emit(options.file, **row)
    print(json.dumps({key: value for key, value in row.items() if key != "machine"}))


if __name__ == "__main__":
    main()
