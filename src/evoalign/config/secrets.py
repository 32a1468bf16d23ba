# SPDX-License-Identifier: Apache-2.0
"""Find and redact secrets, and shorten paths of this machine.

A run writes its settings down, so a setting that holds a secret is refused. A secret is the value of a setting, option
or variable with a name such as `hub_token`, `api_key` or `password`; a token with a known prefix; a password in an
address; or the value of such an environment variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from evoalign.errors import ConfigError, cut

GONE = "[redacted]"
SHORTEST = 12
"""Characters of the shortest secret of the environment that is searched for in texts."""
_ALWAYS = re.compile(r"pass(word|wd|phrase)|pwd|secrets?|credentials?")
_TOKEN = re.compile(r"token|auth(orization)?|bearer|jwt")
_TEXT_TOKENS = {
    "pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "start", "end", "special", "image", "audio", "video",
    "prefix", "suffix", "middle", "extra", "first", "last", "next", "think", "eot", "eom", "boi", "eoi", "separator",
}  # fmt: skip
"""Words before `token` for a token of a tokenizer."""
_KEYS = {
    "api", "access", "private", "auth", "account", "storage", "license", "ssh", "encryption", "signing", "service",
    "subscription", "wandb", "openai", "anthropic", "hf", "hub", "aws", "azure", "gcp", "google", "server", "user",
}  # fmt: skip
"""Words before `key` for a key that is a secret."""
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|(?<![\w-])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
"""Tokens of hubs, model services and clouds, by their prefixes."""
_ADDRESS = re.compile(r"(?P<scheme>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?P<user>[^/\s?#@]+)@")
_QUERY = re.compile(r"(?P<name>(?<=[?&;])[\w.%-]+)=(?P<value>[^&\s#;'\"]+)")
_PAIR = re.compile(r"(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>\s*[=:]\s*)(?P<value>[\"']?(?:[Bb]earer\s+)?[^\s\"',;}&]+)")
_SIGNED = {"sig", "signature", "x-amz-signature", "x-amz-credential", "x-goog-signature", "x-goog-credential"}
INSTEAD = (
    "a run writes its settings down: set the environment variable that the library reads (HF_TOKEN, WANDB_API_KEY, "
    "OPENAI_API_KEY), log in (`hf auth login`, `wandb login`), or read it from the environment in your own code"
)


def refuse_secrets(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that holds a secret, at any depth. The message does not contain the secret."""
    given, plain = _of_environment(), set[str]()
    for place, value in _leaves(tree):
        if not isinstance(value, str):
            continue
        if is_secret(place[-1] if place else "", value) or (value not in plain and _without(value, given) != value):
            name = ".".join(place)
            raise ConfigError(f"{cut(redacted(name), 200)} looks like a secret, and {INSTEAD}")
        plain.add(value)  # a YAML alias may repeat it many times


def redacted(text: str) -> str:
    """Redact tokens with known prefixes, passwords in addresses, and values of secret environment variables."""
    return _without(text, _of_environment())


def _without(text: str, given: Sequence[str]) -> str:
    for value in given:
        text = text.replace(value, GONE)
    text = _FORMS.sub(GONE, text)
    text = _ADDRESS.sub(_without_user, text)
    return _QUERY.sub(_without_value, text)


def _without_user(found: re.Match[str]) -> str:
    """Redact `user:password@`, and a token before `@` of a web address."""
    is_secret_user = ":" in found["user"] or found["scheme"].lower() in ("http://", "https://")
    return f"{found['scheme']}{GONE}@" if is_secret_user and GONE not in found["user"] else found[0]


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    secret = value != GONE and (name.lower() in _SIGNED or name.lower() == "key" or is_secret(name, value))
    return f"{name}={GONE}" if secret else found[0]


def redacted_pairs(text: str) -> str:
    """Redact a text as `redacted` does, and the values of pairs such as `hub_token=...` and `password: ...`."""
    text, parts, place = redacted(text), list[str](), 0
    while found := _PAIR.search(text, place):
        secret = is_secret(found["name"], found["value"].strip("\"'"))
        end = found.end("sign")  # a value may hold a pair itself, as in `--set=hub_token=...`
        parts += [text[place:end], GONE if secret else ""]
        place = found.end() if secret else end
    return "".join([*parts, text[place:]])


def redacted_command(words: Sequence[str]) -> list[str]:
    """Redact a command line, including the value after an option such as `--api-key`."""
    found: list[str] = []
    for word in words:
        option = found[-1] if found and re.match(r"--?[A-Za-z]", found[-1]) and "=" not in found[-1] else ""
        found.append(GONE if option and is_secret(option, word) else redacted_pairs(word))
    return found


def _leaves(tree: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each value that is not a mapping or list with its path, and each key as a value too.

    Iterative, since an untrusted config may be nested deeper than Python's stack.
    """
    pending: list[tuple[tuple[str, ...], object]] = [((), tree)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, Mapping):
            named = cast("Mapping[object, object]", value)
            yield from (((*place, "a key"), str(key)) for key in named)
            pending += [((*place, str(key)), inner) for key, inner in reversed([*named.items()])]
        elif isinstance(value, list | tuple):
            pending += [(place, inner) for inner in reversed(cast("Sequence[object]", value))]
        else:
            yield place, value


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of a setting, option or variable of this name is a secret."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words or not value.strip() or value.lower() in ("true", "false", "null", "none"):
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if _ALWAYS.fullmatch(last):
        return True
    if _TOKEN.fullmatch(last):
        return before not in _TEXT_TOKENS and not re.fullmatch(r"\W*|[<\[].*[>\]]", value, re.DOTALL)
    return last == "apikey" or (last in ("key", "keys") and before in _KEYS)


def _of_environment() -> list[str]:
    """Return the values of secret environment variables, the longest first, without short ones that may be a word."""
    given = ((name, value) for name, value in os.environ.items() if len(value) >= SHORTEST and not is_private(value))
    return sorted({value for name, value in given if is_secret(name, value)}, key=len, reverse=True)


def is_private(path: str) -> bool:
    """Return whether a path starts at the root or at a home folder of this machine."""
    return path.startswith("~") or Path(path).is_absolute()


def public_path(path: str) -> str:
    """Return a path for publication: only the last part of one that `is_private`."""
    return Path(path).name if is_private(path) else path
