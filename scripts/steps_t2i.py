"""Steps of the Jacobi decoders on the embedded model, over prompts of all six tasks, with 95 % intervals of the mean.

python scripts/steps_t2i.py
"""

from __future__ import annotations

from typing import Any

import visacc
from visacc.models.shapes.captions import all_prompts

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("sjd", {"window": 16}),
    *(("mc-sjd", {"window": w}) for w in (8, 16, 32, 64, 128)),
    ("mc-sjd", {"window": 32, "coupling": "maximal"}),
]


def main() -> None:
    pipe = visacc.load("shapes-t2i")
    prompts = [p["prompt"] for p in all_prompts(6)]
    print(f"{len(prompts)} prompts, {pipe.model.layout.total} tokens each; ar takes one step a token")
    for decoder, options in ROWS:
        stats = pipe(prompts, seed=0, decoder=decoder, batch_size=36, output_type="codes", **options).stats
        steps = stats.steps.double()
        half = 1.96 * float(steps.std()) / len(steps) ** 0.5
        text = " ".join(f"{k}={v}" for k, v in options.items())
        print(
            f"{decoder:8} {text:28} {stats.nfe:6.1f} +- {half:.1f} steps, {stats.step_compression:.2f} tokens a step"
        )


if __name__ == "__main__":
    main()
