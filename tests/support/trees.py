"""Random decisions and small trees for tests of the method alone."""

import torch

from rheo import Draws, TreeOptions, build_tree


def draws(seed=0):
    """Random decisions from a generator of their own."""
    return Draws(torch.Generator().manual_seed(seed))


class FixedToken:
    """Draws that always sample the same index: for a pool, the rank in its tail."""

    def __init__(self, index):
        self.index = index

    def ahead(self, *_):
        return self

    def token(self, weights):
        return torch.full(weights.shape[:-1], self.index)


def one_level_tree(logits, pool, total_token=11, source=None, target_ids=None):
    """A root, token 0, and its pool. ``source`` makes the random decisions."""
    options = TreeOptions(pool, total_token, depth=0)
    return build_tree(torch.tensor(0), logits, None, options, source or draws(), target_ids)
