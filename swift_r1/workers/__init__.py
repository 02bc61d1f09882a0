"""Supervised processes: limits, a fork server that ends a whole tree, and a sandbox for programs."""
