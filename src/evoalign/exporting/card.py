# SPDX-License-Identifier: Apache-2.0
"""The model card of an exported mean: what it is, what it was trained on, what changed, how to load and repeat it.

A card is for others: a path on this machine is named by its last part alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from huggingface_hub import ModelCardData

from evoalign.config import Config, to_yaml
from evoalign.rundir.method import Method

Kind = Literal["adapter", "merged", "model"]
WHAT = {
    "adapter": "a PEFT LoRA adapter (float32)",
    "merged": "a Hugging Face checkpoint, a LoRA adapter merged into its base",
    "model": "a Hugging Face checkpoint",
}
TAGS: dict[Method, list[str]] = {"es": ["evolution-strategies", "gradient-free"], "grpo": ["grpo", "trl"]}
RECORDS = "run"
"""Folder of the export that holds config.yaml and, of ES, journal.jsonl. On top they would make it look like a run."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One source of examples. `sha256` is None where it could not be read, or is no file."""

    role: str
    name: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card says. `config` is already `public`; `base` is what `from_pretrained` takes where `base_on_hub`."""

    name: str
    """Folder or USER/NAME, as the snippet loads it."""
    kind: Kind
    config: Config
    base: str
    base_on_hub: bool
    generation: int
    dtype: str
    model_hash: str | None
    """None where it was not recorded."""
    weights_hash: str
    stop_ids: tuple[int, ...]
    chat: bool
    """Whether prompts are messages that go through the tokenizer's chat template."""
    method: Method = "es"
    with_records: bool = True
    evaluation: Mapping[str, Any] | None = None
    """results/evaluation.json, where it is of this mean."""
    manifest: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Sequence[DataFile] = ()
    sizes: tuple[int, int] | None = None
    """Examples to train and to test on."""


def card(facts: Facts) -> str:
    """README.md: YAML metadata as the hub reads it, then Markdown."""
    sections = [_title(facts), _change(facts), _load(facts), _data(facts), _training(facts), _reproduce(facts),
                _limits(facts), _config(facts)]  # fmt: skip
    return f"---\n{_metadata(facts)}\n---\n\n" + "\n\n".join(sections) + "\n"


def private_paths(config: Config) -> list[str]:
    """The settings that name a place on this machine from its root."""
    task = config.task
    found = [config.model.name, task.name, task.train_data, task.test_data, *task.rewards, config.space.name]
    objective = task.objective.model_dump() if task.objective else {}
    own = (*_texts(task.options), *_texts(config.space.options), *_texts(config.grpo.trl), *_texts(objective))
    return [path for path in (*found, *own) if path is not None and _is_private(path)]


def public(config: Config) -> Config:
    """The config with every path from the root of this machine cut to its last part."""
    task = config.task.model_copy(
        update={
            "name": _short(config.task.name),
            "train_data": config.task.train_data and _short(config.task.train_data),
            "test_data": config.task.test_data and _short(config.task.test_data),
            "rewards": [_short(reward) for reward in config.task.rewards],
            **_cut(config.task.options),
            "objective": config.task.objective
            and config.task.objective.model_copy(update=_cut(config.task.objective.model_dump())),
        }
    )
    model = config.model.model_copy(update={"name": _short(config.model.name)})
    space = config.space.model_copy(update={"name": _short(config.space.name), **_cut(config.space.options)})
    grpo = config.grpo.model_copy(update={"trl": _cut(config.grpo.trl)})
    own = {"output_dir": _short(config.output_dir), "space": space, "task": task, "model": model, "grpo": grpo}
    return config.model_copy(update=own)


def _texts(tree: Any) -> list[str]:
    """All strings of nested settings."""
    if isinstance(tree, dict):
        return _texts(list(cast("dict[str, Any]", tree).values()))
    if isinstance(tree, list):
        return [text for value in cast("list[Any]", tree) for text in _texts(value)]
    return [tree] if isinstance(tree, str) else []


def _cut(tree: Any) -> Any:
    """Nested settings with their paths cut."""
    if isinstance(tree, dict):
        return {key: _cut(value) for key, value in cast("dict[str, Any]", tree).items()}
    if isinstance(tree, list):
        return [_cut(value) for value in cast("list[Any]", tree)]
    return _short(tree) if isinstance(tree, str) else tree


def _is_private(path: str) -> bool:
    return path.startswith("~") or Path(path).is_absolute()


def _short(path: str) -> str:
    return Path(path).name if _is_private(path) else path


def _metadata(facts: Facts) -> str:
    task = facts.config.task
    hub = [source.split(":")[1] for source in (task.train_data, task.test_data) if source and source.startswith("hub:")]
    tags = ["evoalign", *TAGS[facts.method], *(["lora"] if facts.kind != "model" else [])]
    data = ModelCardData(
        base_model=facts.base if facts.base_on_hub else None,
        library_name="peft" if facts.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        datasets=sorted(set(hub)) or None,
        base_model_relation=("adapter" if facts.kind == "adapter" else "finetune") if facts.base_on_hub else None,
    )
    return data.to_yaml()


def _title(facts: Facts) -> str:
    config = facts.config
    lines = [
        f"# {_text(facts.name.rsplit('/', 1)[-1])}",
        "",
        f"This is {WHAT[facts.kind]}: {_base(facts)}, fine-tuned on the task `{_code(config.task.name)}` by "
        f"{_how(facts)}.",
    ]
    total = config.es.num_generations if facts.method == "es" else config.grpo.max_steps
    if facts.generation != total:
        lines += ["", f"**It is not the end of its run**: {_place(facts)} of {total}."]
    return "\n".join(lines)


def _how(facts: Facts) -> str:
    """By which method, in a few words."""
    config, release = facts.config, _version(facts)
    if facts.method == "es":
        return (
            f"Evolution Strategies with evoalign {release}: members perturbed in space `{_code(config.space.name)}`, "
            "rewards alone, no gradients"
        )
    tuned = "a LoRA adapter" if config.grpo.tune == "lora" else "all weights"
    return (
        f"GRPO (Shao et al., arXiv 2402.03300) with TRL {_version(facts, 'trl')} and evoalign {release}, the "
        f"baseline to Evolution Strategies: policy gradients of {tuned}"
    )


def _place(facts: Facts) -> str:
    """Where in its run the exported mean stands."""
    word = "the mean after generation" if facts.method == "es" else "the policy after step"
    return f"{word} {facts.generation}"


def _version(facts: Facts, library: str = "evoalign") -> str:
    return _text(str(facts.manifest.get("versions", {}).get(library, "")).strip()) or "(release not recorded)"


def _base(facts: Facts) -> str:
    revision = facts.config.model.revision
    if facts.base == "tiny":
        return "`tiny`, the small model that comes with evoalign"
    where = f"`{_code(facts.base)}`" if facts.base_on_hub else f"a local model in a folder named `{_code(facts.base)}`"
    return where + (f" at revision `{_code(revision)}`" if revision else " (no revision was pinned)")


def _change(facts: Facts) -> str:
    head = "## Before and after"
    if facts.evaluation is None:
        which = "This mean" if facts.method == "es" else "This policy"
        return f"{head}\n\n{which} was not compared with its base. `evoalign eval` does that."
    found = facts.evaluation
    settings: Mapping[str, Any] = found["settings"]
    sampled = settings["temperature"] > 0
    decoding = (
        f"sampled at temperature {settings['temperature']:g}, top_p {settings['top_p']:g}, {settings['samples']} "
        f"completions for each of the seeds {', '.join(map(str, settings['seeds']))}"
        if sampled
        else "greedy"
    )
    lines = [
        head,
        "",
        f"Means over {found['examples']} examples of the {found['split']} split, {decoding}, at most "
        f"{settings['max_tokens']} tokens. Intervals are of the mean paired difference over examples (95 %, BCa "
        "bootstrap).",
        "",
        "| measure | before | after | change | 95 % interval |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *_rows(found)])


def _rows(found: Mapping[str, Any]) -> list[str]:
    rows: list[str] = []
    for name in (name for name in found["before"] if name in found["after"]):
        before, after = found["before"][name], found["after"][name]
        interval = found.get("change_mean_low_high", {}).get(name)
        bounds = f"{interval[1]:+.4g} to {interval[2]:+.4g}" if interval else ""
        rows.append(f"| {_text(name)} | {before:.4g} | {after:.4g} | {after - before:+.4g} | {bounds} |")
    return rows


def _load(facts: Facts) -> str:
    adapter = facts.kind == "adapter"
    revision = f", revision={facts.config.model.revision!r}" if facts.config.model.revision else ""
    tiny = adapter and facts.base == "tiny"
    lines = ["from peft import PeftModel"] if adapter else []
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig"]
    lines += ["from evoalign.models import tiny"] if tiny else []
    lines += ["", f"here = {facts.name!r}"]
    if adapter:
        comment = "" if tiny or facts.base_on_hub else "  # the folder of the base model"
        lines += [f"base = {'str(tiny())' if tiny else repr(facts.base)}{comment}"]
    source = f"base{revision}" if adapter else "here"
    dtype = repr(facts.dtype)
    lines += [
        f"tokenizer = AutoTokenizer.from_pretrained({source})",
        f"model = AutoModelForCausalLM.from_pretrained({source}, dtype={dtype})",
        *(["model = PeftModel.from_pretrained(model, here)"] if adapter else []),
        f"settings = GenerationConfig.from_pretrained(here, max_new_tokens={facts.config.evaluation.max_tokens})",
        "",
        *_prompt(facts),
        "output = model.generate(**inputs, generation_config=settings)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    stop = ", ".join(map(str, facts.stop_ids))
    note = (
        f"`generation_config.json` holds the decoding the run was evaluated with and its stop tokens ({stop}), so that "
        "penalties of the base model's own settings do not enter."
    )
    return "\n".join(["## How to load it", "", "```python", *lines, "```", "", note])


def _prompt(facts: Facts) -> list[str]:
    if not facts.chat:
        return ['inputs = tokenizer("What is 3 + 5?", return_tensors="pt")']
    return [
        'messages = [{"role": "user", "content": "What is 3 + 5?"}]',
        "inputs = tokenizer.apply_chat_template(",
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ")",
    ]


def _data(facts: Facts) -> str:
    task = facts.config.task
    lines = ["## Data", ""]
    for file in facts.data:
        digest = f", SHA-256 `{file.sha256}`" if file.sha256 else ""
        lines.append(f"- {file.role}: `{_code(file.name)}`{digest}")
    if not facts.data:
        lines.append(f"- the data that come with the task `{_code(task.name)}` of evoalign")
    split = f"`{task.split}`" if task.test_data is None and facts.data else "given as two files"
    if facts.data:
        lines.append(f"- split: {split}")
    if facts.sizes is not None:
        lines.append(f"- sizes: {facts.sizes[0]} training examples, {facts.sizes[1]} test examples")
    return "\n".join(lines)


def _training(facts: Facts) -> str:
    config, manifest = facts.config, facts.manifest
    hardware = manifest.get("hardware", {})
    gpus: list[str] = hardware.get("gpus") or []
    machine = ", ".join(gpus) or (f"{hardware['cores']} CPU cores" if "cores" in hardware else "not recorded")
    settings = config.evaluation
    drawn = f"; evaluation {', '.join(map(str, settings.seeds))}" if settings.temperature > 0 else ""
    found: Mapping[str, str] = manifest.get("versions", {})
    versions = ", ".join(f"{name} {version}" for name, version in found.items()) or "not recorded"
    return "\n".join(
        [
            "## Training",
            "",
            f"- {_work(facts)}",
            f"- seeds: run {config.seed}{drawn}",
            f"- weights {'served' if facts.method == 'es' else 'trained'} in {facts.dtype}",
            f"- versions: {_text(versions)}",
            f"- hardware: {_text(machine)}",
        ]
    )


def _work(facts: Facts) -> str:
    """The settings of the method."""
    if facts.method == "grpo":
        return _grpo(facts)
    es = facts.config.es
    width = f"sigma {es.sigma:g}" if es.sigma is not None else f"noise_multiplier {es.noise_multiplier:g}"
    return (
        f"{facts.generation} generations of {es.population_size} members, {width}, learning rate "
        f"{es.learning_rate:g}, shaping {es.shaping}, optimizer {es.optimizer.name}"
    )


def _grpo(facts: Facts) -> str:
    grpo = facts.config.grpo
    tuned = f"LoRA of rank {facts.config.lora.rank}" if grpo.tune == "lora" else "all weights"
    drawn = {
        "trl": f"drawn by TRL{' on vLLM' if grpo.use_vllm else ''} at temperature {grpo.temperature:g}",
        "engine": f"drawn by evoalign's engine at temperature {grpo.temperature:g}",
        "es": f"greedy ones of members of a population (off_policy {grpo.off_policy})",
    }
    passes = f"{grpo.per_device_train_batch_size} x {grpo.gradient_accumulation_steps} completions a step and device"
    return (
        f"{facts.generation} steps, {passes} in groups of {grpo.num_generations}, {drawn[grpo.rollouts]}; {tuned}, "
        f"loss {grpo.loss_type}, beta {grpo.beta:g}, learning rate {grpo.learning_rate:g} "
        f"({grpo.lr_scheduler_type}), optimizer {_text(grpo.optim)}"
    )


def _reproduce(facts: Facts) -> str:
    lines = ["## How to reproduce it", "", f"- weights_hash of {_place(facts)}: `{facts.weights_hash}`"]
    lines += [f"- model_hash of the base: `{facts.model_hash}`"] if facts.model_hash is not None else []
    lines += [""]
    if not facts.with_records:
        records = "config and journal name" if facts.method == "es" else "config names"
        lines += [f"The run's {records} files by paths of the machine it was made on, so they are not here; the "
                  "configuration is below, with these paths shortened."]  # fmt: skip
        return "\n".join(lines)
    return "\n".join([*lines, *_commands(facts)])


def _commands(facts: Facts) -> list[str]:
    """What to type, after what a command line cannot say."""
    lines: list[str] = []
    command = "train" if facts.method == "es" else "grpo"
    given = facts.manifest.get("task", {}).get("given_as")
    if given is not None:
        lines += [f"The {_text(str(given))} was a Python object that the config does not name: to train again, pass it "
                  f"to `evoalign.{command}` as `{_code(str(given))}=`.", ""]  # fmt: skip
    again = f"evoalign {command} {RECORDS}/config.yaml --set output_dir=again"
    if facts.method == "grpo":
        return [*lines, "`evoalign grpo` does the whole run again:", "", "```", again, "```"]
    moved = "" if facts.base_on_hub or facts.base == "tiny" else " --model FOLDER_OF_THE_BASE"
    return [
        *lines,
        "`evoalign replay` rebuilds the mean from the base model and the journal, and checks its hash after every "
        "generation; `evoalign train` does the whole run again.",
        "",
        "```",
        f"evoalign replay {RECORDS}/journal.jsonl --generation {facts.generation}{moved}",
        again,
        "```",
    ]


def _limits(facts: Facts) -> str:
    return "\n".join(
        [
            "## Limits",
            "",
            f"- It was scored on the task `{_code(facts.config.task.name)}` alone"
            f"{'' if facts.evaluation else ', while it trained'}; what else changed in the model was not measured.",
            "- A reward can be earned without the ability that it stands for: read completions before you rely on it.",
            "- It has the limits of its base model. No licence is claimed here; that of the base model applies to it.",
            *(
                ["- The merged weights are W + (alpha / r) B A in float32, rounded once to "
                 f"{facts.dtype}: in half precision, tokens can differ from those of base and adapter apart."]
                if facts.kind == "merged"
                else []
            ),
        ]
    )  # fmt: skip


def _config(facts: Facts) -> str:
    text = to_yaml(facts.config).rstrip()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return (
        f"## Configuration\n\n<details><summary>resolved config</summary>\n\n{fence}yaml\n{text}\n{fence}\n\n</details>"
    )


def _text(text: str) -> str:
    """On one line, and without what Markdown and HTML would read."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]#])", r"\\\1", line)


def _code(text: str) -> str:
    """On one line, and without the end of a code span."""
    return " ".join(text.split()).replace("`", "'").replace("|", "/")
