"""``ARImagePipeline``: transformers image generators with any decoder, as a diffusers pipeline.

Needs diffusers (``pip install 'visacc[diffusers]'``), which nothing else in the library does. In diffusers' words a *step*
is one forward of the model and the *timestep* given to callbacks is the number of tokens committed by the slowest image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    from diffusers import DiffusionPipeline
    from diffusers.utils import BaseOutput
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError("ARImagePipeline needs diffusers: pip install 'visacc[diffusers]'") from error

from visacc.decoders.base import Decoder
from visacc.models.hf.driver import HFImageModel
from visacc.models.hf.loading import load_hf, wrap
from visacc.models.hf.taming import FILE, TamingDecoder
from visacc.pipeline import TextToImagePipeline
from visacc.registry import make_decoder
from visacc.stats import DecodeStats

_VQ = "vq"
_OUTPUTS = ("pil", "np", "pt", "latent")


@dataclass
class ARImageOutput(BaseOutput):
    """Result of a call; ``out[0]`` is ``out.images``.

    Attributes:
        images: PIL images, or float arrays [B, H, W, 3] ("np"), tensors [B, 3, H, W] ("pt"), codes [B, H, W] ("latent").
        token_ids: int64 [B, H, W] codes.
        stats: steps, acceptance, time.
    """

    images: Any
    token_ids: Any = None
    stats: DecodeStats | None = None


_Pipeline: Any = DiffusionPipeline  # its members are not typed


class ARImagePipeline(_Pipeline):
    """Text to image with an autoregressive model of the transformers library.

    Args:
        model: Janus, Emu3, Chameleon, ... ``ForConditionalGeneration``.
        tokenizer: its tokenizer.
        decoder, decoder_options: name of the decoder and its options; a call can use another one.
        family: where the model's configuration does not tell.
    """

    model_cpu_offload_seq = "model"
    _optional_components = ["tokenizer"]  # noqa: RUF012 - diffusers' convention
    _callback_tensor_inputs = ["token_ids", "accepted"]  # noqa: RUF012

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        decoder: str = "mc-sjd",
        decoder_options: dict[str, Any] | None = None,
        family: str | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(model=model, tokenizer=tokenizer)
        self.register_to_config(decoder=decoder, decoder_options=dict(decoder_options or {}), family=family)
        make_decoder(decoder, **(decoder_options or {}))
        self.vq: TamingDecoder | None = None
        self._interrupt = False

    # -- saving and loading --------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name: str | Path, **kwargs: Any) -> ARImagePipeline:  # type: ignore[override]
        """Load a pipeline that :meth:`save_pretrained` wrote, or any checkpoint that :func:`load_hf` takes.

        Args:
            name: folder or hub id.
            kwargs: ``decoder``, ``decoder_options``, ``window`` and such options of the decoder, ``dtype`` (or
                ``torch_dtype``), ``family``, ``vq``, ``revision``, ``device_map``.
        """
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", torch.float32))
        if _is_pipeline(name, kwargs.get("revision")):
            settings = {k: kwargs.pop(k) for k in ("decoder", "decoder_options", "family") if k in kwargs}
            pipe = super().from_pretrained(str(name), torch_dtype=dtype, **settings, **kwargs)
            file = _fetch(name, f"{_VQ}/{FILE}", kwargs.get("revision"))
            if file is not None:
                pipe.vq = TamingDecoder.from_pretrained(Path(file).parent)
            return pipe
        loading = {
            k: kwargs.pop(k) for k in ("revision", "vq", "device_map", "attn_implementation") if k in kwargs
        }
        decoder, family = kwargs.pop("decoder", "mc-sjd"), kwargs.pop("family", None)
        options = {**kwargs.pop("decoder_options", {}), **kwargs}
        adapter = load_hf(name, dtype=dtype, family=family, **loading)
        if adapter.family == "glm-image":
            raise ValueError(
                "GLM-Image has a diffusers pipeline of its own (GlmImagePipeline); give it tokens from"
                " visacc.integrations.glm_image.prior_tokens"
            )
        pipe = cls(adapter.module, adapter.tokenizer, decoder, options, adapter.family)
        pipe.vq = getattr(adapter, "vq", None)
        return pipe

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the pipeline; the VQ decoder of families whose class has none goes to the sub-folder ``vq``."""
        super().save_pretrained(str(save_directory), **kwargs)
        if self.vq is not None:
            self.vq.save_pretrained(Path(save_directory) / _VQ)

    # -- running -------------------------------------------------------------------------------------------

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    @interrupt.setter
    def interrupt(self, value: bool) -> None:
        """Setting it in a callback stops the call; unfinished pictures keep code 0 where nothing was decided."""
        self._interrupt = value

    def adapter(self, height: int | None = None, width: int | None = None) -> HFImageModel:
        """The adapter that draws the given size (``None``: the family's own)."""
        if (height is None) != (width is None):
            raise ValueError("give both height and width, or neither")
        options: dict[str, Any] = {} if self.vq is None else {"vq": self.vq}
        size = None if height is None else (height, width)
        return wrap(self.model, family=self.config.family, size=size, tokenizer=self.tokenizer, **options)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        seed: int | Sequence[int] | None = None,
        decoder: str | Decoder | None = None,
        decoder_options: dict[str, Any] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("token_ids",),
    ) -> ARImageOutput | tuple[Any, ...]:
        """Draw pictures.

        Args:
            height, width: pixels; default the family's own size.
            guidance_scale, temperature, top_k, top_p: default the family's own.
            generator, seed: source of the random numbers; the same seed gives the same picture in any batch.
            decoder, decoder_options: for this call only.
            output_type: "pil", "np" (float, [0, 1]), "pt", or "latent" (codes).
            callback_on_step_end: ``f(pipe, step, committed, tensors) -> dict | None``; a returned ``token_ids`` is
                written back.
            callback_on_step_end_tensor_inputs: of "token_ids" (int64 [B, slots] committed codes) and "accepted" (int64
                [B] committed tokens).

        Raises:
            ValueError: unknown decoder, option, output type or size.
        """
        if output_type not in _OUTPUTS:
            raise ValueError(f"unknown output_type {output_type!r}; choose one of {', '.join(_OUTPUTS)}")
        wrong = set(callback_on_step_end_tensor_inputs) - set(self._callback_tensor_inputs)
        if wrong:
            raise ValueError(f"callback tensors can be {self._callback_tensor_inputs}, not {sorted(wrong)}")
        self._interrupt = False
        adapter = self.adapter(height, width)
        options = self.config.decoder_options if decoder is None else {}
        inner = TextToImagePipeline(
            adapter, decoder or self.config.decoder, **{**options, **(decoder_options or {})}
        )
        _onload(self.model)
        bar = self.progress_bar(total=adapter.layout.total)

        def step_end(_pipe: Any, step: int, committed: Any, tensors: dict[str, Any]) -> None:
            low = int(committed.min())
            bar.update(low - bar.n)
            if callback_on_step_end is None:
                return
            offered = {"token_ids": tensors["token_ids"], "accepted": committed}
            chosen = {name: offered[name] for name in callback_on_step_end_tensor_inputs}
            changed = callback_on_step_end(self, step, low, chosen) or {}
            if "token_ids" in changed and changed["token_ids"] is not offered["token_ids"]:
                offered["token_ids"].copy_(changed["token_ids"])
            inner.interrupt = self._interrupt

        with bar:
            output = inner(
                prompt if isinstance(prompt, (str, list, tuple)) else list(prompt),
                negative_prompt=negative_prompt,
                num_images_per_prompt=num_images_per_prompt,
                guidance_scale=guidance_scale,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                generator=generator,
                output_type="codes" if output_type == "latent" else "pil" if output_type == "pil" else "pt",
                callback_on_step_end=step_end,
                callback_on_step_end_tensor_inputs=("committed", "token_ids"),
            )
        codes = output.codes[:, 0]
        images = codes if output_type == "latent" else output.images
        if output_type == "np":
            images = images.permute(0, 2, 3, 1).cpu().numpy()
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        return ARImageOutput(images=images, token_ids=codes, stats=output.stats)


def _onload(model: Any) -> None:
    """Bring a model that ``enable_model_cpu_offload`` keeps on the CPU to its device (its parts are called one by one)."""
    hook = getattr(model, "_hf_hook", None)
    if hook is not None and type(hook).__name__ == "CpuOffload":
        hook.pre_forward(model)


def _fetch(name: str | Path, file: str, revision: str | None) -> str | None:
    """Local path of a file of a folder or hub repository, ``None`` where it has none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return str(path) if path.is_file() else None
    from transformers.utils import cached_file

    try:
        return cached_file(str(name), file, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None


def _is_pipeline(name: str | Path, revision: str | None) -> bool:
    file = _fetch(name, "model_index.json", revision)
    if file is None:
        return False
    found = json.loads(Path(file).read_text(encoding="utf-8")).get("_class_name")
    if found not in (ARImagePipeline.__name__, "GlmImagePipeline"):
        raise ValueError(f"{name} holds a {found}, not an ARImagePipeline; load it with diffusers")
    return found == ARImagePipeline.__name__
