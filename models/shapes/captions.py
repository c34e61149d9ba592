"""Captions and prompts of the shapes world: GenEval's six tasks, in GenEval's metadata layout.

`sample(seed)` draws a (caption, metadata, scene) triple for training. `heldout_prompts()` is the fixed test
list: every prompt in it contains a combination that no training caption contains.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visacc.models.shapes.world import COLOURS, SHAPES, Scene, place, random_background

Metadata = dict[str, Any]

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
TASK_WEIGHTS = (0.10, 0.16, 0.18, 0.16, 0.20, 0.20)
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: ("two", "2"), 3: ("three", "3"), 4: ("four", "4")}
OPENINGS = ("a photo of ", "", "a picture of ", "an image of ")
JOINS = (" and ", " with ", " next to ")
RELATION_PHRASES = {
    "left of": ("left of", "to the left of", "on the left of"),
    "right of": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath"),
}


@dataclass(frozen=True)
class Sample:
    """One training pair: the caption, what it promises (GenEval metadata) and the scene that keeps it."""

    caption: str
    metadata: Metadata
    scene: Scene


def _held(*parts: object, rate: float) -> bool:
    """Whether a combination belongs to the held-out split; a fixed hash, the same on every machine."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < rate


#: Colour/shape pairs that no training caption names: each colour at most once, each shape at most twice.
HELD_PAIRS = frozenset(
    {
        ("red", "star"),
        ("orange", "cross"),
        ("green", "circle"),
        ("blue", "triangle"),
        ("purple", "square"),
        ("white", "diamond"),
        ("pink", "triangle"),
        ("black", "star"),
    }
)
#: (opening, shape) pairs of single-object captions left out of training.
HELD_OPENINGS = frozenset((OPENINGS[i % 4], shape) for i, shape in enumerate(SHAPES))
#: (number, shape) pairs of counting captions left out of training.
HELD_COUNTS = frozenset({(2, "star"), (3, "square"), (4, "circle")})


def is_held_out(tag: str, opening: str, metadata: Metadata) -> bool:
    """Whether a caption contains a combination reserved for testing."""
    include = metadata["include"]
    if any((clause.get("color"), clause["class"]) in HELD_PAIRS for clause in include):
        return True
    names = [clause["class"] for clause in include]
    if tag == "single_object":
        return (opening, names[0]) in HELD_OPENINGS
    if tag == "two_object":
        return _held(tag, *names, rate=0.2)
    if tag == "counting":
        return (include[0]["count"], names[0]) in HELD_COUNTS
    if tag == "position":
        return _held(tag, include[1]["position"][0], *names, rate=0.15)
    return False


def article(noun: str) -> str:
    """`noun` with "a" or "an" in front."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    """GenEval's plural: "es" after an s, else "s"."""
    return noun + ("es" if noun.endswith("s") else "s")


def _clause(shape: str, colour: str | None = None, count: int = 1) -> Metadata:
    clause: Metadata = {"class": shape, "count": count}
    if colour is not None:
        clause["color"] = colour
    return clause


def compose(
    tag: str,
    shapes: Sequence[str],
    colours: Sequence[str | None],
    *,
    count: int = 1,
    relation: str | None = None,
    opening: str = OPENINGS[0],
    variant: int = 0,
) -> tuple[str, Metadata]:
    """Caption and GenEval metadata of one request; `variant` picks the phrasing (0 is GenEval's own)."""
    nouns = [f"{colour} {shape}" if colour else shape for shape, colour in zip(shapes, colours, strict=True)]
    metadata: Metadata = {"tag": tag, "include": [], "exclude": []}
    if tag in ("single_object", "colors"):
        metadata["include"] = [_clause(shapes[0], colours[0])]
        body = article(nouns[0])
    elif tag == "counting":
        metadata["include"] = [_clause(shapes[0], count=count)]
        metadata["exclude"] = [_clause(shapes[0], count=count + 1)]
        body = f"{NUMBERS[count][variant % 2]} {plural(nouns[0])}"
    elif tag in ("two_object", "color_attr"):
        metadata["include"] = [_clause(s, c) for s, c in zip(shapes, colours, strict=True)]
        body = article(nouns[0]) + JOINS[variant % 3] + article(nouns[1])
    elif tag == "position":
        if relation is None:
            raise ValueError(f"a position prompt needs a relation: {', '.join(RELATIONS)}")
        # As in GenEval the target clause comes first, the subject that stands in relation to it second.
        subject = _clause(shapes[0], colours[0])
        subject["position"] = [relation, 0]
        metadata["include"] = [_clause(shapes[1], colours[1]), subject]
        body = f"{article(nouns[0])} {RELATION_PHRASES[relation][variant % 3]} {article(nouns[1])}"
    else:
        raise ValueError(f"unknown task {tag!r}; known: {', '.join(TASKS)}")
    metadata["prompt"] = opening + body
    return opening + body, metadata


def _draw_request(rng: np.random.Generator) -> tuple[str, Metadata, list[tuple[str, str]], str | None, str]:
    """One random request: caption, metadata, the objects to draw, their relation, the opening used."""
    tag = str(rng.choice(TASKS, p=TASK_WEIGHTS))
    opening = OPENINGS[int(rng.integers(4))]
    variant = int(rng.choice(3, p=(0.5, 0.25, 0.25)))
    palette = list(COLOURS)
    a, b = (SHAPES[i] for i in rng.permutation(len(SHAPES))[:2])
    first, second = (palette[i] for i in rng.integers(len(palette), size=2))
    relation = None
    if tag in ("single_object", "colors"):
        kinds = [(a, first)]
        named: list[str | None] = [first if tag == "colors" else None]
        caption, metadata = compose(tag, [a], named, opening=opening)
    elif tag == "counting":
        count = int(rng.integers(2, 5))
        # Half of the groups share one colour.
        shared = rng.random() < 0.5
        kinds = [(a, first if shared else palette[int(rng.integers(len(palette)))]) for _ in range(count)]
        caption, metadata = compose(tag, [a], [None], count=count, opening=opening, variant=variant)
    else:
        if tag == "color_attr" and first == second:
            second = palette[(palette.index(first) + int(rng.integers(1, len(palette)))) % len(palette)]
        kinds = [(a, first), (b, second)]
        coloured = tag == "color_attr" or (tag == "position" and rng.random() < 0.5)
        named = [first, second] if coloured else [None, None]
        if tag == "position":
            relation = RELATIONS[int(rng.integers(4))]
        caption, metadata = compose(tag, [a, b], named, relation=relation, opening=opening, variant=variant)
    return caption, metadata, kinds, relation, opening


def request(
    rng: np.random.Generator,
) -> tuple[str, Metadata, list[tuple[str, str]], str | None]:
    """A random permitted request: caption, metadata, objects to draw, relation. Held-out ones are drawn again."""
    while True:
        caption, metadata, kinds, relation, opening = _draw_request(rng)
        if not is_held_out(metadata["tag"], opening, metadata):
            return caption, metadata, kinds, relation


def sample(seed: int) -> Sample:
    """The training pair of a seed."""
    rng = np.random.default_rng(seed)
    caption, metadata, kinds, relation = request(rng)
    return Sample(caption, metadata, Scene(place(rng, kinds, relation), random_background(rng)))


def parse(caption: str) -> tuple[str, dict[str, Any]]:
    """The task and the other arguments of `compose` that write a caption of this world.

    ValueError for a text that `compose` does not write.
    """
    opening = next(text for text in sorted(OPENINGS, key=len, reverse=True) if caption.startswith(text))
    words = caption[len(opening) :].split()
    singular = {shape: shape for shape in SHAPES} | {plural(shape): shape for shape in SHAPES}
    places = [i for i, word in enumerate(words) if word in singular]
    shapes = [singular[words[i]] for i in places]
    colours = [words[i - 1] if words[i - 1] in COLOURS else None for i in places]
    middle = " ".join(words[places[0] + 1 : places[-1]]) if places else ""
    for article_ in ("a", "an"):
        middle = re.sub(rf" {article_}( \w+)?$", "", middle)
    relation, variant, count = None, 0, 1
    for number, forms in NUMBERS.items():
        if words[0] in forms:
            count, variant = number, forms.index(words[0])
    for name, phrases in RELATION_PHRASES.items():
        if middle in phrases:
            relation, variant = name, phrases.index(middle)
    if f" {middle} " in JOINS:
        variant = JOINS.index(f" {middle} ")
    if len(shapes) == 2:
        tag = "position" if relation else "color_attr" if colours[0] else "two_object"
    else:
        tag = "counting" if count > 1 else "colors" if colours and colours[0] else "single_object"
    arguments: dict[str, Any] = {
        "shapes": shapes,
        "colours": colours,
        "count": count,
        "relation": relation,
        "opening": opening,
        "variant": variant,
    }
    if not 1 <= len(shapes) <= 2 or compose(tag, **arguments)[0] != caption:
        raise ValueError(f"not a caption of the shapes world: {caption!r}")
    return tag, arguments


def altered(caption: str, rng: np.random.Generator) -> str:
    """The caption with one thing said differently, in as many words: what its picture does not show.

    Pairs: nouns exchanged where colours or places belong to them (most of the time), else another noun or
    colour; counting: mostly another number. Never a held-out combination (drawn again).
    """
    tag, arguments = parse(caption)
    palette = list(COLOURS)
    while True:
        shapes, colours, count = list(arguments["shapes"]), list(arguments["colours"]), arguments["count"]
        i, coin = int(rng.integers(len(shapes))), rng.random()
        if tag in ("position", "color_attr") and coin < 0.8:
            shapes.reverse()
        elif tag == "counting" and coin < 0.75:
            count = int(rng.choice([n for n in NUMBERS if n != count]))
        elif colours[i] and coin < 0.9:
            colours[i] = str(rng.choice([c for c in palette if c not in colours]))
        else:
            shapes[i] = str(rng.choice([s for s in SHAPES if s not in shapes]))
        changed = arguments | {"shapes": shapes, "colours": colours, "count": count}
        text, metadata = compose(tag, **changed)
        if not is_held_out(tag, arguments["opening"], metadata):
            return text


def scene_for(metadata: Metadata, seed: int) -> Scene:
    """A random scene that keeps what `metadata` asks for (any prompt, held out or not)."""
    rng = np.random.default_rng(seed)
    palette = list(COLOURS)

    def colour(clause: Metadata) -> str:
        return clause.get("color") or palette[int(rng.integers(len(palette)))]

    clauses = list(metadata["include"])
    relation = None
    if metadata["tag"] == "position":
        clauses = [clauses[1], clauses[0]]
        relation = clauses[0]["position"][0]
    kinds = [(clause["class"], colour(clause)) for clause in clauses for _ in range(clause["count"])]
    return Scene(place(rng, kinds, relation), random_background(rng))


def heldout_prompts(per_task: int = 24) -> list[Metadata]:
    """The fixed held-out list: up to `per_task` prompts per task, each with a combination unseen in training."""
    candidates: dict[str, list[Metadata]] = {tag: [] for tag in TASKS}

    def consider(tag: str, opening: str, request: tuple[str, Metadata]) -> None:
        if is_held_out(tag, opening, request[1]):
            candidates[tag].append(request[1])

    for opening in OPENINGS:
        for a in SHAPES:
            consider("single_object", opening, compose("single_object", [a], [None], opening=opening))
    for a in SHAPES:
        for count in NUMBERS:
            consider("counting", OPENINGS[0], compose("counting", [a], [None], count=count))
        for colour in COLOURS:
            consider("colors", OPENINGS[0], compose("colors", [a], [colour]))
        for b in SHAPES:
            if a == b:
                continue
            consider("two_object", OPENINGS[0], compose("two_object", [a, b], [None, None]))
            for relation in RELATIONS:
                request = compose("position", [a, b], [None, None], relation=relation)
                consider("position", OPENINGS[0], request)
            for first in COLOURS:
                for second in COLOURS:
                    if first != second:
                        consider("color_attr", OPENINGS[0], compose("color_attr", [a, b], [first, second]))
    chosen = []
    for tag in TASKS:
        order = np.random.default_rng(len(tag)).permutation(len(candidates[tag]))[:per_task]
        chosen += [candidates[tag][i] for i in sorted(order)]
    return chosen


def all_prompts(per_task: int = 60) -> list[Metadata]:
    """A fixed list over all combinations (seen and unseen) in GenEval's own phrasing, `per_task` at most each."""
    chosen: list[Metadata] = []
    for tag in TASKS:
        rng = np.random.default_rng([len(tag), 7])
        seen: dict[str, Metadata] = {}
        for _ in range(per_task * 40):
            a, b = (SHAPES[i] for i in rng.permutation(len(SHAPES))[:2])
            first, second = (list(COLOURS)[i] for i in rng.permutation(len(COLOURS))[:2])
            if tag in ("single_object", "counting"):
                request = compose(tag, [a], [None], count=int(rng.integers(2, 5)) if tag == "counting" else 1)
            elif tag == "colors":
                request = compose(tag, [a], [first])
            elif tag == "position":
                request = compose(tag, [a, b], [None, None], relation=RELATIONS[int(rng.integers(4))])
            else:
                request = compose(tag, [a, b], [first, second] if tag == "color_attr" else [None, None])
            if len(seen) < per_task:
                seen.setdefault(request[0], request[1])
        chosen += seen.values()
    return chosen


def vocabulary() -> list[str]:
    """Every word a caption can contain, sorted, plus a few words that only prompts written by people use."""
    words = {"a", "an", "the", "of", "and", "with", "next", "to", "on", ".", ","}
    for opening in OPENINGS:
        words.update(opening.split())
    for phrases in RELATION_PHRASES.values():
        words.update(" ".join(phrases).split())
    words.update(word for forms in NUMBERS.values() for word in forms)
    words.update(COLOURS, SHAPES, (plural(shape) for shape in SHAPES))
    return sorted(words)
