"""Checks of the user's own pair and data."""
