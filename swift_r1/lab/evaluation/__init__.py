"""Evaluation: benchmarks, their statistics, and `swift eval`. Importing it loads neither torch nor an engine."""

ADDED_VARIABLE = "SWIFT_R1_EVAL_ADDED"
"""Names the variables that `swift eval` added to its process's environment: a server that it starts adds its own."""
