# SPDX-License-Identifier: Apache-2.0
"""How a question is put to an exported model, as its training put it: a part of the code on the card."""

from __future__ import annotations

QUESTION = "What is 3 + 5?"
ANSWER = [
    "output = model.generate(**inputs, generation_config=settings)",
    'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
]


def asking(system: str | None, *, chat: bool) -> list[str]:
    """Lines of Python that ask `model` by its `tokenizer` and `settings`; messages begin with `system`, if any."""
    if not chat:
        return [f'inputs = tokenizer("{QUESTION}", return_tensors="pt")', *ANSWER]
    asked = f'{{"role": "user", "content": "{QUESTION}"}}'
    messages = [f"messages = [{asked}]"]
    if system is not None:
        messages = ["messages = [", f'    {{"role": "system", "content": {system!r}}},', f"    {asked},", "]"]
    return [
        *messages,
        "inputs = tokenizer.apply_chat_template(",
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ")",
        *ANSWER,
    ]
