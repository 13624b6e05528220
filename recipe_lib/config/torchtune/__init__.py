"""Import torchtune's configs (0.6.1), for `tune import`, and say what became of every key.

A key is carried, carried with another effect, or dropped with a reason; where the run would not be
what was asked, it is an error. `key_tables.py` has the tables of keys. Imports no torch.
"""

from recipe_lib.config.torchtune.import_file import ImportedConfig, import_file

__all__ = ["ImportedConfig", "import_file"]
