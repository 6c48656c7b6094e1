"""Table 4 (acceptance of one level) and the coverage of table 5, on a tiny pair."""

import csv
import json
import math

import pytest
import torch
from support.tiny import tiny_pair

from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from evaluation.common.questions import Question
from evaluation.paper import coverage, grids, one_level
from rheo import SAMPLED, Draws, build_pools
from rheo.analysis import one_level as theory


@pytest.mark.full
def test_counted_and_predicted_acceptance_of_one_level_agree(monkeypatch):
    """Within 4 standard errors of 3,000 contexts, for every method of table 4."""
    model = tiny_pair(vocab=12, total_token=4, depth=0, top_k=3)

    def text(model, question, template, warpers, tokens, seed):
        prompt = torch.tensor([[3, 1]])
        seed = question.question_id
        return model.naivegenerate(prompt, **warpers, max_new_tokens=tokens, seed=seed)[0], 2

    monkeypatch.setattr(one_level, "continuation", text)
    questions = [Question(i, "c", ("?",)) for i in range(15)]
    answers = one_level.measure(model, {"qa": questions}, "auto", 1.0, 202, 1)
    table = one_level.summarise(list(answers))
    assert [row["method"] for row in table] == ["topk", "rheo-m1-rrsw", "rheo-m1"]
    for row in table:
        predicted, n = row["predicted"].value, row["contexts"]
        assert n >= 3000
        assert abs(row["difference"].value) < 4 * (predicted * (1 - predicted) / n) ** 0.5, row
    by_method = {row["method"]: row["predicted"].value for row in table}
    assert by_method["topk"] + 0.05 < by_method["rheo-m1-rrsw"] < by_method["rheo-m1"]


@pytest.mark.parametrize("temperature, name", [(1, "table4"), (0, "table4-T0")])
def test_the_one_level_table_is_written(run, tmp_path, capsys, temperature, name):
    flags = f"--limit 2 --seeds 2 --max-new-token 20 --results {tmp_path}"
    one_level.main(
        f"--pair demo --bench-name qa mt_bench {flags} --temperature {temperature}".split()
    )
    path = tmp_path / f"table4/demo/cap20/{name}.json"
    content = json.loads(path.read_text())
    assert len(content["answers"]) == 2 * 2 * 2 * 3
    assert [row["bench"] for row in content["rows"]] == ["qa"] * 3 + ["mt_bench"] * 3
    assert content["settings"]["dtype"] == "float32" and content["settings"]["seeds"] == 2
    with path.with_suffix(".csv").open() as file:
        counted = [float(row["counted"]) for row in csv.DictReader(file)]
    assert counted == pytest.approx([row["counted"]["value"] for row in content["rows"]])
    assert not any(math.isnan(row["predicted"]["value"]) for row in content["rows"])
    out = capsys.readouterr().out
    assert "| MT    | rheo-m1      |" in out and "| 0.854 |" in out
    assert "Settings: pair demo" in path.with_suffix(".md").read_text()
    if temperature == 0:  # nothing is random, so the prediction is exact
        differences = [row["difference"]["value"] for row in content["rows"]]
        assert differences == pytest.approx([0] * 6)


def test_closed_forms_and_pools_mean_the_same_tokens_where_logits_tie():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 64, generator=generator).mul(2).round().bfloat16()  # many ties
    p = torch.randn(200, 64, generator=generator).double().softmax(-1)
    topk, _, rheo = grids.ONE_LEVEL.methods
    for method in (topk, rheo):
        sizes = {"total_token": 4, "depth": 0, "tree_top_k": 3}
        tree = DecodingOptions(WarperOptions(1.0), method.sampling, method.m, **sizes).tree
        pools = build_pools(logits, tree.pool, Draws(torch.Generator().manual_seed(0)))
        found = one_level.predicted(p, logits, None, method, tree)
        if method == topk:
            expected = p.gather(1, pools.tokens).sum(-1)
        else:  # with the pool's own order and tail distribution
            m = pools.kinds.index(SAMPLED)
            order = torch.cat((pools.tokens[:, :m], pools.draft_tail), 1)
            scores = torch.arange(64, 0, -1).double().expand(200, -1)
            weights = pools.tail_weights / pools.tail_weights.sum(-1, keepdim=True)
            q = torch.zeros_like(p).scatter_(1, order, scores)
            q_tail = torch.zeros_like(p).scatter_(1, pools.draft_tail, weights.double())
            expected = theory.rheo_acceptance(p, q, q_tail, 3)
        assert torch.allclose(found, expected, atol=1e-6), method


def test_coverage_is_the_mass_of_the_support_over_all_nodes_with_a_pool(
    run, tmp_path, capsys, monkeypatch
):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert coverage.mass(logits, 2).item() == pytest.approx(logits.softmax(-1)[0, 2:].sum().item())
    assert coverage.mass(logits, 9).item() == pytest.approx(1)
    monkeypatch.setattr(coverage, "SUPPORTS", (4, 24))
    monkeypatch.setattr(coverage, "PAPER", {4: 0.5, 24: 1.0})
    flags = f"--bench-name qa --limit 2 --max-new-token 20 --results {tmp_path}"
    coverage.main(["--pair", "demo", *flags.split()])
    rows = json.loads((tmp_path / "table5/demo/cap20/coverage.json").read_text())["rows"]
    assert [row["support"] for row in rows] == [4, 24]
    assert "1.000 ± 0.000 |" in capsys.readouterr().out
    assert 4 / 24 < rows[0]["coverage"]["value"] < 1
    assert rows[1]["coverage"]["value"] == pytest.approx(1)
