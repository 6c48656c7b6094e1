"""Expected acceptance: exact against every outcome of the verification, and the same contexts for all methods."""

import json

import pytest
import torch
from support.tiny import head_json, save_head, save_pair, tiny_head, tiny_pair

from eagle.model.draft.state import DraftState
from eagle.model.tuning.contexts import Context, contexts
from evaluation.contexts import calibration
from evaluation.contexts import compare as acceptance
from rheo import PoolOptions, build_tree
from rheo.analysis.expected import reach_probabilities
from rheo.certify.enumeration import Arithmetic, Enumerator, RandomDistributions
from rheo.draws import Draws


@pytest.mark.parametrize(
    "m, verification",
    [(None, "rheo"), (0, "rheo"), (1, "rheo"), (2, "rheo"), (1, "rrsw"), (2, "rrsw")],
)
def test_reach_probabilities_equal_those_summed_over_every_outcome_of_the_verification(
    m, verification
):
    trees = visited = 0
    for seed in range(12):
        distributions = RandomDistributions(4, seed, None if seed % 2 else (0, 2, 3))
        walker = Enumerator(
            distributions, PoolOptions(3, m, 0), 1, verification, Arithmetic("float64")
        )
        for budget, kept in walker.kept_trees((), (2, 4, 6)).items():
            for _, tree, paths in kept[:6]:
                reach = reach_probabilities(
                    tree,
                    lambda node: walker.arithmetic.probs(distributions.target(paths[node])),
                    verification,
                )
                emitted = walker.emitted((), [(1.0, tree, paths)])
                for node, path in enumerate(paths):
                    expected = sum(
                        w
                        for tokens, w in emitted.items()
                        if tokens[: len(path)] == path and len(tokens) > len(path)
                    )
                    assert reach[node].item() == pytest.approx(
                        expected * bool(tree.valid[node]), abs=1e-12
                    ), (seed, budget, path)
                assert reach.sum().item() == pytest.approx(
                    sum(len(tokens) * w for tokens, w in emitted.items()), abs=1e-12
                )
                trees, visited = trees + 1, visited + int((reach[1:] > 0).sum())
    assert trees > 30 and visited > 60  # the comparison was not about empty trees


def test_a_context_is_the_cycle_that_decoding_would_begin_there():
    """Tree and law at a place equal those after a fresh prefill of the same prefix, whatever methods and places came before."""
    model = tiny_pair(draft_vocab=24)
    text = torch.randint(32, (20,), generator=torch.Generator().manual_seed(3))
    methods = [
        model.options(temperature=0.7, sampling=s, seed=4, **more)
        for s, more in (("topk", {}), ("rheo", {"m": 1}), ("rheo", {"m": 0}))
    ]
    met = list(contexts(model.target, model.draft, text, [5, 6, 13], methods))
    assert [(c.position, c.method) for c in met] == [
        (position, method) for position in (5, 6, 13) for method in range(3)
    ]
    for context in met:
        position, options = context.position, methods[context.method]
        with torch.inference_mode():
            cache = model.target.new_cache(64)
            prefill = model.target.prefill(text[:position], cache, model.draft.aux_layers)
            state = DraftState(model.draft, model.target.embedding, 64)
            root_logits = state.commit(text[1 : position + 1], prefill.features)
            draws = Draws(torch.Generator().manual_seed(4 * 1_000_003 + position))
            tree = build_tree(
                text[position],
                root_logits,
                state.expand,
                options.tree,
                draws,
                model.draft.target_ids(),
            )
            assert torch.equal(tree.tokens, context.tree.tokens) and torch.equal(
                tree.parents, context.tree.parents
            )
            for node in range(tree.tokens.numel()):
                path, at = [], node
                while at:
                    path, at = [tree.tokens[at].item(), *path], tree.parents[at].item()
                if not tree.valid[node] or not path:
                    continue
                before = torch.cat(
                    (text[: position + 1], torch.tensor(path[:-1], dtype=torch.long))
                )
                p = (model.base_model(before[None]).logits[0, -1] / 0.7).softmax(-1)
                if (
                    options.sampling == "topk"
                ):  # every child of a Top-K tree is accepted with its own probability
                    expected = context.reach[tree.parents[node]] * p[path[-1]]
                    assert context.reach[node].item() == pytest.approx(expected.item(), abs=1e-5)


def test_contexts_refuse_places_outside_of_the_text():
    model = tiny_pair()
    for positions in ([], [0], [3, 2], [9]):
        with pytest.raises(ValueError, match="places are"):
            list(contexts(model.target, model.draft, torch.arange(9), positions, [model.options()]))


def test_expected_tau_equals_the_mean_of_decoded_cycles():
    """300 first cycles of real decoding from one prompt average to what the contexts expect (5 standard errors)."""
    model = tiny_pair(vocab=12, total_token=6, depth=1, top_k=3)
    prompt = torch.tensor([3, 1, 2, 3, 0, 1])
    lengths, expected = [], []
    for seed in range(300):
        options = model.options(temperature=1.0, sampling="rheo", m=1, seed=seed, max_new_tokens=2)
        result = model.generate(prompt[None], options)
        lengths.append(result.accept_lengths[0])
        text = result.output_ids[0]
        expected += [
            c.tau for c in contexts(model.target, model.draft, text, [prompt.numel()], [options])
        ]
    difference = torch.tensor(lengths, dtype=torch.float64) - torch.tensor(
        expected, dtype=torch.float64
    )
    assert abs(difference.mean()) < 5 * difference.std() / len(lengths) ** 0.5
    assert difference.std() > 0.1  # the cycles did vary


@pytest.fixture(scope="module")
def pair_on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_pair(folder)
    save_head(tiny_head(target, 24, seed=2), folder / "other", head_json(target, 24))
    (folder / "bench").mkdir()
    questions = [{"question_id": i, "category": "c", "turns": [f"w{i} w1 w2"]} for i in range(4)]
    (folder / "bench/question.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


def test_the_command_pairs_arms_and_heads_on_the_same_contexts(pair_on_disk, capsys):
    out = pair_on_disk / "rows.json"
    heads = [str(pair_on_disk / name) for name in ("head", "other")]
    acceptance.main(
        f"--base-model-path {pair_on_disk / 'target'} --ea-model-path {heads[0]} {heads[1]} --methods topk rheo:1 rheo:1:rrsw "
        f"--question-file {pair_on_disk / 'bench/question.jsonl'} --max-new-token 13 --every 4 --draws 2 "
        f"--total-token 8 --depth 2 --top-k 3 --output {out} --plot {pair_on_disk / 'calibration.svg'}".split()
    )
    content = json.loads(out.read_text())
    rows, table = content["rows"], content["table"]
    assert capsys.readouterr().out.count("| ") > 10
    assert "<svg" in (pair_on_disk / "calibration.svg").read_text()
    for entry in content["calibration"]:
        tau = next(
            row["tau"]["value"]
            for row in table
            if (row["head"], row["method"]) == (entry["head"], entry["method"])
        )
        assert 1 + sum(entry["accepted_by_kind"].values()) == pytest.approx(tau)
        assert 1 + sum(entry["accepted_by_level"]) == pytest.approx(tau)
    by_cell = {}
    for row in rows:
        by_cell.setdefault((row["head"], row["method"]), []).append(row)
    assert len(by_cell) == 6 and len({len(cell) for cell in by_cell.values()}) == 1
    for row in table:
        cell = by_cell[row["head"], row["method"]]
        assert row["tau"]["value"] == pytest.approx(sum(r["tau"] for r in cell) / len(cell))
        first = by_cell[row["head"], "topk"]
        difference = sum(r["tau"] - f["tau"] for r, f in zip(cell, first)) / len(cell)
        assert (row["to_first_method"] is None) == (row["method"] == "topk")
        if row["to_first_method"]:
            assert row["to_first_method"]["value"] == pytest.approx(difference)
        other = by_cell[heads[0], row["method"]]
        if row["to_first_head"]:
            assert row["to_first_head"]["value"] == pytest.approx(
                sum(r["tau"] - o["tau"] for r, o in zip(cell, other)) / len(cell)
            )


@pytest.mark.parametrize(
    "method", ["rheo", "rheo:x", "topk:1", "rheo:1:best", "rheo:1:rrsw:rheo", "greedy"]
)
def test_an_unknown_arm_is_refused_by_name(method):
    with pytest.raises(ValueError, match=f"method is '{method}'; write topk"):
        acceptance.parse_method(method)


def test_an_arm_is_a_pool_and_how_it_is_scored_and_verified():
    assert acceptance.parse_method("topk") == {"sampling": "topk"}
    assert acceptance.parse_method("rheo:auto") == {"sampling": "rheo", "m": "auto"}
    assert acceptance.parse_method("rheo:2:rrsw:full") == {
        "sampling": "rheo",
        "m": 2,
        "verification": "rrsw",
        "normaliser": "full",
    }


def test_bad_settings_end_with_one_line(pair_on_disk):
    base = f"--base-model-path {pair_on_disk / 'target'} --question-file {pair_on_disk / 'bench/question.jsonl'}"
    with pytest.raises(SystemExit, match="--every is 0"):
        acceptance.main(f"{base} --every 0".split())
    with pytest.raises(SystemExit, match="--ea-model-path is missing"):
        acceptance.main(base.split())


def test_a_perfectly_calibrated_top_k_lies_on_the_diagonal():
    """A draft that is the target: at temperature 1 a Top-K slot is accepted with its own proxy."""
    model = tiny_pair(total_token=9, depth=1, top_k=4)
    chance = torch.Generator().manual_seed(0)
    found = calibration.Calibration()
    for _ in range(30):
        logits = torch.randn(5, 32, generator=chance) * 2

        def expand(tokens, ranks, level, logits=logits):
            return logits[1 : 1 + tokens.numel()]

        options = model.options(temperature=1.0)
        tree = build_tree(torch.tensor(0), logits[0], expand, options.tree, Draws(chance))
        # Level 1 only: the root's law is the draft's own.
        reach = reach_probabilities(tree, lambda node, logits=logits: logits[0].softmax(-1))
        reach = torch.where(tree.levels <= 1, reach, 0)
        found.add(Context(0, 0, tree, reach))
    tried = {
        (kind, position): cell
        for kind, cells in found.tried[1].items()
        for position, cell in enumerate(cells)
        if cell[0]
    }
    assert len(tried) > 5
    for weight, proxies, accepted in tried.values():
        assert accepted / weight == pytest.approx(proxies / weight, abs=1e-5)
    assert found.survived == 0 and sum(found.by_kind().values()) == pytest.approx(
        found.by_level()[0]
    )
