"""Protocols of the literature by name: which network, which preparation, how many images, which reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """A protocol of the literature: which extractor with which preprocessing, how many images, which
    reference.
    """

    name: str
    source: str  # where it is written down
    metrics: tuple[str, ...]
    extractor: str  # a key of visacc.metrics.extractors
    options: tuple[tuple[str, str], ...]  # options of that extractor
    images: str  # preparation of generated images, see visacc.metrics.images.PREPARE
    reference_images: str  # preparation of reference images
    reference: str
    n_gen: int
    n_ref: int | None
    note: str = ""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # metric -> its settings

    def check_counts(self, n_gen: int, n_ref: int | None) -> str | None:
        """A sentence if the counts are not the recipe's, else None."""
        wrong = []
        if n_gen != self.n_gen:
            wrong.append(f"{n_gen} generated images instead of {self.n_gen}")
        if self.n_ref is not None and n_ref is not None and n_ref != self.n_ref:
            wrong.append(f"{n_ref} reference images instead of {self.n_ref}")
        return f"not the protocol {self.name!r}: {', '.join(wrong)}" if wrong else None


_INCEPTION_FID = (("flavour", "pytorch-fid"),)
PAPERS: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            "sjd-coco5k",
            "SJD arXiv 2410.01699, evaluation_metrics.py; GSD and MC-SJD print the same baselines",
            ("fid",),
            "inception",
            _INCEPTION_FID,
            "as-is",
            "as-is",
            "COCO val2017 folder, original aspect ratios",
            5000,
            5000,
            "squares against un-cropped photos: lands near 30 and is not the COCO-30k FID",
        ),
        Recipe(
            "gigagan-coco5k",
            "LANTERN arXiv 2410.03355, entrypoints/eval_fid.py (GigaGAN's preparation)",
            ("fid",),
            "inception",
            (("flavour", "clean-fid"),),
            "center-crop-lanczos-256",
            "center-crop-lanczos-256",
            "COCO val2017, longest caption per image",
            5000,
            5000,
        ),
        Recipe(
            "sjd-is",
            "SJD arXiv 2410.01699, evaluation_metrics.py",
            ("is",),
            "inception",
            (("flavour", "torch-fidelity"),),
            "squeeze-299",
            "as-is",
            "none",
            5000,
            None,
            "images squeezed to 299 x 299 first, which leaves the network's own resize nothing to do",
            {"is": {"splits": 10}},
        ),
        Recipe(
            "lantern-pr",
            "LANTERN arXiv 2410.03355, entrypoints/eval_prec_recall.py",
            ("precision", "recall"),
            "vgg16",
            (),
            "center-crop-lanczos-256",
            "center-crop-lanczos-256",
            "COCO val2017",
            5000,
            5000,
            "VGG16's second 4096-d layer before its ReLU; ties lie outside",
            {"prdc": {"k": 3, "strict": True}},
        ),
        Recipe(
            "gigagan-coco30k",
            "LlamaGen arXiv 2406.06525, evaluations/t2i",
            ("fid",),
            "inception",
            (("flavour", "clean-fid"),),
            "center-crop-lanczos-256",
            "center-crop-lanczos-256",
            "COCO val2014, 30 000 captions",
            30000,
            None,
        ),
        Recipe(
            "adm-in256",
            "OpenAI guided-diffusion evaluations/evaluator.py; LlamaGen class-conditional, ZipAR",
            ("fid", "sfid", "is-adm", "precision", "recall"),
            "inception",
            (("flavour", "torch-fidelity"),),
            "bicubic-256",
            "as-is",
            "VIRTUAL_imagenet256_labeled.npz",
            50000,
            None,
            "uniformly random labels; Inception Score in file order; precision/recall on its 10 000 images",
        ),
        Recipe(
            "fidelity-in256",
            "LPD arXiv 2507.01957, engine.py (torch-fidelity with given statistics)",
            ("fid", "is"),
            "inception",
            (("flavour", "torch-fidelity"),),
            "as-is",
            "as-is",
            "adm_in256_stats.npz",
            50000,
            None,
            "exactly 50 per class in class order, bytes rounded",
        ),
        Recipe(
            "fidelity-in512",
            "LPD arXiv 2507.01957, engine.py",
            ("fid", "is"),
            "inception",
            (("flavour", "torch-fidelity"),),
            "as-is",
            "as-is",
            "adm_in512_stats.npz",
            50000,
            None,
        ),
        Recipe(
            "dinov2-fd",
            "Stein et al. arXiv 2306.04675 (dgm-eval)",
            ("fd",),
            "dinov2",
            (),
            "as-is",
            "as-is",
            "any",
            50000,
            None,
        ),
        Recipe(
            "cmmd-coco30k",
            "Jayasumana et al. arXiv 2401.09603",
            ("cmmd",),
            "clip-cmmd",
            (),
            "as-is",
            "as-is",
            "COCO-30k",
            30000,
            30000,
        ),
    )
}


@dataclass(frozen=True)
class TextRecipe:
    """An image-text protocol of the literature: `fixed` are keys of a clip or hps entry."""

    name: str
    source: str
    metric: str  # clip or hps
    fixed: Mapping[str, str]
    note: str = ""


TEXT_PAPERS: dict[str, TextRecipe] = {
    r.name: r
    for r in (
        TextRecipe(
            "sjd-clip",
            "SJD arXiv 2410.01699, evaluation_metrics.py; GSD and MC-SJD print the same baselines",
            "clip",
            {"model": "ViT-B-16", "pretrained": "openai", "scale": "100cos", "prepare": "squeeze-299"},
            "images squeezed to 299 x 299, then CLIP's own resize",
        ),
        TextRecipe(
            "gigagan-clip",
            "LANTERN arXiv 2410.03355, LlamaGen arXiv 2406.06525 (GigaGAN's script)",
            "clip",
            {
                "model": "ViT-B-32",
                "pretrained": "openai",
                "scale": "gigagan",
                "prepare": "center-crop-lanczos-256",
            },
            'plain cosine, "A photo depicts" before every caption',
        ),
        TextRecipe(
            "lantern-hps",
            "LANTERN arXiv 2410.03355, LANTERN++ arXiv 2502.06352",
            "hps",
            {"version": "v2.1"},
        ),
    )
}


def recipe(name: str) -> Recipe:
    if name not in PAPERS:
        raise ValueError(f"unknown protocol {name!r}; known: {', '.join(PAPERS)}")
    return PAPERS[name]


def text_recipe(name: str) -> TextRecipe:
    if name not in TEXT_PAPERS:
        raise ValueError(f"unknown protocol {name!r}; known: {', '.join(TEXT_PAPERS)}")
    return TEXT_PAPERS[name]
