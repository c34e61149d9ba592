"""Trains the drafter of the embedded text-to-image model and puts it beside the model.

    python scripts/train_shapes_drafter.py --out runs/shapes-drafter

Resumable; the settings below are those of the shipped weights (see the card in its folder).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from visacc import __version__
from visacc.drafters.checkpoint import save_drafter
from visacc.loading import load_model
from visacc.models.shapes import ASSETS
from visacc.sampling import SamplingParams
from visacc.train.cli import training_prompts
from visacc.train.drafter import DrafterTraining, accepted_length, train_drafter
from visacc.train.loss import LossSpec

SETTINGS = DrafterTraining(
    steps=1000,
    batch=8,
    lr=1.5e-3,
    loss=LossSpec(feature=0.2, law=0.3, guided=1.0, unroll=2, noise=0.0),
    pool=768,
    reuse=100_000,
    precision="bf16",
    train_embedding=True,
    tree="2x3",
    eval_every=250,
    eval_prompts=16,
    save_every=100,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--target", type=Path, default=ASSETS / "t2i", help="folder of the target")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps)
    parser.add_argument("--init", type=Path, help="drafter folder to start from")
    args = parser.parse_args()
    settings = DrafterTraining(**{**SETTINGS.__dict__, "steps": args.steps})
    model = load_model(args.target)
    texts, held_out = training_prompts(model, None, settings.eval_prompts)
    network = train_drafter(model, texts, held_out, args.out, settings, init=args.init)
    sampling = SamplingParams.merge(model.defaults, {})
    found = accepted_length(model, network, held_out, sampling, tree=settings.tree)
    folder = args.target / "drafter"
    save_drafter(network, folder, dtype=torch.float16)
    (folder / "README.md").write_text(card(settings, sampling, found))
    print(f"{folder}: {json.dumps(found)}")


def card(settings: DrafterTraining, sampling: SamplingParams, found: dict[str, float]) -> str:
    loss = settings.loss
    return f"""# Drafter of the embedded shapes-t2i model

EAGLE-type drafter (one layer, the target's width, own embedding) for the decoders `eagle`, `lantern` and `lantern++`.
It fits this target only and refuses others.

- Trained by `scripts/train_shapes_drafter.py` (visacc {__version__}) on {settings.pool} images that the target sampled
  itself from training captions of the shapes world, {settings.steps} steps of {settings.batch} images, {settings.precision}.
- Sampling of those images and of the measurement: {json.dumps(sampling.__dict__)}.
- Loss: {loss.feature} smooth L1 + {loss.law} cross entropy + {loss.guided} cross entropy of the guided law,
  {loss.unroll} unrolled passes.
- Measured on {settings.eval_prompts} held-out prompts, tree `{settings.tree}`, exact rule:
  {found["tau"]:.2f} committed tokens per step, {found["steps_per_image"]:.1f} steps per image of 256 tokens.
- Files: `model.safetensors` (float16), `config.json`. Apache-2.0.
"""


if __name__ == "__main__":
    main()
