# SPDX-License-Identifier: Apache-2.0
"""Splits of PKU-SafeRLHF (Ji et al., arXiv 2406.15513) that share no prompt, and the selection of training rows.

A row has a `prompt`; files with responses also have `response_0`, `response_1` and a safety label for each. The two
labels make four groups: TT, both are safe; FF, neither; TF, only the first; FT, only the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from evoalign.config import Section, TaskConfig
from evoalign.config.outside import INSIDE
from evoalign.errors import ConfigError, DataError
from evoalign.rewards.functions import shown
from evoalign.tasks import data
from evoalign.tasks.base import Data
from evoalign.tasks.data.spool import taken
from evoalign.types import Example

LABELS = ("is_response_0_safe", "is_response_1_safe")
Group = Literal["TT", "FF", "FT", "TF"]
GROUPS: tuple[Group, ...] = get_args(Group)
PROTOCOLS: dict[str, dict[Group, float]] = {"published_250": {"TT": 100, "FF": 116, "FT": 19, "TF": 15}}
"""Shares of published selections. A file of exactly these amounts trains whole; of more rows, the seed draws."""
_TRUTHS = {True: True, False: False, "true": True, "false": False}
"""Values of a label; CSV files have text."""

Amount = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]


class Settings(Section):
    """Settings that only task safety has."""

    protocol: Literal["published_250"] | None = None
    """Predefined shares: `published_250` is 100 TT, 116 FF, 19 FT and 15 TF. Training data of exactly these rows are
    used whole, also rows whose prompt is in the test split."""
    shares: dict[Group, Amount] | None = None
    """Training rows by their two safety labels: counts, or fractions of `task.train_size` that add up to 1. Later
    configs and `--set` change single shares and keep the others; 0 removes one."""
    cut: Annotated[list[Annotated[str, Field(min_length=1)]] | None, INSIDE] = None
    """Texts at which a completion is cut before it is scored. None: the beginnings of a next turn if the prompt is a
    `conversation`, else none; an empty list scores the whole completion."""

    @field_validator("shares")
    @classmethod
    def _sound(cls, shares: dict[Group, float] | None) -> dict[Group, float] | None:
        if shares is None:
            return None
        kept: dict[Group, float] = {group: amount for group, amount in shares.items() if amount > 0}
        if not kept or not (_are_fractions(kept) or _are_counts(kept)):
            # The value of --set alone may be valid.
            raise ValueError(
                f"{_listed(shares)}, merged from all configs and --set, are neither whole counts nor fractions that "
                "add up to 1, such as {TT: 0.5, FF: 0.5}; to remove a share of an earlier config, set it to 0: TF: 0"
            )
        return kept


def select(
    config: TaskConfig, settings: Settings, seed: int, default: tuple[str, str | None] | None
) -> tuple[Data, list[str]]:
    """Return the splits of the config's files, and notes about them. Raises DataError, ConfigError.

    No prompt is in two splits: before the selection, training rows with a prompt of the validation or test split, and
    validation rows with a prompt of the test split, are removed. White space is ignored in the comparison. Training
    data that are the rows of a protocol stay whole, and validation rows with their prompts are removed instead.
    """
    wanted = counts(config, settings)
    whole = {} if wanted is None else {"train_size": None, "validation_size": None}
    if config.validation_data is not None:
        whole.pop("validation_size", None)

    def check(where: str, row: dict[str, Any]) -> Example:
        if "prompt" not in row:
            raise data.lacking(where, row, config, "no prompt", "prompt")
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise DataError(f"{where}: prompt is {shown(row['prompt'])}; expected a text")
        return row

    found = data.load(config.model_copy(update=whole), seed, check, default, "a column prompt")
    test = _prompts(found.test)
    is_whole = settings.protocol is not None and wanted is not None and _amounts(found.train) == wanted
    validation = _without(found.validation, test | (_prompts(found.train) if is_whole else set()))
    pool = found.train if is_whole else _without(found.train, test | _prompts(validation))
    others = "those of another split" if is_whole else "the test split's"
    dropped = (
        ("validation", len(found.validation) - len(validation), others),
        ("training", len(found.train) - len(pool), "those of another split"),
    )
    notes = [f"{n:,} {split} rows are left out: their prompts are also {others}" for split, n, others in dropped if n]
    if not pool:
        raise DataError("every training prompt is also a prompt of another split; use other files")
    gone = len(found.train) - len(pool)
    train = pool if wanted is None or is_whole else _stratified(pool, wanted, seed, settings.protocol, gone)
    if is_whole and (both := test & _prompts(pool)):
        rows = sum(_key(row) in both for row in pool)
        notes.append(
            f"protocol {settings.protocol} keeps {rows:,} training rows with {len(both):,} prompts of the test split, "
            f"which has {len(test):,}: as published, test measures are in part of training prompts"
        )
    if wanted is not None and config.validation_size is not None and config.validation_data is None:
        rest, size = _without(pool, _prompts(train)), config.validation_size
        if size > len(rest):
            raise DataError(
                f"task.validation_size is {size}, but only {len(rest)} rows with other prompts than the training rows "
                "are left; lower it, or set task.validation_data"
            )
        validation = taken(rest, sorted(data.random_state(seed).permutation(len(rest))[:size].tolist()))
    if wanted is not None:
        notes.append("training rows by their labels: " + ", ".join(f"{n} {group}" for group, n in wanted.items()))
    for split, rows in (("training", train), ("validation", validation), ("test", found.test)):
        distinct = len(_prompts(rows))
        if distinct < len(rows):
            notes.append(f"{len(rows):,} {split} rows have {distinct:,} different prompts: some repeat")
    return Data(train, found.test, validation), notes


def counts(config: TaskConfig, settings: Settings) -> dict[str, int] | None:
    """Return the number of training rows of each group, or None without a selection. Raises ConfigError."""
    if settings.protocol is not None and settings.shares is not None:
        raise ConfigError("task.protocol and task.shares both select training rows; set one of them")
    setting, shares = "task.shares", settings.shares
    if settings.protocol is not None:
        setting, shares = "task.protocol", PROTOCOLS[settings.protocol]
    if shares is None:
        return None
    if config.split == "first_last":
        raise ConfigError(f"{setting} and task.split first_last both select training rows; set one of them")
    if _are_counts(shares) and not (_are_fractions(shares) and config.train_size is not None):
        total = int(sum(shares.values()))
        if config.train_size not in (None, total):
            raise ConfigError(
                f"{setting} {_listed(shares)} is {total} rows, but task.train_size is {config.train_size}; leave it out"
            )
        return {group: int(shares[group]) for group in GROUPS if group in shares}
    total = config.train_size
    if total is None:
        raise ConfigError(f"{setting} {dict(shares)} are fractions; set task.train_size to the total number of rows")
    # Rounded to integers with this total by largest remainders; the earlier group wins a tie.
    exact = {group: shares[group] * total for group in GROUPS if group in shares}
    found = {group: int(value) for group, value in exact.items()}
    rest = sorted(exact, key=lambda group: found[group] - exact[group])
    return {group: n + (group in rest[: total - sum(found.values())]) for group, n in found.items()}


def _stratified(
    pool: Sequence[Example], wanted: Mapping[str, int], seed: int, protocol: str | None, gone: int
) -> Sequence[Example]:
    """Draw the wanted number of rows of each group by the seed, in file order. `gone`: rows left out of the pool."""
    places: dict[str, list[int]] = {group: [] for group in GROUPS}
    for place, row in enumerate(pool):
        places[_group(row)].append(place)
    short = [(group, n, len(places[group])) for group, n in wanted.items() if len(places[group]) < n]
    less = f" after {gone:,} rows with prompts of another split were left out" if gone else ""
    if short and protocol is not None:
        needs = ", ".join(f"{n} {group}" for group, n, _ in short)
        have = ", ".join(f"{there} {group}" for group, _, there in short)
        raise DataError(
            f"task.protocol {protocol} needs {needs}, but the training data have {have}{less}; use other data, or set "
            "task.shares instead"
        )
    if short:
        found = ", ".join(f"{there} {group} of {n}" for group, n, there in short)
        raise DataError(f"too few training rows: {found}{less}; lower task.shares or give more rows")
    random = data.random_state(seed)
    drawn = [random.permutation(len(places[group]))[:n] for group, n in wanted.items()]
    chosen = [places[group][int(i)] for group, picks in zip(wanted, drawn, strict=True) for i in picks]
    return taken(pool, sorted(chosen))


def _amounts(rows: Sequence[Example]) -> dict[str, int] | None:
    """Return the number of rows of each group, or None if one has no labels."""
    if not all(name in row for row in rows for name in LABELS):
        return None
    found = Counter(map(_group, rows))
    return {group: found[group] for group in GROUPS if group in found}


def _without(rows: Sequence[Example], prompts: Set[str]) -> Sequence[Example]:
    """Return the rows with none of the prompts."""
    places = [place for place, row in enumerate(rows) if _key(row) not in prompts]
    return rows if len(places) == len(rows) else taken(rows, places)


def _group(row: Example) -> str:
    """Return TT, FF, FT or TF. Raises DataError."""
    labels = list[bool]()
    for name in LABELS:
        value: Any = row.get(name)
        value = value.strip().lower() if isinstance(value, str) else value
        if not isinstance(value, bool | str) or value not in _TRUTHS:
            found = f"{name} {shown(row[name])}" if name in row else f"no {name}"
            raise DataError(
                f"a training row ({shown(row['prompt'])}) has {found}; task.shares and task.protocol need "
                f"{' and '.join(LABELS)}, true or false"
            )
        labels.append(_TRUTHS[value])
    return "".join("T" if label else "F" for label in labels)


def _key(row: Example) -> str:
    """Normalise the white space of a prompt."""
    return " ".join(row["prompt"].split())


def _prompts(rows: Sequence[Example]) -> set[str]:
    return set(map(_key, rows))


def _listed(shares: Mapping[Any, float]) -> str:
    return "{" + ", ".join(f"{group}: {amount:.10g}" for group, amount in shares.items()) + "}"


def _are_counts(shares: Mapping[Any, float]) -> bool:
    return all(float(value).is_integer() for value in shares.values())


def _are_fractions(shares: Mapping[Any, float]) -> bool:
    return abs(sum(shares.values()) - 1.0) < 1e-6
