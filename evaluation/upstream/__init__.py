"""EAGLE and this project side by side."""
