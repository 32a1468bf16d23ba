# SPDX-License-Identifier: Apache-2.0
"""`train` and `evaluate`: the command line's two verbs, for Python."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from evoalign import checkpoint, engines, estimate, evaluation, evolve, noise, optimizer, spaces, tasks, tokens
from evoalign.config import Config, EvaluationConfig, from_dict, load
from evoalign.engines import Engine
from evoalign.errors import ConfigError, DataError, ModelError
from evoalign.evaluation import Evaluation
from evoalign.journal import Journal
from evoalign.report import figures
from evoalign.report.progress import Display
from evoalign.report.rows import metrics_row
from evoalign.report.tables import Interval, Sample, before_after
from evoalign.rundir import RunDir, command_line, config_hash, make_manifest
from evoalign.spaces import Space
from evoalign.tasks import Data, Task
from evoalign.tokens import Tokens
from evoalign.types import Facts, Generation, Layout, TensorSpec

ConfigLike = Config | Mapping[str, Any] | str | Path
Reward = Callable[..., Any]
Hook = Callable[[Generation], None]
SHOWN_SAMPLES = 4
NOT_PLAIN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Settings of PEFT that change what an adapter means."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to. `saved` is a PEFT adapter (`lora`) or a Hugging Face checkpoint."""

    path: Path
    saved: Path
    before: Evaluation
    after: Evaluation


@dataclass(frozen=True, slots=True)
class _Parts:
    """Everything a run is made of, loaded and checked."""

    config: Config
    task: Task
    data: Data
    tokens: Tokens
    engine: Engine
    space: Space
    layout: Layout
    facts: Facts


def train(
    config: ConfigLike,
    *,
    task: Task | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    on_generation: Hook | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Result:
    """Fine-tune by Evolution Strategies and leave a run directory.

    `config` is a Config, a nested mapping or a YAML file. `task` and `reward` (functions of TRL's signature, for the
    custom task) take the place of what the config names. `on_generation` is called after each generation.
    Raises a subclass of EvoalignError for bad input, before anything is written.
    """
    config = as_config(config)
    console = console or Console()
    run = RunDir(Path(config.output_dir))
    run.refuse(overwrite=overwrite)
    parts = _assemble(config, task, reward)
    try:
        for line in [*_gold_lines(parts), *estimate.step_lines(config, parts.layout)]:
            console.print(line, markup=False, highlight=False)
        console.print(f"evaluating the start on {len(parts.data.test)} test examples", highlight=False)
        before = _evaluate_test(parts)
        given = "task" if task is not None else "reward" if reward is not None else None
        facts = {"engine": dataclasses.asdict(parts.facts), "task": {"name": parts.task.name, "given_as": given}}
        run.create(config, make_manifest(config, facts, command_line()), overwrite=overwrite)
        try:
            _write_completions(run, "before", before)
            _loop(parts, run, before, on_generation, console)
        except BaseException:
            if not run.rows:
                run.undo()
            raise
        saved = _save(parts, run)
        console.print(f"evaluating the result on {len(parts.data.test)} test examples", highlight=False)
        after = _evaluate_test(parts)
    finally:
        parts.engine.close()
    _write_completions(run, "after", after)
    change = _change(before, after)
    _write_evaluation(run, config.evaluation, before, after, change)
    before_after(before.measures, after.measures, console, _samples(before, after), change)
    console.print(f"saved {saved}\nrun   {run.path}", markup=False, highlight=False, soft_wrap=True)
    return Result(run.path, saved, before, after)


def evaluate(
    target: str | Path,
    *,
    config: ConfigLike | None = None,
    task: Task | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    split: Literal["train", "test"] = "test",
    overrides: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Score a finished run, a model folder, a PEFT adapter or a hub model on a split.

    A run brings its own config; for a model, `config` says the task (its `model` section is replaced by `target`).
    `overrides` replaces fields of the `evaluation` section, such as samples, temperature and seeds.
    """
    config, adapter = resolve_target(target, config)
    if task is None and reward is None:
        _refuse_lost_task(Path(target))
    settings = {**config.evaluation.model_dump(), **(overrides or {})}
    config = from_dict({**config.model_dump(), "evaluation": settings})
    chosen, data = _task_and_data(config, task, reward)
    tokens_ = tokens.load(config.model)
    engine = engines.create(config, tokens_)
    try:
        if adapter is not None:
            space, layout, _ = _start(config, engine)
            if space.evolves_model:
                raise ModelError(f"{adapter} is an adapter and the config's space is {space.name}")
            engine.load(_checked(adapter, layout))
        examples = data.test if split == "test" else data.train
        return evaluation.evaluate(engine, tokens_, chosen, examples, config.evaluation)
    finally:
        engine.close()


def dry_run(config: ConfigLike, *, overwrite: bool = False) -> list[str]:
    """What a config would do: eta, effective sigma, memory, rollouts and tokens. Loads no weights, writes nothing."""
    config = as_config(config)
    _, data = _task_and_data(config, None, None)
    work = estimate.work_lines(config, len(data.train))
    RunDir(Path(config.output_dir)).refuse(overwrite=overwrite)
    on_gpu = config.engine.device.startswith("cuda") or (config.engine.device == "auto" and torch.cuda.is_available())
    automatic = "bfloat16" if on_gpu else "float32"
    dtype = getattr(torch, automatic if config.model.dtype == "auto" else config.model.dtype)
    try:
        specs = estimate.shapes(config)
    except ModelError as error:
        return [*estimate.step_lines(config, None), *work, f"memory: not estimated; {error}"]
    layout = _layout(spaces.create(config), specs, dtype)
    known = layout if config.es.sigma is not None else None  # mean |W| needs the weights
    return [*estimate.step_lines(config, known), *work, *estimate.memory_lines(config, specs, layout, dtype)]


def as_config(config: ConfigLike) -> Config:
    """A checked Config from any of its forms. Raises ConfigError."""
    if isinstance(config, Config):
        return config
    return load([config]) if isinstance(config, str | Path) else from_dict(config)


def resolve_target(target: str | Path, config: ConfigLike | None) -> tuple[Config, Path | None]:
    """The config to evaluate with, and the adapter to load, if any. Raises ConfigError or ModelError."""
    path = Path(target)
    if (path / "config.yaml").is_file() and (path / "journal.jsonl").is_file():
        own = of_run(path) if config is None else as_config(config)
        saved = _last_saved(path)
        if saved.parent.name == "loras":
            return own, saved
        return _with_model(own, saved), None
    if config is None:
        raise ConfigError(f"{target} is no run directory; say the task with --task or --config")
    own = as_config(config)
    if (path / "adapter_config.json").is_file():
        peft = _peft_config(path / "adapter_config.json")
        layers = peft.get("layers_to_transform")
        lora = {"rank": peft["r"], "alpha": peft["lora_alpha"], "target_modules": sorted(peft["target_modules"]),
                "target_layers": [layers] if isinstance(layers, int) else layers}  # fmt: skip
        tree = {**own.model_dump(), "space": {"name": "lora"}, "lora": lora}
        model = {"name": peft["base_model_name_or_path"], "revision": peft.get("revision"), "dtype": own.model.dtype}
        return from_dict({**tree, "model": model}), path
    return _with_model(own, str(target)), None


def of_run(path: Path) -> Config:
    """The config a run left. Raises ConfigError where it names code: a downloaded run may not say what is imported."""
    own = load([path / "config.yaml"])
    code = [name for name in (own.space.name, own.task.name, *own.task.rewards) if ":" in name]
    if code:
        raise ConfigError(
            f"{path} names code of its own ({', '.join(code)}), which is not run unasked; "
            f"if you trust it, pass it with --config {path / 'config.yaml'}"
        )
    return own


def _refuse_lost_task(path: Path) -> None:
    """A run that was given a Python object knows its name only; its config would score something else."""
    try:
        given = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["task"]["given_as"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if given is not None:
        raise ConfigError(f"{path} was trained with a {given} object; pass the same one as {given}=")


def _assemble(config: Config, task: Task | None, reward: Reward | Sequence[Reward] | None) -> _Parts:
    """Load and check everything, cheapest first."""
    chosen, data = _task_and_data(config, task, reward)
    tokens_ = tokens.load(config.model)
    engine = engines.create(config, tokens_)
    try:
        space, layout, facts = _start(config, engine)
    except BaseException:
        engine.close()
        raise
    return _Parts(config, chosen, data, tokens_, engine, space, layout, facts)


def _task_and_data(config: Config, task: Task | None, reward: Reward | Sequence[Reward] | None) -> tuple[Task, Data]:
    rewards = None if reward is None else ([reward] if callable(reward) else list(reward))
    if task is not None and rewards is not None:
        raise ConfigError("give a task or a reward, not both: a task has its own reward")
    chosen = task or tasks.create(config.task, rewards)
    data = chosen.load_data(config.seed)
    for split, examples in (("training", data.train), ("test", data.test)):
        if not examples:
            raise DataError(f"task {chosen.name}: the {split} split is empty; give it at least one example")
    return chosen, data


def _gold_lines(parts: _Parts) -> list[str]:
    """A warning where gold answers do not earn the maximum: published data has such rows, so it is no error."""
    try:
        parts.task.self_check([*parts.data.train, *parts.data.test])
    except DataError as error:
        return [f"warning: {error}"]
    return []


def _start(config: Config, engine: Engine) -> tuple[Space, Layout, Facts]:
    space = spaces.create(config)
    layout = _layout(space, engine.specs(), engine.dtype)
    facts = engine.start(space, layout, optimizer.create(config.es.optimizer), config.es.decay > 0)
    return space, layout, facts


def _layout(space: Space, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
    layout = space.layout(specs, dtype)
    if not layout.tensors:
        raise ModelError(
            f"space {space.name} finds nothing to evolve: the chosen layers have no nn.Linear matrix; "
            "use space full, or another model"
        )
    return layout


def _loop(parts: _Parts, run: RunDir, before: Evaluation, hook: Hook | None, console: Console) -> None:
    """Run the generations; write, draw and show each as it ends."""
    config = parts.config
    journal = Journal(run.journal, _header(parts))
    title = f"{parts.task.name}, {parts.space.name}, N {config.es.population_size}"
    try:
        with Display(config.es.num_generations, console) as display:
            for generation in _generations(parts, journal):
                row = metrics_row(generation)
                run.append_metrics(row)
                figures.evolution(run.rows, run.figures / "evolution.png", title=title,
                                  baseline=before.measures["reward"])  # fmt: skip
                figures.time_breakdown(run.rows, run.figures / "time_breakdown.png", title=title)
                display.update(row, generation)
                if hook is not None:
                    hook(generation)
    finally:
        journal.close()


def _generations(parts: _Parts, journal: Journal) -> Iterator[Generation]:
    return evolve.evolve(
        parts.config,
        parts.task,
        parts.data.train,
        parts.engine,
        parts.tokens,
        journal,
        lambda: _evaluate_test(parts).measures,
    )


def _evaluate_test(parts: _Parts) -> Evaluation:
    return evaluation.evaluate(parts.engine, parts.tokens, parts.task, parts.data.test, parts.config.evaluation)


def _header(parts: _Parts) -> dict[str, Any]:
    tokenizer = parts.tokens.tokenizer
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template], sort_keys=True)
    return {
        "config_hash": config_hash(parts.config),
        "noise_table": noise.TABLE_SHA256,
        "tokenizer_hash": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "space": parts.space.name,
        "evolved_parameters": parts.layout.parameters,
        "model_hash": parts.facts.model_hash,
        "weights_hash": parts.engine.fingerprint(),
    }


def _save(parts: _Parts, run: RunDir) -> Path:
    config = parts.config
    base, state = tokens.model_path(config.model), dict(parts.engine.state())
    folder = run.saved(config.es.num_generations, adapter=not parts.space.evolves_model)
    if parts.space.evolves_model:
        checkpoint.save_model(folder, base, config.model.revision, parts.engine.dtype, state)
    else:
        checkpoint.save_adapter(folder, config, parts.layout, base, state)
    return folder


def _write_completions(run: RunDir, name: str, result: Evaluation) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([dataclasses.asdict(s) for s in result.completions])
    parquet.write_table(table, run.results / "completions" / f"{name}.parquet")


def _change(before: Evaluation, after: Evaluation) -> dict[str, Interval]:
    """Change of each measure and its paired 95 % interval over examples."""
    return {
        name: evaluation.paired_interval(values, after.measures_E[name])
        for name, values in before.measures_E.items()
        if name in after.measures_E
    }


def _write_evaluation(
    run: RunDir,
    settings: EvaluationConfig,
    before: Evaluation,
    after: Evaluation,
    change: Mapping[str, Interval],
) -> None:
    tree = {
        "format_version": 1,
        "split": "test",
        "examples": len(next(iter(before.measures_E.values()))),
        "settings": settings.model_dump(mode="json"),
        "before": before.measures,
        "after": after.measures,
        "change_mean_low_high": {name: list(interval) for name, interval in change.items()},
    }
    checkpoint.write_text(run.results / "evaluation.json", json.dumps(tree, indent=2) + "\n")


def _samples(before: Evaluation, after: Evaluation) -> list[Sample]:
    pairs = list(zip(before.completions, after.completions, strict=True))[:SHOWN_SAMPLES]
    return [Sample(b.prompt, b.target, b.text, a.text) for b, a in pairs]


def _last_saved(path: Path) -> Path:
    found = sorted([*path.glob("loras/generation_*"), *path.glob("checkpoints/generation_*")])
    if not found:
        raise ModelError(f"{path} holds a run that saved no weights; nothing to evaluate")
    return found[-1]


def _peft_config(file: Path) -> dict[str, Any]:
    """A plain LoRA's settings. Raises ModelError for a form of PEFT that would be read wrongly."""
    try:
        peft = json.loads(file.read_text(encoding="utf-8"))
        plain = (
            peft["peft_type"] == "LORA"
            and "lora_alpha" in peft
            and isinstance(peft["target_modules"], list)
            and bool(peft["r"])
        )
        odd = [name for name in NOT_PLAIN if peft.get(name)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not an adapter's config: {type(error).__name__}: {error}") from error
    if not plain or odd or peft.get("bias", "none") != "none":
        raise ModelError(f"{file} is not a plain LoRA ({', '.join(odd) or 'peft_type, target_modules or bias'}); "
                         "merge it into the model and give the model's folder")  # fmt: skip
    return peft


def _with_model(config: Config, name: str | Path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"name": str(name)})})


def _checked(adapter: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """An adapter's tensors, a frozen A among them; all that the layout has."""
    state = checkpoint.load_adapter(adapter)
    missing = [t.name for t in (*layout.tensors, *layout.frozen) if t.name not in state]
    if missing:
        raise ModelError(f"{adapter} lacks {missing[0]}; its lora settings differ from the config's")
    return state
