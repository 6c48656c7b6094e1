"""Training of EAGLE-3 heads: conversations made by the target, and the head trained on them."""
