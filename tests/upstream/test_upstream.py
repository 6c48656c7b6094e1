"""The comparison with EAGLE: what counts as the same tree, as a tie, as a fault; and a run where a checkout is at hand."""

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
from evaluation.upstream import diff as diff_upstream
from evaluation.upstream import faults as upstream_faults
from rheo import Draws, PoolOptions, TreeOptions, build_tree


def grown(logits, m=None, total=8, seed=0):
    """A tree of two levels whose draft says the same everywhere."""
    options = TreeOptions(PoolOptions(3, m, 0), total, 1)
    draws = Draws(torch.Generator().manual_seed(seed))
    return build_tree(
        torch.tensor(5),
        logits,
        lambda tokens, *_: logits.expand(tokens.numel(), -1),
        options,
        draws,
    )


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
    found = diff_upstream.compare_trees(
        as_eagle_tells_it(grown(LOGITS + torch.tensor([0, 0, 0, 0.9, 0]))), tree
    )
    assert found.faults
    # The third and the fourth token tie for the last slot of each pool; the wrong one, and all that hangs below it, is a tie.
    for total in (8, 13):
        first, second = (
            grown(torch.tensor([2.0, 1.1, *pair, -1.0]), total=total)
            for pair in ((0.3 + 1e-6, 0.3), (0.3, 0.3 + 1e-6))
        )
        found = diff_upstream.compare_trees(as_eagle_tells_it(first), second)
        assert found.ties and not found.faults


def test_wrong_positions_masks_and_scores_are_faults():
    tree = grown(LOGITS)
    theirs = as_eagle_tells_it(tree)
    assert diff_upstream.compare_trees(theirs | {"positions": [0] * 8}, tree).faults
    assert diff_upstream.compare_trees(
        theirs | {"scores": [x - 0.01 for x in theirs["scores"]]}, tree
    ).faults
    mask = tree.mask.clone()
    mask[7, :7] = mask[1, :7]  # the last node hangs elsewhere
    assert diff_upstream.compare_trees(
        theirs | {"mask": mask.tolist(), "positions": (mask.sum(1) - 1).tolist()}, tree
    ).faults
    assert diff_upstream.compare_trees(theirs, replace(tree, mask=tree.mask.roll(1, 0))).faults


def test_a_sampled_tree_is_not_eagles():
    assert any(
        diff_upstream.compare_trees(
            as_eagle_tells_it(grown(LOGITS)), grown(LOGITS, 1, seed=s)
        ).faults
        for s in range(8)
    )


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
        diff_upstream.main(
            f"{command} --temperature {temperature} --seeds {seeds} --limit 3 --max-new-token 24".split()
        )
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    assert (
        "The same" in out
        and "| `eagenerate` | same name |" in out
        and "missing | missing |" not in out
    )  # every missing name has a reason


def test_the_faults_told_of_eagle_are_seen_in_it():
    """Needs EAGLE_UPSTREAM and EAGLE_PYTHON."""
    if "EAGLE_UPSTREAM" not in os.environ or "EAGLE_PYTHON" not in os.environ:
        pytest.skip(
            "set EAGLE_UPSTREAM and EAGLE_PYTHON to look for the faults of a checkout of EAGLE"
        )
    table = diff_upstream.faults_table(
        Path(os.environ["EAGLE_UPSTREAM"]), Path(os.environ["EAGLE_PYTHON"])
    )
    rows = table.split("\n")[2:]
    documented = (Path(diff_upstream.__file__).parents[2] / "docs/UPSTREAM.md").read_text()
    unseen = ["choosing_a_tree_needs_cuda"] if torch.cuda.is_available() else []
    assert len(rows) == len(upstream_faults.FAULTS)
    assert [
        fault.__name__ for fault, row in zip(upstream_faults.FAULTS, rows) if "not seen" in row
    ] == unseen
    assert all(f"`{fault.__name__}`" in documented for fault in upstream_faults.FAULTS)


@pytest.mark.parametrize("verification", ["rheo", "rrsw"])
def test_rheosampling_inside_eagle_is_lossless(verification, tmp_path):
    """1,500 short texts of EAGLE with RheoSampling enabled against the target's exact law of the second and third token (chi-square,
    false-alarm rate 1e-6). The first token is EAGLE's own, from the prefill. Needs EAGLE_UPSTREAM and EAGLE_PYTHON."""
    if "EAGLE_UPSTREAM" not in os.environ or "EAGLE_PYTHON" not in os.environ:
        pytest.skip(
            "set EAGLE_UPSTREAM and EAGLE_PYTHON to run RheoSampling inside a checkout of EAGLE"
        )
    base, head = diff_upstream.tiny_pair(tmp_path, vocab=8, draft_vocab=6)
    model = EaModel.from_pretrained(base, head, dtype="fp32", total_token=8, depth=1, top_k=3)
    target, copy = diff_upstream.readable_by_eagle(model, head, tmp_path / "eagle")
    prompt, samples = [4, 5, 6, 3], 1500
    job = {
        "eagle": os.environ["EAGLE_UPSTREAM"], "base": str(target), "head": str(copy), "prompts": [prompt], "seeds": list(range(samples)),
        "temperature": 1.0, "max_new_tokens": 2, "threads": 1, "max_length": 64, "total_token": 8, "depth": 1, "top_k": 3,
        "rheo": {"m": 1, "verification": verification}, "project": str(Path(diff_upstream.__file__).parents[2]),
    }  # fmt: skip
    records = diff_upstream.run_eagle(Path(os.environ["EAGLE_PYTHON"]), job)
    texts = [tuple(record["output"][len(prompt) : len(prompt) + 3]) for record in records]
    counts, groups = Counter(texts), []
    for first, total in Counter(text[0] for text in texts).items():
        if first == 2 or total < 20:
            continue
        cells, observed = [], []
        second = model.base_model(torch.tensor([[*prompt, first]])).logits[0, -1].softmax(-1)
        for token in range(8):
            if token == 2:  # the end of the text
                cells.append(second[token].item())
                observed.append(sum(n for text, n in counts.items() if text[:2] == (first, 2)))
                continue
            third = (
                model.base_model(torch.tensor([[*prompt, first, token]])).logits[0, -1].softmax(-1)
            )
            cells += (second[token] * third).tolist()
            observed += [counts[first, token, last] for last in range(8)]
        groups.append((np.array(observed), np.array(cells) * total))
    fit = goodness_of_fit(groups, 1e-6)
    accepted = sum(len(record["cycles"]) for record in records)
    assert fit.degrees > 20 and fit.p_value > 1e-6, fit
    assert (
        any(record["new_token"] > record["cycles_run"] for record in records) and accepted
    )  # drafted tokens were accepted


def test_a_model_that_is_not_eagles_is_refused_by_name():
    class Model:
        ea_layer = torch.nn.Linear(1, 1)

    with pytest.raises(
        ValueError,
        match="ea_layer.topK_genrate of this EAGLE has the arguments None, expected .*cb7e084",
    ):
        rheo.integrations.eagle.enable(Model())


def test_a_command_line_without_eagle_is_refused(tmp_path, capsys):
    for arguments, problem in (
        ([str(tmp_path), "--", "-m", "x"], "is no checkout of EAGLE"),
        ([], "the following arguments are required"),
    ):
        with pytest.raises(SystemExit):
            rheo.integrations.eagle.main(arguments)
        assert problem in capsys.readouterr().err


def test_leaf_paths_lead_from_the_root_to_every_leaf():
    tree = grown(LOGITS)
    paths = rheo.integrations.eagle.leaf_paths(tree)
    nodes = {node for path in paths.tolist() for node in path if node >= 0}
    assert nodes == set(range(8)) and all(path[0] == 0 for path in paths.tolist())
    for path in paths.tolist():
        path = [node for node in path if node >= 0]
        assert (
            all(tree.parents[b] == a for a, b in zip(path, path[1:]))
            and not (tree.parents[1:] == path[-1]).any()
        )
