# SPDX-License-Identifier: Apache-2.0
"""Hashes of the files that decide completions and scores besides weights, data and settings.

A run records them at its start and compares them when it is resumed: stop tokens, the model's config.json, and the
files of custom rewards.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from evoalign.config import Config, outside
from evoalign.config.outside import CODE, SCRIPT
from evoalign.errors import ResumeError
from evoalign.models.files import find, read_settings
from evoalign.models.origin import described
from evoalign.rundir.files import digest_of
from evoalign.tasks import TASKS
from evoalign.tokens import Tokens

BOOKKEEPING = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Settings of a config.json that change no completion, or are recorded on their own (dtype, stop tokens)."""


def inputs_of(config: Config, tokens: Tokens) -> dict[str, str]:
    """Return what to record at the start of a run. Raises ModelError, DataError for unreadable files."""
    path, revision = described(config.model)
    file = find(path, "config.json", revision)
    settings = {} if file is None else _deciding(read_settings(config.model.name, file))
    found = {"stop_ids": json.dumps(tokens.stop_ids), "model_config": _hash(settings)}
    weights, cls = config.task.reward_weights, TASKS.get(config.task.name)
    if cls is not None and cls.earlier_weights is not None and weights not in (None, [*cls.earlier_weights]):
        found["reward_weights"] = json.dumps(weights)
    code = [_file(str(value)) for place, value, mark in outside.marked(config)
            if place.startswith(("task.", "es.shaping")) and mark in (CODE, SCRIPT)]  # fmt: skip
    digests = [digest_of(file) for file in code if file is not None and file.is_file()]
    return {**found, "rewards": _hash(digests)} if digests else found


def check_inputs(path: Path, recorded: object, found: Mapping[str, str]) -> list[str]:
    """Return warnings of rewards that changed since a run began; None: an earlier release began it.

    A reward that stopped the run may have to be mended, so that a run with another one is resumed. Raises ResumeError
    for other stop tokens, another config.json, or weights that an earlier release ignored.
    """
    known = cast("Mapping[str, object]", recorded) if isinstance(recorded, Mapping) else {}
    odd = {name for name in known.keys() & found.keys() if known[name] != found[name]}
    if "stop_ids" in odd:
        raise ResumeError(
            f"{path} was trained with the stop tokens {known['stop_ids']}, and the model's files have "
            f"{found['stop_ids']} now; put generation_config.json and config.json back as they were, or begin another "
            "run"
        )
    if "model_config" in odd:
        raise ResumeError(
            f"{path} was trained with other settings of the model, such as rope_theta or rms_norm_eps, than its "
            "config.json has now; put the file back as it was, or begin another run"
        )
    if "reward_weights" in found.keys() - known.keys():
        raise ResumeError(
            f"{path} began under a release that ignored its task.reward_weights {found['reward_weights']}, which this "
            "one uses; resume it with that release, or begin another run"
        )
    if "rewards" not in odd:
        return []
    return [
        f"the files of the custom rewards or task changed since {path} began: scores from here on do not compare with "
        "the earlier ones"
    ]


def _deciding(tree: Any) -> Any:
    """Return the settings of a config.json that decide completions, at any depth."""
    if isinstance(tree, dict):
        items = cast("dict[str, Any]", tree).items()
        return {name: _deciding(value) for name, value in items if name not in BOOKKEEPING}
    return tree


def _file(code: str) -> Path | None:
    """Return the file of a script, or of code that was imported, by its name in the config."""
    module, colon, _ = code.rpartition(":")
    if not colon or module.endswith(".py"):
        return Path(module or code).expanduser()
    place = getattr(sys.modules.get(module), "__file__", None)
    return None if place is None else Path(place)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
