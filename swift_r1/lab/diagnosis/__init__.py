"""Diagnosis of a run from its log: signs that hold for some rounds, with their evidence and what to try."""
