"""RheoSampling: candidate pools, draft trees and lossless verification on plain tensors (arXiv 2609.21827)."""

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
    "Draws",
    "FILL",
    "GREEDY_BELOW",
    "KIND_NAMES",
    "LEAD",
    "NORMALISERS",
    "PoolOptions",
    "Pools",
    "SAMPLED",
    "Tree",
    "TreeOptions",
    "VERIFICATIONS",
    "VerifyResult",
    "build_pools",
    "build_tree",
    "check_verification",
    "parse_m",
    "pick",
    "verify",
    "verify_greedily",
]
