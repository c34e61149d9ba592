"""Speculative Jacobi decoding and its relatives: one window engine with switches.

| decoder | coupling | rule | source |
|---|---|---|---|
| SJD | independent | exact | arXiv 2410.01699 |
| MC-SJD (= SCD) | maximal, gumbel, gumbel-exact | exact | arXiv 2510.24211 |
| GSD | independent (or maximal) | grouped | arXiv 2508.07747 |

A pass reads the last committed token and up to ``window - 1`` drafts. Drafts are tested front to back with
``min(1, p/q)``; the first that fails is replaced by a draw from ``max(p - q, 0)``. The drafts behind it live on for the
next pass, redrawn from their new law p, which becomes their next q. How they are redrawn is the *coupling*:

- ``independent``: a fresh draw from p.
- ``maximal``: keep the draft with probability ``min(1, p/q)``, else draw the residual: the law is p, and the token stays
  the same as often as any coupling allows.
- ``gumbel``: ``argmax(log p + G)`` with noise G that belongs to the slot, not to the pass.
- ``gumbel-exact``: as ``gumbel``, and a draft is accepted iff it *is* that arg-max. No q, no residual: the output is
  token for token what plain AR draws with the same seed.

Losslessness needs q to be a function of earlier slots only; so the window never depends on what was drawn inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visacc.decoders.base import Decoder, Verdict, gumbel_draw
from visacc.decoders.window_init import INITS, WindowInit
from visacc.kernels import draw
from visacc.models.base import Layout, ModelOutput, Proposal
from visacc.verify import EXACT, ChainRule, verify_chain

if TYPE_CHECKING:
    from visacc.engine import Run

COUPLINGS = ("independent", "maximal", "gumbel", "gumbel-exact")


class Jacobi(Decoder):
    """Jacobi window decoder.

    Args:
        window: tokens read per pass, the last committed one included (1 = plain AR).
        coupling: how surviving drafts are redrawn, see the module docstring.
        init: first draft of fresh slots, see :mod:`visacc.decoders.window_init`.
        uniform_q: record the uniform law for ``init="random"``; ``False`` records one-hot as the originals do.
        rule: acceptance rule of the test; anything but the exact one is lossy.

    Raises:
        ValueError: unknown switch, window below 1, or a relaxed rule with ``gumbel-exact`` (which has no ratio test).
    """

    lossless = True
    fixed_shape = True

    def __init__(
        self,
        window: int = 32,
        coupling: str = "maximal",
        init: str = "random",
        *,
        uniform_q: bool = True,
        rule: ChainRule = EXACT,
    ) -> None:
        super().__init__()
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be an integer of at least 1, got {window!r}")
        if coupling not in COUPLINGS:
            raise ValueError(f"unknown coupling {coupling!r}; choose one of {', '.join(COUPLINGS)}")
        if init not in INITS:
            raise ValueError(f"unknown window initialisation {init!r}; choose one of {', '.join(INITS)}")
        if coupling == "gumbel-exact" and not rule.lossless:
            raise ValueError(
                "coupling 'gumbel-exact' accepts by equality and cannot use a relaxed acceptance rule"
            )
        self.window, self.coupling, self.init = window, coupling, init
        self.uniform_q, self.rule = uniform_q, rule
        self.lossless = rule.lossless
        self._fill: WindowInit

    def options(self) -> dict[str, Any]:
        return {"window": self.window, "coupling": self.coupling, "init": self.init}

    def max_nodes(self, layout: Layout) -> int:
        return min(self.window, layout.total)

    @property
    def _redraws_in_place(self) -> bool:
        """Whether the verifier's own redraw behind the rejection becomes the next draft."""
        return self.coupling == "maximal"

    @property
    def _ratio_test(self) -> bool:
        return self.coupling != "gumbel-exact"

    def begin(self, run: Run, law: Tensor) -> Tensor:
        first = super().begin(run, law)
        self._fill = WindowInit(self.init, run.layout, law, uniform_q=self.uniform_q)
        size = self.max_nodes(run.layout) - 1
        if self._fill.keeps_laws:
            laws = law.new_zeros(run.batch, run.total, run.layout.vocab)
            laws[:, 0] = law
            self.state["laws"] = laws
        slots = torch.arange(1, size + 1, device=run.device).expand(run.batch, size)
        start = torch.ones(run.batch, dtype=torch.int64, device=run.device)
        known = torch.zeros_like(run.sequence)
        known[:, 0] = first
        fresh = self._fill(
            run, slots.clamp(max=run.total - 1), start, known, self.state.get("laws"), want_q=self._ratio_test
        )
        self.state["drafts"], self.state["onehot"] = fresh.tokens, fresh.onehot
        self.state["q"] = self._q_buffer(fresh.q, law, size) if self._ratio_test else None
        return first

    def _q_buffer(self, q: Tensor | None, law: Tensor, size: int) -> Tensor:
        shape = (law.shape[0], size, law.shape[1])
        return law.new_zeros(shape) if q is None else q.expand(shape).contiguous()

    def propose(self, run: Run) -> Proposal:
        drafts = self.state["drafts"]
        assert drafts is not None
        size = max(1, min(self.window, run.total - run.low))
        if run.model.static_shapes:
            size = self.max_nodes(run.layout)
        positions = (run.count - 1)[:, None] + torch.arange(size, device=run.device)
        tokens = torch.cat([run.last_tokens()[:, None], drafts[:, : size - 1]], dim=1)
        return Proposal(tokens, positions.clamp(max=run.total - 1), positions < run.total)

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        return run.count[:, None] + torch.arange(proposal.size, device=run.device)

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        size = proposal.size
        slots = self.predicted_slots(run, proposal)
        inside = slots.clamp(max=run.total - 1)
        # the last slot of all is never fed, so its draft is never tested: it is drawn when everything before stands
        n_draft = (run.total - 1 - run.count).clamp(min=0, max=size - 1)
        u, residual, word = run.noise.decisions(inside, run.step) if self._ratio_test else (None, None, None)
        fresh = self._fresh_tokens(run, law, inside, n_draft, word)
        drafts, onehot, q = self.state["drafts"], self.state["onehot"], self.state["q"]
        assert drafts is not None and onehot is not None
        verdict = verify_chain(
            law,
            drafts[:, : size - 1],
            n_draft,
            fresh,
            rule=self.rule,
            q=None if q is None else q[:, : size - 1],
            onehot=onehot[:, : size - 1],
            u=None if u is None else u[:, : size - 1],
            U=None if residual is None else residual[:, : size - 1],
            match=not self._ratio_test,
            unbroken=self._redraws_in_place,
        )
        accepted = verdict.n_accepted[:, None]
        order = torch.arange(size, device=run.device)
        stands = torch.cat([drafts[:, : size - 1], drafts[:, :1]], dim=1) if size > 1 else fresh
        tokens = torch.where(order < accepted, stands, verdict.next_token[:, None])
        keep = (order <= accepted) & (slots < run.total)
        survivors = verdict.coupled if self.coupling == "maximal" else fresh
        self._refill(run, slots, inside, law, survivors, tokens, keep)
        return Verdict(tokens, slots, keep, accepted=torch.minimum(verdict.n_accepted, keep.sum(1)))

    def _fresh_tokens(
        self, run: Run, law: Tensor, slots: Tensor, n_draft: Tensor, word: Tensor | None
    ) -> Tensor:
        """A draw from each law [B, N, V] -> [B, N]; under ``maximal`` only the slot behind the last draft is used."""
        if self.coupling.startswith("gumbel"):
            bound = run.high + (run.since_check + 1) * self.window
            return gumbel_draw(run, law, slots, bound)
        vocab = law.shape[-1]
        if self.coupling == "maximal":
            rows = torch.arange(run.batch, device=run.device)
            assert word is not None
            token = draw(law[rows, n_draft], word[rows, n_draft])
            return token[:, None].expand(slots.shape)
        assert word is not None
        return draw(law.reshape(-1, vocab), word.reshape(-1)).view(slots.shape)

    def _refill(
        self,
        run: Run,
        slots: Tensor,
        inside: Tensor,
        law: Tensor,
        survivors: Tensor,
        tokens: Tensor,
        keep: Tensor,
    ) -> None:
        """Shift the window: outputs behind the committed ones become drafts with q = their law, the rest is fresh."""
        size, width = slots.shape[1], self.max_nodes(run.layout) - 1
        if width == 0:
            return
        source, carried, new_slots = self._shift(run, keep.sum(1), width, size)
        source = source.clamp(max=size - 1)
        rows = torch.arange(run.batch, device=run.device)[:, None]
        first = slots[:, -1] + 1
        new_inside = new_slots.clamp(max=run.total - 1)
        laws = self.state.get("laws")
        if laws is not None:
            laws[rows, inside] = law
        known = self._known(run, inside, survivors, tokens, keep)
        fresh = self._fill(run, new_inside, first, known, laws, want_q=self._ratio_test)
        self.state["drafts"] = torch.where(carried, survivors.gather(1, source), fresh.tokens)
        self.state["onehot"] = ~carried & fresh.onehot
        if self._ratio_test:
            q = law[rows, source]
            if fresh.q is not None:
                q = torch.where(carried[..., None], q, fresh.q)
            self.state["q"] = q

    @staticmethod
    def _shift(run: Run, gained: Tensor, width: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next window of ``width`` drafts, ``gained`` [B] slots on from this one of ``size``: which output each comes
        from, whether there is one, and its slot, [B, width] each."""
        ahead = torch.arange(width, device=run.device)
        source = gained[:, None] + ahead
        return source, source < size, (run.count + gained)[:, None] + ahead

    def _known(self, run: Run, inside: Tensor, survivors: Tensor, tokens: Tensor, keep: Tensor) -> Tensor:
        """Tokens by slot, committed or drafted [B, total], for initialisations that copy a neighbour."""
        if self.init == "random":
            return run.sequence
        return run.sequence.scatter(1, inside, torch.where(keep, tokens, survivors))


class SJD(Jacobi):
    """Speculative Jacobi decoding (arXiv 2410.01699): surviving drafts are redrawn independently."""

    name = "sjd"
    summary = "speculative Jacobi decoding: a window of drafts, redrawn each step"

    def __init__(self, window: int = 16, init: str = "random", uniform_q: bool = True) -> None:
        super().__init__(window, "independent", init, uniform_q=uniform_q)


class MCSJD(Jacobi):
    """SJD with coupled redraws (arXiv 2510.24211): drafts stay put, so contexts settle and more drafts pass.

    The default coupling returns the very picture that plain AR draws with the same seed, whatever the window; the others
    return another sample of the same law.
    """

    name = "mc-sjd"
    summary = "speculative Jacobi decoding with coupled redraws: the AR picture of the same seed"

    def __init__(
        self, window: int = 32, coupling: str = "gumbel-exact", init: str = "random", uniform_q: bool = True
    ) -> None:
        if coupling == "independent":
            raise ValueError(
                "mc-sjd couples its redraws: choose maximal, gumbel or gumbel-exact (independent is 'sjd')"
            )
        super().__init__(window, coupling, init, uniform_q=uniform_q)
