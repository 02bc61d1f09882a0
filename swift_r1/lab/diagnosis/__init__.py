"""What a run's log says is wrong with it: signs that hold for some rounds, with their evidence and what to try."""
