# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from evoalign import tokens
from evoalign.config import from_dict
from evoalign.engines.base import pairs_of
from evoalign.engines.transformers import TransformersEngine
from evoalign.report import progress
from evoalign.report.progress import Bar, Display
from evoalign.report.rows import metrics_row
from evoalign.report.watching import Watch, phase, stage, watched
from evoalign.rollouts import collect
from evoalign.types import MEAN_PLAN, Generation, Plan, Request, Rollout, Sampling, Update, population


class Clock:
    """Time that passes only when set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def generation(index: int, total: int, *, alike: bool = False, test: float | None = None) -> Generation:
    fitness = (-4.0, -1.0, -3.0, -2.0, 0.0)
    coefficients = (0.0,) * 5 if alike else (-1.0, 0.5, -0.5, 0.0, 1.0)
    update = Update(index, index, population(5), coefficients, 0.01, 0.005)
    scores = tuple((f,) for f in fitness)
    evaluation = None if test is None else {"reward": test}
    return Generation(index, total, fitness, scores, update, "00", 3000, 0.0, 0.0, {"rollout": 1.0}, evaluation)


def run(seconds: float, generations: list[Generation], total: int, **options: Any) -> str:
    clock, output = Clock(), io.StringIO()
    words = {name: options.pop(name) for name in ("unit", "still", "limit") if name in options}
    with Display(total, Console(file=output, **{"width": 40, **options}), clock=clock, **words) as display:
        for each in generations:
            clock.now += seconds
            display.update(metrics_row(each))
    return output.getvalue()


def plain(seconds: float, generations: list[Generation], total: int, **options: Any) -> list[str]:
    return run(seconds, generations, total, **options).splitlines()


def test_without_a_terminal_each_generation_is_one_plain_line() -> None:
    lines = plain(3.0, [generation(g, 4, alike=g == 1, test=-7.5 if g == 2 else None) for g in range(4)], 4)
    same = "mean reward -2  best 0  middle 60% -3.2 to -0.8"
    still, test = "generations without update", "test reward -7.5 (generation 3)"
    assert lines == [
        f"generation 1/4  {same}  {still} 0%  tokens/s 1,000  elapsed 0:00:03  left 0:00:09",
        f"generation 2/4  {same}  {still} 50%  tokens/s 1,000  elapsed 0:00:06  left 0:00:06",
        f"generation 3/4  {same}  {still} 33%  tokens/s 1,000  elapsed 0:00:09  left 0:00:03  {test}",
        f"generation 4/4  {same}  {still} 25%  tokens/s 1,000  elapsed 0:00:12  left 0:00:00  {test}",
    ]


def test_the_state_of_an_objective_is_shown_by_its_names() -> None:
    state = {"lambda": 0.8312345, "cost_average": -0.25}
    (line,) = plain(3.0, [dataclasses.replace(generation(0, 2), objective=state)], 2)
    assert "middle 60% -3.2 to -0.8  lambda 0.8312  cost_average -0.25  generations without update" in line
    (line,) = plain(3.0, [dataclasses.replace(generation(0, 2), objective={f"s{i}": i for i in range(9)})], 2)
    assert "s3 3" in line and "s4" not in line


def test_time_left_ends_at_the_limit_of_the_run() -> None:
    (line,) = plain(5.0, [generation(89, 100)], 100, limit=21.0)
    assert "left 0:00:20" in line, "the row took 1 s of the 21"


def test_fast_generations_do_not_flood_a_log_but_first_last_and_evaluations_are_there() -> None:
    lines = plain(0.1, [generation(g, 100, test=-1.0 if g == 41 else None) for g in range(100)], 100)
    shown = [int(line.split()[1].split("/")[0]) for line in lines]
    assert {1, 42, 100} <= set(shown)
    assert len(shown) < 12


def test_time_left_counts_the_rest_of_a_resumed_run() -> None:
    (line,) = plain(5.0, [generation(89, 100)], 100)
    assert line.startswith("generation 90/100") and "elapsed 0:00:05  left 0:00:50" in line
    assert plain(1.0, [], 5) == []


def test_on_a_terminal_it_shows_the_same_figures_live() -> None:
    generations = [generation(g, 2, test=-7.5) for g in range(2)]
    text = run(3.0, generations, 2, force_terminal=True, width=80, color_system=None)
    for word in (
        "generation 1/2", "generation 2/2", "mean reward -2", "best 0", "middle 60% -3.2 to -0.8", "tokens/s 1,000",
        "generations without update 0%", "elapsed 0:00:06", "left 0:00:00", "test reward -7.5 (generation 2)", "━",
    ):  # fmt: skip
        assert word in text
    assert "\x1b[?25h" in text, "the cursor is shown again at the end"
    output = io.StringIO()
    with pytest.raises(RuntimeError, match="broken"), Display(3, Console(file=output, force_terminal=True, width=80)):
        raise RuntimeError("broken")
    assert "\x1b[?25h" in output.getvalue(), "and after an error"


def test_a_method_has_its_own_word_for_rows_without_variance() -> None:
    text = run(1.0, [generation(0, 1, alike=True)], 1, unit="step", still="steps with equal rewards")
    assert "step 1/1" in text and "steps with equal rewards 100%" in text


def test_values_of_splits_say_after_which_step_they_were_measured() -> None:
    output = io.StringIO()
    with Display(3, Console(file=output, width=40), unit="step") as display:
        for g, validation, test in ((0, None, {"reward": 0.432}), (1, {"reward": 0.5}, None), (2, None, None)):
            display.update({**metrics_row(generation(g, 3)), "evaluation": test, "validation": validation})
    assert output.getvalue().splitlines()[-1].endswith("validation reward 0.5 (step 2)  test reward 0.432 (step 1)")


# --- inside a generation, an evaluation, a probe --------------------------------------------------------------------


class Slow:
    """An engine whose answers each take a second of the clock; `look` is called before each."""

    def __init__(self, clock: Clock, look: Callable[[], None]) -> None:
        self.clock, self.look = clock, look

    def rollout(self, plan: Plan, asked: Sequence[Request]) -> Iterator[Rollout]:
        for member, request in pairs_of(plan.members, asked):
            self.look()
            self.clock.now += 1.0
            yield Rollout(member, request.index, (1, 2, 3), "a", "stop")


def ask(engine: Any, members: int = 2, requests: int = 2) -> None:
    collect(engine, Plan(0, 0.1, population(members)), [Request(i, (1,), Sampling(3)) for i in range(requests)])


def test_the_door_to_an_engine_tells_how_far_it_is_and_what_the_same_took_before() -> None:
    clock, seen = Clock(), list[tuple[Any, ...]]()
    watch = Watch(clock)
    ask(Slow(clock, lambda: None))
    assert watch.work is None and clock.now == 104.0, "unwatched work is counted nowhere"

    def look() -> None:
        work = watch.work
        assert work is not None
        seen.append((work.phase, work.done, work.total, work.tokens, work.left(clock.now)))

    with watched(watch):
        ask(Slow(clock, look))
        ask(Slow(clock, look))
    first, again = seen[:4], seen[4:]
    assert first == [("answering", n, 4, 3 * n, left) for n, left in enumerate((None, 3.0, 2.0, 1.0))]
    assert [row[-1] for row in again] == [4.0, 3.0, 2.0, 1.0], "before the first answer, too"
    assert watch.work is None


def test_a_phase_within_a_phase_and_an_error_leave_what_was_around() -> None:
    watch = Watch(Clock())
    with watched(watch), phase("updating"):
        with pytest.raises(RuntimeError, match="broken"), phase("scoring", 3):
            assert watch.work is not None and watch.work.phase == "scoring"
            raise RuntimeError("broken")
        assert watch.work is not None and watch.work.phase == "updating"
    with watched(Watch()), watched(watch) as told:
        assert not told


def test_inside_a_generation_a_terminal_shows_completions_speed_and_time_left() -> None:
    clock, output = Clock(), io.StringIO()
    console = Console(file=output, force_terminal=True, width=150, color_system=None)
    with Display(3, console, clock=clock) as display:
        ask(Slow(clock, display.refresh))
        with phase("updating"):
            display.refresh()
    text = output.getvalue()
    assert "generation 0/3" in text and "answering 0/4" in text
    assert "answering 3/4  tokens/s 3  about 0:00:01 more" in text
    assert "updating" in text


def test_a_log_gets_a_line_a_minute_and_nothing_for_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.05)
    clock, output = Clock(), io.StringIO()
    told = threading.Event()

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            told.set()
            return output.write(text)

    with Display(3, Console(file=Told(), width=40), clock=clock):
        assert not told.wait(0.2), "the clock stands"
        clock.now += 64.0
        with phase("scoring"):
            assert told.wait(10)
    assert output.getvalue().splitlines()[0] == "generation 1/3  scoring  elapsed 0:01:04"


def test_an_evaluation_or_a_probe_has_a_bar_of_its_own_that_goes_away() -> None:
    clock, output = Clock(), io.StringIO()
    console = Console(file=output, force_terminal=True, width=150, color_system=None)
    with Bar("probe", console, clock=clock) as bar:
        stage("width", 2, 4)
        ask(Slow(clock, bar.refresh))
        with Bar("within", console):
            bar.refresh()
    text = output.getvalue()
    assert "probe: width 2/4" in text and "answering 2/4  tokens/s 3  elapsed 0:00:02  left 0:00:03" in text
    assert "within" not in text and text.endswith("\x1b[2K"), "erased"


def test_a_bar_prints_into_a_log_what_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.02)
    clock, output = Clock(), io.StringIO()
    with Bar("evaluating runs/[a]", Console(file=output, width=40), clock=clock), phase("answering", 8) as work:
        work.done, work.tokens, clock.now = 2, 600, 160.0
        line = "evaluating runs/[a]: answering 2/8  tokens/s 10  elapsed 0:01:00  left 0:03:00"
        deadline = time.monotonic() + 10
        while line not in output.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert line in output.getvalue().splitlines()


def test_watching_costs_next_to_nothing() -> None:
    """Of 50,000 completions: a count each, less than a thousandth of what even the tiny model takes for one."""

    class Ready:
        def rollout(self, plan: Plan, asked: Sequence[Request]) -> Iterator[Rollout]:
            return (Rollout(m, r.index, (1,), "a", "stop") for m, r in pairs_of(plan.members, asked))

    def seconds() -> float:
        start = time.process_time()
        ask(Ready(), 20, 500)
        return time.process_time() - start

    alone = min(seconds() for _ in range(3))
    with watched(Watch()):
        beside = min(seconds() for _ in range(3))
    assert beside - alone < 10_000 * 5e-6


def test_the_engine_in_process_answers_row_by_row_as_each_ends() -> None:
    """Not all of a batch at its end: what is short is there before what is long."""
    config = from_dict({"es": {"sigma": 0.01}, "model": {"name": "tiny"}, "engine": {"threads": 1}})
    tokens_ = tokens.load(config.model)
    engine = TransformersEngine(config, tokens_)
    try:
        asked = [Request(i, tokens_.encode(text), Sampling(60)) for i, text in enumerate(("Is ice cold?", "Why?", "3"))]
        lengths = [len(rollout.token_ids) for rollout in engine.rollout(MEAN_PLAN, asked)]
    finally:
        engine.close()
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
