"""Closed forms and exact expectations of acceptance."""
