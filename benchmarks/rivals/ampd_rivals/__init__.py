"""Policies of other systems and textbook orderings, for comparison: one module or folder per system.

The entry point of the package names this module. Importing it registers all of them.
"""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
