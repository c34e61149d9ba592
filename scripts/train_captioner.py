"""Train the embedded captioner on the shapes world: ``python scripts/train_captioner.py WORKDIR``.

Renders 24,000 scenes, trains for 6000 steps of 48 pictures (about fifteen minutes on a free CPU core) and writes
``WORKDIR/captioner``; copy that folder to ``models/vlm/assets/captioner`` to ship it. Interrupted runs
resume.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from visacc.models.vlm.train_captioner import CaptionerTraining, exact_accuracy, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=CaptionerTraining.steps)
    parser.add_argument("--batch", type=int, default=CaptionerTraining.batch)
    parser.add_argument("--samples", type=int, default=CaptionerTraining.samples)
    parser.add_argument("--lr", type=float, default=CaptionerTraining.lr)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = CaptionerTraining(steps=args.steps, batch=args.batch, samples=args.samples, lr=args.lr)
    folder = train(args.folder, options, processes=args.threads)
    print(f"{folder}: exact captions on 500 held-out scenes {exact_accuracy(folder, 500):.3f}")


if __name__ == "__main__":
    main()
