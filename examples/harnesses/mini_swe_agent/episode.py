# SPDX-License-Identifier: Apache-2.0
"""Run one episode of mini-swe-agent in a temporary folder, and print its reward: episode.py BASE_URL API_KEY EXAMPLE.

The model writes commands, and they run as your user, with limits per process and without keys in their environment.
With bubblewrap they have no network, and see no other processes and of your files only those of their folder.
"""

import json
import os
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

LIMITS = {"CPU": 60, "AS": 1 << 33, "FSIZE": 1 << 26, "NOFILE": 256, "CORE": 0}
"""Seconds, bytes of memory, bytes per file, open files, bytes of a core dump."""


def reward_of(file: Path, answer: str) -> float:
    """Return 1 if the file has the answer. Links, devices and pipes are not opened, and at most 100 bytes are read."""
    if file.is_symlink() or not file.is_file():
        return 0.0
    with file.open("rb") as opened:
        return float(opened.read(100).strip() == answer.encode())


url, key, example = sys.argv[1:]
row = json.loads(Path(example).read_text(encoding="utf-8"))
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    mark = os.environ.get("EVOALIGN_WORKER", "")  # by it the trainer finds processes that outlive the episode
    os.environ.clear()
    os.environ.update(EVOALIGN_WORKER=mark, PATH="/usr/bin:/bin", HOME=folder, MSWEA_GLOBAL_CONFIG_DIR=folder)
    os.environ.update(MSWEA_SILENT_STARTUP="1", MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="3")
    os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True")  # or it downloads a list of prices
    for name, limit in LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    import litellm
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment, BubblewrapEnvironmentConfig
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    litellm.suppress_debug_info = True
    own = {"api_base": url, "api_key": key}
    model = LitellmModel(model_name="openai/policy", model_kwargs=own, cost_tracking="ignore_errors")
    work = Path(folder, "work")
    work.mkdir()
    if shutil.which("bwrap"):
        sandbox = [*BubblewrapEnvironmentConfig().wrapper_args, "--unshare-all", "--die-with-parent", "--clearenv"]
        path = {"PATH": "/usr/bin:/bin"}
        environment = BubblewrapEnvironment(cwd=str(work), timeout=10, wrapper_args=sandbox, env=path)
    else:
        environment = LocalEnvironment(cwd=str(work), timeout=10)
    agent = DefaultAgent(
        model, environment, step_limit=8, wall_time_limit_seconds=300,
        system_template="Use the tool bash. To finish, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        instance_template="{{task}}",
    )  # fmt: skip
    with suppress(litellm.exceptions.ContextWindowExceededError):  # an ordinary end: what is in the folder is scored
        agent.run(f"{row['question']} Write only the number to the file answer.txt.")
    print(json.dumps({"reward": reward_of(work / "answer.txt", row["answer"]), "calls": agent.n_calls}))
