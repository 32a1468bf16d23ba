# SPDX-License-Identifier: Apache-2.0
"""Requests of a generation, the completions of an engine, and their rewards as groups of columns."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from evoalign.config import Config, SamplingConfig
from evoalign.config.joint import Chosen
from evoalign.engines import Engine
from evoalign.engines.base import Answering, pairs_of
from evoalign.episodes import Given, LostError, Turns, checked, derive_seed
from evoalign.errors import ConfigError
from evoalign.gateway.player import Harnesses
from evoalign.report import watching
from evoalign.rewards.objective import Columns, Group, Objective, grouped, judge
from evoalign.rundir.journal import Journal
from evoalign.tasks.base import Data, Task
from evoalign.tasks.grading import Answers, Grading, scored
from evoalign.tasks.harness import Harness
from evoalign.tasks.joint import Settings
from evoalign.tasks.likelihood import Likelihood
from evoalign.tokens import Tokens
from evoalign.transcripts import spoken
from evoalign.types import MEAN_PLAN, Episode, Example, Plan, Player, Prompt, Request, Rollout, Sampling, Update

__all__ = [
    "Answered", "Clock", "Encoded", "LostError", "Run", "alone", "ask", "batch", "collect", "columns_of",
    "columns_taken", "derive_seed", "group_of", "lengths_of", "places_of", "prompts_hash", "requests_of",
    "requests_of_members", "rewards_of", "rows_of",
    "sampling_of", "scores_of", "typical", "with_mean",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Parts of a run that the loop uses. `objective` and `settings` are in the state of the first generation.

    `evaluate_mean` returns the measures of the mean, every `evaluation.every` generations; None: it is not evaluated.
    `plateaus` returns the number of plateaus so far. Raises ConfigError for `es.sigma_schedule` plateau without it.
    """

    config: Config
    task: Task
    examples: Sequence[Example]
    engine: Engine
    tokens: Tokens
    journal: Journal
    objective: Objective
    evaluate_mean: Callable[[], Mapping[str, float] | None] | None = None
    plateaus: Callable[[], int] | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def state(self) -> dict[str, float]:
        """State of the objective and of the settings, for the journal."""
        return {**self.objective.state, **self.settings.state}

    def moved_by(self, update: Update) -> dict[str, float]:
        """Move the settings by an update, and return the state after it."""
        self.settings.move(update)
        return self.state

    def __post_init__(self) -> None:
        if self.plateaus is None and self.config.es.sigma_schedule.name == "plateau":
            raise ConfigError("es.sigma_schedule plateau follows the validation split: use evoalign.train")


@dataclass(frozen=True, slots=True)
class Answered:
    """Completions of a generation, and their rewards. `mean`: those of the unperturbed model, if the objective asks.

    `settings` are those that each member drew, and `places` the places in `Settings.under` of the examples of each
    member in turn; without settings, the rows that all members share.
    """

    group: Group
    rollouts: Sequence[Rollout]
    mean: Sequence[Rollout]
    places: Sequence[int]
    settings: tuple[Chosen, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of completion tokens, those of the mean included."""
        return sum(len(r.token_ids) for r in (*self.rollouts, *self.mean))

    @property
    def empty_share(self) -> float:
        """Share of the members' completions that are empty or white space."""
        return float(np.mean([not spoken(r.text).strip() for r in self.rollouts]))

    @property
    def truncated_share(self) -> float:
        """Share of the members' completions that ended at the token limit."""
        return float(np.mean([r.finish_reason == "length" for r in self.rollouts]))


class Clock:
    """Wall seconds of each phase of a generation."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        """Begin a generation. Time since the last mark, such as the caller's drawing of figures, is its `other`."""
        self.seconds = {}
        self.mark("other")

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to a phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def ask(run: Run, plan: Plan, requests: Sequence[Request], rows: Sequence[int], clock: Clock) -> Answered:
    """Let every member of a plan answer every request, and score the completions as they come.

    `rows` are the examples of the requests. Marks the phase `rollout`; the scoring that is left is in the next phase.
    Raises LostError, RewardError.
    """
    task, members = run.task, len(plan.members)
    places = places_of(run, plan, rows)
    with Grading(task, run.settings.under(run.examples)) as graded:
        answers, of_mean = graded.of(places), graded.of(rows)
        rollouts = collect(run.engine, plan, requests, answers.take)
        mean = collect(run.engine, MEAN_PLAN, requests, of_mean.take) if run.objective.asks_mean else []
        clock.mark("rollout")
        examples = [run.examples[row] for row in rows]
        group = group_of(task, examples, rollouts, members, plan.generation, answers)
        group = with_mean(task, group, mean, of_mean) if mean else group
    if not run.settings:
        return Answered(group, rollouts, mean, rows)
    drawn = map(run.settings.chosen, run.settings.draw(plan.generation, plan.members))
    return Answered(group, rollouts, mean, places, tuple(drawn))


def collect(
    engine: Answering, plan: Plan, requests: Sequence[Request], take: Callable[[int, Rollout], None] | None = None
) -> list[Rollout]:
    """Return all completions of a plan, ordered by member and then by request. All text of an engine comes from here.

    A request with an episode yields the whole episode as one rollout. `take` is called with (position in that order,
    rollout) as each arrives. Raises LostError for a completion that is missing or was not requested.
    """
    wanted = [(m.index, r.index) for m, r in pairs_of(plan.members, requests)]
    places = {key: place for place, key in enumerate(wanted)}
    found: dict[tuple[int, int], Rollout] = {}
    with watching.phase("answering", len(wanted)) as work:
        for rollout in checked(_played(engine, plan, requests), plan.members, requests):
            key = (rollout.member.index, rollout.request)
            found[key] = rollout
            work.done += 1
            work.tokens += len(rollout.token_ids)
            if take is not None:
                take(places[key], rollout)
    return [found[key] for key in wanted]


def _played(engine: Answering, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
    """Yield the completions of the requests without an episode, then the episodes of each player."""
    players: dict[Player | None, list[Request]] = {}
    for request in requests:
        players.setdefault(request.episode and request.episode.player, []).append(request)
    for player, some in players.items():
        yield from engine.rollout(plan, some) if player is None else player.play(engine, plan, some)


def sampling_of(settings: SamplingConfig) -> Sampling:
    """Return the sampling parameters of a config section."""
    return Sampling(
        settings.max_tokens, settings.temperature, settings.top_p, tuple(settings.stop), bool(settings.keep_stop)
    )


def columns_of(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
    """Return the reward columns of completions, one text per example. Raises RewardError."""
    with watching.phase("scoring"):
        return scored(task, texts, examples)


def columns_taken(answers: Answers) -> Columns:
    """Return the reward columns of completions that `answers` took as they arrived. Raises RewardError."""
    with watching.phase("scoring"):
        return answers.columns()


def rewards_of(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """Return the weighted sum of the reward columns, one per completion. Raises RewardError."""
    return task.weighted.rewards(columns_of(task, texts, examples), texts, examples)


def scores_of(objective: Objective, columns: Columns, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """Return an objective's scores of the completions of one policy, in its present state."""
    return judge(objective, alone(objective, columns, texts, examples))[0].tolist() if texts else []


def alone(
    objective: Objective, columns: Columns, texts: Sequence[str], examples: Sequence[Example], generation: int = 0
) -> Group:
    """Return the completions of one unperturbed policy as a group of one member, which is also the group's `mean`."""
    group = grouped(columns, texts, examples, generation)
    return replace(group, mean=group) if objective.asks_mean else group


def batch(total: int, size: int | None, seed: int, generation: int) -> list[int]:
    """Return the rows of a generation: all, or `size` of them from epochs shuffled by the seed, each once per epoch."""
    if size is None or size >= total:
        return list(range(total))
    rows: list[int] = []
    position = generation * size
    while len(rows) < size:
        epoch, offset = divmod(position + len(rows), total)
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(total)
        rows += [int(i) for i in order[offset : offset + size - len(rows)]]
    return rows


EARLY = 10_000
"""Splits of at most this many prompts are tokenised before the first request, so that an invalid prompt fails early."""


TYPICAL = 200
"""Prompts of each split whose rendering is checked and hashed."""


class Encoded(dict[int, tuple[int, ...]]):
    """Token ids of a split's prompts by row; those of a large split are encoded at first use. Raises ModelError.

    `rendered` has the text of the chat template by row, of those that are messages. `request` makes requests of rows,
    which begin an episode if the task has several turns.
    """

    def __init__(self, task: Task, tokens: Tokens, examples: Sequence[Example]) -> None:
        super().__init__()
        self._task, self._tokens, self._examples = task, tokens, examples
        self.rendered = dict[int, str]()
        self._player = _player_of(task, tokens)
        if len(examples) <= EARLY:
            self.update((row, self[row]) for row in range(len(examples)))

    def __missing__(self, row: int) -> tuple[int, ...]:
        if isinstance(self._player, Harnesses):
            return self.setdefault(row, ())  # the harness writes all prompts
        prompt = self._task.prompt(self._examples[row])
        self[row], text = self._tokens.encode_read(prompt, self._task.tools)
        if not isinstance(prompt, str):
            self.rendered[row] = text
        elif isinstance(self._player, Turns):
            raise ConfigError(
                f"task {self._task.name} has several turns, so its prompts are messages; set task.prompt: chat"
            )
        return self[row]

    def request(self, index: int, row: int, sampling: Sampling, seed: int) -> Request:
        """Return a request of a row from every member."""
        episode = None if self._player is None else Episode(self._player, self._examples[row])
        return Request(index, self[row], sampling, seed, episode=episode)


def _player_of(task: Task, tokens: Tokens) -> Player | None:
    """Return the player of a task's episodes; None: a completion is all."""
    if not task.player:
        return None
    if task.player == "given":
        return Given(cast(Likelihood, task.inside), tokens)
    return Turns(task, tokens) if task.player == "turns" else Harnesses(cast(Harness, task.inside), tokens)


def lengths_of(task: Task, tokens: Tokens, examples: Sequence[Example]) -> list[int]:
    """Return the prompts' lengths in tokens. For a large split they are estimated from evenly spaced rows."""
    step = -(-len(examples) // EARLY)
    known = [len(tokens.encode(task.prompt(example), task.tools)) for example in examples[::step]]
    return [known[row // step] for row in range(len(examples))]


def typical(task: Task, data: Data) -> list[Prompt]:
    """Return evenly spaced prompts of each split, and the first one of each order of roles."""
    found = [task.prompt(e) for split in (data.train, data.validation, data.test) for e in _spaced(split)]
    roles = {_roles(prompt) for prompt in found}
    for prompt in map(task.prompt, data.all):
        if _roles(prompt) not in roles:
            roles.add(_roles(prompt))
            found.append(prompt)
    return found


def prompts_hash(task: Task, data: Data, tokens: Tokens) -> str | None:
    """Return the SHA-256 of the token ids of `typical` prompts of messages; None if all are text.

    A chat template may change with the release of transformers, or with the day.
    """
    digest, chats = hashlib.sha256(), [p for p in typical(task, data) if not isinstance(p, str)]
    for chat in chats:
        digest.update(json.dumps(tokens.encode(chat, task.tools)).encode())
    return digest.hexdigest() if chats else None


def _spaced(examples: Sequence[Example]) -> Sequence[Example]:
    step = max(1, -(-len(examples) // TYPICAL))
    return [examples[row] for row in range(0, len(examples), step)]


def _roles(prompt: Prompt) -> tuple[str, ...]:
    return () if isinstance(prompt, str) else tuple(message["role"] for message in prompt)


def rows_of(config: Config, total: int, generation: int) -> list[int]:
    """Return the rows of a generation's batch, one per request: each `task.samples` times in a row."""
    chosen = batch(total, config.task.batch_size, config.seed, generation)
    return [row for row in chosen for _ in range(config.task.samples or 1)]


def group_of(
    task: Task,
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    members: int,
    generation: int = 0,
    answers: Answers | None = None,
) -> Group:
    """Return the completions and rewards of all members, given the rollouts in the order of `collect`.

    `answers` took them as they arrived; None: they are scored now. Raises RewardError.
    """
    texts, repeated = [r.text for r in rollouts], [*examples] * members
    columns = columns_of(task, texts, repeated) if answers is None else columns_taken(answers)
    return grouped(columns, texts, examples, generation)


def with_mean(task: Task, group: Group, rollouts: Sequence[Rollout], answers: Answers | None = None) -> Group:
    """Add the unperturbed model's completions, in the order of the prompts, to a group."""
    return replace(group, mean=group_of(task, group.examples, rollouts, 1, group.generation, answers))


def places_of(run: Run, plan: Plan, rows: Sequence[int]) -> list[int]:
    """Return the place in `Settings.under` of the example of each completion, member by member."""
    drawn = run.settings.draw(plan.generation, plan.members)
    return [number * len(run.examples) + row for number in drawn for row in rows]


def requests_of_members(run: Run, plan: Plan, rows: Sequence[int], prompts: Encoded) -> list[Request]:
    """Return one request per row, or with settings one per member and row, with that member's prompt and sampling.

    `prompts` are those of `Settings.under`.
    """
    if not run.settings:
        return requests_of(run.config, rows, prompts, plan.generation)
    places, drawn = places_of(run, plan, rows), run.settings.draw(plan.generation, plan.members)
    configs = {number: run.config.decoded(run.settings.chosen(number)) for number in set(drawn)}
    return [
        replace(request, member=member)
        for i, (member, number) in enumerate(zip(plan.members, drawn, strict=True))
        for request in requests_of(
            configs[number], places[i * len(rows) : (i + 1) * len(rows)], prompts, plan.generation
        )
    ]


def requests_of(config: Config, rows: Sequence[int], prompts: Encoded, generation: int) -> list[Request]:
    """Return one request per row of the training examples. All members sample with the request's seed."""
    sampling = sampling_of(config.sampling)
    seeds = [derive_seed(config.seed, "training", generation, i) for i in range(len(rows))]
    return [prompts.request(i, row, sampling, seeds[i]) for i, row in enumerate(rows)]
