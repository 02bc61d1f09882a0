"""Tools that a model calls: the registry, their processes, and the calls in the model's text."""
