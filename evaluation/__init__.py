"""Question sets, answer files and reports."""
