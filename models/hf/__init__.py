"""Image generators of the transformers library: Janus(-Pro), Emu3, Emu3.5, Chameleon, Anole, Lumina-mGPT,
GLM-Image.

``load_hf`` takes a folder or hub id, ``wrap`` a model already in memory.
"""

from visacc.models.hf.chameleon import Chameleon
from visacc.models.hf.detect import is_hf
from visacc.models.hf.driver import HFImageModel
from visacc.models.hf.emu3 import Emu3
from visacc.models.hf.emu35 import Emu35
from visacc.models.hf.glm_image import GlmImage
from visacc.models.hf.janus import Janus
from visacc.models.hf.loading import FAMILIES, load_hf, wrap
from visacc.models.hf.lumina import Lumina
from visacc.models.hf.taming import TamingDecoder

__all__ = [
    "FAMILIES",
    "Chameleon",
    "Emu3",
    "Emu35",
    "GlmImage",
    "HFImageModel",
    "Janus",
    "Lumina",
    "TamingDecoder",
    "is_hf",
    "load_hf",
    "wrap",
]
