"""Evaluations of a model that trains: the questions of benchmarks, and how their grades are counted."""
