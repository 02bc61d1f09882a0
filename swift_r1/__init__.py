"""R1-Zero style reinforcement learning for language models, driven by plugins."""
