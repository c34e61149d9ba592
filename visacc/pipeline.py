"""Text (or class label) to image with any decoder: the object most users hold."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visacc.decoders.base import Decoder
from visacc.engine import DecodeResult, StepInfo, decode
from visacc.memory import in_batches
from visacc.models.base import ImageModel
from visacc.noise import sample_seed
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams
from visacc.stats import DecodeStats
from visacc.window import AutoWindow

OUTPUT_TYPES = ("pil", "np", "pt", "codes")
BATCH = 8
"""Images decoded together where nothing else is asked for."""


@dataclass
class ImageOutput:
    """Result of a pipeline call; ``out[0]`` is ``out.images`` as in diffusers.

    Attributes:
        images: list of PIL images, or array [B, H, W, 3] uint8 ("np"), tensor [B, 3, H, W] float in [0, 1] ("pt"), or
            codes int64 [B, T, H, W] ("codes").
        codes: int64 [B, T, H, W].
        seeds: seed of each image; ``pipe(its prompt, seed=that)`` makes the same image alone.
        stats: steps, acceptance and time.
        settings: decoder, its options and the sampling parameters that were used.
    """

    images: Any
    codes: Tensor
    seeds: list[int]
    stats: DecodeStats
    settings: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Any:
        return (self.images, self.codes, self.seeds, self.stats)[index]


class TextToImagePipeline:
    """Generate images with a model and a decoder.

    Args:
        model: the adapter.
        decoder: registered name, or a decoder object. It can be changed for a single call as well.
        compile: compile the model's forward with torch.compile, for one token a step (``ar``) and windows; the first forward
            of every batch size then takes a minute or so. Shapes are kept the same: each step reads the whole cache, and
            finished samples stay in their batch. The law and the seeds are untouched; the last bits of the logits are not.
        options: options of the decoder, e.g. ``window=32``; ``window="auto"`` measures this machine and chooses.

    Raises:
        ValueError: ``compile`` with a model, a decoder or ``window="auto"`` that does not allow it.
        RuntimeError: ``compile`` on a machine without a compiler.
    """

    def __init__(
        self, model: ImageModel, decoder: str | Decoder = "ar", *, compile: bool = False, **options: Any
    ) -> None:
        self.model = model
        if compile and not model.static_shapes:
            if model.shards is not None:
                raise ValueError(f"{model.name} is sharded and cannot be compiled")
            model.compile()
        self._auto = AutoWindow(model)
        self.interrupt = False
        self.set_decoder(decoder, **options)

    def set_decoder(self, decoder: str | Decoder, **options: Any) -> None:
        """Change the decoder of the following calls. Raises ``ValueError`` for unknown names and options."""
        self._probe(decoder, options)
        self._decoder, self._options = decoder, options

    def current_decoder(self) -> Decoder:
        """The decoder of the next call, checked against the model (a window "auto" is not chosen yet)."""
        return self._probe(self._decoder, self._options)

    def _probe(self, decoder: str | Decoder, options: dict[str, Any]) -> Decoder:
        known = {k: v for k, v in options.items() if not (k == "window" and v == "auto")}
        engine = make_decoder(decoder, **known)
        engine.check(self.model)
        return engine

    @property
    def device(self) -> torch.device:
        return self.model.device

    def finish(self) -> None:
        """Of a sharded model: this process has no more images to make, and helps the others until none has. Every process
        calls it, once. Of other models: nothing.
        """
        if self.model.shards is not None:
            self.model.shards.finish()

    def __call__(
        self,
        prompt: str | int | Sequence[str | int],
        *,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_interval: int | None = None,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        batch_size: int | None = None,
        decoder: str | Decoder | None = None,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("committed",),
        progress: Callable[[int, int], object] | None = None,
        **decoder_options: Any,
    ) -> ImageOutput:
        """Generate ``num_images_per_prompt`` images for every prompt.

        Args:
            prompt: text, class label (class-conditional models), token ids (a list of them, or a tensor, for models of
                the transformers library), or a list of those.
            guidance_scale, temperature, top_k, top_p, guidance_interval: see
                :class:`visacc.sampling.SamplingParams`; ``None`` takes the model family's own default.
            seed: one seed for the call, or one per image. The same seed, prompt and settings give the same image,
                alone or in any batch.
            generator: source of the seed when ``seed`` is not given.
            output_type: "pil", "np", "pt" or "codes" (skips the pixel decoder).
            batch_size: images decoded together (default 8). A batch that does not fit into memory is decoded in halves,
                with a warning; the pictures stay the same.
            decoder, decoder_options: for this call only.
            callback_on_step_end: ``f(pipe, step, committed_tokens, tensors) -> dict | None`` after every step, as in
                diffusers; set ``pipe.interrupt = True`` in it to stop.
            callback_on_step_end_tensor_inputs: which of "committed" [B] and "token_ids" [B, slots] it receives.
            progress: ``f(done, total)`` in committed tokens over the whole call.

        Raises:
            ValueError: bad prompt, parameter, decoder or option.
            RuntimeError: the model produced NaN.
            torch.OutOfMemoryError: not even one image fits into memory, or, of a sharded model, a batch does not.
        """
        prompts = self._prompts(prompt, num_images_per_prompt)
        negative = self._negative(negative_prompt, len(prompts), num_images_per_prompt)
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"unknown output_type {output_type!r}; choose one of {', '.join(OUTPUT_TYPES)}")
        unknown = set(callback_on_step_end_tensor_inputs) - {"committed", "token_ids"}
        if unknown:
            raise ValueError(f"callback tensors can be 'committed' and 'token_ids', not {sorted(unknown)}")
        sampling = SamplingParams.merge(
            self.model.defaults,
            {
                "guidance_scale": guidance_scale,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "guidance_interval": guidance_interval,
            },
        )
        if output_type != "codes":
            self.model.check_pixels()
        seeds = image_seeds(seed, generator, len(prompts))
        batch = positive("batch_size", BATCH if batch_size is None else batch_size)
        engine = self._make_decoder(decoder, decoder_options, sampling, min(batch, len(prompts)))
        self.interrupt = False

        def callback(info: StepInfo) -> bool:
            if callback_on_step_end is None:
                return not self.interrupt
            offered = {"committed": info.committed, "token_ids": info.run.sequence}
            tensors = {name: offered[name] for name in callback_on_step_end_tensor_inputs}
            callback_on_step_end(self, info.step, info.committed, tensors)
            return not self.interrupt

        started, results, pixels = time.perf_counter(), [], []
        whole = self.model.layout.total * len(prompts)

        def work(start: int, stop: int) -> tuple[DecodeResult, Tensor | None]:
            part = slice(start, stop)
            cond = self.model.encode(prompts[part], negative[part] if negative else None)
            engine.images = (start, stop, len(prompts))
            done, size = start * self.model.layout.total, stop - start
            result = decode(
                self.model,
                engine,
                cond,
                sampling,
                seeds[part],
                callback=callback if callback_on_step_end else None,
                progress=batch_progress(progress, done, size, whole),
            )
            return result, None if output_type == "codes" else self._decode(result.codes)

        # a forward that breaks off would leave the other processes of a sharded model waiting for it
        halve = self.model.shards is None
        for _, stop, (result, drawn) in in_batches(len(prompts), batch, work, halve=halve):
            results.append(result)
            if drawn is not None:
                pixels.append(drawn)
            if progress:
                progress(stop * self.model.layout.total, whole)
            if self.interrupt:
                break
        stats = DecodeStats.merge([r.stats for r in results])
        self._auto.observe(engine, stats)
        codes = torch.cat([r.codes for r in results])
        settings = settings_of(self.model, engine, sampling, time.perf_counter() - started)
        images = codes if output_type == "codes" else self._output(torch.cat(pixels), output_type)
        return ImageOutput(images, codes, seeds[: len(codes)], stats, settings)

    @torch.no_grad()
    def _decode(self, codes: Tensor) -> Tensor:
        return self.model.decode(codes)

    def _output(self, pixels: Tensor, output_type: str) -> Any:
        if output_type == "pt":
            return pixels
        array = self.model.to_uint8(pixels).movedim(-3, -1).cpu().numpy()
        return array if output_type == "np" else [Image.fromarray(image) for image in array]

    def _make_decoder(
        self, decoder: str | Decoder | None, extra: dict[str, Any], sampling: SamplingParams, batch: int
    ) -> Decoder:
        chosen = self._decoder if decoder is None else decoder
        options = {**(self._options if decoder is None else {}), **extra}
        if options.get("window") == "auto":
            if self.model.static_shapes:
                raise ValueError(
                    "window='auto' times many windows, each of which a compiled model would compile: name one"
                )
            rest = {k: v for k, v in options.items() if k != "window"}
            options["window"] = self._auto.choose(make_decoder(chosen, **rest), sampling.guided, batch)
        engine = make_decoder(chosen, **options)
        engine.check(self.model)
        return engine

    def _prompts(self, prompt: Any, repeat: int) -> list[Any]:
        many = [prompt] if isinstance(prompt, (str, int, Tensor)) else prompt
        if not isinstance(many, (list, tuple)) or not many:
            raise ValueError(
                f"prompt must be a text, a class label or a non-empty list of them, got {prompt!r}"
            )
        for p in many:
            if not _is_token_ids(p) and (isinstance(p, bool) or not isinstance(p, (str, int))):
                raise ValueError(
                    f"prompt must be a text or a class label, got {p!r} of type {type(p).__name__}"
                )
            if isinstance(p, str) and not p.strip():
                raise ValueError("the prompt is empty: describe the picture you want")
        repeat = positive("num_images_per_prompt", repeat)
        return [p for p in many for _ in range(repeat)]

    @staticmethod
    def _negative(negative: Any, count: int, repeat: int) -> list[str] | None:
        if negative is None:
            return None
        if isinstance(negative, str):
            return [negative] * count
        if not isinstance(negative, (list, tuple)) or not all(isinstance(n, str) for n in negative):
            raise ValueError(f"negative_prompt must be a text or a list of texts, got {negative!r}")
        many = [n for n in negative for _ in range(repeat)]
        if len(many) != count:
            raise ValueError(
                f"{count // repeat} prompts need as many negative prompts, got {len(many) // repeat}"
            )
        return many


def settings_of(
    model: ImageModel, decoder: Decoder, sampling: SamplingParams, seconds: float
) -> dict[str, Any]:
    """What an output and the files about it say of how it was made."""
    return {
        "model": model.name,
        "decoder": decoder.name,
        "decoder_options": decoder.options(),
        "lossless": decoder.lossless,
        "sampling": dict(sampling.__dict__),
        "pixel_rule": model.pixel_rule,
        "total_seconds": seconds,
    }


def batch_progress(
    progress: Callable[[int, int], object] | None, done: int, size: int, whole: int
) -> Callable[[int, int], object] | None:
    """Progress of a whole call of ``whole`` slots from that of a batch of ``size`` samples behind ``done`` slots."""
    if progress is None:
        return None
    return lambda slots, _total: progress(done + slots * size, whole)


def _is_token_ids(prompt: Any) -> bool:
    """A prompt given as the ids of its tokens (adapters of transformers models take those)."""
    if isinstance(prompt, Tensor):
        return prompt.ndim == 1 and not prompt.is_floating_point()
    whole = isinstance(prompt, (list, tuple)) and len(prompt) > 0
    return whole and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)


def image_seeds(seed: int | Sequence[int] | None, generator: torch.Generator | None, count: int) -> list[int]:
    """One seed per image. Image 0 of a call with ``seed=s`` has seed s, image i a seed derived from (s, i)."""
    if seed is not None and generator is not None:
        raise ValueError("give a seed or a generator, not both")
    if isinstance(seed, (np.ndarray, Tensor)):
        seed = seed.tolist()
    if seed is None:
        if generator is not None:
            seed = int(torch.randint(1 << 62, (1,), generator=generator, device=generator.device))
        else:
            seed = secrets.randbits(31)
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return [int(seed)] + [sample_seed(int(seed), i) for i in range(1, count)]
    whole = (int, np.integer)
    if isinstance(seed, (list, tuple)) and all(
        isinstance(s, whole) and not isinstance(s, bool) for s in seed
    ):
        if len(seed) != count:
            raise ValueError(f"{count} images need one seed or {count} seeds, got {len(seed)}")
        return [int(s) for s in seed]
    raise ValueError(f"seed must be an integer or a list of integers, got {seed!r}")


def positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value
