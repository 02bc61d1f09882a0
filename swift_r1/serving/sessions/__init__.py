"""Sessions: what an agent's calls were, in tokens. Nothing here knows HTTP; only `gateway` waits for an engine."""
