"""Quality and equality measures: Fréchet family, GenEval, CLIP scores, captions.

Statistics and decision logic need only numpy and torch; networks come from libraries and are imported when a
feature extractor or detector is created (extra `eval`).
"""
