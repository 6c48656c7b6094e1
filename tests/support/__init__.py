"""Tools of the tests: tiny models, a second implementation, and a patched copy of ``rheo``."""
