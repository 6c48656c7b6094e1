"""RheoSampling on plain tensors (arXiv 2609.21827).

Read the modules in this order:

1. ``draws``: the only place where random decisions are made.
2. ``scores``: the score of each slot of a candidate pool.
3. ``pool``: the candidate pool of one tree node.
4. ``tree``: the draft tree: expand, rerank, prune.
5. ``verification``: which path of the tree is accepted, and the bonus token.

This package knows no model, no tokenizer and no file. ``rheo.analysis`` holds closed forms,
``rheo.certify`` proves losslessness by enumeration, ``rheo.integrations`` runs the method inside
other projects.
"""

from rheo.draws import Draws
from rheo.pool import (
    AUTO,
    FILL,
    GREEDY_BELOW,
    KIND_NAMES,
    LEAD,
    NORMALISERS,
    SAMPLED,
    PoolOptions,
    Pools,
    build_pools,
    parse_m,
)
from rheo.tree import Tree, TreeOptions, build_tree
from rheo.verification import (
    VERIFICATIONS,
    VerifyResult,
    check_verification,
    pick,
    verify,
    verify_greedily,
)

__all__ = [
    "AUTO",
    "FILL",
    "GREEDY_BELOW",
    "KIND_NAMES",
    "LEAD",
    "NORMALISERS",
    "SAMPLED",
    "VERIFICATIONS",
    "Draws",
    "PoolOptions",
    "Pools",
    "Tree",
    "TreeOptions",
    "VerifyResult",
    "build_pools",
    "build_tree",
    "check_verification",
    "parse_m",
    "pick",
    "verify",
    "verify_greedily",
]
