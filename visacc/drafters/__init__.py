"""EAGLE-type drafters for image models: networks, released formats, trees, nearest-code tables."""

from visacc.drafters.config import DrafterConfig
from visacc.drafters.network import EagleNetwork

__all__ = ["DrafterConfig", "EagleNetwork"]
