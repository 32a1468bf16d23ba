# SPDX-License-Identifier: Apache-2.0
"""The APIs of the gateway over HTTP: requests as the backend gets them, responses, and refused fields."""

import json

import httpx
import pytest
from gateway_backend import BOTH, KEY, SECONDS, TOOLS, Planned, called, said

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from evoalign.gateway.chat import Call
from evoalign.gateway.server import Server

PATHS = ("chat/completions", "responses", "messages")
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather\nand time?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
        {"type": "function", "function": {"name": "now", "arguments": {}}},
    ]},
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "tool", "name": "now", "content": "noon"},
    {"role": "user", "content": "Well?"},
]  # fmt: skip
"""What every API's form of this conversation is for the backend."""
FUNCTIONS = [tool["function"] for tool in TOOLS]
SCHEMAS = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS]
CALL_ARGUMENTS = json.dumps({"city": "Zürich"})


def post(server, path, body, **headers):
    headers = {"Authorization": f"Bearer {KEY}"} | headers
    return httpx.post(f"{server.url}/{path}", json={"model": "any/name"} | body, headers=headers, timeout=SECONDS)


def events(answer):
    """Return the names and the data of a stream's events."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event"), fields["data"]))
    return found


FORMS = {
    "chat/completions": {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "and time?"}]},
            {"role": "assistant", "content": "Let me look.", "refusal": None, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": CALL_ARGUMENTS}},
                {"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}}]},
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
            {"role": "user", "content": "Well?"},
        ],
        "tools": TOOLS, "tool_choice": "auto", "max_completion_tokens": 5, "temperature": 0, "top_p": 0.5, "stop": "\n",
        "n": 1, "user": "u", "seed": 1, "frequency_penalty": 0, "logprobs": False, "parallel_tool_calls": True,
    },
    "responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather\nand time?"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "id": "fc", "name": "weather", "arguments": CALL_ARGUMENTS},
            {"type": "function_call", "call_id": "b", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "b", "output": "noon"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "user", "content": "Well?"},
        ],
        "tools": [{"type": "function", "strict": True} | one for one in FUNCTIONS],
        "max_output_tokens": 5, "temperature": 0, "top_p": 0.5, "store": False, "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"], "text": {"format": {"type": "text"}},
    },
    "messages": {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Weather\nand time?"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": "b", "name": "now", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "noon"}]},
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "text", "text": "Well?"}]},
        ],
        "tools": SCHEMAS,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "max_tokens": 5, "temperature": 0,
        "top_p": 0.5, "stop_sequences": ["\n"], "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_backend_gets_the_same_chat_from_every_api(path):
    backend = Planned([BOTH])
    with Server(backend) as server:
        answer = post(server, path, FORMS[path])
    assert answer.status_code == 200, answer.text
    (chat,) = backend.chats
    assert chat.messages == HISTORY and chat.tools == TOOLS and backend.keys == [KEY]
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.n) == (5, 0.0, 0.5, 1)
    assert chat.stop == (() if path == "responses" else ("\n",))
    assert answer.json()["model"] == "any/name"


def least(path):
    """Return the smallest request."""
    return {"input": "Hi"} if path == "responses" else {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("path", PATHS)
def test_smallest_request_leaves_settings_to_the_backend(path):
    backend = Planned([said("Hello")])
    with Server(backend) as server:
        assert post(server, path, least(path)).status_code == 200
    (chat,) = backend.chats
    assert chat.messages == [{"role": "user", "content": "Hi"}] and chat.tools == [] and chat.n == 1
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.stop) == (None, None, None, ())


@pytest.mark.parametrize("path", PATHS)
def test_tool_choice_none_offers_no_tools(path):
    backend = Planned([said("Hello")])
    choice = {"type": "none"} if path == "messages" else "none"
    with Server(backend) as server:
        assert post(server, path, FORMS[path] | {"tool_choice": choice}).status_code == 200
    assert backend.chats[0].tools == []


def test_chat_completions_returns_choices_with_calls_and_usage():
    with Server(Planned([said("One"), said("Two", "length"), called(Call("now", {}))])) as server:
        found = post(server, "chat/completions", least("chat") | {"n": 3}).json()
    assert [one["finish_reason"] for one in found["choices"]] == ["stop", "length", "tool_calls"]
    messages = [one["message"] for one in found["choices"]]
    assert [one["content"] for one in messages] == ["One", "Two", None]
    assert [one["index"] for one in found["choices"]] == [0, 1, 2] and "tool_calls" not in messages[0]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert found["usage"] == {"prompt_tokens": 11, "completion_tokens": 21, "total_tokens": 32}


def test_responses_returns_items():
    with Server(Planned([BOTH], [said("cut", "length")])) as server:
        found = post(server, "responses", least("responses")).json()
        cut = post(server, "responses", least("responses")).json()
    assert [item["type"] for item in found["output"]] == ["message", "function_call", "function_call"]
    assert found["output"][0]["content"][0]["text"] == "Let me look." and found["status"] == "completed"
    assert json.loads(found["output"][1]["arguments"]) == {"city": "Zürich"}
    assert found["usage"]["input_tokens"] == 11 and found["usage"]["total_tokens"] == 18
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_messages_returns_blocks():
    with Server(Planned([BOTH], [said("", "length")], [called(Call("now", {}))])) as server:
        found, cut, alone = (post(server, "messages", least("messages")).json() for _ in range(3))
    assert [block["type"] for block in found["content"]] == ["text", "tool_use", "tool_use"]
    assert found["content"][1]["input"] == {"city": "Zürich"} and found["stop_reason"] == "tool_use"
    assert found["usage"] == {"input_tokens": 11, "output_tokens": 7}
    assert cut["content"] == [{"type": "text", "text": ""}] and cut["stop_reason"] == "max_tokens"
    assert [block["type"] for block in alone["content"]] == ["tool_use"]


def test_chat_completions_streams_chunks():
    with Server(Planned([BOTH, said("Two")], [said("One")])) as server:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        found = events(post(server, "chat/completions", least("chat") | {"n": 2} | options))
        plain = events(post(server, "chat/completions", least("chat") | {"stream": True}))
    assert found[-1] == (None, "[DONE]") and {name for name, _ in found} == {None}
    chunks = [json.loads(data) for _, data in found[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 14
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [(c["index"], c["finish_reason"]) for c in choices] == [(0, None), (0, "tool_calls"), (1, None), (1, "stop")]
    assert [call["index"] for call in choices[0]["delta"]["tool_calls"]] == [0, 1]
    assert all("usage" not in json.loads(data) for _, data in plain[:-1])


def test_responses_streams_numbered_events():
    with Server(Planned([BOTH])) as server:
        found = events(post(server, "responses", least("responses") | {"stream": True}))
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [name for parts in (text, call, call) for name in ("output_item.added", *parts, "output_item.done")]
    names = [f"response.{name}" for name in ("created", "in_progress", *items, "completed")]
    assert [name for name, _ in found] == names
    data = [json.loads(one) for _, one in found]
    assert [one["type"] for one in data] == names and [one["sequence_number"] for one in data] == list(range(len(data)))
    assert data[0]["response"]["output"] == [] and len(data[-1]["response"]["output"]) == 3


def test_messages_streams_events():
    with Server(Planned([BOTH])) as server:
        found = events(post(server, "messages", least("messages") | {"stream": True}))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in found] == ["message_start", *block * 3, "message_delta", "message_stop"]
    data = [json.loads(one) for _, one in found]
    assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None
    assert data[-2]["delta"]["stop_reason"] == "tool_use" and data[-2]["usage"]["output_tokens"] == 7


@pytest.mark.parametrize(("given", "kept"), [
    ('{"city": ', {"arguments": '{"city": '}), ("[1]", {"arguments": "[1]"}), ("", {}), (None, {"arguments": None}),
    ({"city": "Rome"}, {"city": "Rome"}), ("[" * 5000, {"arguments": "[" * 5000}),
])  # fmt: skip
def test_arguments_that_are_no_object_are_kept_as_a_text(given, kept):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": given}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "-"},
    ]
    backend = Planned([said("Hm")])
    with Server(backend) as server:
        assert post(server, "chat/completions", {"messages": history}).status_code == 200
    (found,) = backend.chats[0].messages[0]["tool_calls"]
    assert found["function"]["arguments"] == kept


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]
REFUSED = [
    ("chat/completions", {"logprobs": True}, "logprobs"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"presence_penalty": 0.5}, "presence_penalty"),
    ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ("chat/completions", {"n": 0}, "n"), ("chat/completions", {"n": True}, "n"),
    ("chat/completions", {"temperature": -1}, "temperature"), ("chat/completions", {"top_p": 0}, "top_p"),
    ("chat/completions", {"max_tokens": 1.5}, "max_tokens"), ("chat/completions", {"stop": [""]}, "stop"),
    ("chat/completions", {"stream": "yes"}, "stream"), ("chat/completions", {"model": None}, "model"),
    ("chat/completions", {"min_tokens": 5}, "min_tokens"),
    ("chat/completions", {"tools": [{"type": "custom"}]}, "tools[0]"),
    ("chat/completions", user(IMAGE), "messages[0].content[0]"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [*user("a")["messages"], {"role": "assistant", "content": "b"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "tool", "tool_call_id": "z"}]}, "messages[0].tool_call_id"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"), ("responses", {"n": 2}, "n"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text"), ("responses", {"stop": ["a"]}, "stop"),
    ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
    ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ("responses", {"input": 5}, "input"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"), ("messages", {"top_k": 5}, "top_k"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ("messages", user([{"type": "image", "source": {}}]), "messages[0].content[0]"),
    ("messages", {"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
    ("messages", user([{"type": "tool_result", "tool_use_id": "z"}]), "messages[0].content[0].tool_use_id"),
]  # fmt: skip


def test_unsupported_fields_are_refused_by_name():
    backend = Planned()
    with Server(backend) as server:
        for path, fields, field in REFUSED:
            answer = post(server, path, least(path) | fields)
            assert answer.status_code == 400, (path, fields)
            error = answer.json()["error"]
            assert error["message"].startswith(f"{field}: ") and error["type"] == "invalid_request_error", error
            if path != "messages":
                assert error["param"] == field
    assert backend.chats == []


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"[" * 10**5, b'{"model": "\\ud800"}', b'{"top_p": NaN}', b"\xff"])
def test_bodies_that_are_no_json_object_are_refused(raw):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with Server(Planned()) as server:
        for path in (*PATHS, "score"):
            answer = httpx.post(f"{server.url}/{path}", content=raw, headers=headers, timeout=SECONDS)
            assert answer.status_code == 400, path
