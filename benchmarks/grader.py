# SPDX-License-Identifier: Apache-2.0
"""How long the Countdown grader takes for whatever a model may write.

Prints the median and the longest time over 10,000 fuzzed completions, and the verdict and time of every bomb: texts
that hang, crash or cheat graders which filter characters and evaluate the rest.

    python benchmarks/grader.py [--count 10000] [--seed 0]
    python benchmarks/grader.py --isolated    # cost of a worker process for a custom reward
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator

from baseline import check
from evoalign.config import GraderConfig, TaskConfig
from evoalign.tasks import Task, create, isolate

ROW = {"numbers": [95, 87, 75], "target": "83", "context": "Make 83 from [95 87 75].\n<think>"}
GOLD = "</think>\n<answer>95 - (87 - 75)</answer>"

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "</think>\n<answer>", "<answer", "</answer", "<|im_end|>")
WORDS = (
    *("95", "87", "75", "0", "00", "095", "1_0", "9" * 30, "9" * 600, "3.5", "1e9", "٣", "２", "²", "x"),
    *("+", "-", "*", "/", "**", "//", "%", "(", ")", "()", ")(", "((((", "))))", " ", "\n", "\t", "\x00", ",", "="),
    *("lambda:0", "__import__('os')", "9**9**9", "[0]*9**9", "\u202e", "\ud800", "🧮", "−", "×", "÷"),
)


def answer(text: str) -> str:
    """A completion of full format around an answer."""
    return f"</think>\n<answer>{text}</answer>"


BOMBS = {
    "power tower 9**9**9": answer("9**9**9"),
    "power of the given numbers": answer("95**87**75"),
    "power with a space": answer("95* *87* *75"),
    "power that hits the target": answer("(95-87)**2+75-56"),
    "floor division": answer("95//87*75+8"),
    "10 MB of digits": answer("9" * 10_000_000),
    "10 MB of sums": answer("1+" * 5_000_000 + "1"),
    "10 MB of letters": "a" * 10_000_000,
    "10,000 parentheses": answer("(" * 10_000 + "1" + ")" * 10_000),
    "200 open parentheses": answer("(" * 200),
    "50 parentheses and an error": answer("(" * 50 + "1+" + ")" * 50),
    "500 signs": answer("-" * 499 + "1"),
    "a sign before each number": answer("-87+75--95"),
    "sum of large fractions": answer("+".join(f"1/{97**8 - 2 * i}" for i in range(23))),
    "product of large integers": answer("*".join(["9" * 100] * 4)),
    "integer of 499 digits": answer("9" * 499),
    "Unicode digits": answer("９５ - (８７ - ７５)"),
    "Arabic digits": answer("٩٥ - (٨٧ - ٧٥)"),
    "Unicode minus": answer("95 − (87 − 75)"),
    "leading zeros": answer("095 - (087 - 075)"),
    "underscore": answer("9_5 - (8_7 - 7_5)"),
    "float": answer("95.0 - (87 - 75)"),
    "exponent": answer("1e308*1e308"),
    "import": answer("__import__('os').system('id')"),
    "attribute walk": answer("().__class__.__bases__[0].__subclasses__()"),
    "call of an integer": answer("(95)(87-75)"),
    "lambda": answer("(lambda: 83)()"),
    "comprehension": answer("[9**9 for _ in range(9**9)]"),
    "assignment": answer("(x:=83)"),
    "string": answer("'83'"),
    "tuple": answer("95,87,75"),
    "empty tuple": answer("()"),
    "comparison": answer("95-(87-75)==83"),
    "division by zero": answer("95/(87-87)"),
    "NUL": answer("95 - (87 - 75)\x00"),
    "lone surrogate": answer("95 - (87 - 75)\ud800"),
    "right-to-left": answer("\u202e95 - (87 - 75)"),
    "target alone": answer("83"),
    "numbers not used": answer("83+0*95*87*75"),
    "a number twice": answer("95 - (87 - 75) + 95 - 95"),
    "100,000 opening tags": "<answer>" * 100_000,
    "100,000 closing tags": "</answer>" * 100_000,
    "100,000 empty answers": "<answer></answer>" * 100_000,
    "100,000 empty thoughts": "<think></think>\n" * 50_000 + "<answer>",
    "almost tags": "<answer" * 140_000,
    "almost closing tags": "<answer>" + "</answe" * 140_000,
    "1 MB of newlines": "</think>" + "\n" * 999_000 + "<answer>1</answer>",
    "copy of the prompt": ROW["context"],
    "empty": "",
    "end of text": "<|im_end|><|endoftext|>",
}
"""Every one of these has to earn nothing for its answer."""


def completions(count: int, seed: int) -> Iterator[str]:
    """Adversarial completions: mutations of a right answer, of arithmetic, and soups of tags."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.randrange(4)
        if kind == 0:
            yield _mutated(draw, GOLD)
        elif kind == 1:
            yield answer(" ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 200))))
        elif kind == 2:
            yield "".join(draw.choice(TAGS + WORDS) for _ in range(draw.randrange(1, 400)))
        else:
            yield draw.choice(TAGS + WORDS) * int(10 ** draw.uniform(0, 5)) + draw.choice(("", GOLD))


def _mutated(draw: random.Random, text: str) -> str:
    for _ in range(draw.randrange(1, 6)):
        at, length = draw.randrange(len(text) + 1), draw.randrange(4)
        text = text[:at] + draw.choice(("", draw.choice(WORDS), draw.choice(TAGS))) + text[at + length :]
    return text


def timed(task: Task, text: str) -> tuple[float, float]:
    """The reward as training computes it, and the milliseconds that took."""
    started = time.perf_counter()
    reward = task.rewards([text], [ROW])[0]
    return reward, (time.perf_counter() - started) * 1e3


def length(completions: list[str]) -> list[float]:
    """About the cheapest reward there is."""
    return [float(len(completion)) for completion in completions]


def isolation(calls: int = 200) -> None:
    """Print the median and the longest time of one call, in place and in a worker, for batches of two sizes."""
    row = {"prompt": "Say it:", "answer": "4"}
    task = create(TaskConfig(name="custom"), [length])
    apart = isolate(task, GraderConfig())
    for characters in (400, 170_000):
        texts = [chr(97 + i % 26) * characters for i in range(60)]
        for name, scorer in (("in place", task), ("in a worker", apart)):
            scorer.rewards(texts, [row] * 60)
            times: list[float] = []
            for _ in range(calls):
                started = time.perf_counter()
                scorer.rewards(texts, [row] * 60)
                times.append((time.perf_counter() - started) * 1e3)
            print(
                f"60 completions of {characters:,} characters, {name:>11}: "
                f"median {statistics.median(times):.3f} ms, longest {max(times):.2f} ms"
            )
    apart.close()


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--isolated", action="store_true")
    options = arguments.parse_args()
    if options.isolated:
        isolation()
        return
    task = create(TaskConfig(name="countdown"))
    times = [timed(task, text)[1] for text in completions(options.count, options.seed)]
    print(
        f"{options.count} fuzzed completions: median {statistics.median(times):.3f} ms, longest {max(times):.2f} ms\n"
    )
    print(f"{'reward':>7} {'accuracy':>9} {'ms':>8}  bomb")
    right, slowest = 0.0, 0.0
    for name, text in BOMBS.items():
        reward, milliseconds = timed(task, text)
        accuracy = task.measures(task.clean(text), ROW)["accuracy"]
        print(f"{reward:7.2f} {accuracy:9.0f} {milliseconds:8.2f}  {name}")
        right, slowest = right + accuracy, max(slowest, milliseconds)
    check(
        {
            "grader, longest ms of a fuzzed completion": max(times),
            "grader, longest ms of a bomb": slowest,
            "grader, bombs that earn a right answer": right,
        }
    )


if __name__ == "__main__":
    main()
