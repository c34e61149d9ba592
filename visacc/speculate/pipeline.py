"""Captioning pictures: ``CaptionPipeline``. An unreadable picture fails alone, with its name; the others
finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from visacc.memory import in_batches
from visacc.models.vlm.families import placeholder_ids
from visacc.pictures import read_image, rgb
from visacc.speculate.api import Speculator
from visacc.speculate.contract import TextDrafter
from visacc.speculate.loop import Stop
from visacc.speculate.params import TextParams, from_generation_config
from visacc.speculate.stats import TextStats
from visacc.speculate.trees import TreePolicy

Picture = str | Path | Image.Image
EMBEDDED = "shapes-captioner"


@dataclass
class Caption:
    """One answer.

    Attributes:
        text: the answer, ``None`` if the row failed. error: why it failed.
        source: file name, or the place in the list for pictures given as objects.
        tokens, steps: generated tokens and target steps (tree forwards) they took.
    """

    source: str
    prompt: str
    text: str | None = None
    error: str | None = None
    tokens: int = 0
    steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        base: dict[str, Any] = {"image": self.source, "prompt": self.prompt}
        if self.error is not None:
            return {**base, "error": self.error}
        return {**base, "text": self.text, "tokens": self.tokens, "steps": self.steps}


@dataclass
class _Job:
    caption: Caption
    pictures: list[Image.Image] = field(default_factory=list)


class CaptionPipeline:
    """Images and prompts in, texts out, several at a time.

    Args:
        model: a loaded transformers model, a folder or hub id, or ``"shapes-captioner"`` (embedded, no
            download).
        processor: its processor; needed with a loaded model.
        speculator: drafter object, folder or name, ``"ngram"``, a method with an embedded drafter, or ``None``.
        tree, method: see :class:`Speculator`.
        device, dtype: where a model given by name is loaded.
    """

    def __init__(
        self,
        model: Any = EMBEDDED,
        processor: Any = None,
        *,
        speculator: TextDrafter | str | Path | None = "ngram",
        tree: TreePolicy | dict[str, Any] | None = None,
        method: str | None = None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(model, (str, Path)):
            model, processor = load_vlm(str(model), device=device, dtype=dtype)
        if processor is None:
            raise ValueError("a loaded model needs its processor: CaptionPipeline(model, processor)")
        self.model, self.processor = model, processor
        tokenizer = getattr(processor, "tokenizer", processor)
        tokenizer.padding_side = "left"
        self.tokenizer = tokenizer
        self.speculator = Speculator(model, speculator, method=method, tree=tree)
        self.stats: TextStats | None = None

    def __call__(
        self,
        images: Sequence[Picture | Sequence[Picture] | None],
        prompts: str | Sequence[str] = "Describe the image.",
        *,
        batch_size: int = 8,
        seed: int | Sequence[int] = 0,
        on_caption: Callable[[Caption], object] | None = None,
        **options: Any,
    ) -> list[Caption]:
        """Answer every (image, prompt) pair, in order.

        Args:
            images: per row a file, a picture, several of them, or ``None`` for a text-only row.
            prompts: one for all rows, or one per row.
            seed: row i samples with ``seed + i``, whatever the batch size; or one seed per row.
            on_caption: called with every finished row.
            options: fields of :class:`TextParams` (max_new_tokens, temperature, top_k, top_p, ...).

        Raises:
            ValueError: numbers of images and prompts differ, or bad options. Rows that cannot be read do not
                raise: their ``error`` says why.
        """
        return list(
            self.iterate(images, prompts, batch_size=batch_size, seed=seed, on_caption=on_caption, **options)
        )

    def iterate(
        self,
        images: Sequence[Picture | Sequence[Picture] | None],
        prompts: str | Sequence[str] = "Describe the image.",
        *,
        batch_size: int = 8,
        seed: int | Sequence[int] = 0,
        on_caption: Callable[[Caption], object] | None = None,
        **options: Any,
    ) -> Iterator[Caption]:
        """As :meth:`__call__`, batch by batch. A batch that does not fit into memory is answered in halves."""
        rows = [prompts] * len(images) if isinstance(prompts, str) else list(prompts)
        if len(rows) != len(images):
            raise ValueError(
                f"{len(images)} images but {len(rows)} prompts; give one prompt or one per image"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        params = from_generation_config(self.model.generation_config, 0, **{"max_new_tokens": 128, **options})

        seeds = [seed + i for i in range(len(rows))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(rows):
            raise ValueError(f"{len(rows)} rows but {len(seeds)} seeds; give one seed or one per row")

        def answered(first: int, stop: int) -> list[_Job]:
            jobs = [_read(images[i], rows[i], i) for i in range(first, stop)]
            self._answer(jobs, params, seeds[first:stop])
            return jobs

        for _, _, jobs in in_batches(len(rows), batch_size, answered, what="pictures"):
            for job in jobs:
                if on_caption is not None:
                    on_caption(job.caption)
                yield job.caption

    def _answer(self, jobs: list[_Job], params: TextParams, seeds: Sequence[int]) -> None:
        """Fill in the captions of a batch; rows of different kinds (with and without pictures) share it."""
        ready = [(i, job) for i, job in enumerate(jobs) if job.caption.error is None]
        if not ready:
            return
        try:
            inputs = self.inputs([j.caption.prompt for _, j in ready], [j.pictures for _, j in ready])
            stop = self._stop(params)
            result = self.speculator.run(inputs, params, [seeds[i] for i, _ in ready], stop=stop)
        except ValueError as error:
            if len(ready) == 1:
                ready[0][1].caption.error = str(error)
                return
            # find the row that does not fit: every row on its own
            for i, job in ready:
                self._answer([job], params, [seeds[i]])
            return
        self.stats = result.stats
        for row, (_, job) in enumerate(ready):
            length = int(result.lengths[row])
            text = self.tokenizer.decode(result.ids[row, :length], skip_special_tokens=True)
            job.caption.text = text.strip()
            job.caption.tokens, job.caption.steps = length, int(result.stats.steps[row])

    def inputs(self, prompts: list[str], pictures: list[list[Image.Image]]) -> dict[str, Any]:
        """The processor's batch: the chat template around each prompt, one placeholder per picture.

        Raises:
            ValueError: a prompt has its own placeholders and their number is not that of its pictures.
        """
        token = self._placeholder()
        texts = []
        for prompt, images in zip(prompts, pictures, strict=True):
            own = prompt.count(token) if token else 0
            if own and own != len(images):
                raise ValueError(
                    f"the prompt has {own} image placeholders {token!r} but {len(images)} images"
                )
            texts.append(prompt if own else self._templated(prompt, len(images)))
        flat = [image for images in pictures for image in images]
        given: dict[str, Any] = {"text": texts, "return_tensors": "pt", "padding": True}
        if flat:
            nested = type(self.processor).__name__ in (
                "Idefics3Processor",
                "SmolVLMProcessor",
                "Gemma3Processor",
            )
            given["images"] = pictures if nested else flat
        return dict(self.processor(**given))

    def _templated(self, prompt: str, images: int) -> str:
        parts: list[dict[str, str]] = [{"type": "image"}] * images
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
        if getattr(self.processor, "chat_template", None):
            return self.processor.apply_chat_template(messages, add_generation_prompt=True)
        token = self._placeholder() or ""
        return " ".join([token] * images + [prompt]).strip()

    def _placeholder(self) -> str | None:
        token = getattr(self.processor, "image_token", None)
        if isinstance(token, str):
            return token
        image, _ = placeholder_ids(self.model.config)
        return None if image is None else self.tokenizer.convert_ids_to_tokens(image)

    def _stop(self, params: TextParams) -> Stop | None:
        if not params.stop_strings:
            return None

        def stop(ids: torch.Tensor, generated: int) -> bool:
            text = self.tokenizer.decode(ids[0, -generated:], skip_special_tokens=True)
            return any(end in text for end in params.stop_strings)

        return stop


def _read(source: Picture | Sequence[Picture] | None, prompt: str, number: int) -> _Job:
    """Open the pictures of a row; what cannot be read becomes the row's error."""
    group: list[Picture] = []
    if isinstance(source, (str, Path, Image.Image)):
        group = [source]
    elif source is not None:
        group = list(source)
    names = [str(s) for s in group if isinstance(s, (str, Path))]
    job = _Job(Caption(", ".join(names) or f"#{number}", prompt))
    for item in group:
        if isinstance(item, Image.Image):
            job.pictures.append(rgb(item))
            continue
        try:
            job.pictures.append(read_image(item))
        except ValueError as error:
            job.caption.error = str(error)
    return job


def load_vlm(name: str, *, device: str | None = None, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A model and its processor: the embedded captioner, a folder, or a hub id.

    Raises:
        ValueError: the model is of no supported family.
    """
    if name == EMBEDDED:
        from visacc.models.vlm.captioner import load_captioner

        captioner, processor = load_captioner()
        captioner.to(device or "cpu", dtype or torch.float32)
        return captioner, processor
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from visacc.models.hf.detect import guarded
    from visacc.models.vlm.families import family_of

    # refuse before the weights are read
    family_of(guarded(name, lambda: AutoConfig.from_pretrained(name)))
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    load = AutoModelForImageTextToText.from_pretrained
    model: Any = guarded(name, lambda: load(name, dtype=dtype or "auto"))
    model.to(where).eval()
    return model, guarded(name, lambda: AutoProcessor.from_pretrained(name))
