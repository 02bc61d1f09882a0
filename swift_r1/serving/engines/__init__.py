"""Engines: what generates, with one set of weights."""
