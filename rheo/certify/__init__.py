"""Certify losslessness by exact enumeration: ``python -m rheo.certify``."""
