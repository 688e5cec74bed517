"""Prefix-cache logic for inference engines, and a thin engine of our own that uses it."""
