"""The file that ``visacc caption`` writes: one JSON object per line, taken up again where an earlier run stopped."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from visacc.reading import as_object, read_object
from visacc.writing import write_json


def answered(out: Path) -> set[tuple[str, str]]:
    """(image, prompt) pairs that a JSONL file already answers.

    A last line that a kill or a full disk left unfinished is cut off, once all lines before it have turned out to be ours.
    """
    if not out.exists():
        return set()
    try:
        data = out.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {out}: {error.strerror or error}") from error
    known: set[tuple[str, str]] = set()
    *whole, last = data.split(b"\n")
    for number, line in enumerate(whole, 1):
        if line.strip():
            _note(known, line, f"{out}, line {number}")
    if last:
        begin = b'{"image":'
        if not (last.startswith(begin) or begin.startswith(last)):
            _note(known, last, f"{out}, line {len(whole) + 1}")
        try:
            _note(known, last, "")
            end = b"\n"
        except ValueError:
            end = b""
        with out.open("r+b") as file:
            file.seek(len(data) if end else len(data) - len(last))
            file.write(end)
            file.truncate()
    return known


def _note(known: set[tuple[str, str]], line: bytes, where: str) -> None:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no text in UTF-8; remove it or write to another file") from error
    try:
        row = as_object(text, where)
    except ValueError as error:
        raise ValueError(f"{error}; remove it or write to another file") from error
    if not (isinstance(row.get("image"), str) and isinstance(row.get("prompt"), str)):
        raise ValueError(f"{where} names no image and prompt; write to another file")
    if "text" in row:
        known.add((row["image"], row["prompt"]))


def opened(out: Path) -> IO[str]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("a", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write to {out}: {error.strerror or error}") from error


def same_settings(out: Path, settings: dict[str, Any], *, resumes: bool) -> None:
    """Note the settings of a run beside its file, or refuse to add to one that was made with others.

    Args:
        settings: values that JSON can hold. resumes: the file has answers already.
    """
    note = out.with_name(f"{out.name}.settings.json")
    if resumes and note.exists():
        before = read_object(note)
        changed = [
            f"{name} {before.get(name)!r} -> {value!r}"
            for name, value in settings.items()
            if before.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{out} holds answers made with other settings ({', '.join(changed)}): write to another file, or remove it"
            )
    write_json(note, settings)
