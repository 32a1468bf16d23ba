# SPDX-License-Identifier: Apache-2.0
"""What others are not to read: secrets, and the folders of this machine.

What looks like a secret is refused in settings, which a run writes down, and left out of what is recorded.

A name decides: `hub_token`, `api_key`, `password`. Of `max_tokens`, `tokenizer`, `pad_token` and `answer_key` it does
not, so of a name that may be either the value decides too. Known forms of tokens, and passwords in an address, count
wherever they stand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from evoalign.errors import ConfigError, cut

GONE = "[redacted]"
_ALWAYS = re.compile(r"pass(word|wd|phrase)|pwd|secrets?|credentials?")
_TOKEN = re.compile(r"token|auth(orization)?|bearer|jwt")
_OF_TEXT = {
    "pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "start", "end", "special", "image", "audio", "video",
    "prefix", "suffix", "middle", "extra", "first", "last", "next", "think", "eot", "eom", "boi", "eoi", "separator",
}  # fmt: skip
"""Words before `token` that make it one of a tokenizer's."""
_OPENS = {
    "api", "access", "private", "auth", "account", "storage", "license", "ssh", "encryption", "signing", "service",
    "subscription", "wandb", "openai", "anthropic", "hf", "hub", "aws", "azure", "gcp", "google", "server", "user",
}  # fmt: skip
"""Words before `key` that make it one that opens something."""
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|(?<![\w-])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
"""Tokens that say what they are: of hubs, model services and clouds."""
_ADDRESS = re.compile(r"(?P<scheme>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?P<user>[^/\s?#@]+)@")
_QUERY = re.compile(r"(?P<name>(?<=[?&;])[\w.%-]+)=(?P<value>[^&\s#;'\"]+)")
_PAIR = re.compile(r"(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>\s*[=:]\s*)(?P<value>[\"']?(?:[Bb]earer\s+)?[^\s\"',;}&]+)")
_SIGNED = {"sig", "signature", "x-amz-signature", "x-amz-credential", "x-goog-signature", "x-goog-credential"}
INSTEAD = (
    "a run writes its settings down: set the environment variable that the library reads (HF_TOKEN, WANDB_API_KEY, "
    "OPENAI_API_KEY), log in (`hf auth login`, `wandb login`), or read it from the environment in your own code"
)


def refuse_secrets(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that holds a secret, at any depth; the message does not hold it."""
    given, plain = _of_environment(), set[str]()
    for place, value in _leaves(tree):
        if not isinstance(value, str):
            continue
        if is_secret(place[-1] if place else "", value) or (value not in plain and _without(value, given) != value):
            name = ".".join(place)
            raise ConfigError(f"{cut(redacted(name), 200)} looks like a secret, and {INSTEAD}")
        plain.add(value)  # an alias stands for it again and again


def redacted(text: str) -> str:
    """A text without what in it looks like a secret: known forms, passwords in addresses, values that this process
    has in environment variables for secrets."""
    return _without(text, _of_environment())


def _without(text: str, given: Sequence[str]) -> str:
    for value in given:
        text = text.replace(value, GONE)
    text = _FORMS.sub(GONE, text)
    text = _ADDRESS.sub(lambda m: f"{m['scheme']}{GONE}@" if _opens(m["scheme"], m["user"]) else m[0], text)
    return _QUERY.sub(lambda m: f"{m['name']}={GONE}" if _in_query(m["name"], m["value"]) else m[0], text)


def redacted_pairs(text: str) -> str:
    """As `redacted`, and without the value of `hub_token=...` and `password: ...`."""

    text, parts, place = redacted(text), list[str](), 0
    while found := _PAIR.search(text, place):
        secret = is_secret(found["name"], found["value"].strip("\"'"))
        end = found.end("sign")  # a value may hold a pair itself, as in `--set=hub_token=...`
        parts += [text[place:end], GONE if secret else ""]
        place = found.end() if secret else end
    return "".join([*parts, text[place:]])


def redacted_command(words: Sequence[str]) -> list[str]:
    """A command line, also without what follows `--api-key`."""
    found: list[str] = []
    for word in words:
        option = found[-1] if found and re.match(r"--?[A-Za-z]", found[-1]) and "=" not in found[-1] else ""
        found.append(GONE if option and is_secret(option, word) else redacted_pairs(word))
    return found


def _leaves(tree: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Each value that is no mapping and no list, under its names, and each key as a value of its own.

    Not by calling itself: a stranger's config may be nested as deep as Python's stack.
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
    """Whether a setting, an option or a variable of this name has a secret for its value."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words or not value.strip() or value.lower() in ("true", "false", "null", "none"):
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if _ALWAYS.fullmatch(last):
        return True
    if _TOKEN.fullmatch(last):
        return before not in _OF_TEXT and not re.fullmatch(r"\W*|[<\[].*[>\]]", value, re.DOTALL)
    if last in ("key", "apikey"):
        return last == "apikey" or before in _OPENS or _looks_drawn(value)
    return last == "keys" and before in _OPENS


def _looks_drawn(value: str) -> bool:
    """Letters and digits of no word, as of a key that a machine made: `answer_key` may be any column's name."""
    parts: list[str] = re.findall(r"[A-Za-z0-9]{16,}", value)
    return any(re.search(r"\d", part) and re.search(r"[A-Za-z]", part) for part in parts)


def _opens(scheme: str, user: str) -> bool:
    """Whether what stands before `@` has a password, or is a token itself."""
    return GONE not in user and (":" in user or scheme.lower() in ("http://", "https://"))


def _in_query(name: str, value: str) -> bool:
    return value != GONE and (name.lower() in _SIGNED or is_secret(name, value) or name.lower() == "key")


def _of_environment() -> list[str]:
    """The secrets that this process was given, the longest first; none that may be a word."""
    drawn = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{12,}")
    given = {name: value for name, value in os.environ.items() if name != "PWD"}  # the shell's folder, no password
    found = {value for name, value in given.items() if drawn.fullmatch(value) and is_secret(name, value)}
    return sorted(found, key=len, reverse=True)


def is_private(path: str) -> bool:
    """Whether it names a place on this machine from its root or from a home."""
    return path.startswith("~") or Path(path).is_absolute()


def public_path(path: str) -> str:
    """A path as others may read it: of one that is private its last part alone."""
    return Path(path).name if is_private(path) else path
