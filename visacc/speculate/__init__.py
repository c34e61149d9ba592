"""Speculative decoding for vision-language models: drafters, token trees, the decode loop, captioning."""
