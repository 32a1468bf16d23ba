# SPDX-License-Identifier: Apache-2.0
"""What travels between a driver, replicas and graders: it comes back as it was, is as small as is said, is checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoalign.engines.ray import wire
from evoalign.errors import DataError, EvoalignError, RewardError, ScorerAwayError
from evoalign.types import Member, Plan, Request, Rollout, Sampling, Update, population

MEMBERS = st.lists(
    st.builds(Member, st.integers(-2, 2**31 - 1), st.integers(0, 2**32 - 1), st.sampled_from((-1, 0, 1))),
    max_size=20,
).map(tuple)
FINITE = st.floats(allow_nan=False)
REQUESTS = (
    Request(0, (1, 2), Sampling(8), seed=5),
    Request(1, (3,), Sampling(4, 0.7, 0.9, ("\n", "END"), keep_stop=True), 2**63 - 1, logprobs=True),
    Request(2, (), Sampling(8), member=Member(3, 1, -1)),
)
A, B = population(2)
ASKED = [(A, REQUESTS[0]), (B, REQUESTS[0])]
SAID = [Rollout(m, 0, (7, 1), "é\ud800 \x00", "stop") for m in (A, B)]


@given(st.integers(0, 2**64 - 1), FINITE, MEMBERS)
def test_a_plan_and_its_requests_come_back(generation: int, sigma: float, members: tuple[Member, ...]) -> None:
    plan = Plan(generation, sigma, members)
    found, requests = wire.asked_of(wire.asked_bytes(plan, REQUESTS), wire.members_bytes(members))
    assert found == plan and tuple(requests) == REQUESTS


def test_a_member_is_at_most_16_bytes_of_a_plan_and_sigma_is_sent_once() -> None:
    assert len(wire.members_bytes(population(10))) <= 160
    sizes = {len(wire.asked_bytes(Plan(0, 1.0, population(n)), REQUESTS)) for n in (10, 1010)}
    assert len(sizes) == 1


@given(MEMBERS, FINITE, FINITE, st.sampled_from(("ordered", "library", "own")), st.data())
def test_an_update_comes_back_to_the_bit(
    members: tuple[Member, ...], sigma: float, step: float, summation: Any, data: st.DataObject
) -> None:
    coefficients = tuple(data.draw(st.lists(FINITE, min_size=len(members), max_size=len(members))))
    update = Update(3, 4, members, coefficients, sigma, step, 0.25, summation)
    assert wire.update_of(wire.update_bytes(update)) == update


def test_completions_come_back_in_the_order_in_which_they_were_asked() -> None:
    assert wire.rollouts_of(wire.rollouts_bytes(reversed(SAID)), ASKED) == SAID
    known = [Rollout(A, 1, (7,), "x", "length", (-0.1,))]
    assert wire.rollouts_of(wire.rollouts_bytes(known), [(A, REQUESTS[1])]) == known


GOOD: list[Any] = [[0, 0, wire.tokens_text([7, 1]), "x", "stop", None], [1, 0, "BwAAAA==", "y", "length", None]]


def test_rows_that_the_faults_below_are_made_of_are_good() -> None:
    assert [r.token_ids for r in wire.rollouts_of(json.dumps(GOOD).encode(), ASKED)] == [(7, 1), (7,)]


@pytest.mark.parametrize("data", [
    None, 5, b"", b"no", b"[", b"{}", b"[1]", b"[[]]", b"[" * 100_000, json.dumps(GOOD[:1]).encode(),
    json.dumps([*GOOD, GOOD[0]]).encode(), json.dumps([GOOD[0], [2, *GOOD[1][1:]]]).encode(),
    *(
        json.dumps([GOOD[0], [*GOOD[1][:place], wrong, *GOOD[1][place + 1 :]]]).encode()
        for place, wrong in (
            (2, "7"), (2, "BwAA"), (2, "BwAAA\n=="), (2, "é"), (2, [7]), (2, wire.tokens_text([-1])),
            (2, wire.tokens_text([7] * 9)), (2, None), (3, 5), (4, "gone"), (5, [0.0]), (0, True), (0, [1]),
        )
    ),
])  # fmt: skip
def test_what_is_no_list_of_completions_is_a_fault(data: object) -> None:
    with pytest.raises(wire.GarbageError):
        wire.rollouts_of(data, ASKED)


# --- what is to be scored, and rewards ---

COLUMNS = {"reward": [0.1, -0.0, None], "cost": [1e-320, 3.0, 1.7e308]}
TEXTS = ["é\ud800 \x00", "", "a"]


def test_a_piece_comes_back() -> None:
    rows = [{"prompt": "one", "when": object()}, {"prompt": "two"}, {"prompt": "two"}]
    split, places, texts, digest = wire.piece_of(wire.piece_bytes("test", range(3), TEXTS, rows))
    assert (split, places, texts) == ("test", [0, 1, 2], TEXTS)
    assert digest == wire.digest_of([{"prompt": "one", "when": object()}, *rows[1:]])
    assert digest != wire.digest_of(rows[:2]) and digest != wire.digest_of([rows[1], rows[0], rows[2]])


def test_columns_come_back_to_the_bit() -> None:
    assert repr(wire.columns_of(wire.columns_bytes(COLUMNS), 3)) == repr(COLUMNS)
    assert wire.columns_of(wire.columns_bytes({}), 0) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"\xff", None, b"{}", b'{"columns": []}', b'{"columns": {"a": 1}}', b'{"columns": {"a": [1.0]}}',
        b'{"columns": {"a": [1.0, NaN]}}', b'{"columns": {"a": [1.0, Infinity]}}', b'{"columns": {"a": [1.0, 1e999]}}',
        b'{"columns": {"a": [1.0, "2"]}}', b'{"columns": {"a": [1.0, true]}}', b'{"columns": {"a": [1.0, 2]}}',
        b'{"columns": {"a\\n": [1.0, 2.0]}}', b'{"columns": {}, "more": 1}', b"[" * 100_000,
        b'{"error": "x"}', b'{"error": "x", "kind": "print", "failed": null}',
        b'{"error": "x", "kind": "Any", "failed": null}', b'{"error": 1, "kind": "RewardError", "failed": null}',
        b'{"error": "x", "kind": "RewardError", "failed": []}', b'{"error": "x", "kind": [], "failed": null}',
    ],
)  # fmt: skip
def test_what_is_no_columns_is_garbage(data: Any) -> None:
    with pytest.raises(wire.GarbageError, match="answered what are no columns of 2 rewards"):
        wire.columns_of(data, 2)


@pytest.mark.parametrize(
    "error", [RewardError("f gave NaN", {"reason": "value"}), ScorerAwayError("gone"), DataError("row 1")]
)
def test_what_a_task_raised_is_raised_here(error: EvoalignError) -> None:
    with pytest.raises(type(error)) as caught:
        wire.columns_of(wire.error_bytes(error), 2)
    assert type(caught.value) is type(error) and str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
