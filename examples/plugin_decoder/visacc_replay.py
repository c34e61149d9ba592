"""Decoder `replay`: verify a stored picture. Its codes are the drafts, the model decides; the output is that of `ar`.

A picture that this model really draws from its prompt, seed and settings passes in about N / (window - 1) steps. Any
other one is corrected where it is wrong and takes as many steps as `mc-sjd`.
"""

import torch

from visacc.decoders import MCSJD
from visacc.decoders.window_init import Fresh


class Replay(MCSJD):
    name = "replay"
    summary = "verifies a stored picture: its codes are the drafts, the output is that of ar"

    def __init__(self, window: int = 32, codes: torch.Tensor | None = None) -> None:
        super().__init__(
            window, "gumbel-exact"
        )  # a draft stands iff ar would draw it: exact whatever is drafted
        self.codes = codes  # [B, T, H, W] as in ImageOutput.codes; None: drafts as in mc-sjd

    def begin(self, run, law):
        first = super().begin(run, law)
        if self.codes is not None:
            if self.codes.shape != (run.batch, *run.layout.grid):
                wanted = [run.batch, *run.layout.grid]
                raise ValueError(f"replay needs codes of shape {wanted}, got {list(self.codes.shape)}")
            stored = torch.zeros_like(run.sequence)
            stored[:, run.layout.cell_slots.to(run.device)] = self.codes.flatten(1).to(run.device)

            def fill(run, slots, *known, want_q):
                return Fresh(
                    stored[run.samples].gather(1, slots), torch.ones_like(slots, dtype=torch.bool), None
                )

            self._fill = fill
            width = self.max_nodes(run.layout) - 1
            self.state["drafts"] = stored[:, 1 : 1 + width].contiguous()
        return first
