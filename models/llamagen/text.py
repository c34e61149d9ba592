"""Captions to LlamaGen conditioning: the official caption cleaning and left-padded T5 features.

The cleaning rules are those of the DeepFloyd / PixArt family that LlamaGen's training captions went through.
They also remove legitimate content ("4x4", long numbers, CJK text); they are the default because released
weights expect cleaned captions, and can be switched off.
"""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor

from visacc.memory import out_of_memory

_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_CJK = "\u31c0-\u31ef\u31f0-\u31ff\u3200-\u32ff\u3300-\u33ff\u3400-\u4dbf\u4dc0-\u4dff\u4e00-\u9fff"
_DOMAIN = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)"
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"


def _rules(*pairs: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


# The order of the rules matters: each one works on what the ones before have left.
_LINKS = _rules(
    (r"<person>", "person"),
    (rf"\b((?:https?:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN}))", ""),
    (rf"\b((?:www:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN}))", ""),
)
_SYMBOLS = _rules(
    (r"@[\w\d]+\b", ""),
    (rf"[{_CJK}]+", ""),
    (rf"[{_DASHES}]+", "-"),
    (r"[`´«»“”¨]", '"'),
    (r"[‘’]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # ip addresses
    (r"\d:\d\d\s+$", ""),  # article ids
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"[\S]+\.(?:{_FILES})", ""),
    (r"[\"\']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_JOINED = re.compile(r"[-_]")
_LISTINGS = _rules(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article numbers: jc6640
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),  # jc6640vc
    (r"\b\d+[a-zA-Z]+\d+\b", ""),  # 6640vc231
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes; the second letter is Cyrillic
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
    (r"^[\'\_,\-\:;]", ""),
    (r"[\'\_,\-\:\-\+]$", ""),
    (r"^\.\S+$", ""),
)


def _apply(rules: list[tuple[re.Pattern[str], str]], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def clean_once(caption: str) -> str:
    """One pass of the official caption cleaning."""
    import ftfy
    from bs4 import BeautifulSoup

    text = _apply(_LINKS, unquote_plus(caption).strip().lower())
    with warnings.catch_warnings():
        # a caption that looks like a file name or an address is no mistake here
        warnings.simplefilter("ignore")
        text = BeautifulSoup(text, features="html.parser").text
    text = _apply(_SYMBOLS, text)
    if len(_JOINED.findall(text)) > 3:  # this-is-my-cute-cat
        text = _JOINED.sub(" ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _apply(_LISTINGS, text).strip()


def clean_caption(caption: str) -> str:
    """The text that is tokenised: the official programs clean every caption twice."""
    return clean_once(clean_once(caption))


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Right-padded encoder output to LlamaGen's layout: valid vectors last, zeros before them.

    features ``[B, T, C]``, mask ``[B, T]`` with the valid entries first -> features ``[B, T, C]``, bool mask.
    """
    length = mask.shape[1]
    valid = mask.bool().sum(1, keepdim=True)
    order = (torch.arange(length, device=mask.device) + valid) % length
    rolled = features.gather(1, order[..., None].expand_as(features))
    mask = torch.arange(length, device=mask.device) >= length - valid
    return rolled * mask[..., None], mask


class TextConditioner:
    """T5 encoder and tokenizer -> caption features of a fixed number of slots, left-padded.

    Attributes:
        encoder: a transformers ``T5EncoderModel``.
        tokenizer: its tokenizer.
        length: slots of the prefix (the GPT's ``cls_token_num``).
        clean: clean captions as the official programs do.
    """

    def __init__(self, encoder: Any, tokenizer: Any, length: int, *, clean: bool = True) -> None:
        self.encoder, self.tokenizer, self.length, self.clean = encoder, tokenizer, length, clean

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        length: int,
        *,
        clean: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> TextConditioner:
        """``source``: a hub id such as google/flan-t5-xl, or a folder with a T5 model and its tokenizer."""
        from transformers import AutoTokenizer, T5EncoderModel

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(source))
            encoder: Any = T5EncoderModel.from_pretrained(str(source), dtype=dtype)
        except Exception as error:  # damaged files of a folder raise anything
            if out_of_memory(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"cannot load the T5 text encoder {str(source)!r}: {reason}") from error
        return cls(encoder.to(device).eval().requires_grad_(False), tokenizer, length, clean=clean)

    @property
    def width(self) -> int:
        """Features per slot."""
        return int(self.encoder.config.d_model)

    def prepare(self, prompts: Sequence[str]) -> list[str]:
        """Cleaned prompts; a prompt that is empty, or of which cleaning leaves nothing, is an error."""
        texts = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise ValueError(f"a prompt must be a string, got {type(prompt).__name__}: {prompt!r}")
            text = clean_caption(prompt) if self.clean else prompt
            if not prompt.strip():
                raise ValueError("the prompt is empty")
            if not text.strip():
                raise ValueError(f"caption cleaning leaves nothing of the prompt {prompt!r}; switch it off")
            texts.append(text)
        return texts

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Prompts -> features ``[B, length, width]`` in the encoder's dtype, bool mask ``[B, length]``."""
        texts = self.prepare(prompts)
        full = self.tokenizer(texts, add_special_tokens=True)["input_ids"]
        for prompt, ids in zip(prompts, full, strict=True):
            if len(ids) > self.length:
                warnings.warn(
                    f"prompt of {len(ids)} tokens cut to {self.length}: {prompt[:60]!r}...", stacklevel=2
                )
        batch = self.tokenizer(
            texts,
            max_length=self.length,
            padding="max_length",
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device = next(self.encoder.parameters()).device
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
        features = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return left_pad(features, mask)
