# SPDX-License-Identifier: Apache-2.0
"""Prompts of messages as chat templates render them: what is left out, refused, dated, or begun twice."""

import datetime
import socket

import pytest
from chat_templates import FIRST, GEMMA, GRANITE, LLAMA, NO_SYSTEM, PARTS, QWEN3, WHOLE, model
from pydantic import ValidationError
from transformers.utils import chat_template_utils

from evoalign import tokens
from evoalign.config import ModelConfig, TaskConfig
from evoalign.errors import ConfigError, ModelError
from evoalign.models import templates
from evoalign.tokens import Tokens

SYSTEM = {"role": "system", "content": "Answer with a number. "}
USER = {"role": "user", "content": " What is 2 plus 2?\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nAdd them.\n</think>\n\nIt is 4."}
MORE = {"role": "user", "content": "And 3 plus 3?"}
OPENED = {"role": "assistant", "content": "Let me think.\n<think>"}


def of(folder, template, **kwargs) -> Tokens:
    return tokens.load(ModelConfig(name=str(model(folder / "model", template))), kwargs)


class Clock(datetime.datetime):
    today_is = "2026-11-27"

    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(cls.today_is)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    return lambda day: monkeypatch.setattr(Clock, "today_is", day)


@pytest.mark.parametrize(
    ("template", "chat", "kind"),
    [
        (PARTS, [USER], "warning"),
        (NO_SYSTEM, [SYSTEM, USER], "warning"),
        (FIRST, [SYSTEM, USER], "warning"),
        (QWEN3, [USER, OPENED], "warning"),
        (GEMMA, [SYSTEM, USER], "note"),
        (LLAMA, [SYSTEM, USER], "note"),
        (GRANITE, [USER], "note"),
        (WHOLE, [SYSTEM, USER, THOUGHT, MORE, OPENED], None),
        (NO_SYSTEM, [USER], None),
        (QWEN3, [SYSTEM, USER, THOUGHT, MORE], None),
        (GEMMA, [USER, THOUGHT, MORE], None),
    ],
    ids=str,
)
def test_remarks_name_what_a_template_makes_of_the_messages(template, chat, kind, tmp_path):
    lines = of(tmp_path, template).remarks([chat, "plain text", chat])
    assert [line.partition(":")[0] for line in lines] == ([] if kind is None else [kind])


def test_remarks_show_the_message_and_its_rendering(tmp_path):
    [line] = of(tmp_path, FIRST).remarks([[USER], [SYSTEM, USER]])
    assert "user message in 1 of 2 prompts" in line and "What is 2 plus 2?" in line and "Answer with a number" in line


def test_render_puts_a_refused_system_message_before_the_first_user_message(tmp_path):
    """As written by hand; other things that the template refuses are errors."""
    gemma = of(tmp_path, GEMMA + "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}")
    joined = {"role": "user", "content": "Answer with a number. \n\n What is 2 plus 2?\n"}
    assert gemma.encode([SYSTEM, USER]) == gemma.encode([joined])
    assert gemma.encode([SYSTEM, USER, OPENED]) == gemma.encode([joined, OPENED])
    for chat in ([SYSTEM], [SYSTEM, USER, THOUGHT, MORE, OPENED]):
        with pytest.raises(ModelError, match="refuses the prompt"):
            gemma.encode(chat)


@pytest.mark.parametrize(
    "template", [None, "", [{"name": "rag", "template": WHOLE}, {"name": "tool_use", "template": WHOLE}]], ids=str
)
def test_messages_are_refused_without_a_template(template, tmp_path):
    loaded = of(tmp_path, template)
    assert loaded.encode("2 + 2 =")
    with pytest.raises(ModelError, match=r"(?s)tokenizer of .*model.*task\.prompt: raw") as caught:
        loaded.encode([USER])
    assert "\n" not in str(caught.value) and ("rag, tool_use" in str(caught.value)) == bool(template)


def test_template_kwargs_reach_the_template(tmp_path):
    thinks = of(tmp_path / "a", QWEN3)
    plain = of(tmp_path / "b", QWEN3, enable_thinking=False)
    assert plain.render([USER])[0] == thinks.render([USER])[0] + "<think>\n\n</think>\n\n"
    assert "Today Date: 1 May 2020" in of(tmp_path / "c", LLAMA, date_string="1 May 2020").render([USER])[0]
    for template in (WHOLE, None):
        with pytest.raises(ConfigError, match=r"task\.template_kwargs\.enable_thinking"):
            of(tmp_path / str(bool(template)), template, enable_thinking=False)


@pytest.mark.parametrize("value", [{"tokenize": True}, {"a b": 1}, {1: 2}, {"day": object()}, {"x": float("nan")},
                                   {"strftime_now": "today"}, {"strftime_now": 5}, ["a"]])  # fmt: skip
def test_template_kwargs_of_another_kind_are_refused(value):
    with pytest.raises(ValidationError, match="template_kwargs"):
        TaskConfig(template_kwargs=value)


def test_template_kwargs_of_plain_text_are_refused():
    from evoalign.tasks import create

    for task in (TaskConfig(name="countdown"), TaskConfig(prompt="raw")):
        with pytest.raises(ConfigError, match=r"task\.template_kwargs"):
            create(task.model_copy(update={"template_kwargs": {"enable_thinking": False}}))


@pytest.mark.parametrize(("template", "day"), [(LLAMA, "26 Jul 2024"), (GRANITE, "July 26, 2024")])
def test_a_template_that_prints_the_date_prints_the_same_one_on_every_day(template, day, tmp_path, clock):
    texts = set()
    for today in ("2026-11-27", "2026-11-28"):
        clock(today)
        loaded = of(tmp_path / today, template)
        assert loaded.tokenizer.apply_chat_template([USER], tokenize=False).count(Clock.now().strftime("%Y"))
        texts.add(loaded.render([USER])[0])
    assert len(texts) == 1 and day in texts.pop()
    chosen = TaskConfig(template_kwargs={"strftime_now": datetime.date(1999, 12, 31)}).template_kwargs
    other = of(tmp_path / "other", template, **chosen)
    assert "1999" in other.render([USER])[0] and "1999-12-31" in other.remarks([[USER]])[0]


def test_a_template_without_a_clock_gets_none():
    """Tokenizers that are not rendered by Jinja take no other arguments."""

    class Strict:
        chat_template = WHOLE

        def apply_chat_template(self, messages, tokenize, add_generation_prompt, continue_final_message):
            return "text"

    assert templates.render(Strict(), [USER]) == "text"


def test_the_fixed_clock_formats_as_python_and_keeps_the_template(tmp_path):
    """White space and line breaks at the beginning of a template are dropped as without it."""
    formats = ("%d %b %Y", "%B %d, %Y", "%Y-%m-%d", "%-d/%-m/%y", "%A %j %H:%M:%S %p 100%%")
    called = "".join(f"[{{{{ strftime_now('{f}') }}}}]" for f in formats)
    day = datetime.datetime.fromisoformat(templates.DATE)
    for start in ("", "\n", "  ", "\n\n  ", "{# note #}\n"):
        loaded = of(tmp_path / f"{start!r}", start + "{% if true %}" + called + "{% endif %}" + WHOLE)
        was = loaded.tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        before, after = was[: was.index("[")], was[was.rindex("]") + 1 :]
        assert loaded.render([USER])[0] == before + "".join(f"[{day.strftime(f)}]" for f in formats) + after


LONGER = "{{ 'Be brief. ' * 400 }}" + WHOLE


@pytest.mark.parametrize("template", [GEMMA, WHOLE, LONGER], ids=["refuses a system message", "takes all", "adds 4 KB"])
def test_many_chats_are_encoded_as_one_at_a_time(template, tmp_path):
    """Long ones, more than fit into the socket's buffer, and many short ones, some refused."""
    loaded = of(tmp_path, template)
    chats = [
        [*([SYSTEM] if i % 15 == 0 else []), {"role": "user", "content": f"{i} " + "long text, " * (i % 7) ** 5}]
        for i in [*range(30), *[7] * 150]
    ]
    assert sum(len(chat[-1]["content"]) for chat in chats) > 2**19
    assert loaded.encode_all(chats) == [loaded.encode(chat) for chat in chats]
    assert loaded.encode_all([]) == []


def test_the_prompt_above_a_limit_is_named_among_many(tmp_path):
    loaded = of(tmp_path, "{% for m in messages %}{{ m['content'] * (m['content'] | length) }}{% endfor %}")
    chats = [[{"role": "user", "content": f"{name} " + "a" * size}] for name, size in [("one", 9), ("two", 9000)]]
    with pytest.raises(ModelError, match="two aaa"):
        loaded.encode_all([*chats, *chats])
    assert loaded.encode_all(chats[:1] * 2) == [loaded.encode(chats[0])] * 2, "replies are those of later prompts"


def test_the_rendering_process_keeps_no_connection_of_its_owner_open(tmp_path):
    loaded = of(tmp_path, WHOLE)
    ours, theirs = socket.socketpair()
    loaded.encode([USER])  # starts the process
    theirs.close()
    ours.settimeout(5)
    assert ours.recv(1) == b"", "the other end is still open"
    ours.close()


def test_a_prompt_without_tokens_is_refused_alone_and_among_others(tmp_path):
    loaded = of(tmp_path, "{{ messages[0]['content'] }}")
    for encode in (loaded.encode, lambda chat: loaded.encode_all([chat])):
        with pytest.raises(ModelError, match="no tokens"):
            encode([{"role": "user", "content": ""}])
