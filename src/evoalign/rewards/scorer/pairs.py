# SPDX-License-Identifier: Apache-2.0
"""Tokenisation of pairs of prompt and response: template, end token and truncation.

The text is tokenised as a whole, as in the training of the models, and character offsets assign tokens to prompt or
response. Special tokens in a prompt or response, such as a `</s>` that a model wrote, are tokenised as text: they can
neither end the pair nor start another turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evoalign.config.scorer import CHAT, PROMPT, RESPONSE
from evoalign.errors import ConfigError, ModelError, shown
from evoalign.models import templates

_MARKS = ("evoalignpromptmark", "evoalignresponsemark")
_EDGE = "\t\t"
"""White space around a mark, to detect whether a chat template strips messages."""


@dataclass(frozen=True, slots=True)
class Form:
    """Text before the prompt, between prompt and response, and after the response. `ends`: add the tokenizer's special
    tokens and the end token, which a chat template writes itself."""

    before: str
    between: str
    after: str
    ends: bool
    strips: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one pair, and the numbers of truncated prompt and response tokens."""

    ids: list[int]
    prompt_cut: int = 0
    response_cut: int = 0


class Pairs:
    """Encodes pairs to at most `max_tokens` token ids. Raises ModelError, ConfigError."""

    def __init__(self, tokenizer: Any, template: str, max_tokens: int, name: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"model {name}: its tokenizer has no character offsets, which truncation needs; save it as "
                "tokenizer.json (a fast tokenizer)"
            )
        self._tokenizer, self.max_tokens = tokenizer, max_tokens
        self._form = _form(tokenizer, template, name)
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._special = sorted({str(token.content) for token in added.values() if token.special})
        self._round = _round(tokenizer) if self._form.ends else ([], [])
        self._end = None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
        alone = len(self._encode("", "")[0])
        if alone > max_tokens // 2:
            raise ConfigError(
                f"scorer.max_tokens {max_tokens}: the template alone takes {alone} tokens; set at least {2 * alone}"
            )

    def encode(self, prompt: str, response: str) -> Encoded:
        """Encode a pair. If it is too long, truncate the end of the response, down to a quarter of `max_tokens`, and
        then the beginning of the prompt. The template and the end token stay."""
        if self._form.strips:
            prompt, response = prompt.strip(), response.strip()
        prompt, response = (text.encode("utf-8", "replace").decode("utf-8") for text in (prompt, response))
        ids, of_prompt, of_response = self._encode(prompt, response)
        over = len(ids) - self.max_tokens
        if over <= 0:
            return Encoded(ids)
        kept = max(len(of_response) - over, min(len(of_response), self.max_tokens // 4))
        gone = of_response[kept:]
        head = of_prompt[: max(over - len(gone), 0)]
        left_out = {*gone, *head}
        return Encoded([i for at, i in enumerate(ids) if at not in left_out], len(head), len(gone))

    def _encode(self, prompt: str, response: str) -> tuple[list[int], list[int], list[int]]:
        """Return all token ids, and the positions of the prompt's and of the response's tokens."""
        form = self._form
        around = form.before + form.between + form.after
        if not self._has_special(prompt + "\0" + response) or not self._has_special(around):
            ids, spans = self._tokens(
                form.before + prompt + form.between + response + form.after,
                special=form.ends,
                plain=not self._has_special(around),
            )
            first, second = len(form.before), len(form.before) + len(prompt) + len(form.between)
            places = [_within(spans, first, len(prompt)), _within(spans, second, len(response))]
        else:  # parse special tokens in the template but not in the pair
            ids, places = list[int](), list[list[int]]()
            for text, of_pair in zip(
                (form.before, prompt, form.between, response, form.after), (0, 1, 0, 1, 0), strict=True
            ):
                found, _ = self._tokens(text, special=False, plain=bool(of_pair))
                if of_pair:
                    places.append(list(range(len(ids), len(ids) + len(found))))
                ids += found
            opening, closing = self._round
            ids, places = [*opening, *ids, *closing], [[at + len(opening) for at in place] for place in places]
        if form.ends and self._end is not None and (not ids or ids[-1] != self._end):
            ids.append(self._end)
        return ids, places[0], places[1]

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self._special)

    def _tokens(self, text: str, *, special: bool, plain: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return token ids and character offsets. `plain`: tokenise special tokens as text."""
        found = self._tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, split_special_tokens=plain, verbose=False
        )
        return [int(i) for i in found["input_ids"]], found["offset_mapping"]


def _within(spans: list[tuple[int, int]], start: int, length: int) -> list[int]:
    """Return the tokens that end in a part of the text: the first may begin with a space of the template."""
    return [at for at, (a, b) in enumerate(spans) if a < b and start < b <= start + length]


def _round(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before and after a text."""
    whole, bare = ([int(i) for i in tokenizer("x", add_special_tokens=s)["input_ids"]] for s in (True, False))
    at = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
    return whole[:at], whole[at + len(bare) :]


def _form(tokenizer: Any, template: str, name: str) -> Form:
    """Parse a template. Renders a chat template around two marks, so that it never processes a pair."""
    if template != CHAT:
        before, rest = template.split(PROMPT)
        return Form(before, *rest.split(RESPONSE), ends=True)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"scorer.template {CHAT}: model {name} has no chat template; set scorer.template to a text with {PROMPT}"
        )
    render = templates.Renderer(tokenizer, templates.render_whole)
    prompt, response = (f"{_EDGE}{mark}{_EDGE}" for mark in _MARKS)
    try:
        text = render([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}])
    except templates.RefusedError as error:
        raise ModelError(f"model {name}: its chat template rejects a pair ({error}); set scorer.template") from error
    finally:
        render.close()
    kept = prompt in text and response in text
    ends = (prompt, response) if kept else _MARKS
    if any(text.count(end) != 1 for end in ends) or text.index(ends[0]) > text.index(ends[1]):
        raise ModelError(
            f"model {name}: its chat template does not contain prompt and response once and in this order "
            f"({shown(text)}); set scorer.template"
        )
    before, rest = text.split(ends[0])
    return Form(before, *rest.split(ends[1]), ends=False, strips=not kept)
