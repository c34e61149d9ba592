"""NBP: next-block prediction for video (arXiv 2502.07737)."""

from visacc.models.nbp.adapter import NBPModel
from visacc.models.nbp.fsq import FSQ
from visacc.models.nbp.gpt import NBP, NBPConfig, block_mask, input_ids
from visacc.models.nbp.magvit2 import Magvit2, Magvit2Config, load_magvit2
from visacc.models.nbp.released import load_nbp, right_padded, to_next_block, ucf_text

__all__ = [
    "FSQ",
    "NBP",
    "Magvit2",
    "Magvit2Config",
    "NBPConfig",
    "NBPModel",
    "block_mask",
    "input_ids",
    "load_magvit2",
    "load_nbp",
    "right_padded",
    "to_next_block",
    "ucf_text",
]
