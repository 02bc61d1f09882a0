"""Programs of a model, run where they can reach nothing (docs/sandbox.md); `box.py` is the outside of it."""
