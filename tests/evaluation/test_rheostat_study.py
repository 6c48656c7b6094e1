"""The studies behind ``--m auto``: limits of one level, and methods over temperatures."""

import json

import pytest
import torch
from support.tiny import save_pair

from evaluation.contexts import temperatures
from evaluation.studies import rheostat as rheostat_study
from evaluation.studies.rheostat import LEADS, ORACLE, POOL, TOP_K, VERIFIER, acceptances
from rheo.analysis import one_level as theory


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("reduced", [False, True])
def test_acceptances_equal_the_closed_forms_over_the_whole_vocabulary(temperature, reduced):
    """The study lumps together what the draft cannot name."""
    generator = torch.Generator().manual_seed(0)
    target_ids = torch.randperm(300, generator=generator)[:200] if reduced else None
    logits = torch.randn(20, 200 if reduced else 300, generator=generator, dtype=torch.float64) * 4
    p = torch.randn(20, 300, generator=generator, dtype=torch.float64)
    p[:, slice(None) if target_ids is None else target_ids] += (
        logits  # draft and target agree by and large
    )
    p = p.softmax(-1)
    found = acceptances(p, logits, target_ids, 4, temperature)
    values, positions = logits.topk(128)
    q = torch.zeros_like(p).scatter_(
        1, positions if target_ids is None else target_ids[positions], values.softmax(-1)
    )
    torch.testing.assert_close(found[TOP_K], theory.top_k_acceptance(p, q, 4))
    for m in LEADS:
        q_tail = theory.tail_probs(q, m, temperature)
        torch.testing.assert_close(found[f"m = {m}"], theory.rheo_acceptance(p, q, q_tail, 4))
        if m == 1:
            torch.testing.assert_close(found[VERIFIER], theory.best_acceptance(p, q, q_tail, 4))
            assert (found[VERIFIER] >= found["m = 1"] - 1e-12).all()
    fixed = torch.stack([found[name] for name in (TOP_K, *(f"m = {m}" for m in LEADS))])
    assert torch.equal(found[ORACLE], fixed.amax(0)) and found[ORACLE].mean() >= fixed.mean(1).max()
    assert (found[POOL] >= found[TOP_K] - 1e-12).all() and (found[ORACLE] <= 1 + 1e-12).all()


def test_a_sampled_slot_can_accept_more_than_any_k_chosen_tokens():
    """So the K likeliest tokens of p are no bound for it: p and q uniform over 100 tokens."""
    found = acceptances(
        torch.full((1, 100), 0.01, dtype=torch.float64), torch.zeros(1, 100), None, 4, 1.0
    )
    assert found[POOL].item() == pytest.approx(0.04) and found["m = 1"].item() > 0.9


def test_a_draft_that_is_certain_and_an_empty_tail_are_no_special_cases():
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0]], dtype=torch.float64)
    found = acceptances(p, torch.tensor([[0.0, -2000.0, -2001.0, -2002.0]]), None, 2, 1.0)
    assert all(value.isfinite().all() for value in found.values())
    assert found[TOP_K].item() == pytest.approx(0.9) and found["m = 1"].item() == pytest.approx(
        0.7
    )  # nobody takes the place of a slot that is absent


def file_of(folder, temperature, gains, questions=4, contexts=3):
    """A file of ``evaluation.acceptance`` in which each method has some more than Top-K at every context."""
    rows = [
        {"question_id": f"set/{q}", "position": c, "head": "head", "method": method, "draw": 0, "tau": 2 + 0.1 * q + gain + 0.01 * (c - 1) * gain}
        for q in range(questions) for c in range(contexts) for method, gain in gains.items()
    ]  # fmt: skip
    levels = {
        "1": {"lead": [[0.5, 0.6, 30]], "sampled": [[0.2, 0.1, 20]], "fill": []},
        "2": {"lead": [], "sampled": [], "fill": [[0.1, 0.05, 9]]},
    }
    calibration = [
        {"head": "head", "method": method, "calibration_by_level": levels} for method in gains
    ]
    path = folder / f"contexts-T{temperature}.json"
    settings = {"temperature": temperature, "methods": list(gains)}
    path.write_text(
        json.dumps(
            {
                "settings": settings,
                "rows": rows + [row | {"draw": 1} for row in rows],
                "calibration": calibration,
            }
        )
    )
    return str(path)


def test_arms_over_temperatures_are_compared_on_the_same_contexts(tmp_path, capsys):
    files = [
        file_of(tmp_path, 1.0, {"topk": 0.0, "rheo:0": 0.2, "rheo:1": 0.3, "rheo:auto": 0.4}),
        file_of(tmp_path, 0.0, {"topk": 0.0, "rheo:0": 0.1, "rheo:1": -0.1, "rheo:auto": 0.0}),
    ]
    temperatures.main([*files, "--output", str(tmp_path / "out"), "--levels-of", "rheo:1"])
    lines = capsys.readouterr().out.splitlines()
    assert "rheo:auto minus rheo:1" in lines[0]
    cold, hot, mean = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:5])
    assert cold[:2] == ["0", "12"] and hot[:2] == ["1", "12"] and mean[:2] == ["mean", "24"]
    assert [float(cell.split()[0]) for cell in hot[3:]] == pytest.approx(
        [0.2, 0.3, 0.4, 0.1, 0.1], abs=2e-3
    )
    assert (
        "(rheo:1)" in hot[-1]
        and "(rheo:0)" in cold[-1]
        and float(cold[-1].split()[0]) == pytest.approx(-0.1, abs=2e-3)
    )
    assert [float(cell.split()[0]) for cell in mean[3:]] == pytest.approx(
        [0.15, 0.1, 0.2, 0.1, 0.0], abs=2e-3
    )
    assert "(+4.9 %)" in cold[-2]  # 0.1 of 2 - 0.1 + 0.15, the last being the questions' own
    for name in ("temperatures.svg", "levels-rheo-1.svg"):
        assert "<svg" in (tmp_path / "out" / name).read_text()


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    one = file_of(tmp_path, 1.0, {"topk": 0.0, "rheo:1": 0.3})
    other = tmp_path / "other"
    other.mkdir()
    for files, message in (
        (
            [one, file_of(other, 1.0, {"topk": 0.0, "rheo:1": 0.3})],
            "second file of temperature 1.0",
        ),
        (
            [one, file_of(other, 0.5, {"topk": 0.0, "rheo:2": 0.3})],
            r"was made with methods \['topk', 'rheo:2'\]",
        ),
        ([str(tmp_path / "not.json")], "not.json"),
    ):
        (tmp_path / "not.json").write_text("{}")
        with pytest.raises(SystemExit, match=message):
            temperatures.main([*files, "--output", str(tmp_path / "out")])
    with pytest.raises(
        SystemExit, match="method 'rheo:9' was not measured; the methods are topk, rheo:1"
    ):
        temperatures.main([one, "--output", str(tmp_path / "out"), "--levels-of", "rheo:9"])


def test_the_study_of_limits_runs_on_a_pair(tmp_path, monkeypatch, capsys):
    save_pair(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    names = (
        "target",
        "head",
        "--bench-name",
        "demo",
        "--question-end",
        "2",
        "--max-new-token",
        "12",
        "--top-k",
        "3",
        "--temperature",
        "0",
        "1",
    )
    arguments = [
        "--base-model-path",
        str(tmp_path / names[0]),
        "--ea-model-path",
        str(tmp_path / names[1]),
        *names[2:],
    ]
    rheostat_study.main([*arguments, "--output", str(tmp_path / "limits")])
    content = json.loads((tmp_path / "limits.json").read_text())
    assert (tmp_path / "limits.md").read_text() in capsys.readouterr().out
    assert set(content["table"]) == {"0.0", "1.0"} and {
        m for m in content["table"]["1.0"] if m.startswith("m =")
    } == {"m = 0", "m = 1", "m = 2"}
    for row in content["table"].values():
        assert row[ORACLE]["value"] >= max(
            row[name]["value"] for name in (TOP_K, "m = 0", "m = 1", "m = 2")
        )
    with pytest.raises(SystemExit, match="--top-k is 25; it must lie in 1..24"):
        rheostat_study.main([*arguments[:-5], "--top-k", "25"])
