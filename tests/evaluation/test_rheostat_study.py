"""The studies: limits of one level, RheoVerification against RRSw, methods over temperatures."""

import json

import pytest
import torch
from support.tiny import save_pair

from evaluation.contexts import temperatures
from evaluation.studies import rheostat, rrsw
from evaluation.studies.rheostat import LEADS, ORACLE, POOL, TOP_K, VERIFIER, acceptances
from rheo.analysis import one_level


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("reduced", [False, True])
def test_acceptances_equal_the_closed_forms_over_the_whole_vocabulary(temperature, reduced):
    """The study treats all tokens outside the support as one."""
    generator = torch.Generator().manual_seed(0)
    draft_vocab = 200 if reduced else 300
    ids = torch.randperm(300, generator=generator)[:200] if reduced else torch.arange(300)
    logits = torch.randn(20, draft_vocab, generator=generator, dtype=torch.float64) * 4
    p = torch.randn(20, 300, generator=generator, dtype=torch.float64)
    p[:, ids] += logits  # draft head and target agree roughly
    p = p.softmax(-1)
    found = acceptances(p, logits, ids if reduced else None, 4, temperature)
    values, positions = logits.topk(128)
    q = torch.zeros_like(p).scatter_(1, ids[positions], values.softmax(-1))
    torch.testing.assert_close(found[TOP_K], one_level.top_k_acceptance(p, q, 4))
    for m in LEADS:
        q_tail = one_level.tail_probs(q, m, temperature)
        torch.testing.assert_close(found[f"m = {m}"], one_level.rheo_acceptance(p, q, q_tail, 4))
        if m == 1:
            best = one_level.best_acceptance(p, q, q_tail, 4)
            torch.testing.assert_close(found[VERIFIER], best)
            assert (found[VERIFIER] >= found["m = 1"] - 1e-12).all()
    methods = torch.stack([found[name] for name in (TOP_K, *(f"m = {m}" for m in LEADS))])
    assert torch.equal(found[ORACLE], methods.amax(0))
    assert found[ORACLE].mean() >= methods.mean(1).max()
    assert (found[POOL] >= found[TOP_K] - 1e-12).all() and (found[ORACLE] <= 1 + 1e-12).all()


def test_a_sampled_slot_can_accept_more_than_any_k_chosen_tokens():
    """The K likeliest tokens of p are no bound for it: here p and q are uniform over 100 tokens."""
    p = torch.full((1, 100), 0.01, dtype=torch.float64)
    found = acceptances(p, torch.zeros(1, 100), None, 4, 1.0)
    assert found[POOL].item() == pytest.approx(0.04) and found["m = 1"].item() > 0.9


def test_a_certain_draft_with_an_empty_tail_is_no_special_case():
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0]], dtype=torch.float64)
    logits = torch.tensor([[0.0, -2000.0, -2001.0, -2002.0]])
    found = acceptances(p, logits, None, 2, 1.0)
    assert all(value.isfinite().all() for value in found.values())
    assert found[TOP_K].item() == pytest.approx(0.9)
    assert found["m = 1"].item() == pytest.approx(0.7)  # no slot replaces the absent one


def test_the_study_of_limits_runs_on_a_pair(tmp_path, capsys):
    save_pair(tmp_path)
    pair = f"--base-model-path {tmp_path}/target --ea-model-path {tmp_path}/head".split()
    questions = "--bench-name demo --question-end 2 --max-new-token 12".split()
    settings = f"--top-k 3 --temperature 0 1 --output {tmp_path}/limits".split()
    rheostat.main([*pair, *questions, *settings])
    content = json.loads((tmp_path / "limits.json").read_text())
    assert (tmp_path / "limits.md").read_text() in capsys.readouterr().out
    assert set(content["table"]) == {"0.0", "1.0"}
    for row in content["table"].values():
        methods = [TOP_K, *(name for name in row if name.startswith("m ="))]
        assert methods == [TOP_K, "m = 0", "m = 1", "m = 2"]
        assert row[ORACLE]["value"] >= max(row[name]["value"] for name in methods)
    with pytest.raises(SystemExit, match="--top-k is 25; it must lie in 1..24"):
        rheostat.main([*pair, "--top-k", "25"])


def test_the_rrsw_study_compares_every_setting_once():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    found = list(rrsw.compare(probs, probs))
    counted = [(n, m) for n, m, gain, _ in found if gain.numel()]
    # Larger n have more slots than there are tokens.
    assert counted == [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)]
    gains = torch.cat([gain for _, _, gain, _ in found])
    assert (gains >= -rrsw.EQUAL).all()
    name, count, more, equal, less, *_ = rrsw.summarise("name", found)
    assert (name, count, less) == ("name", "6", "0.00 %")
    assert sum(float(share.removesuffix(" %")) for share in (more, equal)) == pytest.approx(100)


def acceptance_file(folder, temperature, gains):
    """A file of ``evaluation.acceptance`` in which each method has a gain over Top-K.

    There are four questions, three contexts of each, and two trees at each context.
    """
    rows = [
        {
            "question_id": f"set/{question}",
            "position": position,
            "head": "head",
            "method": method,
            "draw": number,
            "tau": 2 + 0.1 * question + gain + 0.01 * (position - 1) * gain,
        }
        for number in range(2)
        for question in range(4)
        for position in range(3)
        for method, gain in gains.items()
    ]
    levels = {
        "1": {"lead": [[0.5, 0.6, 30]], "sampled": [[0.2, 0.1, 20]], "fill": []},
        "2": {"lead": [], "sampled": [], "fill": [[0.1, 0.05, 9]]},
    }
    content = {
        "settings": {"temperature": temperature, "methods": list(gains)},
        "rows": rows,
        "calibration": [
            {"head": "head", "method": method, "calibration_by_level": levels} for method in gains
        ],
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"contexts-T{temperature}.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_methods_over_temperatures_are_compared_on_the_same_contexts(tmp_path, capsys):
    at_one = {"topk": 0.0, "rheo:0": 0.2, "rheo:1": 0.3, "rheo:auto": 0.4}
    at_zero = {"topk": 0.0, "rheo:0": 0.1, "rheo:1": -0.1, "rheo:auto": 0.0}
    files = [acceptance_file(tmp_path, 1.0, at_one), acceptance_file(tmp_path, 0.0, at_zero)]
    temperatures.main([*files, "--output", str(tmp_path / "out"), "--levels-of", "rheo:1"])
    lines = capsys.readouterr().out.splitlines()
    assert "rheo:auto minus rheo:1" in lines[0]
    cold, hot, mean = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:5])
    assert cold[:2] == ["0", "12"] and hot[:2] == ["1", "12"] and mean[:2] == ["mean", "24"]

    def values(cells):
        return pytest.approx([float(cell.split()[0]) for cell in cells[3:]], abs=2e-3)

    assert values(hot) == [0.2, 0.3, 0.4, 0.1, 0.1]
    assert values(cold) == [0.1, -0.1, 0.0, 0.1, -0.1]
    assert values(mean) == [0.15, 0.1, 0.2, 0.1, 0.0]
    assert "(rheo:1)" in hot[-1] and "(rheo:0)" in cold[-1]
    # 0.1 of 2 - 0.1 + 0.15, where 0.15 is the mean of what the questions add.
    assert "(+4.9 %)" in cold[-2]
    for name in ("temperatures.png", "levels-rheo-1.png"):
        assert (tmp_path / "out" / name).stat().st_size > 10_000


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    output = ["--output", str(tmp_path / "out")]
    one = acceptance_file(tmp_path, 1.0, {"topk": 0.0, "rheo:1": 0.3})
    same = acceptance_file(tmp_path / "same", 1.0, {"topk": 0.0, "rheo:1": 0.3})
    other = acceptance_file(tmp_path / "other", 0.5, {"topk": 0.0, "rheo:2": 0.3})
    (tmp_path / "not.json").write_text("{}")
    with pytest.raises(SystemExit, match="second file of temperature 1.0"):
        temperatures.main([one, same, *output])
    with pytest.raises(SystemExit, match=r"was made with methods \['topk', 'rheo:2'\]"):
        temperatures.main([one, other, *output])
    with pytest.raises(SystemExit, match="not.json"):
        temperatures.main([str(tmp_path / "not.json"), *output])
    with pytest.raises(SystemExit, match="'rheo:9' was not measured; the methods are topk, rheo:1"):
        temperatures.main([one, *output, "--levels-of", "rheo:9"])
