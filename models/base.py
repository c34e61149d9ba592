"""The narrow waist between decoders and models: layout, proposals, decode state and the adapter interface.

Conventions used by every adapter and every decoder
- *Slots* number the generated sequence 0..total-1. Most slots hold an image code; a few may be forced by the model's
  grammar (row ends, size headers). A forced slot has a one-symbol law: decoders see it as code 0 with probability 1, the
  adapter feeds the model the real id.
- Codes are 0..vocab-1 whatever the model's own vocabulary looks like; the adapter maps.
- Node 0 of a proposal is the newest committed token (its K/V is not cached yet); output ``i`` of a forward is the law
  of the slot after node ``i``.
- Rows of the model's batch are branch-major: all conditional rows first, then all unconditional ones.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from visacc.sharding import Shards


@dataclass(frozen=True)
class Layout:
    """Where the generated slots lie on the token grid.

    Args:
        grid: (frames, rows, columns) of the token grid.
        vocab: number of image codes.
        forced: per slot the model id that the grammar forces there, or -1 for an image slot; ``None`` means that every
            slot is an image slot in raster order.
    """

    grid: tuple[int, int, int]
    vocab: int
    forced: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        images = self.total if self.forced is None else sum(f < 0 for f in self.forced)
        if images != self.n_image:
            raise ValueError(
                f"layout has {images} image slots but its grid {self.grid} has {self.n_image} cells"
            )

    @property
    def n_image(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def total(self) -> int:
        return self.n_image if self.forced is None else len(self.forced)

    @cached_property
    def forced_ids(self) -> Tensor | None:
        """int64 [total]: forced model id or -1; ``None`` when nothing is forced."""
        return None if self.forced is None else torch.tensor(self.forced, dtype=torch.long)

    @cached_property
    def cell_slots(self) -> Tensor:
        """int64 [n_image]: slot of every grid cell in raster order (t, y, x)."""
        if self.forced is None:
            return torch.arange(self.total)
        return torch.tensor([i for i, f in enumerate(self.forced) if f < 0], dtype=torch.long)

    def neighbour(self, dt: int = 0, dy: int = 0, dx: int = 0) -> Tensor:
        """int64 [total]: slot of the cell at the given offset, -1 at forced slots and outside of the grid."""
        t, h, w = self.grid
        cell = torch.arange(self.n_image)
        frame, row, column = cell // (h * w) + dt, cell // w % h + dy, cell % w + dx
        inside = (frame >= 0) & (frame < t) & (row >= 0) & (row < h) & (column >= 0) & (column < w)
        target = ((frame * h + row) * w + column).clamp(0, self.n_image - 1)
        result = torch.full((self.total,), -1, dtype=torch.long)
        result[self.cell_slots] = torch.where(inside, self.cell_slots[target], -1)
        return result

    def to_grid(self, sequence: Tensor) -> Tensor:
        """Codes [B, total] -> [B, T, H, W], forced slots dropped."""
        return sequence[:, self.cell_slots.to(sequence.device)].unflatten(1, self.grid)


@dataclass
class Proposal:
    """Tokens offered to one target forward.

    Attributes:
        tokens: int64 [B, N] codes; node 0 is the newest committed token.
        positions: int64 [B, N] slot that each token occupies (clamped to the layout where not live).
        live: bool [B, N]; padding nodes are False, their outputs are never used.
        address: int64 [B, N] cache address (relative to the end of the prefix) that a node's K/V is written to, or
            ``None`` for ``lengths + arange(N)``: chains and trees.
        visible: bool [B, N, N], query x key among the nodes (own node included), or ``None`` for a causal chain.
        context: bool [B, L], which cached addresses are seen, or ``None`` for all below ``lengths``. A bool [B, N, L] says
            it for each node, this proposal's own addresses included; ``visible`` is then not read.
        reach: host-side bound, no address written or seen reaches it; ``None`` where only the device knows.
        special: int64 [N], the same for all rows: -1 feeds the node's code, j >= 0 feeds the model's special input j
            instead (LPD's query vector, the middle tokens of next-block models).
        outputs: int64 [M], nodes whose logits are wanted; ``None`` for all.
        full: a promise that lets adapters skip the mask: all rows stand at the same place, ``reach`` is exact, and every
            node sees everything below it. The other fields say the same.
    """

    tokens: Tensor
    positions: Tensor
    live: Tensor
    address: Tensor | None = None
    visible: Tensor | None = None
    context: Tensor | None = None
    reach: int | None = None
    special: Tensor | None = None
    outputs: Tensor | None = None
    full: bool = False

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def take(self, values: Tensor) -> Tensor:
        """Per-node values [rows, N, ...] of the nodes whose outputs are wanted."""
        return values if self.outputs is None else values[:, self.outputs]


@dataclass
class ModelOutput:
    """Logits of one forward, float32, in code space.

    Attributes:
        logits: [B, N, V] of the conditional branch.
        uncond: [B, N, V] of the unconditional branch, ``None`` without guidance.
        hidden: [B, N, D] or [2B, N, D] features of the last layer where the adapter was asked for them.
    """

    logits: Tensor
    uncond: Tensor | None = None
    hidden: Tensor | None = None


@dataclass
class DecodeState:
    """What an adapter keeps for a batch between forwards.

    Attributes:
        batch: number of samples B.
        branches: 1, or 2 with guidance; the model runs ``branches * B`` rows, branch-major.
        kv: [layers, 2, rows, kv heads, capacity, head dim], slot-addressed.
        lengths: int64 [B] image slots whose K/V is committed.
        prefix: number of cache slots that the prompt takes (the same for all rows).
        prefix_mask: bool [rows, prefix], True where the prompt slot is real.
        limit: host-side bound: no committed or proposed address reaches it in the next forward.
        extra: whatever else an adapter needs; tensors in it carry rows first.
    """

    batch: int
    branches: int
    kv: Tensor
    lengths: Tensor
    prefix: int
    prefix_mask: Tensor
    limit: int
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def select(self, rows: Tensor) -> None:
        """Keep only the samples ``rows`` (int64 [B']), in that order."""
        both = torch.cat([rows + i * self.batch for i in range(self.branches)])
        self.kv = self.kv[:, :, both]
        self.prefix_mask = self.prefix_mask[both]
        self.lengths = self.lengths[rows]
        self.extra = {k: v[both] if isinstance(v, Tensor) else v for k, v in self.extra.items()}
        self.batch = rows.numel()


@dataclass
class Conditioning:
    """Encoded prompts of B samples; the fields an adapter fills are its own business.

    Attributes:
        batch: number of samples.
        data: tensors with the sample as first dimension (features, masks, ids, labels).
        has_uncond: whether an unconditional branch can be built from it.
    """

    batch: int
    data: dict[str, Any]
    has_uncond: bool = True


@dataclass(frozen=True)
class LayerStack:
    """The part of a network that can be spread over processes.

    Attributes:
        root: the module that runs the layers.
        layers: equal layers, each run once in every forward, in this order.
        entry, layer_entry: the methods that decoding calls on the root and on a layer.
    """

    root: torch.nn.Module
    layers: Sequence[torch.nn.Module]
    entry: str = "forward"
    layer_entry: str = "forward"


class ImageModel(ABC):
    """Adapter around one target model. Everything a decoder may rely on.

    Attributes:
        layout: slots and grid of the requested size.
        provides: facts that decoders may require: "grid", "codebook", "hidden", "tree_mask", "row_causal".
        defaults: the family's own sampling defaults (keyword arguments of ``SamplingParams``).
        name: shown in messages and statistics.
        folder: where the checkpoint lies, for companion files (neighbour tables, drafters); ``None`` if nowhere.
        only_decoders: names of the decoders that can drive the model; empty means every next-token decoder.
        feature_size: width of the features, for adapters that provide "hidden".
        block: tokens that one block predicts at once (next-block models), 1 for next-token models.
        static_shapes: set by :meth:`compile`: forwards want the same shapes every step, so the engine gives them the whole
            cache, keeps finished rows in the batch and asks for proposals of full width.
        shards: set where the layers are spread over processes.
        pixel_rule: how the family's own programs make bytes of pixels, since published image distances depend on it:
            "round" (255 p, ties to even), "half-up" (floor(255 p + 0.5)) or "floor" (255 p cut off: half of all bytes
            lie one lower). Families without a published rule round.
    """

    name: str
    layout: Layout
    folder: Path | None = None
    only_decoders: tuple[str, ...] = ()
    block: int = 1
    static_shapes: bool = False
    shards: Shards | None = None
    provides: frozenset[str] = frozenset({"grid", "tree_mask"})
    defaults: ClassVar[dict[str, Any]] = {}
    feature_size: int | None = None
    pixel_rule: ClassVar[str] = "round"
    _fingerprint: str | None = None

    @property
    @abstractmethod
    def module(self) -> torch.nn.Module:
        """The network whose forward is counted as a target step."""

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def codebook(self) -> Tensor | None:
        """float [V, d] code vectors in the space the tokenizer compares them, or ``None``."""
        return None

    @abstractmethod
    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Conditioning:
        """Prompts (text, or class labels) to conditioning. Raises ``ValueError`` for a prompt it cannot take."""

    def fingerprint(self) -> str:
        """Short hash of the network: names, shapes and a few values of every tensor. Tells files of other models apart."""
        if self.shards is not None and self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256()
        for name, tensor in self.module.state_dict().items():
            values = tensor.flatten()[:: max(1, tensor.numel() // 16)][:16]
            digest.update(f"{name}{list(tensor.shape)}".encode())
            digest.update(values.float().cpu().numpy().round(4).tobytes())
        self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def dummy_conditioning(self, batch: int) -> Conditioning:
        """Some valid conditioning of ``batch`` samples, for measuring costs."""
        return self.encode(["a"] * batch)

    @abstractmethod
    def prefill(self, cond: Conditioning, *, guidance: bool, window: int) -> tuple[DecodeState, ModelOutput]:
        """Run the prompts. Returns the state and the logits of slot 0 as [B, 1, V], of the first M slots as [B, M, V]
        where the prompt predicts a whole block.

        Args:
            guidance: build the unconditional branch as well.
            window: largest number of nodes a proposal will have (sizes the cache).
        """

    def open(
        self, cond: Conditioning, opening: Proposal, *, guidance: bool, window: int
    ) -> tuple[DecodeState, ModelOutput]:
        """Run the prompts and the first nodes of a decoder that chooses its own first slots, in one forward."""
        raise ValueError(f"{self.name} cannot fill slots in an order that the decoder chooses")

    def head(self, hidden: Tensor) -> Tensor:
        """Features [..., D] as :attr:`ModelOutput.hidden` has them -> logits float32 [..., V] in code space.

        Adapters that provide "hidden" have this, and ``prefill(..., hidden=True)`` returns the features of the whole
        prompt [rows, prefix, D].
        """
        raise ValueError(f"{self.name} does not give access to its features")

    @abstractmethod
    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        """One target forward of all nodes of all rows; writes their K/V at the proposal's addresses."""

    def compile(self) -> None:
        """Compile the forward of windows (torch.compile) and set :attr:`static_shapes`.

        Raises:
            ValueError: this kind of model, or the way it is loaded, cannot be compiled.
            RuntimeError: this machine cannot compile.
        """
        raise ValueError(f"{self.name} cannot be compiled: load it without compile")

    def stack(self) -> LayerStack:
        """The layers, for spreading them over several processes. Raises ``ValueError`` where that cannot be done."""
        raise ValueError(f"{self.name} cannot be spread over processes: load it without shard")

    def commit(self, state: DecodeState, keep: Tensor, path: Tensor | None = None) -> None:
        """Keep ``keep`` [B] nodes of the last proposal.

        Args:
            path: int64 [B, P] node indices to keep in order (trees); ``None`` keeps the leading nodes (chains), whose
                K/V already lie in place.
        """
        if path is not None:
            from visacc.cache import move_slots

            move_slots(state, keep, path)
        state.lengths = state.lengths + keep

    def check_pixels(self) -> None:
        """Raise ``ValueError`` if the model lacks what turns codes into pixels. Asked before a picture is begun."""
        return

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, T, H, W] -> pixels float32 in [0, 1]: [B, 3, H', W'] for images, [B, T', 3, H', W'] for video."""

    def to_uint8(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] -> uint8 by the family's ``pixel_rule``."""
        scaled = pixels.float() * 255
        if self.pixel_rule == "round":
            scaled = scaled.round()
        elif self.pixel_rule == "half-up":
            scaled = scaled + 0.5
        elif self.pixel_rule != "floor":
            raise ValueError(f"pixel_rule must be round, half-up or floor, got {self.pixel_rule!r}")
        return scaled.clamp(0, 255).to(torch.uint8)
