# SPDX-License-Identifier: Apache-2.0
"""Train evoalign's tiny base model from nothing: corpus, tokenizer and weights.

    python recipes/tiny_base/train.py --out DIR

writes a Qwen2-architecture model folder (config, bf16 weights, tokenizer, chat
template) that transformers loads.  It runs on CUDA when there is a GPU and on the
CPU otherwise; every random draw comes from ``--seed``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from corpus import train_tokenizer


def main() -> None:
    """Read the arguments, train, save, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None, help="cuda when there is one, else cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="corpus processes")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--intermediate", type=int, default=288)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--untied", action="store_true", help="a head of its own, apart from the embeddings")
    parser.add_argument("--right", type=float, default=0.45, help="fraction of right Countdown answers")
    parser.add_argument("--rows", type=int, default=500_000, help="short Countdown rows in the corpus")
    parser.add_argument("--steps", type=int, default=3_500)
    parser.add_argument("--batch", type=int, default=1024, help="short rows a step; others a quarter")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--eval", type=int, default=1000, help="held-out problems to measure on")
    args = parser.parse_args()

    # Imported here, so that the corpus workers, which import this file, stay light.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from fit import evaluate, save, train

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_float32_matmul_precision("high")
    tokenizer = train_tokenizer(args.vocab, args.seed)
    model = train(args, tokenizer, device)
    save(model, tokenizer, args.out)
    model.float()  # measure the rounded weights, in full precision
    result = evaluate(model, tokenizer, args.seed, args.eval)
    print(json.dumps({k: round(v, 4) for k, v in result.items()}, indent=2))


if __name__ == "__main__":
    main()
