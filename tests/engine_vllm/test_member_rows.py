# SPDX-License-Identifier: Apache-2.0
"""`Rows`: the member of each row of a batch."""

import numpy as np
import pytest
import torch

from evoalign.engines.vllm.population import Rows
from evoalign.errors import ModelError


def test_rows_follow_the_batch_at_a_fixed_address():
    rows = Rows(8, 3, torch.device("cpu"))
    address = rows.view(8).data_ptr()
    for ids in ([1, 2, 3, 0, 3], [3], [2, 2], [0, 0, 0], [1] * 8, [1] * 8, []):
        rows.put(np.array(ids, dtype=np.int32))
        assert rows.view(8).tolist() == [i - 1 for i in ids] + [-1] * (8 - len(ids))
        assert rows.any == any(ids)
    assert rows.view(8).data_ptr() == address


def test_put_refuses_ids_without_a_slot_and_batches_that_are_too_large():
    rows = Rows(8, 3, torch.device("cpu"))
    with pytest.raises(ModelError, match="LoRA id 4 "):
        rows.put(np.array([1, 4]))
    with pytest.raises(ModelError, match="9 rows"):
        rows.put(np.ones(9, dtype=np.int64))
    assert rows.view(8).tolist() == [-1] * 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_maps_sent_ahead_of_the_device_arrive_whole():
    """The device is kept busy, so that the host would overwrite buffers in use if it did not wait."""
    rows, steps = Rows(4096, 4096, torch.device("cuda")), range(12)
    maps = [np.random.default_rng(step).integers(0, 4097, 4096 - 100 * step) for step in steps]
    seen = []
    for ids in maps:
        torch.cuda._sleep(50_000_000)
        rows.put(ids)
        seen.append(rows.view(4096).clone())
    for ids, found in zip(maps, seen, strict=True):
        assert found.tolist() == [i - 1 for i in ids] + [-1] * (4096 - len(ids))
