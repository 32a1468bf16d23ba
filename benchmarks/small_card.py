# SPDX-License-Identifier: Apache-2.0
"""A run of ES on a packed model within the memory of a smaller card: seconds per generation, and the peak of memory.

    python benchmarks/small_card.py                                               32B shape, W4A16, within 23.5 GiB
    python benchmarks/small_card.py --shape heads --members 4 --prompts 2 --tokens 8      CPU: no limit

    python benchmarks/small_card.py --shape 14b --rank 8 --plan                   its memory by the dry run: no GPU

Writes a model of random packed weights (as files: 19 GB for the 32B shape), and trains it with `evoalign train`, space
`lora`, on Countdown with engine vllm and `engine.gpu_memory_gib`. Meanwhile the driver's memory of the whole process is
read every 50 ms. The rewards of a random model mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import vllm_shapes as v


def watch(process: subprocess.Popen[bytes], seen: list[float]) -> None:
    """Note the GPU memory of all processes, in GiB, until `process` ends: no other may use the GPU."""
    import torch

    free = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", visible()]
    while process.poll() is None and torch.cuda.is_available():
        out = subprocess.run(free, capture_output=True, text=True, check=False).stdout.split()
        seen.append(float(out[0]) / 1024 if out else 0.0)
        time.sleep(0.05)


def visible() -> str:
    """Return the GPU that is used, as nvidia-smi names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(v.SHAPES), default="32b")
    parser.add_argument("--gib", type=float, default=23.5)
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--generations", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help="completions at once, at most")
    parser.add_argument("--plan", action="store_true", help="only say what fits, for a model that is not written")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "evoalign_models")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the run")
    parser.add_argument("--json", dest="file", default="runs/small_card.jsonl")
    options = parser.parse_args()
    if options.plan:
        options.models.mkdir(exist_ok=True)
        model = v.model_folder(options.shape, options.models, "w4a16")
    elif v.apart(v.random_model, options.shape, options.models, "w4a16", limit=600):  # its context takes memory
        model = str(options.models / f"random-{options.shape}-w4a16")
    else:
        raise SystemExit("no model was made: see above")
    with tempfile.TemporaryDirectory(prefix="evoalign_") as folder:
        run, began, seen = Path(folder) / "run", time.perf_counter(), list[float]()
        length = {"max_tokens": options.tokens}
        on_gpu = {"gpu_memory_gib": options.gib} | ({"load_format": "dummy"} if options.plan else {})
        card = on_gpu if options.plan or v.has_gpu() else {"kv_cache_gib": 0.25}
        tree = {
            "model": {"name": model, "dtype": "bfloat16"}, "output_dir": str(run),
            "space": "lora", "lora": {"rank": options.rank},
            "es": {"sigma": 0.001, "population_size": options.members, "num_generations": options.generations},
            "task": {"name": "countdown", "batch_size": options.prompts, "test_size": options.members},
            "sampling": length, "evaluation": length, "checks": {"placebo": 0},
            "engine": {
                "name": "vllm", "max_model_len": options.context, "max_num_seqs": options.rows,
                "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.93, **card,
            },
        }  # fmt: skip
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
        given = (part for one in options.set for part in ("--set", one))
        command = [sys.executable, "-m", "evoalign.cli", "train", str(config), *given]
        if options.plan:
            raise SystemExit(subprocess.run([*command, "--dry-run"], check=False).returncode)
        with subprocess.Popen(command) as process:
            watching = threading.Thread(target=watch, args=(process, seen))
            watching.start()
            process.wait()
            watching.join()
        took = time.perf_counter() - began
        if process.returncode:
            raise SystemExit(f"the run ended with {process.returncode}; the peak was {max(seen, default=0):.2f} GiB")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        facts = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["engine"]
    found = {
        "benchmark": "small_card", "shape": options.shape, "quantised": "w4a16", "gib": options.gib,
        "members": options.members, "prompts": options.prompts, "tokens": options.tokens, "context": options.context,
        "peak_gib": max(seen, default=None), "run_seconds": round(took, 1), "rows": rows, "engine": facts,
        "machine": v.machine(),
    }  # fmt: skip
    Path(options.file).parent.mkdir(parents=True, exist_ok=True)
    v.emit(options.file, **found)
    print(json.dumps({key: value for key, value in found.items() if key not in ("rows", "machine")}))


if __name__ == "__main__":
    main()
