"""The forecast of what a run will have to learn from, out of some completions of its base model: pure functions on what
`training.rehearsal` wrote. Importing it loads no torch."""
