# SPDX-License-Identifier: Apache-2.0
"""Scoring in this process by reward and cost models, from safetensors alone and without remote code.

    *ForScore                    the models of Safe RLHF (arXiv 2310.12773, github.com/PKU-Alignment/safe-rlhf): a body
                                 and `score_head`, applied to the last token; with `do_normalize` in their config the
                                 score is (s - mean) / (std + 1e-8), for `score_type` cost s / (std + 1e-8)
    *ForSequenceClassification   one label: its logit, without sigmoid; two labels: the second logit minus the first

A linear head is computed in float32 whatever the dtype of the body: a bfloat16 score of 11 has steps of 0.06.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open

from evoalign.config.scorer import ScorerConfig
from evoalign.errors import DataError, EvoalignError, ModelError, RewardError, plain, shown
from evoalign.models.files import (
    check_weights,
    check_whole,
    find,
    loading,
    place,
    read_settings,
    refuse_pickles,
    set_by,
    weight_files,
    why_not,
)
from evoalign.rewards.scorer.pairs import Pairs
from evoalign.rundir.files import digest_of

_OF_TOKENIZER = (
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json "
    "chat_template.jinja vocab.txt vocab.json merges.txt spm.model sentencepiece.bpe.model"
)
_NORMALIZED = {"reward": (True, True), "cost": (False, True), "critic": (False, False)}
"""Score types: whether to subtract the mean, and whether to divide by the deviation."""
_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Head:
    """Linear score head and its normalisation; `weight` [1, hidden] and `bias` [1] in float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    mean: float = 0.0
    deviation: float = 1.0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return scores [pairs] of hidden states [pairs, hidden]."""
        raw = torch.nn.functional.linear(hidden.float(), self.weight, self.bias)[:, 0]
        return (raw - self.mean) / self.deviation


@dataclass(frozen=True, slots=True)
class _Source:
    """Location of a model's files: a folder, or a hub name and revision. `name` is for messages."""

    name: str
    path: str
    revision: str | None

    @classmethod
    def of(cls, name: str, revision: str | None, key: str) -> _Source:
        """Locate a model. Raises ModelError."""
        path = place(name)
        if revision is not None and Path(path).is_dir():
            raise ModelError(
                f"scorer.{key}_revision {shown(revision)}: scorer.{key} {name} is a folder, which has no revisions; "
                "remove it"
            )
        return cls(name, path, revision)


class ScoreModel:
    """A scoring model. `digest` is the SHA-256 of its files."""

    def __init__(self, key: str, config: ScorerConfig) -> None:
        """Load the model of `scorer.<key>`, reward or cost. Raises ModelError, ConfigError."""
        self.name = str(getattr(config, key))
        with set_by(f"scorer.{key}"):
            self._load(_Source.of(self.name, getattr(config, f"{key}_revision"), key), config)

    def _load(self, source: _Source, config: ScorerConfig) -> None:
        self.device = _device(config.device)
        if config.dtype == "auto":
            dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        else:
            dtype = cast("torch.dtype", getattr(torch, config.dtype))
        self.dtype = str(dtype).removeprefix("torch.")
        tree, self.kind = _checked(source)
        self.digest = _digest(source)
        tokenizer = _tokenizer(source)
        self._head = _head(source, tree) if self.kind == "score" else None
        self._model = _loaded(source, dtype, self._head)
        self._model.eval().requires_grad_(False).to(self.device)
        if self._head is not None:
            bias = None if self._head.bias is None else self._head.bias.to(self.device)
            self._head = replace(self._head, weight=self._head.weight.to(self.device), bias=bias)
        self._has_pad = self._model.config.get_text_config().pad_token_id is not None
        self.pairs = _pairs(source, tokenizer, config, tree)
        vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        if max(tokenizer.get_vocab().values()) >= vocabulary:
            raise ModelError(
                f"model {self.name}: its tokenizer has more tokens than its weights have rows ({vocabulary}); "
                "fetch it again"
            )

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of token ids, in one forward pass padded on the right."""
        longest = max(map(len, rows))
        pad = self._pad(rows)
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = (torch.arange(longest, device=self.device)[None] < lengths[:, None]).long()
        if self._head is not None:
            hidden = self._model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            found = self._head(hidden[torch.arange(len(rows), device=self.device), lengths - 1])
        else:
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
            found = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        return [float(value) for value in found.cpu()]

    def _pad(self, rows: Sequence[Sequence[int]]) -> int:
        """Return the padding id; without one in the config, an unused id: classifiers find the end of a row by it."""
        config = self._model.config.get_text_config()
        if not self._has_pad:
            used = {i for row in rows for i in row}
            config.pad_token_id = next(i for i in range(len(used) + 1) if i not in used)
        return int(config.pad_token_id)


def check(key: str, config: ScorerConfig) -> None:
    """Raise ModelError, ConfigError if the model of `scorer.<key>` cannot load, without reading its weights.

    For hub models, only config.json is checked: looking for weights would download them.
    """
    from transformers import AutoConfig

    with set_by(f"scorer.{key}"):
        source = _Source.of(str(getattr(config, key)), getattr(config, f"{key}_revision"), key)
        _device(config.device)
        tree, _ = _checked(source)
        with _explained(source.name):
            AutoConfig.from_pretrained(source.path, revision=source.revision, trust_remote_code=False)
        if Path(source.path).is_dir():
            check_weights(source.path, source.revision, source.name)
            _pairs(source, _tokenizer(source), config, tree)


def _pairs(source: _Source, tokenizer: Any, config: ScorerConfig, tree: Mapping[str, Any]) -> Pairs:
    limits = (tree.get("max_position_embeddings"), tree.get("n_positions"), tokenizer.model_max_length)
    known = [int(value) for value in limits if isinstance(value, int) and 0 < value < 10**7]
    return Pairs(tokenizer, config.template, min([config.max_tokens, *known]), source.name)


def _checked(source: _Source) -> tuple[dict[str, Any], Literal["score", "classifier"]]:
    """Return the model's config.json and its kind. Raises ModelError."""
    refuse_pickles(source.path, source.revision, writes=False)
    name = source.name
    with _explained(name):
        found = find(source.path, "config.json", source.revision)
    if found is None:
        raise ModelError(f"model {name} has no config.json; set model.name to the folder of a model")
    tree = read_settings(name, found)
    architectures: list[Any] = tree.get("architectures") or [None]
    first = str(architectures[0])
    if first.endswith("ForScore"):
        return tree, "score"
    if first.endswith("ForSequenceClassification"):
        return tree, "classifier"
    raise ModelError(
        f"model {name} is not a scoring model: the architecture in its config.json is {plain(first)[:60]}; use one "
        "that ends in ForScore (Safe RLHF) or ForSequenceClassification"
    )


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"scorer.device {wanted}: torch sees no GPU here; set scorer.device: cpu")
    return torch.device(wanted)


@contextmanager
def _explained(name: str) -> Generator[None]:
    """Convert any exception of the library to ModelError."""
    try:
        yield
    except EvoalignError:
        raise
    except Exception as error:
        raise ModelError(f"model {name} does not load: {why_not(error)}") from error


def _loaded(source: _Source, dtype: torch.dtype, head: Head | None) -> Any:
    """Load the body for a score head, or a classifier without one. Raises ModelError."""
    from transformers import AutoModel, AutoModelForSequenceClassification
    from transformers.utils import logging

    kind: Any = AutoModelForSequenceClassification if head is None else AutoModel
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the body does not use the tensors of the head, which is loaded separately
    try:
        with _explained(source.name), loading(source.path):
            model, info = kind.from_pretrained(
                source.path,
                revision=source.revision,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    finally:
        logging.set_verbosity(verbosity)
    check_whole(source.name, info)
    if head is not None:
        hidden = int(model.config.get_text_config().hidden_size)
        if head.weight.shape != (1, hidden):
            shape = tuple(head.weight.shape)
            raise ModelError(f"model {source.name}: score_head.weight has shape {shape}, expected (1, {hidden})")
        return model
    labels = model.config.num_labels
    if labels not in (1, 2):
        raise ModelError(f"model {source.name} has {labels} labels; use a model with one or two")
    if isinstance(score := getattr(model, "score", None), torch.nn.Linear):
        score.float().register_forward_pre_hook(lambda _, given: (given[0].float(),))
    return model


def _head(source: _Source, config: Mapping[str, Any]) -> Head:
    """Load the head. Old models have mean and variance in their config."""
    name = source.name
    wanted = {"score_head.weight", "score_head.bias", "normalizer.mean", "normalizer.var"}
    found: dict[str, torch.Tensor] = {}
    with _explained(name):
        for file in weight_files(source.path, source.revision, name):
            with safe_open(file, framework="pt") as opened:
                found |= {key: opened.get_tensor(key).float() for key in wanted & {*opened.keys()}}
    if "score_head.weight" not in found:
        raise ModelError(f"model {name} does not load: its files lack score_head.weight; fetch it again")
    weight, bias = found["score_head.weight"], found.get("score_head.bias")
    biased = config.get("score_bias")
    if biased is not None and bool(biased) != (bias is not None):
        have = "no score_head.bias" if bias is None else "a score_head.bias"
        raise ModelError(f"model {name}: its files have {have}, unlike score_bias in its config.json; fetch it again")
    if not config.get("do_normalize"):
        return Head(weight, bias)
    kind = config.get("score_type", "reward")
    if kind not in _NORMALIZED:
        raise ModelError(
            f"model {name}: score_type {shown(kind)} of its config.json is none of {', '.join(_NORMALIZED)}"
        )
    centred, divided = _NORMALIZED[kind]
    mean = _number(found.get("normalizer.mean"), config.get("mean"), 0.0, name)
    variance = _number(found.get("normalizer.var"), config.get("var"), 1.0, name)
    return Head(weight, bias, mean if centred else 0.0, variance**0.5 + _EPSILON if divided else 1.0)


def _number(tensor: torch.Tensor | None, listed: Any, otherwise: float, name: str) -> float:
    try:
        value = otherwise if tensor is None and listed is None else listed if tensor is None else tensor.tolist()
        found = float(value[0] if isinstance(value, list) and len(cast("list[Any]", value)) == 1 else value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise ModelError(f"model {name}: mean or var of its normalizer is not a number; fetch it again") from error
    return found


def _digest(source: _Source) -> str:
    """Hash weights, config and tokenizer: models with the same digest give the same scores."""
    kept = (find(source.path, file, source.revision) for file in ("config.json", *_OF_TOKENIZER.split()))
    weights = weight_files(source.path, source.revision, source.name)
    try:
        listed = [(file.name, digest_of(file)) for file in (*filter(None, kept), *weights)]
    except DataError as error:
        raise ModelError(f"model {source.name}: {error}") from error
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _tokenizer(source: _Source) -> Any:
    from transformers import AutoTokenizer

    name = source.name
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source.path, revision=source.revision, trust_remote_code=False)
    except Exception as error:  # the library raises many types, also Exception
        raise ModelError(f"model {name} has no tokenizer that loads: {why_not(error)}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):  # the library's result without any files
        raise ModelError(
            f"model {name} has no tokenizer: put its tokenizer files, such as tokenizer.json, into the folder"
        )
    return tokenizer


class Local:
    """Scorer in this process (`scorer.name: local`). Batching changes at most the last bits of a score."""

    def __init__(self, config: ScorerConfig) -> None:
        """Load the models. Raises ModelError, ConfigError."""
        self._config, self.template = config, config.template
        self.columns = config.columns
        self.models = {column: ScoreModel(column, config) for column in self.columns}
        self.cut = {"prompt": 0, "response": 0}
        """Number of truncated pairs by part, for the model that truncated more."""
        self._cut = {column: {"prompt": 0, "response": 0} for column in self.columns}

    @property
    def digest(self) -> str:
        """SHA-256 of everything that scores depend on: model files, template, maximum tokens, dtype."""
        models = [(name, m.digest, m.dtype, m.pairs.max_tokens) for name, m in self.models.items()]
        return hashlib.sha256(json.dumps([self._config.template, models]).encode()).hexdigest()

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Mapping[str, list[float]]:
        """Return one finite number per column and pair. Raises RewardError for a score that is not finite."""
        if len(prompts) != len(responses):
            raise RewardError(f"{len(prompts)} prompts but {len(responses)} responses; pass one of each per pair")
        found = {column: self._scores(column, prompts, responses) for column in self.models}
        self.cut = {part: max(cut[part] for cut in self._cut.values()) for part in self.cut}
        return found

    def _scores(self, column: str, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        model, size = self.models[column], self._config.batch_size
        rows = [model.pairs.encode(*pair) for pair in zip(prompts, responses, strict=True)]
        self._cut[column]["prompt"] += sum(row.prompt_cut > 0 for row in rows)
        self._cut[column]["response"] += sum(row.response_cut > 0 for row in rows)
        places: dict[tuple[int, ...], list[int]] = {}  # members often give the same completion; score it once
        for at, row in enumerate(rows):
            places.setdefault(tuple(row.ids), []).append(at)
        order = sorted(places, key=len)
        scores = [0.0] * len(rows)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            for ids, score in zip(batch, model.scores(batch), strict=True):
                if not math.isfinite(score):
                    raise RewardError(
                        f"scorer.{column} {model.name} returns {score} for pair {places[ids][0]} of {len(rows)}; "
                        "set scorer.dtype: float32, or use another model"
                    )
                for at in places[ids]:
                    scores[at] = score
        return scores

    def close(self) -> None:
        """Free the models."""
        self.models = {}
