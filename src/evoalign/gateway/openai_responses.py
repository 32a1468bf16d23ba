# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API: POST /v1/responses. No response is stored, so `previous_response_id` is refused."""

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
    new_id,
    objects,
    openai_error,
    refused,
    text,
    tool,
    written,
)

READ = frozenset(
    {"include", "input", "instructions", "max_output_tokens", "temperature", "tool_choice", "tools", "top_p"}
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,), "context_management": ([],), "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "top_logprobs": (0,), "truncation": ("disabled", "auto"),
}  # fmt: skip
"""Values that leave completions as they are; a prompt that would be truncated is refused by the backend."""
INCLUDED = ("reasoning.encrypted_content",)
"""Parts that clients request of every model, and that responses need not have."""
TEXTS = ("input_text", "output_text", "text")


def read(body: Body) -> Chat:
    """Return the request of a body. Raises RefusedError."""
    check(body, READ, NEUTRAL)
    if any(one not in INCLUDED for one in body.get("include") or ()):
        raise refused("include", f"{shown(body['include'])} is not supported; leave it out")
    conversation = Conversation()
    if body.get("instructions") is not None:
        conversation.system(text(body["instructions"], "instructions"))
    if isinstance(body.get("input"), str):
        conversation.user(body["input"])
    else:
        for where, item in objects(body.get("input"), "input"):
            _add(conversation, item, where)
    return chat(body, conversation.whole("input"), _tool, ("max_output_tokens",))


def _add(conversation: Conversation, item: Body, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role, words = item.get("role"), content(item.get("content"), f"{where}.content", TEXTS)
        if role in ("system", "developer"):
            conversation.system(words)
        elif role == "user":
            conversation.user(words)
        elif role == "assistant":
            conversation.assistant(words)
        else:
            raise refused(f"{where}.role", f"{shown(role)} is not system, developer, user or assistant")
    elif kind == "function_call":
        conversation.call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
    elif kind == "function_call_output":
        words = content(item.get("output"), f"{where}.output", TEXTS)
        conversation.result(item.get("call_id"), words, f"{where}.call_id")
    else:
        raise refused(f"{where}.type", f"{shown(kind)} is not message, function_call or function_call_output")


def _tool(given: Body, where: str) -> Body:
    if given.get("type") != "function":
        raise refused(where, f"type {shown(given.get('type'))} is not supported; only function is")
    return tool(given, where)


def reply(body: Body, answers: Sequence[Answer]) -> Body:
    """Return the response to a body."""
    (answer,) = answers
    now, is_cut = int(time.time()), answer.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[Body] = []
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        output.append(
            {"id": new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]}
        )
    output += [
        {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": new_id("call"),
            "name": call.name,
            "arguments": written(call.arguments),
            "status": "completed",
        }
        for call in answer.calls
    ]
    echoed = {key: body.get(key) for key in ("instructions", "max_output_tokens", "temperature", "top_p")}
    return echoed | {
        "id": new_id("resp"),
        "object": "response",
        "created_at": now,
        "completed_at": None if is_cut else now,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "metadata": body.get("metadata") or {},
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def stream(_: Body, response: Body) -> str:
    """Return the events of a response, with one delta per item of its output."""
    begun = response | {"status": "in_progress", "completed_at": None, "incomplete_details": None}
    begun |= {"output": [], "usage": None}
    events: list[Body] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
    for i, item in enumerate(response["output"]):
        at = {"item_id": item["id"], "output_index": i}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = item | {"status": "in_progress"} | empty
        events.append({"type": "response.output_item.added", "output_index": i, "item": added})
        events += _parts(item, at)
        events.append({"type": "response.output_item.done", "output_index": i, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    return "".join(event(one | {"sequence_number": i}, one["type"]) for i, one in enumerate(events))


def _parts(item: Body, at: Body) -> list[Body]:
    if item["type"] == "function_call":
        begin, given = "response.function_call_arguments", item["arguments"]
        done = {"type": f"{begin}.done", **at, "name": item["name"], "arguments": given}
        return [{"type": f"{begin}.delta", **at, "delta": given}, done]
    (part,) = item["content"]
    at = at | {"content_index": 0}
    return [
        {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
    ]


DIALECT = Dialect("/v1/responses", read, reply, stream, openai_error)
