# SPDX-License-Identifier: Apache-2.0
"""Tool calls as chat templates write them: the form is derived, and what a model writes is read."""

import json
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_templates import CODER, GLM, HERMES, LLAMA, MISTRAL, READABLE, STRING, of, template

from evoalign.errors import ModelError
from evoalign.models.tool_calls import Call, Turn
from evoalign.models.tool_formats import prepare

TYPES = {"s": "string", "i": "integer", "f": "number", "b": "boolean", "l": "array", "o": "object"}
USER = {"role": "user", "content": "Which?"}
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>")
SPECIAL = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
"""Tokens of the templates in trl that are special ones of their models; the first end a completion."""
DERIVED = {
    "glm4moe",
    "gptoss",
    "llama3_1",
    "llama3_2",
    "nemotron_3_5_lightning",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "qwen2_5",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_8",
    "qwen3_instruct_2507",
    "qwen3_vl",
}


def tool(name: str) -> dict:
    properties = {key: {"type": kind} for key, kind in TYPES.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Do it.",
            "parameters": {"type": "object", "properties": properties},
        },
    }


TOOLS = [tool(name) for name in ("get_it", "put", "a_b")]


def message(*calls: Call, content: str = "") -> dict:
    made = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def written(tokens, *calls: Call, content: str = "", tools=TOOLS) -> str:
    """Return the completion that the template writes for calls, after its own encoding."""
    chat = prepare([USER, message(*calls, content=content)], tokens._tool_format.writer)
    render = tokens.tokenizer.apply_chat_template
    whole, prompt = (
        render(c, tools=tools, tokenize=False, add_generation_prompt=c is not chat) for c in (chat, [USER])
    )
    text = whole.removeprefix(prompt) if whole.startswith(prompt) else whole.rpartition(USER["content"])[2]
    for special in tokens.tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text


def read(name: str, text: str) -> Turn:
    return of(READABLE[name]).read_turn(text, TOOLS)


@pytest.fixture(scope="module", params=READABLE)
def readable(request):
    return of(READABLE[request.param])


@pytest.fixture(
    scope="module", params=[HERMES, LLAMA, CODER, MISTRAL, GLM], ids=["hermes", "llama", "coder", "list", "glm"]
)
def hostile(request):
    return of(request.param)


LETTERS = st.characters(codec="utf-8", exclude_categories=("Cs", "Mn", "Mc", "Me"))
TEXTS = st.text(LETTERS | st.sampled_from('<>{}[]"\\/\n')).map(lambda text: unicodedata.normalize("NFC", text))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
BY_TYPE = {
    "s": TEXTS.filter(lambda text: not any(end in text for end in ("</parameter>", "</arg_value>"))),
    "i": st.integers(),
    "f": NUMBERS,
    "b": st.booleans(),
    "l": st.lists(VALUES, max_size=3),
    "o": st.dictionaries(TEXTS, VALUES, max_size=3),
}
TYPED = st.fixed_dictionaries({}, optional=BY_TYPE)
FREE = st.dictionaries(st.text("abc_xyz", min_size=1, max_size=6), VALUES, max_size=4)
slowly = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def check_round_trip(tokens, data) -> None:
    names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
    form = tokens._tool_format
    calls = data.draw(
        st.lists(st.tuples(names, TYPED if form.pair else FREE), min_size=1, max_size=1 + 2 * form.several)
    )
    calls = tuple(Call(name, arguments) for name, arguments in calls)
    tools = [tool(call.name) for call in calls]
    found = tokens.read_turn(written(tokens, *calls, tools=tools), tools)
    assert (found.calls, found.error) == (calls, "")


@slowly
@given(data=st.data())
def test_read_turn_returns_the_calls_that_a_template_writes(readable, data):
    check_round_trip(readable, data)


def shipped(name: str):
    trl = pytest.importorskip("trl")
    source = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = of(source, [token for token in SPECIAL if token in source], [token for token in ENDS if token in source])
    tokens.tokenizer.bos_token = "<|endoftext|>"
    return tokens


@pytest.mark.first("glm4moe", "gptoss", "llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3_5_think", "qwen3_vl")
@pytest.mark.parametrize("name", sorted(DERIVED))
def test_formats_of_published_templates_are_derived(name):
    tokens = shipped(name)
    tokens.read_turn("")

    @slowly
    @given(data=st.data())
    def round_trip(data):
        check_round_trip(tokens, data)

    round_trip()


@pytest.mark.parametrize(
    "name", ["cohere", "gemma3", "gemma4", "deepseekv3", "lfm2", "lfm2_2_5", "phi3", "llama3", "smolvlm"]
)
def test_published_templates_without_a_readable_form_are_refused(name):
    with pytest.raises(ModelError, match="some/model"):
        shipped(name).read_turn("")


LOSES_TOOLS = HERMES.replace("tools", "functions")
LOSES_RESULTS = HERMES.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
REFUSES_RESULTS = "{% if messages[-1].role == 'tool' %}{{ raise_exception('tool') }}{% endif %}" + HERMES
LOSES_CALLS = HERMES.replace("m.tool_calls", "m.calls")
LOSES_CALLS_WITH_CONTENT = HERMES.replace("{% if m.tool_calls %}", "{% if m.tool_calls and not m.content %}")
PYTHONIC = template("{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}='{{ v }}', {% endfor %})")


@pytest.mark.parametrize(
    "source",
    [LOSES_TOOLS, LOSES_RESULTS, REFUSES_RESULTS, LOSES_CALLS, LOSES_CALLS_WITH_CONTENT, PYTHONIC, "{{ 1 / 0 }}", None],
    ids=["tools", "results", "refuses", "calls", "calls with content", "pythonic", "raises", "none"],
)
@pytest.mark.parametrize("guarded", [False, True])
def test_tools_refuse_templates_that_cannot_be_used(source, guarded):
    tokens = of(source, guarded=guarded)
    for use in (lambda: tokens.read_turn(""), lambda: tokens.encode([USER], TOOLS)):
        with pytest.raises(ModelError, match="some/model"):
            use()


@pytest.mark.parametrize("guarded", [False, True])
def test_encode_renders_tools_calls_and_results(readable, guarded):
    tokens = of(readable.tokenizer.chat_template, guarded=guarded)
    call = Call("get_it", {"s": "value of s"})
    chat = [
        USER,
        message(call, content="First."),
        {"role": "tool", "content": "the result"},
        {**USER, "content": "End"},
    ]
    text = tokens.tokenizer.decode(tokens.encode(chat, TOOLS))
    for part in ("put", "get_it", "value of s", "the result", "End"):
        assert part in text
    assert text.endswith("assistant\n")


def test_encode_of_plain_messages_equals_encode(readable):
    for chat in ([USER], [USER, {"role": "assistant", "content": "It is"}], [{"role": "system", "content": "S"}, USER]):
        assert readable.encode(chat) == readable.encode(chat)
    plain = of(LOSES_TOOLS)
    assert plain.encode([USER]) == plain.encode([USER])


def test_encode_puts_a_refused_system_message_before_the_first_user_message():
    tokens = of("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + HERMES)
    text = tokens.tokenizer.decode(tokens.encode([{"role": "system", "content": "Be brief."}, USER], TOOLS))
    assert "user\nBe brief.\n\nWhich?" in text and "get_it" in text


def test_prepare_gives_results_the_ids_and_names_of_their_calls():
    chat = [message(Call("a", {}), Call("b", {})), *({"role": "tool", "content": t} for t in "xy")]
    first, *results = prepare(chat, "object")
    ids = [call["id"] for call in first["tool_calls"]]
    assert [(r["tool_call_id"], r["name"]) for r in results] == list(zip(ids, "ab", strict=True))
    for call, name in zip(chat[0]["tool_calls"], ("call_long_identifier", "other"), strict=True):
        call["id"] = name
    chat[1]["tool_call_id"], chat[2]["tool_call_id"] = "other", "call_long_identifier"
    first, *results = prepare(chat, "object")
    assert [r["name"] for r in results] == ["b", "a"] and all(len(r["tool_call_id"]) == 9 for r in results)
    assert [c["id"] for c in chat[0]["tool_calls"]] == ["call_long_identifier", "other"]


GOOD = '<tool_call>\n{"name": "put", "arguments": {"s": "</tool_call> {"}}\n</tool_call>'
PUT = Call("put", {"s": "</tool_call> {"})


def test_content_is_the_text_outside_of_calls():
    assert read("hermes", f"\nFirst.\n{GOOD}\n{GOOD} Then.\n") == Turn("First.\n\n Then.", (PUT, PUT), "")
    assert read("hermes", " Text {without} calls. \n") == Turn(" Text {without} calls. \n", (), "")
    assert read("hermes", "") == Turn("", (), "")
    assert read("hermes", f"<think>\nMaybe {GOOD} or <tool_call>\n</think>\nYes {GOOD}").calls == (PUT,)
    inside = GOOD.replace('{"}', '</think>{"}')
    assert read("hermes", inside).calls == (Call("put", {"s": "</tool_call> </think>{"}),)


@pytest.mark.parametrize(
    "broken",
    [
        '{"name": "put", "arguments": {"s": }}\n</tool_call>',
        '{"name": "put", "arguments": {"s": "x"}}',
        '{"name": "put", "arguments": {"s": "x',
        '{"arguments": {"s": "x"}}\n</tool_call>',
        '{"name": 3, "arguments": {"s": "x"}}\n</tool_call>',
        '{"name": "put", "arguments": [1]}\n</tool_call>',
        '{"name": "put", "arguments": "[1]"}\n</tool_call>',
        '{"name": "put", "arguments": "{"}\n</tool_call>',
        '{"name": "put"}\n</tool_call>',
        '["put"]\n</tool_call>',
        '{"name": "put", "arguments": {"s": NaN}}\n</tool_call>',
        '{"name": "put", "arguments": {"s": 1e999}}\n</tool_call>',
        '{"name": "put", "arguments": {"s": "\\ud800"}}\n</tool_call>',
        "put()</tool_call>",
        "",
    ],
)
def test_broken_calls_are_errors_that_stay_in_the_content(broken):
    found = read("hermes", f"First. <tool_call>\n{broken}")
    assert found.error and "<tool_call>" in found.error and found.calls == ()
    assert found.content == f"First. <tool_call>\n{broken}"
    both = read("hermes", f"{GOOD}\n<tool_call>\n{broken}\n{GOOD}")
    assert both.calls[0] == PUT and "call 2" in both.error
    found.error.encode()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", '{"name": "put", "parameters": {"s": '),
        ("llama", '{"type": "function", "parameters": {}}'),
        ("llama", '{"name": "put", "parameters": {}}; {"name": "put", "parameters": {}}'),
        ("mistral", 'Now [{"name": "put", "arguments": {}}'),
        ("devstral", 'Now put{"s": 1'),
        ("coder", "<tool_call>\n<function=put>\n<parameter=s>\nvalue\n</parameter>\n"),
        ("coder", "<tool_call>\n<function=put>\n<parameter=s>\nvalue"),
        ("coder", "<tool_call>\n<function>\n</function>\n</tool_call>"),
        ("coder", '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'),
        ("glm", "<tool_call>put<arg_key>s</arg_key></tool_call>"),
    ],
)
def test_broken_calls_of_other_forms_are_errors(name, text):
    assert read(name, text).error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", 'It is {"name": "put", "parameters": {}}'),
        ("llama", '{"answer": 4}'),
        ("mistral", "It is [1, 2] or [{}]."),
        ("devstral", "Use put or get_it {later}."),
        ("coder", "f(x) = <b>1</b>"),
    ],
)
def test_other_text_is_content(name, text):
    assert read(name, text) == Turn(text, (), "")


def test_other_white_space_and_text_arguments_are_read():
    call = Call("put", {"s": "x"})
    assert read("hermes", '<tool_call>{"name":"put","arguments":{"s":"x"}}</tool_call>').calls == (call,)
    assert read("hermes", '<tool_call>\n{"name": "put", "arguments": "{\\"s\\": \\"x\\"}"}\n</tool_call>').calls == (
        call,
    )
    assert read("llama", ' {"type": "function", "name": "put", "parameters": {"s": "x"}}').calls == (call,)
    close = "</function></tool_call>"
    assert read("coder", f"<tool_call><function=put><parameter=s>x</parameter>{close}").calls == (call,)
    assert read("string", written(of(STRING), call)).calls == (call,)


def test_texts_of_parameters_become_the_types_of_the_schema():
    schema = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "b": {"type": "boolean"},
        "n": {"type": ["string", "null"]},
        "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "w": {"type": "number"},
        "x": {},
        "y": {"type": "object"},
    }
    given = {
        "s": "5",
        "i": "5",
        "b": "True",
        "n": "None",
        "u": "text",
        "w": "five",
        "x": "[1]",
        "y": '{"k": 1}',
        "z": "5",
    }
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in given.items())
    tools = [{"type": "function", "function": {"name": "put", "parameters": {"type": "object", "properties": schema}}}]
    [call] = of(GLM).read_turn(f"<tool_call>put{pairs}</tool_call>", tools).calls
    expected = {"s": "5", "i": 5, "b": True, "n": None, "u": "text", "w": "five", "x": [1], "y": {"k": 1}, "z": 5}
    assert call.arguments == expected
    [call] = of(GLM).read_turn(f"<tool_call>unknown{pairs}</tool_call>", [{}, {"function": {"name": "put"}}]).calls
    assert call.arguments["x"] == [1] and call.arguments["s"] == 5


@settings(deadline=None)
@given(
    st.lists(
        st.text()
        | st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "put", "arguments": {',
                '"',
                "}",
                "</think>",
                "\n",
                "<function=put>",
                "<parameter=s>",
                "</parameter>",
                "</function>",
                "[",
                "{",
                "\\",
                "put",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            ]
        )
    ).map("".join)
)
def test_read_turn_never_raises(hostile, text):
    found = hostile.read_turn(text, TOOLS)
    found.error.encode()
    json.dumps([call.arguments for call in found.calls], allow_nan=False).encode()


def test_read_turn_takes_linear_time(hostile):
    """Linear time is below 0.1 s, quadratic time above 5 s."""
    units = (
        "<tool_call>",
        "<tool_call>\n{",
        '<tool_call>{"name": "',
        '<tool_call>{"a": [',
        "{",
        "[",
        '{"name":',
        '[{"name": ',
        '{"name": "put", "arguments": {',
        '"',
        " ",
        "\n",
        "<tool_call>\n<function=put>\n<parameter=s>\n",
        "<parameter=s>\n",
        "<tool_call>put<arg_key>s</arg_key><arg_value>",
        "</parameter>\n",
        "</think>",
        "put",
        "put{",
        "9",
        '{"name":' + "9" * 5000,
        '<tool_call>[",',
        '{"name": "put", "parameters": {}}',
        "<tool_call>" + " " * 9,
        "x_" * 99 + "<",
        '<tool_call>{"name": "put", "arguments": {}}</tool_call>',
    )
    prefixes = (
        "",
        '<tool_call>{"name": "put", "arguments": {"s": "',
        "<tool_call>\n<function=put>\n<parameter=s>\n",
        '{"name": ',
        '<tool_call>{"a": ',
    )
    for prefix in prefixes:
        for unit in units:
            text = prefix + unit * (400_000 // len(unit))
            start = time.process_time()
            found = hostile.read_turn(text, TOOLS)
            assert time.process_time() - start < 3, (prefix, unit)
            assert len(found.content) <= len(text)
