# SPDX-License-Identifier: Apache-2.0
"""Which member each row of a batch belongs to."""

import numpy as np
import pytest
import torch

from evoalign.engines.vllm.rows import Rows
from evoalign.errors import ModelError


def test_rows_follow_the_batch_and_leave_nothing_behind():
    rows = Rows(8, 3, torch.device("cpu"))
    address = rows.of(8).data_ptr()
    for ids in ([1, 2, 3, 0, 3], [3], [2, 2], [0, 0, 0], [1] * 8, [1] * 8, []):
        rows.put(np.array(ids, dtype=np.int32))
        assert rows.of(8).tolist() == [i - 1 for i in ids] + [-1] * (8 - len(ids))
        assert rows.any == any(ids)
    assert rows.of(8).data_ptr() == address


def test_ids_without_a_slot_and_batches_without_room_are_refused():
    rows = Rows(8, 3, torch.device("cpu"))
    with pytest.raises(ModelError, match="LoRA id 4 is of no member: there are 3 slots"):
        rows.put(np.array([1, 4]))
    with pytest.raises(ModelError, match="a batch of 9 rows"):
        rows.put(np.ones(9, dtype=np.int64))
    assert rows.of(8).tolist() == [-1] * 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_maps_that_are_far_ahead_of_the_device_arrive_whole():
    """The device is kept busy, so that the host would overwrite buffers that have not left if nothing held it back."""
    rows, steps = Rows(4096, 4096, torch.device("cuda")), range(12)
    maps = [np.random.default_rng(step).integers(0, 4097, 4096 - 100 * step) for step in steps]
    seen = []
    for ids in maps:
        torch.cuda._sleep(50_000_000)
        rows.put(ids)
        seen.append(rows.of(4096).clone())
    for ids, found in zip(maps, seen, strict=True):
        assert found.tolist() == [i - 1 for i in ids] + [-1] * (4096 - len(ids))
