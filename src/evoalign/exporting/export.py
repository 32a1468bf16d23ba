# SPDX-License-Identifier: Apache-2.0
"""A run's mean or a member as others load it: a PEFT adapter, a Hugging Face checkpoint, or an adapter in its base.

    DIR/adapter_config.json, adapter_model.safetensors      of a `lora` run, and of GRPO with `grpo.tune: lora`
    DIR/config.json, model*.safetensors, tokenizer files    of all others, and with `merge`
    DIR/generation_config.json                              decoding and stop tokens of the run
    DIR/README.md, evolution.png                            the model card and its figure
    DIR/run/config.yaml, journal.jsonl                      what `evoalign replay` needs; a run of GRPO has no journal
    DIR/run/member.json                                     which member it is, if it is no mean

Plain transformers or PEFT gives the greedy tokens of the run itself (benchmarks/export_parity.py). Weights keep the
dtype that the run served, or GRPO trained; `dtype` asks for another. A merged weight is W + (alpha / r) B A in float32,
rounded once, to the base's own dtype (or the served one, where that is narrower): in half precision this can change
tokens, since base and adapter apart keep more bits.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoalign import tokens
from evoalign.config import FORMAT_VERSION, Config, ModelConfig, load, reading, to_yaml
from evoalign.config.run import TrackingConfig
from evoalign.errors import ConfigError, EvoalignError, ModelError, RunExistsError
from evoalign.exporting import card, facts, weights
from evoalign.exporting.excerpts import FIGURE
from evoalign.exporting.public import private_paths
from evoalign.exporting.source import ADAPTER_CONFIG, Source, opened, shown_name
from evoalign.models.origin import origin
from evoalign.rundir import files, journal
from evoalign.rundir.checkpoint import ADAPTER
from evoalign.rundir.directory import again_if_pruned
from evoalign.rundir.method import method_of
from evoalign.tokens import Tokens
from evoalign.training.weights import MEMBER

DTYPES = ("float32", "bfloat16", "float16")
SHARD_SIZE = "5GB"
SAMPLES = 3


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be made of the mean."""

    merge: bool
    push: str | None
    shard_size: str
    dtype: str | None
    samples: int


def export(
    run: str | Path,
    to: str | Path,
    *,
    generation: int | None = None,
    member: int | None = None,
    merge: bool = False,
    push: str | None = None,
    private: bool = True,
    shard_size: str = SHARD_SIZE,
    model: str | None = None,
    dtype: str | None = None,
    samples: int = SAMPLES,
) -> Path:
    """Write the mean of a run, finished or not, into the new folder `to`, and return that.

    `generation`: the mean after so many generations, saved or rebuilt from the journal; None is the latest saved. Of a
    run of GRPO, which has no journal, one that was saved.
    `member`: instead of the mean, that member of the population of `generation` (counted from 0, as in the run's
    tables): the mean after so many generations and the member's noise, rebuilt from the journal. Of a space whose
    members are served beside the weights (`lowrank`) they are merged into these.
    `merge` puts a `lora` run's adapter into its base. `push` uploads the folder as USER/NAME of the Hugging Face hub.
    `model` is where the base model is, if that has moved; `private` is for a repository that is made. `dtype` (float32,
    bfloat16 or float16) is that of the weights of a merge or a checkpoint; None keeps the base's own, or the run's. The
    card shows the first `samples` completions of the test split, before and after. No code that the run's config names
    is imported.

    A path of this machine is left in adapter_config.json alone (`base_model_name_or_path`, for a base in a folder).
    With `push` its last part has to do there, and config and journal stay behind if they name files by such paths.

    Raises a subclass of EvoalignError; `to` is then not there, except where only the upload failed.
    """
    run, to = Path(run), Path(to).absolute()
    _refuse(run, to, push, shard_size, dtype)
    asked = _Asked(merge, push, shard_size, dtype, samples)
    again_if_pruned(run, lambda: _write(run, to, generation, member, model, asked))
    if push is not None:
        _push(to, push, private)
    return to


def _write(run: Path, to: Path, generation: int | None, member: int | None, model: str | None, asked: _Asked) -> None:
    """All of the folder, or nothing."""
    with opened(run, to, generation, model, member) as source:
        _refuse_form(source, asked)
        try:
            with files.filled(to, replace=False) as folder:
                _fill(folder, source, to, asked)
        except EvoalignError:
            raise
        except OSError as error:
            raise ModelError(f"nothing was exported to {to}: {_of_the_disk(error)}") from error
        except Exception as error:  # one of the kinds that the model library has, or a file that says something else
            raise ModelError(
                f"nothing was exported to {to}: {run} or its base model is not as it should be "
                f"({type(error).__name__}: {_one_line(error)}); --debug shows where"
            ) from error


def _refuse_form(source: Source, asked: _Asked) -> None:
    """Raise ConfigError for what cannot be made of this run."""
    if asked.merge and not source.is_adapter:
        how = f"space {source.config.space.name}" if source.log is not None else "grpo.tune full"
        raise ConfigError(f"{source.run} trained the model itself ({how}): leave out --merge")
    if source.is_adapter and not asked.merge:
        if asked.dtype is not None:
            raise ConfigError(
                f"--dtype {asked.dtype} is of a model's weights, and {source.run} has an adapter; add --merge"
            )
        if origin(source.model).adapters:
            raise ConfigError(
                f"{source.run} started from {source.model.name}, merged into its base, and an adapter is of no use "
                "to those who do not have the merge; add --merge"
            )


def _refuse(run: Path, to: Path, push: str | None, shard_size: str, dtype: str | None) -> None:
    """What can be reported without reading a weight."""
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
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


def _fill(folder: Path, source: Source, to: Path, asked: _Asked) -> None:
    adapter, dtype = source.is_adapter and not asked.merge, weights.dtype_of(source, asked.dtype, merge=asked.merge)
    tokens_ = tokens.load(source.model if source.is_adapter else ModelConfig(name=str(source.folder)))
    generation_config = _generation_config(source.config, tokens_)
    if adapter:
        _copy_adapter(source, folder, origin(source.model).base if asked.push is None else shown_name(source.model))
        generation_config.save_pretrained(folder)
    else:
        model = weights.whole(source, dtype, merge=asked.merge)
        model.generation_config = generation_config
        model.save_pretrained(folder, max_shard_size=asked.shard_size)
        tokens_.tokenizer.save_pretrained(folder)
    records = asked.push is None or not private_paths(source.config)
    if records:
        _copy_records(source, folder / card.RECORDS)
    kind = "adapter" if adapter else "merged" if asked.merge else "model"
    told = facts.gather(source, tokens_, kind, asked.push or to.name, dtype, records, asked.samples)
    if told.figure:
        (folder / FIGURE).write_bytes(facts.figure(source.run))
    (folder / "README.md").write_text(card.card(told), encoding="utf-8")


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


def _copy_adapter(source: Source, folder: Path, base: str) -> None:
    settings = reading.read_object(source.folder / ADAPTER_CONFIG)
    settings |= {"base_model_name_or_path": base, "revision": source.model.revision}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(source.folder / ADAPTER, folder / ADAPTER)


def _copy_records(source: Source, folder: Path) -> None:
    """Config and journal, if any, the lines that are whole; where the run was on this machine is nobody's business."""
    folder.mkdir()
    name = Path(source.config.output_dir).name
    config = source.config.model_copy(update={"output_dir": name, "tracking": TrackingConfig()})
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    if source.log is not None:
        (folder / "journal.jsonl").write_bytes(source.log.path.read_bytes()[: source.log.size])
    if source.member is not None:
        place = {"generation": source.mark.generation, "member": source.member}
        record = {"format_version": FORMAT_VERSION, **place, "weights_hash": source.mark.weights_hash}
        (folder / MEMBER).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def rounding_of(run: Path, folder: Path, *, merged: bool) -> str:
    """What the weights that were exported from a run into a folder lost since they were measured; see `rounding`."""
    if method_of(run) == "grpo":
        served = load([run / "config.yaml"]).model.trained_dtype
    else:
        served = journal.read(run / "journal.jsonl").header.dtype
    return weights.rounding(served, dtype_in(folder), merged=merged)


def dtype_in(folder: Path) -> str:
    """Of the weights in an exported folder: float32 of an adapter, in which it evolved."""
    if (folder / ADAPTER_CONFIG).is_file():
        return "float32"
    return str(reading.read_object(folder / "config.json")["dtype"])


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
