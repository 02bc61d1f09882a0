"""Loading the Python files that users write: rewards, datasets, preprocessors."""

from swift_r1.plugins.loader import LoadedPlugin, load_plugins

__all__ = ["LoadedPlugin", "load_plugins"]
