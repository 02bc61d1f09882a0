"""Loading the Python files that users write: rewards, datasets, preprocessors."""

import swift_r1.plugins.schedulers  # noqa: F401  registers them
from swift_r1.plugins.loader import LoadedPlugin, load_plugins

__all__ = ["LoadedPlugin", "load_plugins"]
