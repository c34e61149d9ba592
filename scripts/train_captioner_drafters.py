"""Train the embedded captioner's drafters: ``python scripts/train_captioner_drafters.py CAPTIONER WORKDIR``.

CAPTIONER is the folder made by ``train_captioner.py``, WORKDIR the folder that holds its rendered pictures.
Each drafter takes about a minute on a free CPU core and is written to ``CAPTIONER/drafters/METHOD``.
Interrupted runs resume.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from visacc.models.vlm.train_data import render_chunks
from visacc.models.vlm.train_drafters import SPECS, train_all
from visacc.speculate.train import DrafterTraining


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("captioner", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(SPECS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    images = render_chunks(args.folder / "data", args.samples, processes=args.threads).images
    options = DrafterTraining(
        steps=args.steps,
        lr=3e-3,
        weight_decay=0.01,
        warmup=20,
        clip=1.0,
        average=0.98,
        check_every=200,
        autocast=False,
    )
    train_all(args.captioner, images, args.folder / "drafters", tuple(args.methods), options)


if __name__ == "__main__":
    main()
