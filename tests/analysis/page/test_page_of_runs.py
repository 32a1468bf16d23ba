# SPDX-License-Identifier: Apache-2.0
"""report.html of real runs: written at their end, of what they left, and whatever is wrong with their files."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from command_line import Run, caller
from copied_runs import copy_run, edit
from markupsafe import escape
from rich.console import Console
from small_runs import UNCHECKED

import evoalign
from evoalign import analysis
from evoalign.analysis import Finding
from evoalign.analysis.compare.runs import find_in_order
from evoalign.analysis.page import page
from evoalign.analysis.page.run import names_of, stamp, views_of, write_report
from evoalign.analysis.page.view import View
from evoalign.analysis.runs import with_page
from evoalign.checks import diagnosis
from evoalign.config import load
from evoalign.placebos import estimates
from evoalign.placebos import file as placebo_file
from evoalign.rundir import parquet
from evoalign.rundir.directory import RunDir
from evoalign.rundir.identity import config_hash
from evoalign.statistics import mean
from evoalign.training.result import Result


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    """A copy of a run of six generations, evaluated on the way."""
    return Path(shutil.copytree(source, tmp_path / "run"))


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys)


def view_of(run: Path) -> View:
    return views_of([run])[0]


def shown(run: Path) -> str:
    return page.render(views_of([run]))


def section(file: Path, name: str) -> str:
    return file.read_text().split(f'id="{name}"', 1)[1].split("</section>", 1)[0]


def completions(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text().split('id="completions-data">', 1)[1].split("</script>", 1)[0])


def edit_result(run: Path, **changes: Any) -> None:
    """Change results/evaluation.json; dictionaries are merged, and None removes an entry."""

    def change(tree: dict[str, Any]) -> dict[str, Any]:
        new = {k: {**tree.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}
        return {k: v for k, v in {**tree, **new}.items() if v is not None}

    edit(run / "results/evaluation.json", change)


def test_a_run_writes_its_report(source: Path) -> None:
    file = source / "report.html"
    result = json.loads((source / "results/evaluation.json").read_text())
    rows = parquet.read(source / "results/completions/after.parquet")
    (found,) = completions(file)
    assert len(found["rows"]) == len(rows) > 1
    assert [row["a"]["r"] for row in found["rows"]] == [row["reward"] for row in rows]
    text = file.read_text()
    assert f"{result['before']['reward']:.4g} -&gt; {result['after']['reward']:.4g}" in text
    assert "generation 6 of 6" in text and "lora.target_layers" in text
    assert "No alarms and no warnings" in text or 'class="warnings"' in text


def train(folder: Path, printed: io.StringIO, generations: int = 1, **options: Any) -> Result:
    """Train, or resume what is there."""
    config = {
        "output_dir": str(folder),
        "es": {"num_generations": generations, "population_size": 2, "sigma": 0.05, "learning_rate": 0.02},
        "lora": {"rank": 1, "target_layers": [3], "target_modules": ["down_proj"]}, "evaluation": {"max_tokens": 2},
        "checks": UNCHECKED, "report": options.pop("report", True),
    }  # fmt: skip
    return evoalign.train(config, resume=folder.exists(), console=Console(file=printed, width=200), **options)


def test_report_false_writes_none_and_is_the_same_run(tmp_path: Path) -> None:
    train(tmp_path / "run", io.StringIO(), report=False)
    assert (tmp_path / "run/SHA256SUMS").is_file() and not (tmp_path / "run/report.html").exists()
    config = load(tmp_path / "run/config.yaml")
    assert not config.report
    assert config_hash(config) == config_hash(config.model_copy(update={"report": True}))


def test_a_report_is_the_first_process_s_of_the_latest_end_and_its_failure_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file, printed = tmp_path / "run", tmp_path / "run/report.html", io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(page, "render", Mock(side_effect=OSError("disk full")))
        result = train(run, printed)
        ended = with_page(lambda console: result)
        for error in (ValueError("a mistake\nof ours"), RecursionError()):
            patch.setattr(page, "render", Mock(side_effect=error))
            ended(console=Console(file=printed, width=200))
        patch.setattr(page, "render", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ended(console=Console(file=printed))
    assert result.saved.is_dir() and (run / "SHA256SUMS").is_file() and not list(run.glob("*report*"))
    assert printed.getvalue().count("warning: report.html was not written") == 3
    assert printed.getvalue().count("; to write it: evoalign report") == 3
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        ended(console=Console(file=printed))
    assert not file.exists()
    ended(console=Console(file=printed))
    assert "generation 1 of 1" in file.read_text()
    there = list[bool]()
    train(run, printed, 2, on_generation=lambda _: there.append(file.exists()))
    assert there == [False] and "generation 2 of 2" in file.read_text(), "none of its earlier end"


def test_a_report_costs_little(run: Path) -> None:
    """Of what a small run takes: a test's every training writes one."""
    start = time.process_time()
    write_report(run)
    assert time.process_time() - start < 0.5


def test_the_diagnosis_and_intervals_are_the_run_s_own(source: Path) -> None:
    config, rows = load(source / "config.yaml"), RunDir(source).read_metrics()
    own = diagnosis.summary(diagnosis.history_of([rows[i] for i in range(6)], config, deterministic=True))
    view = view_of(source)
    assert list(view.diagnosis)[1:] == [line for line in own if not line.startswith("warning")]
    assert "on the test split the reward" in view.diagnosis[0]
    assert "; this is on the same test examples" in view.diagnosis[0], "the training fitness may say otherwise"
    rewards = [row["reward"] for row in parquet.read(source / "results/completions/before.parquet")]
    assert view.ends["test"].before == mean(rewards)


def test_what_is_wrong_with_results_is_a_warning_or_an_alarm(run: Path) -> None:
    (run / "SHA256SUMS").rename(run / "aside")
    view = view_of(run)
    assert any("not verified" in line for line in view.warnings) and not view.alarms
    edit_result(run, placebo=None)
    assert "evoalign placebo" in view_of(run).beside[0], "the drift is not known"
    (run / "aside").rename(run / "SHA256SUMS")
    edit_result(run, after={"reward": 99.0})
    assert any("altered" in line for line in view_of(run).alarms)
    edit_result(run, alarms={"verdict": "likely hacked", "reasons": ["90% are empty"]})
    alarms = view_of(run).alarms
    assert alarms[0].startswith("likely hacked") and "90% are empty" in alarms[0]


def test_placebos_are_shown_next_to_the_gain(run: Path) -> None:
    """Of more that `evoalign placebo` measured the column is of those, not of the few of the run's end."""
    before, real = [0.0, 0.1, 0.2, 0.1], [1.0, 1.1, 1.3, 1.2]
    few = estimates.split(before, real, [[0.1, 0.2, 0.3, 0.1], [0.2, 0.1, 0.4, 0.2]])
    measures = {"reward": few.mean, "tokens": 1.0}
    edit_result(run, placebo={"generation": 6, "seeds": [0, 1], "reward": few.as_dict(), "measures": measures})
    view = view_of(run)
    assert view.placebos is not None and view.placebos.placebos == few.placebos
    assert view.placebos.lines[0] == estimates.sentence(few) and view.beside[0] == estimates.sentence(few)
    assert view.measures[0].placebo == few.mean
    many = estimates.split(before, real, [[0.3] * 4, [0.5] * 4, [0.1] * 4])
    found = estimates.Placebos(6, (0, 1, 2), many, estimates.Distances(1.0, None, (1.0,)),
                                     {"reward": 0.4, "tokens": 2.0})  # fmt: skip
    placebo_file.write(run, load(run / "config.yaml"), found)
    view = view_of(run)
    assert view.placebos is not None and len(view.placebos.placebos) == 3
    assert {m.name: m.placebo for m in view.measures if m.placebo is not None} == {"reward": 0.4, "tokens": 2.0}
    assert "mean of 3 placebos" in shown(run)


def test_the_page_says_what_was_not_there_and_not_when_it_was_made(run: Path, go: Run) -> None:
    assert go("report", run).code == 0
    foot = (run / "report.html").read_text().split("<footer", 1)[1]
    assert "no analyses" in foot
    assert not re.search(r"\d\d:\d\d", foot), "a resumed run that is done would have another page"
    added = go("analyze", "hacking", run, "--to", run / "analysis")
    assert added.code == 0, added.err
    assert f"`evoalign report {run}` writes it anew" in " ".join(added.out.split())
    assert go("report", run).code == 0
    assert "no analyses" not in (run / "report.html").read_text().split("<footer", 1)[1]
    elsewhere = go("analyze", "hacking", run, "--to", run / "other")
    assert elsewhere.code == 0 and "writes it anew" not in elsewhere.out


def test_a_run_that_is_being_trained_is_shown_as_far_as_it_is(run: Path) -> None:
    for name in ("results/evaluation.json", "SHA256SUMS", "results/completions/after.parquet"):
        (run / name).unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])  # in mid-write
    view = view_of(run)
    assert (view.state, view.steps, view.total, len(view.rows)) == ("unfinished", 3, 6, 3)
    assert view.completions[0].after is None and view.completions[0].before is not None
    assert not view.alarms and "not finished" in shown(run)


def test_of_a_run_of_grpo(run: Path, tmp_path: Path) -> None:
    copy_run(run, tmp_path / "grpo", method="grpo")
    view = view_of(tmp_path / "grpo")
    assert view.method == "GRPO" and view.words.unit == "step"
    assert [line for line in view.diagnosis if "on the test split" in line] == list(view.diagnosis)
    assert "go by this" not in view.diagnosis[0], "nothing else is said"
    assert not any(key.startswith("es.") for key in view.settings) and "grpo.max_steps" in view.settings


NEW = """
from pathlib import Path
from evoalign.analysis.base import Analysis, Finding, NoSettings
from evoalign.report.figures import canvas, save

class Drawn(Finding):
    def draw(self, folder):
        (folder / "points.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'></svg>")
        save(canvas(2, 1), folder / "points.png")
        return [folder / "points.png", folder / "points.svg"]

class Generations(Analysis[NoSettings]):
    name = "generations"
    help = "Count generations."
    settings = NoSettings

    def run(self, targets, settings, config=None):
        counts = [len((Path(run) / "metrics.jsonl").read_text().splitlines()) for run in targets]
        return Drawn({"counts": counts}, [f"{sum(counts)} generations in all."])
"""


def test_a_new_analysis_is_one_file_that_the_command_line_and_the_report_find(
    run: Path, go: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but its file is written."""
    (tmp_path / "rooms").mkdir()
    (tmp_path / "rooms/generations.py").write_text(NEW)
    assert "generations" not in analysis.names() and not views_of([run])[0].analyses
    monkeypatch.setattr(analysis, "__path__", [*analysis.__path__, str(tmp_path / "rooms")])
    assert "Count generations." in go("analyze").out
    done = go("analyze", "generations", run, "--to", run / "analysis")
    assert (done.code, done.err) == (0, "") and "6 generations in all." in done.out
    Finding({"y": 1}, ["Nothing to draw."]).write(run / "analysis", "another")
    found = {one.name: [picture.kind for picture in one.pictures] for one in view_of(run).analyses}
    assert list(found.items()) == [("another", []), ("generations", ["svg+xml"])]
    assert go("report", run).code == 0
    part = section(run / "report.html", "analyses")
    assert "<h3>generations</h3>" in part and "6 generations in all." in part
    assert "data:image/svg+xml;base64," in part and "alt=" in part and "Nothing to draw." in part


def test_analyses_of_several_runs_together_have_a_folder_of_their_own(run: Path, tmp_path: Path, go: Run) -> None:
    copy_run(run, tmp_path / "other", seed=7)
    assert go("compare", run, tmp_path / "other", "--match", "tokens", "--to", "both").code == 0
    assert go("analyze", "distance", run, tmp_path / "other", "--to", "both").code == 0
    done = go("report", run, tmp_path / "other", "--analyses", "both", "--to", "page.html")
    assert (done.code, done.err) == (0, "")
    alone = go("report", run, "--analyses", "both", "--to", "alone.html")
    assert alone.code == 0 and alone.err.count("\n") == 1
    assert f"both is also of {tmp_path / 'other'}, which is not on the page" in alone.err
    part = section(tmp_path / "page.html", "analyses")
    summary = json.loads((tmp_path / "both/comparison.json").read_text())["summary"]
    assert (
        part.index("<h3>comparison</h3>") < part.index(str(escape(summary[0]))) < part.index("data:image/png;base64,")
    )
    assert "<h3>distance</h3>" in part and "L2 distance" in part
    (tmp_path / "both/distance.json").write_text('{"format_version": 1}')
    assert "distance.json" in go("report", run, "--analyses", "both").err
    assert "holds no analysis" in go("report", run, "--analyses", run / "figures").err


def test_runs_side_by_side(run: Path, tmp_path: Path, go: Run) -> None:
    copy_run(run, tmp_path / "other", seed=7, sets={"es.sigma": 0.09})
    done = go("report", run, tmp_path / "other", "--to", "both.html")
    assert done.code == 0, done.err
    part = section(tmp_path / "both.html", "settings")
    assert part.index("es.sigma") < part.index("not the default")
    assert len(completions(tmp_path / "both.html")) == 2
    assert "<h1>run and other</h1>" in (tmp_path / "both.html").read_text()  # as they were typed


def test_names_tell_runs_apart() -> None:
    assert names_of([Path("/a/x/seed_0")]) == ["x/seed_0"]
    assert names_of([Path("/a/runs/qcd"), Path("/a/sweep/beta=0.1/seed_0")]) == ["runs/qcd", "sweep/beta=0.1/seed_0"]
    assert names_of([Path("/a/x/seed_0"), Path("/a/y/seed_0")]) == ["x", "y"]
    assert names_of([Path("/a/x"), Path("/a/y")]) == ["x", "y"]


def test_runs_of_a_folder_are_in_natural_order(run: Path, tmp_path: Path) -> None:
    for name in ("seed_10", "seed_9", "a", "seed_2/x"):
        copy_run(run, tmp_path / "many" / name)
    found = [str(one.relative_to(tmp_path / "many")) for one in find_in_order([tmp_path / "many"])]
    assert found == ["a", "seed_2/x", "seed_9", "seed_10"]


def test_the_command_says_what_is_wrong(run: Path, tmp_path: Path, go: Run) -> None:
    copy_run(run, tmp_path / "other")
    assert "--to" in go("report", run, tmp_path / "other").err
    assert "nowhere" in go("report", tmp_path / "nowhere").err
    mine = tmp_path / "thesis.html"
    mine.write_text("<html>mine</html>")
    refused = go("report", run, "--to", mine)
    assert refused.code == 2 and "no report" in refused.err and mine.read_text() == "<html>mine</html>"
    assert "--serve" in go("report", run, "--serve", "--to", mine).err


def test_the_stamp_is_another_where_anything_changed(run: Path) -> None:
    before = stamp([run])
    assert stamp([run]) == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    later = stamp([run], run / "shared")
    assert later != before
    for folder in ("analysis", "shared"):
        (run / folder).mkdir()
        (run / folder / "x.json").touch()
        assert stamp([run], run / "shared") != later
        later = stamp([run], run / "shared")


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "manifest.json", "metrics.jsonl", "results/evaluation.json", "results/budget.json",
     "results/completions/before.parquet", "results/completions/after.parquet", "SHA256SUMS"],
)  # fmt: skip
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff\xfe\x00", b'{"generation": 1e999}', b"null\n", b"[" * 5000]
)
def test_a_damaged_file_leaves_the_rest(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    source = shown(run)
    assert 'id="warnings"' in source and 'id="summary"' in source
    if name.endswith("parquet"):
        assert 'class="alarm"' in source


def test_rows_of_anybody(run: Path) -> None:
    odd = [
        {"generation": 0, "mean": 1.0},
        {"generation": 1, "mean": 1e308, "p20": -1e308, "p80": 1e308, "best": None, "seconds": {"</script>": 1e308}},
        {"generation": 10**18, "mean": 5, "rewards": {"<img src=x>": 1}, "evaluation": {}, "divergence": {}},
        {"generation": 3, "mean": 2.0, "zero_variance": True, "evaluation": {"reward": None}},
        {"generation": 5, "mean": 2.0, "evaluation": {"other": 1.0}, "validation": {"other": 1.0}},
    ]
    text = "".join(json.dumps(row) + "\n" for row in odd) + '{"generation": 4, "mean": NaN, "std": Infinity}\n'
    (run / "metrics.jsonl").write_text(text)
    source = shown(run)
    assert "<img src=x>" not in source and "cannot be diagnosed" in source


def test_files_that_are_larger_than_a_run_leaves_make_no_large_page(run: Path) -> None:
    (run / "analysis").mkdir()
    told = {"format_version": 1, "analysis": "n" * 10**5, "sentences": ["s" * 10**5, *["t"] * 10**5], "numbers": {}}
    (run / "analysis/x.json").write_text(json.dumps(told))
    edit(run / "manifest.json", lambda tree: {**tree, "command": ["c" * 10**6]})
    few = len(shown(run))
    assert few < 1_500_000 and f"{10**5 + 1 - 400:,} more sentences are in the file" in shown(run)
    names = {f"measure{i}": 1.0 for i in range(10_000)}
    edit_result(run, before=names, after=names)
    assert len(shown(run)) < few + 200_000
    edit(run / "manifest.json", lambda tree: {**tree, "command": ["c" * 2**24]})
    assert any("manifest.json is larger than 16384 KiB" in line for line in views_of([run])[0].alarms)


@pytest.mark.skipif(sys.platform != "linux", reason="names of other file systems are text")
def test_a_folder_whose_name_is_no_text_is_read_as_any_other(run: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd\udcff\u202e"
    shutil.copytree(run, odd)
    view = view_of(odd)
    assert view.completions and not view.alarms
    source = shown(odd)
    source.encode()
    assert "\u202e" not in source


def test_links_and_pipes_are_not_waited_for(run: Path) -> None:
    (run / "results/evaluation.json").unlink()
    os.mkfifo(run / "results/evaluation.json")
    (run / "analysis").mkdir()
    os.mkfifo(run / "analysis/pipe.json")
    finding = {
        "format_version": 1,
        "analysis": "x",
        "sentences": [],
        "numbers": {},
        "figures": ["../../etc/passwd.png"],
    }
    (run / "analysis/x.json").write_text(json.dumps(finding))
    view = view_of(run)
    assert len(view.alarms) >= 2 and not view.analyses[0].pictures
