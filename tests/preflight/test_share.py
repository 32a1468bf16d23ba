# SPDX-License-Identifier: Apache-2.0
"""The doctor and a dry run say which share of a mixture's weights evolves, and what does not."""

import json
from pathlib import Path

from families import build, make_config

from evoalign.models.files import place
from evoalign.preflight.plan import Case, check_targets
from evoalign.training.train import dry_run


def test_experts_that_do_not_evolve_are_a_warning_with_a_fix(tmp_path):
    task = {"name": "conciseness"}
    config = make_config(build("qwen2_moe", tmp_path / "base"), output_dir=str(tmp_path / "run"), task=task)
    found = check_targets(Case(config))
    assert found.status == "warning" and found.fix == "use space lowrank"
    assert "adapters reach 10.6 % of the weights; the experts, 14 % of the weights, do not evolve" in found.detail
    _, share, _, warning, eta, effective, *_ = dry_run(config)
    assert eta.startswith("eta ") and effective.startswith("effective sigma")
    assert share.startswith("space lora: ") and " numbers; adapters reach 10.6 % of the weights: q_proj, " in share
    assert warning.startswith("warning: the experts, 14 % of the weights, do not evolve: PEFT has no adapter for them")
    mended = make_config(tmp_path / "base", "lowrank", output_dir=str(tmp_path / "run"), task=task)
    assert check_targets(Case(mended)).status == "ok"
    assert not any("do not evolve" in line for line in dry_run(mended))


def test_share_line_names_modules_of_other_layers(tmp_path):
    here, lora = str(tmp_path / "run"), {"target_layers": [3], "target_modules": ["down_proj"]}
    _, share, *_ = dry_run(make_config("tiny", task={"name": "conciseness"}, lora=lora, output_dir=here))
    reached, _, others = share.partition(" of the weights: ")[2].partition("; not: ")
    assert reached == "down_proj" and others.endswith(", up_proj, down_proj of other layers")
    more = {"task": {"name": "conciseness"}, "output_dir": here}
    _, share, *_ = dry_run(make_config("tiny", lora={"target_layers": [3]}, **more))
    assert "q_proj of other layers" in share and "embed_tokens," in share


def test_few_layers_of_a_deep_model_are_a_warning(tmp_path):
    """A setting for a toy that stays in force with a model of one's own."""
    deep = json.loads((Path(place("tiny")) / "config.json").read_text()) | {"num_hidden_layers": 24}
    deep["layer_types"] = ["full_attention"] * 24
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/config.json").write_text(json.dumps(deep))
    more = {"task": {"name": "conciseness"}, "output_dir": str(tmp_path / "run")}
    few = check_targets(Case(make_config(tmp_path / "deep", lora={"target_layers": [3]}, **more)))
    assert few.status == "warning" and "1 of 24 layers evolves, lora.target_layers [3]" in few.detail
    assert "lora.target_layers=null" in few.fix
    for layers in ([1, 2, 3], None):
        some = make_config(tmp_path / "deep", lora={"target_layers": layers}, **more)
        assert check_targets(Case(some)).status == "ok"
