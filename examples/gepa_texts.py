# SPDX-License-Identifier: Apache-2.0
"""Options of a text setting of `task.settings`, proposed by GEPA (Agrawal et al., arXiv 2507.19457).

    pip install gepa==0.1.4 litellm
    python examples/gepa_texts.py config.yaml --reflect openai/MODEL      (a name of litellm)
    python examples/gepa_texts.py config.yaml --reflect file.py:function  (takes a prompt, returns a completion)
    evoalign train with_texts.yaml

A language model reads completions of training prompts with their rewards and proposes a better form of the prompt. The
config's own engine and reward score each form. The forms on GEPA's Pareto front over the training prompts become the
options of the setting `form`, among which ES then chooses while it moves the weights. The first is the prompt as it is.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.gepa_utils import find_dominator_programs
from gepa.lm import LM

from evoalign import evaluation
from evoalign.checks import prompts
from evoalign.config import Config, to_yaml
from evoalign.config.joint import PROMPT
from evoalign.errors import EvoalignError
from evoalign.plugins import load_object
from evoalign.setup import Parts, as_config, assemble, with_form
from evoalign.tasks.joint import Settings

REFLECT = """A language model is prompted with this text, in which {prompt} stands for a question:
```
<curr_param>
```
These are some of its completions and their rewards. Higher is better.

<side_info>

Write a text with which it earns more. It must contain {prompt}. Reply with the text alone, within ``` blocks."""


def with_texts(config: Config, texts: Sequence[str]) -> Config:
    """Return the config with these options of the setting `form`. Raises ConfigError."""
    tree = config.model_dump(mode="json")
    tree["task"]["settings"] = {**tree["task"].get("settings", {}), "form": {"text": [*texts]}}
    return as_config(tree)


class Forms:
    """GEPA's adapter: scores a form of the prompt as `evoalign eval` does, under the other settings' first options."""

    propose_new_texts = None

    def __init__(self, parts: Parts, config: Config) -> None:
        self.parts, self.config, self.settings = parts, config, cache(self.check)

    def check(self, form: str) -> Settings:
        """Return the settings with a form. Raises EvoalignError if a run would refuse it: on any split, any option."""
        config = with_texts(self.config, [form])
        settings = Settings.of(config)
        prompts.check(config, self.parts.tokens, self.parts.task, settings.split(self.parts.data, 0))
        return settings

    def evaluate(self, batch: list[Any], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Return the completions and rewards of rows; -inf for a form that a run would refuse."""
        parts, form = self.parts, candidate["form"]
        try:
            rows = self.settings(form).under(batch, 0)
        except EvoalignError as error:
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

    def make_reflective_dataset(self, candidate: Any, eval_batch: Any, components_to_update: list[str]) -> Any:
        """Return what the reflecting model reads."""
        return dict.fromkeys(components_to_update, eval_batch.trajectories)


def propose(forms: Forms, reflect: Callable[[str], str], calls: int, rows: int) -> tuple[list[str], list[Exception]]:
    """Return the forms of the Pareto front, the best first, and the reflecting model's exceptions: GEPA logs them."""
    train, failures = list(forms.parts.data.train), list[Exception]()

    def ask(prompt: Any) -> str:
        try:
            return reflect(prompt).strip()
        except Exception as error:
            failures.append(error)
            raise

    found: Any = gepa.optimize(
        seed_candidate={"form": PROMPT}, trainset=train, valset=train[:rows], adapter=forms,
        reflection_lm=ask, reflection_prompt_template=REFLECT, perfect_score=forms.parts.max_score,
        max_metric_calls=calls, seed=forms.parts.config.seed,
    )  # fmt: skip
    scores = found.val_aggregate_scores
    front = find_dominator_programs(found.per_val_instance_best_candidates, scores)
    return [found.candidates[k]["form"] for k in sorted(front, key=lambda k: (-scores[k], k))], failures


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
    name, output = arguments.reflect, arguments.output
    if output.exists() or not output.parent.is_dir():
        parser.error(f"--output {output}: " + ("exists; name another" if output.exists() else "make its folder first"))
    try:
        reflect = load_object(name, "--reflect") if ".py:" in name else LM(name)
        config = with_form(as_config(arguments.config))
        if "form" in config.task.settings:
            parser.error("the config has task.settings.form already; remove it")
        first = config.fixed({})
        parts = assemble(first.model_copy(update={"task": first.task.model_copy(update={"settings": {}})}))
        with closing(parts):
            found, failures = propose(Forms(parts, config), reflect, arguments.calls, arguments.rows)
    except EvoalignError as error:
        parser.error(str(error))
    texts = [PROMPT, *[form for form in dict.fromkeys(found) if form != PROMPT][: arguments.texts]]
    failed = [f"--reflect failed {len(failures)} times, the last: {e!r}" for e in failures[-1:]]
    if len(texts) == 1:
        raise SystemExit("\n".join(["no text scored better than the prompt alone; raise --calls", *failed]))
    output.write_text(to_yaml(with_texts(config, texts), changed=True), encoding="utf-8")
    print(f"{len(texts)} texts in {output}: evoalign train {output}", *failed, sep="\n")


if __name__ == "__main__":
    main()
