"""Columns that pages of several kinds of run have."""

from __future__ import annotations

from visacc.report.model import Column

STEPS = Column("steps", ".1f", note="target forwards per image, mean with its 95 % interval")
COMPRESSION = Column("tokens/step", ".2f", note="tokens of an image divided by its steps")
TAU = Column("accepted length", ".2f", note="tokens a step commits, the prompt's step left out")
