"""Joint training of the shapes text-to-image GPT (LlamaGen architecture) and its T5 text encoder.

Muon on the matrices of the transformer, AdamW on embeddings, norms, the output head and the text encoder;
bfloat16 passes; an exponential average of all weights is what gets evaluated and shipped.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.llamagen.gpt import GPT, GPTConfig
from visacc.models.llamagen.text import TextConditioner
from visacc.models.llamagen.vq import VQModel
from visacc.models.shapes.captions import Sample, altered, parse
from visacc.models.shapes.data import beside_objects, load_dataset, object_codes, to_input
from visacc.models.shapes.text import (
    D_MODEL,
    MAX_WORDS,
    build_encoder,
    build_tokenizer,
    tokenize,
)
from visacc.models.shapes.train_text import teach_binding, tune_text_encoder
from visacc.models.shapes.train_util import Average, JsonLog, load_checkpoint, plateau, save_atomic
from visacc.models.shapes.world import render

GPT_CONFIG = GPTConfig(
    dim=256,
    n_layer=6,
    n_head=4,
    vocab_size=512,
    block_size=256,
    multiple_of=32,
    model_type="t2i",
    caption_dim=D_MODEL,
    cls_token_num=MAX_WORDS,
    uncond_rows=120,
    class_dropout_prob=0.1,
    token_dropout_p=0.0,
    resid_dropout_p=0.0,
    ffn_dropout_p=0.0,
)


@dataclass(frozen=True)
class Phase:
    """A stretch of training: warm-up, constant rates for `hold` steps, then linear to zero within `fade` steps.

    object_weight: weight of the loss of tokens beside an object (see `data.beside_objects`).
    text: what the text encoder is taught first, "meaning" or "binding" (see `train_text`); "" nothing.
    contrast: weight of a term that wants pictures less likely under a caption that says one thing differently
        (`captions.altered`), after Condition Contrastive Alignment (arXiv 2410.09347): who is left, who is red.
        Only of the tasks in BOUND; the loss of tokens teaches the others well enough.
    bound: share of micro-batches drawn from the tasks in BOUND alone.
    scenes: range of the data set that is used; a long phase on one range begins to learn its pictures by heart.
    """

    steps: int
    muon_lr: float
    adam_lr: float
    hold: int
    fade: int
    object_weight: float = 1.0
    text: str = ""
    contrast: float = 0.0
    bound: float = 0.0
    scenes: tuple[int, int] = (0, 40_000)


#: Tasks whose captions say what belongs to what.
BOUND = ("position", "color_attr")

_LATE = Phase(steps=300, muon_lr=0.005, adam_lr=8e-4, hold=500, fade=800, object_weight=3.0, contrast=0.06)
#: A pass at a high rate, then one that leans on the tokens that decide what is drawn, then a text encoder
#: that knows what captions mean, then captions that say something else, then a text encoder that shows plainly
#: what belongs to what, then many captions where that matters, then scenes never seen before, and at last few
#: of the captions that bind, so that counting is not forgotten.
PHASES = (
    Phase(steps=1800, muon_lr=0.01, adam_lr=1.5e-3, hold=1080, fade=720),
    Phase(steps=500, muon_lr=0.004, adam_lr=6e-4, hold=0, fade=1050, object_weight=3.0),
    Phase(steps=500, muon_lr=0.005, adam_lr=8e-4, hold=150, fade=450, object_weight=5.0, text="meaning"),
    _LATE,
    replace(_LATE, text="binding"),
    replace(_LATE, steps=1200, hold=450, fade=750, bound=0.6),
    replace(
        _LATE, steps=600, muon_lr=0.004, adam_lr=6e-4, hold=200, fade=400, bound=0.2, scenes=(40_000, 80_000)
    ),
    replace(_LATE, steps=900, hold=350, fade=550, bound=0.3, scenes=(80_000, 140_000)),
    replace(_LATE, steps=600, hold=200, fade=400, bound=0.4, scenes=(140_000, 190_000)),
    replace(
        _LATE, steps=250, muon_lr=0.003, adam_lr=5e-4, hold=50, fade=200, bound=0.05, scenes=(80_000, 190_000)
    ),
)


@dataclass(frozen=True)
class GPTTraining:
    """Settings of one run."""

    phases: tuple[Phase, ...] = PHASES
    batch: int = 64
    micro: int = 16
    workers: int = 2
    weight_decay: float = 0.01
    ema: float = 0.995
    save_every: int = 100
    seed: int = 0

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[Phase, int]:
        """The phase of a global step and the step within it."""
        for phase in self.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        raise ValueError(f"step {step} lies behind the last phase")


class TextToImage(nn.Module):
    """GPT and text encoder as one trainable module."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPT_CONFIG)
        self.text: Any = build_encoder()

    def forward(self, codes: Tensor, words: Tensor, drop: Tensor) -> Tensor:
        """Cross entropy [B, 256] of codes [B, 256] given word ids [B, n] of one length; drop bool [B].

        The same law as GPT.forward with left-padded features and their mask: a padded slot is seen by nobody
        and prefix slots carry no position, so they can be left out altogether. That, and attention written as
        matrix products (on a CPU three times faster than the fused bfloat16 kernel), is why it stands here.
        """
        gpt, width = self.gpt, words.shape[1]
        embedder: Any = gpt.cls_embedding
        features = self.text(input_ids=words).last_hidden_state
        null = gpt.null_condition(1)[:, MAX_WORDS - width :]
        features = torch.where(drop[:, None, None], null, features)
        x = torch.cat([embedder.cap_proj(features), gpt.tok_embeddings(codes[:, :-1])], dim=1)
        length = x.shape[1]
        turn = gpt.rope(x.device)[MAX_WORDS - width : MAX_WORDS - width + length, None]
        hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1)
        bias = torch.zeros(length, length, dtype=x.dtype).masked_fill_(hidden_from, -1e4)
        for block in gpt.blocks:
            q, k, v = (
                t.reshape(-1, length, GPT_CONFIG.head_dim)
                for t in block.attention.project(block.attention_norm(x), turn)
            )
            scores = torch.baddbmm(bias[None], q, k.transpose(1, 2), alpha=GPT_CONFIG.head_dim**-0.5)
            mixed = torch.bmm(scores.softmax(-1), v).view(len(x), -1, length, GPT_CONFIG.head_dim)
            x = x + block.attention.wo(mixed.transpose(1, 2).flatten(2))
            x = x + block.feed_forward(block.ffn_norm(x))
        logits = gpt.output(gpt.norm(x[:, width - 1 :]))
        return F.cross_entropy(logits.float().flatten(0, 1), codes.flatten(), reduction="none").view_as(codes)


def optimizers(model: TextToImage, settings: GPTTraining) -> list[torch.optim.Optimizer]:
    """Muon for the 2-D weights of the GPT's blocks, AdamW for everything else."""
    matrices = [p for p in model.gpt.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=settings.phases[0].muon_lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="original",
        ),
        torch.optim.AdamW(
            rest, lr=settings.phases[0].adam_lr, betas=(0.9, 0.98), weight_decay=settings.weight_decay
        ),
    ]


def batches(lengths: Tensor, micro: int, seed: int, start: int) -> Iterator[Tensor]:
    """Endless index batches [micro] whose captions have one length, shuffled anew each epoch; length 0 is left out.

    `start` batches are skipped, so that a resumed run continues the same sequence.
    """
    groups = [torch.nonzero(lengths == n).flatten() for n in lengths.unique() if n > 0]
    groups = [group for group in groups if len(group) >= micro]
    skipped, epoch = 0, 0
    while True:
        g = torch.Generator().manual_seed(seed * 1000 + epoch)
        parts: list[Tensor] = []
        for group in groups:
            shuffled = group[torch.randperm(len(group), generator=g)]
            parts += shuffled[: len(group) // micro * micro].split(micro)
        for i in torch.randperm(len(parts), generator=g).tolist():
            if skipped >= start:
                yield parts[i]
            skipped += 1
        epoch += 1


class Worker:
    """A bfloat16 copy of the model for the passes; the optimizers work on float32 weights.

    One single-threaded worker per core is faster than one model on all cores, and does not stall at every
    operation when something else runs on the machine.
    """

    def __init__(self, model: TextToImage) -> None:
        self.model = copy.deepcopy(model).to(torch.bfloat16)
        self.parameters: list[Tensor] = list(self.model.parameters())

    def run(self, values: list[Tensor], work: list[tuple[Tensor, ...]], phase: Phase) -> list[Tensor]:
        """Losses [3] of the micro-batches (codes, words, drop, near, altered words).

        Mean cross entropy of all tokens and of those in `near`, and how often the caption beats its altered
        form. The gradients of the phase's loss, summed, are then in `gradients`.
        """
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, values)
        self.model.zero_grad(set_to_none=True)
        losses = []
        for codes, words, drop, near, others in work:
            loss = self.model(codes, words, drop)
            weight = 1 + (phase.object_weight - 1) * near
            total = (loss * weight).sum() / weight.sum()
            pairs = (others != words).any(1) & ~drop
            won = torch.full((), float("nan"))
            if phase.contrast and pairs.any():
                other = self.model(codes[pairs], others[pairs], drop[pairs])
                margin = (other - loss[pairs]).sum(1)
                total = total + phase.contrast * F.softplus(-margin).sum() / len(codes)
                won = (margin.detach() > 0).float().mean()
            total.backward()
            losses.append(torch.stack([loss.detach().mean(), loss.detach()[near].mean(), won]))
        return losses

    def gradients(self) -> list[Tensor]:
        """One gradient per parameter."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]


def _is_text(name: str) -> bool:
    return name.startswith("text.") or ".cap_proj." in name


def teach_text(model: TextToImage, what: str) -> None:
    """Tunes the text side on text alone (see `train_text`)."""
    embedder: Any = model.gpt.cls_embedding
    if what == "meaning":
        tune_text_encoder(model.text)
    else:
        teach_binding(model.text, embedder.cap_proj)


def train_gpt(folder: Path, dataset: Path, settings: GPTTraining) -> TextToImage:
    """Trains, or resumes, in `folder`; returns the model with averaged weights."""
    torch.manual_seed(settings.seed)
    model = TextToImage()
    workers = [Worker(model) for _ in range(settings.workers)]
    pool = ThreadPoolExecutor(settings.workers, initializer=torch.set_num_threads, initargs=(1,))
    opts = optimizers(model, settings)
    average = Average(model, settings.ema)
    codes, captions = load_dataset(dataset)
    needed = max(phase.scenes[1] for phase in settings.phases)
    if len(captions) < needed:
        raise ValueError(f"{dataset} holds {len(captions):,} scenes, the phases use {needed:,}: encode more")
    words, mask = tokenize(build_tokenizer(), captions)
    lengths = mask.sum(1)
    rng = np.random.default_rng(settings.seed)
    is_bound = torch.tensor([parse(caption)[0] in BOUND for caption in captions])
    others = [altered(c, rng) if mark else c for c, mark in zip(captions, is_bound.tolist(), strict=True)]
    other_words = tokenize(build_tokenizer(), others)[0]
    beside = beside_objects(codes, object_codes(dataset, codes, GPT_CONFIG.vocab_size))
    start = 0
    checkpoint = load_checkpoint(folder / "gpt.pt")
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        for worker in workers:
            worker.model.load_state_dict(checkpoint["model"])
        for opt, state in zip(opts, checkpoint["optimizers"], strict=True):
            opt.load_state_dict(state)
        average.state, start = checkpoint["average"], checkpoint["step"]
    log = JsonLog(folder / "gpt.jsonl")
    parts = settings.batch // settings.micro
    slow_params: list[Tensor] = list(model.parameters())
    began, losses = time.time(), []
    for step in range(start, settings.steps):
        phase, within = settings.phase_at(step)
        if within == 0 or step == start:
            chosen = torch.zeros_like(lengths)
            chosen[slice(*phase.scenes)] = lengths[slice(*phase.scenes)]
            order = batches(chosen, settings.micro, settings.seed, step * parts)
            bound = batches(torch.where(is_bound, chosen, 0), settings.micro, settings.seed + 1, step * parts)
        if within == 0 and phase.text:
            teach_text(model, phase.text)
            for name, value in model.state_dict().items():
                if _is_text(name):
                    average.state[name] = value.clone()
            for name, parameter in model.named_parameters():
                if _is_text(name):
                    opts[1].state.pop(parameter, None)
        factor = plateau(within, phase.hold, phase.fade)
        for opt, rate in zip(opts, (phase.muon_lr, phase.adam_lr), strict=True):
            for group in opt.param_groups:
                group["lr"] = rate * factor
        g = torch.Generator().manual_seed(settings.seed * 10_000_019 + step)
        only = (torch.rand(parts, generator=torch.Generator().manual_seed(step)) < phase.bound).tolist()
        picks = [(next(order), next(bound))[choice] for choice in only]
        drops = [torch.rand(len(pick), generator=g) < GPT_CONFIG.class_dropout_prob for pick in picks]
        work = [
            (codes[p], words[p, :n], d, beside[p], other_words[p, :n])
            for p, d, n in zip(picks, drops, (int(lengths[p[0]]) for p in picks), strict=True)
        ]
        shares = [work[i :: len(workers)] for i in range(len(workers))]
        for partial in pool.map(Worker.run, workers, repeat(slow_params), shares, repeat(phase)):
            losses += partial
        for slow, *quick in zip(slow_params, *(worker.gradients() for worker in workers), strict=True):
            slow.grad = torch.stack([gradient.float() for gradient in quick]).sum(0) / parts
        norm = torch.nn.utils.clip_grad_norm_(slow_params, 1.0)
        for opt in opts:
            opt.step()
        average.update(model, step)
        if (step + 1) % 20 == 0:
            log.write(
                stage="gpt",
                step=step + 1,
                loss=torch.stack(losses)[:, 0].mean().item(),
                object_loss=torch.stack(losses)[:, 1].mean().item(),
                won=torch.stack(losses)[:, 2].nanmean().item(),
                grad=norm.item(),
                seconds_per_step=(time.time() - began) / len(losses) * parts,
            )
            began, losses = time.time(), []
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            save_atomic(
                {
                    "model": model.state_dict(),
                    "optimizers": [opt.state_dict() for opt in opts],
                    "average": average.state,
                    "step": step + 1,
                    "settings": asdict(settings),
                },
                folder / "gpt.pt",
            )
    model.load_state_dict(average.state)
    return model.eval()


@torch.no_grad()
def scene_losses(model: TextToImage, vq: VQModel, samples: Sequence[Sample]) -> tuple[float, float]:
    """Mean cross entropy and mean entropy of the unguided law (nats per token) on scenes, through GPT.forward."""
    conditioner = TextConditioner(model.text, build_tokenizer(), MAX_WORDS)
    losses, entropies = [], []
    for start in range(0, len(samples), 50):
        part = samples[start : start + 50]
        images = np.stack([np.round(render(item.scene) * 255).astype(np.uint8) for item in part])
        codes = vq.encode(to_input(images))
        features, valid = conditioner([item.caption for item in part])
        law = model.gpt(codes, features, valid).log_softmax(-1)
        losses.append(-law.gather(-1, codes[..., None]).mean(dim=(1, 2)))
        entropies.append(-(law.exp() * law).sum(-1).mean(1))
    return float(torch.cat(losses).mean()), float(torch.cat(entropies).mean())
