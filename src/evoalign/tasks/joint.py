# SPDX-License-Identifier: Apache-2.0
"""Joint search over the weights and the discrete settings of a task (`task.settings`).

Each setting has a categorical distribution, softmax of its logits. Member i draws an option x_i by counter noise, and
the logits move by the score-function gradient (REINFORCE) with the coefficients c_i that move the weights and the
leave-one-out baseline of Kool et al. (2019, "Buy 4 REINFORCE samples, get a baseline for free!"), which is unbiased:

    logit_k += settings_learning_rate / (N - 1) * sum over i with x_i = k of (c_i - mean of c)

The two members of an antithetic pair share their draw, so that what a setting is worth cancels in the difference that
moves the weights, and what the noise is worth cancels, to first order, in the sum that moves the logits. N then counts
pairs. An ordinal setting has adjacent-category logits (Agresti, Categorical Data Analysis, section 8.3): the difference
of two neighbours moves by the gradient of all options above it, divided by the number of neighbours.

The probabilities are rounded from the decimal module's exponential, which is exactly rounded, sums are `math.fsum`: the
draws depend on no machine. The state is a function of the journal's lines, which record it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, cast, overload

import torch

from evoalign import noise
from evoalign.config import Config
from evoalign.config.joint import PREFIX, PROMPT, Chosen, SettingConfig
from evoalign.errors import DataError, ResumeError, shown
from evoalign.tasks.base import Data
from evoalign.types import Example, Member, Update

SPAN = 4.0
"""Largest difference of two logits. No option becomes less likely than 1/55 of the likeliest one, so that one which is
better only after training can still be found."""
_EXACT = Context(prec=40)


class Settings:
    """Distribution over the settings of a run. A combination of options has a number; that of all first options is 0.

    Without settings, there is one combination, which changes nothing.
    """

    def __init__(self, settings: Mapping[str, SettingConfig] | None = None, seed: int = 0, rate: float = 1.0) -> None:
        self.settings, self._seed, self._rate = dict(settings or {}), seed, rate
        self.logits = {name: [0.0] * len(setting.options) for name, setting in self.settings.items()}

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return those of a config, at the start of a run."""
        rate = 1.0 if config.es_ is None else config.es_.settings_learning_rate
        return cls(config.task.settings, config.seed, rate)

    def __bool__(self) -> bool:
        return bool(self.settings)

    @property
    def state(self) -> dict[str, float]:
        """Logits under the names that the journal records."""
        return {f"{PREFIX}{name}/{k}": x for name, logits in self.logits.items() for k, x in enumerate(logits)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the state that a run recorded. Raises ResumeError for the state of other settings."""
        if state.keys() != self.state.keys():
            raise ResumeError(
                f"task.settings has the state {', '.join(self.state) or 'none'}, but the run recorded "
                f"{', '.join(state) or 'none'}; resume with the settings of the run"
            )
        for name, logits in self.logits.items():
            logits[:] = [state[f"{PREFIX}{name}/{k}"] for k in range(len(logits))]

    def probabilities(self, name: str) -> list[float]:
        """Return the probability of each option of a setting."""
        weights = [_EXACT.exp(Decimal(x)) for x in self.logits[name]]
        total = weights[0]
        for weight in weights[1:]:
            total = _EXACT.add(total, weight)
        return [float(_EXACT.divide(weight, total)) for weight in weights]

    def draw(self, generation: int, members: Sequence[Member]) -> list[int]:
        """Return the number of the combination that each member draws."""
        numbers, size = [0] * len(members), 1
        streams = torch.tensor([m.noise for m in members], dtype=torch.int64)
        for name, setting in self.settings.items():
            uniform = noise.uniforms(noise.key(self._seed, "settings", name), torch.tensor(generation), streams)
            limits = [math.fsum(self.probabilities(name)[: k + 1]) for k in range(len(setting.options) - 1)]
            for i, u in enumerate(uniform.tolist()):
                numbers[i] += size * sum(u >= limit for limit in limits)
            size *= len(setting.options)
        return numbers

    def mode(self) -> int:
        """Return the number of the combination of the likeliest options, the first ones at a tie."""
        found, size = 0, 1
        for logits in self.logits.values():
            found += size * logits.index(max(logits))
            size *= len(logits)
        return found

    def chosen(self, number: int) -> Chosen:
        """Return the options of a combination, by setting."""
        return {name: self.settings[name].options[k] for name, k in self._places(number).items()}

    def _places(self, number: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, setting in self.settings.items():
            number, found[name] = divmod(number, len(setting.options))
        return found

    def move(self, update: Update) -> None:
        """Move the logits by the coefficients of a generation."""
        drawn = self.draw(update.generation, update.members)
        of_noise: dict[int, list[float]] = {}
        number_of: dict[int, int] = {}
        for member, c, number in zip(update.members, update.coefficients, drawn, strict=True):
            of_noise.setdefault(member.noise, []).append(c)
            number_of[member.noise] = number
        units = {n: math.fsum(c) / len(c) for n, c in of_noise.items()}
        total, count = math.fsum(units.values()), len(units)
        if count < 2:
            return  # there is nothing to compare with
        for name, logits in self.logits.items():
            places = {n: self._places(number)[name] for n, number in number_of.items()}
            of_option = [[c for n, c in units.items() if places[n] == k] for k in range(len(logits))]
            # Exactly 0 for an option that no unit drew, or all.
            gradient = [(count * math.fsum(some) - len(some) * total) / (count * (count - 1)) for some in of_option]
            if self.settings[name].kind == "ordinal" and len(logits) > 1:
                above = [math.fsum(gradient[k + 1 :]) for k in range(len(logits) - 1)]
                gradient = [math.fsum(above[:k]) / len(above) for k in range(len(logits))]
            moved = [x + self._rate * g for x, g in zip(logits, gradient, strict=True)]
            logits[:] = [max(x - max(moved), -SPAN) for x in moved]

    def lines(self) -> list[str]:
        """Return the likeliest option of each setting in words."""
        chosen = self.chosen(self.mode())
        return [
            f"setting {name}: {shown(option)}, which members draw with probability "
            f"{max(self.probabilities(name)):.2f} of {len(self.logits[name])} options"
            for name, option in chosen.items()
        ]

    def under(self, examples: Sequence[Example], number: int | None = None) -> Sequence[Example]:
        """Return the rows under one combination; None: all rows under combination 0, then under 1, and so on."""
        rows = examples.rows if isinstance(examples, Settled) else examples
        every = range(math.prod(map(len, self.logits.values())))
        return Settled(rows, self, every if number is None else every[number : number + 1]) if self else rows

    def split(self, data: Data, number: int) -> Data:
        """Return all splits under one combination."""
        return Data(*(self.under(rows, number) for rows in (data.train, data.test, data.validation)))

    def longest(self, length: Callable[[int], int]) -> int:
        """Return the number of the combination of the options that are longest, each with the others' first ones.

        `length` takes the number of a combination.
        """
        found, size = 0, 1
        for setting in self.settings.values():
            lengths = [length(k * size) for k in range(len(setting.options))]
            found += size * lengths.index(max(lengths))
            size *= len(lengths)
        return found

    def asked(self, examples: Sequence[Example], rows: Sequence[int], drawn: Sequence[Chosen]) -> Sequence[Example]:
        """Return the examples of these rows, with settings under those of each member in turn."""
        if not isinstance(examples, Settled):
            return [examples[row] for row in rows]
        return [self.row(examples.rows[row], chosen) for chosen in drawn for row in rows]

    def row(self, example: Example, chosen: Chosen) -> Example:
        """Return a row with its settings as columns, and its prompt in the form of the text settings.

        Raises DataError for a column of that name, and for a text setting of rows without a prompt.
        """
        taken = chosen.keys() & example.keys()
        if taken:
            raise DataError(f"task.settings.{min(taken)} is also a column of the data; rename the setting")
        row: dict[str, Any] = {**example, **chosen}
        for form in (str(chosen[name]) for name, setting in self.settings.items() if setting.kind == "text"):
            row["prompt"] = _worded(row.get("prompt"), form)
        return row


def _worded(prompt: Any, form: str) -> Any:
    """Return a prompt in a form of text: a string, or messages with the last one of the user in that form."""
    if isinstance(prompt, str):
        return form.replace(PROMPT, prompt)
    messages = cast("list[dict[str, str]]", prompt or [])
    last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
    if last is None:
        raise DataError(
            "a text setting of task.settings changes the column prompt, which rows of task.name custom have and this "
            "task's do not; remove the setting, or use custom"
        )
    worded = {**messages[last], "content": form.replace(PROMPT, messages[last]["content"])}
    return [*messages[:last], worded, *messages[last + 1 :]]


class Settled(Sequence[Example]):
    """Rows under several combinations of settings, made at access: rows may be on disk."""

    def __init__(self, rows: Sequence[Example], settings: Settings, numbers: range) -> None:
        self.rows, self._settings, self._numbers = rows, settings, numbers

    def __len__(self) -> int:
        return len(self.rows) * len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...
    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        number, row = divmod(range(len(self))[place], len(self.rows))  # raises IndexError beyond the end
        return self._settings.row(self.rows[row], self._settings.chosen(self._numbers[number]))
