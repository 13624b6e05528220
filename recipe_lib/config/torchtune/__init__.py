"""Configs of torchtune (0.6.1) as ours: what became of every key of a file. No torch.

A key is carried, carried with another effect, or dropped with a reason; where the run would not be
what was asked, it is an error. `key_tables.py` has the tables of keys.
"""

from recipe_lib.config.torchtune.import_file import ImportedConfig, import_file

__all__ = ["ImportedConfig", "import_file"]
