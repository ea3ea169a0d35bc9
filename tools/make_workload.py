"""Writes a mixed workload for ``generate --prompts``: prompts and answers of uneven lengths.

    python tools/make_workload.py OUT.jsonl [--requests 24] [--seed 0]

Knows no model: lengths are counted in words, answers in tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SUBJECTS = [
    "the sea",
    "a small library",
    "two robots",
    "winter",
    "an old clock",
    "bread",
    "the moon",
    "trains",
]
DETAIL = "Mention the weather, the people, their work, what they eat, what they fear and what they hope for. "


def workload(requests: int, seed: int) -> list[dict[str, object]]:
    """Requests with 10 to about 200 prompt words and 8 to 96 new tokens: most short, a few long."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for number in range(requests):
        detail = DETAIL * rng.choice([0, 0, 1, 2, 10])
        prompt = f"{number}. Write a story about {rng.choice(SUBJECTS)}. {detail}".strip()
        rows.append({"prompt": prompt, "max_tokens": rng.choice([8, 12, 16, 24, 32, 96])})
    return rows


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.write_text("".join(json.dumps(row) + "\n" for row in workload(args.requests, args.seed)))


if __name__ == "__main__":
    main()
