"""Tiny models, the literal implementation, and patched copies of the code."""
