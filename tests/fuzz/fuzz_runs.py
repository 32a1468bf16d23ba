# SPDX-License-Identifier: Apache-2.0
"""Run directories of both methods with other values in their files: what is read is what they say, or is verified."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fuzzing import REFUSED, VALUES, FaultError, check, damage, judged, places, put, wrong_in

from evoalign.analysis.compare import runs
from evoalign.baselines import trainer_state
from evoalign.config.run import Config
from evoalign.errors import CheckpointError
from evoalign.rundir import checkpoint, checksums, journal
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.method import JOURNAL, MANIFEST, resume_command
from evoalign.training import weights

HALF_DONE = Path(__file__).resolve().parents[1] / "compatibility/half_done"
METHODS = {"es": "lora_adam", "grpo": "grpo_lora"}
METRICS, RESULT, BUDGET, CONFIG = "metrics.jsonl", "results/evaluation.json", "results/budget.json", "config.yaml"
COMPLETIONS = "results/completions/before.parquet"
FREE = ("figures/a.png", "logs/a.txt", "notes.md", "results/completions/generation_0000.parquet")
"""What nobody reads; the last of them is there."""


class RunDirs:
    """A case: a run that is done, with checksums or without, with other values in its files, or damaged ones."""

    aim = ""

    def __init__(self, folder: Path) -> None:
        self.run, self.wholes = folder / "run", {}
        result = json.loads((HALF_DONE / METHODS["grpo"] / RESULT).read_text())
        for method, name in METHODS.items():
            whole = Path(shutil.copytree(HALF_DONE / name, folder / method))
            (whole / RESULT).write_text(json.dumps(result))
            if method == "grpo":
                trainer_state.mark(RunDir(whole), 2)
            with checksums.recorded(whole):
                pass
            self.wholes[method] = whole
        self.originals = {method: _read(whole) for method, whole in self.wholes.items()}

    def attempt(self, draw: random.Random) -> bool:
        method = draw.choice(sorted(METHODS))
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.wholes[method], self.run)
        recorded = draw.choice([True, False])
        if not recorded:
            (self.run / checksums.CHECKSUMS).unlink()
        for change in draw.sample(CHANGES if recorded else [*CHANGES, *OF_RESULTS], draw.randint(0, 3)):
            change(draw, self.run)
        known: bool | None = True
        if wrong := wrong_in(draw, self.aim, ["value", "value", "bytes", "row", "gone", "odd", "edit"]):
            known = self._break(draw, wrong, recorded)
        found = judged(lambda: _read(self.run), lines=11, valid=known)
        if found is REFUSED:
            return False
        check(found["run"].verified == (self.run / checksums.CHECKSUMS).is_file(), "unverified results are not marked")
        original = self.originals[method]
        if found["run"].verified:
            check(found["run"].points == original["run"].points, "a verified run has other points")
        else:
            self._as_written(found)
        for name in ("journal", "means", "state"):
            gone = name != "means" and found[name] is None  # nothing was read of it
            check(gone or found[name] == original[name], f"another {name} was believed")
        return True

    def _as_written(self, found: dict[str, Any]) -> None:
        """The numbers are those of the files, by a reader of its own."""
        run = found["run"]
        rows = [json.loads(line) for line in (self.run / METRICS).read_bytes().split(b"\n")[:-1]]
        check(run.steps == len(rows) and [r["generation"] for r in rows] == list(range(len(rows))), "other rows")
        points = {p.step: p.measures for p in run.points}
        if (self.run / RESULT).is_file():
            result = json.loads((self.run / RESULT).read_text())
            rows[run.points[-1].step - 1]["evaluation"] = result["after"]
            check(points[0] == _numbers(result["before"]), "other measures before")
        for row in rows:
            wanted = _numbers(row.get("evaluation") or {})
            check(points.get(row["generation"] + 1, {}) == wanted, f"other measures in row {row['generation']}")
        config: Config = run.config
        tree = yaml.safe_load((self.run / CONFIG).read_text())
        check(config.seed == tree.get("seed", 0), "another seed")

    def _break(self, draw: random.Random, kind: str, recorded: bool) -> bool | None:
        """An invalid change; False where it has to be refused."""
        file = draw.choice([f for n in (METRICS, RESULT, BUDGET, CONFIG, MANIFEST) if (f := self.run / n).is_file()])
        if kind == "edit" or (kind == "row" and recorded):
            raw = (self.run / RESULT).read_bytes()
            (self.run / RESULT).write_bytes(raw.replace(b"0.", b"1.", 1) + b" ")
            return False if recorded else None
        if kind == "row":
            lines = (self.run / METRICS).read_bytes().splitlines(keepends=True)
            (self.run / METRICS).write_bytes(b"".join(reversed(lines)))
            return False
        if kind == "value":
            self._put_value(draw, file)
            return None
        if kind == "odd":
            file.unlink()
            text = draw.choice(
                ["", "[]", "null", "[" * 5000, "{", "\x00", '{"a": 1}', "\ud800".encode("utf-8", "surrogatepass")]
            )
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            return None
        everything = sorted(f for f in self.run.rglob("*") if f.is_file())
        file = draw.choice(everything)
        if kind == "gone":
            file.unlink()
            if draw.choice([True, False]):
                file.mkdir()
        else:
            file.write_bytes(damage(draw, file.read_bytes()))
        return None

    def _put_value(self, draw: random.Random, file: Path) -> None:
        value = draw.choice(VALUES)
        if file.suffix == ".yaml":
            tree = yaml.safe_load(file.read_text())
            file.write_text(yaml.safe_dump(put(tree, draw.choice(list(places(tree))), value)))
            return
        first, *rest = file.read_text().split("\n", 1) if file.suffix == ".jsonl" else [file.read_text()]
        tree = json.loads(first)
        file.write_text("\n".join([json.dumps(put(tree, draw.choice(list(places(tree))), value)), *rest]))


def _numbers(measures: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in measures.items()}


def _read(run: Path) -> dict[str, Any]:
    """All that tables, figures, exports and a resumed run take from a run directory."""
    found: dict[str, Any] = {"run": runs.read(run), "state": None, "journal": None}
    RunDir(run).read_metrics()
    if "'" not in (command := resume_command(run)) and str(run) not in command:
        raise FaultError("silent", f"another command: {command}")
    if (run / JOURNAL).is_file():
        log = journal.read(run / JOURNAL).whole()
        found["journal"] = [(g.hash, g.weights_hash) for g in log.generations]
    means: list[tuple[str, str, dict[str, str]]] = []
    for folder in saved_folders(run):
        mark = checkpoint.verify(folder)
        weights.check(folder, mark, found["run"].config)
        means.append((folder.name, mark.weights_hash, _contents(folder)))
    if not means:
        raise CheckpointError("no mean is saved")
    state = trainer_state.sound_state(RunDir(run), lambda _: None)
    return {**found, "means": means, "state": state and (state[1], _contents(state[0]))}


def _contents(folder: Path) -> dict[str, str]:
    files = (file for file in folder.iterdir() if file.name != trainer_state.STATE)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


Change = Callable[[random.Random, Path], object]


def _json(file: Path, change: Callable[[Any], Any]) -> None:
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree, indent=1))


def _rows(run: Path, change: Callable[[Any], Any]) -> None:
    rows = [json.loads(line) for line in (run / METRICS).read_text().split("\n")[:-1]]
    for row in rows:
        change(row)
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _text(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text(text)


CHANGES: list[Change] = [
    lambda draw, run: _json(run / MANIFEST, lambda t: t.update(more={"a": [draw.randint(0, 9)]}, git=None)),
    lambda draw, run: _json(run / MANIFEST, lambda t: t["hardware"].update(cores=draw.randint(1, 999), gpus=["é"])),
    lambda draw, run: _json(run / MANIFEST, lambda t: t.update(command=["a b", "\u2028"], started="?")),
    lambda draw, run: _text(run / CONFIG, (run / CONFIG).read_text() + "# more\n"),
    lambda draw, run: _text(run / CONFIG, yaml.safe_dump(yaml.safe_load((run / CONFIG).read_text()), indent=4)),
    lambda draw, run: [_text(run / name, "\x00 any") for name in FREE],
    lambda draw, run: (run / FREE[-1]).unlink(missing_ok=True),
    lambda draw, run: _text(run / ".lock", ""),
    lambda draw, run: _text(run / "loras/generation_0002.unusable/a", ""),
]
OF_RESULTS: list[Change] = [
    lambda draw, run: _rows(run, lambda row: row.update(more=[None], mean=draw.choice([0, -1.5, 1e300]))),
    lambda draw, run: _rows(run, lambda row: row.update(evaluation={"reward": draw.choice([0, -84.5, 1e-9])})),
    lambda draw, run: _rows(run, lambda row: row.pop("budget", None)),
    lambda draw, run: _json(run / RESULT, lambda t: t["after"].update(reward=draw.choice([0, 5, -0.25, 1e300]))),
    lambda draw, run: _json(run / RESULT, lambda t: t["before"].update(other=draw.choice([1, 2.5]))),
    lambda draw, run: _text(run / METRICS, (run / METRICS).read_text() + '{"generation": 2, "me'),
    lambda draw, run: (run / BUDGET).unlink(missing_ok=True),
    lambda draw, run: (run / COMPLETIONS).unlink(missing_ok=True),
]
