"""Evaluation runs: generate with any decoder, score, tabulate; resumable and sharded."""
