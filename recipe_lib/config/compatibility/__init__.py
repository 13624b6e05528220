"""Refuse settings that do not go together: a `Rule` for each, and the table of all of them."""
