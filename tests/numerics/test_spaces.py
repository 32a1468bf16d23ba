# SPDX-License-Identifier: Apache-2.0
"""The spaces' members and updates against float64 numpy, from the noise on."""

import itertools
import math

import numpy as np
import numpy_reference as reference
import pytest
import torch

from evoalign import spaces
from evoalign.config import from_dict
from evoalign.evolve import sigma_at, step_at
from evoalign.optimizer import create
from evoalign.types import MEAN, Member, Plan, TensorSpec, Update, population

Q, K, DOWN = (f"model.layers.{i}.{n}.weight" for i, n in [(0, "self_attn.q_proj"), (0, "self_attn.k_proj"),
                                                       (1, "mlp.down_proj")])  # fmt: skip
SHAPES = {Q: (12, 16), K: (6, 16), DOWN: (16, 20)}
MEAN_ABS = {Q: 0.03, K: 0.05, DOWN: 0.011}
SPECS = [
    TensorSpec("model.embed_tokens.weight", (30, 16), "embedding", None, 0.7),
    *[TensorSpec(n, s, "linear", int(n.split(".")[2]), MEAN_ABS[n]) for n, s in SHAPES.items()],
    TensorSpec("model.layers.0.self_attn.q_proj.bias", (12,), "bias", 0, 8.5),
    TensorSpec("model.layers.0.input_layernorm.weight", (16,), "norm", 0, 1.0),
]
SPACES = ["full", "lora", "lora-ab", "lowrank", "lowrank-3"]
DENSE = ["full", "lora", "lora-ab"]


def config(space, **es):
    name, _, variant = space.partition("-")
    tree = {"seed": 7, "space": name, "es": {"sigma": 0.01, "learning_rate": 0.005} | es}
    tree["lora"] = {"rank": 2, "alpha": 3.0, "evolve": "ab" if variant == "ab" else "b"}
    tree["lowrank"] = {"rank": 3 if variant == "3" else 1}
    if "noise_multiplier" in es:
        del tree["es"]["sigma"]
    return from_dict(tree)


def make(space, dtype=torch.float32, **es):
    made = spaces.create(config(space, **es))
    return made, made.layout(SPECS, dtype)


def update(size, *, antithetic=False, seed=0, sigma=0.01, step=0.005, generation=3, **more):
    coefficients = np.random.default_rng(seed).normal(size=size)
    members = population(size, antithetic=antithetic)
    return Update(2, generation, members, tuple(map(float, coefficients)), sigma, step, **more)


def own_noise(layout, name, members, generation, served=None, width=0.0):
    """Standard normals [M, *shape] of one tensor: the product of its factors over sqrt(r) for `lowrank`.

    With `served` (a rounding) the factors are those that the members of width `width` had.
    """
    shape, rank, streams = layout[name].shape, layout.rank, [m.noise for m in members]
    if rank == 0 or "lora_" in name:
        return reference.noise(layout.seed, name, shape, generation, streams).astype(np.float64)
    a = reference.noise(layout.seed, name, (rank, shape[1]), generation, streams, "A")
    b = reference.noise(layout.seed, name, (shape[0], rank), generation, streams, "B")
    if served is not None:
        factor = np.float32(width / math.sqrt(rank))
        return served(b * factor).astype(np.float64) @ served(a).astype(np.float64) / width
    return b.astype(np.float64) @ a.astype(np.float64) / math.sqrt(rank)


def own_move(layout, name, up, **served):
    """step * scale * (1/N) sum_i c_i sign_i eps_i in float64."""
    eps = own_noise(layout, name, up.members, up.generation, **served)
    scale = layout[name].scale
    return up.step * scale * reference.weighted(eps, up.coefficients, [m.sign for m in up.members])


def whole(shape):
    return tuple(slice(0, n) for n in shape)


def moved(space, layout, name, up, master=None, **more):
    master = torch.zeros(layout[name].shape) if master is None else master.clone()
    space.accumulate(layout, master, name, whole(master.shape), up, **more)
    return master


def start(name, shape):
    return torch.from_numpy(np.random.default_rng(len(name)).normal(0, 0.02, shape).astype(np.float32))


def test_what_evolves():
    names = {s: [t.name for t in make(s)[1].tensors] for s in SPACES}
    assert names["full"] == [s.name for s in SPECS]
    assert names["lowrank"] == list(SHAPES)
    assert names["lora"] == [n.replace(".weight", ".lora_B.weight") for n in SHAPES]
    assert len(names["lora-ab"]) == 6
    _, lora = make("lora")
    assert [t.shape for t in lora.frozen] == [(2, 16), (2, 16), (2, 20)]
    assert [t.shape for t in lora.tensors] == [(12, 2), (6, 2), (16, 2)]
    assert lora.scaling == 1.5


def test_norms_are_left_out_in_half_precision_only():
    norm = "model.layers.0.input_layernorm.weight"
    assert norm in make("full", torch.float32)[1].by_name
    assert norm not in make("full", torch.bfloat16)[1].by_name
    assert norm not in make("full", torch.float16)[1].by_name


@pytest.mark.parametrize("space", SPACES)
def test_the_scale_is_the_mean_over_target_matrices_without_biases(space):
    _, layout = make(space, noise_multiplier=0.1)
    for tensor in layout.tensors:
        layer = next((s.layer for s in SPECS if s.name == tensor.module), None)
        want = {0: (0.03 + 0.05) / 2, 1: 0.011, None: 0.7}[layer]
        assert tensor.scale == pytest.approx(want, rel=1e-15), tensor.name
    assert {t.scale for t in make(space)[1].tensors} == {1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("antithetic", [False, True])
def test_dense_members_are_rounded_once(dtype, antithetic):
    """round(master + fl32(s * noise)): each step in float32, as numpy does it."""
    space, layout = make("full", dtype, noise_multiplier=0.3)
    for member in population(6, antithetic=antithetic):
        plan = Plan(5, 0.3, (member,))
        for tensor in layout.tensors:
            master = start(tensor.name, tensor.shape)
            eps = reference.noise(7, tensor.name, tensor.shape, 5, [member.noise])[0]
            want = master.numpy() + eps * np.float32(member.sign * 0.3 * tensor.scale)
            got = space.perturbed(layout, tensor.name, master, plan, member)
            assert got.dtype == torch.float32
            assert (got.numpy() == want).all()
            assert (
                got.to(dtype).float().numpy() == (reference.bfloat16(want) if dtype != torch.float32 else want)
            ).all()
    assert space.perturbed(layout, Q, master, plan, MEAN) is master


@pytest.mark.parametrize("space_name", ["lora", "lora-ab"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_members_are_rounded_once(space_name, dtype):
    space, layout = make(space_name, dtype, noise_multiplier=0.3)
    masters = {n: start(n, t.shape) for n, t in layout.by_name.items()}
    members = (*population(4, antithetic=True), MEAN)
    rounded = reference.bfloat16 if dtype == torch.bfloat16 else np.float32
    for module in SHAPES:
        adapter = space.adapter(layout, module, masters.__getitem__, Plan(5, 0.3, members), members)
        assert adapter.scaling == 1.5
        for factor, got in (("A", adapter.a), ("B", adapter.b)):
            name = module.replace(".weight", f".lora_{factor}.weight")
            assert got.dtype == dtype
            if name in {t.name for t in layout.frozen}:
                assert (got.float().numpy() == rounded(masters[name].numpy())[None]).all()
                continue
            eps = reference.noise(7, name, layout[name].shape, 5, [m.noise for m in members])
            for i, member in enumerate(members):
                want = masters[name].numpy() + eps[i] * np.float32(member.sign * 0.3 * layout[name].scale)
                assert (got[i].float().numpy() == rounded(want)).all(), (name, member)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lowrank_members_carry_the_width_and_the_sign_in_b(dtype):
    space, layout = make("lowrank-3", dtype, noise_multiplier=0.3)
    members = (*population(4, antithetic=True), MEAN)
    rounded = reference.bfloat16 if dtype == torch.bfloat16 else np.float32
    for module, (out, in_) in SHAPES.items():
        adapter = space.adapter(layout, module, lambda n: start(n, SHAPES[n]), Plan(5, 0.3, members), members)
        a = reference.noise(7, module, (3, in_), 5, [m.noise for m in members], "A")
        b = reference.noise(7, module, (out, 3), 5, [m.noise for m in members], "B")
        assert adapter.scaling == 1.0
        for i, member in enumerate(members):
            width = np.float32(member.sign * 0.3 * layout[module].scale / math.sqrt(3))
            assert (adapter.a[i].float().numpy() == rounded(a[i])).all()
            assert (adapter.b[i].float().numpy() == rounded(b[i] * width)).all()


def test_the_mean_has_no_lowrank_adapter():
    space, layout = make("lowrank")
    assert space.adapter(layout, Q, lambda n: start(n, SHAPES[n]), Plan(0, 0.1, (MEAN,)), (MEAN,)) is None


def test_lora_starts_from_zero_with_a_frozen_normal_a():
    space, layout = make("lora")
    for tensor in layout.tensors:
        assert not space.start(layout, tensor.name, "cpu").any()
    for tensor in layout.frozen:
        want = reference.normals(reference.key(7, "init", tensor.name), tensor.shape, 0, [0])[0]
        assert (space.start(layout, tensor.name, "cpu").numpy() == want).all()
    space, layout = make("lora-ab")
    assert not any(space.start(layout, t.name, "cpu").any() for t in layout.tensors)
    assert layout.frozen == ()


def test_lowrank_noise_has_the_covariance_of_independent_normals():
    """E[B A / sqrt r] = 0, and the covariance of its elements is the identity, for every rank."""
    for name, rank in (("lowrank", 1), ("lowrank-3", 3)):
        space = spaces.create(config(name))
        layout = space.layout([TensorSpec("w.0.weight", (5, 4), "linear", 0, 1.0)], torch.float32)
        count = 20_000
        factors = space.noise(layout, "w.0.weight", 0, range(count))
        eps = torch.bmm(factors.b, factors.a).double().numpy().reshape(count, 20) / math.sqrt(rank)
        assert abs(eps.mean(axis=0)).max() < 4.5 / math.sqrt(count)
        fourth = 3 * (1 + 2 / rank) - 1  # variance of the square of one element
        deviation = np.abs(eps.T @ eps / count - np.eye(20))
        assert deviation.max() < 4.5 * math.sqrt(fourth / count)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("size", [2, 30, 33 * 2])
@pytest.mark.parametrize("space_name", SPACES)
def test_the_update_equals_float64_numpy(space_name, size, antithetic):
    space, layout = make(space_name, noise_multiplier=0.3)
    up = update(size, antithetic=antithetic, sigma=0.3)
    for tensor in layout.tensors:
        want = own_move(layout, tensor.name, up)
        assert reference.relative(moved(space, layout, tensor.name, up), want) < 1e-6
        master = start(tensor.name, tensor.shape)
        got = moved(space, layout, tensor.name, up, master)
        assert reference.relative(got, master.double().numpy() + want) < 1e-6


@pytest.mark.parametrize("space_name", SPACES)
def test_an_antithetic_pair_of_equal_coefficients_moves_nothing(space_name):
    space, layout = make(space_name)
    members = population(4, antithetic=True)
    assert [(m.noise, m.sign) for m in members] == [(0, 1), (0, -1), (1, 1), (1, -1)]
    up = Update(0, 0, members, (0.7, 0.7, 0.0, 0.0), 0.01, 0.005)
    other = Update(0, 0, members, (0.7, -0.7, 0.0, 0.0), 0.01, 0.005)
    single = Update(0, 0, (members[0], Member(1, 9, 1), Member(2, 8, 1), Member(3, 7, 1)), (1.4, 0, 0, 0), 0.01, 0.005)
    for tensor in layout.tensors:
        assert not moved(space, layout, tensor.name, up).any()
        twice = moved(space, layout, tensor.name, other)
        assert twice.any()
        assert reference.relative(twice, moved(space, layout, tensor.name, single)) < 1e-6


@pytest.mark.parametrize("space_name", ["lowrank", "lowrank-3"])
def test_lowrank_updates_with_the_rounded_factors_that_were_served(space_name):
    space, layout = make(space_name, torch.bfloat16, noise_multiplier=0.3)
    up = update(30, sigma=0.3)
    for name in SHAPES:
        width = 0.3 * layout[name].scale
        served = own_move(layout, name, up, served=reference.bfloat16, width=width)
        got = moved(space, layout, name, up)
        assert reference.relative(got, served) < 1e-6
        assert reference.relative(got, own_move(layout, name, up)) > 1e-4, "rounding has to make a difference here"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("space_name", SPACES)
def test_the_update_is_the_mean_of_what_members_had(space_name, dtype):
    """step / sigma * (1/N) sum_i c_i (member_i - mean), with the members as they were served."""
    space, layout = make(space_name, dtype)
    up = update(12, antithetic=True)
    plan = Plan(up.generation, up.sigma, up.members)
    name = layout.tensors[-1].name
    zero = torch.zeros(layout[name].shape)
    if space_name == "full":
        each = torch.stack([space.perturbed(layout, name, zero, plan, m) for m in up.members])
    else:
        module = layout[name].module
        adapter = space.adapter(layout, module, lambda n: torch.zeros(layout[n].shape), plan, up.members)
        each = adapter.b if "lora" in space_name else adapter.b.double() @ adapter.a.double()
    weights = np.array(up.coefficients)
    want = up.step / up.sigma * np.tensordot(weights, each.double().numpy(), axes=1) / 12
    tolerance = 1e-6 if dtype == torch.float32 or "lowrank" in space_name else 5e-3
    assert reference.relative(moved(space, layout, name, up), want) < tolerance


@pytest.mark.parametrize("space_name", SPACES)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_zero_coefficients_move_nothing(space_name, optimizer):
    space, layout = make(space_name)
    zero = Update(1, 1, population(4), (0.0, -0.0, 0.0, 0.0), 0.01, 0.005, decay=0.5)
    for tensor in layout.tensors:
        made = create(config("lora", optimizer=optimizer).es, layout)
        master = start(tensor.name, tensor.shape)
        moving = moved(space, layout, tensor.name, update(4), master, optimizer=made)
        assert not torch.equal(moving, master)
        again = moved(space, layout, tensor.name, zero, moving, optimizer=made, start=master)
        assert torch.equal(again, moving)


@pytest.mark.parametrize("space_name", SPACES)
def test_decay_takes_back_a_share_of_the_distance(space_name):
    space, layout = make(space_name)
    up = update(8, decay=0.125)
    for tensor in layout.tensors:
        anchor = start(tensor.name, tensor.shape)
        master = anchor + 0.01 * start(tensor.name + "x", tensor.shape)
        got = moved(space, layout, tensor.name, up, master, start=anchor)
        distance = master.double().numpy() - anchor.double().numpy()
        want = anchor.double().numpy() + 0.875 * distance + own_move(layout, tensor.name, up)
        assert reference.relative(got.double().numpy() - anchor.double().numpy(), want - anchor.double().numpy()) < 1e-5


@pytest.mark.parametrize("space_name", SPACES)
def test_the_parts_of_an_update_make_the_whole(space_name):
    """Row slices, column slices and both: bit for bit for dense noise, 1e-6 for products."""
    space, layout = make(space_name)
    up = update(30, antithetic=True)
    draw = np.random.default_rng(0)
    for tensor in layout.tensors:
        master = start(tensor.name, tensor.shape)
        expected = moved(space, layout, tensor.name, up, master)
        cuts = [sorted({0, n, *map(int, draw.integers(0, n + 1, 3))}) for n in tensor.shape]
        spans = [[slice(a, b) for a, b in itertools.pairwise(c)] for c in cuts]
        places = [(s,) for s in spans[0]] if len(spans) == 1 else [(r, c) for r in spans[0] for c in spans[1]]
        got = master.clone()
        for place in places:
            space.accumulate(layout, got[place], tensor.name, place, up)
        if space_name in DENSE:
            assert torch.equal(got, expected), tensor.name
        assert reference.relative(got, expected) < 1e-6


@pytest.mark.parametrize("space_name", SPACES)
def test_many_members_are_added_in_pieces(space_name):
    space, layout = make(space_name)
    up = update(600)
    name = layout.tensors[0].name
    assert reference.relative(moved(space, layout, name, up), own_move(layout, name, up)) < 2e-6


@pytest.mark.parametrize("size", [30, 1024, 8192])
@pytest.mark.parametrize("space_name", ["full", "lora", "lowrank"])
def test_the_realised_update_points_where_the_intended_one_does(space_name, size):
    """Cosine on the float32 master, at the paper's sigma 1e-3 and alpha 5e-4; bfloat16 served."""
    space, layout = make(space_name, torch.bfloat16)
    up = update(size, sigma=1e-3, step=5e-4)
    name = next(t.name for t in layout.tensors if t.module == Q)
    master = start(Q, layout[name].shape)
    realised = moved(space, layout, name, up, master).double() - master.double()
    assert reference.cosine(realised.numpy(), own_move(layout, name, up)) >= 0.999


@pytest.mark.parametrize(
    ("es", "eta", "sigma", "step"),
    [
        ({"sigma": 0.02, "learning_rate": 0.005}, 0.25, 0.02, 0.005),
        ({"noise_multiplier": 0.1, "learning_rate": 0.01}, 0.01, 0.1, 0.01 * 0.1),
    ],
    ids=["the learning rate with sigma", "in units of the noise with a noise multiplier"],
)
def test_step_at(es, eta, sigma, step):
    made = config("lora", num_generations=10, **es)
    assert made.es.eta == pytest.approx(eta)
    for generation in range(10):
        assert sigma_at(made, generation) == sigma
        assert step_at(made, generation) == pytest.approx(step, rel=1e-15)


@pytest.mark.parametrize("space_name", SPACES)
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_sigma_schedule_changes_the_noise_and_not_the_step(space_name, schedule):
    made = config(space_name, num_generations=9, sigma_schedule={"name": schedule, "floor": 0.2})
    sigmas, steps = [sigma_at(made, g) for g in range(9)], [step_at(made, g) for g in range(9)]
    assert sigmas[0] == 0.01
    assert sigmas[-1] == pytest.approx(0.002)
    assert sorted(sigmas, reverse=True) == sigmas
    assert steps == [0.005] * 9
    space, layout = make(space_name)
    name = layout.tensors[0].name
    first, last = (moved(space, layout, name, update(8, sigma=s)) for s in (sigmas[0], sigmas[-1]))
    assert reference.relative(last, first) < 1e-6


def test_a_learning_rate_schedule_changes_the_step_and_not_the_noise():
    made = config("full", num_generations=9, learning_rate_schedule={"name": "linear", "floor": 0.1})
    assert [sigma_at(made, g) for g in range(9)] == [0.01] * 9
    assert step_at(made, 0) == pytest.approx(0.005)
    assert step_at(made, 4) == pytest.approx(0.005 * 0.55)
    assert step_at(made, 8) == pytest.approx(0.0005)


def test_the_published_lora_population_algorithm():
    """`evolve: ab` over five generations against numpy.

    base = 0; members W_i = base + N(0, (m s_l)^2), generation 0 wider by init_scale, A and B apart, s_l = 0.1 x the
    mean over the layer's target matrices of mean |W|; base' = base + (lr / N) sum_i z_i W_i with the full W_i.
    """
    members, rate, widening = 10, 0.7, 4.0
    tree = {
        "seed": 7, "space": "lora", "lora": {"rank": 2, "alpha": 4, "evolve": "ab", "init_scale": widening},
        "es": {"num_generations": 5, "population_size": members, "learning_rate": rate, "noise_multiplier": 0.1},
    }  # fmt: skip
    made = from_dict(tree)
    space = spaces.create(made)
    layout = space.layout(SPECS, torch.float32)
    base_noise = {0: 0.1 * (0.03 + 0.05) / 2, 1: 0.1 * 0.011}
    masters = {t.name: space.start(layout, t.name, "cpu") for t in layout.tensors}
    bases = {n: np.zeros(m.shape) for n, m in masters.items()}
    draw = np.random.default_rng(3)
    for generation in range(5):
        plan = Plan(generation, sigma_at(made, generation), population(members))
        z = reference.zscore(draw.normal(-100, 40, members).tolist())
        up = Update(generation, generation, plan.members, tuple(z), plan.sigma, step_at(made, generation))
        new = {}
        for module in SHAPES:
            adapter = space.adapter(layout, module, masters.__getitem__, plan, plan.members)
            assert adapter.scaling == 2.0
            for factor, served in (("A", adapter.a), ("B", adapter.b)):
                name = module.replace(".weight", f".lora_{factor}.weight")
                width = base_noise[int(module.split(".")[2])] * (widening if generation == 0 else 1.0)
                eps = reference.noise(7, name, bases[name].shape, generation, range(members)).astype(np.float64)
                weights = bases[name] + width * eps
                assert reference.relative(served, weights) < 1e-6
                new[name] = bases[name] + rate / members * np.tensordot(z, weights, axes=1)
        bases = new
        for name, master in masters.items():
            space.accumulate(layout, master, name, whole(master.shape), up)
            assert reference.relative(master, bases[name]) < 1e-6
    assert all(np.abs(b).max() > 0 for b in bases.values())


def gradients(layout, name, count, seed=0):
    for index in range(count):
        up = Update(index, index, population(6), update(6, seed=seed + index).coefficients, 0.01, 0.003)
        eps = own_noise(layout, name, up.members, index)
        yield up, reference.weighted(eps, up.coefficients, [1] * 6)


@pytest.mark.parametrize(
    "settings",
    [{"name": "momentum", "momentum": 0.8}, {"name": "adam", "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}],
    ids=["momentum", "adam"],
)
@pytest.mark.parametrize("space_name", ["lora", "lora-ab"])
def test_optimizers_equal_numpy(space_name, settings):
    space, layout = make(space_name, noise_multiplier=0.1)
    made = create(config("lora", optimizer=settings).es, layout)
    for tensor in layout.tensors:
        master, want = torch.zeros(tensor.shape), np.zeros(tensor.shape)
        mean, square = np.zeros(tensor.shape), np.zeros(tensor.shape)
        for up, g in gradients(layout, tensor.name, 12):
            if settings["name"] == "momentum":
                direction = mean = 0.8 * mean + g
            else:
                mean, square = 0.8 * mean + 0.2 * g, 0.95 * square + 0.05 * g * g
                t = up.index + 1
                direction = (mean / (1 - 0.8**t)) / (np.sqrt(square / (1 - 0.95**t)) + 1e-6)
            want = want + up.step * tensor.scale * direction
            space.accumulate(layout, master, tensor.name, whole(tensor.shape), up, optimizer=made)
            assert reference.relative(master, want) < (1e-6 if settings["name"] == "momentum" else 1e-5)


def test_adams_first_step_is_a_full_one_also_after_generations_that_moved_nothing():
    """Generations without variance are common at the start; they must not count in the bias correction."""
    space, layout = make("lora")
    name = layout.tensors[0].name
    made = create(config("lora", optimizer="adam").es, layout)
    master = torch.zeros(layout[name].shape)
    for index in range(10):
        zero = Update(index, index, population(6), (0.0,) * 6, 0.01, 0.003)
        space.accumulate(layout, master, name, whole(master.shape), zero, optimizer=made)
    first = Update(10, 10, population(6), update(6).coefficients, 0.01, 0.003)
    space.accumulate(layout, master, name, whole(master.shape), first, optimizer=made)
    assert master.abs().median().item() == pytest.approx(0.003, rel=1e-3)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_an_optimizers_state_goes_on_where_it_stopped(name):
    space, layout = make("lora")
    tensor = layout.tensors[0]
    settings = config("lora", optimizer=name).es
    through, first = create(settings, layout), create(settings, layout)
    whole_run, halves = torch.zeros(tensor.shape), torch.zeros(tensor.shape)
    ups = [up for up, _ in gradients(layout, tensor.name, 6)]
    for up in ups:
        space.accumulate(layout, whole_run, tensor.name, whole(tensor.shape), up, optimizer=through)
    for up in ups[:3]:
        space.accumulate(layout, halves, tensor.name, whole(tensor.shape), up, optimizer=first)
    second = create(settings, layout)
    second.load({n: t.clone() for n, t in first.state()})
    for up in ups[3:]:
        space.accumulate(layout, halves, tensor.name, whole(tensor.shape), up, optimizer=second)
    assert torch.equal(halves, whole_run)


@pytest.mark.first("lora", "lowrank")
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("space_name", ["full", "lora", "lowrank", "lowrank-3"])
def test_the_es_gradient_of_a_quadratic_is_the_analytic_one(space_name, antithetic):
    """f(W) = <G, W> - 1/2 |W - T|^2 over effective weights; its mean gradient under symmetric noise is exact.

    The members' weights are those that the space serves. Projections on the gradient and on random directions lie
    within 3 standard errors of the analytic ones.
    """
    count, sigma = 4000, 0.05
    space, layout = make(space_name)
    out, in_ = SHAPES[K]
    draw = np.random.default_rng(1)
    master, target, slope = (draw.normal(size=(out, in_)) for _ in range(3))
    members = population(count, antithetic=antithetic)
    plan = Plan(0, sigma, members)
    if space_name == "full":
        zero = torch.zeros(out, in_)
        added = torch.stack([space.perturbed(layout, K, zero, plan, m) for m in members]).double().numpy()
    else:
        means = {t.name: space.start(layout, t.name, "cpu") for t in layout.by_name.values() if "lora_" in t.name}
        adapter = space.adapter(layout, K, lambda n: means.get(n, torch.zeros(out, in_)), plan, members)
        added = adapter.scaling * (adapter.b.double() @ adapter.a.double()).numpy()
    weights = master + added
    fitness = (slope * weights).sum(axis=(1, 2)) - 0.5 * ((weights - target) ** 2).sum(axis=(1, 2))
    gradient = slope - (master - target)
    name = K
    if space_name == "lora":
        name = K.replace(".weight", ".lora_B.weight")
        a = reference.normals(reference.key(7, "init", name.replace("_B", "_A")), (2, in_), 0, [0])[0]
        gradient = 1.5 * gradient @ a.astype(np.float64).T
    centred = (fitness - fitness.mean()) / sigma
    up = Update(0, 0, members, tuple(map(float, centred)), sigma, 1.0)
    estimate = moved(space, layout, name, up).double().numpy()
    eps = own_noise(layout, name, members, 0) * np.array([m.sign for m in members])[:, None, None]
    for direction in [gradient, *draw.normal(size=(5, *gradient.shape))]:
        unit = direction / np.linalg.norm(direction)
        each = centred * (eps * unit).sum(axis=(1, 2))
        if antithetic:
            each = each.reshape(-1, 2).mean(axis=1)
        error = each.std() / math.sqrt(len(each))
        assert abs((estimate * unit).sum() - (gradient * unit).sum()) < 3 * error
    assert reference.cosine(estimate, gradient) > 0.95
