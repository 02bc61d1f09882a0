"""What a run will have to learn from, out of some completions of its base model: pure functions on what
`training.rehearsal` wrote. Importing it loads no torch."""

FILE = "forecast.json"
"""Beside `completions.jsonl`, whose `step` is the part that a completion was sampled in: `parts` (of each its `prompts`
and the seconds of `generate` and `reward`), `steps` (the metrics of each optimizer step), `fault` (why there are none)
and `invalid` (of each reward function how many values, and why the first of them)."""
