# SPDX-License-Identifier: Apache-2.0
"""`task.settings`: discrete settings that are searched together with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from evoalign.config.base import Section
from evoalign.config.decoding import SamplingConfig
from evoalign.config.outside import INSIDE
from evoalign.errors import shown

DECODING = ("max_tokens", "temperature", "top_p")
"""Settings of these names change the sampling; all others are columns of the rows."""
PROMPT = "{prompt}"
"""Stands for the row's own prompt in an option of a text setting."""
PREFIX = "settings/"
"""Prefix of the logits in the recorded state: `settings/NAME/INDEX`."""
TAKEN = frozenset({"prompt", "prompts", "completion", "completions", "text", "example", "environments"})
"""Names of other arguments of reward functions."""
MOST = 10**9
"""Limit on the combinations of options, and on a number that is an option."""

Whole = Annotated[int, Field(ge=-MOST, le=MOST)]
Number = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]
Option: TypeAlias = bool | Whole | Number | str
Options = Annotated[list[Option], Field(min_length=1, max_length=1000)]
Chosen: TypeAlias = Mapping[str, Any]
"""One option of each setting, by name."""


class SettingConfig(Section):
    """Options of one setting: exactly one of the three lists. A single option is fixed."""

    categorical: Annotated[Options | None, INSIDE] = Field(default=None, exclude_if=lambda value: value is None)
    """Options without an order. `style: [a, b]` is short for `style: {categorical: [a, b]}`."""
    ordinal: Annotated[Options | None, INSIDE] = Field(default=None, exclude_if=lambda value: value is None)
    """Options in their order, such as temperatures: a good one also makes those next to it more likely."""
    text: Annotated[list[str] | None, INSIDE] = Field(
        default=None, min_length=1, max_length=1000, exclude_if=lambda value: value is None
    )
    """Forms of the prompt. Each has `{prompt}` where the row's own prompt goes."""

    @model_validator(mode="after")
    def _one_list(self) -> SettingConfig:
        given = [n for n in ("categorical", "ordinal", "text") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError("write a list of options, {ordinal: [...]} or {text: [...]}")
        if len({(type(option), option) for option in self.options}) < len(self.options):
            raise ValueError(f"the options {shown(self.options)} repeat one; name each once")
        for option in self.text or ():
            if PROMPT not in option:
                raise ValueError(f"the text {shown(option)} has no {PROMPT}; write it where the row's prompt goes")
        return self

    @property
    def kind(self) -> Literal["categorical", "ordinal", "text"]:
        """Name of the list that is set."""
        return "categorical" if self.categorical is not None else "ordinal" if self.ordinal is not None else "text"

    @property
    def options(self) -> list[Any]:
        """The list that is set."""
        return getattr(self, self.kind)


def _listed(value: object) -> object:
    return {"categorical": value} if isinstance(value, list) else value


Name = Annotated[str, Field(pattern=r"^[A-Za-z]\w{0,63}$")]
SettingsConfig = dict[
    Name, Annotated[SettingConfig, BeforeValidator(_listed, json_schema_input_type=list[Option] | SettingConfig)]
]


def refusal(settings: Mapping[str, SettingConfig], most: int, repeats: bool, draws: int | None) -> str | None:
    """Return why settings cannot be searched, or None.

    `most` is the limit of `max_tokens`, `repeats` whether prompts have several completions, which a temperature of 0
    would only repeat, and `draws` the number of independent draws of a generation, None without ES.
    """
    count = 1
    for name, setting in settings.items():
        count *= len(setting.options)
        if name in TAKEN:
            return f"task.settings.{name} is the name of another argument of reward functions; rename it"
        for option in setting.options if name in DECODING else ():
            try:
                found = SamplingConfig.model_validate({name: option}, strict=True)
            except ValidationError as error:
                return f"task.settings.{name}: {shown(option)}: {error.errors()[0]['msg']}"
            if name == "max_tokens" and found.max_tokens > most:
                return (
                    f"task.settings.max_tokens: {option} exceeds sampling.max_tokens or evaluation.max_tokens, {most}"
                )
            if name == "temperature" and found.temperature == 0 and repeats:
                return "task.settings.temperature 0 repeats a greedy completion; remove it, or samples and seeds"
    if count > MOST:
        return f"task.settings has {count:,} combinations, and at most {MOST:,} can be indexed; use fewer options"
    if count > 1 and draws is not None and draws < 2:
        return f"task.settings needs two draws to compare, and es.population_size makes {draws}; raise it"
    return None


def likeliest(settings: Mapping[str, SettingConfig], state: Mapping[str, float]) -> dict[str, Any]:
    """Return the likeliest option of each setting by a recorded state; without one, the first option."""
    found: dict[str, Any] = {}
    for name, setting in settings.items():
        logits = [state.get(f"{PREFIX}{name}/{k}", 0.0) for k in range(len(setting.options))]
        found[name] = setting.options[logits.index(max(logits))]
    return found
