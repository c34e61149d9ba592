"""Writing the trained text-to-image model as a LlamaGen folder: weights, text encoder, settings, model card."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from visacc.metrics.intervals import wilson
from visacc.models.llamagen.checkpoint import save_model
from visacc.models.llamagen.vq import VQModel
from visacc.models.shapes.evaluate import Settings
from visacc.models.shapes.text import build_tokenizer
from visacc.models.shapes.train_gpt import PHASES, TextToImage
from visacc.writing import whole_files, write_json

NAME = "shapes-t2i"
#: Sampling defaults, chosen by measured scores while keeping the token law broad (no top-k).
DEFAULTS: Settings = {"guidance_scale": 3.0, "temperature": 0.9, "top_k": 0, "top_p": 1.0}
COMMAND = "python scripts/train_shapes_t2i.py --out runs/shapes-t2i"


def export(model: TextToImage, vq: VQModel, folder: Path) -> None:
    """Writes what `visacc.load(folder)` reads, weights in float16."""
    save_model(folder / "gpt.safetensors", model.gpt, torch.float16)
    save_model(folder / "vq.safetensors", vq, torch.float16)
    with whole_files(folder / "text") as text:
        copy.deepcopy(model.text).half().save_pretrained(text)
        build_tokenizer().save_pretrained(text)
    settings = {"name": NAME, "defaults": DEFAULTS, "clean_caption": True}
    write_json(folder / "model.json", settings, indent=2)


def _score_table(summaries: dict[str, dict[str, Any]]) -> str:
    names = list(summaries)
    lines = ["| task | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    tags = list(dict.fromkeys(tag for s in summaries.values() for tag in s["tasks"]))
    for tag in tags:
        cells = []
        for name in names:
            entry = summaries[name]["tasks"].get(tag)
            if entry is None:
                cells.append("–")
            else:
                low, high = wilson(round(entry["score"] * entry["n"]), entry["n"])
                cells.append(
                    f"{100 * entry['score']:.1f} % ({100 * low:.0f}–{100 * high:.0f}), n={entry['n']}"
                )
        lines.append(f"| {tag} | " + " | ".join(cells) + " |")
    overall = " | ".join(f"**{100 * s['overall']:.1f} %**" for s in summaries.values())
    return "\n".join([*lines, f"| mean of tasks | {overall} |"])


def model_card(figures: dict[str, Any]) -> str:
    """The model card of a run; `figures` as collected by the training script."""
    gpt, vq, text = figures["gpt"], figures["vq"], figures["text"]
    entropies = ", ".join(f"{name}: {s['entropy']:.2f}" for name, s in figures["scores"].items())
    return f"""# {NAME}

Text to image in the embedded world of coloured shapes (`visacc.models.shapes.world`): LlamaGen architecture
(arXiv 2406.06525), trained from scratch on procedurally drawn scenes. No photographs, no people, no external
data; for tests, demonstrations and measurements of decoders, not for making pictures of anything else.

## Parts
- `vq.safetensors`: VQ tokenizer, {vq["parameters"]:,} parameters, 64x64 pixels to 16x16 codes, codebook
  {vq["codebook"]} x 8.
- `gpt.safetensors`: GPT, {gpt["parameters"]:,} parameters, width {gpt["dim"]}, {gpt["layers"]} layers,
  {gpt["heads"]} heads, 2-D rotary positions, {gpt["prefix"]} caption slots.
- `text/`: T5 encoder, {text["parameters"]:,} parameters, {text["words"]} word vocabulary; anything else becomes
  `<unk>`.

Weights are stored in float16 and trained in bfloat16 with float32 master weights.

## Data
Captions of GenEval's six tasks over six shapes (circle, square, triangle, star, cross, diamond) and GenEval's ten
colours, several phrasings, one seed per scene. {vq["images"]:,} scenes for the tokenizer,
{gpt["images"]:,} for the GPT. Held-out combinations never occur in a training caption
(`visacc.models.shapes.captions`: eight colour/shape pairs, three counts, an opening per shape, hashed pairs
and relations).

## Training
- Tokenizer: {vq["steps"]:,} steps of {vq["batch"]} pictures, no adversary; reconstruction
  {vq["psnr"]:.1f} dB, {vq["codes_used"]} of {vq["codebook"]} codes used; the detector reads {100 * vq["judge"]:.1f} %
  of {vq["judged"]} reconstructed scenes right.
- GPT and text encoder jointly: {gpt["steps"]:,} steps of {gpt["batch"]} scenes in {len(PHASES)} phases
  (`train_gpt.PHASES`), Muon and AdamW, caption dropout 0.1, exponential average of the weights. Between phases the
  text encoder is tuned on text alone to say plainly what a caption means and what belongs to what (`train_text`);
  later phases add a contrastive term on captions with exchanged nouns (after arXiv 2410.09347) and draw captions with
  colours and places more often. Cross entropy of unseen scenes: {gpt["loss"]:.3f} nats per token (last training
  average, of the last phase's mixture: {gpt["train_loss"]:.3f}).
- These weights come from one run that was halted and resumed while its later phases were being designed; the
  command below runs the same phases in one piece, and will not give the same bits.

## Measured
Plain autoregressive decoding at the defaults (guidance {DEFAULTS["guidance_scale"]}, temperature {DEFAULTS["temperature"]},
no top-k, no top-p), judged by the exact detector, 95 % Wilson intervals in brackets.

{_score_table(figures["scores"])}

"held-out" are prompts with a combination that no training caption contains; "all" are GenEval-phrased prompts over
all combinations. Entropy in nats of the laws tokens were drawn from, after guidance: {entropies};
of the unguided law on unseen scenes: {gpt["loss_entropy"]:.2f}.

## Reproduce
```
{COMMAND}
```
"""
