# SPDX-License-Identifier: Apache-2.0
"""What `evoalign analyze ... --to FOLDER` left in a folder, a run's `analysis` or one of several runs, for the report.

By the form of its JSON alone, so that an analysis of one's own is shown as those that are shipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from evoalign.analysis.page.view import Analysed, Picture
from evoalign.config.reading import parse, read_bytes
from evoalign.errors import ConfigError, DataError
from evoalign.report.tables import shorten

MOST_ANALYSES = 40
MOST_JSON = 2**24
MOST_NUMBERS = 120_000
"""Characters of the numbers of one analysis that are in the page."""
MOST_PICTURE, MOST_PICTURES = 400_000, 1_500_000
"""Bytes of a figure, and of all of a run."""
KINDS: dict[str, Literal["png", "svg+xml"]] = {".svg": "svg+xml", ".png": "png"}
MOST_SENTENCES, MOST_LETTERS, MOST_NAME = 400, 4_000, 200
"""Sentences of an analysis, and characters of one and of a name: no analysis has as many, but a file may."""
PNG = b"\x89PNG\r\n\x1a\n"


_TREE = TypeAdapter(dict[str, Any])


class _Finding(BaseModel):
    """A comparison calls its sentences `summary`, and has its numbers beside them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format_version: Literal[1]
    analysis: str | None = None
    sentences: list[str] = Field(validation_alias=AliasChoices("sentences", "summary"))
    numbers: dict[str, Any] | None = None
    figures: list[str] | None = None


def analysed(folder: Path, alarms: list[str]) -> list[Analysed]:
    """Each analysis in a folder, by name. What is damaged is named in `alarms`."""
    found: list[Analysed] = []
    room = MOST_PICTURES
    files = sorted(folder.glob("*.json"))
    for file in files[:MOST_ANALYSES]:
        try:
            tree = _TREE.validate_python(parse(read_bytes(file, MOST_JSON), str(file)))
            finding = _Finding.model_validate(tree)
        except DataError as error:
            alarms.append(str(error))
            continue
        except ValidationError:
            alarms.append(f"{file} is not what evoalign analyze writes; put it back from a copy, or move it elsewhere")
            continue
        pictures, left_out = _pictures(folder, _figures(folder, file.stem, finding), room)
        room -= sum(len(picture.data) for picture in pictures)
        numbers = _numbers(tree if finding.numbers is None else finding.numbers)
        name = shorten(finding.analysis or file.stem, MOST_NAME)
        found.append(Analysed(name, _sentences(finding.sentences), numbers, pictures, left_out))
    if len(files) > MOST_ANALYSES:
        alarms.append(f"{folder} holds {len(files)} JSON files; the first {MOST_ANALYSES} are shown")
    return found


def shared(folder: Path) -> list[Analysed]:
    """Those of several runs together, which somebody named. Raises ConfigError where there is none, DataError."""
    alarms: list[str] = []
    found = analysed(folder, alarms)
    if alarms:
        raise DataError(alarms[0])
    if not found:
        write = f"evoalign analyze NAME RUN... --to {folder}"
        raise ConfigError(f"--analyses {folder} holds no analysis; {write} writes one")
    return found


def _sentences(said: list[str]) -> list[str]:
    more = len(said) - MOST_SENTENCES
    kept = [shorten(line, MOST_LETTERS) for line in said[:MOST_SENTENCES]]
    return kept if more <= 0 else [*kept, f"{more:,} more sentences are in the file"]


def _numbers(found: dict[str, Any]) -> str:
    said = json.dumps(found, indent=1, ensure_ascii=False)
    return said if len(said) <= MOST_NUMBERS else f"{said[:MOST_NUMBERS]}\n[... the file has the rest]"


def _figures(folder: Path, name: str, finding: _Finding) -> list[str]:
    """The names of its figures without their endings: those it names, else those that begin as it is called."""
    if finding.figures is not None:
        named = [figure for figure in finding.figures if Path(figure).name == figure and "\0" not in figure]
        return list(dict.fromkeys(Path(figure).stem for figure in named if Path(figure).suffix in KINDS))
    return sorted({file.stem for ending in KINDS for file in folder.glob(f"*{ending}") if file.stem.startswith(name)})


def _pictures(folder: Path, names: list[str], room: int) -> tuple[list[Picture], list[str]]:
    """Of each figure its SVG, or where that is too large its PNG; and the names of those that do not fit."""
    pictures: list[Picture] = []
    left_out: list[str] = []
    for name in names:
        picture = next((p for p in map(_picture, (folder / f"{name}{e}" for e in KINDS)) if p is not None), None)
        if picture is None or len(picture.data) > room:
            left_out.append(name)
            continue
        room -= len(picture.data)
        pictures.append(picture)
    return pictures, left_out


def _picture(file: Path) -> Picture | None:
    """None where it is not there, too large, or no picture."""
    try:
        data = read_bytes(file, MOST_PICTURE)
    except DataError:
        return None
    kind = KINDS[file.suffix]
    is_one = data.startswith(PNG) if kind == "png" else b"<svg" in data[:4096]
    return Picture(file.stem, kind, data) if is_one else None
