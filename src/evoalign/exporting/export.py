# SPDX-License-Identifier: Apache-2.0
"""Export a run's mean or a member as a PEFT adapter, a Hugging Face checkpoint, or an adapter merged into its base.

    DIR/adapter_config.json, adapter_model.safetensors      of a `lora` run, and of GRPO with `grpo.tune: lora`
    DIR/config.json, model*.safetensors, tokenizer files    of all others, and with `merge`
    DIR/generation_config.json                              decoding and stop tokens of the run
    DIR/settings.json                                       the options of `task.settings` that belong to the weights
    DIR/README.md, evolution.png                            the model card and its figure
    DIR/run/config.yaml, journal.jsonl                      input of `evoalign replay`; a run of GRPO has no journal
    DIR/run/member.json                                     which member it is, if it is no mean

Plain transformers or PEFT gives the greedy tokens of the run (benchmarks/export_parity.py). Weights keep the dtype that
the run served, or GRPO trained; `dtype` chooses another. A merged weight is W + (alpha / r) B A in float32, rounded
once, to the base's own dtype (or the served one, if that is narrower): in half precision this can change tokens, since
base and adapter apart keep more bits. An adapter that was trained on a quantised base is merged only into the model in
full precision, `model`: another model than the one that was measured, as the card says.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evoalign import tokens
from evoalign.config import FORMAT_VERSION, Config, ModelConfig, reading, to_yaml
from evoalign.config.joint import Chosen, likeliest
from evoalign.config.run import TrackingConfig
from evoalign.errors import ConfigError, EvoalignError, ModelError, RunExistsError
from evoalign.exporting import card
from evoalign.exporting.source import ADAPTER_CONFIG, Source, opened, private_paths, rounding, shown_name
from evoalign.models.adapters import add
from evoalign.models.files import load_whole, refuse_pickles
from evoalign.models.origin import described, model_path, origin, own_dtype
from evoalign.models.quantised import files_hash, quantised_of
from evoalign.models.tensors import tensors_of
from evoalign.rundir import checkpoint, files, journal
from evoalign.rundir.checkpoint import ADAPTER, MEAN
from evoalign.rundir.directory import again_if_pruned
from evoalign.rundir.method import method_of
from evoalign.rundir.own import read_own
from evoalign.tasks.joint import Settings
from evoalign.tokens import Tokens
from evoalign.training.weights import MEMBER

DTYPES = ("float32", "bfloat16", "float16")
SHARD_SIZE = "5GB"
SAMPLES = 3
logger = logging.getLogger("evoalign.export")


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of one export."""

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

    `generation`: the mean after this many generations, saved or rebuilt from the journal; None is the latest saved. A
    run of GRPO has no journal, so only saved policies can be exported.
    `member`: the member of this index (from 0, as in the run's tables) of the population of `generation`, rebuilt from
    the journal: the mean after `generation` generations plus the member's noise. In space `lowrank` it is merged.
    `merge` merges a `lora` run's adapter into its base. `push` uploads the folder as USER/NAME of the Hugging Face hub,
    and `private` is for a new repository. `model` is the name or folder of the base model, if it has moved. `dtype`
    (float32, bfloat16 or float16) applies to a merge or a checkpoint; None keeps the base's own, or the run's. The card
    shows the first `samples` completions of the test split, before and after. Imports no code of the run's config.

    Only adapter_config.json has an absolute path of this machine (`base_model_name_or_path`, of a base in a folder).
    With `push` it has only its last part, and config and journal are left out if they have absolute paths.

    Raises a subclass of EvoalignError; `to` then does not exist, unless only the upload failed.
    """
    run, to = Path(run), Path(to).absolute()
    _refuse(run, to, push, shard_size, dtype)
    options = _Options(merge, push, shard_size, dtype, samples)
    again_if_pruned(run, lambda: _write(run, to, generation, member, model, options))
    if push is not None:
        _push(to, push, private)
    return to


def _write(
    run: Path, to: Path, generation: int | None, member: int | None, model: str | None, options: _Options
) -> None:
    """Write the whole folder, or nothing."""
    with opened(run, to, generation, model, member) as source:
        _refuse_form(source, options)
        try:
            with files.filled(to, replace=False) as folder:
                _fill(folder, source, to, options)
        except EvoalignError:
            raise
        except OSError as error:
            disk = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else _one_line(error)
            raise ModelError(f"nothing was exported to {to}: {disk}") from error
        except Exception as error:  # transformers and safetensors raise many kinds for damaged files
            raise ModelError(
                f"nothing was exported to {to}: {run} or its base model is damaged "
                f"({type(error).__name__}: {_one_line(error)}); --debug shows where"
            ) from error


def _refuse_form(source: Source, options: _Options) -> None:
    """Raise ConfigError for options that do not fit the run."""
    if options.merge and not source.is_adapter:
        how = f"space {source.config.space.name}" if source.log is not None else "grpo.tune full"
        raise ConfigError(f"{source.run} trained the model itself ({how}): leave out --merge")
    packed = quantised_of(source.model)
    if options.merge and packed is not None:
        raise ConfigError(
            f"model {source.model.name} is quantised ({packed.words}), and a merge would round the adapter of "
            f"{source.run} away; give --model FOLDER, the full-precision model that it was made from, or leave out "
            "--merge and serve base and adapter apart"
        )
    if source.is_adapter and not options.merge:
        if packed is not None:
            path, revision = described(source.model)
            refuse_pickles(path, revision)
            if source.model_hash not in (None, files_hash(path, revision, source.model.name)):
                raise ConfigError(
                    f"model {source.model.name} is quantised ({packed.words}), and is not the base that {source.run} "
                    "trained on; set --model to that one"
                )
        if source.quantised and packed is None:
            raise ConfigError(
                f"--model {source.model.name} is not quantised, and {source.run} trained on a quantised base "
                f"({source.quantised}); name that one, or add --merge"
            )
        if options.dtype is not None:
            raise ConfigError(
                f"--dtype {options.dtype} is for whole models, and {source.run} has an adapter; add --merge"
            )
        if origin(source.model).adapters:
            raise ConfigError(
                f"{source.run} started from {source.model.name}, merged into its base, and an adapter needs that "
                "merged model; add --merge"
            )


def _refuse(run: Path, to: Path, push: str | None, shard_size: str, dtype: str | None) -> None:
    """Raise for what is wrong before any weight is read. Raises ConfigError, RunExistsError."""
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


def _fill(folder: Path, source: Source, to: Path, options: _Options) -> None:
    adapter, dtype = source.is_adapter and not options.merge, _dtype(source, options)
    tokens_ = tokens.load(source.model if source.is_adapter else ModelConfig(name=str(source.folder)))
    chosen = _chosen(source)
    if chosen:
        (folder / checkpoint.SETTINGS).write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")
    generation_config = _generation_config(source.config.decoded(chosen), tokens_)
    if adapter:
        settings = reading.read_object(source.folder / ADAPTER_CONFIG)
        base = origin(source.model).base if options.push is None else shown_name(source.model)
        settings |= {"base_model_name_or_path": base, "revision": source.model.revision}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for file in (source.folder / ADAPTER, *source.folder.glob(MEAN)):
            shutil.copyfile(file, folder / file.name)
        generation_config.save_pretrained(folder)
    else:
        model = _whole(source, dtype, merge=options.merge)
        model.generation_config = generation_config
        model.save_pretrained(folder, max_shard_size=options.shard_size)
        tokens_.tokenizer.save_pretrained(folder)
    records = options.push is None or not private_paths(source.config)
    if records:
        _copy_records(source, folder / card.RECORDS)
    kind = "adapter" if adapter else "merged" if options.merge else "model"
    facts = card.gather(source, tokens_, kind, options.push or to.name, dtype, records, options.samples)
    if facts.warning:
        logger.warning("%s", facts.warning)
    if facts.figure:
        (folder / card.FIGURE).write_bytes(card.figure(source.run))
    (folder / "README.md").write_text(card.card(facts), encoding="utf-8")


def _dtype(source: Source, options: _Options) -> str:
    """Return the dtype of the export: float32 of an adapter; of a merge the narrower of the base's own and served."""
    if source.is_adapter and not options.merge:
        return "float32"
    served = source.dtype
    if options.dtype is not None or not options.merge:
        return options.dtype or served
    own = own_dtype(source.model)
    narrower = own is not None and getattr(torch, own).itemsize <= getattr(torch, served).itemsize
    return own if own is not None and narrower else served


@torch.no_grad()
def _whole(source: Source, dtype: str, *, merge: bool) -> Any:
    """Return the whole model in host memory; each weight is formed in float32 and rounded once. Raises ModelError."""
    from evoalign.engines.transformers.engine import is_base

    served, wanted = getattr(torch, source.dtype), getattr(torch, dtype)
    if not merge:
        model = load_whole(str(source.folder), None, served, str(source.folder))
        if wanted != served:
            model.to(wanted)
            parameters = tensors_of(model)
            for name, tensor in checkpoint.mean_of(source.folder).items():
                parameters[name].copy_(tensor)
        return model
    model = load_whole(model_path(source.model), source.model.revision, served, source.model.name)
    known, state = source.model_hash, checkpoint.load_adapter(source.folder)
    if source.quantised:  # no other model has the hash of its packed weights
        _check_shapes(model, state, source)
    elif known is not None and not is_base(known, source.model, model):
        raise ModelError(
            f"model.name {source.model.name} has other weights than the base of {source.run}; set --model FOLDER to "
            "the base that was trained"
        )
    settings = reading.read_object(source.folder / ADAPTER_CONFIG)
    add(model.float(), state, settings["lora_alpha"] / settings["r"])
    return model.to(wanted)


def _check_shapes(model: Any, state: Mapping[str, torch.Tensor], source: Source) -> None:
    """Raise ModelError where the adapter has factors of a matrix that the model does not have in that shape."""
    weights = tensors_of(model)
    for name, a in state.items():
        module, found, _ = name.partition(".lora_A.")
        shape = (state[f"{module}.lora_B.weight"].shape[0], a.shape[1]) if found else ()
        if found and (f"{module}.weight" not in weights or weights[f"{module}.weight"].shape != shape):
            raise ModelError(
                f"model {source.model.name} has no {module}.weight of shape {list(shape)}; set --model FOLDER to the "
                f"model that the quantised base of {source.run} was made from"
            )


def _generation_config(config: Config, tokens_: Tokens) -> Any:
    """Return the decoding of the run's evaluation, without penalties that the base model's settings may have."""
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


def _chosen(source: Source) -> Chosen:
    """Return the settings of the exported weights: the likeliest ones of a mean, those that a member drew."""
    settings = Settings.of(source.config)
    if source.member is None or source.log is None:
        return likeliest(source.config.task.settings, source.mark.objective)
    before, recorded = source.mark.generation, source.log.generations[source.mark.generation]
    if before and settings:
        logged = source.log.generations[before - 1].objective
        settings.restore({name: value for name, value in logged.items() if name in settings.state})
    return settings.chosen(settings.draw(before, recorded.update.members)[source.member])


def _copy_records(source: Source, folder: Path) -> None:
    """Copy config and whole lines of the journal, without paths and trackers of this machine."""
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
    """Say how the weights exported into `folder` were rounded since they were measured; see `rounding`."""
    if method_of(run) == "grpo":
        served = read_own(run).model.trained_dtype
    else:
        served = journal.read(run / "journal.jsonl").header.dtype
    return rounding(served, dtype_in(folder), merged=merged)


def dtype_in(folder: Path) -> str:
    """Return the dtype of an exported folder; adapters are float32."""
    if (folder / ADAPTER_CONFIG).is_file():
        return "float32"
    return str(reading.read_object(folder / "config.json")["dtype"])


def _push(folder: Path, name: str, private: bool) -> None:
    """Create the repository if needed, and upload. Raises ModelError; the folder stays."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export of an evoalign run")
    except Exception as error:  # hub, network and disk errors have no common base
        raise ModelError(
            f"--push {name} failed: {_one_line(error)} The export is complete in {folder}; log in with `hf auth login` "
            f"if needed, then: hf upload {name} {folder}"
        ) from error


def _one_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).split("\n") if line.strip()), type(error).__name__)
