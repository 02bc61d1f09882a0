"""Environments that others have written, each an agent: `--env KIND:NAME`, `--env_args JSON` (docs/environments.md).

A module a kind. Nothing of an environment, or of its package, is imported before one is named.
"""
