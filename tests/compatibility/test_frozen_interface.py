# SPDX-License-Identifier: Apache-2.0
"""What was written against release 0.1.0 is still taken: names, calls, options. More may have come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from freezing import commands, describe, look_up, spellings

from evoalign.config.grpo import OF_TRL

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "interface.json").read_text())
ALIASES: dict[str, dict[str, Any]] = {
    "evoalign.config:GrpoConfig": OF_TRL,
    "evoalign.config:ModelConfig": {"trust_remote_code": False},
}
"""Parameters that are no longer fields and are taken as they were."""
RENAMED = {"evoalign.engines:Engine": {"sample": "probe_weights"}}
"""Methods that have another name now, under which the engines that are shipped answer to the old one, too."""
POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")


def missing(before: list[list[Any]], now: list[list[Any]]) -> list[str]:
    """The ways to call what took `before` that `now` refuses."""
    by_name = {name: (kind, required) for name, kind, required in now}
    kinds = {kind for kind, _ in by_name.values()}
    lost: list[str] = []
    for name, kind, required in before:
        if name not in by_name:
            lost += [] if "VAR_KEYWORD" in kinds and kind == "KEYWORD_ONLY" else [f"{name} is gone"]
        elif by_name[name][1] and not required:
            lost.append(f"{name} has to be given")
        elif kind == "POSITIONAL_OR_KEYWORD" and by_name[name][0] != kind:
            lost.append(f"{name} is {by_name[name][0]}")
    old = [name for name, kind, _ in before if kind in POSITIONAL]
    new = [name for name, kind, _ in now if kind in POSITIONAL]
    if not lost and new[: len(old)] != old:
        lost.append(f"the order was {old} and is {new}")
    known = {name for name, _, _ in before}
    return lost + [
        f"{name} is new and has to be given" for name, (_, must) in by_name.items() if must and name not in known
    ]


@pytest.mark.parametrize("name", FROZEN["python"])
def test_a_name_is_there_and_called_as_it_was(name: str) -> None:
    before, now = FROZEN["python"][name], describe(look_up(name))
    lost = missing(before.get("parameters", []), now.get("parameters", []))
    assert lost == [f"{alias} is gone" for alias in ALIASES.get(name, {})]
    for alias, value in ALIASES.get(name, {}).items():
        assert look_up(name)(**{alias: value}), f"{name} does not take {alias}"
    for member, took in before.get("members", {}).items():
        if member in ALIASES.get(name, {}):
            continue
        member = RENAMED.get(name, {}).get(member, member)
        assert member in now["members"], f"{name} has no {member}"
        if took is not None:
            assert missing(took, now["members"][member] or []) == [], f"{name}.{member}"


@pytest.mark.parametrize("name", FROZEN["commands"])
def test_a_command_takes_the_words_it_took(name: str) -> None:
    assert set(FROZEN["commands"][name]) <= set(commands().get(name, ()))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([["b", "KEYWORD_ONLY", False]], "a is gone"),
        ([["a", "POSITIONAL_OR_KEYWORD", True]], "b is gone"),
        ([["a", "KEYWORD_ONLY", True], ["b", "KEYWORD_ONLY", False]], "a is KEYWORD_ONLY"),
        ([["a", "POSITIONAL_OR_KEYWORD", True], ["b", "KEYWORD_ONLY", True]], "b has to be given"),
        ([["c", "POSITIONAL_OR_KEYWORD", False], ["a", "POSITIONAL_OR_KEYWORD", True], ["b", "KEYWORD_ONLY", False]],
         "the order was"),
        ([["a", "POSITIONAL_OR_KEYWORD", True], ["b", "KEYWORD_ONLY", False], ["c", "KEYWORD_ONLY", True]],
         "c is new and has to be given"),
    ],
)  # fmt: skip
def test_what_is_lost_is_found(now: list[list[Any]], said: str) -> None:
    before = [["a", "POSITIONAL_OR_KEYWORD", True], ["b", "KEYWORD_ONLY", False]]
    assert missing(before, before) == [] and missing(before, [*before, ["c", "KEYWORD_ONLY", False]]) == []
    assert any(line.startswith(said) for line in missing(before, now))


def test_an_option_counts_with_all_its_spellings_and_whether_it_takes_a_value() -> None:
    import typer

    app = typer.Typer()

    @app.command()
    def one(name: str, more: bool = False, size: int = typer.Option(1, "--size", "-n")) -> None: ...

    assert {"NAME", "--more", "--no-more", "--size=", "-n="} <= set(spellings(typer.main.get_command(app)))


def test_engines_answer_to_former_names() -> None:
    from evoalign.engines.transformers.engine import TransformersEngine

    for old, new in RENAMED["evoalign.engines:Engine"].items():
        assert getattr(TransformersEngine, old) is getattr(TransformersEngine, new)
