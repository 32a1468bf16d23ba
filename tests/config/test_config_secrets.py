# SPDX-License-Identifier: Apache-2.0
"""What counts as a secret, in settings and in what is recorded, and what only looks a little like one."""

import pytest

from evoalign.config import from_dict, load
from evoalign.config.secrets import GONE, redacted, redacted_command
from evoalign.errors import ConfigError

SECRET = "Zq7rT2wX9bK4mN8vP1cL6"
OWN = {"name": "mine:Task"}


@pytest.mark.parametrize(
    ("section", "settings", "name"),
    [
        ("grpo", {"trl": {"hub_token": SECRET}}, "grpo.trl.hub_token"),
        ("grpo", {"trl": {"model_init_kwargs": {"token": "short"}}}, "grpo.trl.model_init_kwargs.token"),
        ("task", {**OWN, "judge": {"api_key": "short"}}, "task.judge.api_key"),
        ("task", {**OWN, "judges": [{"apiKey": "short"}]}, "task.judges.apiKey"),
        ("task", {**OWN, "DB_PASSWORD": "short"}, "task.DB_PASSWORD"),
        ("task", {**OWN, "access_keys": ["short"]}, "task.access_keys"),
        ("task", {**OWN, "headers": {"Authorization": f"Bearer {SECRET}"}}, "task.headers.Authorization"),
        ("task", {**OWN, "url": f"https://me:{SECRET}@example.org/data"}, "task.url"),
        ("task", {**OWN, "url": f"https://example.org/data?token={SECRET}&x=1"}, "task.url"),
        ("task", {**OWN, "url": f"https://example.org/d?X-Amz-Signature={SECRET}"}, "task.url"),
        ("task", {"train_data": f"s3://key:{SECRET}@bucket/file.json"}, "task.train_data"),
        ("model", {"name": f"https://oauth:{SECRET}@example.org/model"}, "model.name"),
        ("tracking", {"project": f"hf_{SECRET}"}, "tracking.project"),
        ("tracking", {"wandb_api_key": "short"}, "tracking.wandb_api_key"),
        ("engine", {"name": "mine:Engine", "credentials": "short"}, "engine.credentials"),
        ("space", {"name": "mine:Space", "client_secret": "short"}, "space.client_secret"),
        ("task", {"objective": {"name": "mine:Objective", "passphrase": "short"}}, "task.objective.passphrase"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(section, settings, name):
    with pytest.raises(ConfigError) as caught:
        from_dict({"es": {"sigma": 0.1}, section: settings})
    said = str(caught.value)
    assert said.startswith(f"{name} looks like a secret, and ") and "environment variable" in said
    assert SECRET not in said and "short" not in said and "\n" not in said


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5, "num_tokens": "many", "tokenizer": "mine", "tokens": "a b"},
        {"pad_token": "x", "eos_token": "</s>", "stop_token": "END", "token": "<think>", "special_token": "[SEP]"},
        {"key": "answer", "answer_key": "gsm8k_final_answer_2024", "keys": ["a", "b"], "primary_key": "id"},
        {"fields": {"key": "question", "keyboard": "x", "monkey": "y"}, "hockey": SECRET},
        {"token": None, "use_auth_token": True, "password": ""},
        {"url": "https://example.org/data?page=2&sort=key", "mail": "me@example.org", "at": "git@example.org:a/b"},
        {"secretary": "x", "passes": "2", "author": "me", "authors": ["me"], "pass_rate": "0.5"},
    ],
)
def test_what_only_looks_like_one_is_taken(options):
    found = from_dict({"es": {"sigma": 0.1}, "task": {**OWN, **options}})
    assert found.task.options == options


def test_the_folder_that_a_shell_is_in_is_no_password(monkeypatch):
    monkeypatch.setenv("PWD", "/home/ann/project2")
    assert from_dict({"model": {"name": "/home/ann/project2/base"}}).model.name.endswith("base")


def test_a_value_from_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    with pytest.raises(ConfigError, match=r"task\.note looks like a secret"):
        from_dict({"es": {"sigma": 0.1}, "task": {**OWN, "note": f"is {SECRET}"}})
    monkeypatch.setenv("DB_PASSWORD", "conciseness")  # a word is not looked for in everything
    assert redacted("task conciseness") == "task conciseness"


def test_an_override_or_a_file_with_a_secret_is_not_repeated(tmp_path):
    overrides = [f"grpo.trl.hub_token={SECRET}", f"grpo.trl.hub_token=[{SECRET}", f"task.api_key={SECRET}: {SECRET}: a"]
    texts = [f"es: {{sigma: 0.1}}\nhub_token: {SECRET}\n", f"hub_token: [{SECRET}\nes: 1\n"]
    file = tmp_path / "config.yaml"
    for text, override in [*(("es: {sigma: 0.1}", word) for word in overrides), *((text, None) for text in texts)]:
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load([file], [override] if override else [])
        assert SECRET not in str(caught.value)


def test_a_command_line_of_any_length_is_recorded_at_once():
    for word in ("a" * 200_000, "a=" * 2_000, "deadbeef" * 20_000, "a.a-" * 50_000, "eyJ-" * 50_000):
        assert redacted_command([word]) == [word]
    assert redacted_command([f"--set=a=b={'c=' * 2_000}hub_token={SECRET}"])[0].endswith("hub_token=[redacted]")


def test_a_command_line_is_recorded_without_its_secrets(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"sk{SECRET}")
    words = [
        "mine.py", "--api-key", SECRET, f"--password={SECRET}", f"--set=a.token={SECRET}", "--set",
        f"task.token={SECRET}", f"sk{SECRET}",
        f"https://me:{SECRET}@host/x?key={SECRET}", "--max-tokens", "64", "--set", "es.sigma=0.1", "--token", "-x",
        f"ghp_{SECRET}",
    ]  # fmt: skip
    assert redacted_command(words) == [
        "mine.py", "--api-key", GONE, f"--password={GONE}", f"--set=a.token={GONE}", "--set",
        f"task.token={GONE}", GONE,
        f"https://{GONE}@host/x?key={GONE}", "--max-tokens", "64", "--set", "es.sigma=0.1", "--token", GONE, GONE,
    ]  # fmt: skip
