# SPDX-License-Identifier: Apache-2.0
"""Targets of `evaluate` and other commands: a run, a model folder, a PEFT adapter or a hub name."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch

from evoalign import engines, evaluation, tokens
from evoalign.config import Config, EvaluationConfig, TaskConfig, from_dict
from evoalign.config.outside import EVALUATION_SKIPS
from evoalign.config.reading import object_of, read_object
from evoalign.engines import Engine
from evoalign.errors import ConfigError, DataError, ModelError, plain
from evoalign.evaluation import Evaluation
from evoalign.models.adapters import weights_of
from evoalign.models.files import place
from evoalign.models.tensors import open_file
from evoalign.rollouts import typical
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import RunDir, again_if_pruned, saved_folders
from evoalign.rundir.method import JOURNAL, MANIFEST, method_of
from evoalign.rundir.own import load_own, read_own
from evoalign.setup import ConfigLike, Rewards, as_config, start, task_and_data, with_form
from evoalign.tasks import Data, Split, Task, prompts_alike, with_sources
from evoalign.tasks.data import parted_otherwise
from evoalign.tasks.joint import Settings
from evoalign.tokens import Tokens
from evoalign.training import saving, weights
from evoalign.types import Layout

NOT_PLAIN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Settings of PEFT under which an adapter is not a plain LoRA."""
OF_TRAINING = ("seed", "es_", "grpo")
"""Settings that an evaluation takes from the run. The seed determines which rows the run was trained on."""
logger = logging.getLogger("evoalign.scorer")
_logged = set[str]()


def evaluate(
    target: str | Path,
    *,
    config: ConfigLike | None = None,
    task: Task | None = None,
    reward: Rewards | None = None,
    split: Split = "test",
    overrides: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Score a finished run, a model folder, a PEFT adapter or a hub model on a split.

    A run is evaluated with its own config, or with `config`, except for the seed and the training settings. For a
    model, `config` names the task (its `model` section is replaced by `target`). `overrides` replaces fields of the
    `evaluation` section, such as samples, temperature and seeds. Raises ConfigError for a missing validation split, and
    if the split may contain rows that the run was trained on, and ResumeError if the run's prompts are other ones than
    in training, which is not compared for a `task` that is passed.
    """

    return evaluated(target, config, task, reward, split, overrides)[0]


def evaluated(
    target: str | Path, config: ConfigLike | None, task: Task | None, reward: Rewards | None, split: Split,
    overrides: Mapping[str, Any] | None,
) -> tuple[Evaluation, EvaluationConfig]:  # fmt: skip
    """Return what `evaluate` returns, and the sampling, which a run's chosen `task.settings` may name."""

    def resolve() -> tuple[Config, Path | None]:
        found, adapter = resolve_target(target, config, split)
        if task is None and reward is None:
            refuse_lost_task(Path(target))
        settings = {**found.evaluation.model_dump(), **(overrides or {})}
        return from_dict({**found.model_dump(), "evaluation": settings}), adapter

    there = saved_folders(Path(target))
    resolved = [again_if_pruned(Path(target), resolve)]

    def load() -> tuple[Config, Tokens, Engine]:
        return loaded(*(resolved.pop() if resolved else resolve()))  # again, if the checkpoint was deleted since

    chosen, data = task_and_data(resolved[0][0], task, reward)
    with closing(chosen):
        examples = data.of(split)
        if not examples:
            raise ConfigError(f"task {chosen.name} has no {split} split; set task.validation_size or validation_data")
        found, tokens_, engine = again_if_pruned(Path(target), load, there)
        with closing(engine):
            if task is None:
                check_prompts(Path(target), found, chosen, data, tokens_)
            _warn_of_other_scorer(Path(target), chosen)
            for line in tokens_.remarks(typical(chosen, data)):
                if line not in _logged:  # each line once in this process
                    _logged.add(line)
                    logger.warning("%s", line)
            done = evaluation.evaluate(engine, tokens_, chosen, examples, found.evaluation)
            done = evaluation.with_points(chosen, examples, evaluation.with_resampled(chosen, examples, done))
            return done, found.evaluation


def check_prompts(run: Path, config: Config, task: Task, data: Data, known: Tokens) -> None:
    """Raise ResumeError if a run's prompts are rendered otherwise than in its training.

    Compared are the run's own rows in its own form: a given config may have others. A path that is no run is accepted.
    """
    method = method_of(run) if (run / "config.yaml").is_file() else None
    made, recorded = None if method is None else read_own(run).task, dict[str, Any]()
    with suppress(DataError):  # a manifest that cannot be read
        recorded |= journal.read_header(run / JOURNAL).model_dump() if method == "es" else read_object(run / MANIFEST)
    if made is None or not prompts_alike(made, config.task):
        return
    if made.settings.keys() == config.task.settings.keys():
        data = Settings(made.settings).split(data, 0)  # as the run hashed it, whatever options it chose
    if recorded.get("prompts_hash") is not None and recorded.get("data_hash") == saving.data_hash(data):
        saving.check_prompts(RunDir(run), task, data, known, recorded["prompts_hash"])


def _warn_of_other_scorer(run: Path, task: Task) -> None:
    """Warn if other models score than those of the run: its own scores then do not compare with these."""
    recorded = (object_of(run / MANIFEST) or {}).get("scorer_digest")
    found = task.scorer_digest() if isinstance(recorded, str) else None
    if found not in (None, recorded):
        logger.warning(
            "warning: %s was scored by other models than those configured now, or with another template, max_tokens or "
            "dtype (digest %s..., and now %s...): do not compare its own scores with these",
            run, plain(str(recorded))[:12], found[:12],
        )  # fmt: skip


def loaded(config: Config, adapter: Path | None) -> tuple[Config, Tokens, Engine]:
    """Load an engine with the weights, and its tokens. Raises ModelError."""
    tokens_ = tokens.load(config.model, config.task.template_kwargs)
    engine = engines.create(config, tokens_)
    try:
        if adapter is not None:
            space, layout, _ = start(config, engine)
            if space.evolves_model:
                raise ModelError(
                    f"{adapter} is an adapter, but space {space.name} trains the model's weights; set space: lora"
                )
            engine.load(checked_adapter(adapter, layout))
    except BaseException:
        engine.close()
        raise
    return config, tokens_, engine


def resolve_target(target: str | Path, config: ConfigLike | None, split: Split = "test") -> tuple[Config, Path | None]:
    """Return the config to evaluate with, and the adapter to load, if any. Raises ConfigError, ModelError."""
    path = Path(target)
    method = method_of(path) if (path / "config.yaml").is_file() else None
    if method is not None:
        return resolve_run(path, to_ask(path, config, split), own_engine=config is None)
    if config is None:
        if not path.exists():
            raise ConfigError(
                f"{target} does not exist; give a run directory, or a model's folder or hub name and its task (--task "
                "or --config)"
            )
        raise ConfigError(
            f"{target} is not a run directory (config.yaml, and journal.jsonl or manifest.json); for a model, name the "
            "task with --task or --config"
        )
    own = as_config(config)
    weights.check_folder(path)
    own = own.model_copy(update={"task": with_form(_with_model(own, str(target))).task})
    if (path / "adapter_config.json").is_file():
        peft = _peft_config(path / "adapter_config.json")
        if peft is None or not _is_here(base := own.model.base or peft["base_model_name_or_path"]):
            return _with_model(own, str(target)), None  # loading it merges the adapter, or raises why not
        layers = peft.get("layers_to_transform")
        lora = {"rank": peft["r"], "alpha": peft["lora_alpha"], "target_modules": sorted(peft["target_modules"]),
                "target_layers": [layers] if isinstance(layers, int) else layers}  # fmt: skip
        tree = {**own.model_dump(), "space": {"name": "lora"}, "lora": lora}
        model = {"name": base, "revision": peft.get("revision"), "dtype": own.model.dtype}
        return from_dict({**tree, "model": model}), path
    return _with_model(own, str(target)), None


def resolve_run(run: Path, own: Config, *, own_engine: bool) -> tuple[Config, Path | None]:
    """Return the config to load a run's latest checkpoint with, and the adapter, if it is one.

    `own_engine`: the run's config chooses the engine. Raises CheckpointError, ModelError.
    """
    saved = last_saved(run)
    mark = check_saved(run, saved, own)
    own = own.fixed(mark.objective)
    if method_of(run) == "grpo":
        own = own.as_policy(adapter=saved.parent.name == "loras", own_engine=own_engine)
    return (own, saved) if saved.parent.name == "loras" else (_with_model(own, saved), None)


def check_saved(run: Path, saved: Path, config: Config | None) -> Mark:
    """Return the mark of a checkpoint. Raises CheckpointError if it is damaged, altered or not of the run.

    `config` is used in place of the run's own config if that names code for its space.
    """
    if method_of(run) == "grpo":
        mark = checkpoint.verify_policy(saved)
    else:
        mark = saving.checked(saved, journal.read(run / "journal.jsonl").whole())
    made = read_own(run)
    weights.check(saved, mark, config if made.space.names_code else made)
    return mark


def to_ask(run: Path, config: ConfigLike | None, split: Split = "test") -> Config:
    """Return the config to query a run with: its own, or `config` with the run's training settings.

    Raises ConfigError if the run's own config names files or code outside the run, and for a split that may contain
    training rows.
    """
    if config is None:
        return load_own(run, skip=EVALUATION_SKIPS)
    given, made = with_form(as_config(config), run), read_own(run)
    found = given.model_copy(update={name: getattr(made, name) for name in OF_TRAINING})
    check_parted(str(run), made.task, found.task, split)
    return found


def check_parted(run: str, made: TaskConfig, given: TaskConfig, split: Split) -> None:
    """Raise ConfigError if a split of the given task may contain rows that the run was trained on."""
    odd = parted_otherwise(with_sources(made), with_sources(given), split)
    if odd:
        words = (f"task.{name} is {there!r} in the run and {here!r} now" for name, (there, here) in odd.items())
        raise ConfigError(
            f"{run} split the same data differently: {'; '.join(words)}. The {split} split would contain rows that the "
            "run was trained on; keep these settings as in the run, or set task.test_data to other rows"
        )


def refuse_lost_task(path: Path) -> None:
    """Raise ConfigError for a run that was given a Python object: its config alone would score something else."""
    try:
        given = read_object(path / "manifest.json")["task"]["given_as"]
    except (DataError, KeyError, TypeError):
        return
    if given is not None:
        raise ConfigError(f"{path} was trained with a {given} object; pass the same one as {given}=")


def last_saved(path: Path) -> Path:
    """Return the latest checkpoint of a run. Raises ModelError."""
    found = saved_folders(path)
    if not found:
        raise ModelError(f"{path} is a run without a checkpoint: there is nothing to evaluate")
    return found[-1]


def _is_here(base: object) -> bool:
    """Return whether an adapter's base is an existing folder or a hub name."""
    try:
        return isinstance(base, str) and bool(base) and bool(place(base))
    except ModelError:
        return False


def _peft_config(file: Path) -> dict[str, Any] | None:
    """Return a plain LoRA's settings; None for other forms of PEFT. Raises ModelError for a damaged file."""
    try:
        peft = read_object(file)
        plain = (
            peft["peft_type"] == "LORA"
            and "lora_alpha" in peft
            and isinstance(peft["target_modules"], list)
            and bool(peft["r"])
        )
        odd = [name for name in NOT_PLAIN if peft.get(name)]
    except (DataError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not an adapter's config: {type(error).__name__}: {error}") from error
    is_plain = plain and not odd and peft.get("bias", "none") == "none"
    return peft if is_plain and _has_only_factors(weights_of(file.parent), peft["target_modules"]) else None


def _has_only_factors(file: Path, modules: Sequence[str]) -> bool:
    """Return whether all tensors of an adapter are factors of these modules in the model's layers."""
    names = (key.partition(".lora_") for key in open_file(file).keys())  # noqa: SIM118 (no mapping)
    return all(
        factor in ("A.weight", "B.weight") and path.rpartition(".")[2] in modules and re.search(r"\.\d+\.", path)
        for path, _, factor in names
    )


def _with_model(config: Config, name: str | Path) -> Config:
    base = config.model.base if (Path(name) / "adapter_config.json").is_file() else None
    return config.model_copy(update={"model": config.model.model_copy(update={"name": str(name), "base": base})})


def checked_adapter(adapter: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Load an adapter's tensors, frozen ones included. Raises ModelError if one of the layout is missing."""
    wanted = {t.name for t in (*layout.tensors, *layout.frozen)}
    for state in (checkpoint.load_adapter(adapter), checkpoint.mean_of(adapter)):
        if state.keys() >= wanted:
            return state
    missing = sorted(wanted - checkpoint.load_adapter(adapter).keys())[0]
    raise ModelError(f"{adapter} lacks {missing}; its lora settings differ from the config's")
