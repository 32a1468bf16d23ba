# SPDX-License-Identifier: Apache-2.0
"""Chat templates by the form of their tool calls, and tokenizers of the shipped model that have them."""

import copy
from collections.abc import Sequence

from evoalign import tokens
from evoalign.config import from_dict
from evoalign.tokens import Tokens


def template(call: str, between: str = "", start: str = "", end: str = "", content: str = "{{ m.content }}") -> str:
    """Return a template in which `c` is a call's function."""
    return (
        "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        + content
        + start
        + "{% for t in m.tool_calls %}{% set c = t.function %}"
        + call
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
        + end
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


ARGUMENTS = "{{ c.arguments | tojson }}"
OBJECT = '{"name": "{{ c.name }}", "arguments": ' + ARGUMENTS
HERMES = template("<tool_call>\n" + OBJECT + "}\n</tool_call>", "\n", "\n")
MISTRAL = template(OBJECT + ', "id": "{{ t.id }}"}', ", ", "<|tool_calls|>[", "]")
MISTRAL = MISTRAL.replace("{% set c", "{% if t.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{% set c")
LLAMA = template('{"name": "{{ c.name }}", "parameters": ' + ARGUMENTS + "}", content="").replace(
    "{% if m.tool_calls %}",
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% elif m.tool_calls %}",
)
NAMED = template("<function={{ c.name }}>" + ARGUMENTS + "</function>", "\n")
KIMI = template("<call>{{ c.name }}:{{ loop.index0 }}<args>" + ARGUMENTS + "</call>", start="<calls>", end="</calls>")
DEVSTRAL = template("<|tool_calls|>{{ c.name }}<|args|>" + ARGUMENTS)
JSON_TEXT = template("{{ '<call>' + c.name + '\n```json\n' + c.arguments + '\n```</call>' }}", "\n")
STRING = template("<tool_call>" + OBJECT.replace("tojson", "tojson | tojson") + "}</tool_call>", "\n")
PARAMETER = (
    "<parameter={{ k }}>\n{{ v | tojson if v is mapping or v is iterable and v is not string else v }}\n</parameter>\n"
)
CODER = template(
    "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}"
    + PARAMETER
    + "{% endfor %}</function>\n</tool_call>",
    "\n",
    "\n",
)
GLM = template(
    "<tool_call>{{ c.name }}{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
)
SMOL = (
    "{% if xml_tools %}<|im_start|>system\n{{ xml_tools | tojson }} Write calls as <tool_call>\n"
    '{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
READABLE = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "named": NAMED,
    "kimi": KIMI,
    "devstral": DEVSTRAL,
    "json text": JSON_TEXT,
    "string": STRING,
    "coder": CODER,
    "glm": GLM,
    "smol": SMOL,
}


def of(
    chat_template: object,
    special: Sequence[str] = ("<|tool_calls|>", "<|args|>"),
    ends: Sequence[str] = (),
    guarded: bool = False,
) -> Tokens:
    """Return the shipped tokenizer with another chat template, more special tokens, and more that end completions."""
    loaded = tokens.load(from_dict({"model": {"name": "tiny"}, "es": {"sigma": 0.1}}).model)
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *ends]})
    tokenizer.chat_template = chat_template
    stops = [*loaded.stop_ids, *map(tokenizer.convert_tokens_to_ids, ends)]
    return Tokens(tokenizer, stops, guarded=guarded, name="some/model")
