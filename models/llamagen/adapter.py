"""LlamaGen behind the adapter interface, and loading of whole models (GPT, tokenizer, text encoder)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visacc.cache import addresses, allocate, window_mask
from visacc.models.base import (
    Conditioning,
    DecodeState,
    ImageModel,
    LayerStack,
    Layout,
    ModelOutput,
    Proposal,
)
from visacc.models.llamagen.checkpoint import load_gpt, load_vq
from visacc.models.llamagen.compiled import CompiledWindow
from visacc.models.llamagen.converted import is_converted, load_converted
from visacc.models.llamagen.gpt import GPT, PaddingRule, padded_prefix_mask
from visacc.models.llamagen.released import RELEASED, TEXT_ENCODER, fetch, released_file
from visacc.models.llamagen.text import TextConditioner
from visacc.models.llamagen.vq import VQModel
from visacc.reading import read_object

GPT_FILE, VQ_FILE, TEXT_FOLDER, SETTINGS_FILE = "gpt.safetensors", "vq.safetensors", "text", "model.json"


class LlamaGen(ImageModel):
    """A LlamaGen GPT with its tokenizer and, for text prompts, its text encoder.

    Guidance runs the null condition as a second row per sample, with the *same* caption mask as the prompt,
    because the models were trained so.

    Args:
        gpt, vq: the two networks; their code counts must agree.
        text: text encoder of a text-conditional GPT (without one, only :meth:`condition` can be used).
        name: shown in messages and statistics.
        defaults: sampling defaults of this checkpoint.
    """

    provides = frozenset({"grid", "codebook", "hidden", "tree_mask"})
    pixel_rule = "half-up"  # clamp(127.5 x + 128) cut off, for x in [-1, 1]

    def __init__(
        self,
        gpt: GPT,
        vq: VQModel,
        text: TextConditioner | None = None,
        *,
        name: str = "llamagen",
        defaults: dict[str, Any] | None = None,
    ) -> None:
        cfg = gpt.config
        if cfg.vocab_size != vq.config.codebook_size:
            raise ValueError(
                f"{name}: the GPT has {cfg.vocab_size} codes and the tokenizer {vq.config.codebook_size}; "
                "they do not belong together"
            )
        if text is not None and (text.width, text.length) != (cfg.caption_dim, cfg.cls_token_num):
            raise ValueError(
                f"{name}: the GPT takes captions of {cfg.cls_token_num} x {cfg.caption_dim} features, the "
                f"text encoder gives {text.length} x {text.width}"
            )
        self.name, self.gpt, self.vq, self.text = name, gpt, vq, text
        self.layout = Layout((1, cfg.grid, cfg.grid), cfg.vocab_size)
        self.settings = dict(defaults or {})
        self._compiled: CompiledWindow | None = None
        self.feature_size = cfg.dim

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.settings

    @property
    def module(self) -> nn.Module:
        return self.gpt

    @property
    def codebook(self) -> Tensor:
        """Unit code vectors ``[V, C]``: the tokenizer compares directions."""
        return nn.functional.normalize(self.vq.quantize.embedding.weight, dim=-1)

    # ---- prompts ------------------------------------------------------------------------------------------
    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Conditioning:
        """Class labels, or text prompts with optional negative prompts ("" stands for the null caption)."""
        if self.gpt.config.model_type == "c2i":
            if negative is not None:
                raise ValueError(f"{self.name} is class-conditional and takes no negative prompts")
            return self.condition(torch.tensor([self._label(p) for p in prompts]))
        wrong = [p for p in prompts if not isinstance(p, str)]
        if wrong:
            raise ValueError(f"{self.name} takes text prompts, got {wrong[0]!r}")
        if self.text is None:
            raise ValueError(f"{self.name} was built without a text encoder and cannot take text prompts")
        cond = self.condition(*self.text(prompts))
        if negative is not None and any(negative):
            self._add_negative(cond, negative)
        return cond

    def _label(self, prompt: Any) -> int:
        classes = self.gpt.config.num_classes
        number = int(prompt) if isinstance(prompt, str) and prompt.strip().isdecimal() else prompt
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < classes:
            what = "a text prompt" if isinstance(prompt, str) else f"{prompt!r}"
            raise ValueError(
                f"{self.name} is class-conditional: it takes class labels 0..{classes - 1}, not {what}"
            )
        return number

    def _add_negative(self, cond: Conditioning, negative: Sequence[Any]) -> None:
        """Put the negative captions, with their own masks, where the null caption would stand."""
        assert self.text is not None
        count = cond.batch
        features, mask = self.gpt.null_condition(count).clone(), cond.data["mask"].clone()
        rows = [i for i, text in enumerate(negative) if text]
        given, given_mask = self.text([negative[i] for i in rows])
        features[rows], mask[rows] = given.to(features), given_mask.to(mask.device)
        cond.data |= {"negative": features, "negative_mask": mask}

    def condition(self, cond: Tensor, mask: Tensor | None = None) -> Conditioning:
        """Conditioning from labels int64 ``[B]``, or caption features ``[B, T, C]`` with mask ``[B, T]``."""
        data = {"cond": cond.to(self.device)}
        shape = (cond.shape[0], self.gpt.config.prefix_len)
        full = torch.ones(shape, dtype=torch.bool, device=self.device)
        if mask is not None and tuple(mask.shape) != shape:
            raise ValueError(f"the caption mask must be {list(shape)}, got {list(mask.shape)}")
        data["mask"] = full if mask is None else mask.to(self.device).bool()
        return Conditioning(cond.shape[0], data)

    def dummy_conditioning(self, batch: int) -> Conditioning:
        mask = torch.ones(batch, self.gpt.config.prefix_len, dtype=torch.bool)
        return self.condition(self.gpt.null_condition(batch), mask)

    # ---- decoding -----------------------------------------------------------------------------------------
    def prefill(
        self,
        cond: Conditioning,
        *,
        guidance: bool,
        window: int,
        hidden: bool = False,
        padding: PaddingRule = "self",
    ) -> tuple[DecodeState, ModelOutput]:
        """See the base class; ``padding`` says what padded caption slots see (:func:`padded_prefix_mask`)."""
        cfg, device = self.gpt.config, self.device
        prefix, mask = self.gpt.embed_prefix(cond.data["cond"]), cond.data["mask"]
        if guidance:
            null = cond.data.get("negative", self.gpt.null_condition(cond.batch))
            prefix = torch.cat([prefix, self.gpt.embed_prefix(null)])
            mask = torch.cat([mask, cond.data.get("negative_mask", mask)])
        rows = prefix.shape[0]
        kv = allocate(
            cfg.n_layer,
            rows,
            cfg.kv_heads,
            cfg.max_len + window,
            cfg.head_dim,
            dtype=prefix.dtype,
            device=device,
        )
        order = torch.arange(cfg.prefix_len, device=device).expand(rows, -1)
        seen = padded_prefix_mask(mask, padding)
        out = self.gpt.forward_window(
            prefix,
            order,
            order,
            seen,
            kv,
            cfg.prefix_len,
            logits="last",
            hidden=(cfg.n_layer,) if hidden else (),
        )
        state = DecodeState(
            batch=cond.batch,
            branches=2 if guidance else 1,
            kv=kv,
            lengths=torch.zeros(cond.batch, dtype=torch.int64, device=device),
            prefix=cfg.prefix_len,
            prefix_mask=mask,
            limit=cfg.prefix_len,
        )
        return state, self._output(state, out.logits, out.hidden[0] if hidden else None)

    def head(self, hidden: Tensor) -> Tensor:
        return self.gpt.output(hidden.to(self.gpt.output.weight.dtype)).float()

    def stack(self) -> LayerStack:
        return LayerStack(self.gpt, self.gpt.blocks, "forward_window", "window")

    def compile(self) -> None:
        self._compiled = CompiledWindow(self.gpt)
        self.static_shapes = True

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        branches = state.branches
        window = (
            proposal.tokens.repeat(branches, 1),
            (proposal.positions + state.prefix).repeat(branches, 1),
            (addresses(state, proposal) + state.prefix).repeat(branches, 1),
            window_mask(state, proposal),
        )
        if self._compiled is not None and not hidden and state.limit == state.kv.shape[4]:
            return self._output(state, self._compiled(*window, state.kv))
        out = self.gpt.forward_window(
            *window,
            state.kv,
            state.limit,
            hidden=(self.gpt.config.n_layer,) if hidden else (),
        )
        return self._output(state, out.logits, out.hidden[0] if hidden else None)

    @staticmethod
    def _output(state: DecodeState, logits: Tensor, hidden: Tensor | None = None) -> ModelOutput:
        uncond = logits[state.batch :] if state.branches == 2 else None
        return ModelOutput(logits[: state.batch], uncond, hidden)

    def decode(self, codes: Tensor) -> Tensor:
        return ((self.vq.decode_codes(codes[:, 0]) + 1) / 2).clamp(0, 1)


# ---- loading ----------------------------------------------------------------------------------------------
def load(
    name_or_path: str | Path,
    *,
    image_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    vq: str | Path | None = None,
    text_encoder: str | Path | None = None,
    clean_caption: bool | None = None,
) -> LlamaGen:
    """Load a whole LlamaGen model.

    Args:
        name_or_path: a released name (see :data:`visacc.models.llamagen.RELEASED`), a GPT file, or a folder
            with one GPT file. A folder holds official files, or ``gpt.safetensors``, ``vq.safetensors``,
            ``text/`` (a T5 encoder and its tokenizer) and optionally ``model.json`` (``name``, ``defaults``,
            ``clean_caption``). Or it holds a text model in the transformers-style layout of LANTERN's targets
            (``config.json``, ``model.safetensors``).
        image_size: pixels along a side, where the file does not tell.
        vq, text_encoder: tokenizer file and T5 (hub id or folder) if they do not lie beside the GPT.
        clean_caption: override the caption cleaning (default on).
    """
    path = _gpt_path(name_or_path)
    known = released_file(path)
    folder = path.parent
    settings = _settings(folder)
    vq_model = load_vq(_vq_path(path, vq), device=device)
    if is_converted(folder):
        gpt = load_converted(folder, dtype=dtype, device=device)
    else:
        gpt = load_gpt(path, image_size, downsample=vq_model.config.downsample, dtype=dtype, device=device)
    text = None
    if gpt.config.model_type == "t2i":
        clean = settings.get("clean_caption", True) if clean_caption is None else clean_caption
        text = TextConditioner.from_pretrained(
            text_encoder or _text_source(folder),
            gpt.config.cls_token_num,
            clean=clean,
            dtype=dtype,
            device=device,
        )
    defaults = dict(settings.get("defaults", {}))
    if known is not None:
        defaults = {"guidance_scale": known.guidance, "top_k": known.top_k} | defaults
    name = settings.get("name") or (known.name if known is not None else path.stem)
    model = LlamaGen(gpt, vq_model, text, name=name, defaults=defaults)
    model.folder = folder
    return model


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return {}
    content = read_object(path)
    if not isinstance(content.get("defaults", {}), dict):
        raise ValueError(f"'defaults' in {path} must be an object of sampling settings")
    return content


def _gpt_path(name_or_path: str | Path) -> Path:
    if str(name_or_path) in RELEASED:
        entry = RELEASED[str(name_or_path)]
        if entry.kind == "vq":
            raise ValueError(f"{entry} is a tokenizer; ask for one of the GPTs that use it")
        return fetch(entry.name)
    path = Path(name_or_path)
    if path.is_file():
        known = released_file(path)
        if known is not None and known.kind == "vq":
            raise ValueError(f"{path} is {known}; name the GPT and pass this file as vq=")
        return path
    if not path.is_dir():
        released = ", ".join(e.name for e in RELEASED.values() if e.kind != "vq")
        raise ValueError(f"{name_or_path} is neither a file, a folder nor a released model ({released})")
    if is_converted(path):
        return path / "model.safetensors"
    names = [GPT_FILE, *(e.file for e in RELEASED.values() if e.kind != "vq")]
    found = [path / name for name in names if (path / name).is_file()]
    if len(found) > 1:
        raise ValueError(f"{path} holds several GPTs, name one: {', '.join(f.name for f in found)}")
    if not found:
        raise ValueError(f"{path} holds no LlamaGen GPT (looked for {', '.join(names)})")
    return found[0]


def _vq_path(gpt_path: Path, given: str | Path | None) -> Path:
    """The tokenizer: as given (file or released name), beside the GPT, or the released one for it."""
    if given is not None:
        return fetch(str(given)) if str(given) in RELEASED else Path(given)
    known = released_file(gpt_path)
    names = [VQ_FILE] if known is None else [RELEASED[known.tokenizer].file, VQ_FILE]
    for name in names:
        if (gpt_path.parent / name).is_file():
            return gpt_path.parent / name
    if known is not None:
        return fetch(known.tokenizer)
    raise ValueError(f"no tokenizer beside {gpt_path} (looked for {VQ_FILE}); name it with vq=")


def _text_source(folder: Path) -> str:
    for name in (TEXT_FOLDER, TEXT_ENCODER.split("/")[1]):
        if (folder / name).is_dir():
            return str(folder / name)
    return TEXT_ENCODER
