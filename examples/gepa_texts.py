# SPDX-License-Identifier: Apache-2.0
"""Options of a text setting of `task.settings`, proposed by GEPA (Agrawal et al., arXiv 2507.19457).

    pip install gepa==0.1.4
    python examples/gepa_texts.py config.yaml --reflect openai/MODEL      (a name of litellm, which pip installs)
    python examples/gepa_texts.py config.yaml --reflect file.py:function  (takes a prompt, returns a completion)
    evoalign train with_texts.yaml

A language model reads completions of training prompts with their rewards and proposes a better form of the prompt. The
config's own engine and reward score each form. The forms on GEPA's Pareto front over the training prompts become the
options of the setting `form`, among which ES then chooses while it moves the weights. The first is the prompt as it is.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.gepa_utils import find_dominator_programs
from pydantic import ValidationError

from evoalign import evaluation
from evoalign.checks import prompts
from evoalign.config import from_dict, to_yaml
from evoalign.config.joint import PROMPT, SettingConfig
from evoalign.errors import ConfigError
from evoalign.plugins import load_object
from evoalign.setup import Parts, as_config, assemble, with_form
from evoalign.tasks import Data
from evoalign.tasks.joint import Settings

REFLECT = """A language model is prompted with this text, in which {prompt} stands for a question:
```
<curr_param>
```
These are some of its completions and their rewards. Higher is better.

<side_info>

Write a text with which it earns more. It must contain {prompt}. Reply with the text alone, within ``` blocks."""


class Forms:
    """GEPA's adapter: scores a form of the prompt on rows as `evoalign eval` does, under the first `others` options."""

    propose_new_texts = None

    def __init__(self, parts: Parts, others: Mapping[str, SettingConfig]) -> None:
        self.parts, self.others = parts, others

    def evaluate(self, batch: list[Any], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Return the completions and rewards of rows; -inf for a form that a run would refuse."""
        parts, form = self.parts, candidate["form"]
        try:
            rows = Settings({**self.others, "form": SettingConfig(text=[form])}).under(batch, 0)
            prompts.check(parts.config, parts.tokens, parts.task, Data(rows, rows))
        except (ValidationError, ConfigError) as error:
            if form == PROMPT:
                raise
            return EvaluationBatch([str(error)] * len(batch), [float("-inf")] * len(batch), [{}] * len(batch))
        done = evaluation.evaluate(parts.engine, parts.tokens, parts.task, rows, parts.config.evaluation)
        first = {c.example: c for c in reversed(done.completions)}
        read = [
            {"Inputs": c.prompt, "Generated Outputs": c.text, "Feedback": f"reward {c.reward:g}, target {c.target}"}
            for c in (first[row] for row in range(len(rows)))
        ]
        return EvaluationBatch([trace["Generated Outputs"] for trace in read], list(done.measures_E["reward"]), read)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return what the reflecting model reads."""
        return dict.fromkeys(components_to_update, eval_batch.trajectories)


def propose(forms: Forms, reflect: str | Callable[[str], str], calls: int, rows: int, texts: int) -> list[str]:
    """Return the unchanged prompt and at most `texts` proposed forms of the Pareto front, the best first."""
    train = list(forms.parts.data.train)
    found: Any = gepa.optimize(
        seed_candidate={"form": PROMPT}, trainset=train, valset=train[:rows], adapter=forms,
        reflection_lm=reflect, reflection_prompt_template=REFLECT, perfect_score=forms.parts.max_score,
        max_metric_calls=calls, seed=forms.parts.config.seed,
    )  # fmt: skip
    scores = found.val_aggregate_scores
    front = find_dominator_programs(found.per_val_instance_best_candidates, scores)
    best = [found.candidates[k]["form"] for k in sorted(front, key=lambda k: (-scores[k], k))]
    return [PROMPT, *[form for form in dict.fromkeys(best) if form != PROMPT][:texts]]


def main() -> None:
    """Propose texts for a config's task, and write the config with them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--reflect", required=True, help="a model's name, or file.py:function")
    parser.add_argument("--calls", type=int, default=200, help="completions that GEPA may score, about")
    parser.add_argument("--rows", type=int, default=20, help="training prompts on which accepted forms are compared")
    parser.add_argument("--texts", type=int, default=4, help="most forms in addition to the unchanged prompt")
    parser.add_argument("--output", type=Path, default=Path("with_texts.yaml"))
    arguments = parser.parse_args()
    reflect = arguments.reflect
    reflect = load_object(reflect, "--reflect") if ".py:" in reflect else reflect
    config = with_form(as_config(arguments.config))
    if "form" in config.task.settings:
        parser.error("the config has task.settings.form already; remove it")
    first = config.fixed({})
    parts = assemble(first.model_copy(update={"task": first.task.model_copy(update={"settings": {}})}))
    try:
        forms = Forms(parts, first.task.settings)
        texts = propose(forms, reflect, arguments.calls, arguments.rows, arguments.texts)
    finally:
        parts.close()
    if len(texts) == 1:
        raise SystemExit("no proposed text scored better than the prompt alone; raise --calls, or see the log above")
    tree = config.model_dump(mode="json")
    tree["task"]["settings"] = {**tree["task"].get("settings", {}), "form": {"text": texts}}
    arguments.output.write_text(to_yaml(from_dict(tree), changed=True), encoding="utf-8")
    print(f"{len(texts)} texts in {arguments.output}: evoalign train {arguments.output}")


if __name__ == "__main__":
    main()
