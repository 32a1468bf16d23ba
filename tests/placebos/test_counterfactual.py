# SPDX-License-Identifier: Apache-2.0
"""Counterfactuals of all spaces against updates made by hand in numpy, bit for bit; and what is said of them."""

import itertools
import json
import math
import shutil
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import evoalign
from evoalign import shaping
from evoalign.checks.distance import moved, start_of
from evoalign.config import from_dict
from evoalign.engines import weights_hash
from evoalign.errors import CheckpointError, ConfigError, ModelError, RunExistsError
from evoalign.evolve import sigma_at, step_at
from evoalign.placebos.counterfactual import Follower, first_half, parse
from evoalign.placebos.estimates import expected_distance
from evoalign.placebos.run import counterfactuals
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.journal import Journal
from evoalign.setup import assemble, serve
from evoalign.training import saving
from evoalign.training.replay import config_of
from evoalign.types import EvolvedTensor, Layout, Update, population
from numerics import numpy_reference as reference

GENERATIONS = 3


def config(space="lora", dtype="float32", layers=None, **es):
    """One small matrix of the tiny model, or as many `layers` of it."""
    modules = {"target_layers": layers or [1], "target_modules": None if layers else ["k_proj"]}
    tree = {
        "seed": 3, "space": space, "task": {"name": "conciseness", "batch_size": 1},
        "model": {"name": "tiny", "dtype": dtype}, "engine": {"threads": 1, "device": "cpu"},
        "lora": {"rank": 2, **modules}, "lowrank": {"rank": 2, **modules},
        "full": {"exclude": ["embed", "layers.0", "layers.2", "layers.3", "mlp", "norm", "q_proj", "o_proj"]},
        "evaluation": {"max_tokens": 1},
        "es": {"num_generations": GENERATIONS, "population_size": 6, "sigma": 0.05, "learning_rate": 0.03, **es},
    }  # fmt: skip
    return from_dict(tree)


def recorded(folder, config):
    """The journal of a run whose fitness is made up, written as training writes it."""
    rng, es = np.random.default_rng(0), config.es
    with closing(assemble(config)) as parts, closing(Journal(folder, saving.header(parts, None))) as found:
        for g in range(GENERATIONS):
            scores_MP = rng.standard_normal((es.population_size, 3)).round(1)
            members = population(es.population_size, antithetic=es.antithetic)
            coefficients = tuple(map(float, shaping.shape(scores_MP, es.shaping)))
            update = Update(g, g, members, coefficients, sigma_at(config, g), step_at(config, g), es.decay)
            found.append(update, tuple(map(float, shaping.fitness(scores_MP))))
            parts.engine.apply(update)
            found.seal(g, parts.engine.fingerprint())
    return journal.read(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("plain") / "journal.jsonl", config())


@pytest.fixture(scope="module")
def centred(tmp_path_factory):
    found = config(shaping="centered", antithetic=True)
    return recorded(tmp_path_factory.mktemp("centred") / "journal.jsonl", found)


@contextmanager
def follower(log):
    with closing(serve(config_of(log))) as served:
        yield Follower(served, log, log.sealed)


def replayed(found):
    """The hash after the recorded updates, each of which is checked."""
    return found.replay(lambda recorded: saving.apply(found.served.engine, found.log, recorded))


def state(found):
    return {name: tensor.numpy().copy() for name, tensor in found.served.engine.state()}


def by_hand(found, start, coefficients):
    """The mean after these (members, coefficients) a generation, in numpy's float32, one operation after another."""
    f, layout, log = np.float32, found.served.layout, found.log
    es, lowrank = log.header.config["es"], log.header.space == "lowrank"
    mean, velocity = {t.name: start[t.name].copy() for t in layout.tensors}, dict[str, Any]()
    for generation, (kept, c) in zip(log.generations, coefficients, strict=True):
        update = generation.update
        weights = {}
        for i, value in zip(kept, c, strict=True):
            member = update.members[i]
            weights[member.noise] = weights.get(member.noise, 0.0) + member.sign * value
        weights = {n: w for n, w in weights.items() if w}
        for t in layout.tensors if any(c) else ():
            total = np.zeros(t.shape, dtype=f)
            for noise, weight in weights.items():
                for term in (
                    terms(found, t, update, noise, weight)
                    if lowrank
                    else [reference.noise(3, t.name, t.shape, update.generation, [noise])[0] * f(weight)]
                ):
                    total = total + term
            total = total * f(1 / len(kept))
            if es["optimizer"]["name"] == "momentum":
                velocity[t.name] = velocity.get(t.name, np.zeros(t.shape, dtype=f)) * f(0.9) + total
                total = velocity[t.name]
            if update.decay:
                mean[t.name] = mean[t.name] - (mean[t.name] - start[t.name]) * f(update.decay)
            mean[t.name] = mean[t.name] + total * f(update.step * t.scale)
    return mean


def terms(found, tensor, update, noise, weight):
    """The products of one noise's served factors, weighted: a column of B and a row of A each."""
    f, rank, (rows, columns) = np.float32, found.served.layout.rank, tensor.shape
    rounded = reference.bfloat16 if found.served.layout.dtype == "bfloat16" else (lambda x: x)
    width = update.sigma * tensor.scale
    a = rounded(reference.noise(3, tensor.name, (rank, columns), update.generation, [noise], "A")[0])
    b = reference.noise(3, tensor.name, (rows, rank), update.generation, [noise], "B")[0]
    left = rounded(b * f(width / math.sqrt(rank))) * f(weight / width)
    for k in range(rank):
        yield left[:, k, None] * a[None, k]


def expected(log, name, seed):
    """What each counterfactual says, from the journal's numbers alone."""
    found = list[tuple[list[int], list[float]]]()
    for recorded in log.generations:
        c, fitness = list(recorded.update.coefficients), list(recorded.fitness_M)
        everyone = list(range(len(c)))
        if name == "shuffle":
            random = np.random.Generator(np.random.Philox(key=[seed, recorded.update.generation]))
            if log.header.config["es"]["antithetic"]:
                swaps, pairs_P2 = random.random(len(c) // 2) < 0.5, np.reshape(c, (-1, 2))
                pairs_P2 = pairs_P2[random.permutation(len(c) // 2)]
                c = np.where(swaps[:, None], pairs_P2[:, ::-1], pairs_P2).ravel().tolist()
            else:
                c = [c[i] for i in random.permutation(len(c))]
            found.append((everyone, c))
        elif name == "flip":
            found.append((everyone, [-x for x in c]))
        elif name == "member 4":
            found.append((everyone, [0.0, 0.0, 0.0, 0.0, c[4], *([0.0] * (len(c) - 5))]))
        elif name == "half":
            half = [0, 1] if log.header.config["es"]["antithetic"] else [0, 1, 2]  # 3 pairs, or 6 members
            found.append((half, np_zscore([fitness[i] for i in half])))
        else:
            higher = [sum(x < y for x in fitness) + (fitness.count(y) - 1) / 2 for y in fitness]
            found.append((everyone, [h / (len(c) - 1) - 0.5 for h in higher]))
    return found


def np_zscore(fitness):
    f = np.array(fitness)
    return [float(x) for x in (f - f.mean()) / (f.std() + 1e-8)] if f.max() > f.min() else [0.0] * len(fitness)


CASES = {
    "lora": ("lora", {}),
    "full": ("full", {"antithetic": True}),
    "lowrank": ("lowrank", {"decay": 0.1}),
    "lora, momentum, decay": ("lora", {"optimizer": "momentum", "decay": 0.1, "antithetic": True}),
    "full, bfloat16, decay": ("full", {"dtype": "bfloat16", "decay": 0.1, "learning_rate_schedule": "cosine"}),
    "lowrank, bfloat16, schedules": ("lowrank", {
        "dtype": "bfloat16", "antithetic": True, "sigma_schedule": "linear", "learning_rate_schedule": "linear"}),
}  # fmt: skip
NAMES = ["shuffle", "flip", "half", "member 4", "shaping ranks"]


@pytest.mark.first("momentum", "lowrank, bfloat16")
@pytest.mark.parametrize("case", CASES)
def test_each_counterfactual_is_the_update_made_by_hand(case, tmp_path):
    """One engine, sent back to the start for each: the recorded coefficients come to the recorded hash at the end."""
    space, settings = CASES[case]
    log = recorded(tmp_path / "journal.jsonl", config(space, **settings))
    with follower(log) as found:
        found.back()
        start = state(found)
        for name in NAMES:
            seed = 5 if name == "shuffle" else 0
            weights_hash = found.follow(parse(name, log, seed))
            want = by_hand(found, start, expected(log, name, seed))
            got = state(found)
            assert all(np.array_equal(got[n].view(np.int32), want[n].view(np.int32)) for n in want), (case, name)
            assert any((want[n] != start[n]).any() for n in want) and weights_hash != log.generations[-1].weights_hash
        assert replayed(found) == log.generations[-1].weights_hash


@pytest.mark.first("adam")
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_the_optimizer_begins_anew(optimizer, tmp_path):
    log = recorded(tmp_path / "journal.jsonl", config(optimizer=optimizer, antithetic=True))
    with follower(log) as found:
        shuffle = parse("shuffle", log, 1)
        hashes = [replayed(found), found.follow(shuffle), replayed(found), found.follow(shuffle)]
    assert hashes[0] == hashes[2] == log.generations[-1].weights_hash
    assert hashes[1] == hashes[3] == evoalign.replay(log.path, counterfactual="shuffle", seed=1) != hashes[0]


def test_the_runs_own_shaping_is_the_run(plain, centred):
    for log, own in ((plain, "zscore"), (centred, "centered")):
        for generation in log.generations:
            assert parse(f"shaping {own}", log).update(generation) == generation.update


@pytest.mark.slow
def test_the_first_steps_of_all_members_are_the_first_step(tmp_path):
    log = recorded(tmp_path / "journal.jsonl", config("lowrank", antithetic=True))
    first = log.generations[0]
    with follower(log) as found:

        def step(update):
            found.back()
            before = state(found)
            found.served.engine.apply(update)
            return {n: a.astype(np.float64) - before[n] for n, a in state(found).items()}

        whole = step(first.update)
        parts = [step(parse(f"member {k}", log).update(first)) for k in range(6)]
    for name, move in whole.items():
        assert np.allclose(sum(part[name] for part in parts), move, atol=1e-7) and np.abs(move).max() > 1e-3


def test_half_is_of_whole_pairs_and_centred_where_the_run_was(centred):
    pairs = population(10, antithetic=True)
    assert first_half(pairs) == [0, 1, 2, 3] and first_half(population(5)) == [0, 1]
    for generation in centred.generations:
        update, c = parse("half", centred).update(generation), generation.update.coefficients[:2]
        assert update.members == generation.update.members[:2]
        assert update.coefficients == pytest.approx([(c[0] - c[1]) / 2, (c[1] - c[0]) / 2])


@pytest.mark.parametrize(
    ("text", "seed", "message"),
    [
        ("shuffel", 0, "no counterfactual 'shuffel'; use shuffle, flip, half, member K or shaping NAME"),
        ("flip 3", 0, "no counterfactual 'flip 3'"), ("member", 0, "no counterfactual 'member'"),
        ("member 6", 0, "members 0 to 5"), ("member -1", 0, "members 0 to 5"),
        ("member ²", 0, "members 0 to 5"), ("shaping soft", 0, "use zscore, centered, ranks, truncation, identity"),
        ("shaping centered", 0, "needs scores by prompt.*own shaping is zscore.*zscore, ranks, truncation, identity"),
        ("shuffle", -1, "a whole number from 0"), ("shuffle", 2**63, "a whole number from 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(text, seed, message, plain):
    with pytest.raises(ConfigError, match=message):
        parse(text, plain, seed)


def test_half_of_a_pair_is_refused_and_a_start_that_is_another(tmp_path, monkeypatch):
    two, log = (recorded(tmp_path / f"{name}.jsonl", made) for name, made in (
        ("two", config(population_size=2, antithetic=True)), ("one", config("lowrank"))))  # fmt: skip
    with pytest.raises(ConfigError, match="half of a population of 2 "):
        parse("half", two)
    with follower(log) as found:
        start = dict(found.start)
        next(iter(start.values()))[0, 0] += 1
        monkeypatch.setattr(found, "start", start)
        with pytest.raises(ModelError, match="do not give the mean that the run started from"):
            found.back()


def test_the_start_is_rounded_as_it_is_served(random_qwen2):
    """Of a model whose files are finer than what is served, whose bytes the tiny model's are not."""
    tree = {**config("full", "bfloat16").model_dump(), "full": {"exclude": None}}
    with closing(serve(from_dict({**tree, "model": {"name": str(random_qwen2), "dtype": "bfloat16"}}))) as served:
        start = start_of(served)
        assert weights_hash(start.items()) == served.engine.fingerprint()
        assert set(start) == {t.name for t in served.layout.tensors} and len(start) == len(served.layout.tensors)
        assert any(
            (tensor != tensor.bfloat16()).any() for tensor in load_file(random_qwen2 / "model.safetensors").values()
        )
        with pytest.raises(KeyError):
            start["lm_head"]


@pytest.mark.first("lora")
@pytest.mark.parametrize("space", ["lora", "full"])
def test_a_saved_counterfactual_says_what_it_is(space, tmp_path):
    log = recorded(tmp_path / "journal.jsonl", config(space))
    to = tmp_path / "mean"
    found = evoalign.replay(log.path, counterfactual="shuffle", seed=7, to=to, generation=2)
    mark = checkpoint.verify(to)
    assert (mark.counterfactual, mark.weights_hash, mark.generation) == ("shuffle, seed 7", found, 2)
    assert found != log.generations[1].weights_hash and json.loads((to / "evoalign.json").read_text())["journal"]
    page = (to / "README.md").read_text()
    assert "Not the result of a run" in page and "shuffle, seed 7" in page and found in page
    with pytest.raises(CheckpointError, match=r"a counterfactual \(shuffle, seed 7\), and not a mean of the run"):
        saving.checked(to, log)
    with pytest.raises(RunExistsError, match="not empty"):
        evoalign.replay(log.path, counterfactual="flip", to=to)
    own = tmp_path / "own"  # a mean of the run itself has no such word
    evoalign.replay(log.path, to=own)
    assert "counterfactual" not in json.loads((own / "evoalign.json").read_text())
    assert not (own / "README.md").exists()
    saving.checked(own, log)


@pytest.mark.parametrize("place", ["loras", "checkpoints"])
def test_a_counterfactual_is_not_laid_among_a_runs_own_means(plain, tmp_path, place):
    """It would take the place of one that is kept, and be the latest to be evaluated."""
    shutil.copytree(plain.path.parent, tmp_path / "run", dirs_exist_ok=True)
    to = tmp_path / "run" / place / "generation_0009"
    for lay in (lambda: evoalign.replay(tmp_path / "run", counterfactual="flip", to=to),
                lambda: next(counterfactuals(tmp_path / "run", "flip", to=to))):  # fmt: skip
        with pytest.raises(ConfigError, match=r"--to .*generation_0009 .*counterfactual"):
            lay()
    assert not to.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "es",
    [{"antithetic": True}, {"optimizer": "momentum", "decay": 0.2, "antithetic": True},
     {"shaping": "identity", "decay": 0.3, "learning_rate_schedule": "linear"}],
    ids=["pairs", "momentum and decay", "not centred"],
)  # fmt: skip
def test_shuffles_go_as_far_as_the_formula_says(es, tmp_path):
    """The mean square over shuffles, of some thousand numbers: noises that are nearly at right angles."""
    log = recorded(tmp_path / "journal.jsonl", config(layers=[1], population_size=16, **es))
    with follower(log) as found:
        distances = list[float]()
        for seed in range(12):
            found.follow(parse("shuffle", log, seed))
            distances.append(found.distance())
        formula = found.expected_distance()
        mean = dict(found.served.engine.state())
        assert moved(found.served, mean) == 0
    assert formula == pytest.approx(math.sqrt(np.mean(np.square(distances))), rel=0.05)


@pytest.mark.parametrize("antithetic", [False, True])
def test_the_formula_is_the_mean_over_all_shuffles(antithetic):
    """Gone through one by one, of coefficients whose mean is not 0: a single number has noise of one normal each."""
    layout = Layout((EvolvedTensor("w", (1,), "w", 2.0),), 0, "float32")
    members, c = population(4, antithetic=antithetic), (1.0, -0.5, 0.25, 2.0)
    squares = []
    pairs = [[x for pair in order for x in (pair if way else pair[::-1])]
             for order in itertools.permutations((c[:2], c[2:])) for way in (True, False)]  # fmt: skip
    for order in pairs if antithetic else itertools.permutations(c):
        weights = {}
        for member, value in zip(members, order, strict=True):
            weights[member.noise] = weights.get(member.noise, 0.0) + member.sign * value
        squares.append(sum(w * w for w in weights.values()))
    want = pytest.approx(math.sqrt(np.mean(squares)) * 0.3 / 4 * 2.0, rel=1e-12)
    update, still = Update(0, 0, members, c, 0.1, 0.3), Update(1, 1, members, (0.0,) * 4, 0.1, 0.3)
    for updates in ([update], [update, still]):
        assert expected_distance(updates, layout, config().es) == want


def test_the_formula_is_that_of_a_random_walk(plain):
    """alpha sqrt(d T / N) where rms(c) is 1, for members of their own noise; none with Adam."""
    with follower(plain) as found:
        layout, updates = found.served.layout, [g.update for g in plain.generations]
        walk = 0.03 * math.sqrt(layout.parameters * GENERATIONS / 6)
        assert found.expected_distance() == pytest.approx(walk, rel=1e-6)
    assert expected_distance(updates, layout, config(optimizer="adam").es) is None
