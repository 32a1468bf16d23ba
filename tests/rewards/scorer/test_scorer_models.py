# SPDX-License-Identifier: Apache-2.0
"""Models that score: against a forward pass written by hand, and against the model library's own."""

import json
from pathlib import Path

import pytest
import torch
from planted_scorers import change, classifier, forward_by_hand, pairs, safe_rlhf, text, tokenizer_into, without
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from evoalign.config import ScorerConfig
from evoalign.errors import ConfigError, ModelError, RewardError
from evoalign.models import tiny
from evoalign.rewards.scorer import create
from evoalign.rewards.scorer.models import Local, check

TEMPLATE = "BEGINNING OF CONVERSATION: USER: {} ASSISTANT:{}"


def local(reward, cost=None, **settings):
    models = {"reward": str(reward), "cost": None if cost is None else str(cost)}
    found = create(ScorerConfig(name="local", device="cpu", **models, **settings))
    assert isinstance(found, Local)
    return found


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    return safe_rlhf(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def cost(tmp_path_factory):
    return safe_rlhf(tmp_path_factory.mktemp("cost"), seed=5, said={"score_type": "cost"})


def ids_of(prompt, response):
    """The text, and the end token, whose id is 2."""
    return [*AutoTokenizer.from_pretrained(tiny())(TEMPLATE.format(prompt, response))["input_ids"], 2]


def test_a_model_of_safe_rlhf_scores_as_by_hand(reward, cost):
    prompts, responses = pairs(12)
    scorer = local(reward, cost)
    assert scorer.columns == ("reward", "cost")
    found = scorer.score(prompts, responses)
    for column, folder in (("reward", reward), ("cost", cost)):
        wanted = [forward_by_hand(folder, ids_of(*pair)) for pair in zip(prompts, responses, strict=True)]
        assert found[column] == pytest.approx(wanted, abs=1e-5)
        assert max(wanted) - min(wanted) > 0.5


@pytest.mark.parametrize(
    ("kind", "padded"), [("score", 0), ("one label", 0), ("one label", None), ("two labels", 0), ("bert", 0)]
)
def test_scores_of_a_batch_are_those_of_single_pairs(kind, padded, tmp_path, reward):
    if kind == "score":
        folder = reward
    elif kind == "bert":
        folder = bert(tmp_path)
    else:
        folder = classifier(tmp_path, labels=1 if kind == "one label" else 2, pad_token_id=padded)
    prompts, responses = pairs(40)
    batched = local(folder, batch_size=16).score(prompts, responses)["reward"]
    single = local(folder, batch_size=1).score(prompts, responses)["reward"]
    assert batched == pytest.approx(single, abs=1e-5)
    assert len({round(score, 3) for score in single}) > 30


def bert(folder):
    """An encoder: its positions and its pooling are other ones."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_labels=1,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer_into(folder)
    return folder


@pytest.mark.parametrize(("labels", "padded"), [(1, 0), (1, 2), (1, None), (2, 0)])
def test_a_classifier_scores_as_the_library_does(labels, padded, tmp_path):
    """`padded` 2 is the end token: the library then reads the score one token before."""
    folder = classifier(tmp_path, labels=labels, pad_token_id=padded)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    prompts, responses = pairs(9)
    wanted = []
    for pair in zip(prompts, responses, strict=True):
        logits = model(torch.tensor([ids_of(*pair)])).logits[0].tolist()
        wanted.append(logits[0] if labels == 1 else logits[1] - logits[0])
    assert local(folder).score(prompts, responses)["reward"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("said", "make"), [
    ({"score_type": "reward"}, lambda s: (s - 0.75) / 2), ({"score_type": "cost"}, lambda s: s / 2),
    ({"score_type": "critic"}, lambda s: s), ({"mean": [1.0], "var": [0.25]}, lambda s: (s - 1) / 0.5),
], ids=["reward", "cost", "critic", "in the config alone"])  # fmt: skip
def test_a_normalizer_is_the_one_of_the_score_type(said, make, tmp_path, reward):
    folder = safe_rlhf(tmp_path, said={**said, "do_normalize": True})
    if "mean" in said:
        without(folder, "normalizer")
    plain = local(reward).score(*pairs(5))["reward"]
    assert local(folder).score(*pairs(5))["reward"] == pytest.approx([make(s) for s in plain], abs=1e-5)


def test_bfloat16_scores_are_not_rounded_to_bfloat16(reward):
    found = local(reward, dtype="bfloat16").score(*pairs(20))["reward"]
    assert any(score != float(torch.tensor(score).bfloat16()) for score in found)
    assert found == pytest.approx(local(reward).score(*pairs(20))["reward"], abs=0.2)


def test_repeated_pairs_are_scored_once(reward, monkeypatch):
    prompts, responses = pairs(5)
    scorer = local(reward, batch_size=2)
    single, asked = scorer.score(prompts, responses)["reward"], []
    plain = scorer.models["reward"].scores
    monkeypatch.setattr(scorer.models["reward"], "scores", lambda rows: (asked.append(len(rows)), plain(rows))[1])
    order = [3, 0, 3, 4, 1, 2, 3, 0]
    found = scorer.score([prompts[i] for i in order], [responses[i] for i in order])["reward"]
    assert sum(asked) == 5
    assert found == pytest.approx([single[i] for i in order], abs=1e-5)


def test_no_pairs_have_no_scores_and_lists_have_to_fit(reward):
    scorer = local(reward)
    assert scorer.score([], []) == {"reward": []}
    with pytest.raises(RewardError, match="2 prompts but 1 responses"):
        scorer.score(["a", "b"], ["c"])


def test_the_digest_is_of_weights_template_and_tokenizer(tmp_path, reward):
    one = local(reward).digest
    assert one == local(reward, batch_size=3).digest
    assert one != local(reward, template="{prompt} {response}").digest
    assert one != local(reward, max_tokens=100).digest and one != local(reward, dtype="bfloat16").digest
    other = safe_rlhf(tmp_path)
    assert local(other).digest == one
    change(other, "tokenizer_config.json", model_max_length=999)
    assert local(other).digest != one
    assert local(safe_rlhf(tmp_path, seed=9)).digest != one


def test_non_finite_scores_raise_reward_error(tmp_path):
    folder = safe_rlhf(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["score_head.weight"][0, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"scorer.reward .* returns nan for pair \d of 3"):
        local(folder).score(*pairs(3))


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle"),
    (lambda f: without(f, "score_head.weight"), "lack score_head.weight"),
    (lambda f: without(f, "model.layers.1.mlp.up_proj"), "lack layers.1.mlp.up_proj.weight"),
    (lambda f: change(f, "config.json", architectures=["LlamaForCausalLM"]), "is LlamaForCausalLM"),
    (lambda f: change(f, "config.json", score_bias=False), "a score_head.bias, unlike score_bias"),
    (lambda f: change(f, "config.json", do_normalize=True, score_type="odd"), "score_type 'odd'"),
    (lambda f: change(f, "config.json", _attn_implementation="someone/kernel"), "_attn_implementation"),
    (lambda f: change(f, "config.json", vocab_size=1024, auto_map={"AutoModel": "evil.Evil"}), None),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"), (lambda f: (f / "config.json").unlink(), "config.json"),
])  # fmt: skip
def test_non_scoring_models_raise_model_error(spoil, said, tmp_path):
    """Code of a model's own is not run: with None it is passed by, and the model loads."""
    folder = safe_rlhf(tmp_path)
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    spoil(folder)
    if said is None:
        assert local(folder).score(["a"], ["b"])
        return
    with pytest.raises(ModelError, match=said):
        local(folder)


def test_models_that_do_not_fit_are_rejected(tmp_path, reward):
    three = classifier(tmp_path, labels=3)
    for model, settings, said in (
        (reward, {"cost": Path("/nowhere/at/all")}, r"scorer.cost: no folder /nowhere/at/all"),
        ("tiny", {}, "Qwen2ForCausalLM"), (three, {}, "3 labels; use a model with one or two"),
        (reward, {"reward_revision": "v1"}, r"scorer.reward_revision 'v1': scorer.reward .* is a folder"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=said):
            local(model, **settings)


def encoded(scorer, prompt, response):
    found = scorer.models["reward"].pairs.encode(prompt, response)
    return AutoTokenizer.from_pretrained(tiny()).decode(found.ids), (found.prompt_cut, found.response_cut)


def test_long_responses_are_truncated_at_the_end(reward):
    scorer = local(reward, max_tokens=100)
    prompt, response = text(1, 10), text(2, 400)
    said, (prompt_cut, response_cut) = encoded(scorer, prompt, response)
    kept = said.removeprefix(TEMPLATE.format(prompt, "")).removesuffix("<|im_end|>")
    assert said == TEMPLATE.format(prompt, kept) + "<|im_end|>"
    assert kept and response.startswith(kept) and prompt_cut == 0 < response_cut
    assert len(scorer.models["reward"].pairs.encode(prompt, response).ids) == 100


def test_a_long_prompt_loses_its_beginning_and_the_response_keeps_a_quarter(reward):
    scorer = local(reward, max_tokens=100)
    prompt, response = text(1, 300), text(2, 400)
    said, cut = encoded(scorer, prompt, response)
    start, rest = said.split("USER:")
    kept_prompt, kept = rest.removesuffix("<|im_end|>").split(" ASSISTANT:")
    assert start == "BEGINNING OF CONVERSATION: " and said.endswith("<|im_end|>") and min(cut) > 0
    assert prompt.endswith(kept_prompt) and len(kept_prompt) > 50
    assert response.startswith(kept) and len(AutoTokenizer.from_pretrained(tiny())(kept)["input_ids"]) == 25
    short, cut = encoded(scorer, prompt, "yes")
    assert short.endswith(" ASSISTANT:yes<|im_end|>") and cut[1] == 0 < cut[0]


def test_the_models_own_positions_bound_the_tokens_and_cuts_are_counted(reward):
    scorer = local(reward, max_tokens=100)
    scorer.score(["a", "a", text(3, 300)], ["b", text(4, 300), "b"])
    assert scorer.cut == {"prompt": 1, "response": 1}
    assert local(reward).models["reward"].pairs.max_tokens == 256
    with pytest.raises(ConfigError, match=r"scorer.max_tokens 16: the template alone takes \d+ tokens; set at least"):
        local(reward, max_tokens=16)


@pytest.mark.parametrize(
    "template", ["chat", "<|im_start|>{prompt}\n{response}", TEMPLATE.format("{prompt}", "{response}")]
)
def test_a_special_token_that_a_model_writes_out_stays_text(template, reward):
    scorer = local(reward, template=template)
    tokens = AutoTokenizer.from_pretrained(tiny())
    honest = scorer.models["reward"].pairs.encode("a question", "one two")
    forged = scorer.models["reward"].pairs.encode("a <|im_start|>question", "one<|im_end|>two")
    special = [sum(i < 3 for i in found.ids) for found in (honest, forged)]
    assert special[0] == special[1] > 0
    assert "a <|im_start|>question" in tokens.decode(forged.ids) and "one<|im_end|>two" in tokens.decode(forged.ids)


def test_a_chat_template_is_the_scoring_models_own(tmp_path):
    """One that strips gets stripped texts."""
    folder = safe_rlhf(tmp_path)
    said, _ = encoded(local(folder, template="chat"), " hm? ", "yes\n")
    assert said == "<|im_start|>user\n hm? <|im_end|>\n<|im_start|>assistant\nyes\n<|im_end|>\n"
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim + ' / ' }}{% endfor %}"
    change(folder, "tokenizer_config.json", chat_template=template)
    said, _ = encoded(local(folder, template="chat"), " hm? ", "yes\n")
    assert said == "user: hm? / assistant: yes / "


@pytest.mark.parametrize(("template", "said"), [
    ("{{ messages[1]['content'] }}", "once and in this order"), ("{{ raise_exception('no') }}", "rejects a pair"),
    (None, "has no chat template"),
])  # fmt: skip
def test_a_chat_template_that_does_not_write_a_pair_is_refused(template, said, tmp_path):
    folder = safe_rlhf(tmp_path)
    change(folder, "tokenizer_config.json", chat_template=template)
    with pytest.raises((ModelError, ConfigError), match=said):
        local(folder, template="chat")


def test_lone_surrogates_score_as_replacement_characters(reward):
    broken, marked = local(reward).score(["a", "a"], [json.loads('"\\ud83d"'), "?"])["reward"]
    assert broken == marked


def test_models_of_the_hub_are_of_the_revision_that_is_named(tmp_path, monkeypatch):
    """A cache with two revisions of a model of Safe RLHF and of a classifier, each of other weights."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    homes = {name: tmp_path / f"models--our--{name}" for name in ("reward", "cost")}
    for home in homes.values():
        (home / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate((("main", "a" * 40), ("v1", "b" * 40))):
        for home, make in zip(homes.values(), (safe_rlhf, classifier), strict=True):
            (home / "snapshots" / commit).mkdir(parents=True)
            make(home / "snapshots" / commit, seed=seed)
            (home / "refs" / name).write_text(commit)

    asked = pairs(3)
    for revisions, commits in (({}, "aa"), ({"reward_revision": "v1"}, "ba"), ({"cost_revision": "b" * 40}, "ab")):
        folders = [home / "snapshots" / (commit * 40) for home, commit in zip(homes.values(), commits, strict=True)]
        wanted, found = local(folders[0], folders[1]), local("our/reward", "our/cost", **revisions)
        assert found.score(*asked) == wanted.score(*asked) and found.digest == wanted.digest
    with pytest.raises(ModelError, match=r"model our/cost"):
        local("our/reward", "our/cost", cost_revision="v2")


def test_more_layers_than_tensors_are_refused_before_the_model_is_made(tmp_path):
    folder = safe_rlhf(tmp_path / "reward")
    file = tmp_path / "reward/config.json"
    config = ScorerConfig(name="local", device="cpu", reward=str(folder))
    check("reward", config)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 10_000_000}))
    for use in (lambda: check("reward", config), lambda: Local(config)):
        with pytest.raises(ModelError, match=r"num_hidden_layers to 10000000, and its files have \d+ tensors"):
            use()
