# SPDX-License-Identifier: Apache-2.0
"""A few rows in the published forms of GSM8K, MATH and MATH-500; written for these tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GSM8K: list[dict[str, Any]] = [
    {"question": "Mia has 3 bags of 24 nuts. How many nuts has she?", "answer": "3*24 = <<3*24=72>>72 nuts.\n#### 72"},
    {"question": "A bike costs $1,500, now 20 % off. And now?", "answer": "1500*.8 = <<1500*.8=1200>>1200\n#### 1,200"},
    {"question": "It is 4 degrees and gets 9 colder. How cold?", "answer": "4-9 = <<4-9=-5>>-5\n#### -5"},
    {"question": "Half of 7 litres?", "answer": "7/2 = <<7/2=3.5>>3.5\n#### 3.5"},
    {"question": "Add {} and 8, where {} is 1.", "answer": "#### 9"},
    {"question": "How many legs have 5 dogs?", "answer": "5*4 = <<5*4=20>>20\n#### 20"},
]
MATH: list[dict[str, Any]] = [
    {"problem": "Simplify $\\frac{6}{8}$.", "level": "Level 1", "type": "Algebra",
     "solution": "We see $\\boxed{x}$ nowhere: $\\frac{6}{8}=\\boxed{\\frac{3}{4}}.$"},
    {"problem": "Factor $x^2+2x+1$.", "level": "Level 2", "type": "Algebra", "solution": "It is $\\fbox{(x+1)^2}$."},
    {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": "So $1+1=\\boxed 2$."},
    {"problem": "Convert $(0,3)$ to polar coordinates.", "level": "Level 2", "type": "Precalculus",
     "solution": "Thus \\[\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.\\]"},
    {"problem": "Who runs fastest?", "solution": "It is $\\boxed{\\text{Evelyn}}$.", "answer": "\\text{Evelyn}",
     "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json"},
]  # fmt: skip


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
