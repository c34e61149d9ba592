"""A report's page as tests see it: its elements and texts, and that it is whole and alone."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visacc.report.page import build

VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """Text, elements and balance of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str, name: str = "") -> list[dict[str, str]]:
        """Attributes of the elements of a tag (with a class name)."""
        return [a for t, a in self.elements if t == tag and (not name or name in a.get("class", "").split())]


def check_alone(text: str) -> Page:
    """The page is whole, loads nothing, and its ids are its own."""
    page = Page(text)
    assert not page.open
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        for key in ("src", "href", "xlink:href", "action", "poster", "data"):
            target = attributes.get(key)
            if target is None:
                continue
            if tag == "a":
                assert target.startswith(("#", "https://arxiv.org/abs/")), target
                assert not target.startswith("#") or target[1:] in ids
            else:
                assert target.startswith(("data:", "#")), (tag, target)
        assert "srcset" not in attributes
    style = "".join(re.findall(r"<style>.*?</style>", text, re.DOTALL))
    assert "@import" not in style
    assert "url(" not in style
    assert "default-src 'none'" in text
    return page


def pixels(uri: str) -> np.ndarray:
    kind, _, data = uri.partition(";base64,")
    assert kind.startswith("data:image/")
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image.convert("RGB"))


def page_of(*runs: Path, out: Path, **options: Any) -> Page:
    return check_alone(build(runs, out, **options).read_text(encoding="utf-8"))
