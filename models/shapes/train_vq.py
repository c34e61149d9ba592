"""Training of the shapes tokenizer: a small LlamaGen VQ, 64x64 pixels -> 16x16 codes.

Reconstruction by L1 plus differences of neighbouring pixels (keeps edges and texture); no adversary. The first
steps run without quantisation, k-means on the features then initialises the codebook, and codes that fall out
of use are restarted from current features.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.models.llamagen.vq import VQConfig, VQModel
from visacc.models.shapes.data import render_images, to_input
from visacc.models.shapes.train_util import Average, JsonLog, load_checkpoint, save_atomic, schedule

VQ_CONFIG = VQConfig(
    ch=32, ch_mult=(1, 1, 2), num_res_blocks=1, z_channels=64, codebook_size=512, codebook_dim=8
)
FIRST_SEED = 10_000_000


@dataclass
class VQTraining:
    """Settings of one run."""

    steps: int = 2800
    batch: int = 16
    images: int = 20_000
    lr: float = 1.5e-3
    unquantised_steps: int = 200
    restart_every: int = 50
    ema: float = 0.995
    seed: int = 0


def reconstruction_loss(recon: Tensor, target: Tensor) -> Tensor:
    """L1 + squared error + L1 of horizontal and vertical differences. Pictures [B, 3, H, W]."""
    diff = recon - target
    edges = diff.diff(dim=2).abs().mean() + diff.diff(dim=3).abs().mean()
    return diff.abs().mean() + diff.square().mean() + 0.5 * edges


@torch.no_grad()
def kmeans(points: Tensor, k: int, generator: torch.Generator, rounds: int = 15) -> Tensor:
    """Spherical k-means: unit vectors [N, C] -> unit centres [k, C]."""
    centres = points[torch.randperm(len(points), generator=generator)[:k]].clone()
    for _ in range(rounds):
        nearest = (points @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        empty = torch.bincount(nearest, minlength=k) == 0
        fresh = torch.randint(len(points), (int(empty.sum()),), generator=generator)
        sums[empty] = points[fresh]
        centres = F.normalize(sums, dim=1)
    return centres


def _features(model: VQModel, images: Tensor) -> Tensor:
    """Unit feature vectors before quantisation [B, C, h, w]."""
    return F.normalize(model.quant_conv(model.encoder(images)), dim=1)


@torch.no_grad()
def _restart_dead_codes(
    model: VQModel,
    usage: Tensor,
    images: Tensor,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    dead = usage == 0
    number = int(dead.sum())
    if number:
        points = _features(model, images).movedim(1, -1).flatten(0, -2)
        pick = torch.randint(len(points), (number,), generator=generator)
        weight = model.quantize.embedding.weight
        weight[dead] = points[pick]
        for value in optimizer.state.get(weight, {}).values():
            if torch.is_tensor(value) and value.shape == weight.shape:
                value[dead] = 0
    return number


def train_vq(folder: Path, settings: VQTraining) -> VQModel:
    """Trains, or resumes, in `folder`; returns the model with averaged weights."""
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    model = VQModel(VQ_CONFIG).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0)
    average = Average(model, settings.ema)
    usage = torch.zeros(VQ_CONFIG.codebook_size)
    start = 0
    checkpoint = load_checkpoint(folder / "vq.pt")
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        average.state = checkpoint["average"]
        start, usage = checkpoint["step"], checkpoint["usage"]
        generator.set_state(checkpoint["generator"])
    if start < settings.steps:
        images, _ = render_images(FIRST_SEED, settings.images)
        log = JsonLog(folder / "vq.jsonl")
    for step in range(start, settings.steps):
        pick = torch.randint(len(images), (settings.batch,), generator=generator)
        target = to_input(images[pick.numpy()])
        if step == settings.unquantised_steps:
            with torch.no_grad():
                wide = torch.randint(len(images), (128,), generator=generator)
                points = _features(model, to_input(images[wide.numpy()])).movedim(1, -1).flatten(0, -2)
                model.quantize.embedding.weight.copy_(kmeans(points, VQ_CONFIG.codebook_size, generator))
            average = Average(model, settings.ema)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * schedule(step, settings.steps)
        if step < settings.unquantised_steps:
            recon = model.decode(_features(model, target))
            loss = reconstruction_loss(recon, target)
        else:
            out = model(target)
            recon = out.recon
            usage += torch.bincount(out.codes.flatten(), minlength=VQ_CONFIG.codebook_size)
            loss = reconstruction_loss(recon, target) + out.codebook_loss + out.commit_loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model, max(step - settings.unquantised_steps, 0))
        if (step + 1) % settings.restart_every == 0:
            law = usage / usage.sum().clamp(min=1)
            restarted = 0
            if settings.unquantised_steps < step < 0.8 * settings.steps:
                restarted = _restart_dead_codes(model, usage, target, optimizer, generator)
            log.write(
                stage="vq",
                step=step + 1,
                loss=float(loss),
                mse=float((recon - target).square().mean()),
                grad=float(norm),
                codes_used=int((usage > 0).sum()),
                code_entropy=float(torch.special.entr(law).sum()),
                restarted=restarted,
            )
            usage.zero_()
        if (step + 1) % 250 == 0 or step + 1 == settings.steps:
            save_atomic(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "average": average.state,
                    "usage": usage,
                    "step": step + 1,
                    "generator": generator.get_state(),
                    "settings": asdict(settings),
                },
                folder / "vq.pt",
            )
    model.load_state_dict(average.state)
    return model.eval()
