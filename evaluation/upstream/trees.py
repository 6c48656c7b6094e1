"""Compare a draft tree of EAGLE with one of this project."""

from dataclasses import dataclass, field

import torch

from rheo import Tree

TIE = 1e-5  # of log path scores in float32
# Largest difference of one node's score: other kernels add in another order.
CLOSE = 1e-3

# The tokens from a child of the root down to a node; the root's own path is empty.
Path = tuple[int, ...]


@dataclass
class Difference:
    """The differences of two trees, in words.

    Attributes:
        ties: differences between nodes whose scores are within ``TIE``.
        faults: all other differences.
    """

    ties: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, gap: float, text: str) -> None:
        """Add a difference between nodes whose scores are ``gap`` apart."""
        (self.ties if gap <= TIE else self.faults).append(text)


def compare_trees(theirs: dict, ours: Tree) -> Difference:
    """Compare the trees of EAGLE and this project at the same context.

    Args:
        theirs: a cycle as ``worker`` records it.
        ours: the tree of this project.
    """
    found = Difference()
    mask = torch.tensor(theirs["mask"])
    levels = (mask.sum(1) - 1).tolist()
    if theirs["positions"] != levels:
        found.faults.append("EAGLE's positions are not the depths of its nodes")
    # The parent of a node is the deepest of the other nodes that it sees.
    seen = [[j for j in range(i) if mask[i, j]] for i in range(1, len(mask))]
    parents = [0, *(max(nodes, key=lambda j: levels[j]) for nodes in seen)]

    their_paths = paths(theirs["tokens"], parents)
    our_paths = paths(ours.tokens.tolist(), ours.parents.tolist())
    their_scores = dict(zip(their_paths, theirs["scores"]))
    rows = zip(our_paths, ours.log_scores.tolist(), ours.valid.tolist())
    our_scores = {path: score for path, score, valid in rows if valid}

    compare_nodes(their_scores, our_scores, "EAGLE", found)
    compare_nodes(our_scores, their_scores, "ours", found)
    for path in their_scores.keys() & our_scores.keys():
        a, b = their_scores[path], our_scores[path]
        if abs(a - b) > CLOSE:
            text = f"node {list(path)} has score {a:.6f} in EAGLE and {b:.6f} here"
            found.faults.append(text)
    if not found.ties and not found.faults and their_paths != our_paths:
        node = next(i for i, (a, b) in enumerate(zip(their_paths, our_paths)) if a != b)
        a, b = their_paths[node], our_paths[node]
        gap = abs(their_scores[a] - our_scores[b])
        where = f"node {node} is {list(a)} in EAGLE and {list(b)} here"
        found.add(gap, f"{where}, scores {gap:.1e} apart")
    if not found.ties and not found.faults and not torch.equal(mask, ours.mask):
        found.faults.append("the trees are equal and their masks differ")
    return found


def paths(tokens: list[int], parents: list[int]) -> list[Path]:
    """The path of each node."""
    found: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        found.append((*found[parent], token))
    return found


def compare_nodes(
    scores: dict[Path, float], others: dict[Path, float], owner: str, found: Difference
) -> None:
    """Add the nodes that only one tree has.

    Args:
        scores: scores of that tree by path.
        others: scores of the other tree by path.
        owner: name of that tree.
        found: changed in place.
    """
    for path in sorted(scores.keys() - others.keys(), key=len):
        gap = swap_gap(path, scores, others)
        what = f"only in {owner}: {list(path)}, score {scores[path]:.6f}"
        found.add(gap, f"{what}, {gap:.1e} from a node that could replace it")


def swap_gap(path: Path, scores: dict[Path, float], others: dict[Path, float]) -> float:
    """Smallest score difference that explains why only one tree has a node.

    The node itself may have lost against a node that only the other tree has. Or its parent may
    have lost: the other tree does not have the parent, or it expanded another node.

    Args:
        path: the node.
        scores: scores of its tree by path.
        others: scores of the other tree by path.
    """
    only_there = [other for other in others if other not in scores]
    gaps = [abs(scores[path] - others[other]) for other in only_there]
    parent = path[:-1]
    if parent and parent not in others:
        gaps.append(swap_gap(parent, scores, others))
    elif parent:
        expanded = {other[:-1] for other in only_there if other} - {parent, ()}
        gaps += [abs(scores[parent] - others[other]) for other in expanded if other in others]
    return min(gaps, default=float("inf"))
