"""The comparison with EAGLE: what is the same tree, a tie and a fault; RheoSampling inside EAGLE.

Tests with a real checkout need EAGLE_UPSTREAM (the checkout) and EAGLE_PYTHON (the Python of its
environment).
"""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rheo.integrations.eagle
from eagle.model.ea_model import EaModel
from evaluation.common.statistics import goodness_of_fit
from evaluation.upstream import diff, faults
from evaluation.upstream.checkpoints import save_for_eagle, tiny_pair
from evaluation.upstream.trees import compare_trees
from rheo import Draws, PoolOptions, TreeOptions, build_tree

PROJECT = Path(diff.__file__).parents[2]
LOGITS = torch.tensor([2.0, 1.1, 0.3, -0.4, -1.0])
FALSE_ALARM = 1e-6


@pytest.fixture(scope="module")
def upstream():
    """Checkout of EAGLE and the Python of its environment."""
    if "EAGLE_UPSTREAM" not in os.environ or "EAGLE_PYTHON" not in os.environ:
        pytest.skip("set EAGLE_UPSTREAM and EAGLE_PYTHON to run a checkout of EAGLE")
    return Path(os.environ["EAGLE_UPSTREAM"]), Path(os.environ["EAGLE_PYTHON"])


def two_level_tree(logits, m=None, total=8, seed=0):
    """A tree of two levels whose draft head returns the same logits everywhere."""
    options = TreeOptions(PoolOptions(3, m, 0), total, 1)
    draws = Draws(torch.Generator().manual_seed(seed))

    def expand(tokens, ranks, level):
        return logits.expand(tokens.numel(), -1)

    return build_tree(torch.tensor(5), logits, expand, options, draws)


def as_recorded(tree):
    """A tree as ``worker`` records it."""
    return {
        "tokens": tree.tokens.tolist(),
        "positions": tree.levels.tolist(),
        "mask": tree.mask.tolist(),
        "scores": tree.log_scores.tolist(),
    }


def test_a_tree_is_the_same_as_itself():
    tree = two_level_tree(LOGITS)
    found = compare_trees(as_recorded(tree), tree)
    assert not found.ties and not found.faults


def test_another_node_is_a_fault_if_its_score_is_clearly_different():
    other = two_level_tree(LOGITS + torch.tensor([0, 0, 0, 0.9, 0]))
    assert compare_trees(as_recorded(other), two_level_tree(LOGITS)).faults


@pytest.mark.parametrize("total", [8, 13])
def test_another_node_of_equal_score_and_all_nodes_below_it_are_ties(total):
    """The third and the fourth token tie for the last slot of each pool."""
    first, second = (
        two_level_tree(torch.tensor([2.0, 1.1, *tied, -1.0]), total=total)
        for tied in ((0.3 + 1e-6, 0.3), (0.3, 0.3 + 1e-6))
    )
    found = compare_trees(as_recorded(first), second)
    assert found.ties and not found.faults


def test_wrong_positions_masks_and_scores_are_faults():
    tree = two_level_tree(LOGITS)
    theirs = as_recorded(tree)
    assert compare_trees(theirs | {"positions": [0] * 8}, tree).faults
    wrong_scores = [score - 0.01 for score in theirs["scores"]]
    assert compare_trees(theirs | {"scores": wrong_scores}, tree).faults
    mask = tree.mask.clone()
    mask[7, :7] = mask[1, :7]  # the last node has another parent
    moved = {"mask": mask.tolist(), "positions": (mask.sum(1) - 1).tolist()}
    assert compare_trees(theirs | moved, tree).faults
    assert compare_trees(theirs, replace(tree, mask=tree.mask.roll(1, 0))).faults


def test_a_tree_with_a_sampled_slot_is_not_eagles():
    theirs = as_recorded(two_level_tree(LOGITS))
    sampled = [two_level_tree(LOGITS, m=1, seed=seed) for seed in range(8)]
    assert any(compare_trees(theirs, tree).faults for tree in sampled)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        diff.main([str(tmp_path), "--python", "python3"])
    assert end.value.code == 2 and "is no checkout of EAGLE" in capsys.readouterr().err


@pytest.mark.parametrize("temperature, seeds", [(0, 1), (1, 3)])
def test_eagle_builds_the_same_trees(temperature, seeds, upstream, capsys):
    eagle, python = upstream
    command = (
        f"{eagle} --python {python} --base-model-path tiny --names "
        f"--temperature {temperature} --seeds {seeds} --limit 3 --max-new-token 24"
    )
    with pytest.raises(SystemExit) as end:
        diff.main(command.split())
    out = capsys.readouterr().out
    assert end.value.code == 0 and "The same" in out, out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert any(row[:2] == ["`eagenerate`", "same name"] for row in rows)
    reasons = [row[2] for row in rows if row[1:2] == ["missing"]]
    assert reasons and not {"", "missing"} & set(reasons)


def test_the_documented_faults_of_eagle_are_seen(upstream):
    rows = diff.faults_table(*upstream).split("\n")[2:]
    documented = (PROJECT / "docs/UPSTREAM.md").read_text()
    assert len(rows) == len(faults.FAULTS)
    unseen = [fault.__name__ for fault, row in zip(faults.FAULTS, rows) if "not seen" in row]
    assert unseen == (["choosing_a_tree_needs_cuda"] if torch.cuda.is_available() else [])
    assert all(f"`{fault.__name__}`" in documented for fault in faults.FAULTS)


@pytest.mark.parametrize("verification", ["rheo", "rrsw"])
def test_rheosampling_inside_eagle_is_lossless(verification, upstream, tmp_path):
    """The second and third tokens of 1,500 texts have the target's exact distribution.

    Chi-square at a false-alarm rate of 1e-6. The first token comes from EAGLE's own prefill.
    """
    eagle, python = upstream
    vocab, stop, samples, prompt = 8, 2, 1500, [4, 5, 6, 3]
    size = {"total_token": 8, "depth": 1, "top_k": 3}
    base, head = tiny_pair(tmp_path, vocab, draft_vocab=6)
    model = EaModel.from_pretrained(base_model_path=base, ea_model_path=head, dtype="fp32", **size)
    target, copy = save_for_eagle(model, head, tmp_path / "eagle")
    job = {
        "eagle": str(eagle),
        "base": str(target),
        "head": str(copy),
        "prompts": [prompt],
        "seeds": list(range(samples)),
        "temperature": 1.0,
        "max_new_tokens": 2,
        "max_length": 64,
        "threads": 1,
        "rheo": {"m": 1, "verification": verification},
        "project": str(PROJECT),
        **size,
    }
    records = diff.run_eagle(python, job)
    texts = [tuple(record["output"][len(prompt) : len(prompt) + 3]) for record in records]

    def exact(*tokens):
        return model.base_model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].softmax(-1)

    counts, groups = Counter(texts), []
    for first, total in Counter(text[0] for text in texts).items():
        if first == stop or total < 20:
            continue
        probs, observed, second = [], [], exact(first)
        for token in range(vocab):
            if token == stop:
                probs.append(second[token].item())
                observed.append(sum(n for text, n in counts.items() if text[:2] == (first, stop)))
            else:
                probs += (second[token] * exact(first, token)).tolist()
                observed += [counts[first, token, last] for last in range(vocab)]
        groups.append((np.array(observed), np.array(probs) * total))
    fit = goodness_of_fit(groups, FALSE_ALARM)
    assert fit.degrees > 20 and fit.p_value > FALSE_ALARM, fit
    assert sum(len(record["cycles"]) for record in records)
    # Drafted tokens were accepted.
    assert any(record["new_token"] > record["cycles_run"] for record in records)


def test_a_model_that_is_not_eagles_is_refused_by_name():
    class Model:
        ea_layer = torch.nn.Linear(1, 1)

    problem = "ea_layer.topK_genrate of this EAGLE has the arguments None, expected .*cb7e084"
    with pytest.raises(ValueError, match=problem):
        rheo.integrations.eagle.enable(Model())


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_command_line_without_eagle_is_refused(has_folder, tmp_path, capsys):
    arguments = [str(tmp_path), "--", "-m", "x"] if has_folder else []
    with pytest.raises(SystemExit):
        rheo.integrations.eagle.main(arguments)
    problem = "no checkout of EAGLE" if has_folder else "the following arguments are required"
    assert problem in capsys.readouterr().err


def test_leaf_paths_lead_from_the_root_to_every_leaf():
    tree = two_level_tree(LOGITS)
    paths = rheo.integrations.eagle.leaf_paths(tree).tolist()
    paths = [[node for node in path if node >= 0] for path in paths]
    assert {node for path in paths for node in path} == set(range(8))
    for path in paths:
        assert path[0] == 0
        assert all(tree.parents[child] == node for node, child in zip(path, path[1:]))
        assert not (tree.parents[1:] == path[-1]).any()
