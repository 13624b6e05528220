"""Adapters on disk, in PEFT's layout: checked, read, written, and merged into their base."""

from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.adapter_in import load_adapter
from recipe_lib.checkpoint.adapter_out import export_adapter
from recipe_lib.checkpoint.merged import merge_adapter

__all__ = ["check_adapter", "export_adapter", "load_adapter", "merge_adapter"]
