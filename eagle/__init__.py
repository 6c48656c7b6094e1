"""EAGLE-3 speculative decoding with the candidate pools and the verification of ``rheo``."""
