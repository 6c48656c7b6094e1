"""Exact acceptance: closed forms for one level, and the expectation for a given tree."""
