"""Loading the Python files that users write: rewards, datasets, preprocessors."""

from swift_r1.plugins.compat import install_import_names
from swift_r1.plugins.loader import LoadedPlugin, load_plugins

__all__ = ["LoadedPlugin", "install_import_names", "load_plugins"]
