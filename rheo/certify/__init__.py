"""Prove by exact enumeration that decoding is lossless: ``python -m rheo.certify``.

Read the modules in this order:

1. ``certificates``: certify one setting.
2. ``enumeration``: walk every outcome of build, prune and verify.
3. ``distributions``: the tables that take the place of the networks.
4. ``rational``: fractions in place of tensors.
5. ``settings``: what is certified.
6. ``report``: what is printed.
"""
