"""Training of the embedded captioner. Besides the captions, every patch of the vision tower learns which
shape covers
it: from scratch, captions alone teach seeing very slowly."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visacc.models.shapes.train_util import Average, JsonLog, load_checkpoint, save_atomic, schedule
from visacc.models.shapes.world import COLOURS, SHAPES, TEXTURES
from visacc.models.vlm.captioner import build_model, build_processor, chat
from visacc.models.vlm.scenes import PROMPTS, caption, draw_scene, picture
from visacc.models.vlm.train_data import Rendered, render_chunks
from visacc.writing import whole_files, write_safetensors


@dataclass(frozen=True)
class CaptionerTraining:
    """Options of a run; the defaults made the shipped weights."""

    steps: int = 6000
    batch: int = 48
    samples: int = 24_000
    lr: float = 3e-3
    weight_decay: float = 0.05
    patch_weight: float = 1.0
    seed: int = 0
    check_every: int = 400


class PatchHeads(nn.Module):
    """Auxiliary classifiers on the tower's patch features; thrown away after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (1 + len(COLOURS), 1 + len(SHAPES), 2)
        self.patch = nn.Linear(width, sum(self.sizes))
        self.texture = nn.Linear(width, len(TEXTURES))

    def forward(self, features: Tensor, labels: Tensor, textures: Tensor) -> Tensor:
        """features [B, 16, D], labels int64 [B, 3, 4, 4], textures int64 [B] -> loss."""
        parts = self.patch(features).float().split(self.sizes, dim=-1)
        known = labels.flatten(2)
        loss = sum(F.cross_entropy(p.flatten(0, 1), known[:, i].flatten()) for i, p in enumerate(parts))
        return loss + F.cross_entropy(self.texture(features.mean(1)).float(), textures)


class Texts:
    """Token ids of prompts (image expanded) and answers."""

    def __init__(self, processor: Any, patches: int) -> None:
        self.tokenizer, self.patches = processor.tokenizer, patches
        self.image = int(self.tokenizer.convert_tokens_to_ids("<image>"))
        self.prompts = [self._prompt(p) for p in PROMPTS]

    def _prompt(self, prompt: str) -> list[int]:
        ids: list[int] = []
        for token in self.tokenizer(chat(prompt))["input_ids"]:
            ids += [token] * (self.patches if token == self.image else 1)
        return ids

    def batch(self, prompt: int, answers: list[str]) -> tuple[Tensor, Tensor]:
        """Ids int64 [B, N], padded on the right, and targets [B, N] (-100 where nothing is asked)."""
        head = self.prompts[prompt]
        rows = [self.tokenizer(a, add_special_tokens=False)["input_ids"] + [2] for a in answers]
        width = len(head) + max(map(len, rows))
        ids, targets = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
        for i, row in enumerate(rows):
            full = torch.tensor(head + row)
            ids[i, : len(full)] = full
            targets[i, len(head) - 1 : len(full) - 1] = torch.tensor(row)
        return ids, targets


def train(folder: Path, options: CaptionerTraining, processes: int = 2) -> Path:
    """Run or resume a training in ``folder``; writes ``captioner/`` there and returns its path."""
    torch.manual_seed(options.seed)
    data = render_chunks(folder / "data", options.samples, processes=processes)
    model, processor = build_model(), build_processor()
    vision: Any = model.config.vision_config
    heads = PatchHeads(vision.hidden_size)
    texts = Texts(processor, model.config.image_seq_length)
    both = nn.ModuleDict({"model": model, "heads": heads})
    optimizer = torch.optim.AdamW(_groups(both, options.weight_decay), lr=options.lr, betas=(0.9, 0.98))
    average, log = Average(model, 0.99), JsonLog(folder / "captioner.jsonl")
    start, saved = 0, load_checkpoint(folder / "captioner.pt")
    if saved is not None:
        both.load_state_dict(saved["both"])
        optimizer.load_state_dict(saved["optimizer"])
        average.state, start = saved["average"], int(saved["step"])
    patches: list[Tensor] = []
    model.model.multi_modal_projector.register_forward_pre_hook(lambda _m, args: patches.append(args[0]))
    begun, total = time.time(), 0.0
    for step in range(start, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule(step, options.steps, warmup=60)
        loss, seen = _losses(both, texts, data, patches, options, step)
        optimizer.zero_grad(set_to_none=True)
        (loss + options.patch_weight * seen).backward()
        nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        average.update(model, step)
        total += float(loss.detach())
        if (step + 1) % 50 == 0:
            rate = (step + 1 - start) / (time.time() - begun)
            log.write(step=step + 1, loss=total / 50, patch=float(seen.detach()), steps_per_second=rate)
            total = 0.0
        if (step + 1) % options.check_every == 0 or step + 1 == options.steps:
            state = {"both": both.state_dict(), "optimizer": optimizer.state_dict()}
            save_atomic({**state, "average": average.state, "step": step + 1}, folder / "captioner.pt")
            export(model, average.state, processor, folder / "captioner")
            log.write(step=step + 1, exact=exact_accuracy(folder / "captioner", 48))
    return folder / "captioner"


def _losses(
    both: nn.ModuleDict,
    texts: Texts,
    data: Rendered,
    patches: list[Tensor],
    options: CaptionerTraining,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Caption loss and patch loss of one batch; the batch is a function of the step, so runs can be
    resumed.
    """
    rng = np.random.default_rng([options.seed, step])
    prompt, mirror = int(rng.random() < 0.2), bool(rng.random() < 0.5)
    index = rng.integers(len(data.images), size=options.batch)
    shift = (int(rng.integers(-2, 3)), int(rng.integers(-2, 3)))
    pixels, labels, textures, answers = data.batch(index, mirror, prompt, shift)
    ids, targets = texts.batch(prompt, answers)
    model: Any = both["model"]
    patches.clear()
    # float32: at this width casting costs more than bfloat16 saves
    logits = model(input_ids=ids, pixel_values=pixels, use_cache=False).logits
    seen = both["heads"](patches[0], labels, textures)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100), seen


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    plain = [p for p in module.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def export(model: Any, state: dict[str, Tensor], processor: Any, folder: Path) -> None:
    """Write a folder that ``from_pretrained`` reads; weights in float16."""
    with whole_files(folder) as settings:
        model.config.save_pretrained(settings)
        model.generation_config.save_pretrained(settings)
        processor.save_pretrained(settings)
    halves = {k: v.half() for k, v in state.items() if v.is_floating_point()}
    write_safetensors(folder / "model.safetensors", halves)


def exact_accuracy(folder: Path, count: int, *, batch: int = 48, held_out: bool = True) -> float:
    """Share of held-out pictures (unseen combinations of shapes) whose full caption is right word for
    word.
    """
    from visacc.models.vlm.captioner import load_captioner

    model, processor = load_captioner(folder)
    right = 0
    for first in range(0, count, batch):
        scenes = [draw_scene(seed, held_out) for seed in range(first, min(first + batch, count))]
        texts = [chat(PROMPTS[0])] * len(scenes)
        inputs = processor(images=[picture(s) for s in scenes], text=texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        answers = processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(a.strip() == caption(s) for a, s in zip(answers, scenes, strict=True))
    return right / count
