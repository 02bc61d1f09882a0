"""Evaluation: benchmarks, their statistics, and `swift eval`. Importing it loads neither torch nor an engine."""
