"""`swift sweep`: runs of `swift rlhf` at several points and seeds, on one machine."""
