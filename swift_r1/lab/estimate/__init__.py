"""`swift estimate`: memory, bytes and seconds of a run on hardware that is not here, from its flags, the model's config
and the chip's figures. Pure functions but for `measured.py` and `model.py`, which read files. docs/estimate.md has the
formulas."""
