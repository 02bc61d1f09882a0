"""The page of a run: `swift view`. NiceGUI is imported here alone, and only once the arguments are known to be good."""
