"""What a decoder is: two decisions, what to propose and what to keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from visacc.models.base import DecodeState, ImageModel, Layout, ModelOutput, Proposal

if TYPE_CHECKING:
    from visacc.engine import Run


@dataclass
class Verdict:
    """The tokens a step commits.

    Attributes:
        tokens: int64 [B, K] codes.
        slots: int64 [B, K] where they go (entries that are not kept may point beyond the layout).
        keep: bool [B, K].
        accepted: int64 [B] how many of the kept tokens were drafts, ``None`` where the notion does not apply.
        cache_keep: int64 [B] leading window nodes (or leading ``path`` entries) whose K/V stays; ``None`` means as
            many as tokens were kept, which is right for chains.
        path: int64 [B, P] nodes to keep, for trees.
    """

    tokens: Tensor
    slots: Tensor
    keep: Tensor
    accepted: Tensor | None = None
    cache_keep: Tensor | None = None
    path: Tensor | None = None

    def cached(self) -> Tensor:
        return self.keep.sum(1) if self.cache_keep is None else self.cache_keep


class Decoder(ABC):
    """Base class; third parties subclass it and register through the entry-point group ``visacc.decoders``.

    A decoder object may be reused for many batches: :meth:`begin` resets it. Its per-row tensors live in
    ``self.state`` (a dictionary), so that the engine can drop finished rows.

    Attributes:
        name: registered name.
        lossless: whether the output law is exactly that of plain autoregressive sampling (proven in the tests).
        requires: facts the adapter must provide.
        needs_hidden: whether forwards should return features.
        fixed_shape: with a model of ``static_shapes`` every proposal has :meth:`max_nodes` nodes, and a finished row that
            stays in the batch commits nothing. Only such decoders can drive a compiled model.
        sources: arXiv ids or web addresses of the method, for reports.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    sources: ClassVar[tuple[str, ...]] = ()
    lossless: bool = False
    requires: frozenset[str] = frozenset()
    needs_hidden: bool = False
    fixed_shape: bool = False
    api_version: ClassVar[int] = 1
    images: tuple[int, int, int] | None = None
    """First image of the next batch, the one behind its last, images of the whole call; set by the pipeline."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor | None] = {}

    def check(self, model: ImageModel) -> None:
        """Raise ``ValueError`` if the model lacks something the decoder needs."""
        missing = self.requires - model.provides
        if missing:
            raise ValueError(
                f"decoder {self.name!r} requires {sorted(missing)}, but {model.name} provides {sorted(model.provides)}"
            )
        if model.static_shapes and not self.fixed_shape:
            raise ValueError(
                f"decoder {self.name!r} cannot drive a compiled model, whose forwards need the same shape every step: use"
                " ar or a window decoder (sjd, mc-sjd, nc-sjd, gsd, sjd-pac), or load without compile"
            )
        if model.only_decoders and self.name not in model.only_decoders:
            raise ValueError(
                f"{model.name} does not predict one next token and cannot be driven by decoder {self.name!r};"
                f" use {' or '.join(map(repr, model.only_decoders))}"
            )

    @property
    def remembers(self) -> bool:
        """Whether an image may depend on what was decoded before it (known once :meth:`check` has run)."""
        return False

    def max_nodes(self, layout: Layout) -> int:
        """Largest number of nodes of a proposal."""
        return 1

    def begin(self, run: Run, law: Tensor) -> Tensor:
        """Reset for a new batch and choose slot 0 from its law [B, V]. Returns codes int64 [B].

        The default draws with the slot's Gumbel noise, as plain autoregressive decoding does.
        """
        self.state = {}
        return gumbel_draw(run, law[:, None], torch.zeros_like(run.samples)[:, None], bound=1)[:, 0]

    def prefill_options(self) -> dict[str, Any]:
        """Further keyword arguments for the adapter's ``prefill``, such as ``hidden=True``."""
        return {}

    def prompted(self, run: Run, state: DecodeState, output: ModelOutput) -> None:  # noqa: B027 - optional hook
        """Called with the prompt's outputs before :meth:`start`."""

    def start(self, run: Run, law: Tensor) -> Verdict:
        """Choose what the prompt predicts, from the laws [B, M, V] of slots 0..M-1 (M = 1 for next-token models)."""
        first = self.begin(run, law[:, 0])[:, None]
        return Verdict(first, torch.zeros_like(first), torch.ones_like(first, dtype=torch.bool))

    def opening(self, run: Run) -> Proposal | None:
        """Nodes to feed together with the prompt, for decoders that choose which slots come first; such a decoder resets
        itself here, and :meth:`judge` also sees the opening. ``None``: the prompt predicts slot 0."""
        return None

    def guidance(self, run: Run, slots: Tensor) -> Tensor | None:
        """Guidance scale float [B, M] of each predicted slot; ``None`` for the one of the sampling parameters."""
        return None

    @abstractmethod
    def propose(self, run: Run) -> Proposal:
        """Tokens for the next forward."""

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        """int64 [B, M] slot that each output predicts: the one after its node."""
        return proposal.take(proposal.positions) + 1

    @abstractmethod
    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        """Decide what stands, given the laws [B, M, V] of the outputs."""

    def advance(self, run: Run, verdict: Verdict) -> None:  # noqa: B027 - optional hook
        """Called after the commit, with the counts already advanced."""

    def finished(self, run: Run) -> bool:
        """Whether all rows are complete, for decoders whose host knows that without looking at the device."""
        return False

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows of the per-row state."""
        self.state = {k: None if v is None else v[rows] for k, v in self.state.items()}

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        grid: tuple[int, int] | None = None,
        seed: int | list[int] | None = None,
        callback: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """For transformers: ``model.generate(..., custom_generate=decoder, grid=..., seed=...)``.

        See :func:`visacc.integrations.generate.run`. Names that the stock loop has (masks, positions, cache) must stay
        inside ``model_kwargs``: transformers would take them for options of ours.
        """
        from visacc.integrations.generate import run

        return run(
            self,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            grid=grid,
            seed=seed,
            callback=callback,
            **model_kwargs,
        )

    def options(self) -> dict[str, Any]:
        """The options this decoder runs with, for statistics and manifests."""
        return {}


def gumbel_draw(run: Run, law: Tensor, slots: Tensor, bound: int) -> Tensor:
    """Draw from laws [B, N, V] with the fixed Gumbel noise of the slots [B, N]; ``bound`` exceeds every slot."""
    from visacc.kernels import race

    run.noise.prepare(bound)
    noise = run.noise.exponential(slots)
    vocab = law.shape[-1]
    return race(law.reshape(-1, vocab), noise.reshape(-1, vocab)).view(slots.shape)
