"""Views for a reader: an HTML page for runs and plans, its charts, and tables for the terminal.

No torch in here.
"""
