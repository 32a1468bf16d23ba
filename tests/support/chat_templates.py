# SPDX-License-Identifier: Apache-2.0
"""Chat templates by the way they treat messages, and models of the shipped weights that have them."""

import json
import shutil
from pathlib import Path

from evoalign.models import tiny

CLOSE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WHOLE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}" + CLOSE
"""Renders each message, and strips its text."""
GEMMA = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + WHOLE
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}" + CLOSE
)
"""Reads content as a list of parts, so that text is left out."""
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + CLOSE
FIRST = "{{ messages[0].content }}" + CLOSE
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% elif m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Leaves out the thinking of earlier assistant messages, and writes an empty thinking block."""
LLAMA = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today Date: {{ date_string }}\n" + WHOLE
)
GRANITE = "Today's Date: {{ strftime_now('%B %d, %Y') }}.\n" + WHOLE


def model(folder: Path, template: object) -> Path:
    """Write the shipped model with another chat template: a text, None, or a list of named ones."""
    shutil.copytree(tiny(), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    tree = {name: value for name, value in json.loads(file.read_text()).items() if name != "chat_template"}
    file.write_text(json.dumps(tree if template is None else {**tree, "chat_template": template}))
    return folder
