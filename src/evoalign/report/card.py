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

Kind = Literal["adapter", "merged", "model"]
WHAT = {
    "adapter": "a PEFT LoRA adapter (float32)",
    "merged": "a Hugging Face checkpoint, a LoRA adapter merged into its base",
    "model": "a Hugging Face checkpoint",
}
RECORDS = "run"
"""Folder of the export that holds config.yaml and journal.jsonl. On top they would make the export look like a run."""


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
    model_hash: str
    weights_hash: str
    stop_ids: tuple[int, ...]
    chat: bool
    """Whether prompts are messages that go through the tokenizer's chat template."""
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
    return [path for path in (*found, *_texts(config.space.options)) if path is not None and _is_private(path)]


def public(config: Config) -> Config:
    """The config with every path from the root of this machine cut to its last part."""
    task = config.task.model_copy(
        update={
            "name": _short(config.task.name),
            "train_data": config.task.train_data and _short(config.task.train_data),
            "test_data": config.task.test_data and _short(config.task.test_data),
            "rewards": [_short(reward) for reward in config.task.rewards],
        }
    )
    model = config.model.model_copy(update={"name": _short(config.model.name)})
    space = config.space.model_copy(update={"name": _short(config.space.name), **_cut(config.space.options)})
    own = {"output_dir": _short(config.output_dir), "space": space, "task": task, "model": model}
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
    tags = ["evoalign", "evolution-strategies", "gradient-free", *(["lora"] if facts.kind != "model" else [])]
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
        f"This is {WHAT[facts.kind]}: {_base(facts)}, fine-tuned on the task `{_code(config.task.name)}` by Evolution "
        f"Strategies with evoalign {_version(facts)}: members perturbed in space "
        f"`{_code(config.space.name)}`, rewards alone, no gradients.",
    ]
    if facts.generation != config.es.num_generations:
        lines += ["", f"**It is not the end of its run**: the mean after generation {facts.generation} of "
                  f"{config.es.num_generations}."]  # fmt: skip
    return "\n".join(lines)


def _version(facts: Facts) -> str:
    return str(facts.manifest.get("versions", {}).get("evoalign", "")).strip() or "(release not recorded)"


def _base(facts: Facts) -> str:
    revision = facts.config.model.revision
    if facts.base == "tiny":
        return "`tiny`, the small model that comes with evoalign"
    where = f"`{_code(facts.base)}`" if facts.base_on_hub else f"a local model in a folder named `{_code(facts.base)}`"
    return where + (f" at revision `{_code(revision)}`" if revision else " (no revision was pinned)")


def _change(facts: Facts) -> str:
    head = "## Before and after"
    if facts.evaluation is None:
        return f"{head}\n\nThis mean was not compared with its base. `evoalign eval` does that."
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
    es, hardware = config.es, manifest.get("hardware", {})
    width = f"sigma {es.sigma:g}" if es.sigma is not None else f"noise_multiplier {es.noise_multiplier:g}"
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
            f"- {facts.generation} generations of {es.population_size} members, {width}, learning rate "
            f"{es.learning_rate:g}, shaping {es.shaping}, optimizer {es.optimizer.name}",
            f"- seeds: run {config.seed}{drawn}",
            f"- weights served in {facts.dtype}",
            f"- versions: {_text(versions)}",
            f"- hardware: {_text(machine)}",
        ]
    )


def _reproduce(facts: Facts) -> str:
    lines = [
        "## How to reproduce it",
        "",
        f"- weights_hash of this mean after generation {facts.generation}: `{facts.weights_hash}`",
        f"- model_hash of the base: `{facts.model_hash}`",
        "",
    ]
    if not facts.with_records:
        lines += ["The run's config and journal name files by paths of the machine it was made on, so they are not "
                  "here; the configuration is below, with these paths shortened."]  # fmt: skip
        return "\n".join(lines)
    moved = "" if facts.base_on_hub or facts.base == "tiny" else " --model FOLDER_OF_THE_BASE"
    given = facts.manifest.get("task", {}).get("given_as")
    if given is not None:
        lines += [f"The {_text(str(given))} was a Python object that the config does not name: to train again, pass it "
                  f"to `evoalign.train` as `{_code(str(given))}=`.", ""]  # fmt: skip
    lines += [
        "`evoalign replay` rebuilds the mean from the base model and the journal, and checks its hash after every "
        "generation; `evoalign train` does the whole run again.",
        "",
        "```",
        f"evoalign replay {RECORDS}/journal.jsonl --generation {facts.generation}{moved}",
        f"evoalign train {RECORDS}/config.yaml --set output_dir=again",
        "```",
    ]
    return "\n".join(lines)


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
