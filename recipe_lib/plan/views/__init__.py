"""Show a finished plan in words, tables and charts; nothing is decided here."""
