# SPDX-License-Identifier: Apache-2.0
"""Two random checkpoints of the shape of a large model compared: seconds, and the most private memory on the way.

    python studies/similarity.py                           # 7B: 30 GB of disk; cosines, norms, sparsity
    python studies/similarity.py --spectrum --layers 1 --words 1024   # ranks and overlaps, fewer layers and words
    python studies/similarity.py --shape 3b

Each run is a row of studies/results/similarity.jsonl.
The checkpoints are bfloat16, a file a layer, in `--folder` (default: a temporary one, deleted in the end). The base
model is of zeros, in sparse files that take no disk: it is read and computed with as any other, but not from a disk.
Private memory is Private_Clean + Private_Dirty of /proc/PID/smaps_rollup, every 50 ms, of a separate
process: files that are mapped count as long as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evoalign.rundir.identity import versions

SHAPES = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
}  # fmt: skip
"""Shapes of Qwen2.5-7B and 3B."""
RESULTS = Path(__file__).parent / "results" / "similarity.jsonl"


def shards(
    shape: str, layers: int | None = None, words: int | None = None
) -> tuple[str, dict[str, dict[str, list[int]]]]:
    """config.json, and the shapes of all tensors by file: a layer each, and what is in none."""
    from transformers import AutoConfig

    from evoalign.config import from_dict
    from evoalign.engines.specs import specs_of_config

    settings: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16", **SHAPES[shape]}
    settings |= {} if layers is None else {"num_hidden_layers": layers}
    settings |= {} if words is None else {"vocab_size": words}
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen2", **settings).save_pretrained(folder)
        specs = specs_of_config(from_dict({"model": {"name": folder}}))
        text = (Path(folder) / "config.json").read_text()
    names = {spec.name: "rest" if spec.layer is None else f"{spec.layer:05d}" for spec in specs}
    files: dict[str, dict[str, list[int]]] = {}
    for spec in specs:
        files.setdefault(f"model-{names[spec.name]}.safetensors", {})[spec.name] = list(spec.shape)
    return text, files


def write(folder: Path, config: str, files: dict[str, dict[str, list[int]]], seed: int | None) -> None:
    """A checkpoint of normal numbers of width 0.02; of zeros without a seed."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    generator = torch.Generator().manual_seed(seed or 0)
    for file, tensors in files.items():
        if seed is None:
            write_zeros(folder / file, tensors)
            continue
        made = {n: torch.empty(s, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
                for n, s in tensors.items()}  # fmt: skip
        save_file(made, folder / file, metadata={"format": "pt"})


def write_zeros(file: Path, tensors: dict[str, list[int]]) -> None:
    """A sparse safetensors file: its header, and a hole."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


def work(folder: Path, *, spectrum: bool) -> None:
    """Run the analysis as the command does."""
    from evoalign.analysis.similarity.command import Settings, Similarity

    start = time.perf_counter()
    settings = Settings(base=str(folder / "base"), spectrum=spectrum)
    numbers = Similarity().run([str(folder / "a"), str(folder / "b")], settings).numbers
    cosine = numbers["pairs"][0]["cosines"]["all"]
    parts = {name: one["participation_rank"] for name, one in numbers["targets"][0]["where"].items()}
    noise = {name: one["participation_rank_of_noise"] for name, one in numbers["targets"][0]["where"].items()}
    common = {
        f"{side} {k}": [one[name] for name in ("value", "chance", "spread")]
        for k, both in numbers["pairs"][0]["overlaps"]["all"].items() for side, one in both.items()
    }  # fmt: skip
    row = {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "norm": numbers["targets"][0]["where"]["all"]["norm"],
        **{name: cosine[name] for name in ("value", "spread")},
        **({"participation_rank": parts, "of_noise": noise, "overlap": common} if spectrum else {}),
    }
    print(json.dumps(row))


def private(pid: int) -> int:
    """Bytes that are the process's own."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def measure(folder: Path, *, spectrum: bool) -> dict[str, Any]:
    """Return the result of `work` and its peak private memory."""
    words = [sys.executable, __file__, "--work", str(folder), *(["--spectrum"] if spectrum else [])]
    peak = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, private(process.pid))
            time.sleep(0.05)
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    return {**json.loads(said), "private_gib": round(peak / 2**30, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--words", type=int, help="fewer than the shape has")
    parser.add_argument("--spectrum", action="store_true", help="singular values too")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are kept, and taken from another time")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work, spectrum=asked.spectrum)
        return
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="evoalign-similarity-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config, files = shards(asked.shape, asked.layers, asked.words)
        numbers = sum(math.prod(s) for tensors in files.values() for s in tensors.values())
        for name, seed in (("base", None), ("a", 1), ("b", 2)):
            if not (folder / name).is_dir():
                free = shutil.disk_usage(folder).free
                if seed is not None and free < 2 * numbers + 10**10:
                    sys.exit(f"{folder} has {free / 1e9:.0f} GB free; give --shape 3b, --layers or another --folder")
                write(folder / name, config, files, seed)
        row = {
            "shape": asked.shape,
            "layers": asked.layers or SHAPES[asked.shape]["num_hidden_layers"],
            "words": asked.words or SHAPES[asked.shape]["vocab_size"],
            "numbers": numbers,
            "ranks": asked.spectrum,
            "load": os.getloadavg()[0],
            **measure(folder, spectrum=asked.spectrum),
            "versions": versions(),
        }
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row, indent=2))
    finally:
        if asked.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
