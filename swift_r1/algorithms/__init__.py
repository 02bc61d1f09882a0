"""Advantages, losses, KL and GAE: pure functions on tensors, without I/O and without globals.

All raise ValueError on shapes that do not fit together, a value out of its range, or an argument that is missing.
A method is a file in `methods/` (`method.py` says what it declares): read those beside the papers. `advantages.py` and
`losses.py` put them together.
"""
