# Work of an afternoon.
