"""Agents: running them, and environments that others have written as agents."""
