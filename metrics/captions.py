"""Caption metrics: token-exact agreement with the target decoder, and BLEU, ROUGE-L, CIDEr-D against
references.

For a lossless speculator the first is the check: its output must equal plain decoding token for token. The
others are pycocoevalcap's numbers without Java, on text tokenised by `ptb_tokenise`; METEOR and SPICE stay
with that package.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_DROPPED = {
    "''",
    "'",
    "``",
    "`",
    "-lrb-",
    "-rrb-",
    "-lcb-",
    "-rcb-",
    ".",
    "?",
    "!",
    ",",
    ":",
    "-",
    "--",
    "...",
    ";",
}
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_TOKEN = re.compile(
    r"n't\b|'(?:s|m|d|ll|re|ve)\b|\d+(?:[.,:/]\d+)*|\w+(?:-\w+)*?(?=n't\b)|\w+(?:[-.]\w+)*|\.\.\.|--|``|''|[^\w\s]"
)


def ptb_tokenise(text: str) -> str:
    """Lower-case Penn Treebank words of a caption joined by spaces, punctuation dropped.

    Covers English captions: clitics ('s, n't, 'll ...) split off, hyphenated words and decimals whole. The
    Java tokenizer's rarer rules (abbreviation periods, currency, URLs) are not reproduced; give pre-tokenised
    text where those matter. As there, round brackets become -lrb- / -rrb- and stay in the text.
    """
    tokens = []
    for token in _TOKEN.findall(text.lower().replace("\u2019", "'").replace("\n", " ")):
        token = _BRACKETS.get(token, token)
        if token not in _DROPPED or token in ("-lrb-", "-rrb-"):
            tokens.append(token)
    return " ".join(tokens)


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _check(references: Mapping[str, Sequence[str]], candidates: Mapping[str, str]) -> None:
    if set(references) != set(candidates):
        odd = sorted(set(references) ^ set(candidates))
        raise ValueError(f"references and candidates differ in {len(odd)} images, first {odd[0]!r}")
    if not candidates:
        raise ValueError("no captions to score")
    empty = [k for k, v in references.items() if not v]
    if empty:
        raise ValueError(f"image {empty[0]!r} has no reference caption")


@dataclass(frozen=True)
class Bleu:
    corpus: tuple[float, ...]  # BLEU-1..4
    per_image: dict[str, tuple[float, ...]]


def bleu(references: Mapping[str, Sequence[str]], candidates: Mapping[str, str], order: int = 4) -> Bleu:
    """BLEU of tokenised captions; closest reference length (ties: the shorter), as pycocoevalcap."""
    _check(references, candidates)
    small, tiny = 1e-9, 1e-15
    total = np.zeros((2, order))
    lengths = np.zeros(2)
    per_image = {}

    def score(hits: np.ndarray, guesses: np.ndarray, test: float, ref: float) -> tuple[float, ...]:
        ratio = (test + tiny) / (ref + small)
        brevity = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
        product, out = 1.0, []
        for k in range(order):
            product *= (hits[k] + tiny) / (guesses[k] + small)
            out.append(product ** (1 / (k + 1)) * brevity)
        return tuple(out)

    for key, candidate in candidates.items():
        words = candidate.split()
        refs = [r.split() for r in references[key]]
        hits, guesses = np.zeros(order), np.zeros(order)
        for k in range(order):
            mine = _ngrams(words, k + 1)
            limit: Counter[tuple[str, ...]] = Counter()
            for r in refs:
                limit |= _ngrams(r, k + 1)
            hits[k] = sum((mine & limit).values())
            guesses[k] = max(0, len(words) - k)
        closest = min((abs(len(r) - len(words)), len(r)) for r in refs)[1]
        per_image[key] = score(hits, guesses, len(words), closest)
        total += np.stack([hits, guesses])
        lengths += (len(words), closest)
    return Bleu(score(total[0], total[1], lengths[0], lengths[1]), per_image)


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        previous = 0
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], previous + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def rouge_l(
    references: Mapping[str, Sequence[str]], candidates: Mapping[str, str], beta: float = 1.2
) -> tuple[float, dict[str, float]]:
    """(mean, per image) ROUGE-L: best precision and best recall over references, combined with beta."""
    _check(references, candidates)
    scores = {}
    for key, candidate in candidates.items():
        words = candidate.split()
        refs = [r.split() for r in references[key]]
        common = [_longest_common(words, r) for r in refs]
        p = max(c / max(len(words), 1) for c in common)
        r = max(c / max(len(ref), 1) for c, ref in zip(common, refs, strict=True))
        scores[key] = (1 + beta**2) * p * r / (r + beta**2 * p) if p and r else 0.0
    return float(np.mean(list(scores.values()))), scores


def cider_d(
    references: Mapping[str, Sequence[str]],
    candidates: Mapping[str, str],
    *,
    order: int = 4,
    sigma: float = 6.0,
) -> tuple[float, dict[str, float]]:
    """(mean, per image) CIDEr-D (arXiv 1411.5726) times 10, document frequencies from these references.

    The length penalty counts bigrams, as the published code does.
    """
    _check(references, candidates)
    counts = {
        k: [[_ngrams(r.split(), n + 1) for n in range(order)] for r in refs] for k, refs in references.items()
    }
    frequency: Counter[tuple[str, ...]] = Counter()
    for refs in counts.values():
        frequency.update({gram for r in refs for grams in r for gram in grams})
    log_images = math.log(len(references))

    def vector(grams: Sequence[Counter]) -> tuple[list[dict], list[float], int]:
        weights = [
            {g: c * (log_images - math.log(max(1.0, frequency[g]))) for g, c in n.items()} for n in grams
        ]
        norms = [math.sqrt(sum(w * w for w in n.values())) for n in weights]
        return weights, norms, sum(grams[1].values()) if order > 1 else 0

    scores = {}
    for key, candidate in candidates.items():
        mine, my_norms, my_length = vector([_ngrams(candidate.split(), n + 1) for n in range(order)])
        total = 0.0
        for ref in counts[key]:
            other, norms, length = vector(ref)
            penalty = math.exp(-((my_length - length) ** 2) / (2 * sigma**2))
            for n in range(order):
                dot = sum(min(w, other[n].get(g, 0.0)) * other[n].get(g, 0.0) for g, w in mine[n].items())
                if my_norms[n] and norms[n]:
                    dot /= my_norms[n] * norms[n]
                total += penalty * dot / order
        scores[key] = 10 * total / len(counts[key])
    return float(np.mean(list(scores.values()))), scores


@dataclass(frozen=True)
class Agreement:
    """Token-exact agreement of a decoder with the target's own decoding."""

    identical: int
    total: int
    first_mismatch: dict[int, int]  # caption -> first differing position
    gap_at_mismatch: dict[int, float]  # caption -> target's top-2 logit gap there, where logits were given

    @property
    def rate(self) -> float:
        return self.identical / self.total

    def ties(self, noise: float) -> int:
        """Mismatches whose logit gap is below the numerical noise: not faults of the decoder."""
        return sum(gap < noise for gap in self.gap_at_mismatch.values())


def exact_match(
    outputs: Sequence[Sequence[int]],
    target: Sequence[Sequence[int]],
    gaps: Sequence[Sequence[float]] | None = None,
) -> Agreement:
    """Compare token sequences; gaps: per caption and position, top-1 minus top-2 target logit."""
    if len(outputs) != len(target) or not outputs:
        raise ValueError(
            f"need as many outputs as target sequences (at least one), got {len(outputs)}, {len(target)}"
        )
    first: dict[int, int] = {}
    at: dict[int, float] = {}
    for i, (a, b) in enumerate(zip(outputs, target, strict=True)):
        a, b = list(a), list(b)
        if a == b:
            continue
        shared = min(len(a), len(b))
        position = next((j for j in range(shared) if a[j] != b[j]), shared)
        first[i] = position
        if gaps is not None and position < len(gaps[i]):
            at[i] = float(gaps[i][position])
    return Agreement(len(outputs) - len(first), len(outputs), first, at)


def longest_captions(captions: Mapping[str, Sequence[str]], rule: str = "longest") -> dict[str, str]:
    """One caption per image, images in the given order. "longest": the longest, first of equals (LANTERN).

    "sjd": SJD's script, whose running record is never reset between images: an image gets its longest caption
    only when it sets a new overall record, else the caption at the last record's index (its last caption if
    it has fewer).
    """
    if rule == "longest":
        return {k: max(v, key=len) for k, v in captions.items()}
    if rule != "sjd":
        raise ValueError(f"caption rule must be 'longest' or 'sjd', got {rule!r}")
    record, index, out = 0, 0, {}
    for key, options in captions.items():
        for i, text in enumerate(options):
            if len(text) > record:
                record, index = len(text), i
        out[key] = options[min(index, len(options) - 1)]
    return out
