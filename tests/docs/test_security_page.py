# SPDX-License-Identifier: Apache-2.0
"""Each sentence of SECURITY.md about a run directory from elsewhere has a test."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ALTERED, GRPO = "security/test_altered_weights.py::test_", "baselines/test_grpo.py::test_"
FORGED = "security/test_outside.py::test_command_refuses_forged_setting"
LINKS = "security/test_links.py::test_"
TESTS = {
    "The config of a run directory comes": FORGED,
    "Settings of it that start": FORGED,
    "If you trust the run": "security/test_outside.py::test_setting_given_by_the_user_is_followed",
    "Read the whole file first": "security/test_outside.py::test_setting_that_holds_text_is_marked",
    "It runs no code": "security/test_hostile_runs.py::test_a_run_does_not_say_what_code_runs",
    "`space.name`, `engine.name`": FORGED,
    "It starts no program": FORGED,
    "`engine.python`, `engine.arguments`": FORGED,
    "It connects to no address": FORGED,
    "`engine.url`, `engine.ca_file`": FORGED,
    "Where it is trained further": FORGED,
    "It sends no secret": FORGED,
    "`engine.key_variable`": FORGED,
    "It does not choose where": "security/test_outside.py::test_output_dir_of_a_run_is_where_the_run_is",
    "`engine.adapter_folder` is": FORGED,
    "It downloads no model": FORGED,
    "A hub name in": "security/test_outside.py::test_hub_name_is_followed_where_its_files_are_here",
    "So is a folder in `model.name`": "security/test_outside.py::test_model_folder_of_a_run_names_no_model_to_download",
    "The same holds for a journal": "security/test_outside.py::test_journal_alone_names_no_code",
    "The same holds for the folder of a sweep": "security/test_outside.py::test_folder_of_a_sweep_names_no_code",
    "A cell in its `sweep.json`": "security/test_outside.py::test_folder_of_a_sweep_names_no_code",
    "`placebo JOURNAL` refuses": "security/test_outside.py::test_journal_alone_names_no_code",
    "It writes and deletes nothing": f"{LINKS}commands_refuse_a_link_in_place_of_a_folder",
    "A link in place of a folder": f"{LINKS}lock_refuses_a_link",
    "A link in `trainer`, or": f"{LINKS}lock_refuses_a_link",
    "`placebo` and `report` refuse": f"{LINKS}commands_refuse_a_link_in_place_of_a_folder",
    "A folder that becomes a link": f"{LINKS}pruning_deletes_nothing_through_a_link",
    "A path that you give": f"{LINKS}outputs_below_a_link_in_a_run_are_refused",
    "A link in place of another file": f"{LINKS}links_in_place_of_files_are_read_and_replaced",
    "A sweep refuses links": f"{LINKS}a_sweep_refuses_links_in_its_folder",
    "Nothing in it is unpickled": f"{ALTERED}a_saved_checkpoint_in_pickle_form_is_not_read",
    "Weights are read as safetensors": "security/test_hostile_runs.py::test_weights_in_pickle_form_are_not_read",
    "Each file is first checked": "security/test_hostile_files.py::test_a_file_in_an_odd_form",
    "The state of GRPO's trainer": f"{GRPO}a_state_that_cannot_be_read_is_refused_and_runs_no_code",
    "It can have files of this machine": f"{LINKS}links_in_place_of_files_are_read_and_replaced",
    "A path in `model.name`": f"{LINKS}links_in_place_of_files_are_read_and_replaced",
    "The run directory itself": f"{LINKS}a_run_directory_may_be_a_link",
    "It can hold invented results": "security/test_hostile_runs.py::test_a_forged_journal_is_read",
    "Weights that are loaded": "rundir/test_checksums.py::test_verify_refuses_an_altered_result_by_name",
    "They are not recorded": "rundir/test_checksums.py::test_results_of_an_earlier_release_are_not_verified",
    "Neither is a signature": "security/test_hostile_runs.py::test_a_forged_journal_is_read",
    "`evoalign replay` rebuilds": "training/test_api_train.py::test_the_journal_replays_and_evaluate_repeats_the_run",
    "An edited `config.yaml`": "rundir/test_own.py::test_command_shows_no_edited_setting_as_the_runs",
    "It can name a shipped task": "security/test_outside.py::test_data_of_a_shipped_task_are_not_marked",
    "It can be a model of yours": "security/test_outside.py::test_base_of_a_run_that_the_user_names_is_followed",
    "Where you name a run": "security/test_outside.py::test_base_of_a_run_that_the_user_names_is_followed",
    "It can be a config without": "security/test_outside.py::test_config_without_a_run_is_the_users_own",
    "A `config.yaml` without": "security/test_outside.py::test_config_without_a_run_is_the_users_own",
}


def test_every_sentence_about_a_run_from_elsewhere_has_a_test() -> None:
    page = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    section = page.split("## A run directory from elsewhere\n")[1].split("\n## ")[0]
    parts = [" ".join(part.removeprefix("- ").split()) for part in re.split(r"\n\n|\n(?=- )", section.strip())]
    sentences = [text for part in parts for text in re.split(r"(?<=\.) (?=[A-Z`])", part) if text[-1] == "."]
    lacking = [text for text in sentences if not text.startswith(tuple(TESTS))]
    unused = [start for start in TESTS if not any(text.startswith(start) for text in sentences)]
    assert lacking == [] and unused == []
    for test in TESTS.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8"), test
