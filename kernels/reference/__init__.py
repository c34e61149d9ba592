"""Torch definitions of every op: readable, float32, vectorised over rows. They are also the CPU path."""
