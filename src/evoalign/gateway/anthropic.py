# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: POST /v1/messages.

A completion that ends with a stop sequence has the stop reason `end_turn`, and does not name the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evoalign.errors import RefusedError, shown
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
    refused,
    tool,
    written,
)

READ = frozenset({"max_tokens", "messages", "stop_sequences", "system", "temperature", "tool_choice", "tools", "top_p"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "cache_control": ({"type": "ephemeral"},), "mcp_servers": ([],), "thinking": ({"type": "disabled"},),
    "top_k": (-1, 0),
}  # fmt: skip
"""Values that leave completions as they are."""
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


def read(body: Body) -> Chat:
    """Return the request of a body. Raises RefusedError."""
    check(body, READ, NEUTRAL)
    conversation = Conversation()
    if body.get("system") is not None:
        conversation.system(content(body["system"], "system", ("text",)))
    for where, message in objects(body.get("messages"), "messages"):
        _add(conversation, message, where)
    return chat(body, conversation.whole("messages"), _tool, ("max_tokens",), stop="stop_sequences")


def _add(conversation: Conversation, message: Body, where: str) -> None:
    role, given = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise refused(f"{where}.role", f"{shown(role)} is not user or assistant; use `system` for a system message")
    kind = "tool_result" if role == "user" else "tool_use"
    blocks = [] if isinstance(given, str) else objects(given, f"{where}.content")
    others = [(at, block) for at, block in blocks if block.get("type") == kind]
    words = given if isinstance(given, str) else [block for _, block in blocks if block.get("type") != kind]
    said = content(words, f"{where}.content", ("text",))
    if role == "assistant":
        conversation.assistant(said)
        for at, block in others:
            conversation.call(block.get("id"), block.get("name"), block.get("input"), at)
        return
    for at, block in others:
        result = content(block.get("content"), f"{at}.content", ("text",))
        conversation.result(block.get("tool_use_id"), result, f"{at}.tool_use_id")
    if said or not others:
        conversation.user(said)


def _tool(given: Body, where: str) -> Body:
    if given.get("type") not in (None, "custom"):
        raise refused(where, f"type {shown(given['type'])} is not supported; only custom is")
    return tool(given, where, "input_schema")


def reply(body: Body, answers: Sequence[Answer]) -> Body:
    """Return the response to a body."""
    (answer,) = answers
    said: list[Body] = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
    used = [
        {"type": "tool_use", "id": new_id("toolu"), "name": call.name, "input": call.arguments} for call in answer.calls
    ]
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": said + used,
        "stop_reason": REASONS[answer.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def stream(_: Body, response: Body) -> str:
    """Return the events of a response, with one delta per block of its content."""
    begun = response | {"content": [], "stop_reason": None, "usage": response["usage"] | {"output_tokens": 0}}
    events: list[Body] = [{"type": "message_start", "message": begun}]
    for i, block in enumerate(response["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written(block["input"])}
        events += [
            {"type": "content_block_start", "index": i, "content_block": block | empty},
            {"type": "content_block_delta", "index": i, "delta": delta},
            {"type": "content_block_stop", "index": i},
        ]
    end = {key: response[key] for key in ("stop_reason", "stop_sequence")}
    events += [{"type": "message_delta", "delta": end, "usage": response["usage"]}, {"type": "message_stop"}]
    return "".join(event(one, one["type"]) for one in events)


def error(found: RefusedError) -> Body:
    """Return an error in the form of this API, which has no code: clients look for the words."""
    kind = KINDS.get(found.status, "invalid_request_error" if found.status < 500 else "api_error")
    words = f"prompt is too long: {found}" if found.code == "context_length_exceeded" else str(found)
    return {"type": "error", "error": {"type": kind, "message": words}}


DIALECT = Dialect("/v1/messages", read, reply, stream, error)
