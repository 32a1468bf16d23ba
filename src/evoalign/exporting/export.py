# SPDX-License-Identifier: Apache-2.0
"""A run's mean as others load it: a PEFT adapter, a Hugging Face checkpoint, or an adapter merged into its base.

    DIR/adapter_config.json, adapter_model.safetensors      of a `lora` run, and of GRPO with `grpo.tune: lora`
    DIR/config.json, model*.safetensors, tokenizer files    of all others, and with `merge`
    DIR/generation_config.json                              decoding and stop tokens of the run
    DIR/README.md                                           the model card
    DIR/run/config.yaml, journal.jsonl                      what `evoalign replay` needs; a run of GRPO has no journal

Plain transformers or PEFT gives the greedy tokens of the run itself (benchmarks/export_parity.py). Weights keep the
dtype that the run served, or GRPO trained. A merged weight is W + (alpha / r) B A in float32, rounded once to that
dtype; in half precision this can change tokens, since base and adapter apart keep more bits.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evoalign import tokens
from evoalign.checks import placebo_file
from evoalign.config import Config, ModelConfig, load, reading, to_yaml
from evoalign.config.shipped import locate
from evoalign.engines import weights_hash
from evoalign.errors import CheckpointError, ConfigError, EvoalignError, ModelError, RunExistsError
from evoalign.exporting import card
from evoalign.exporting.public import private_paths, public
from evoalign.models.experts import tensors_of
from evoalign.models.files import refuse_pickles, why_not
from evoalign.models.origin import elsewhere, model_path
from evoalign.rundir import checkpoint, files, journal, sealing
from evoalign.rundir.checkpoint import ADAPTER, Mark
from evoalign.rundir.directory import again_if_pruned, generation_of, saved_folders
from evoalign.rundir.journal import Log
from evoalign.rundir.method import method_of
from evoalign.setup import task_and_data
from evoalign.tasks.data import HUB
from evoalign.tokens import Tokens
from evoalign.training import weights
from evoalign.training.replay import replay

ADAPTER_CONFIG = "adapter_config.json"
SHARD_SIZE = "5GB"


@dataclass(frozen=True, slots=True)
class _Source:
    """What is exported. `config` is the run's, `model` its base, `folder` the saved mean; of GRPO, `log` is None."""

    run: Path
    config: Config
    model: ModelConfig
    log: Log | None
    folder: Path
    mark: Mark
    manifest: Mapping[str, Any]

    @property
    def dtype(self) -> str:
        """Of the weights: served in, or trained."""
        return self.log.header.dtype if self.log is not None else self.config.model.trained_dtype

    @property
    def model_hash(self) -> str | None:
        """Of the base; None where a run of GRPO did not write it down."""
        if self.log is not None:
            return self.log.header.model_hash
        return (self.manifest.get("engine") or {}).get("model_hash")

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


def export(
    run: str | Path,
    to: str | Path,
    *,
    generation: int | None = None,
    merge: bool = False,
    push: str | None = None,
    private: bool = True,
    shard_size: str = SHARD_SIZE,
    model: str | None = None,
) -> Path:
    """Write the mean of a run, finished or not, into the new folder `to`, and return that.

    `generation`: the mean after so many generations, saved or rebuilt from the journal; None is the latest saved. Of a
    run of GRPO, which has no journal, one that was saved.
    `merge` puts a `lora` run's adapter into its base. `push` uploads the folder as USER/NAME of the Hugging Face hub.
    `model` is where the base model is, if that has moved; `private` is for a repository that is made. No code that the
    run's config names is imported.

    A path of this machine is left in adapter_config.json alone (`base_model_name_or_path`, for a base in a folder).
    With `push` its last part has to do there, and config and journal stay behind if they name files by such paths.

    Raises a subclass of EvoalignError; `to` is then not there, except where only the upload failed.
    """
    run, to = Path(run), Path(to).absolute()
    _refuse(run, to, push, shard_size)
    again_if_pruned(run, lambda: _write(run, to, generation, merge, push, shard_size, model))
    if push is not None:
        _push(to, push, private)
    return to


def _write(
    run: Path, to: Path, generation: int | None, merge: bool, push: str | None, shard_size: str, model: str | None
) -> None:
    """All of the folder, or nothing."""
    with _source(run, to, generation, model) as source:
        if merge and not source.is_adapter:
            how = f"space {source.config.space.name}" if source.log is not None else "grpo.tune full"
            raise ConfigError(f"{run} trained the model itself ({how}): leave out --merge")
        try:
            with files.filled(to, replace=False) as folder:
                _fill(folder, source, to, merge, push, shard_size)
        except EvoalignError:
            raise
        except OSError as error:
            raise ModelError(f"nothing was exported to {to}: {_of_the_disk(error)}") from error
        except Exception as error:  # one of the kinds that the model library has, or a file that says something else
            raise ModelError(
                f"nothing was exported to {to}: {run} or its base model is not as it should be "
                f"({type(error).__name__}: {_one_line(error)}); --debug shows where"
            ) from error


def _refuse(run: Path, to: Path, push: str | None, shard_size: str) -> None:
    """What can be reported without reading a weight."""
    if not (run / "config.yaml").is_file() or method_of(run) is None:
        raise ConfigError(f"{run} is no run directory: it has no config.yaml and journal.jsonl or manifest.json")
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise RunExistsError(f"--to {to} exists and is not empty; choose another folder")
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?\s*[KMGT]?B", shard_size.upper()):
        raise ConfigError(f"--shard-size {shard_size}: expected a size such as 5GB or 500MB")
    if push is None:
        return
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(push)
    except HFValidationError as error:
        raise ConfigError(f"--push {push}: {_one_line(error)}") from None
    if "/" not in push:
        raise ConfigError(f"--push {push}: expected USER/NAME")


@contextmanager
def _source(run: Path, to: Path, generation: int | None, model: str | None) -> Generator[_Source, None, None]:
    """The saved mean, checked, or one that is rebuilt beside `to` for the time being."""
    if _scratch(to).is_dir():
        with files.scratch(_scratch(to)):  # of an export that was killed
            pass
    own, manifest = load([run / "config.yaml"]), _read_json(run / "manifest.json") or {}
    base = own.model if model is None else elsewhere(own.model, model)
    saved = saved_folders(run)
    if method_of(run) == "grpo":
        folder = _saved_policy(run, saved, generation)
        yield _Source(
            run, own, base, None, folder, weights.without_code(folder, checkpoint.verify_policy(folder), own), manifest
        )
        return
    if generation is None and not saved:
        raise ModelError(f"{run} saved no weights yet; name a generation of its journal with --generation")
    folder = saved[-1] if generation is None else next((f for f in saved if generation_of(f) == generation), None)
    count = generation if folder is None else generation_of(folder)
    log = journal.read(run / "journal.jsonl").whole(count)
    if folder is not None:
        yield _Source(run, own, base, log, folder, weights.without_code(folder, _verified(folder, log), own), manifest)
        return
    with files.scratch(_scratch(to)) as temporary:
        rebuilt = temporary / "mean"
        replay(run, generation=generation, to=rebuilt, model=model)
        yield _Source(run, own, base, log, rebuilt, _verified(rebuilt, log), manifest)


def _scratch(to: Path) -> Path:
    """Where a mean is rebuilt."""
    return to.with_name(f".{to.name}.rebuilt.tmp")


def _saved_policy(run: Path, saved: Sequence[Path], generation: int | None) -> Path:
    """Of GRPO only what was saved is there: no journal rebuilds the others. Raises ModelError."""
    if not saved:
        raise ModelError(f"{run} saved no weights yet, and a run of GRPO has no journal to rebuild them from")
    found = saved[-1:] if generation is None else [f for f in saved if generation_of(f) == generation]
    if not found:
        steps = ", ".join(str(generation_of(folder)) for folder in saved)
        raise ModelError(
            f"{run} saved no weights after step {generation}, and a run of GRPO has no journal to rebuild them from; "
            f"--generation takes {steps}"
        )
    return found[0]


def _verified(folder: Path, log: Log) -> Mark:
    """A saved mean that is whole and of this journal. Raises CheckpointError."""
    mark = checkpoint.verify(folder)
    if mark.generation > log.sealed or mark.weights_hash != _recorded(log, mark.generation):
        raise CheckpointError(f"{folder} is not the mean that {log.path} records for generation {mark.generation}")
    return mark


def _recorded(log: Log, generation: int) -> str | None:
    return log.generations[generation - 1].weights_hash if generation else log.header.weights_hash


def _fill(folder: Path, source: _Source, to: Path, merge: bool, push: str | None, shard_size: str) -> None:
    adapter = source.is_adapter and not merge
    base = model_path(source.model)
    tokens_ = tokens.load(source.model if source.is_adapter else ModelConfig(name=str(source.folder)))
    generation_config = _generation_config(source.config, tokens_)
    if adapter:
        _copy_adapter(source, folder, base if push is None else _shown(source.model))
        generation_config.save_pretrained(folder)
    else:
        model = _load(base, source.model.revision, source.dtype) if merge else _load(str(source.folder))
        if merge:
            _check_base(model, source)
            _merge(model, source.folder)
        model.generation_config = generation_config
        model.save_pretrained(folder, max_shard_size=shard_size)
        tokens_.tokenizer.save_pretrained(folder)
    records = push is None or not private_paths(source.config)
    if records:
        _copy_records(source, folder / card.RECORDS)
    kind = "adapter" if adapter else "merged" if merge else "model"
    facts = _facts(source, tokens_, kind, push or to.name, base, records)
    (folder / "README.md").write_text(card.card(facts), encoding="utf-8")


def _generation_config(config: Config, tokens_: Tokens) -> Any:
    """The decoding of the run's evaluation. The base model's own may punish repetition, which no engine does."""
    from transformers import GenerationConfig

    settings = config.evaluation
    sampled = settings.temperature > 0
    drawing = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0} if sampled else {}
    return GenerationConfig(
        eos_token_id=list(tokens_.stop_ids),
        pad_token_id=tokens_.pad_id,
        bos_token_id=tokens_.tokenizer.bos_token_id,
        do_sample=sampled,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        **drawing,
    )


def _copy_adapter(source: _Source, folder: Path, base: str) -> None:
    settings = reading.read_object(source.folder / ADAPTER_CONFIG)
    settings |= {"base_model_name_or_path": base, "revision": source.model.revision}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(source.folder / ADAPTER, folder / ADAPTER)


def _load(path: str, revision: str | None = None, dtype: str = "auto") -> Any:
    """A model in host memory, where it is held once. Raises ModelError."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        refuse_pickles(path, revision)
        return AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {path} does not load: {why_not(error)}") from error


def _check_base(model: Any, source: _Source) -> None:
    """Raise ModelError where the base is not the one that was trained: a merge with another gives nonsense."""
    known = source.model_hash
    if known is not None and weights_hash(model.named_parameters()) != known:
        raise ModelError(
            f"model.name {source.model.name} has other weights than the base of {source.run}; say where that is with "
            "--model FOLDER"
        )


@torch.no_grad()
def _merge(model: Any, folder: Path) -> None:
    """W + (alpha / r) B A in float32, rounded once to the dtype of W; one matrix at a time, in place."""
    settings, parameters = reading.read_object(folder / ADAPTER_CONFIG), tensors_of(model)
    scaling, state = settings["lora_alpha"] / settings["r"], checkpoint.load_adapter(folder)
    for name, a in state.items():
        module, found, _ = name.partition(".lora_A.")
        if found:
            weight = parameters[f"{module}.weight"]
            delta = (state[f"{module}.lora_B.weight"] @ a).mul_(scaling)
            weight.copy_(delta.add_(weight))


def _copy_records(source: _Source, folder: Path) -> None:
    """Config and journal, if any, the lines that are whole; where the run was on this machine is nobody's business."""
    folder.mkdir()
    config = source.config.model_copy(update={"output_dir": Path(source.config.output_dir).name})
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    if source.log is not None:
        (folder / "journal.jsonl").write_bytes(source.log.path.read_bytes()[: source.log.size])


def _facts(source: _Source, tokens_: Tokens, kind: card.Kind, name: str, base: str, with_records: bool) -> card.Facts:
    config, mark = source.config, source.mark
    sizes, messages = _task_of(config)
    return card.Facts(
        name=name,
        kind=kind,
        method="es" if source.log is not None else "grpo",
        config=public(config.model_copy(update={"model": source.model})),
        base=_shown(source.model),
        base_on_hub=base == source.model.name and not Path(base).is_dir(),
        generation=mark.generation,
        dtype=source.dtype,
        model_hash=source.model_hash,
        weights_hash=mark.weights_hash,
        stop_ids=tokens_.stop_ids,
        chat=messages and bool(tokens_.tokenizer.chat_template),
        with_records=with_records,
        evaluation=_evaluation(source),
        placebo=placebo_file.read(source.run, source.config),
        manifest=source.manifest,
        data=_data(config),
        sizes=sizes,
    )


def _evaluation(source: _Source) -> dict[str, Any] | None:
    """The comparison of this very mean; a run that went on has one of another mean."""
    found = _read_json(source.run / sealing.EVALUATION)
    if found is None or found.get("weights_hash") != source.mark.weights_hash:
        return None
    return {**found, "sealed": sealing.is_sealed(source.run, sealing.EVALUATION)}


def _shown(model: ModelConfig) -> str:
    """A hub name, or the last part of a folder's path."""
    return Path(model.name).name if Path(model.name).expanduser().is_dir() else model.name


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        return reading.read_object(file, mend="delete it to export without it")
    except reading.MissingError:
        return None


def _data(config: Config) -> list[card.DataFile]:
    shown = public(config).task
    named = zip(("training", "test", "validation"), config.task.files, shown.files, strict=True)
    return [card.DataFile(role, str(name), _sha256(source)) for role, source, name in named if source is not None]


def _sha256(source: str) -> str | None:
    file = locate(source)
    return files.digest_of(file) if not source.startswith(HUB) and file.is_file() else None


def _task_of(config: Config) -> tuple[tuple[int, int, int] | None, bool]:
    """Sizes of training, test and validation where that takes no network and no code but ours; whether it chats."""
    chosen = config.task
    named = (chosen.name, *chosen.rewards, chosen.objective.name if chosen.objective else "")
    if any(":" in name for name in named) or any((file or "").startswith(HUB) for file in chosen.files):
        return None, chosen.prompt != "raw"
    try:
        task, data = task_and_data(config, None, None)
        return data.sizes, not isinstance(task.prompt(data.test[0]), str)
    except EvoalignError:  # the data has moved since; the card does without
        return None, chosen.prompt != "raw"


def _push(folder: Path, name: str, private: bool) -> None:
    """Make the repository, if it is not there, and upload. Raises ModelError; the folder stays."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export of an evoalign run")
    except Exception as error:  # of the hub, the network or the disk: a dozen kinds without a common base
        raise ModelError(
            f"--push {name} failed: {_one_line(error)} The export is whole in {folder}; log in with `hf auth login` if "
            f"that is what is missing, then: hf upload {name} {folder}"
        ) from error


def _of_the_disk(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.strerror and error.filename else _one_line(error)


def _one_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).split("\n") if line.strip()), type(error).__name__)
