"""The comparison with EAGLE: what counts as the same tree, as a tie, as a fault; and a run where a checkout is at hand."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evaluation import diff_upstream
from rheo import Draws, PoolOptions, TreeOptions, build_tree


def grown(logits, m=None, total=8, seed=0):
    """A tree of two levels whose draft says the same everywhere."""
    options = TreeOptions(PoolOptions(3, m, 0), total, 1)
    draws = Draws(torch.Generator().manual_seed(seed))
    return build_tree(torch.tensor(5), logits, lambda tokens, *_: logits.expand(tokens.numel(), -1), options, draws)


def as_eagle_tells_it(tree):
    return {
        "tokens": tree.tokens.tolist(),
        "positions": tree.levels.tolist(),
        "mask": tree.mask.tolist(),
        "scores": tree.log_scores.tolist(),
    }


LOGITS = torch.tensor([2.0, 1.1, 0.3, -0.4, -1.0])


def test_a_tree_is_the_same_as_itself():
    tree = grown(LOGITS)
    found = diff_upstream.compare_trees(as_eagle_tells_it(tree), tree)
    assert not found.ties and not found.faults


def test_another_node_is_a_fault_where_scores_decide_and_a_tie_where_they_do_not():
    tree = grown(LOGITS)
    found = diff_upstream.compare_trees(as_eagle_tells_it(grown(LOGITS + torch.tensor([0, 0, 0, 0.9, 0]))), tree)
    assert found.faults
    # The third and the fourth token tie for the last slot of each pool; the wrong one, and all that hangs below it, is a tie.
    for total in (8, 13):
        first, second = (grown(torch.tensor([2.0, 1.1, *pair, -1.0]), total=total) for pair in ((0.3 + 1e-6, 0.3), (0.3, 0.3 + 1e-6)))
        found = diff_upstream.compare_trees(as_eagle_tells_it(first), second)
        assert found.ties and not found.faults


def test_wrong_positions_masks_and_scores_are_faults():
    tree = grown(LOGITS)
    theirs = as_eagle_tells_it(tree)
    assert diff_upstream.compare_trees(theirs | {"positions": [0] * 8}, tree).faults
    assert diff_upstream.compare_trees(theirs | {"scores": [x - 0.01 for x in theirs["scores"]]}, tree).faults
    mask = tree.mask.clone()
    mask[7, :7] = mask[1, :7]  # the last node hangs elsewhere
    assert diff_upstream.compare_trees(theirs | {"mask": mask.tolist(), "positions": (mask.sum(1) - 1).tolist()}, tree).faults
    assert diff_upstream.compare_trees(theirs, replace(tree, mask=tree.mask.roll(1, 0))).faults


def test_a_sampled_tree_is_not_eagles():
    assert any(diff_upstream.compare_trees(as_eagle_tells_it(grown(LOGITS)), grown(LOGITS, 1, seed=s)).faults for s in range(8))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        diff_upstream.main([str(tmp_path), "--python", "python3"])
    assert end.value.code == 2 and "is no checkout of EAGLE" in capsys.readouterr().err


@pytest.mark.parametrize("temperature, seeds", [(0, 1), (1, 3)])
def test_eagle_builds_the_same_trees(temperature, seeds, capsys):
    """Needs EAGLE_UPSTREAM (a checkout) and EAGLE_PYTHON (the Python of its environment)."""
    if "EAGLE_UPSTREAM" not in os.environ or "EAGLE_PYTHON" not in os.environ:
        pytest.skip("set EAGLE_UPSTREAM and EAGLE_PYTHON to compare with a checkout of EAGLE")
    command = f"{os.environ['EAGLE_UPSTREAM']} --python {Path(os.environ['EAGLE_PYTHON'])} --base-model-path tiny --names"
    with pytest.raises(SystemExit) as end:
        diff_upstream.main(f"{command} --temperature {temperature} --seeds {seeds} --limit 3 --max-new-token 24".split())
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    assert "The same" in out and "| `eagenerate` | same name |" in out and "missing | missing |" not in out  # every missing name has a reason
