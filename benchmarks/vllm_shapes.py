# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks of the vLLM engine: model shapes, an engine of one, its clock, and results on disk.

Models are folders with a configuration and the tokenizer of the shipped tiny model; their weights are random, those of
`tiny` itself excepted. vLLM's dummy weights lie within +-1e-3, where nearly every product vanishes, so they are drawn
anew in place: standard deviation 0.02, norms 1.

Each engine runs in a separate process, so that memory which vLLM does not give back, or a crash, stays with it.
Results are JSON lines, appended as they come: what was measured before a failure is kept, and several calls may share
a file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that a look for a GPU leaves the process fit to fork
    # No NVLink multicast: not every host that lends single GPUs stands it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}.items():
    os.environ.setdefault(_name, _value)

QWEN = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-32B, 7B, 1.5B and 0.5B, Qwen3-14B and 8B; Qwen3-30B-A3B, a mixture; one as wide as SmolLM2-135M; the
    # shipped tiny model; a small one with four key-value heads, to split over GPUs.
    "32b": QWEN | {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "14b": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 5120,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 17408,
        "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "8b": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
        "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "30b-a3b": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "7b": QWEN | {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "1.5b": QWEN | {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "0.5b": QWEN | {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "135m": QWEN | {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "tiny": {},
    "heads": {
        "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 1024, "vocab_size": 1024, "tie_word_embeddings": False,
    },
}  # fmt: skip
GROUP = 128
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
QUANTISED: dict[str, dict[str, Any]] = {
    "w4a16": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
        }}}, "ignore": ["lm_head"],
    },
    "mxfp4": {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
        }}}, "ignore": ["lm_head"],
    },
}  # fmt: skip
"""`quantization_config` of each form, as config.json has it."""
PACKED = ("weight_packed", "qweight", "qzeros", "weight")
"""Ends of the names of packed weights, whose bits are drawn."""
STD = 0.02
VOCABULARY = (16, 1000)
"""Prompts are random ids in here: the shipped tokenizer's, which all shapes have."""
BATCHED = 16384
"""Tokens of one step at most, vLLM's default on such a GPU: said, so that it is the same for all engines."""
BEGAN = time.perf_counter()


def has_gpu() -> bool:
    """Whether the installed vLLM is the one for GPUs, asked without waking any."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def say(text: str) -> None:
    """A line with the seconds since the script began: time.perf_counter is one clock for all processes."""
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


# Models


def shape_of(name: str) -> dict[str, Any]:
    """The configuration of a shape, as config.json has it."""
    from evoalign.models import tiny

    config = json.loads((Path(tiny()) / "config.json").read_text(encoding="utf-8")) | SHAPES[name]
    return config | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}


def model_folder(name: str, parent: Path, quantised: str | None = None) -> str:
    """A folder with a shape's configuration and a tokenizer, without weights; `tiny` is the shipped model itself."""
    from evoalign.models import tiny

    if name == "tiny" and quantised is None:
        return str(tiny())
    folder = parent / name
    folder.mkdir(exist_ok=True)
    config = shape_of(name) | ({"quantization_config": QUANTISED[quantised]} if quantised else {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(tiny()) / file, folder / file)
    return str(folder)


def random_model(shape: str, parent: Path, quantised: str | None = None) -> str:
    """Make a folder with weights of a usual size, in bfloat16; with `w4a16` those of linear layers packed."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = parent / "-".join(filter(None, ("random", shape, quantised)))
    if (folder / "done").exists():
        return str(folder)
    parent.mkdir(exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted script left
    model_folder(shape, parent, quantised)
    (parent / shape).rename(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
        part.clear()

    for name, size in (kept for given, p in model.named_parameters() for kept in in_files(given, p.shape)):
        if quantised and name.endswith("_proj.weight"):
            rows, columns = size
            packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device).random_(generator=generator)
            part[f"{name}_packed"] = packed.view(torch.int32).cpu()
            part[f"{name}_scale"] = torch.full((rows, columns // GROUP), STD / 4, dtype=torch.bfloat16)
            part[f"{name}_shape"] = torch.tensor([rows, columns])
        else:
            drawn = torch.empty(size, dtype=torch.bfloat16, device=device)
            part[name] = (drawn.fill_(1) if "norm" in name else drawn.normal_(0, STD, generator=generator)).cpu()
        if sum(t.nbytes for t in part.values()) > 2 * 10**9:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "done").touch()
    return str(folder)


def in_files(name: str, size: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
    """Return the names and shapes of a parameter in a checkpoint. There, experts are separate matrices."""
    where, _, last = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
    if parts is None:
        return [(name, size)]
    experts, rows, columns = size
    each = (rows // len(parts), columns)
    return [(f"{where}.{expert}.{part}.weight", each) for expert in range(experts) for part in parts]


def cache_gib(name: str, rows: int, length: int, itemsize: int = 2) -> float:
    """Return the KV cache size for this number of rows and tokens, plus a tenth."""
    c = shape_of(name)
    width = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]) * c["num_key_value_heads"]
    blocks = -(-(length + 32) // 32) * 32
    return max(0.25, round(1.1 * 2 * c["num_hidden_layers"] * width * itemsize * rows * blocks / 2**30, 2))


def config_of(folder: str, shape: str, *, rows: int, length: int, members: int, **wanted: Any) -> Any:
    """A config of the vLLM engine for `rows` sequences of `length` tokens. `engine` in `wanted` adds its settings."""
    from evoalign.config import from_dict

    space, rank, sigma = wanted.pop("space", "lowrank"), wanted.pop("rank", 1), wanted.pop("sigma", 1e-3)
    dtype = wanted.pop("dtype", "auto")
    wide = dtype == "float32" or (dtype == "auto" and not has_gpu())
    engine = {
        "name": "vllm",
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(rows, BATCHED if has_gpu() else 2048),
        "max_model_len": max(256, -(-length // 256) * 256),
        "kv_cache_gib": cache_gib(shape, rows, length, 4 if wide else 2),
        "load_format": "safetensors" if shape == "tiny" else "dummy",
    }
    return from_dict(
        {
            "space": space,
            "model": {"name": folder, "dtype": dtype},
            "lora": {"rank": rank},
            "lowrank": {"rank": rank},
            "es": {"sigma": sigma, "population_size": max(2, members)},
            "engine": engine | wanted.pop("engine", {}),
            **wanted,
        }
    )


def only_graphs(sizes: Iterable[int], compiled: bool = False) -> None:
    """Let engines that start from now on capture CUDA graphs of these batch sizes only, which saves their start.

    With `compiled` vLLM's own default of torch.compile and graphs stays, and only the sizes are set.
    """
    from evoalign.engines.vllm import start

    kept = sorted(set(sizes))
    own = {} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    start._graphs = lambda _: own | {"cudagraph_capture_sizes": kept}


# What runs in a worker


def redraw(worker: Any, seed: int) -> None:
    """Random weights of a usual size in place of vLLM's dummy ones."""
    import torch

    generator = torch.Generator(device=worker.device).manual_seed(seed + worker.rank)
    with torch.inference_mode():
        for name, parameter in worker.model_runner.get_model().named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            elif not parameter.dtype.is_floating_point or parameter.element_size() == 1:
                if name.endswith(PACKED):  # and not indices or scales of one byte
                    bits = parameter.view(torch.uint8)
                    bits.random_(0, 256 if parameter.dtype != torch.float8_e4m3fn else 0x50, generator=generator)
            elif "scale" in name:
                parameter.fill_(STD / 4)
            else:
                parameter.normal_(0, STD, generator=generator)


def memory(worker: Any, restart: bool = False) -> dict[str, int]:
    """Bytes: torch's tensors now and at most since the last restart, all that is taken of the device, host RSS."""
    import torch

    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = {"host": 1024 * int(status.split("VmRSS:")[1].split()[0])}
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
        free, total = torch.cuda.mem_get_info(worker.device)
        found["tensors"] = torch.cuda.memory_allocated(worker.device)
        found["peak"] = torch.cuda.max_memory_allocated(worker.device)
        found["device"] = total - free
        if restart:
            torch.cuda.reset_peak_memory_stats(worker.device)
    return found


# An engine and its clock


@dataclass(frozen=True)
class Took:
    """One call: output tokens, seconds of all of it, and of vLLM's steps within it."""

    tokens: int
    seconds: float
    generate: float


@dataclass
class Served:
    """An engine, its weights of a usual size, and a clock around it. With `space=False` the mean alone answers."""

    config: Any
    space: bool = True

    def __post_init__(self) -> None:
        from evoalign import spaces, tokens
        from evoalign.engines.vllm.engine import VllmEngine
        from evoalign.tokens import Tokens

        began = time.perf_counter()
        loaded = tokens.load(self.config.model)
        self.tokens = Tokens(loaded.tokenizer, ())  # no stop token: lengths are what was asked for
        self.engine = VllmEngine(self.config, self.tokens)
        if self.config.engine.load_format == "dummy":
            self.engine.rpc(redraw, self.config.seed)
        self.layout: Any = None
        if self.space:
            space = spaces.create(self.config)
            self.layout = space.layout(self.engine.specs(), self.engine.dtype)
            self.facts = self.engine.start(space, self.layout, None, False)
        self._run, self._took = self.engine._generator.run, 0.0
        self.engine._generator.run = self._timed
        self.synchronize()
        self.start_seconds = time.perf_counter() - began

    def _timed(self, *asked: Any) -> Iterator[Any]:
        """vLLM's steps with a clock around them, and not around what is done with what they give."""
        self.synchronize()
        answers = self._run(*asked)
        while True:
            began = time.perf_counter()
            ended = next(answers, None)
            self._took += time.perf_counter() - began
            if ended is None:
                return
            yield ended

    def synchronize(self) -> None:
        """Wait for the devices."""
        self.engine.rpc("es_synchronize")

    def took(self, work: Callable[[], Iterable[Any]]) -> Took:
        """The clock around something that yields rollouts."""
        self.synchronize()
        self._took, began = 0.0, time.perf_counter()
        tokens = sum(len(rollout.token_ids) for rollout in work())
        self.synchronize()
        return Took(tokens, time.perf_counter() - began, self._took)

    def seconds(self, work: Callable[[], object]) -> float:
        """The clock around anything else."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def members(self, plan: Any, requests: Sequence[Any]) -> Took:
        """All members of a plan, through the engine's own way: factors written, completions, texts."""
        return self.took(lambda: self.engine.rollout(plan, requests))

    def base(self, requests: Sequence[Any]) -> Took:
        """The bare model, on requests that share nothing: an empty cache, as members find it."""
        from evoalign.types import MEAN

        if not self.engine.llm.reset_prefix_cache():
            say("the prefix cache was not dropped: the bare model may be reported faster than it is")
        return self.took(lambda: self.engine._generate([(MEAN, None)], requests))

    def about(self) -> dict[str, Any]:
        """Config of the engine."""
        facts, settings = self.engine.facts, self.engine.llm.llm_engine.vllm_config
        return {
            "asked": self.config.engine.population,
            "form": facts.get("form", "none"),
            "why": facts.get("why", ""),
            "async": bool(settings.scheduler_config.async_scheduling),
            "batched_tokens": settings.scheduler_config.max_num_batched_tokens,
            "start_seconds": round(self.start_seconds, 1),
        }


def requests_of(count: int, prompt: int, tokens: int, seed: int, logprobs: bool = False) -> list[Any]:
    """Requests with random prompts of `prompt` tokens, for `tokens` greedy tokens."""
    from evoalign.types import Request, Sampling

    draw = random.Random(seed)
    ids = [tuple(draw.randrange(*VOCABULARY) for _ in range(prompt)) for _ in range(count)]
    return [Request(i, p, Sampling(tokens), i, logprobs) for i, p in enumerate(ids)]


# Processes, results, tables


def preload() -> None:
    """Import what every engine's process needs before it forks. Not where engines differ in their environment."""
    import transformers
    import vllm

    import evoalign.engines.vllm  # noqa: F401

    say(f"imported vLLM {vllm.__version__}, transformers {transformers.__version__}")


def apart(function: Callable[..., None], *arguments: object, limit: float) -> bool:
    """Run a function in a separate process for at most `limit` seconds; return whether it succeeded."""
    return together([(function, arguments)], limit)


def together(calls: Sequence[tuple[Callable[..., None], Sequence[object]]], limit: float) -> bool:
    """Run functions side by side in separate processes; return whether all succeeded."""
    torch = sys.modules.get("torch")
    awake = torch is not None and torch.cuda.is_initialized()
    context = multiprocessing.get_context("spawn" if awake else "fork")
    processes = [context.Process(target=_guarded, args=(f, *a), daemon=False) for f, a in calls]
    for process in processes:
        process.start()
    until = time.perf_counter() + limit
    for process in processes:
        process.join(max(0.0, until - time.perf_counter()))
        if process.is_alive():
            say(f"stopped after {limit:.0f} s")
            process.terminate()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    return all(process.exitcode == 0 for process in processes)


def _guarded(function: Callable[..., None], *arguments: object) -> None:
    """Say what went wrong, and leave without waiting for what the libraries still hold."""
    code = 0
    warnings.simplefilter("ignore", FutureWarning)
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if not multiprocessing.active_children() else sys.exit(code)


def emit(path: str, **row: Any) -> None:
    """Append a result."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def rows_of(path: str, **wanted: Any) -> list[dict[str, Any]]:
    """The results with these values; of none where there is no file yet."""
    if not Path(path).exists():
        return []
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A Markdown table."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print(flush=True)


def median(values: Iterable[float]) -> float:
    """The median of at least one number."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median with the smallest and the largest, as thousands."""
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def parser(description: str | None, shape: str) -> argparse.ArgumentParser:
    """The options that all these benchmarks have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=sorted(SHAPES), default=shape if has_gpu() else "tiny")
    options.add_argument("--json", dest="file", help="append results here, one JSON object a line")
    options.add_argument("--limit", type=float, default=420.0, help="seconds for one engine, start included")
    options.add_argument("--attention", default=None, help="attention backend; vLLM's choice if left out")
    return options


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[Path]:
    """Print what runs where; gives a folder that lasts as long as the script."""
    with tempfile.TemporaryDirectory(prefix="evoalign_") as folder:
        options.file = options.file or str(Path(folder) / "results.jsonl")
        Path(options.file).parent.mkdir(parents=True, exist_ok=True)
        print(f"$ python {' '.join(sys.argv)}\n{machine()}", flush=True)
        yield Path(folder)
        say("done")


def machine() -> str:
    """The GPUs and the versions, asked without waking a GPU."""
    names = []
    for package in ("vllm", "vllm-cpu", "torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            names.append(f"{package} {importlib.metadata.version(package)}")
    where = f"CPU, {os.cpu_count()} cores"
    if has_gpu() and (tool := shutil.which("nvidia-smi")):
        asked = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        where = "; ".join(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines())
    return f"{where}; {', '.join(names)}, Python {platform.python_version()}"
