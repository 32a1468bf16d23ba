# SPDX-License-Identifier: Apache-2.0
"""Encode prompts and decode completions, outside of the engines, so that all engines get the same ids."""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import Any

from evoalign.config import ModelConfig
from evoalign.errors import ConfigError, ModelError, shown
from evoalign.models import templates, tool_formats
from evoalign.models.files import find, not_cached, read_settings, refuse_hooks
from evoalign.models.origin import described, model_config, origin
from evoalign.models.tool_calls import ToolFormat, Tools, Turn
from evoalign.types import Messages, Prompt, text_of

TAIL_TOKENS = 4
"""Most tokens of one character: the bytes of UTF-8."""
AT_ONCE = 32
"""Texts that a thread encodes in one call."""
MOST_THREADS = 16
ANSWER = "This is the answer."
"""Text of an assistant message, after which a chat template's end of turn is looked for."""
UNREADABLE = "\ufffd"
"""The replacement character, for a character with missing bytes."""


class Tokens:
    """A tokenizer, its chat template with `template_kwargs`, and its stop tokens. `guarded`: the template is untrusted.

    `rows` is the number of the model's embedding rows, which no token may exceed; None: not known. `name` is the
    model's, for messages. Use it in one thread at a time: tokenizers keep settings of the last call. Raises ConfigError
    for `template_kwargs` that the template does not read.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        *,
        guarded: bool = False,
        rows: int | None = None,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        name: str = "the model",
    ) -> None:
        self.tokenizer, self.rows, self.name, self._kwargs = tokenizer, rows, name, dict(template_kwargs)
        unread = [key for key in self._kwargs if key not in str(tokenizer.chat_template)]
        if unread:
            raise ConfigError(
                f"task.template_kwargs.{unread[0]}: the chat template of {name} does not read it; remove it"
                if tokenizer.chat_template
                else f"task.template_kwargs.{unread[0]}: the tokenizer of {name} has no chat template; remove it"
            )
        self._guarded = guarded
        self._render = self._renderer(templates.render)
        self.stop_ids = tuple(sorted(i for i in set(stop_ids) if rows is None or i < rows))
        pad = tokenizer.pad_token_id
        if pad is None or (rows is not None and pad >= rows):
            pad = self.stop_ids[0] if self.stop_ids else 0
        self.pad_id = int(pad)

    @property
    def has_more_tokens(self) -> bool:
        """Whether the tokenizer has tokens that the model has no embedding for."""
        return self.rows is not None and max(self.tokenizer.get_vocab().values(), default=0) >= self.rows

    def encode(self, prompt: Prompt, tools: Tools = ()) -> tuple[int, ...]:
        """Return the token ids of a prompt. Messages use the chat template. Raises ModelError without one.

        There may be tool calls, with arguments as a dict, and messages of role `tool`. `tools` are JSON schemas as
        transformers' `get_json_schema` returns them.
        """
        return self.encode_read(prompt, tools)[0]

    def encode_read(self, prompt: Prompt, tools: Tools = ()) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt, and the text that the model reads. Raises ModelError."""
        is_raw = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self.render(self._prepared(prompt, tools), tools)[0]
        ids = self.tokenizer(text, add_special_tokens=is_raw)["input_ids"]
        return self._of_prompt(ids, prompt), text

    def encode_all(self, chats: Sequence[Messages], tools: Tools = ()) -> list[tuple[int, ...]]:
        """Return the token ids of several prompts of messages, as `encode` does, on all cores."""
        if not chats:
            return []
        texts = self._texts([self._prepared(chat, tools) for chat in chats], tools)
        size = AT_ONCE if self.tokenizer.is_fast else len(chats)
        self.tokenizer("")  # settings are written in the first call alone
        # Threads of the tokenizer's own would make a later fork of this process unsafe.
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            parts = iter(lambda: list(islice(texts, size)), [])
            jobs = [threads.submit(self.tokenizer, part, add_special_tokens=False) for part in parts]
            ids = [one for job in jobs for one in job.result()["input_ids"]]
        return [self._of_prompt(one, chat) for one, chat in zip(ids, chats, strict=True)]

    def _of_prompt(self, ids: Sequence[int], prompt: Prompt) -> tuple[int, ...]:
        if not ids:
            raise ModelError(f"the prompt {prompt!r} has no tokens; fix the row")
        return self._embedded(ids, prompt)

    def _texts(self, chats: Sequence[Messages], tools: Tools) -> Iterator[str]:
        """Yield what the model reads of each conversation."""
        if not isinstance(self._render, templates.Renderer):
            yield from (self.render(chat, tools)[0] for chat in chats)
            return
        self.check_template(chats[0])
        done = 0
        with closing(self._render.each(chats, tools)) as replies:
            for reply in replies:
                if not isinstance(reply, str):  # the template refuses it; the others are rendered one by one
                    break
                yield reply
                done += 1
        yield from (self.render(chat, tools)[0] for chat in chats[done:])

    def _prepared(self, chat: Messages, tools: Tools) -> Messages:
        """Return messages with their tool calls as the chat template takes them."""
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in chat):
            return tool_formats.prepare(chat, self._tool_format.writer)
        return chat

    def read_turn(self, text: str, tools: Tools = ()) -> Turn:
        """Return the content and the tool calls of a completion.

        Raises ModelError if the chat template does not write tool calls in a form that can be read.
        """
        return self._tool_format.read(text, tools)

    @cached_property
    def _tool_format(self) -> ToolFormat:
        """The format of tool calls. Raises ModelError."""
        self.check_template(tool_formats.USER)
        template = tool_formats.Template(
            prompt=_refusing(self._render),
            whole=_refusing(self._renderer(templates.render_whole)),
            seen=lambda text: self.decode(self.encode_text(text)),
            stops=self.tokenizer.convert_ids_to_tokens(list(self.stop_ids)),
        )
        try:
            return tool_formats.derive(template)
        except tool_formats.UnreadableError as error:
            raise ModelError(
                f"the chat template of {self.name} cannot be used with tools, since {error}; use a model whose chat "
                "template writes tool calls, such as Qwen3, or a task without tools"
            ) from error

    def read_of(self, prompt: Prompt) -> str | None:
        """Return the text that the model reads if the prompt is of messages; None for text. Raises ModelError."""
        return None if isinstance(prompt, str) else self.render(prompt)[0]

    def render(self, messages: Messages, tools: Tools = ()) -> tuple[str, Messages]:
        """Return messages as text, and the messages that the template got. Raises ModelError.

        They are the same, except where the template refuses a system message: the first user message then begins with
        its text.
        """
        self.check_template(messages)
        try:
            return self._render(messages, tools=tools), messages
        except ModelError:
            raise
        except Exception as error:  # of jinja2, or whatever the template calls
            joined = templates.without_system(messages)
            try:
                if joined is not None:
                    return self._render(joined, tools=tools), joined
            except ModelError:
                raise
            except Exception:  # it refuses more than the system message
                joined = None
            raise ModelError(
                f"the model's chat template refuses the prompt {str(messages)[:80]}: {_one_line(error)}; "
                "fix the messages or set task.prompt: raw"
            ) from error

    def check_template(self, messages: Messages) -> None:
        """Raise ModelError if there is no chat template that renders messages."""
        found = self.tokenizer.chat_template
        if found and not (isinstance(found, dict) and "default" not in found):
            return
        lack = f"chat templates {', '.join(found)} and none named default" if found else "no chat template"
        raise ModelError(
            f"the prompts are messages, such as {shown(text_of(messages))}, and the tokenizer of {self.name} has "
            f"{lack}; use a model that was trained to chat, or write the prompts as texts and set task.prompt: raw"
        )

    def _renderer(self, render: Callable[..., str]) -> Callable[..., str]:
        """Return a function of `templates` for this tokenizer, in a separate process if the template is untrusted."""
        how = partial(render, template_kwargs=self._kwargs)
        return templates.Renderer(self.tokenizer, how) if self._guarded else partial(how, self.tokenizer)

    def remarks(self, prompts: Iterable[Prompt], stop: Sequence[str] = ()) -> list[str]:
        """Return notes and warnings on what the chat template makes of prompts. Raises ModelError.

        Warnings are for a message that is left out, for text before the given beginning of a completion, and for an
        end of turn at which no completion ends, by a stop token or a text of `stop`.
        """
        chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
        rendered = [self.render(chat) for chat in chats]
        lost = [(d[0], text) for c, (text, _) in zip(chats, rendered, strict=True) if (d := templates.dropped(c, text))]
        lines = list[str]()
        if lost:
            message, text = lost[0]
            lines.append(
                f"warning: the chat template leaves out the {message['role']} message in {len(lost):,} of "
                f"{len(chats):,} prompts: {shown(message['content'])} is rendered as {shown(text)}; fix the template, "
                "put the text in a message that it renders, or set task.prompt: raw"
            )
        if between := next(filter(None, map(self._between, chats)), ""):
            lines.append(
                f"warning: the chat template puts {shown(between)} between the assistant's turn and the beginning of "
                "its completion, so that the model continues another text than the task's; set task.prompt: chat, "
                "task.template_kwargs, or use another model"
            )
        if chats and self.stop_ids and (end := self._end_of_turn(stop)) is not None:
            lines.append(
                f"warning: the chat template ends an assistant message with {end} "
                f"{str(self.tokenizer.convert_ids_to_tokens(end))!r}, which is not a stop token, so completions may "
                f"run to max_tokens; add {end} to eos_token_id in the model's generation_config.json"
            )
        if any(given is not chat for chat, (_, given) in zip(chats, rendered, strict=True)):
            lines.append("note: the chat template refuses a system message, so its text begins the first user message")
        if chats and self._prints_date(chats[0]):
            day = self._kwargs.get(templates.CLOCK, templates.DATE)
            lines.append(
                f"note: the chat template prints the date, which is {day} on every day; task.template_kwargs: "
                f"{{{templates.CLOCK}: YYYY-MM-DD}} sets another"
            )
        return lines

    def _between(self, chat: Messages) -> str:
        """Return what the template inserts between the start of the assistant's turn and the beginning of its answer.

        Templates of reasoning models, such as Qwen3's, insert an empty thinking block.
        """
        if chat[-1]["role"] != "assistant" or len(chat) == 1:
            return ""
        turn, opened = (self.render(c)[0] for c in (chat[:-1], chat))
        inside = opened.removeprefix(turn)
        return inside.removesuffix(chat[-1]["content"]) if inside != chat[-1]["content"] else ""

    def _end_of_turn(self, stop: Sequence[str]) -> int | None:
        """Return the token by which the template ends an assistant message, unless a completion ends there.

        It is the first added token after the message's text, such as <|im_end|>; None if there is none.
        """
        chat = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": ANSWER}]
        try:
            _, found, rest = self._renderer(templates.render_whole)(chat).rpartition(ANSWER)
        except Exception:  # the template refuses it; its refusal of a prompt is reported there
            return None
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"] if found else []
        added = self.tokenizer.added_tokens_decoder
        end = next((int(i) for i in ids if i in added and added[i].content.strip()), None)
        text = self.decode(ids)
        return None if end in self.stop_ids or any(part in text for part in stop) else end

    def _prints_date(self, chat: Messages) -> bool:
        """Return whether the rendering depends on the clock."""
        if templates.CLOCK not in str(self.tokenizer.chat_template):
            return False
        day = {**self._kwargs, templates.CLOCK: "1900-01-01"}
        other = Tokens(self.tokenizer, (), guarded=True, template_kwargs=day, name=self.name)
        return other.render(chat)[0] != self.render(chat)[0]

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text without special tokens, such as a completion."""
        return self._embedded(self.tokenizer(text, add_special_tokens=False)["input_ids"], text)

    def _embedded(self, ids: Sequence[int], text: Prompt) -> tuple[int, ...]:
        """Return token ids. Raises ModelError for one that the model has no embedding for."""
        most = max(ids, default=0)
        if self.rows is not None and most >= self.rows:
            name = str(self.tokenizer.convert_ids_to_tokens(most))
            raise ModelError(
                f"the text {shown(text_of(text))} has token {most} {name!r}, "
                f"and the model's embedding has {self.rows:,} rows; use the tokenizer that belongs to the weights, or "
                "take the token out of the text"
            )
        return tuple(int(i) for i in ids)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the vocabulary and the chat template."""
        found = json.dumps([sorted(self.tokenizer.get_vocab().items()), self.tokenizer.chat_template], sort_keys=True)
        return hashlib.sha256(found.encode()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion without a last stop token and special tokens, spaces unchanged."""
        return str(
            self.tokenizer.decode(self._inside(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Decode several completions at once."""
        if not _is_plain(self.tokenizer):
            return [self.decode(ids) for ids in completions]
        backend, inside = self.tokenizer.backend_tokenizer, [self._inside(ids) for ids in completions]
        return [str(text) for text in backend.decode_batch(inside, skip_special_tokens=True)]

    def _inside(self, ids: Sequence[int]) -> list[int]:
        """Remove a last stop token, which may not be one of the tokenizer's special tokens."""
        return list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)


def _is_plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer decodes exactly as its backend, which decodes batches."""
    from transformers import PreTrainedTokenizerFast

    return getattr(type(tokenizer), "_decode", None) is getattr(PreTrainedTokenizerFast, "_decode", False)


def before_stop(text: str, stop: Sequence[str], keep: bool = False) -> str:
    """Cut a completion before the first stop text; with `keep`, after the shortest stop text at that place."""
    ends = [(place, place + keep * len(s)) for s in stop if (place := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


def tail_of(stop: Sequence[str]) -> int:
    """Return the number of last tokens that contain any stop text and one more character, since a slice may lose its
    first space."""
    return TAIL_TOKENS * (1 + max(map(len, stop)))


def stopped(decode: Callable[[Sequence[int]], str], ids: Sequence[int], looked: int, stop: Sequence[str]) -> int:
    """Return the number of tokens after which a stop text is complete, above `looked`; 0 where there is none."""
    tail = tail_of(stop)
    whole = decode(ids[max(0, looked + 1 - tail) :])
    if not any(s in whole for s in stop) and UNREADABLE not in whole:
        return 0
    for count in range(looked + 1, len(ids) + 1):
        text = decode(ids[max(0, count - tail) : count])
        if any(s in text for s in stop):
            return count
    return 0


def load(config: ModelConfig, template_kwargs: Mapping[str, Any] = MappingProxyType({})) -> Tokens:
    """Load the tokenizer of a model and its stop tokens. Raises ModelError, and ConfigError for `template_kwargs`."""
    from transformers import AutoTokenizer

    where, revision = origin(config).tokenizer
    refuse_hooks(*described(config))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
    except Exception as error:  # transformers raises many types, also bare Exception
        if why := not_cached(error):
            raise ModelError(f"model {config.name}: {why}") from error
        raise ModelError(
            f"model {config.name} has no tokenizer that loads; are its files, such as tokenizer.json, there? "
            f"({_one_line(error)})"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):  # transformers makes an empty one without files
        raise ModelError(
            f"model {config.name} has no tokenizer: put its tokenizer files, such as tokenizer.json, into the folder"
        )
    rows = None
    with suppress(ModelError):  # the engine reports a damaged config.json
        rows = getattr(model_config(config).get_text_config(), "vocab_size", None)
    return Tokens(
        tokenizer,
        _stops(config, tokenizer),
        guarded=config.name != "tiny",
        rows=rows,
        template_kwargs=template_kwargs,
        name=config.name,
    )


def _stops(config: ModelConfig, tokenizer: Any) -> list[int]:
    """Return the stop tokens of generation_config.json, config.json and the tokenizer.

    As in transformers, an ordinary token in config.json counts only without generation_config.json, since it is often
    left over from the model that a tokenizer was taken away from.
    """
    path, revision = described(config)
    generation = _ids(config.name, _generation_eos(config.name, path, revision))
    file = find(path, "config.json", revision)
    settings = {} if file is None else read_settings(config.name, file)
    inner = settings.get("text_config")
    found = [s.get("eos_token_id") for s in (settings, inner) if isinstance(s, Mapping)]
    named = [i for value in found for i in _ids(config.name, value)]
    special = set(tokenizer.added_tokens_decoder)
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return [*generation, *(i for i in named if not generation or i in special), *own]


def _generation_eos(name: str, path: str, revision: str | None) -> object:
    """Return `eos_token_id` of generation_config.json; None without one. Raises ModelError."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError as error:
        if find(path, "generation_config.json", revision) is None:
            return None
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    except Exception as error:  # the file is untrusted
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error


def _ids(name: str, found: Any) -> list[int]:
    """Return the token ids of an `eos_token_id`: one, a list, or none. Raises ModelError."""
    ids: list[Any] = found if isinstance(found, list) else [] if found is None else [found]
    for i in ids:
        if type(i) is not int or i < 0:
            raise ModelError(f"model {name}: eos_token_id {shown(found)} is not a token id; fix it in its files")
    return ids


def _refusing(render: Callable[..., str]) -> Callable[..., str]:
    """Return a function that renders messages, and raises RaisedError where the template raises."""

    def rendered(messages: Messages, tools: Tools) -> str:
        try:
            return render(messages, tools=tools)
        except ModelError:
            raise
        except Exception as error:  # of jinja2, or whatever the template calls
            raise tool_formats.RaisedError(f"it raises {_one_line(error)!r}") from error

    return rendered


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
