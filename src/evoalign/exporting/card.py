# SPDX-License-Identifier: Apache-2.0
"""The model card of an exported mean: facts gathered from a run directory, put into card.md.jinja.

Names and texts come from anywhere. Filters of the template make them plain text: `plain` in Markdown, `code` in a code
span, `block` in a fence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup
from pydantic import BaseModel, ValidationError

from evoalign.config import Config, ModelConfig, outside, reading, to_yaml
from evoalign.config.load import locate
from evoalign.errors import DataError, EvoalignError, cut
from evoalign.exporting.source import Member, Source, public, read_json, rounding, shown_name
from evoalign.models.origin import origin
from evoalign.placebos import file as placebo_file
from evoalign.placebos.estimates import PlaceboResults, beyond_drift, largest, parse, sentence
from evoalign.report.tables import visible
from evoalign.rewards.objective import aim_of
from evoalign.rundir import checksums, files, parquet
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import JOURNAL, MANIFEST, Method
from evoalign.setup import task_and_data
from evoalign.tasks import Split
from evoalign.tasks.data import HUB, hub_parts
from evoalign.tokens import Tokens

Kind = Literal["adapter", "merged", "model"]
KINDS = {
    "adapter": "a PEFT LoRA adapter (float32)",
    "merged": "a Hugging Face checkpoint, a LoRA adapter merged into its base",
    "model": "a Hugging Face checkpoint",
}
TAGS: dict[Method, list[str]] = {"es": ["evolution-strategies", "gradient-free"], "grpo": ["grpo", "trl"]}
RECORDS = "run"
"""Folder of the export for config.yaml and journal.jsonl. At the top they would make the export look like a run."""
FIGURE = "evolution.png"
MOST_FIGURE = 2**24
"""Largest figure in bytes."""
PNG = b"\x89PNG\r\n\x1a\n"
MOST_SHOWN = 400
"""Characters shown of a prompt or a completion."""
QUESTION = "What is 3 + 5?"


@dataclass(frozen=True, slots=True)
class Sample:
    """A test prompt with its completions and rewards before and after training."""

    prompt: str
    before: str
    reward_before: float
    after: str
    reward_after: float


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts on a card. `config` is already `public`; `base` is a hub name if `base_on_hub`."""

    name: str
    """Folder or USER/NAME, as the code on the card loads it."""
    kind: Kind
    config: Config
    base: str
    base_on_hub: bool
    generation: int
    dtype: str
    model_hash: str | None
    """None if it was not recorded."""
    weights_hash: str
    stop_ids: tuple[int, ...]
    chat: bool
    """Whether prompts are messages for the tokenizer's chat template."""
    system: str | None = None
    """System message; None if there is none, or if it is not known without running user code."""
    joins_system: bool = False
    """Whether the chat template refuses a system message, so that its text begins the user message."""
    method: Method = "es"
    with_records: bool = True
    evaluation: Mapping[str, Any] | None = None
    """results/evaluation.json, if it is of this mean."""
    placebo: PlaceboResults | None = None
    """results/placebo.json."""
    manifest: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Sequence[Mapping[str, str | None]] = ()
    """`role`, `name` and `sha256` of each source; the last is None if it could not be read, or is no file."""
    sizes: tuple[int, int, int] | None = None
    """Numbers of training, test and validation examples."""
    saved: str | None = None
    """Dtype of the exported weights, if it is not the run's."""
    over: str | None = None
    """Base model of the adapter that the run started from; None if it started from a model."""
    samples: Sequence[Sample] = ()
    figure: bool = False
    """Whether FIGURE is in the folder of the card."""
    member: Member | None = None
    """Member of a population; None for a mean."""
    quantised: str = ""
    """How the base is quantised; empty in full precision."""
    warning: str = ""
    """Says that this model was not measured, where the adapter of a quantised base is merged into another one."""


def plain(text: object) -> str:
    """Return text on one line, without what Markdown and HTML would interpret."""
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]#])", r"\\\1", line)


def code(text: object) -> str:
    """Return text on one line for a code span in a table."""
    return " ".join(str(text).split()).replace("`", "'").replace("|", "/")


def block(text: str) -> str:
    """Return text in a fence that it cannot end."""
    short = cut(text, MOST_SHOWN)
    return "\n".join([f"{_fence(short)}text", *map(visible, short.split("\n")), _fence(short)])


def _fence(text: str) -> str:
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


@cache
def _template() -> jinja2.Template:
    # Names and texts go through a filter for Markdown, which autoescape does not know; it escapes HTML in all others.
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("evoalign", "exporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[[Any], str]] = {"plain": plain, "code": code, "block": block, "repr": repr}
    env.filters |= {name: _escaped(shown) for name, shown in filters.items()}
    return env.get_template("card.md.jinja")


def _escaped(shown: Callable[[Any], str]) -> Callable[[Any], Markup]:
    """Return a filter whose result is not escaped again."""
    return lambda value: Markup(shown(value))


def card(facts: Facts) -> str:
    """Return README.md: YAML metadata for the hub, then Markdown."""
    config, manifest, found, is_es = facts.config, facts.manifest, facts.evaluation, facts.method == "es"
    versions, hardware = manifest.get("versions", {}), manifest.get("hardware", {})
    named = zip(facts.sizes or (), ("training", "test", "validation"), strict=False)
    hub = facts.base_on_hub or any((file or "").startswith(HUB) for file in config.task.files)
    base = facts.base if facts.base_on_hub and not facts.warning else "FOLDER_OF_THE_BASE"
    cores = f"{hardware['cores']} CPU cores" if "cores" in hardware else "not recorded"
    text = to_yaml(config).rstrip()
    saved, alarms = facts.saved or facts.dtype, (found or {}).get("alarms") or {}

    def release(library: str = "evoalign") -> str:
        return plain(str(versions.get(library, "")).strip()) or "(release not recorded)"

    def interval(name: str) -> str:
        bounds = (found or {}).get("change_mean_low_high", {}).get(name)
        return f"{bounds[1]:+.4g} to {bounds[2]:+.4g}" if bounds and bounds[1] < bounds[2] else ""

    place = f"the mean after generation {facts.generation}" if is_es else f"the policy after step {facts.generation}"
    if facts.member is not None:
        place = f"member {facts.member.index} of generation {facts.generation}"
    page = _template().render(
        facts=facts,
        config=config,
        task=config.task,
        es=config.es if is_es else None,
        grpo=config.grpo,
        is_es=is_es,
        member=facts.member,
        found=found,
        kinds=KINDS,
        metadata=Markup(_metadata(facts)),
        title=facts.name.rsplit("/", 1)[-1],
        revision=config.model.revision,
        release=release,
        total=config.es.num_generations if is_es else config.grpo.max_steps,
        ended="ending" in (found or {}),
        place=place,
        alarms=alarms if alarms.get("verdict") else None,
        trained="" if found is None else aim_of(found["after"]),
        interval=interval,
        placebo_lines=[] if found is None else map(Markup, placebo_lines(found, facts.placebo)),
        figure=FIGURE,
        adapter=facts.kind == "adapter",
        question=QUESTION,
        sizes=[f"{count} {name} examples" for count, name in named if count],
        drawing=config.evaluation,
        saved=saved,
        versions=", ".join(f"{k} {v}" for k, v in versions.items()) or "not recorded",
        hardware=", ".join(hardware.get("gpus") or []) or cores,
        records=RECORDS,
        command="train" if is_es else "grpo",
        given=manifest.get("task", {}).get("given_as"),
        moved="" if facts.base == "tiny" and not facts.warning else f" --model {base}",
        # Settings that a run from elsewhere may not choose; the cache with base and data is not known here.
        own=f" --config {RECORDS}/config.yaml" if hub or any(outside.marked(config)) else "",
        lost=Markup("" if facts.kind == "adapter" else rounding(facts.dtype, saved, merged=facts.kind == "merged")),
        fence=_fence(text),
        yaml=Markup(text),
    )
    return "\n".join(map(visible, page.split("\n"))) + "\n"


def _metadata(facts: Facts) -> str:
    task = facts.config.task
    hub = [hub_parts(source)[0] for source in task.files if source and source.startswith(HUB)]
    adapter = facts.kind == "adapter"
    return ModelCardData(
        base_model=facts.base if facts.base_on_hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[
            "evoalign",
            *(facts.config.grpo.algorithm if tag == "grpo" else tag for tag in TAGS[facts.method]),
            *(["lora"] if facts.kind != "model" else []),
        ],
        datasets=sorted(set(hub)) or None,
        base_model_relation=("adapter" if adapter else "finetune") if facts.base_on_hub else None,
        **_model_index(facts),
    ).to_yaml()


def _model_index(facts: Facts) -> dict[str, Any]:
    """Return the measures after training for the hub's listing, with the data set and split of the hub if any.

    A listing shows numbers without text, so results that are not verified, with an alarm, or of another base are left
    out.
    """
    found = facts.evaluation
    alarmed = (found or {}).get("alarms") or {}
    if found is None or facts.warning or not found.get("verified", True) or alarmed.get("verdict"):
        return {}
    task, split = facts.config.task, str(found["split"])
    tested = task.test_data or task.train_data or ""
    source, part, of_hub = hub_parts(tested) if tested.startswith(HUB) else (task.name, None, split)
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=source,
            dataset_name=source,
            dataset_config=part,
            dataset_split=of_hub,
            metric_type=name,
            metric_name=f"{name}, {split} split",
            metric_value=float(value),
            verified=False,
        )
        for name, value in found["after"].items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]
    return {"model_name": facts.name.rsplit("/", 1)[-1], "eval_results": results} if results else {}


def placebo_lines(found: Mapping[str, Any], kept: PlaceboResults | None = None) -> list[str]:
    """Return the drift of the gain, by the run's own placebos or by `kept`, whichever are more. Raises DataError."""
    own = parse(found["placebo"], "results/evaluation.json") if "placebo" in found else None
    known = largest(own, kept)
    if known is None:
        return []
    whole = [] if known.fitness is None else [f"{plain(known.fitness.line())}."]
    reward = f"Reward: {sentence(known.reward)}; {beyond_drift(known.reward, advise=False)}."
    return ["", " ".join(["**Signal and drift.**", *whole, reward])]


def gather(
    source: Source, tokens_: Tokens, kind: Kind, name: str, saved: str, with_records: bool, samples: int
) -> Facts:
    """Gather the facts of a run; `saved` is the dtype of the exported weights. Raises DataError for altered files."""
    config, mark, start = source.config, source.mark, origin(source.model)
    sizes, messages, system = _task_facts(config)
    _check(source.manifest, _Manifest, source.run / MANIFEST)
    evaluation = read_json(source.run / checksums.EVALUATION)
    if evaluation is not None and evaluation.get("weights_hash") == mark.weights_hash:
        _check(evaluation, _Evaluation, source.run / checksums.EVALUATION)
        evaluation["verified"] = checksums.verify(source.run, checksums.EVALUATION, JOURNAL)
    else:
        evaluation = None  # it is of another mean
    shown, trained_on = public(config).task.files, source.quantised
    if kind == "merged" and trained_on:
        warning = (
            f"the merged model was not measured: its adapter was trained on a quantised base ({trained_on}), whose "
            f"numbers differ from those of {shown_name(source.model)}; evaluate it"
        )
    else:
        warning = ""
    named = zip(("training", "test", "validation"), config.task.files, shown, strict=True)
    return Facts(
        name=name,
        kind=kind,
        method="es" if source.log is not None else "grpo",
        config=public(config.model_copy(update={"model": source.model})),
        base=shown_name(source.model),
        base_on_hub=start.base == source.model.name and not Path(start.base).is_dir(),
        over=shown_name(ModelConfig(name=start.base)) if start.adapters else None,
        generation=mark.generation,
        dtype=source.dtype,
        saved=saved,
        model_hash=source.model_hash,
        weights_hash=mark.weights_hash,
        stop_ids=tokens_.stop_ids,
        chat=messages and bool(tokens_.tokenizer.chat_template),
        system=system,
        joins_system=system is not None and _joins(tokens_, system),
        with_records=with_records,
        evaluation=evaluation,
        placebo=placebo_file.read(source.run, source.config),
        manifest=source.manifest,
        data=[
            {"role": role, "name": str(name), "sha256": _sha256(file)} for role, file, name in named if file is not None
        ],
        sizes=sizes,
        samples=_samples(source.run, samples) if evaluation is not None else (),
        figure=bool(figure(source.run)),
        member=source.population_member,
        quantised="" if warning else trained_on,
        warning=warning,
    )


def _joins(tokens_: Tokens, system: str) -> bool:
    chat = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
    try:
        return tokens_.render(chat)[1] is not chat
    except EvoalignError:
        return False


class _Settings(BaseModel):
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    samples: int = 1
    seeds: list[int] = []


class _Evaluation(BaseModel):
    """The values of results/evaluation.json that the card formats."""

    split: Split
    examples: int
    settings: _Settings
    before: dict[str, float]
    after: dict[str, float]
    change_mean_low_high: dict[str, tuple[float, float, float]] = {}
    alarms: dict[str, Any] | None = None


class _Hardware(BaseModel):
    gpus: list[str] | None = None
    cores: int | None = None


class _Manifest(BaseModel):
    """The values of manifest.json that the card formats."""

    versions: dict[str, str] = {}
    hardware: _Hardware = _Hardware()
    task: dict[str, Any] = {}


def _check(tree: Mapping[str, Any], model: type[BaseModel], file: Path) -> None:
    """Raise DataError where a value in a file is not of the kind that a run writes: it may come from a stranger."""
    try:
        model.model_validate(tree)
    except ValidationError as error:
        where = plain(cut(".".join(map(str, error.errors(include_input=False)[0]["loc"])), 80))
        raise DataError(f"{file} is damaged ({where}); put it back from a copy") from None


def figure(run: Path) -> bytes:
    """Return evolution.png of a run; empty if there is none."""
    try:
        found = reading.read_bytes(run / "figures" / FIGURE, MOST_FIGURE)
    except DataError:
        return b""
    return found if found.startswith(PNG) else b""


def _samples(run: Path, count: int) -> list[Sample]:
    """Return the first examples of the test split. Raises DataError for damaged tables."""
    tables: list[dict[int, dict[str, Any]]] = []
    for name in ("before", "after"):
        file = RunDir(run).completions(name)
        rows = parquet.read(file) if file.is_file() else []
        if rows and not {"example", "prompt", "text", "reward"} <= rows[0].keys():
            raise DataError(f"{file} has other columns than a run writes; put it back from a copy")
        tables.append({row["example"]: row for row in reversed(rows)})
    before, after = tables
    found: list[Sample] = []
    for i in sorted(before.keys() & after.keys())[:count]:
        first, last = before[i], after[i]
        rewards = float(first["reward"]), float(last["reward"])
        found.append(Sample(str(last["prompt"]), str(first["text"]), rewards[0], str(last["text"]), rewards[1]))
    return found


def _sha256(source: str) -> str | None:
    file = locate(source)
    return files.digest_of(file) if not source.startswith(HUB) and file.is_file() else None


def _task_facts(config: Config) -> tuple[tuple[int, int, int] | None, bool, str | None]:
    """Return the sizes of the splits (None: they need the network or user code), whether prompts are messages, and
    the system message."""
    task = config.task
    unknown = None, task.prompt != "raw", task.system_prompt
    names_code = any(mark in (outside.CODE, outside.SCRIPT) for _, _, mark in outside.marked(task))
    if names_code or any((file or "").startswith(HUB) for file in task.files):
        return unknown
    try:
        loaded, data = task_and_data(config, None, None)
        prompt = loaded.prompt(data.test[0])
    except EvoalignError:  # the data has moved since the run
        return unknown
    if isinstance(prompt, str):
        return data.sizes, False, None
    return data.sizes, True, next((m["content"] for m in prompt if m["role"] == "system"), None)
