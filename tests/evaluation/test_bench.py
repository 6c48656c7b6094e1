"""The benchmark: what it counts and times is what it says."""

import json

import pytest
import torch
from support.tiny import PROMPT, save_pair, tiny_pair

from evaluation.speed import bench, growth
from evaluation.speed.bench import (
    METHODS,
    Clock,
    Operations,
    Sample,
    compare,
    compare_cycles,
    cycle_bytes,
)


def test_operations_are_counted_and_views_are_not():
    x = torch.ones(4, 4)
    with Operations() as operations:
        y = (x + x).view(16)[2:].reshape(7, 2).transpose(0, 1)
        y.mul_(2)
        x[0, 0].item()
    assert dict(operations.counts) == {"add": 1, "mul_": 1}
    assert operations.reads == 0  # a CPU's own memory


def test_the_targets_forward_is_left_out_of_the_count():
    model = tiny_pair()
    tokens, mask = torch.zeros(3, dtype=torch.long), torch.eye(3, dtype=torch.bool)
    cache = model.target.new_cache(8)
    with Operations() as operations, torch.inference_mode():
        model.target.tree_forward(tokens, tokens, mask, cache, [])
        with_it = operations.counts.total()
        with operations.leaving_out(model.target):
            model.target.tree_forward(tokens, tokens, mask, cache, [])
        assert with_it > 50 and operations.counts.total() - with_it < 10
        model.target.tree_forward(tokens, tokens, mask, cache, [])
        assert operations.counts.total() > 2 * with_it


def test_the_clock_runs_inside_its_modules_only(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    class Slow(torch.nn.Module):
        def forward(self, seconds):
            now[0] += seconds

    slow = Slow()
    clock = Clock([slow])
    slow(2)
    now[0] += 50
    slow(3)
    assert clock.seconds == 5


def test_the_phases_of_a_cycle_add_up_to_it_and_the_networks_are_a_part_of_it():
    model = tiny_pair()
    clock = Clock(bench.networks(model))
    for method in METHODS:
        *_, found = bench.sample(
            model, PROMPT, method, 0, {"temperature": 1.0, "max_new_tokens": 30}, clock
        )
        assert len(found.cycles) == len(found.inside) == len(found.phases["draft"]) > 3
        assert len(found.cycles) <= found.tokens <= 30 + model.tree_defaults["depth"] + 1
        for i, cycle in enumerate(found.cycles):
            assert (
                0 < found.inside[i] < sum(found.phases[phase][i] for phase in bench.PHASES) <= cycle
            )
        assert sum(map(sum, found.phases.values())) > 0.5 * sum(
            found.cycles
        )  # what is between the phases is little


def test_answers_take_turns_cycle_by_cycle_and_are_what_they_would_be_alone():
    model, settings, log = tiny_pair(), {"temperature": 1.0, "max_new_tokens": 24, "seed": 1}, []

    def watched(method):
        for found in bench.sample(model, PROMPT, method, 0, settings, None):
            log.append(method)
            yield found

    methods = ["plain", "topk", "rheo m=1"]
    together = bench.in_turn({method: watched(method) for method in methods})
    rounds = [log[i : i + 3] for i in range(0, 18, 3)]
    assert (
        all(sorted(order) == sorted(methods) for order in rounds)
        and len(set(map(tuple, rounds))) > 1
    )
    for found in together:
        *_, alone = bench.sample(model, PROMPT, found.method, 0, settings, None)
        assert (found.tokens, len(found.cycles)) == (alone.tokens, len(alone.cycles)) and len(
            found.cycles
        ) > 3


def test_arms_are_compared_by_question():
    samples = [
        Sample(method, q, cycles=[t])
        for method, factor in (("a", 1.5), ("b", 1.0))
        for q, t in ((1, factor), (2, 9 * factor), (3, factor))
    ]
    samples.append(Sample("a", 4, cycles=[100.0]))  # the other method has no such question
    estimate = compare(samples, "a", "b", lambda found: (found.cycles[0], 1))
    assert estimate.value == pytest.approx(1.5) and estimate.high - estimate.low < 1e-9


def test_cycles_are_compared_round_by_round_where_both_arms_took_turns():
    """Neither a disturbance that hits one method counts, nor what is slow for both, nor what a method does after the other has ended."""
    samples = [
        Sample(method, question, cycles=[factor * x for x in (1.0, 2.0, 30.0, 4.0, 5.0)] + rest)
        for question in (1, 2) for method, factor, rest in (("a", 1.5, []), ("b", 1.0, [90.0, 90.0]))
    ]  # fmt: skip
    samples[0].cycles[1] = 77.0
    estimate = compare_cycles(samples, "a", "b")
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((1.5, 1.5, 1.5))


def test_bytes_of_a_cycle_are_the_weights_and_the_cache():
    model = tiny_pair(depth=2)
    target = (
        sum(p.numel() for p in model.base_model.parameters())
        - model.target.embedding.weight.numel()
    )
    fusion = model.draft.fc.weight.numel()
    head = sum(p.numel() for p in model.draft.parameters()) - fusion
    cache = 4 * 2 * 2 * 4 * 10  # layers, keys and values, heads, head_dim, positions
    assert cycle_bytes(model, False, 10) == 4 * (target + cache)
    assert cycle_bytes(model, True, 10) == 4 * (target + cache + fusion + 3 * head)


def test_the_program_writes_its_report_and_ends_with_one_json_line(tmp_path, capsys):
    save_pair(tmp_path, 16)
    (tmp_path / "q.jsonl").write_text(
        "".join(
            json.dumps({"question_id": i, "category": "c", "turns": [f"w{i} w2"]}) + "\n"
            for i in range(3)
        )
    )
    command = (
        f"--base-model-path {tmp_path}/target --ea-model-path {tmp_path}/head --question-file {tmp_path}/q.jsonl --max-new-token 12 "
        f"--total-token 8 --depth 2 --top-k 4 --rounds 1 --output {tmp_path}/out"
    ).split()
    bench.main([*command, "--methods", "rheo m=0", "topk"])
    first, second = json.loads(capsys.readouterr().out.strip().split("\n")[-1])["methods"]
    assert (
        (first["method"], second["method"]) == ("rheo m=0", "topk")
        and first["times_plain"] is None
        and first["cycle_over_topk"]["value"] > 0
    )
    bench.main(command)
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert [row["method"] for row in result["methods"]] == list(METHODS)
    assert result["methods"][0]["tau"] == 1 and result["methods"][0]["times_plain"]["value"] == 1
    assert all(
        row["operations"] > 50 and (row["reads"] is None) is not torch.cuda.is_available()
        for row in result["methods"][1:]
    )
    assert json.loads((tmp_path / "out/bench.json").read_text()) == result
    assert (
        result["settings"]["max_new_token"] == "12"
        and result["settings"]["total_token"] == 8
        and "output" not in result["settings"]
    )
    assert "| rheo m=1 |" in (tmp_path / "out/bench.md").read_text()
    with pytest.raises(SystemExit, match="error: --ea-model-path is missing"):
        bench.main(
            f"--base-model-path {tmp_path}/target --question-file {tmp_path}/q.jsonl".split()
        )


def test_growth_measures_every_size_and_draws_it(tmp_path, monkeypatch, capsys):
    save_pair(tmp_path, 16)
    for name, sizes in (
        ("NODES", (4, 8)),
        ("DEPTHS", (1, 2)),
        ("SLOTS", (2, 4)),
        ("CONTEXTS", (8, 16, 4000)),
        ("VOCABULARIES", (100, 200)),
    ):
        monkeypatch.setattr(growth, name, sizes)
    growth.main(
        f"--base-model-path {tmp_path}/target --ea-model-path {tmp_path}/head --rounds 1 --output {tmp_path}/out".split()
    )
    found = json.loads((tmp_path / "out/growth.json").read_text())["curves"]
    assert found["committed context"]["x"] == [8, 16]  # 4000 is beyond the target's positions
    assert all(
        len(values) == 2 and min(values) > 0
        for data in found.values()
        for values in data["ms"].values()
    )
    assert (tmp_path / "out/growth.svg").stat().st_size > 10_000 and (
        tmp_path / "out/growth.png"
    ).exists()
    assert "| depth: drafting | Top-K | 1: " in (tmp_path / "out/growth.md").read_text()
    with pytest.raises(SystemExit, match="--rounds is 0"):
        growth.main(
            f"--base-model-path {tmp_path}/target --ea-model-path {tmp_path}/head --rounds 0".split()
        )
