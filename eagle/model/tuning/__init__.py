"""Measurements that choose settings: expected tokens at fixed contexts, the size of the draft tree."""
