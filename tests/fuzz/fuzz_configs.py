# SPDX-License-Identifier: Apache-2.0
"""Configs: shipped ones with other values, in one file, a later file or `--set`; what is accepted says what was set."""

import copy
import io
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import yaml
from fuzzing import REFUSED, FaultError, check, damage, judged, wrong_in

from evoalign import cli
from evoalign.config import from_dict, load, to_yaml

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[[random.Random], Any]
Field = tuple[Make, tuple[Any, ...]]
"""A valid value, and values that are not."""
NAN, INF = float("nan"), float("inf")


def whole(low: int, high: int, none: bool = False) -> Field:
    def make(draw: random.Random) -> Any:
        return draw.choice([low, high, draw.randint(low, min(high, low + 1000)), *([None] if none else [])])

    return make, (low - 1, high + 1, NAN, "many", [], 1.5)


def real(low: float, high: float, *, below: bool = False) -> Field:
    """From `low` to `high`, which with `below` is not one of them."""

    def make(draw: random.Random) -> Any:
        return draw.choice([low, low + (high - low) * 0.25, *([] if below else [high]), max(low, min(high / 2, 0.5))])

    return make, (low - 1, high * 10, NAN, INF, "wide", [])


def one_of(*values: Any) -> Field:
    return lambda draw: draw.choice(values), ("other", 7.5, [])


FLAG: Field = (lambda draw: draw.choice([True, False]), ("maybe", 3, []))
TEXT: Field = (
    lambda draw: draw.choice(["a", "runs/é", "日本", "yes", "1e3", "null", "a: b", "# no", "{x}", "'q\"", " s "]),
    (5, [], {}, True),
)
TEXTS: Field = (lambda draw: [TEXT[0](draw) for _ in range(draw.randint(1, 3))], (5, {}, [1]))
POSITIVE, COUNT, EVERY = real(1e-37, 1e30), whole(1, 10**9), whole(0, 10**9)
DRAWS: dict[str, Field] = {"max_tokens": COUNT, "temperature": real(0.5, 1e4), "top_p": real(1e-9, 1), "stop": TEXTS}
SCHEDULES = one_of("constant", "linear", "cosine", {"name": "linear", "floor": 0.5}, {"floor": 1e-12})
FIELDS: dict[str, Field] = {
    "seed": whole(0, 2**63 - 1), "deterministic": one_of(True, False, None), "output_dir": TEXT, "model.name": TEXT,
    "model.revision": TEXT, "model.dtype": one_of("auto", "float32", "bfloat16", "float16"), "lora.rank": COUNT,
    "lora.alpha": POSITIVE, "lora.target_layers": one_of([0], [3, 1], None), "lora.target_modules": TEXTS,
    "lora.init_scale": POSITIVE, "lowrank.rank": COUNT, "full.exclude": TEXTS, "es.sigma": POSITIVE,
    "es.num_generations": COUNT,
    "es.population_size": (lambda draw: 2 * draw.choice([1, 16, 5 * 10**6]), whole(2, 10**7)[1]),
    "es.learning_rate": POSITIVE, "es.shaping": one_of("zscore", "centered", "ranks", "truncation", "identity"),
    "es.decay": real(0, 1, below=True), "es.sigma_schedule": SCHEDULES, "es.learning_rate_schedule": SCHEDULES,
    "grpo.max_steps": COUNT, "grpo.learning_rate": POSITIVE, "grpo.beta": real(0, 1e6), "grpo.temperature": POSITIVE,
    "grpo.top_p": real(1e-9, 1), "grpo.warmup_ratio": real(0, 1, below=True), "grpo.off_policy": one_of("clip", "none"),
    "grpo.max_completion_length": whole(1, 10**9, none=True), "grpo.loss_type": one_of("grpo", "dapo", "dr_grpo"),
    "engine.max_rows": whole(1, 10**9, none=True), "engine.threads": whole(1, 4096, none=True),
    "engine.memory_gib": real(1e-6, 1e6), "grader.isolated": FLAG, "grader.timeout": real(1e-3, 1e7),
    "grader.retries": whole(0, 10**6), "grader.memory_gib": real(1e-6, 1e6),
    "checkpoint.every": whole(0, 10**9, none=True), "checkpoint.keep_last": COUNT, "checkpoint.keep_best": FLAG,
    "tracking.project": TEXT, "tracking.name": TEXT, "tracking.completions_every": EVERY,
    "tracking.backends": (lambda draw: draw.choice([["wandb"], []]), (["x"], 5)), "checks.canary_every": EVERY,
    "checks.control_every": EVERY, "checks.kl_every": EVERY, "checks.kl_prompts": COUNT, "task.train_data": TEXT,
    "task.split": one_of("seeded", "first_last"), "task.train_size": COUNT, "task.test_size": COUNT,
    "task.prompt": one_of("raw", "chat", "short", None), "task.batch_size": COUNT, "task.strip": FLAG,
    "task.reward_weights": (lambda draw: [draw.choice([-1e9, 0.5, 1e9])], ([NAN], [INF], [2e9], "x")),
    "evaluation.every": EVERY, **{f"sampling.{k}": v for k, v in DRAWS.items()},
    **{f"evaluation.{k}": v for k, v in DRAWS.items()},
}  # fmt: skip
WRONG_TREES: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda t: t["es"].update(sigmma=1), lambda t: t.update(extra={}), lambda t: t.update(es=[1]),
    lambda t: t["es"].update(sigma=1.0, noise_multiplier=1.0), lambda t: t.update(es={}), lambda t: t.update(model="x"),
    lambda t: t["es"].update(population_size=3, antithetic=True), lambda t: t.update(format_version=2),
    lambda t: t.update(task={"name": "conciseness", "more": 1}), lambda t: t.update(space="other"),
    lambda t: t.update(evaluation={"seeds": [1, 1], "temperature": 1.0}), lambda t: t.update(evaluation={"samples": 2}),
    lambda t: t.update(tracking={"name": "hf_" + "a1" * 15}), lambda t: t.update(model={"trust_remote_code": True}),
    lambda t: t.update(grpo={"num_generations": 3}),
    lambda t: t.update(space={"name": "full"}, es={"sigma": 1.0, "optimizer": "adam"}),
)  # fmt: skip
WRONG_TEXTS = (
    "seed: 1\nseed: 2", "checks:\n  kl_every: 1\n  kl_every: 2", "output_dir: 2020-13-45",
    "full: {exclude: !!bool perhaps}", f"full: {{exclude: {'[' * 300}{']' * 300}}}", f"full: {'[' * 3000}{']' * 3000}",
    "full: &a\n  exclude: [*a]", "full: !!python/name:os.system ''", "lora:\n\trank: 1", "lora: {rank: [1, 2}", "- 1",
    "x0: &x0 [a, a]\n" + "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 9)),
)  # fmt: skip
"""What makes a config wrong that ends with it."""
WRONG_WHOLE = ("", "[]", "seed\0: 1")
DEFAULTS = from_dict({"es": {"sigma": 1.0}}).model_dump()


class Configs:
    """A case: a shipped config with other values, or one that is wrong."""

    aim = ""

    def __init__(self, folder: Path) -> None:
        self.file, self.later = folder / "a.yaml", folder / "b.yaml"
        found = [yaml.safe_load(f.read_text(encoding="utf-8")) for f in sorted((ROOT / "configs").rglob("*.yaml"))]
        self.bases = [t for t in found if "es" in t and "grpo" not in t and t.get("engine", "") != "vllm"]
        self.seen = 0

    def attempt(self, draw: random.Random) -> bool:
        tree, valid = copy.deepcopy(draw.choice(self.bases)), True
        tree["engine"] = "transformers"
        wrong, _, aimed = wrong_in(draw, self.aim, ["value", "value", "tree", "text", "bytes"]).partition(":")
        changes = {name: FIELDS[name][0](draw) for name in draw.sample(sorted(FIELDS), draw.randint(0, 6))}
        if wrong == "value":
            name = aimed or draw.choice(sorted(FIELDS))
            changes[name], valid = draw.choice(FIELDS[name][1]), False
        expected, overrides = copy.deepcopy(tree), list[str]()
        later: dict[str, Any] = {}
        if wrong == "tree":
            draw.choice(WRONG_TREES)(tree)
            valid, changes = False, {}
        for name, value in changes.items():
            _set(expected, name, value)
            place = "file" if wrong == "bytes" else draw.choice(["file", "file", "later", "set"])
            if place == "set" and not (isinstance(value, str) and wrong):
                overrides.append(f"{name}={_flow(value)}")
            else:
                _set(tree if place == "file" else later, name, value)
        text = _written(draw, tree)
        if wrong == "text":
            text, valid = draw.choice([*(f"{text}\n{end}\n" for end in WRONG_TEXTS), *WRONG_WHOLE]), False
        raw = text.encode()
        known: bool | None = valid
        if wrong == "bytes":
            raw, known = damage(draw, raw), None
            expected = _reference(raw)
        self.file.write_bytes(raw)
        self.later.write_text(yaml.safe_dump(later, allow_unicode=True) if later else "{}\n", encoding="utf-8")
        words = [self.file, self.later] if later else [self.file]
        config = judged(lambda: load(words, overrides), lines=11, valid=known)
        self._at_the_command_line(words, overrides, config is REFUSED)
        if config is REFUSED:
            return False
        told = _difference(expected, config.model_dump())
        check(not told, f"{told} with {overrides} of {text!r}")
        self.later.write_text(to_yaml(config), encoding="utf-8")
        check(load([self.later]) == config, "a config that is written and read is another")
        return True

    def _at_the_command_line(self, words: list[Path], overrides: list[str], refused: bool) -> None:
        """Of each fifth config that is refused: exit code 2, and lines of plain text."""
        self.seen += refused
        if not refused or self.seen % 5:
            return
        sets = [word for override in overrides for word in ("--set", override)]
        files = [word for file in words[1:] for word in ("--config", str(file))]
        out, before = io.StringIO(), sys.argv
        sys.argv = ["evoalign", "train", str(words[0]), *files, *sets, "--dry-run"]
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(out):
                cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        except Exception as error:
            raise FaultError("traceback", f"{type(error).__name__} at the command line: {error}") from error
        finally:
            sys.argv = before
        told = out.getvalue()
        if code != 2 or "Traceback" in told or not told.startswith("error: "):
            raise FaultError("message", f"exit code {code}: {told[:300]!r}")


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    section, _, leaf = name.rpartition(".")
    place = tree
    if section:
        if not isinstance(tree.get(section), dict):
            tree[section] = {"name": tree[section]} if isinstance(tree.get(section), str) else {}
        place = tree[section]
    if name == "es.sigma":
        place.pop("noise_multiplier", None)
    if isinstance(value, dict) and isinstance(place.get(leaf), str | dict):
        old = place[leaf]
        value = {**({"name": old} if isinstance(old, str) else old), **value}
    place[leaf] = value


def _flow(value: Any) -> str:
    if value == "1e3":  # which is a text to YAML 1.1, and a number where it is not quoted
        return "'1e3'"
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n...\n").strip()


def _written(draw: random.Random, tree: dict[str, Any]) -> str:
    """One of the ways to write a tree down."""
    items = list(tree.items())
    draw.shuffle(items)
    style = draw.choice([None, True, False])
    text = yaml.safe_dump(
        dict(items), sort_keys=False, allow_unicode=draw.choice([True, False]), default_flow_style=style
    )
    if style is not True and draw.choice([True, False]):
        text = "# a comment\n---\n" + text + "# another\n"
    return text.replace("\n", "\r\n") if draw.choice([False, False, True]) else text


def _reference(raw: bytes) -> Any:
    """What a damaged file says by the library's own reader; None where that cannot read it."""
    try:
        tree = yaml.safe_load(raw.decode())
    except (yaml.YAMLError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


LEFT_OUT = (("grading", "strict"), ("objective", None), ("patience", None), ("factor", 0.5), ("min_delta", 0.0))
"""Settings that are written down only where they are not these, their defaults."""


def _difference(tree: Any, dump: Mapping[str, Any]) -> str:
    """The first setting that is not as it was written, or not the default where none was."""
    if tree is None:
        return "what no reader of YAML takes was accepted"
    tree = {k: dict(v) if isinstance(v, dict) else v for k, v in tree.items()}
    tree.pop("format_version", None)
    if isinstance(grpo := tree.get("grpo"), dict):
        own = dump["grpo"]
        tree["grpo"] = {k: v for k, v in grpo.items() if k in own} | {
            "trl": {**grpo.get("trl", {}), **{k: v for k, v in grpo.items() if k not in own}}
        }
    if isinstance(model := tree.get("model"), dict):
        model.pop("trust_remote_code", None)
    told = _differs(tree, dump, "")
    if told:
        return told
    for section in set(DEFAULTS) - {"sampling", "evaluation", "es"}:
        if section not in tree and dump[section] != DEFAULTS[section]:
            return f"{section} is not the default, and nobody set it"
    return ""


def _differs(tree: Mapping[str, Any], dump: Mapping[str, Any], at: str) -> str:
    for key, value in tree.items():
        if key not in dump:
            if (key, value) in LEFT_OUT:
                continue
            return f"{at}{key} is nowhere"
        found = dump[key]
        if isinstance(found, Mapping):
            value = {"name": value} if isinstance(value, str) else value or {}
            told = _differs(value, found, f"{at}{key}.")
            if told:
                return told
        elif not _equal(value, found):
            return f"{at}{key} is {found!r} and was written as {value!r}"
    return ""


def _equal(value: Any, found: Any) -> bool:
    if isinstance(value, str) and isinstance(found, int | float):  # 1e-3 is a text to YAML 1.1
        words = {"true": 1, "false": 0, "on": 1, "off": 0, "yes": 1, "no": 0, "t": 1, "f": 0, "y": 1, "n": 0}
        return float(words.get(value.lower(), value)) == found
    if isinstance(value, list) and isinstance(found, list):
        return len(value) == len(found) and all(map(_equal, value, found))
    return value == found
