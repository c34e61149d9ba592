"""Trains the embedded text-to-image model from nothing: tokenizer, codes, GPT, scores, export. Resumable.

    python scripts/train_shapes_t2i.py --out runs/shapes-t2i

Stages run in order and each continues where an interrupted run stopped; `--stages` picks some of them. Losses go
to vq.jsonl and gpt.jsonl in the output folder, scores to scores.json, the finished model to <out>/t2i. About
three hours on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visacc.models.llamagen.text import TextConditioner
from visacc.models.llamagen.vq import VQModel
from visacc.models.shapes.captions import all_prompts, heldout_prompts, sample
from visacc.models.shapes.data import encode_dataset, to_input
from visacc.models.shapes.evaluate import evaluate, to_pictures
from visacc.models.shapes.export import DEFAULTS, export, model_card
from visacc.models.shapes.judge import judge
from visacc.models.shapes.text import MAX_WORDS, build_tokenizer
from visacc.models.shapes.train_gpt import GPT_CONFIG, GPTTraining, TextToImage, scene_losses, train_gpt
from visacc.models.shapes.train_vq import VQ_CONFIG, VQTraining, train_vq
from visacc.models.shapes.world import render

STAGES = ("vq", "encode", "gpt", "eval", "export")
TEST_SEED = 50_000_000


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@torch.inference_mode()
def tokenizer_figures(vq: VQModel, scenes: int) -> dict[str, Any]:
    """Reconstruction error, code usage and the judge's opinion on unseen scenes."""
    samples = [sample(TEST_SEED + i) for i in range(scenes)]
    images = np.stack([np.round(render(item.scene) * 255).astype(np.uint8) for item in samples])
    codes = torch.cat([vq.encode(to_input(part)) for part in np.array_split(images, max(scenes // 50, 1))])
    recon = np.concatenate([to_pictures(vq, part) for part in codes.split(50)])
    right = sum(judge(item.metadata, image).correct for item, image in zip(samples, recon, strict=True))
    mse = float(((recon.astype(np.float64) - images) ** 2).mean())
    used = int((torch.bincount(codes.flatten(), minlength=VQ_CONFIG.codebook_size) > 0).sum())
    return {
        "psnr": 10 * math.log10(255**2 / mse),
        "codes_used": used,
        "judge": right / scenes,
        "judged": scenes,
    }


def measure(model: TextToImage, vq: VQModel, args: argparse.Namespace) -> dict[str, Any]:
    """Every figure of the model card."""
    conditioner = TextConditioner(model.text, build_tokenizer(), MAX_WORDS)
    scores = {}
    for name, prompts in (("held-out", heldout_prompts()), ("all", all_prompts())):
        report = evaluate(model.gpt, vq, conditioner, prompts, DEFAULTS, per_task=args.per_task, seed=1)
        scores[name] = report.summary()
        print(json.dumps({name: scores[name]}))
    loss, entropy = scene_losses(model, vq, [sample(TEST_SEED + i) for i in range(args.test_scenes)])
    log = [json.loads(line) for line in (args.out / "gpt.jsonl").read_text().splitlines()]
    return {
        "scores": scores,
        "vq": {
            "parameters": parameters(vq),
            "codebook": VQ_CONFIG.codebook_size,
            "images": args.vq_images,
            "steps": args.vq_steps,
            "batch": VQTraining.batch,
            **tokenizer_figures(vq, args.test_scenes),
        },
        "gpt": {
            "parameters": parameters(model.gpt),
            "dim": GPT_CONFIG.dim,
            "layers": GPT_CONFIG.n_layer,
            "heads": GPT_CONFIG.n_head,
            "prefix": GPT_CONFIG.cls_token_num,
            "images": args.images,
            "steps": GPTTraining().steps,
            "batch": GPTTraining.batch,
            "loss": loss,
            "loss_entropy": entropy,
            "train_loss": float(np.mean([record["loss"] for record in log[-10:]])),
        },
        "text": {"parameters": parameters(model.text), "words": len(build_tokenizer())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/shapes-t2i"), help="working folder")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--vq-steps", type=int, default=VQTraining.steps)
    parser.add_argument("--vq-images", type=int, default=VQTraining.images)
    parser.add_argument("--images", type=int, default=190_000, help="scenes the GPT is trained on")
    parser.add_argument("--per-task", type=int, default=96, help="judged pictures per task and list")
    parser.add_argument(
        "--test-scenes", type=int, default=500, help="unseen scenes for losses and reconstruction"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def vq_model() -> VQModel:
        return train_vq(args.out, VQTraining(steps=args.vq_steps, images=args.vq_images))

    def gpt_model() -> TextToImage:
        return train_gpt(args.out, args.out / "dataset", GPTTraining())

    if "vq" in args.stages:
        vq_model()
    if "encode" in args.stages:
        encode_dataset(vq_model(), 0, args.images, args.out / "dataset")
    if "gpt" in args.stages:
        gpt_model()
    if "eval" in args.stages:
        figures = measure(gpt_model(), vq_model(), args)
        (args.out / "scores.json").write_text(json.dumps(figures, indent=2) + "\n")
    if "export" in args.stages:
        export(gpt_model(), vq_model(), args.out / "t2i")
        figures = json.loads((args.out / "scores.json").read_text())
        (args.out / "t2i" / "MODEL_CARD.md").write_text(model_card(figures))


if __name__ == "__main__":
    main()
