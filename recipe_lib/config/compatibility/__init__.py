"""Settings that do not go together: a `Rule` for each, by subject, and the table of all of them."""
