# SPDX-License-Identifier: Apache-2.0
"""The examples for clusters: scripts run on loopback, manifests have the fields of their schemas, commands exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml
from replicated import below, check_gone

from evoalign import cli
from evoalign.config import from_dict, parse_overrides

SCRIPTS = Path(__file__).parents[1] / "scripts"
SLURM, NODE = SCRIPTS / "slurm" / "train.sh", SCRIPTS / "skypilot" / "node.sh"
KUBERAY, SKYPILOT = SCRIPTS / "kuberay" / "train.yaml", SCRIPTS / "skypilot" / "train.yaml"
DATA = SCRIPTS.parent / "data" / "tasks" / "conciseness"
ADDRESSES = ["127.0.0.1", "127.0.0.2"]
SECONDS = 240.0
JOB_ID = 90_000_000 + os.getpid()
STARTED: list[subprocess.Popen[bytes]] = []

CONFIG: dict[str, Any] = {
    "space": "lora", "model": {"name": "tiny"}, "deterministic": True, "report": False,
    "task": {"name": "conciseness", "train_data": str(DATA / "questions_train.json"),
             "test_data": str(DATA / "questions_test.json"), "train_size": 6, "test_size": 6},
    "es": {"num_generations": 10, "population_size": 12, "sigma": 0.01, "learning_rate": 0.005},
    "sampling": {"max_tokens": 8}, "evaluation": {"max_tokens": 8}, "checks": {"placebo": 0},
    "engine": {"name": "ray", "chunk": 2, "replica": {"name": "transformers", "device": "cpu", "threads": 1}},
}  # fmt: skip

# As Slurm has them, as far as the script goes: options with their values in one word, steps that end with their srun.
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = """#!/bin/bash
case $1 in
show) tr , '\\n' <<<"$3" ;;
requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""


def command_of(words: list[str]) -> list[str]:
    assert words[:2] == ["evoalign", "train"]
    command = typer.main.get_command(cli.app).commands["train"]  # type: ignore[attr-defined]
    return list(command.make_context("train", words[2:]).params["set_"])


def in_script(script: Path) -> list[str]:
    """Return the words of the command that a script trains by, with numbers for what the shell inserts."""
    found = re.search(r"^(evoalign train .*?) &$", script.read_text().replace("\\\n", ""), re.MULTILINE)
    assert found is not None
    line = found[1]
    for words, value in ((r"\$\(\(.*\)\)|\$replicas", "2"), (r'"\$\{@:2\}"', ""), (r'"\$config"', "config.yaml"),
                         (r"\$\{addresses\[0\]\}:\$port|\$address", "10.0.0.1:6379")):  # fmt: skip
        line = re.sub(words, value, line)
    return shlex.split(line)


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.sh")), ids=lambda path: path.relative_to(SCRIPTS).as_posix())
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("shellcheck is not in this environment")
    subprocess.run([program, script], check=True)


MANIFEST = {one["kind"]: one for one in yaml.safe_load_all(KUBERAY.read_text())}
JOB = MANIFEST["RayJob"]["spec"]
CLUSTER = JOB["rayClusterSpec"]
HEAD, (WORKERS,) = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]


@pytest.mark.parametrize("words", [in_script(SLURM), in_script(NODE), shlex.split(JOB["entrypoint"])])
def test_the_commands_are_those_of_evoalign(words: list[str]) -> None:
    read = from_dict(parse_overrides({"es": {"sigma": 0.01}}, command_of(words)))
    assert read.engine.name == "ray" and read.engine.address and "--resume" in words  # type: ignore[attr-defined]


POD = "labels rayStartParams resources template"
FIELDS = {
    "job": "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus "
    "entrypointNumGpus entrypointResources jobId managedBy metadata rayClusterSpec runtimeEnvYAML "
    "shutdownAfterJobFinishes submissionMode submitterConfig submitterPodTemplate suspend ttlSecondsAfterFinished",
    "cluster": "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec "
    "headServiceAnnotations managedBy rayVersion suspend upgradeStrategy workerGroupSpecs",
    "head": f"{POD} enableIngress headService serviceType",
    "workers": f"{POD} suspend groupName idleTimeoutSeconds maxReplicas minReplicas numOfHosts replicas scaleStrategy",
    "auth": "mode secretName",
    "task": "name workdir num_nodes resources envs secrets file_mounts setup run",
    "resources": "accelerators use_spot job_recovery",
    "recovery": "strategy max_restarts_on_errors recover_on_exit_codes",
}


TASK = yaml.safe_load(SKYPILOT.read_text())


def test_manifests_have_the_fields_of_their_schemas() -> None:
    assert MANIFEST["RayJob"]["apiVersion"] == "ray.io/v1"
    ours = {"job": JOB, "cluster": CLUSTER, "head": HEAD, "workers": WORKERS, "auth": CLUSTER["authOptions"],
            "task": TASK, "resources": TASK["resources"], "recovery": TASK["resources"]["job_recovery"]}  # fmt: skip
    assert ours.keys() == FIELDS.keys()
    assert not [name for name, found in ours.items() if found.keys() - FIELDS[name].split()]
    for group in (HEAD, WORKERS):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == {own["name"] for own in pod["volumes"]}
            assert not any("TOKEN" in variable["name"] for variable in container["env"]), "KubeRay sets the token"


def test_the_manifest_keeps_strangers_out_and_has_a_replica_a_gpu() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token", "secretName": "evoalign-ray"}
    assert HEAD["serviceType"] == "ClusterIP" and HEAD["enableIngress"] is False
    (selected,) = MANIFEST["NetworkPolicy"]["spec"]["podSelector"]["matchExpressions"]
    assert selected == {"key": "ray.io/cluster", "operator": "Exists"}
    gpus = WORKERS["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"engine.replicas={WORKERS['replicas'] * gpus}" in command_of(shlex.split(JOB["entrypoint"]))
    locked = (SCRIPTS.parent / "requirements" / "test.lock").read_text()
    assert CLUSTER["rayVersion"] in locked and JOB["backoffLimit"]


def test_the_task_of_skypilot_keeps_the_token_out_of_files_and_starts_the_script() -> None:
    assert TASK["secrets"] == {"EVOALIGN_RAY_TOKEN": None}, "a token is given by who starts the job, and in no file"
    (mount,) = TASK["file_mounts"].values()
    assert mount["mode"] in {"MOUNT", "COPY", "MOUNT_CACHED"}
    words = shlex.split(TASK["run"])
    assert (SCRIPTS.parent / words[1]).resolve() == NODE and (SCRIPTS.parent / TASK["envs"]["CONFIG"]).is_file()
    assert f"output_dir={next(iter(TASK['file_mounts']))}/evoalign" in words


# --- they run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    yield tmp_path
    for process in STARTED:
        if process.poll() is None:
            process.terminate()
            process.wait(SECONDS)
    STARTED.clear()
    for place in ("/tmp/ray-evoalign", f"/tmp/ray-{JOB_ID}"):
        shutil.rmtree(place, ignore_errors=True)


def train(folder: Path, name: str, script: Path, log: Path, **more: str) -> subprocess.Popen[bytes]:
    words = [script, folder / "config.yaml", "--set", f"output_dir={folder / name}"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{own['PATH']}"
    environment = own | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | more
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=environment, cwd=folder, stdout=output, stderr=output)
    STARTED.append(process)
    return process


def generations(run: Path) -> list[dict[str, Any]]:
    """What a journal says of generations, without the chain of hashes that begins with its head."""
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines()[1:] if journal.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in ("hash", "previous")} for line in lines]


def slurm(folder: Path) -> subprocess.Popen[bytes]:
    variables = {"SLURM_JOB_ID": str(JOB_ID), "SLURM_JOB_NODELIST": ",".join(ADDRESSES), "SLURM_CPUS_PER_TASK": "1"}
    return train(folder, "slurm", SLURM, folder / "slurm.log", REQUEUED=str(folder / "requeued"), **variables)


def sky(folder: Path) -> list[subprocess.Popen[bytes]]:
    variables = {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "EVOALIGN_RAY_PORT": str(20000 + JOB_ID % 10000 + 1),
                 "EVOALIGN_RAY_TOKEN": "0123456789abcdef" * 4}  # fmt: skip
    logs = [folder / f"sky{rank}.log" for rank in (0, 1)]
    return [train(folder, "sky", NODE, log, SKYPILOT_NODE_RANK=str(rank), **variables) for rank, log in enumerate(logs)]


def check_secret(folder: Path) -> None:
    """Check that only its owner can read the token, and that it is on no command line."""
    (own,) = folder.glob(".evoalign-ray-*")
    token = (own / "token").read_text()
    assert len(token) == 64 and [p.stat().st_mode & 0o777 for p in (own, own / "token")] == [0o700, 0o600]
    assert not [p for p in psutil.process_iter(["cmdline"]) if token in " ".join(p.info["cmdline"] or [])]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_slurm_job_that_is_requeued_ends_like_one_that_sky_starts(folder: Path) -> None:
    job = slurm(folder)
    end = time.monotonic() + SECONDS
    while len(generations(folder / "slurm")) < 4 and time.monotonic() < end and job.poll() is None:
        time.sleep(0.05)
    check_secret(folder)
    processes = below(job.pid)
    assert sum("raylet" in process.name() for process in processes) == len(ADDRESSES)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(SECONDS) == 0, (folder / "slurm.log").read_text()
    check_gone(processes)
    assert (folder / "requeued").read_text().split() == [str(JOB_ID)] and not list(folder.glob(".evoalign-ray-*"))
    part = generations(folder / "slurm")
    assert 4 <= len(part) < CONFIG["es"]["num_generations"], "it was to be stopped half-way"

    assert slurm(folder).wait(SECONDS) == 0, (folder / "slurm.log").read_text()
    machines = sky(folder)
    seen = set[psutil.Process]()
    while machines[0].poll() is None and time.monotonic() < end + 3 * SECONDS:
        seen.update(process for machine in machines if machine.poll() is None for process in below(machine.pid))
        time.sleep(0.5)
    for machine in machines:
        assert machine.wait(SECONDS) == 0, (folder / "sky0.log").read_text()
    psutil.wait_procs(list(seen), timeout=120)  # agents of a node whose manager gave up end a minute later
    check_gone(seen)
    found = generations(folder / "slurm")
    assert found[: len(part)] == part and found == generations(folder / "sky") and len(found) > len(part)


def test_a_node_that_does_not_come_ends_the_job(folder: Path) -> None:
    (folder / "bin" / "srun").write_text("#!/bin/bash\necho no such node >&2; exit 1\n")
    job = slurm(folder)
    assert job.wait(SECONDS) == 1
    assert "no such node" in (folder / "slurm.log").read_text() and not list(folder.glob(".evoalign-ray-*"))
