"""Configs of other tools as ours: a table of keys for each tool, and what became of every key of a file.

A key is carried, carried with another effect, or dropped with a reason; where the run would not be what was asked, it
is an error. No torch.
"""

from recipe_lib.config.other_configs.import_file import Imported, import_file
from recipe_lib.config.other_configs.tools import TOOLS

__all__ = ["TOOLS", "Imported", "import_file"]
