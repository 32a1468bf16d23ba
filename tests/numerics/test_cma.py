# SPDX-License-Identifier: Apache-2.0
"""CMA-ES and sep-CMA-ES through spaces and the mean of an engine, against the package's own loop."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cmaes
import numpy as np
import numpy_reference as reference
import pytest
import torch

from evoalign import kernels, optimizer, shaping, spaces
from evoalign.config import from_dict
from evoalign.engines.master import Master
from evoalign.errors import CheckpointError, ConfigError
from evoalign.evolve import update_of
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import Mark
from evoalign.spaces.base import Slots, Space
from evoalign.spaces.lora import factor_name
from evoalign.testing.spaces import SPECS
from evoalign.types import Plan, Update, population

sys.path.append(str(Path(__file__).parents[2] / "studies"))
from planted_optimum import RECOVERED, Planted

WIDTH = 0.5
OF_MODEL = [replace(s, mean_abs=2 * s.mean_abs) if s.layer else s for s in SPECS]
PACKAGE = {"cma": cmaes.CMA, "sep_cma": cmaes.SepCMA}
SPACES = {
    "subspace": {"space": {"name": "subspace", "dimension": 6}, "es": {"sigma": WIDTH}},
    "lora": {
        "space": "lora", "es": {"noise_multiplier": 10.0},
        "lora": {"target_modules": ["k_proj", "v_proj"], "rank": 1},
    },
}  # fmt: skip


def sphere(x):
    return (x**2).sum()


def ellipsoid(x):
    return (1e4 ** (np.arange(len(x)) / (len(x) - 1)) * x**2).sum()


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def rastrigin(x):
    return (x**2 - 10 * np.cos(2 * np.pi * x) + 10).sum()


def config(name, space="subspace", size=12, **es):
    tree = SPACES[space]
    own = {"optimizer": name, "population_size": size, "num_generations": 9}
    return from_dict({"seed": 7, **tree, "es": {**tree["es"], **own, **es}})


class Run:
    """A mean that is moved without a model."""

    def __init__(self, config):
        self.config, plain = config, spaces.create(config)
        self.layout = plain.layout(OF_MODEL, torch.float32)
        self.cma = optimizer.create(config.es, self.layout)
        self.space = spaces.adapted(plain, self.cma)
        self.mean = Master(self.space, self.layout, self.cma, False, [], torch.device("cpu"))
        self.generation = 0

    def weights(self):
        """Return the mean and all members, float32 [1 + M, numbers]."""
        plan = Plan(self.generation, self.config.es.width, population(self.config.es.population_size))
        names = [t.name for t in self.layout.tensors]
        rows = [torch.cat([self.mean[n].flatten() for n in names])] + [
            torch.cat([self.space.perturbed(self.layout, n, self.mean[n], plan, m).flatten() for n in names])
            for m in plan.members
        ]
        return torch.stack(rows).numpy()

    def update(self, values):
        """Return the update that minimises `values` of the members."""
        plan = Plan(self.generation, self.config.es.width, population(len(values)))
        fitness = -np.array(values, dtype=np.float64)[:, None]
        return update_of(self.config, plan, shaping.shape(fitness, "zscore"), "own")

    def step(self, function):
        self.mean.apply(self.update([function(w.astype(np.float64)) for w in self.weights()[1:]]))
        self.generation += 1


@pytest.mark.first("sphere-", "rosenbrock-")
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", PACKAGE)
@pytest.mark.parametrize("function", [sphere, ellipsoid, rosenbrock, rastrigin], ids=lambda f: f.__name__)
def test_members_and_moves_equal_the_package_to_the_bit(space, name, function):
    run = Run(config(name, space))
    numbers, size = run.layout.parameters, 12
    scales = np.concatenate([np.full(np.prod(t.shape), t.scale) for t in run.layout.tensors])
    assert (len(set(scales)) > 1) == (space == "lora")
    width = (run.config.es.width * scales).astype(np.float32)
    package, mean = PACKAGE[name](np.zeros(numbers), 1.0, population_size=size), np.zeros(numbers, np.float32)
    for generation in range(25):
        normals = [
            np.concatenate([
                reference.noise(7, t.name, t.shape, generation, [member])[0].ravel() for t in run.layout.tensors
            ])
            for member in range(size)
        ]  # fmt: skip
        drawn = iter(normals)
        package._rng = SimpleNamespace(randn=lambda n, drawn=drawn: next(drawn).astype(np.float64))
        asked = [package.ask() for _ in range(size)]
        members = [mean + width * (x - package.mean).astype(np.float32) for x in asked]
        found = run.weights()
        assert np.array_equal(found[0], mean) and np.array_equal(found[1:], members)
        before = package.mean.copy()
        package.tell([(x, function(w.astype(np.float64))) for x, w in zip(asked, members, strict=True)])
        run.step(function)
        mean = mean + (package.mean - before).astype(np.float32) * width
        state = dict(run.mean.optimizer_state())
        for slot, value in {"sigma": package._sigma, "mean": package._mean, "path_c": package._pc}.items():
            assert np.array_equal(state[f"{slot}:cma"].numpy(), value)


@pytest.mark.parametrize(
    ("name", "function", "size", "generations", "below"),
    [
        ("cma", sphere, 10, 100, 1e-6), ("sep_cma", sphere, 10, 100, 1e-6), ("cma", ellipsoid, 10, 200, 1e-6),
        ("sep_cma", ellipsoid, 10, 200, 1e-6), ("cma", rosenbrock, 12, 250, 1e-6), ("cma", rastrigin, 200, 80, 1e-6),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)  # fmt: skip
def test_the_optimum_of_a_published_function_is_found(name, function, size, generations, below):
    run = Run(config(name, size=size, sigma=1.0 if function is rastrigin else WIDTH))
    away = 0.0 if function is rosenbrock else 1.5
    value = lambda w: function(w - away)  # noqa: E731
    start = value(run.weights()[0].astype(np.float64))
    for _ in range(generations):
        run.step(value)
    assert value(run.weights()[0].astype(np.float64)) < below < start


@pytest.mark.first("sep_cma")
@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGE)
def test_an_optimum_planted_in_the_tiny_model_is_recovered(name, tmp_path):
    """By a run from its config: noise, engine, likelihood, update and checkpoint. Its start is far from the planted."""
    planted = Planted(tmp_path, seed=0, dimension=4)
    found = planted.train(20, 8, optimizer=name)
    planted.served.engine.close()
    assert planted.best - planted.before > 5 and found["share"] > RECOVERED
    assert found["cosine"] > 0.99 and found["distance"] < 0.1


@pytest.mark.parametrize("name", PACKAGE)
def test_a_state_continues_to_the_bit_also_after_members_were_drawn(name, tmp_path):
    whole, first = Run(config(name)), Run(config(name))
    for _ in range(3):
        whole.step(rosenbrock)
        first.step(rosenbrock)
    first.weights()  # decomposes C, which changes its last bits in the package
    mean = {n: first.mean[n] for n in first.layout.by_name}
    mark = Mark(3, "0" * 64, "0" * 64)
    made = Run(config(name))
    checkpoint.save(
        tmp_path / "saved", mark, made.config, made.layout, "tiny", mean.items, first.mean.optimizer_state(),
        factors=lambda state: state,
    )  # fmt: skip
    state, slots = checkpoint.load(tmp_path / "saved", made.layout)
    for n, tensor in state.items():
        made.mean.put(n, tensor)
    made.mean.load_optimizer(slots)
    made.generation = 3
    for _ in range(3):
        whole.step(rosenbrock)
        made.step(rosenbrock)
    assert np.array_equal(made.weights(), whole.weights())
    made.mean.load_optimizer({})
    assert dict(made.mean.optimizer_state())["sigma:cma"] == 1, "it starts anew"


def test_a_state_of_other_shape_or_with_gaps_is_refused(tmp_path):
    run = Run(config("cma"))
    state, mean = dict(run.mean.optimizer_state()), {n: run.mean[n] for n in run.layout.by_name}

    def saved(slots):
        more = {"factors": lambda state: state, "replace": True}
        mark = Mark(0, "0" * 64, "0" * 64)
        checkpoint.save(tmp_path / "s", mark, run.config, run.layout, "tiny", mean.items, slots.items(), **more)
        return checkpoint.load(tmp_path / "s", run.layout)

    saved(state)
    for slot, shape in {"covariance": (6,), "mean": (5,), "sigma": (1,)}.items():
        with pytest.raises(CheckpointError, match=f"'{slot}:cma' has shape"):
            saved({**state, f"{slot}:cma": torch.ones(shape, dtype=torch.float64)})
    del state["path_c:cma"]
    with pytest.raises(CheckpointError, match="path_c:cma"):
        run.mean.load_optimizer(state)


@pytest.mark.parametrize("name", PACKAGE)
def test_a_generation_without_variance_changes_nothing(name):
    run, other = Run(config(name)), Run(config(name))
    for made in (run, other):
        made.step(sphere)
    before = {n: t.clone() for n, t in run.mean.optimizer_state()}
    run.mean.apply(run.update([1.0] * 12))
    assert all(torch.equal(before[n], t) for n, t in run.mean.optimizer_state())
    assert np.array_equal(run.weights(), other.weights())


def test_space_and_optimizer_that_were_pickled_apart_stay_together():
    here, there = Run(config("cma")), Run(config("cma"))
    space, made = (pickle.loads(pickle.dumps(part)) for part in (there.space, there.cma))
    there.space, there.mean = space, Master(space, there.layout, made, False, [], torch.device("cpu"))
    for run in (here, there):
        run.step(ellipsoid)
    assert np.array_equal(here.weights(), there.weights())
    states = [dict(run.mean.optimizer_state()) for run in (here, there)]
    assert torch.equal(*(state["covariance:cma"] for state in states)) and states[1]["generation:cma"] == 1


def test_noise_of_a_slice_is_that_part_and_no_path_takes_plain_noise():
    run = Run(config("cma", "lora"))
    for _ in range(5):
        run.step(ellipsoid)
    name = run.layout.tensors[1].name
    whole = run.space.noise(run.layout, name, 5, [3, 1])
    assert torch.equal(run.space.noise(run.layout, name, 5, [3, 1], (slice(2, 4), slice(0, 1))), whole[:, 2:4])
    assert not torch.allclose(whole, run.space.plain.noise(run.layout, name, 5, [3, 1]), atol=0.01)
    assert run.space.summation == "own"


def test_no_kernel_of_a_gpu_draws_plain_noise(monkeypatch):
    """Neither the update nor the launch that writes all members' factors, which a space of plain noise uses."""
    run, launched = Run(config("cma", "lora")), []
    for _ in range(5):
        run.step(ellipsoid)
    module, (rows, columns) = next((s.name, s.shape) for s in OF_MODEL if s.name in run.layout.modules)
    plan, members = Plan(5, run.config.es.width, ()), population(3)
    slot = Slots(module, (slice(0, rows), slice(0, columns)), torch.zeros(3, 1, columns), torch.zeros(3, rows, 1))
    monkeypatch.setattr(type(run.space.plain), "_launch", lambda *_: launched.append(1))
    with monkeypatch.context() as gpu:
        gpu.setattr(kernels, "available", lambda device: True)
        run.space.plain.writer(run.layout, run.mean.__getitem__, [slot])
        assert launched and run.space.plain.fused("cuda")
        launched.clear()
        write = run.space.writer(run.layout, run.mean.__getitem__, [slot])
        assert not launched and not run.space.fused("cuda")
    write(plan, members)
    name = factor_name(module, "B")
    for written, member in zip(slot.b, members, strict=True):
        assert torch.equal(written, run.space.perturbed(run.layout, name, run.mean[name], plan, member))


REFUSED = {
    "pairs": ({"antithetic": True}, "remove es.antithetic"),
    "rate": ({"learning_rate": 0.1}, r"remove es.learning_rate \(--set es.learning_rate=null does\)$"),
    "schedules": ({"sigma_schedule": "cosine", "learning_rate_schedule": "linear"},
                  "remove es.learning_rate_schedule, es.sigma_schedule"),
    "decay": ({"decay": 0.1}, "remove es.decay"),
    "few members": ({"population_size": 3}, "at least 4"),
    "ties": ({"shaping": "truncation"}, "ranks all members"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", PACKAGE)
def test_settings_that_do_not_fit_are_refused(name, case):
    es, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        config(name, **es)


def test_spaces_of_the_models_size_and_wider_first_generations_are_refused():
    es = {"sigma": 0.1, "optimizer": "cma"}
    for space in ("full", "lowrank"):
        with pytest.raises(ConfigError, match="space subspace"):
            from_dict({"space": space, "es": es})
    with pytest.raises(ConfigError, match=r"lora\.init_scale 1"):
        from_dict({"lora": {"evolve": "ab", "init_scale": 2.0}, "es": es})
    from_dict({"lora": {"evolve": "ab"}, "es": es})


@pytest.mark.parametrize(
    ("name", "dimension", "size", "words"),
    [
        ("cma", 2001, 8, "2 to 2,000 numbers, and 2,001 evolve; use sgd, sep_cma"),
        ("sep_cma", 10_001, 8, "2 to 10,000 numbers"), ("sep_cma", 1, 8, "and 1 evolve; use sgd, or"),
        ("cma", 2000, 135, "more than 8 GiB per update; use at most 134"), ("sep_cma", 10, 1000, "sum to 4"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(name, dimension, size, words):
    tree = {"space": {"name": "subspace", "dimension": dimension}}
    made = from_dict({**tree, "es": {"sigma": 0.1, "optimizer": name, "population_size": size}})
    layout = spaces.create(made).layout(SPECS, torch.float32)
    with pytest.raises(ConfigError, match=words):
        optimizer.create(made.es, layout)


def test_without_the_package_the_extra_is_named(monkeypatch):
    made = config("cma")
    layout = spaces.create(made).layout(SPECS, torch.float32)
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(ConfigError, match=r"pip install 'evoalign\[cma\]'"):
        optimizer.create(made.es, layout)


def test_part_of_a_generation_is_refused():
    run = Run(config("cma"))
    with pytest.raises(ConfigError, match="whole generations of 12"):
        run.mean.apply(Update(0, 0, population(6), (1.0, -1.0, 0.0, 0.5, -0.5, 0.0), WIDTH, WIDTH))
    pairs = population(12, antithetic=True)
    with pytest.raises(ConfigError, match="or pairs"):
        run.mean.apply(Update(0, 0, pairs, tuple(range(12)), WIDTH, WIDTH))


def test_a_space_with_its_own_noise_is_refused():
    class Own(type(spaces.create(config("cma")))):
        __module__ = "elsewhere"

        def noise(self, *arguments, **more):
            return Space.noise(self, *arguments, **more)

    own, layout = Own(config("cma")), Run(config("cma")).layout
    with pytest.raises(ConfigError, match="its own noise"):
        spaces.adapted(own, optimizer.create(own.config.es, layout))
