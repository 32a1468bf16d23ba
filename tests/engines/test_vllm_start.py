# SPDX-License-Identifier: Apache-2.0
"""The arguments vLLM is started with, and its error messages; no vLLM is needed."""

import itertools

import pytest
import torch

from evoalign.config import from_dict
from evoalign.engines.vllm import start

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.2 GiB is free. "
    "Process 7 has 77 GiB memory in use. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\nand more"
)


def config(**more):
    tree = {
        "space": "lowrank", "model": {"name": "tiny"}, "es": {"sigma": 0.01, "population_size": 30},
        "engine": {"name": "vllm"},
    }  # fmt: skip
    return from_dict(tree | more)


def test_graph_sizes_are_few_and_include_whole_batches():
    assert start.graph_sizes(1024) == [8, 32, 64, 128, 256, 384, 512, 768, 1024]
    assert start.graph_sizes(1024, {960}) == [8, 32, 64, 128, 256, 384, 512, 768, 960, 1024]
    assert start.graph_sizes(60, {240}) == [8, 32, 60]
    assert start.graph_sizes(1) == [1]
    for most in (3, 47, 300, 1000, 4096):
        sizes = start.graph_sizes(most)
        assert sizes[-1] == most and len(sizes) <= 13
        assert all(b <= 1.5 * a for a, b in itertools.pairwise(sizes) if a >= 256)


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"task": {"name": "conciseness", "batch_size": 7}}, 210),
        ({"task": {"name": "conciseness", "batch_size": 2, "samples": 3}, "sampling": {"temperature": 0.5}}, 180),
        ({"task": {"name": "conciseness", "batch_size": 7}, "engine": {"name": "vllm", "members": 10}}, 70),
        ({"task": {"name": "conciseness", "batch_size": 7}, "space": "full"}, 7),
        ({"task": {"name": "conciseness", "batch_size": 70}}, None),
        ({"task": {"name": "conciseness"}}, None),
    ],
)
def test_graphs_include_the_rows_of_a_generation_where_known(more, own):
    found = start._graphs(config(**more))["cudagraph_capture_sizes"]
    assert set(found) == {*start.graph_sizes(1024), *([] if own is None else [own])}


@pytest.mark.parametrize("explain", [start._explain, start.out_of_memory])
def test_out_of_memory_is_one_line_that_names_settings(explain):
    line = explain(config(), torch.OutOfMemoryError(CUDA))
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB)" in line and "engine.gpu_memory_utilization" in line
    assert "\n" not in line and "PYTORCH" not in line
