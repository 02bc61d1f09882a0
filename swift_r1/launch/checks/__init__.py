"""Trying plugins, data and rewards before a model is loaded: `swift check`, and the start of every `swift rlhf`."""
