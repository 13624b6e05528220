"""Show runs and plans to a reader: an HTML page, its charts, and tables for the terminal.

No torch in here.
"""
