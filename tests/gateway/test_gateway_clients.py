# SPDX-License-Identifier: Apache-2.0
"""The gateway with the clients of OpenAI and Anthropic: tools, streams as the clients put them together, errors."""

import json

import pytest
from gateway_backend import BOTH, KEY, TOOLS, Planned, said

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from evoalign.gateway.chat import RefusedError
from evoalign.gateway.server import Server

USER = {"role": "user", "content": "Weather and time?"}
FLAT = [{"type": "function"} | tool["function"] for tool in TOOLS]
AFTER = [
    {"role": "tool", "name": "weather", "content": "of a"},
    {"role": "tool", "name": "now", "content": "of b"},
]
CALLS = [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
    {"type": "function", "function": {"name": "now", "arguments": {}}},
]
WHOLE = [USER, {"role": "assistant", "content": "Let me look.", "tool_calls": CALLS}, *AFTER]
"""What the backend gets after the results of both calls."""


def openai_of(server, **more):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url, api_key=KEY, timeout=30, **more)


def anthropic_of(server, **more):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key=KEY, timeout=30, **more)


def by_chat(server, is_streamed):
    with openai_of(server) as client:
        given = {"model": "m", "tools": TOOLS, "messages": [USER]}
        if is_streamed:
            with client.chat.completions.stream(**given, stream_options={"include_usage": True}) as stream:
                found = stream.get_final_completion()
        else:
            found = client.chat.completions.create(**given)
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (11, 7)
        assert found.choices[0].finish_reason == "tool_calls"
        message = found.choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Zürich"}, {}]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"of {name}"}
            for call, name in zip(message.tool_calls, "ab", strict=True)
        ]
        history = [USER, message.model_dump(exclude_none=True), *results]
        return client.chat.completions.create(model="m", messages=history, tools=TOOLS).choices[0].message.content


def by_responses(server, is_streamed):
    with openai_of(server) as client:
        given = {"model": "m", "tools": FLAT, "input": [USER]}
        if is_streamed:
            with client.responses.stream(**given) as stream:
                found = stream.get_final_response()
        else:
            found = client.responses.create(**given)
        assert (found.usage.input_tokens, found.usage.output_tokens, found.status) == (11, 7, "completed")
        calls = [item for item in found.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Zürich"}, {}]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"of {name}"}
            for call, name in zip(calls, "ab", strict=True)
        ]
        items = [item.model_dump(exclude_none=True) for item in found.output]
        return client.responses.create(model="m", input=[USER, *items, *results], tools=FLAT).output_text


def by_messages(server, is_streamed):
    with anthropic_of(server) as client:
        tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in FLAT]
        given = {"model": "m", "tools": tools, "messages": [USER], "max_tokens": 100}
        if is_streamed:
            with client.messages.stream(**given) as stream:
                found = stream.get_final_message()
        else:
            found = client.messages.create(**given)
        assert (found.usage.input_tokens, found.usage.output_tokens, found.stop_reason) == (11, 7, "tool_use")
        calls = [block for block in found.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"city": "Zürich"}, {}]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"of {name}"}
            for call, name in zip(calls, "ab", strict=True)
        ]
        history = [USER, {"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
        last = client.messages.create(model="m", messages=history, tools=tools, max_tokens=100)
        return last.content[0].text


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("talk", [by_chat, by_responses, by_messages])
def test_clients_read_calls_and_send_results(talk, is_streamed):
    backend = Planned([BOTH], [said("Rain at noon.")])
    with Server(backend) as server:
        assert talk(server, is_streamed) == "Rain at noon."
    assert backend.chats[1].messages == WHOLE
    assert [tool["function"]["name"] for tool in backend.chats[0].tools] == ["weather", "now"]


def test_openai_client_raises_its_errors_without_retries():
    openai = pytest.importorskip("openai")
    plan = [
        RefusedError("too long", 400, "context_length_exceeded"),
        RefusedError("exhausted", 429, "insufficient_quota"),
    ]
    backend = Planned(*plan)
    with Server(backend) as server, openai_of(server) as client:
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="m", messages=[USER])
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="m", input="a", stream=True)
        with pytest.raises(openai.BadRequestError) as field:
            client.chat.completions.create(model="m", messages=[USER], logprobs=True)
        assert field.value.param == "logprobs"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        assert [model.id for model in client.models.list()] == ["evoalign"]
    assert len(backend.chats) == 2


def test_anthropic_client_raises_its_errors_without_retries():
    anthropic = pytest.importorskip("anthropic")
    backend = Planned(RefusedError("exhausted", 429, "insufficient_quota"))
    given = {"model": "m", "messages": [USER], "max_tokens": 5}
    with Server(backend) as server, anthropic_of(server) as client:
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(**given)
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            client.messages.create(**given, extra_body={"top_k": 5})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(**given)
    assert len(backend.chats) == 1
