"""Supervised processes: limits, a watchdog that ends a whole tree, and a sandbox for programs."""
