# SPDX-License-Identifier: Apache-2.0
"""Contract tests of engines: each member generates with its own weights, and updates follow the documented formula.

Completions are compared token by token with transformers on the CPU with the member's weights: each token must be the
likeliest one, or its logit within `answers.TIE` of it. So the config should name a small model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from evoalign import optimizer, spaces, tokens
from evoalign.checks import canary
from evoalign.config import Config
from evoalign.engines import Engine, weights_hash
from evoalign.engines.base import pairs_of, sampled_places
from evoalign.errors import CanaryError
from evoalign.models.tensors import tensors_of
from evoalign.optimizer import cma
from evoalign.spaces import Factors
from evoalign.testing.answers import StartedEngine, check_fields, check_greedy, plain_model, same_up_to_ties, written
from evoalign.tokens import Tokens
from evoalign.types import MEAN, MEAN_PLAN, Member, Plan, Request, Rollout, Sampling, Update, population

PROMPTS = ("Solve: 3 + 5 =", "Name a colour of the sky, in one word.", "Solve: 3 + 5 = 8. Solve: 9 - 2 =")
TOKENS = 8
MANY = 145
"""Requests of a rollout that needs several batches; engine `ray` sends at most 64 of the mean at once."""


@dataclass(frozen=True, slots=True)
class Bench(StartedEngine):
    """A started engine and everything that it was started with."""

    def plan(self, members: Sequence[Member], generation: int = 1, wider: float = 1.0) -> Plan:
        """Return a plan for members with the config's sigma, multiplied by `wider`."""
        return Plan(generation, wider * self.config.es.width, tuple(members))

    def update(self) -> Update:
        """Return an update that changes the mean."""
        es = self.config.es
        return Update(0, 1, population(4), (1.2, -0.3, 0.4, -1.3), es.width, es.eta * es.width)


Create: TypeAlias = Callable[[Config, Tokens], Engine]
Check: TypeAlias = Callable[[Bench], None]


def check_engine(create: Create, config: Config) -> None:
    """Run all of `CHECKS`, each on a new engine. Raises AssertionError."""
    for check in CHECKS:
        with started(create, config) as bench:
            check(bench)


@contextmanager
def started(create: Create, config: Config) -> Generator[Bench, None, None]:
    """Start an engine with the config's space, and close it at the end."""
    tokens_ = tokens.load(config.model)
    engine = create(config, tokens_)
    try:
        space = spaces.create(config)
        layout = space.layout(engine.specs(), engine.dtype)
        made = optimizer.create(config.es, layout)
        space = spaces.adapted(space, made)
        facts = engine.start(space, layout, made, keep_start=config.es.decay > 0)
        sampling = Sampling(TOKENS)
        requests = [Request(i, tokens_.encode(p), sampling, seed=i, logprobs=True) for i, p in enumerate(PROMPTS)]
        yield Bench(config, tokens_, engine, space, layout, facts, tuple(requests))
    finally:
        engine.close()


def check_specs(bench: Bench) -> None:
    """Require the Hugging Face names and shapes of all tensors, tied ones once."""
    specs = bench.engine.specs()
    names = [s.name for s in specs]
    assert len(set(names)) == len(names), "a tensor is listed twice"
    tensors = tensors_of(plain_model(bench))
    want = {n: tuple(p.shape) for n, p in tensors.items()}
    odd = sorted(set(want) ^ set(names))
    assert not odd, f"{odd[0]} is {'not listed' if odd[0] in want else 'not a tensor of the Hugging Face model'}"
    for spec in specs:
        assert spec.shape == want[spec.name], f"{spec.name} is listed as {spec.shape}, but is {want[spec.name]}"
        mean = float(tensors[spec.name].double().abs().mean())
        known = spec.mean_abs is not None and math.isclose(spec.mean_abs, mean, rel_tol=1e-4, abs_tol=1e-9)
        assert known, f"mean_abs of {spec.name} is {spec.mean_abs}, but its mean |W| is {mean}"


def check_facts(bench: Bench) -> None:
    """Require the facts that an engine reports about itself."""
    facts = bench.facts
    assert facts.engine and facts.device, "facts.engine or facts.device is empty"
    assert facts.dtype == bench.layout.dtype, f"facts.dtype is {facts.dtype}, the layout's is {bench.layout.dtype}"
    assert facts.master_bytes >= 0, f"facts.master_bytes is negative: {facts.master_bytes}"


def check_rollouts(bench: Bench) -> None:
    """Require every (member, request) pair once, in any order, with consistent fields."""
    members = (*population(3), MEAN)
    same = dataclasses.replace(bench.requests[0], index=len(bench.requests), logprobs=False)
    requests = (*bench.requests, same)
    rollouts = list(bench.engine.rollout(bench.plan(members), requests))
    got = sorted((r.member.index, r.request) for r in rollouts)
    want = sorted((m.index, r.index) for m in members for r in requests)
    assert got == want, f"requested (member, request) {want}, got {got}"
    for rollout in rollouts:
        check_fields(bench, requests[rollout.request], rollout)


def check_request_indices(bench: Bench) -> None:
    """Require that a rollout has its request's index, over several batches and for indices of any start and order.

    Requests that name different members may have the same index.
    """
    members = (*population(3), MEAN)
    prompts = [dataclasses.replace(r, sampling=Sampling(2)) for r in bench.requests]
    plan = bench.plan(members)

    def renumbered(count: int, named: Sequence[Member | None]) -> list[Request]:
        """Return requests to each of `named` with shuffled indices from 1000 on; 7 is coprime to `count`."""
        return [
            dataclasses.replace(prompts[(i + k) % len(prompts)], index=1000 + (7 * i) % count, member=member)
            for i in range(count)
            for k, member in enumerate(named)
        ]

    for where, requests in (
        (MEAN_PLAN, renumbered(MANY, [None])),
        (plan, renumbered(10, [None])),
        (plan, renumbered(MANY // len(members), members)),
    ):
        wanted = _answers(bench, where, prompts)
        pairs = {(m.index, r.index): r for m, r in pairs_of(where.members, requests)}
        got = list(bench.engine.rollout(where, requests))
        keys = sorted((r.member.index, r.request) for r in got)
        assert keys == sorted(pairs), f"{len(requests)} requests: requested (member, index) {sorted(pairs)}, got {keys}"
        for rollout in got:
            request = pairs[rollout.member.index, rollout.request]
            same = next(p for p in prompts if p.prompt_ids == request.prompt_ids)
            same_up_to_ties(bench, rollout, wanted[rollout.member.index, same.index])


def check_requests_of_one_member(bench: Bench) -> None:
    """Require that a request naming a member gets that member's completion only, with the same draws as for all."""
    members = (*population(3), MEAN)
    warm = Sampling(TOKENS, temperature=0.5)
    everyone = [dataclasses.replace(r, sampling=warm if r.index == 0 else r.sampling) for r in bench.requests]
    apart = [(m, r) for m in reversed(members) for r in everyone if (m.index + r.index) % 2]
    named = [dataclasses.replace(r, index=i, member=m) for i, (m, r) in enumerate(apart)]
    common = dataclasses.replace(everyone[0], index=len(named))
    plan = bench.plan(members)
    wanted, got = _answers(bench, plan, everyone), _answers(bench, plan, [*named, common])
    keys = {(r.member.index, r.index) for r in named if r.member} | {(m.index, common.index) for m in members}
    assert set(got) == keys, f"requested (member, request) {sorted(keys)}, got {sorted(got)}"
    again = [((m.index, i), (m.index, r.index)) for i, (m, r) in enumerate(apart)]
    again += [((m.index, common.index), (m.index, 0)) for m in members]
    for here, there in again:
        same_up_to_ties(bench, got[here], wanted[there])


def check_stop_strings(bench: Bench) -> None:
    """Require that a completion ends before the first stop string that it generates."""
    long = [dataclasses.replace(r, sampling=Sampling(4 * TOKENS)) for r in bench.requests]
    answers = _answers(bench, MEAN_PLAN, long)
    for request in long:
        rollout = answers[MEAN.index, request.index]
        if len(rollout.text) < 6:
            continue
        stop = rollout.text[3:5]
        stopping = dataclasses.replace(request, sampling=Sampling(4 * TOKENS, stop=("never said", stop)))
        found = _answers(bench, MEAN_PLAN, [stopping])[MEAN.index, request.index]
        want = rollout.text[: rollout.text.index(stop)]
        assert found.text == want, f"with stop string {stop!r} the text is {found.text!r}, not {want!r}"
        assert found.finish_reason == "stop", (
            f"with stop string {stop!r} finish_reason is not stop but {found.finish_reason}"
        )
        assert found.token_ids == rollout.token_ids[: len(found.token_ids)], "a stop string changes the tokens"
        kept = dataclasses.replace(stopping, sampling=dataclasses.replace(stopping.sampling, keep_stop=True))
        text = _answers(bench, MEAN_PLAN, [kept])[MEAN.index, request.index].text
        assert text == want + stop, f"with stop string {stop!r} and keep_stop the text is {text!r}, not {want + stop!r}"


def check_mean_is_plain(bench: Bench) -> None:
    """Require that the mean generates as plain transformers does, before and after an update."""
    before = _greedy(bench, MEAN_PLAN)
    check_greedy(bench, plain_model(bench), before.values())
    bench.engine.apply(bench.update())
    after = _greedy(bench, MEAN_PLAN)
    check_greedy(bench, written(bench, MEAN_PLAN, MEAN), after.values())


def check_members_are_their_own(bench: Bench) -> None:
    """Require that each member generates as plain transformers does with that member's weights."""
    bench.engine.apply(bench.update())
    plan = bench.plan((*population(4, antithetic=True), MEAN))
    rollouts = _greedy(bench, plan)
    for member in plan.members:
        model = written(bench, plan, member)
        check_greedy(bench, model, [r for (index, _), r in rollouts.items() if index == member.index])


def check_members_differ(bench: Bench) -> None:
    """Require that members with large noise differ from the mean and each other: no adapter is silently ignored."""
    factors = len(bench.layout.tensors) > len(bench.layout.modules)
    members = (*population(4, antithetic=not factors), MEAN)  # a pair is equal if factors start at 0: (-B) (-A) is B A
    rollouts = _greedy(bench, bench.plan(members, wider=10.0))
    for request in bench.requests:
        seen: dict[object, int] = {}
        for member in members:
            rollout = rollouts[member.index, request.index]
            answer = (rollout.token_ids, rollout.logprobs)
            assert answer not in seen, (
                f"members {seen[answer]} and {member.index} have equal completions (-1 is the mean)"
            )
            seen[answer] = member.index


def check_rollouts_leave_the_mean(bench: Bench) -> None:
    """Require that neither a complete nor an abandoned rollout changes the mean or its completions."""
    fingerprint, answers = bench.engine.fingerprint(), _greedy(bench, MEAN_PLAN)
    plan = bench.plan(population(4), wider=10.0)
    list(bench.engine.rollout(plan, bench.requests))
    left = bench.engine.rollout(plan, bench.requests)
    next(left)
    close = getattr(left, "close", None)
    if close is not None:
        close()
    assert bench.engine.fingerprint() == fingerprint, "a rollout changes the fingerprint of the mean"
    _same_answers(answers, _greedy(bench, MEAN_PLAN), "the mean's completions change after a rollout")


def check_repeats(bench: Bench) -> None:
    """Require that a deterministic engine repeats its completions, greedy and sampled."""
    if not bench.facts.deterministic:
        return
    plan = bench.plan(population(3))
    sampled = [dataclasses.replace(r, sampling=Sampling(TOKENS, temperature=1.0)) for r in bench.requests]
    for requests in (list(bench.requests), sampled):
        first, second = (_answers(bench, plan, requests) for _ in range(2))
        _same_answers(first, second, "the same plan and requests give other completions the second time")


def check_common_random_numbers(bench: Bench) -> None:
    """Require that members share the random draws of a request, so that equal weights give equal completions.

    Requests of different seeds have different draws.
    """
    plan = Plan(1, 0.0, population(3))
    warm = Sampling(TOKENS, temperature=1.5)
    requests = [dataclasses.replace(bench.requests[0], index=i, seed=100 + i, sampling=warm) for i in range(12)]
    rollouts = _answers(bench, plan, requests)
    for request in requests:
        answers = {rollouts[m.index, request.index].token_ids for m in plan.members}
        assert len(answers) == 1, f"members with equal weights draw different tokens for seed {request.seed}"
    drawn = {rollouts[0, r.index].token_ids for r in requests}
    assert len(drawn) > 1, "12 seeds draw the same tokens"


def check_apply(bench: Bench) -> None:
    """Require that an update changes evolved tensors by step * scale * (1/N) sum_i c_i sign_i eps_i, and no others.

    With an optimizer, by what it makes of that gradient from the state that the engine returned before; with CMA-ES,
    by the move of the mean in its state.
    """
    before, update = dict(bench.engine.state()), bench.update()
    slots = dict(bench.engine.optimizer_state())
    mover = optimizer.create(bench.config.es, bench.layout)
    if mover is not None:
        mover.load(slots)
    space = spaces.adapted(spaces.create(bench.config), mover)
    fingerprint = bench.engine.fingerprint()
    bench.engine.apply(update)
    assert bench.engine.fingerprint() != fingerprint, "an update does not change the fingerprint"
    moving = {t.name: t for t in bench.layout.tensors}
    tolerance = 1e-4 if bench.engine.dtype == torch.float32 else 2e-2  # served factors are rounded
    for name, after in bench.engine.state():
        moved = after.double() - before[name].double()
        if name not in moving:
            assert not moved.any(), f"{name} is frozen, but an update changes it"
            continue
        streams = [m.noise for m in update.members]
        eps = bench.space.noise(bench.layout, name, update.generation, streams)
        if isinstance(eps, Factors):
            eps = eps.b.double() @ eps.a.double() / math.sqrt(eps.a.shape[1])
        weights = [m.sign * c for m, c in zip(update.members, update.coefficients, strict=True)]
        want = torch.tensordot(torch.tensor(weights, dtype=torch.float64), eps.double(), dims=1) / len(weights)
        if mover is not None:
            whole = tuple(slice(0, n) for n in after.shape)
            gradient = space.gradient(bench.layout, name, update, whole, after.device)
            want = mover.direction(name, gradient).double()
            if space.optimizer is not None:
                slot, sizes = f"mean:{cma.NAME}", [math.prod(t.shape) for t in bench.layout.tensors]
                moves = (dict(mover.state())[slot] - slots[slot]).split(sizes)
                want = moves[list(moving).index(name)].view(after.shape)
        want *= update.step * moving[name].scale
        rounding = 2**-23 * float(after.double().norm())
        distance = float((moved - want).norm())
        allowed = tolerance * float(want.norm()) + rounding
        assert distance <= allowed, (
            f"the update of {name} differs from the formula by {distance:.2g}, more than the allowed {allowed:.2g}"
        )


def check_zero_coefficients(bench: Bench) -> None:
    """Require that an update with all coefficients zero changes nothing."""
    fingerprint = bench.engine.fingerprint()
    bench.engine.apply(dataclasses.replace(bench.update(), coefficients=(0.0,) * 4))
    assert bench.engine.fingerprint() == fingerprint, "an update with all coefficients zero changes the mean"


def check_state(bench: Bench) -> None:
    """Require that the state is the whole mean in float32 on the CPU, and that load restores it."""
    state, fingerprint = dict(bench.engine.state()), bench.engine.fingerprint()
    names = {t.name for t in (*bench.layout.tensors, *bench.layout.frozen)}
    assert set(state) == names, f"the state and the layout have different tensors: {sorted(set(state) ^ names)[:3]}"
    for name, tensor in state.items():
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu"), (
            f"{name} is {tensor.dtype} on {tensor.device}, not float32 on the CPU"
        )
        assert tuple(tensor.shape) == bench.layout[name].shape, (
            f"{name} is {tuple(tensor.shape)}, not {bench.layout[name].shape}"
        )
    assert weights_hash(state.items()) == fingerprint, "the fingerprint is not the weights_hash of the state"
    copies = {n: t.clone() for n, t in state.items()}
    answers = _greedy(bench, MEAN_PLAN)
    bench.engine.apply(bench.update())
    for name, tensor in state.items():
        assert torch.equal(tensor, copies[name]), f"an update changes the {name} that state() returned before"
    bench.engine.load(state)
    assert bench.engine.fingerprint() == fingerprint, "load does not restore the fingerprint"
    _same_answers(answers, _greedy(bench, MEAN_PLAN), "load does not restore the completions")


def check_copies(bench: Bench) -> None:
    """Require that `copy_state` fills and refills dictionaries with the mean and the optimizer's slots."""
    kept = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for index in range(2):
        bench.engine.apply(dataclasses.replace(bench.update(), index=index))
        bench.engine.copy_state(*kept)
        whole = dict(bench.engine.state()), dict(bench.engine.optimizer_state())
        for what, copied, now in zip(("mean", "optimizer's state"), kept, whole, strict=True):
            assert list(copied) == list(now), f"copy_state copies other tensors of the {what} than it has"
            for name, tensor in now.items():
                assert torch.equal(copied[name], tensor), f"copy_state copies another {name} of the {what}"


def check_sample(bench: Bench) -> None:
    """Require that `probe_weights` returns the mean at `sampled_places`, or all of it if it is small."""
    bench.engine.apply(bench.update())
    state, total = dict(bench.engine.state()), bench.layout.parameters
    for count in (total // 3, total + 1):
        want = torch.cat([state[name].flatten()[places] for name, places in sampled_places(bench.layout, count)])
        got = bench.engine.probe_weights(count)
        assert got.dtype == torch.float32 and got.device.type == "cpu", (
            f"probe_weights returns {got.dtype} on {got.device}, not float32 on the CPU"
        )
        assert torch.equal(got, want), f"probe_weights({count}) of {total} values is not the mean at sampled_places"
    bench.engine.apply(dataclasses.replace(bench.update(), index=1))
    assert not torch.equal(bench.engine.probe_weights(total), want), "an update does not change probe_weights"
    assert torch.equal(got, want), "an update changes the tensor that probe_weights returned before"


def check_canary(bench: Bench) -> None:
    """Require that the canary check of a training passes: members differ, and the mean is restored."""
    prompt, exact = bench.requests[0].prompt_ids, bench.facts.deterministic
    for generation in range(2):
        try:
            width = bench.config.es.width
            parts = (bench.engine, bench.space, bench.layout, prompt)
            canary.check(*parts, generation=generation, width=width, exact=exact)
        except CanaryError as error:
            raise AssertionError(str(error)) from error
        bench.engine.apply(bench.update())


CHECKS: tuple[Check, ...] = (
    check_specs,
    check_facts,
    check_rollouts,
    check_request_indices,
    check_requests_of_one_member,
    check_stop_strings,
    check_mean_is_plain,
    check_members_are_their_own,
    check_members_differ,
    check_rollouts_leave_the_mean,
    check_repeats,
    check_common_random_numbers,
    check_apply,
    check_zero_coefficients,
    check_state,
    check_copies,
    check_sample,
    check_canary,
)

Answers: TypeAlias = Mapping[tuple[int, int], Rollout]


def _answers(bench: Bench, plan: Plan, requests: Sequence[Request]) -> Answers:
    return {(r.member.index, r.request): r for r in bench.engine.rollout(plan, requests)}


def _greedy(bench: Bench, plan: Plan) -> Answers:
    return _answers(bench, plan, bench.requests)


def _same_answers(first: Answers, second: Answers, what: str) -> None:
    for key, rollout in first.items():
        other = second[key]
        assert rollout.token_ids == other.token_ids, f"{what}: {rollout.text!r}, then {other.text!r}"
