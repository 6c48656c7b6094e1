"""Checks to point at your own pair and data."""
