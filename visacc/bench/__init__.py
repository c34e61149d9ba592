"""Decoders side by side: speed next to quality."""
