# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Chat Completions API: POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from evoalign.errors import shown
from evoalign.gateway.chat import Answer, Chat
from evoalign.gateway.dialect import (
    Body,
    Conversation,
    Dialect,
    chat,
    check,
    content,
    event,
    integer,
    new_id,
    objects,
    openai_error,
    refused,
    tool,
    written,
)

READ = frozenset(
    {"messages", "max_completion_tokens", "max_tokens", "n", "stop", "temperature", "tool_choice", "tools", "top_p"}
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "function_call": ("auto", "none"), "functions": ([],), "logit_bias": ({},),
    "logprobs": (False,), "min_p": (0,), "modalities": (["text"],), "presence_penalty": (0,),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},), "top_k": (-1, 0), "top_logprobs": (0,),
    "verbosity": ("medium",),
}  # fmt: skip
"""Values that leave completions as they are, also of fields that other servers add."""
MOST = 128
"""Maximum completions per request."""


def read(body: Body) -> Chat:
    """Return the request of a body. Raises RefusedError."""
    check(body, READ, NEUTRAL)
    conversation = Conversation()
    for where, message in objects(body.get("messages"), "messages"):
        _add(conversation, message, where)
    n = integer(body.get("n"), "n", MOST) or 1
    return chat(body, conversation.whole("messages"), _tool, ("max_completion_tokens", "max_tokens"), n=n)


def _add(conversation: Conversation, message: Body, where: str) -> None:
    role, words = message.get("role"), content(message.get("content"), f"{where}.content", ("text",))
    if role in ("system", "developer"):
        conversation.system(words)
    elif role == "user":
        conversation.user(words)
    elif role == "assistant":
        for field in ("audio", "function_call"):
            if message.get(field) is not None:
                raise refused(f"{where}.{field}", "this is not supported; send tool_calls")
        conversation.assistant(words)
        for at, call in objects(message.get("tool_calls"), f"{where}.tool_calls"):
            function = _function(call, at)
            conversation.call(call.get("id"), function.get("name"), function.get("arguments"), at)
    elif role == "tool":
        conversation.result(message.get("tool_call_id"), words, f"{where}.tool_call_id")
    else:
        raise refused(f"{where}.role", f"{shown(role)} is not system, developer, user, assistant or tool")


def _tool(given: Body, where: str) -> Body:
    return tool(_function(given, where), f"{where}.function")


def _function(given: Body, where: str) -> Body:
    function = given.get("function")
    if given.get("type", "function") != "function" or not isinstance(function, dict):
        raise refused(where, "only type function is supported, with an object `function`")
    return function


def reply(body: Body, answers: Sequence[Answer]) -> Body:
    """Return the response to a body."""
    before, after = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [
            {"index": i, "message": _message(answer), "logprobs": None, "finish_reason": answer.finish_reason}
            for i, answer in enumerate(answers)
        ],
        "usage": {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after},
    }


def _message(answer: Answer) -> Body:
    calls = [
        {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": written(call.arguments)},
        }
        for call in answer.calls
    ]
    message = {"role": "assistant", "content": answer.content or (None if calls else ""), "refusal": None}
    return message | ({"tool_calls": calls} if calls else {})


def stream(body: Body, response: Body) -> str:
    """Return the events of a response: per choice one with the message, and one with the finish reason."""
    options = body.get("stream_options")
    shows_usage = isinstance(options, dict) and options.get("include_usage") is True
    chunk = {key: response[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunk |= {"usage": None} if shows_usage else {}
    events: list[str] = []
    for choice in response["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        for part, reason in ((delta, None), ({}, choice["finish_reason"])):
            one = {"index": choice["index"], "delta": part, "logprobs": None, "finish_reason": reason}
            events.append(event(chunk | {"choices": [one]}))
    if shows_usage:
        events.append(event(chunk | {"choices": [], "usage": response["usage"]}))
    return "".join([*events, event("[DONE]")])


DIALECT = Dialect("/v1/chat/completions", read, reply, stream, openai_error)
