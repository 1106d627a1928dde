"""Offline batch inference for language models: every row exactly once, resumable to the byte."""

__version__ = "0.1.0"
