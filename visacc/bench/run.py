"""Running decoders side by side on one model: steps, time relative to plain decoding, and what the images are worth.

All decoders see the same prompts and seeds. They take turns batch by batch in rotating order, so that a busy machine
slows all of them alike; times are compared within the run only. A reference set of plain decoding with other seeds is
what every decoder's images, plain decoding's included, are compared with.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visacc.bench.quality import DistanceTest, Scores, distance_test, fixed_features, shapes_scores
from visacc.decoders.base import Decoder
from visacc.engine import decode
from visacc.models.base import ImageModel
from visacc.noise import sample_seed
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams
from visacc.stats import DecodeStats
from visacc.traces import spaced

REFERENCE_SEED = 7_000_003


@dataclass(frozen=True)
class Entry:
    """A decoder with its options. ``knob`` names the option that a sweep varies."""

    decoder: str
    options: dict[str, Any] = field(default_factory=dict)
    knob: str | None = None

    @property
    def label(self) -> str:
        shown = ", ".join(f"{k}={v}" for k, v in self.options.items() if k != "drafter")
        return f"{self.decoder} ({shown})" if shown else self.decoder


def parse_entry(text: str) -> Entry:
    """``name`` or ``name:option=value,option=value``."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"decoder options are written name:option=value,..., got {text!r}")
        try:
            options[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    return Entry(name.strip(), options)


def default_entries(width: int) -> list[Entry]:
    """The decoders of the trade-off plot on a grid of ``width`` columns."""
    half, quarter = max(1, width // 2), max(1, width // 4)
    entries = [
        Entry("ar"),
        Entry("sjd"),
        Entry("mc-sjd"),
        Entry("eagle"),
        Entry("eagle", {"rule": "traversal"}),
    ]
    entries += [Entry("gsd", {"group_size": g}, "group_size") for g in (6, 14, 50)]
    entries += [Entry("zipar", {"window": s}, "window") for s in (quarter, half, width - quarter)]
    entries += [Entry("lantern++", {"lam": lam, "k": 10}, "lam") for lam in (2.0, 5.0, 20.0)]
    return entries


@dataclass
class Row:
    """Results of one decoder.

    Attributes:
        ratio: seconds divided by plain decoding's, per batch (below 1 is faster).
        scores, distance: ``None`` where the model's pictures cannot be judged.
        note: why it is slower than plain decoding, where it is.
        grids: int64 [B, T, H, W] step that committed each token.
        pictures: uint8 [K, H, W, 3], the kept ones (``Bench.kept``).
    """

    entry: Entry
    lossless: bool
    stats: DecodeStats
    seconds: list[float]
    ratio: list[float]
    codes: Tensor
    features: Tensor
    scores: Scores | None = None
    distance: DistanceTest | None = None
    note: str = ""
    grids: Tensor | None = None
    pictures: np.ndarray | None = None


@dataclass
class Bench:
    """A whole comparison.

    Attributes:
        skipped: label of a decoder that could not run -> the reason.
        prompts, seeds: of every image.
        kept: which images' pictures are kept, spread evenly over the prompts.
    """

    model: str
    sampling: dict[str, Any]
    images: int
    batch: int
    rows: list[Row]
    skipped: dict[str, str]
    reference: Tensor
    prompts: list[Any] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    device: str = "cpu"

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.entry.label == label)


@torch.no_grad()
def bench_decoders(
    model: ImageModel,
    prompts: Sequence[Any],
    entries: Sequence[Entry],
    *,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    batch: int = 8,
    per_prompt: int = 1,
    permutations: int = 199,
    pictures: int = 16,
    say: Callable[[str], object] = lambda text: None,
) -> Bench:
    """Compare decoders.

    Args:
        prompts: texts or class labels, or metadata of the shapes world (``prompt``, ``tag``, ...), whose pictures are
            then judged.
        entries: "ar" is added if it is missing.
        per_prompt: images per prompt.
        pictures: how many pictures to keep per decoder, of the same prompts and seeds for all of them.
        say: progress lines.

    Raises:
        ValueError: no prompts, an unknown decoder or option, or a decoder listed twice.
    """
    if not prompts:
        raise ValueError("a comparison needs at least one prompt")
    if min(batch, per_prompt) < 1:
        raise ValueError(f"batch and per_prompt must be at least 1, got {batch} and {per_prompt}")
    if pictures < 0:
        raise ValueError(f"pictures must not be negative, got {pictures}")
    sampling = sampling or SamplingParams.merge(model.defaults, {})
    if not any(e.decoder == "ar" for e in entries):
        entries = [Entry("ar"), *entries]
    labels = [e.label for e in entries]
    if len(set(labels)) != len(labels):
        raise ValueError(f"a decoder is listed twice: {', '.join(labels)}")
    decoders, skipped = _checked(model, entries)
    work = [p for p in prompts for _ in range(per_prompt)]
    seeds = [sample_seed(seed, i) for i in range(len(work))]
    others = [sample_seed(seed + REFERENCE_SEED, i) for i in range(len(work))]
    parts: dict[str, list[tuple[DecodeStats, Tensor, Tensor]]] = {label: [] for label in decoders}
    reference: list[Tensor] = []
    plain = make_decoder("ar")
    warm = set(decoders)
    names = list(decoders)
    for number, start in enumerate(range(0, len(work), batch)):
        part = work[start : start + batch]
        texts = [_text(p) for p in part]
        turn = number % len(names)
        for label in names[turn:] + names[:turn]:
            if label in warm:  # tables, noise caches and allocators are set up outside of the clock
                _decode(model, decoders[label], texts, sampling, seeds[start : start + batch], limit=2)
                warm.discard(label)
            stats, codes = _decode(model, decoders[label], texts, sampling, seeds[start : start + batch])
            parts[label].append((stats, codes, model.decode(codes)))
            say(f"batch {number + 1}: {label}: {stats.nfe:.1f} steps, {stats.seconds:.2f} s")
        _, codes = _decode(model, plain, texts, sampling, others[start : start + batch])
        reference.append(fixed_features(_frames(model.decode(codes))))
    base = [stats.seconds for stats, _, _ in parts["ar"]]
    known = torch.cat(reference)
    kept = spaced(len(work), pictures)
    rows = []
    for entry in entries:
        if entry.label not in decoders:
            continue
        row = _row(model, entry, decoders[entry.label], parts[entry.label], base, work, kept)
        if len(known) > 1:
            row.distance = distance_test(row.features, known, permutations=permutations)
        rows.append(row)
    plain_row = next(row for row in rows if row.entry.label == "ar")
    for row in rows:
        row.note = slow_because(row, plain_row)
    settings = dict(sampling.__dict__)
    texts = [_text(p) for p in work]
    device = str(model.device)
    return Bench(model.name, settings, len(work), batch, rows, skipped, known, texts, seeds, kept, device)


def _checked(model: ImageModel, entries: Sequence[Entry]) -> tuple[dict[str, Decoder], dict[str, str]]:
    """Decoders by label, and the reasons of those the model cannot run. Wrong names and options raise."""
    decoders, skipped = {}, {}
    for entry in entries:
        decoder = make_decoder(entry.decoder, **entry.options)
        try:
            decoder.check(model)
        except ValueError as error:
            skipped[entry.label] = str(error)
        else:
            decoders[entry.label] = decoder
    return decoders, skipped


def _text(prompt: Any) -> Any:
    return prompt["prompt"] if isinstance(prompt, Mapping) else prompt


def _decode(
    model: ImageModel,
    decoder: Decoder,
    texts: list[Any],
    sampling: SamplingParams,
    seeds: list[int],
    limit: int | None = None,
) -> tuple[DecodeStats, Tensor]:
    stop = None if limit is None else lambda info: info.step < limit
    result = decode(model, decoder, model.encode(texts), sampling, seeds, callback=stop)
    return result.stats, result.codes


def _frames(pixels: Tensor) -> Tensor:
    """[B, 3, H, W]; of a video the middle frame."""
    return pixels if pixels.ndim == 4 else pixels[:, pixels.shape[1] // 2]


def _row(
    model: ImageModel,
    entry: Entry,
    decoder: Decoder,
    parts: list[tuple[DecodeStats, Tensor, Tensor]],
    base: list[float],
    work: Sequence[Any],
    kept: list[int],
) -> Row:
    seconds = [stats.seconds for stats, _, _ in parts]
    pixels = torch.cat([_frames(p) for _, _, p in parts])
    scores = None
    if isinstance(work[0], Mapping):
        pictures = model.to_uint8(pixels).movedim(1, -1).cpu().numpy()
        scores = shapes_scores(work, list(pictures))
    merged = DecodeStats.merge([stats for stats, _, _ in parts])
    return Row(
        entry,
        decoder.lossless,
        merged,
        seconds,
        [s / b for s, b in zip(seconds, base, strict=True)],
        torch.cat([codes for _, codes, _ in parts]),
        fixed_features(pixels),
        scores,
        grids=model.layout.to_grid(merged.step_of),
        pictures=model.to_uint8(pixels[kept]).movedim(1, -1).cpu().numpy(),
    )


def time_ratio(row: Row) -> float:
    """Total seconds relative to plain decoding in the same batches."""
    base = sum(s / r for s, r in zip(row.seconds, row.ratio, strict=True))
    return sum(row.seconds) / base


def slow_because(row: Row, plain: Row) -> str:
    """One sentence for a decoder that takes longer than plain decoding, empty for the others."""
    ratio = time_ratio(row)
    if row is plain or ratio <= 1:
        return ""
    ours, theirs = (r.stats.seconds / max(r.stats.forwards, 1) for r in (row, plain))
    phases = row.stats.phases
    total = sum(phases.values()) or 1.0
    share = {name: phases.get(name, 0.0) / total for name in ("forward", "propose", "judge")}
    fed = row.stats.fed / max(row.stats.forwards - len(row.seconds), 1)
    return (
        f"slower here: a step costs {ours / theirs:.1f} plain steps (target forward on {fed:.0f} tokens "
        f"{share['forward']:.0%}, drafting {share['propose']:.0%}, verifying {share['judge']:.0%}) and commits "
        f"{row.stats.tau:.2f} tokens"
    )


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest value."""
    return float(np.min(values)), float(np.max(values))
