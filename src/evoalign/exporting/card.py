# SPDX-License-Identifier: Apache-2.0
"""The model card of an exported mean: card.md, with what it is, what changed, and how to load and repeat it put in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCardData

from evoalign.config import Config, outside, to_yaml
from evoalign.exporting.asking import asking
from evoalign.exporting.change import change
from evoalign.exporting.excerpts import Sample, excerpts, member_line
from evoalign.exporting.markdown import code, plain
from evoalign.exporting.source import Member
from evoalign.exporting.weights import rounding
from evoalign.placebos.estimates import PlaceboResults
from evoalign.report.tables import visible
from evoalign.rundir.method import Method
from evoalign.tasks.data import HUB, hub_parts

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
    system: str | None = None
    """The system message that they begin with; None where they have none, or it is not known without code of others."""
    method: Method = "es"
    with_records: bool = True
    evaluation: Mapping[str, Any] | None = None
    """results/evaluation.json, where it is of this mean."""
    placebo: PlaceboResults | None = None
    """What results/placebo.json has of the end of the run."""
    manifest: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Sequence[DataFile] = ()
    sizes: tuple[int, int, int] | None = None
    """Examples to train and to test on."""
    saved: str | None = None
    """Of the weights in the folder, where that is another dtype than the run's."""
    over: str | None = None
    """What an adapter that the run started from was merged into; None where it started from a model."""
    samples: Sequence[Sample] = ()
    figure: bool = False
    """Whether FIGURE lies beside the card."""
    member: Member | None = None
    """Of a population, where it is not a mean."""


def card(facts: Facts) -> str:
    """README.md: YAML metadata as the hub reads it, then Markdown."""
    config, manifest = facts.config, facts.manifest
    text = to_yaml(config).rstrip()
    drawn, longest_run = config.evaluation, max(map(len, re.findall("`+", text)), default=0)
    template = files("evoalign.exporting").joinpath("card.md").read_text(encoding="utf-8")
    page = Template(template).substitute(
        metadata=_metadata(facts),
        title=plain(facts.name.rsplit("/", 1)[-1]),
        what=WHAT[facts.kind],
        base=_base(facts),
        task=code(config.task.name),
        how=_how(facts),
        unfinished=_unfinished(facts),
        change=_change(facts),
        excerpts="\n".join(excerpts(facts.samples, figure=facts.figure)),
        load="\n".join(_load(facts)),
        stop=", ".join(map(str, facts.stop_ids)),
        data="\n".join(_data(facts)),
        work=_es(facts) if facts.method == "es" else _grpo(facts),
        seeds=f"{config.seed}{f'; evaluation {_listed(drawn.seeds)}' if drawn.temperature > 0 else ''}",
        served="served" if facts.method == "es" else "trained",
        dtype=facts.dtype + (f"; saved here in {_saved(facts)}" if _whole_in_another(facts) else ""),
        versions=plain(", ".join(f"{k} {v}" for k, v in manifest.get("versions", {}).items()) or "not recorded"),
        hardware=plain(_hardware(manifest.get("hardware", {}))),
        place=_place(facts),
        weights_hash=facts.weights_hash,
        again="\n".join(_again(facts)),
        scored="" if facts.evaluation else ", while it trained",
        rounded=_rounded(facts),
        fence="`" * max(3, 1 + longest_run),
        config=text,
    )
    return "\n".join(
        visible(line) for line in page.split("\n")
    )  # names come from anywhere, and a card is shown anywhere


def _metadata(facts: Facts) -> str:
    task = facts.config.task
    hub = [hub_parts(source)[0] for source in task.files if source and source.startswith(HUB)]
    adapter = facts.kind == "adapter"
    return ModelCardData(
        base_model=facts.base if facts.base_on_hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["evoalign", *TAGS[facts.method], *(["lora"] if facts.kind != "model" else [])],
        datasets=sorted(set(hub)) or None,
        base_model_relation=("adapter" if adapter else "finetune") if facts.base_on_hub else None,
        **_model_index(facts),
    ).to_yaml()


def _model_index(facts: Facts) -> dict[str, Any]:
    """The measures after training, as the hub lists them: of a data set of the hub, by the split that it calls its own.

    A listing shows a number without the words beside it, so those that the card has to warn of are left out: what is
    not sealed, and what alarmed.
    """
    found = facts.evaluation
    if found is None or not found.get("sealed", True) or (found.get("alarms") or {}).get("verdict"):
        return {}
    task, split = facts.config.task, str(found["split"])
    asked = task.test_data or task.train_data or ""
    source, part, called = hub_parts(asked) if asked.startswith(HUB) else (task.name, None, split)
    results = [
        EvalResult(
            task_type="text-generation", dataset_type=source, dataset_name=source, dataset_config=part,
            dataset_split=called, metric_type=name, metric_name=f"{name}, {split} split", metric_value=float(value),
            verified=False,
        )
        for name, value in found["after"].items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]  # fmt: skip
    return {"model_name": facts.name.rsplit("/", 1)[-1], "eval_results": results} if results else {}


def _saved(facts: Facts) -> str:
    return facts.saved or facts.dtype


def _rounded(facts: Facts) -> str:
    """What is to be known of weights that are not those whose figures the card has."""
    saved, merged = _saved(facts), facts.kind == "merged"
    if facts.member is not None and facts.kind != "adapter":
        return (
            f"- The weights of the mean and the member's noise were added in float32, and rounded once to {saved}: in "
            "half precision, tokens can differ from those of the run where that served the two apart.\n"
        )
    lost = "" if facts.kind == "adapter" else rounding(facts.dtype, saved, merged=merged)
    formed = (
        f"- The merged weights are W + (alpha / r) B A in float32, rounded once to {saved}: in half precision, tokens "
    )
    apart = "can differ from those of base and adapter apart.\n"
    return (formed + apart if merged else "") + (f"- The weights here were {lost}.\n" if lost else "")


def _whole_in_another(facts: Facts) -> bool:
    return facts.kind != "adapter" and _saved(facts) != facts.dtype


def _unfinished(facts: Facts) -> str:
    if facts.member is not None:
        return member_line(facts.member, facts.generation)
    total = facts.config.es.num_generations if facts.method == "es" else facts.config.grpo.max_steps
    if facts.generation == total:
        return ""
    if "ending" in (facts.evaluation or {}):
        return f"\nThe run ended after {facts.generation} of {total} generations, as its settings say.\n"
    return f"\n**It is not the end of its run**: {_place(facts)} of {total}.\n"


def _how(facts: Facts) -> str:
    """By which method, in a few words."""
    config, release = facts.config, _version(facts)
    if facts.method == "es":
        return (
            f"Evolution Strategies with evoalign {release}: members perturbed in space `{code(config.space.name)}`, "
            "rewards alone, no gradients"
        )
    tuned = "a LoRA adapter" if config.grpo.tune == "lora" else "all weights"
    return (
        f"GRPO (Shao et al., arXiv 2402.03300) with TRL {_version(facts, 'trl')} and evoalign {release}, the "
        f"baseline to Evolution Strategies: policy gradients of {tuned}"
    )


def _place(facts: Facts) -> str:
    """Where in its run the exported mean stands."""
    if facts.member is not None:
        return f"member {facts.member.index} of generation {facts.generation}"
    word = "the mean after generation" if facts.method == "es" else "the policy after step"
    return f"{word} {facts.generation}"


def _version(facts: Facts, library: str = "evoalign") -> str:
    return plain(str(facts.manifest.get("versions", {}).get(library, "")).strip()) or "(release not recorded)"


def _base(facts: Facts) -> str:
    revision = facts.config.model.revision
    if facts.over is not None:
        return f"`{code(facts.base)}`, a fine-tuned adapter, merged into `{code(facts.over)}`"
    if facts.base == "tiny":
        return "`tiny`, the small model that comes with evoalign"
    where = f"`{code(facts.base)}`" if facts.base_on_hub else f"a local model in a folder named `{code(facts.base)}`"
    return where + (f" at revision `{code(revision)}`" if revision else " (no revision was pinned)")


def _change(facts: Facts) -> str:
    found = facts.evaluation
    if facts.member is not None:
        return "This member was not compared with its base on held-out examples. `evoalign eval` does that."
    if found is None:
        which = "This mean" if facts.method == "es" else "This policy"
        return f"{which} was not compared with its base. `evoalign eval` does that."
    return change(found, facts.placebo)


def _load(facts: Facts) -> list[str]:
    adapter, pinned = facts.kind == "adapter", facts.config.model.revision
    tiny = adapter and facts.base == "tiny"
    dtype = facts.dtype if adapter else _saved(facts)
    comment = "" if tiny or facts.base_on_hub else "  # the folder of the base model"
    source = "here" if not adapter else f"base, revision={pinned!r}" if pinned else "base"
    return [
        *(["from peft import PeftModel"] if adapter else []),
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig",
        *(["from evoalign.models import tiny"] if tiny else []),
        "",
        f"here = {facts.name!r}  # this folder: its path where you are, or its name on the hub",
        *([f"base = {'str(tiny())' if tiny else repr(facts.base)}{comment}"] if adapter else []),
        f"tokenizer = AutoTokenizer.from_pretrained({source})",
        f"model = AutoModelForCausalLM.from_pretrained({source}, dtype={dtype!r})",
        *(["model = PeftModel.from_pretrained(model, here)"] if adapter else []),
        f"settings = GenerationConfig.from_pretrained(here, max_new_tokens={facts.config.evaluation.max_tokens})",
        "",
        *asking(facts.system, chat=facts.chat),
    ]


def _data(facts: Facts) -> list[str]:
    task = facts.config.task
    lines = [f"- the data that come with the task `{code(task.name)}` of evoalign"]
    if facts.data:
        split = "given as two files" if task.test_data is not None else f"`{task.split}`"
        lines = [*map(_file, facts.data), f"- split: {split}"]
    if facts.sizes is not None:
        named = zip(facts.sizes, ("training", "test", "validation"), strict=True)
        lines += [f"- sizes: {', '.join(f'{count} {name} examples' for count, name in named if count)}"]
    return lines


def _file(file: DataFile) -> str:
    return f"- {file.role}: `{code(file.name)}`" + (f", SHA-256 `{file.sha256}`" if file.sha256 else "")


def _hardware(found: Mapping[str, Any]) -> str:
    return ", ".join(found.get("gpus") or []) or (f"{found['cores']} CPU cores" if "cores" in found else "not recorded")


def _es(facts: Facts) -> str:
    """The settings of the method."""
    es = facts.config.es
    width = f"sigma {es.sigma:g}" if es.sigma is not None else f"noise_multiplier {es.noise_multiplier:g}"
    return (
        f"{facts.generation} generations of {es.population_size} members, {width}, learning rate "
        f"{es.learning_rate:g}, shaping {es.shaping}, optimizer {es.optimizer.name}"
    )


def _grpo(facts: Facts) -> str:
    """The settings of the method."""
    grpo, trl = facts.config.grpo, facts.config.grpo.by_name
    tuned = f"LoRA of rank {facts.config.lora.rank}" if grpo.tune == "lora" else "all weights"
    drawn = {
        "trl": f"drawn by TRL{' on vLLM' if trl['use_vllm'] else ''} at temperature {grpo.temperature:g}",
        "engine": f"drawn by evoalign's engine at temperature {grpo.temperature:g}",
        "es": f"greedy ones of members of a population (off_policy {grpo.off_policy})",
    }
    passes = f"{grpo.per_device_train_batch_size} x {grpo.gradient_accumulation_steps} completions a step and device"
    return (
        f"{facts.generation} steps, {passes} in groups of {grpo.num_generations}, {drawn[grpo.rollouts]}; {tuned}, "
        f"loss {trl['loss_type']}, beta {grpo.beta:g}, learning rate {grpo.learning_rate:g} "
        f"({trl['lr_scheduler_type']}), optimizer {plain(trl['optim'])}"
    )


def _again(facts: Facts) -> list[str]:
    """The base's hash, and what to type after what a command line cannot say."""
    es = facts.method == "es"
    lines = [f"- model_hash of the base: `{facts.model_hash}`"] if facts.model_hash is not None else []
    if not facts.with_records:
        records = "config and journal name" if es else "config names"
        return [*lines, "", f"The run's {records} files by paths of the machine it was made on, so they are not here; "
                "the configuration is below, with these paths shortened."]  # fmt: skip
    command = "train" if es else "grpo"
    given = facts.manifest.get("task", {}).get("given_as")
    lines += [""]
    if given is not None:
        lines += [f"The {plain(str(given))} was a Python object that the config does not name: to train again, pass it "
                  f"to `evoalign.{command}` as `{code(str(given))}=`.", ""]  # fmt: skip
    # What a run from elsewhere may not set by itself; whose cache has the base and the data is not known here.
    hub = facts.base_on_hub or any((file or "").startswith(HUB) for file in facts.config.task.files)
    own = f" --config {RECORDS}/config.yaml" if hub or any(outside.marked(facts.config)) else ""
    again = f"evoalign {command} {RECORDS}/config.yaml --set output_dir=again{own}"
    if not es:
        return [*lines, "`evoalign grpo` does the whole run again:", "", "```", again, "```"]
    moved = "" if facts.base == "tiny" else f" --model {facts.base if facts.base_on_hub else 'FOLDER_OF_THE_BASE'}"
    replay = f"evoalign replay {RECORDS}/journal.jsonl --generation {facts.generation}{moved}"
    what = (
        "`evoalign replay` rebuilds the mean from the base model and the journal, and checks its hash after every "
        "generation; `evoalign train` does the whole run again."
    )
    if facts.member is not None:
        place = f"--generation {facts.generation} --member {facts.member.index}"
        replay = f"evoalign export {RECORDS} {place}{moved} --to the_member"
        what = (
            "`evoalign export` rebuilds the member from the base model and the journal; `evoalign train` does the "
            "whole run again."
        )
    return [*lines, what, "", "```", replay, again, "```"]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
