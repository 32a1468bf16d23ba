# SPDX-License-Identifier: Apache-2.0
"""The examples for clusters. Scripts are run on loopback, by stand-ins for what starts them elsewhere; manifests have
the fields of their schemas, and all have commands that evoalign has."""

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
JOB = 90_000_000 + os.getpid()
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
    """The settings of a command line of `evoalign train`. Raises where it is none."""
    assert words[:2] == ["evoalign", "train"]
    command = typer.main.get_command(cli.app).commands["train"]  # type: ignore[attr-defined]
    return list(command.make_context("train", words[2:]).params["set_"])


def in_script(script: Path) -> list[str]:
    """The words of the command that a script trains by, with numbers for what the shell puts in."""
    found = re.search(r"^(evoalign train .*?) &$", script.read_text().replace("\\\n", ""), re.MULTILINE)
    assert found is not None
    line = re.sub(r"\$\(\(.*\)\)|\$replicas", "2", found[1])
    line = re.sub(r'"\$\{@:2\}"', "", re.sub(r'"\$config"', "config.yaml", line))
    return shlex.split(re.sub(r"\$\{addresses\[0\]\}:\$port|\$address", "10.0.0.1:6379", line))


@pytest.mark.parametrize("script", sorted(SCRIPTS.rglob("*.sh")), ids=lambda path: path.relative_to(SCRIPTS).as_posix())
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("shellcheck is not in this environment")
    subprocess.run([program, script], check=True)


def test_the_commands_are_those_of_evoalign() -> None:
    job = documents(KUBERAY)["RayJob"]["spec"]
    for words in (in_script(SLURM), in_script(NODE), shlex.split(job["entrypoint"])):
        settings = command_of(words)
        read = from_dict(parse_overrides({"es": {"sigma": 0.01}}, settings))
        assert read.engine.name == "ray" and read.engine.address  # type: ignore[attr-defined]
        assert "--resume" in words


def documents(path: Path) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}


JOB_FIELDS = {
    "activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint", "entrypointNumCpus",
    "entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata", "rayClusterSpec", "runtimeEnvYAML",
    "shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend",
    "ttlSecondsAfterFinished",
}  # fmt: skip
CLUSTER_FIELDS = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec",
    "headServiceAnnotations", "managedBy", "rayVersion", "suspend", "upgradeStrategy", "workerGroupSpecs",
}  # fmt: skip
HEAD_FIELDS = {"enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType", "template"}
WORKER_FIELDS = {
    "groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams",
    "replicas", "resources", "scaleStrategy", "suspend", "template",
}  # fmt: skip


def test_the_manifest_has_the_fields_of_a_rayjob() -> None:
    found = documents(KUBERAY)
    job = found["RayJob"]
    assert job["apiVersion"] == "ray.io/v1" and job["spec"].keys() <= JOB_FIELDS
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster.keys() <= CLUSTER_FIELDS and cluster["authOptions"].keys() <= {"mode", "secretName"}
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head.keys() <= HEAD_FIELDS and workers.keys() <= WORKER_FIELDS
    assert all(isinstance(value, str) for group in (head, workers) for value in group["rayStartParams"].values())
    for group in (head, workers):
        pod = group["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == names
            assert not any("TOKEN" in variable["name"] for variable in container["env"]), "KubeRay sets the token"


def test_the_manifest_keeps_strangers_out_and_has_a_replica_a_gpu() -> None:
    found = documents(KUBERAY)
    spec = found["RayJob"]["spec"]
    cluster = spec["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "evoalign-ray"}
    assert head["serviceType"] == "ClusterIP" and head["enableIngress"] is False
    (selected,) = found["NetworkPolicy"]["spec"]["podSelector"]["matchExpressions"]
    assert selected == {"key": "ray.io/cluster", "operator": "Exists"}
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"engine.replicas={workers['replicas'] * gpus}" in command_of(shlex.split(spec["entrypoint"]))
    assert (cluster["rayVersion"] in (SCRIPTS.parent / "requirements" / "test.lock").read_text()) and spec[
        "backoffLimit"
    ]


def test_the_task_has_the_fields_of_skypilot() -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    assert task.keys() <= {
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "secrets",
        "file_mounts",
        "setup",
        "run",
    }
    assert task["resources"].keys() <= {"accelerators", "use_spot", "job_recovery"}
    assert task["resources"]["job_recovery"].keys() <= {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
    assert task["secrets"] == {"EVOALIGN_RAY_TOKEN": None}, "a token is given by who starts the job, and in no file"
    (mount,) = task["file_mounts"].values()
    assert mount["mode"] in {"MOUNT", "COPY", "MOUNT_CACHED"}
    words = shlex.split(task["run"])
    assert (SCRIPTS.parent / words[1]).resolve() == NODE and (SCRIPTS.parent / task["envs"]["CONFIG"]).is_file()
    assert f"output_dir={next(iter(task['file_mounts']))}/evoalign" in words


# --- they run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With stand-ins for Slurm, and a config."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    yield tmp_path
    for process in STARTED:
        if process.poll() is None:
            process.terminate()
            process.wait(SECONDS)
    STARTED.clear()
    for place in ("/tmp/ray-evoalign", f"/tmp/ray-{JOB}"):
        shutil.rmtree(place, ignore_errors=True)


def environment(folder: Path, **more: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{found['PATH']}"
    return found | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | more


def train(folder: Path, name: str, script: Path, log: Path, **more: str) -> subprocess.Popen[bytes]:
    words = [script, folder / "config.yaml", "--set", f"output_dir={folder / name}"]
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=environment(folder, **more), cwd=folder, stdout=output, stderr=output)
    STARTED.append(process)
    return process


def generations(run: Path) -> list[dict[str, Any]]:
    """What a journal says of generations, without the chain of hashes that begins with its head."""
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines()[1:] if journal.exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in ("hash", "previous")} for line in lines]


def slurm(folder: Path) -> subprocess.Popen[bytes]:
    variables = {"SLURM_JOB_ID": str(JOB), "SLURM_JOB_NODELIST": ",".join(ADDRESSES), "SLURM_CPUS_PER_TASK": "1"}
    return train(folder, "slurm", SLURM, folder / "slurm.log", REQUEUED=str(folder / "requeued"), **variables)


def sky(folder: Path) -> list[subprocess.Popen[bytes]]:
    variables = {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "EVOALIGN_RAY_PORT": str(20000 + JOB % 10000 + 1)}
    variables |= {"EVOALIGN_RAY_TOKEN": "0123456789abcdef" * 4}
    logs = [folder / f"sky{rank}.log" for rank in (0, 1)]
    return [train(folder, "sky", NODE, log, SKYPILOT_NODE_RANK=str(rank), **variables) for rank, log in enumerate(logs)]


def check_secret(folder: Path) -> None:
    """The token is where its owner alone reads it, and on no command line."""
    (own,) = folder.glob(".evoalign-ray-*")
    token = own / "token"
    assert own.stat().st_mode & 0o777 == 0o700 and token.stat().st_mode & 0o777 == 0o600
    words = token.read_text()
    assert len(words) == 64
    assert not [p for p in psutil.process_iter(["cmdline"]) if words in " ".join(p.info["cmdline"] or [])]


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
    assert (folder / "requeued").read_text().split() == [str(JOB)] and not list(folder.glob(".evoalign-ray-*"))
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
