"""Contexts: expected acceptance is exact, and all methods are compared on the same contexts."""

import json

import pytest
import torch
from support.tiny import PROMPT, head_json, save_head, save_pair, tiny_head, tiny_pair

from eagle.model.draft.state import DraftState
from eagle.model.tuning.contexts import Context, contexts, paired_logits
from evaluation.contexts import calibration, compare
from rheo import PoolOptions, build_tree
from rheo.analysis.expected import reach_probabilities
from rheo.certify.enumeration import Arithmetic, Enumerator, RandomDistributions
from rheo.draws import Draws


@pytest.mark.parametrize(
    "m, verification",
    [(None, "rheo"), (0, "rheo"), (1, "rheo"), (2, "rheo"), (1, "rrsw"), (2, "rrsw")],
)
def test_reach_probabilities_equal_sums_over_all_outcomes_of_the_verification(m, verification):
    trees = visited = 0
    for seed in range(12):
        target_ids = None if seed % 2 else (0, 2, 3)
        distributions = RandomDistributions(4, seed, target_ids)
        arithmetic = Arithmetic("float64")
        walker = Enumerator(distributions, PoolOptions(3, m, 0), 1, verification, arithmetic)
        for kept in walker.kept_trees((), (2, 4, 6)).values():
            for _, tree, paths in kept[:6]:

                def probs(node, paths=paths):
                    return arithmetic.probs(distributions.target(paths[node]))

                reach = reach_probabilities(tree, probs, verification)
                emitted = walker.emitted((), [(1.0, tree, paths)])
                for node, path in enumerate(paths):
                    through = [
                        weight
                        for tokens, weight in emitted.items()
                        if len(tokens) > len(path) and tokens[: len(path)] == path
                    ]
                    expected = sum(through) * bool(tree.valid[node])
                    assert reach[node].item() == pytest.approx(expected, abs=1e-12), (seed, path)
                tau = sum(len(tokens) * weight for tokens, weight in emitted.items())
                assert reach.sum().item() == pytest.approx(tau, abs=1e-12)
                trees, visited = trees + 1, visited + int((reach[1:] > 0).sum())
    assert trees > 30 and visited > 60  # the trees were not empty


def test_a_context_is_the_cycle_that_decoding_would_begin_there():
    """Tree and reach equal those after a fresh prefill, whatever was drafted before."""
    model = tiny_pair(draft_vocab=24)
    text = torch.randint(32, (20,), generator=torch.Generator().manual_seed(3))
    samplings = [{"sampling": "topk"}, {"sampling": "rheo", "m": 1}, {"sampling": "rheo", "m": 0}]
    methods = [model.options(temperature=0.7, seed=4, **sampling) for sampling in samplings]
    positions = [5, 6, 13]
    met = list(contexts(model.target, model.draft, text, positions, methods))
    expected_order = [(position, method) for position in positions for method in range(3)]
    assert [(context.position, context.method) for context in met] == expected_order
    for context in met:
        position, options = context.position, methods[context.method]
        with torch.inference_mode():
            tree = tree_after_prefill(model, text, position, options)
            assert torch.equal(tree.tokens, context.tree.tokens)
            assert torch.equal(tree.parents, context.tree.parents)
            if options.sampling == "topk":
                assert_reach_of_top_k(model, text[: position + 1], context, temperature=0.7)


def tree_after_prefill(model, text, position, options):
    """The tree of the cycle whose root is at ``position``, without any cycle before it."""
    cache = model.target.new_cache(64)
    prefill = model.target.prefill(text[:position], cache, model.draft.aux_layers)
    state = DraftState(model.draft, model.target.embedding, 64)
    root_logits = state.commit(text[1 : position + 1], prefill.features)
    draws = Draws(torch.Generator().manual_seed(options.seed * 1_000_003 + position))
    ids = model.draft.target_ids()
    return build_tree(text[position], root_logits, state.expand, options.tree, draws, ids)


def assert_reach_of_top_k(model, prefix, context, temperature):
    """Each child of a Top-K tree is accepted with its own probability."""
    tree, reach = context.tree, context.reach
    for node in range(1, tree.tokens.numel()):
        if not tree.valid[node]:
            continue
        path, at = [], node
        while at:
            path, at = [tree.tokens[at].item(), *path], tree.parents[at].item()
        before = torch.cat((prefix, torch.tensor(path[:-1], dtype=torch.long)))
        p = (model.base_model(before[None]).logits[0, -1] / temperature).softmax(-1)
        expected = reach[tree.parents[node]] * p[path[-1]]
        assert reach[node].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("positions", [[], [0], [3, 2], [9]], ids=str)
def test_contexts_refuse_positions_outside_of_the_text(positions):
    model = tiny_pair()
    with pytest.raises(ValueError, match="they must rise and lie in 1..8"):
        list(contexts(model.target, model.draft, torch.arange(9), positions, [model.options()]))


def test_paired_logits_equal_those_that_decoding_computes():
    """The target's equal a plain forward, the draft head's equal the root logits of a cycle."""
    model = tiny_pair()
    text = model.naivegenerate(PROMPT, temperature=1.0, max_new_tokens=6, seed=1)[0]
    target, draft = paired_logits(model.target, model.draft, text)
    with torch.inference_mode():
        plain = model.base_model(text[None]).logits[0]
        cache = model.target.new_cache(text.numel())
        prefill = model.target.prefill(text[:-1], cache, model.draft.aux_layers)
        state = DraftState(model.draft, model.target.embedding, text.numel())
        root_logits = state.commit(text[1:], prefill.features)
    torch.testing.assert_close(target, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(draft[-1], root_logits, atol=1e-4, rtol=1e-4)


def test_expected_tau_equals_the_mean_of_decoded_cycles():
    """300 first cycles of real decoding from one prompt, within 5 standard errors."""
    model = tiny_pair(vocab=12, total_token=6, depth=1, top_k=3)
    prompt = torch.tensor([3, 1, 2, 3, 0, 1])
    differences = []
    for seed in range(300):
        options = model.options(temperature=1.0, sampling="rheo", m=1, seed=seed, max_new_tokens=2)
        result = model.generate(prompt[None], options)
        text, positions = result.output_ids[0], [prompt.numel()]
        [context] = contexts(model.target, model.draft, text, positions, [options])
        differences.append(result.accept_lengths[0] - context.tau)
    differences = torch.tensor(differences, dtype=torch.float64)
    assert abs(differences.mean()) < 5 * differences.std() / len(differences) ** 0.5
    assert differences.std() > 0.1  # the cycles did vary


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target with two draft heads on disk, and four questions."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_pair(folder)
    save_head(tiny_head(target, 24, seed=2), folder / "other", head_json(target, 24))
    (folder / "bench").mkdir()
    questions = [{"question_id": i, "category": "c", "turns": [f"w{i} w1 w2"]} for i in range(4)]
    (folder / "bench/question.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


def target_and_questions(pair):
    files = f"--base-model-path {pair}/target --question-file {pair}/bench/question.jsonl"
    return files.split()


def mean_tau(rows):
    return sum(row["tau"] for row in rows) / len(rows)


def test_the_command_compares_methods_and_heads_on_the_same_contexts(pair, tmp_path, capsys):
    heads = [f"{pair}/head", f"{pair}/other"]
    sizes = "--max-new-token 13 --every 4 --draws 2 --total-token 8 --depth 2 --top-k 3".split()
    methods = ["--methods", "topk", "rheo:1", "rheo:1:rrsw"]
    output = f"--output {tmp_path}/rows.json --plot {tmp_path}/calibration.png".split()
    heads_given = ["--ea-model-path", *heads]
    compare.main([*target_and_questions(pair), *heads_given, *methods, *sizes, *output])

    assert capsys.readouterr().out.count("| ") > 10
    assert (tmp_path / "calibration.png").stat().st_size > 10_000
    content = json.loads((tmp_path / "rows.json").read_text())
    rows, table = content["rows"], content["table"]
    cells = {}
    for row in rows:
        cells.setdefault((row["head"], row["method"]), []).append(row)
    assert len(cells) == 6 and len({len(cell) for cell in cells.values()}) == 1
    for row in table:
        head, method = row["head"], row["method"]
        tau = mean_tau(cells[head, method])
        assert row["tau"]["value"] == pytest.approx(tau)
        assert (row["to_first_method"] is None) == (method == "topk")
        if method != "topk":
            difference = tau - mean_tau(cells[head, "topk"])
            assert row["to_first_method"]["value"] == pytest.approx(difference)
        assert (row["to_first_head"] is None) == (head == heads[0])
        if head != heads[0]:
            difference = tau - mean_tau(cells[heads[0], method])
            assert row["to_first_head"]["value"] == pytest.approx(difference)
    for entry in content["calibration"]:
        tau = mean_tau(cells[entry["head"], entry["method"]])
        assert 1 + sum(entry["accepted_by_kind"].values()) == pytest.approx(tau)
        assert 1 + sum(entry["accepted_by_level"]) == pytest.approx(tau)


@pytest.mark.parametrize(
    "method", ["rheo", "rheo:x", "topk:1", "rheo:1:best", "rheo:1:rrsw:rheo", "greedy"]
)
def test_an_unknown_method_is_refused_by_name(method):
    with pytest.raises(ValueError, match=f"method is '{method}'; write topk"):
        compare.parse_method(method)


def test_a_method_is_a_pool_with_its_normaliser_and_verification():
    assert compare.parse_method("topk") == {"sampling": "topk"}
    assert compare.parse_method("rheo:auto") == {"sampling": "rheo", "m": "auto"}
    full = {"sampling": "rheo", "m": 2, "verification": "rrsw", "normaliser": "full"}
    assert compare.parse_method("rheo:2:rrsw:full") == full


def test_bad_settings_end_with_one_line(pair):
    with pytest.raises(SystemExit, match="--every is 0"):
        compare.main([*target_and_questions(pair), "--every", "0"])
    with pytest.raises(SystemExit, match="--ea-model-path is missing"):
        compare.main(target_and_questions(pair))


def test_top_k_slots_of_a_draft_that_equals_the_target_are_accepted_with_their_proxies():
    """At temperature 1 all points of the calibration lie on the diagonal."""
    options = tiny_pair(total_token=9, depth=1, top_k=4).options(temperature=1.0)
    chance = torch.Generator().manual_seed(0)
    found = calibration.Calibration()
    for _ in range(30):
        logits = torch.randn(5, 32, generator=chance) * 2

        def expand(tokens, ranks, level, logits=logits):
            return logits[1 : 1 + tokens.numel()]

        tree = build_tree(torch.tensor(0), logits[0], expand, options.tree, Draws(chance))
        # Only at level 1 the target equals the draft: the same distribution holds everywhere.
        reach = reach_probabilities(tree, lambda node, logits=logits: logits[0].softmax(-1))
        found.add(Context(0, 0, tree, torch.where(tree.levels <= 1, reach, 0)))
    cells = [cell for by_bin in found.tried[1].values() for cell in by_bin if cell[0]]
    assert len(cells) > 5
    for weight, proxies, accepted in cells:
        assert accepted / weight == pytest.approx(proxies / weight, abs=1e-5)
    assert found.survived == 0
    assert sum(found.by_kind().values()) == pytest.approx(found.by_level()[0])
