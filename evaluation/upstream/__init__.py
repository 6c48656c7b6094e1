"""EAGLE and this project compared by running both."""
