"""One YAML file per run: typed settings, overrides, and errors that name the right key."""

from flatout.config.load import Shown, dump, from_mapping, keys, load, schema, show, to_mapping
from flatout.config.settings import Loaded, Settings

__all__ = [
    "Loaded",
    "Settings",
    "Shown",
    "dump",
    "from_mapping",
    "keys",
    "load",
    "schema",
    "show",
    "to_mapping",
]
