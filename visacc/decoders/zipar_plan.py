"""The ZipAR schedule (arXiv 2412.04062): rows of the token grid overlap, each a fixed number of columns
behind the one above.

Cell (r, c) is predicted by the vector of the cell to its left; for c = 0 by the slot before the row, which is
either a row-end token the grammar knows or the last cell of the row above. The latter does not exist yet when
rows overlap: a *stand-in* takes its place, a borrowed token at the true position, and the true token is
    *written back* once it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from visacc.decoders.plan import Feed, Mask, PackedPlan, Pass, pack
from visacc.models.base import Layout

MODES = ("paper", "llamagen", "lumina")
STAND_INS = ("two_up", "row_above_latest")


@dataclass(frozen=True)
class Rows:
    """A layout as rows: ``cells[r][c]`` is the slot of a cell, ``gaps[r]`` the forced slots right before row
    r, and ``tail`` the forced slots behind the last row."""

    cells: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]

    @property
    def height(self) -> int:
        return len(self.cells)

    @property
    def width(self) -> int:
        return len(self.cells[0])

    @property
    def row_ends(self) -> bool:
        """Whether the grammar forces a token between rows."""
        return self.height > 1 and bool(self.gaps[1])


def layout_rows(layout: Layout) -> Rows:
    """Split a layout into rows.

    Raises:
        ValueError: several frames, rows that are interrupted, or row ends on some rows only.
    """
    frames, height, width = layout.grid
    if frames != 1:
        raise ValueError(f"zipar overlaps the rows of one image, but the layout has {frames} frames")
    slots = layout.cell_slots.view(height, width).tolist()
    for r, row in enumerate(slots):
        if row != list(range(row[0], row[0] + width)):
            raise ValueError(
                f"zipar needs rectangular rows of consecutive slots; row {r} of {layout.grid} is interrupted"
            )
    before = [0, *(row[-1] + 1 for row in slots)]
    gaps = tuple(tuple(range(start, row[0])) for start, row in zip(before, slots, strict=False))
    if len({bool(gap) for gap in gaps[1:]}) > 1:
        raise ValueError(
            "zipar needs forced row-end slots after every row or after none; this layout has them on some"
        )
    return Rows(tuple(map(tuple, slots)), gaps, tuple(range(before[-1], layout.total)))


@dataclass(frozen=True)
class Lag:
    """When rows start: row r >= 1 in pass ``base + first + (r - 1) * step``, row 0 in pass ``base``."""

    base: int
    first: int
    step: int

    def start(self, row: int) -> int:
        return self.base + (0 if row == 0 else self.first + (row - 1) * self.step)


def row_lag(rows: Rows, window: int, mode: str) -> Lag:
    """Row starts of a mode: ``paper`` overlaps every row by ``window`` columns; ``llamagen`` decodes row 0
    alone; ``lumina`` counts the row-end token as a column (lag ``window - 1``) and feeds header tokens one a
    pass.
    """
    header = len(rows.gaps[0])
    if mode == "lumina":
        if window < 2:
            raise ValueError(
                "zipar mode 'lumina' counts the token before a row as a column, so window must be at least 2"
            )
        step = min(window - 1, rows.width)
        return Lag(header, step, step)
    step = min(window, rows.width)
    return Lag(min(header, 1), rows.width if mode == "llamagen" else step, step)


def borrowed(rows: Rows, lag: Lag, row: int, stand_in: str) -> int:
    """Slot whose token stands in for the unknown last token of row ``row - 1`` when ``row`` starts."""

    def decided(above: int) -> int:
        return min(lag.start(row) - lag.start(above), rows.width)

    if stand_in == "row_above_latest" or row == 1:
        return rows.cells[row - 1][decided(row - 1) - 1]
    return rows.cells[row - 2][decided(row - 2) - 1]


def zipar_plan(
    layout: Layout,
    window: int,
    *,
    mode: str = "paper",
    unwritten: str = "mask",
    stand_in: str = "two_up",
    stand_in_visible: bool = True,
    refresh_row_end: bool = False,
) -> PackedPlan:
    """The packed schedule; the options are those of :class:`visacc.decoders.zipar.ZipAR`."""
    rows = layout_rows(layout)
    lag = row_lag(rows, window, mode)
    last = rows.height - 1
    passes = [Pass() for _ in range(lag.start(last) + rows.width)]
    _header(rows, passes, one_by_one=mode == "lumina")
    for r, cells in enumerate(rows.cells):
        start = lag.start(r)
        if start > 0:
            passes[start].feeds += _row_start(rows, lag, r, stand_in, stand_in_visible)
            if r:
                passes[start].decided.update(dict.fromkeys(rows.gaps[r]))
            # the start vectors are the last ones appended so far: rows below append theirs later
            passes[start].decided[cells[0]] = len(passes[start].feeds) - 1
        else:
            passes[0].decided[cells[0]] = 0
        for c in range(1, rows.width):
            one = passes[start + c]
            one.feeds.append(Feed(cells[c - 1], cells[c - 1]))
            one.decided[cells[c]] = len(one.feeds) - 1
        if r < last:
            _write_back(rows, lag, r, passes, refresh_row_end)
    passes[-1].decided.update(dict.fromkeys(rows.tail))
    masks: dict[str, Mask] = {"mask": "filled_causal", "zero": "addr_causal"}
    return pack(layout.total, passes, masks[unwritten])


def _header(rows: Rows, passes: list[Pass], *, one_by_one: bool) -> None:
    """Forced slots before the first row. Their tokens are known, so one pass can feed them all."""
    header = rows.gaps[0]
    for slot in header:
        passes[slot if one_by_one else min(slot, 1)].decided[slot] = 0 if slot == 0 else None
        if one_by_one and slot:
            passes[slot].feeds.append(Feed(slot - 1, slot - 1))


def _row_start(rows: Rows, lag: Lag, row: int, stand_in: str, visible: bool) -> list[Feed]:
    """Vectors fed when a row starts; the last one predicts its first cell."""
    gap = rows.gaps[row]
    if gap:
        fed = gap[-1:] if row == 0 and lag.base > 1 else gap
        return [Feed(slot, slot) for slot in fed]
    slot = rows.cells[row - 1][-1]
    if lag.start(row) - lag.start(row - 1) >= rows.width:
        return [Feed(slot, slot)]
    return [Feed(slot, borrowed(rows, lag, row, stand_in), keep=visible)]


def _write_back(rows: Rows, lag: Lag, row: int, passes: list[Pass], refresh: bool) -> None:
    """Feed a finished row's last token, which nobody to its right does. With the lag of a full row it starts
    the next row, which feeds it anyway."""
    done = lag.start(row) + rows.width
    gap = rows.gaps[row + 1]
    if not gap and lag.start(row + 1) == done:
        return
    feeds = [Feed(rows.cells[row][-1], rows.cells[row][-1])]
    if refresh and gap and lag.start(row + 1) != done:
        feeds += [Feed(slot, slot) for slot in gap]
    passes[done].feeds += feeds
