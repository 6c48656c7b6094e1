"""Measurements that choose settings: expected tokens at fixed contexts, and the size of a tree."""
