"""The benchmark: operations, times, bytes and their comparisons are what the names say."""

import json

import pytest
import torch
from support.tiny import PROMPT, save_pair, tiny_pair

from evaluation.speed import bench, growth, timing
from evaluation.speed.bench import METHODS, compare_cycles, compare_speeds
from evaluation.speed.memory import cycle_bytes
from evaluation.speed.operations import Operations
from evaluation.speed.timing import PHASES, Clock, Sample, networks, take_turns, timed_answer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pair on disk, with three questions."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, 16)
    questions = [{"question_id": i, "category": "c", "turns": [f"w{i} w2"]} for i in range(3)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


def timed(model, method, settings, clock=None):
    """The times of one answer."""
    sample = Sample(method, 0)
    options = model.options(**settings, **METHODS[method])
    for _ in timed_answer(model, PROMPT, options, sample, clock):
        pass
    return sample


def test_operations_are_counted_and_views_are_not():
    x = torch.ones(4, 4)
    with Operations() as operations:
        y = (x + x).view(16)[2:].reshape(7, 2).transpose(0, 1)
        y.mul_(2)
        x[0, 0].item()
    assert dict(operations.counts) == {"add": 1, "mul_": 1}
    assert operations.reads == 0  # the CPU's own memory


def test_the_targets_forward_is_left_out_of_the_count():
    target = tiny_pair().target
    tokens, mask = torch.zeros(3, dtype=torch.long), torch.eye(3, dtype=torch.bool)
    cache = target.new_cache(8)
    with Operations() as operations, torch.inference_mode():
        target.tree_forward(tokens, tokens, mask, cache, [])
        whole = operations.counts.total()
        with operations.leaving_out(target):
            target.tree_forward(tokens, tokens, mask, cache, [])
        assert whole > 50 and operations.counts.total() - whole < 10
        target.tree_forward(tokens, tokens, mask, cache, [])
        assert operations.counts.total() > 2 * whole


def test_the_clock_runs_inside_its_modules_only(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

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
    clock = Clock(networks(model))
    for method in METHODS:
        sample = timed(model, method, {"temperature": 1.0, "max_new_tokens": 30}, clock)
        cycles, phases = sample.cycles, sample.phases
        assert len(cycles) == len(sample.inside) == len(phases["draft"]) > 3
        assert len(cycles) <= sample.tokens <= 30 + model.tree_defaults["depth"] + 1
        for i, cycle in enumerate(cycles):
            assert 0 < sample.inside[i] < sum(phases[phase][i] for phase in PHASES) <= cycle
        # Little time passes between the phases.
        assert sum(map(sum, phases.values())) > 0.5 * sum(cycles)


def test_answers_take_turns_and_equal_those_given_alone():
    model, log = tiny_pair(), []
    settings = {"temperature": 1.0, "max_new_tokens": 24, "seed": 1}
    samples = {method: Sample(method, 0) for method in ("plain", "topk", "rheo m=1")}

    def logged(method, sample):
        options = model.options(**settings, **METHODS[method])
        for _ in timed_answer(model, PROMPT, options, sample, None):
            log.append(method)
            yield

    take_turns([logged(*item) for item in samples.items()])
    rounds = [log[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(order) == sorted(samples) for order in rounds)
    assert len(set(map(tuple, rounds))) > 1  # the order changes
    for method, together in samples.items():
        alone = timed(model, method, settings)
        assert (together.tokens, len(together.cycles)) == (alone.tokens, len(alone.cycles))
        assert len(together.cycles) > 3


def test_speeds_are_compared_by_question():
    samples = [
        Sample(method, question, tokens=1, cycles=[seconds * factor])
        for method, factor in (("a", 1 / 1.5), ("b", 1.0))
        for question, seconds in ((1, 1), (2, 9), (3, 1))
    ]
    samples.append(Sample("a", 4, tokens=1, cycles=[100.0]))  # b has no such question
    estimate = compare_speeds(samples, "a", "b")
    assert estimate.value == pytest.approx(1.5) and estimate.high - estimate.low < 1e-9


def test_cycles_are_compared_over_the_rounds_in_which_both_methods_took_turns():
    """Three things have no influence.

    They are: a disturbance of one method, a round that is slow for both, and what a method does
    after the other has ended.
    """
    times = (1.0, 2.0, 30.0, 4.0, 5.0)
    samples = [
        Sample(method, question, cycles=[factor * x for x in times] + rest)
        for question in (1, 2)
        for method, factor, rest in (("a", 1.5, []), ("b", 1.0, [90.0, 90.0]))
    ]
    samples[0].cycles[1] = 77.0
    estimate = compare_cycles(samples, "a", "b")
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_bytes_of_a_cycle_are_those_of_the_weights_and_the_cache():
    model = tiny_pair(depth=2)
    target, head = (
        sum(parameter.numel() for parameter in network.parameters())
        for network in (model.base_model, model.draft)
    )
    target -= model.target.embedding.weight.numel()
    fusion = model.draft.fc.weight.numel()
    cache = 4 * 2 * 2 * 4 * 10  # layers, keys and values, heads, head_dim, positions
    assert cycle_bytes(model, False, 10) == 4 * (target + cache)
    assert cycle_bytes(model, True, 10) == 4 * (target + cache + fusion + 3 * (head - fusion))


def test_the_program_writes_its_report_and_ends_with_one_json_line(pair, tmp_path, capsys):
    target = f"--base-model-path {pair}/target --question-file {pair}/questions.jsonl".split()
    sizes = "--max-new-token 12 --total-token 8 --depth 2 --top-k 4 --rounds 1".split()
    command = [*target, "--ea-model-path", f"{pair}/head", *sizes, "--output", str(tmp_path)]

    bench.main([*command, "--methods", "rheo m=0", "topk"])
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]
    assert (first["method"], second["method"]) == ("rheo m=0", "topk")
    assert first["times_plain"] is None and first["cycle_over_topk"]["value"] > 0

    bench.main(command)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "bench.json").read_text()) == result
    assert "| rheo m=1 " in (tmp_path / "bench.md").read_text()
    plain, *others = result["methods"]
    assert [row["method"] for row in result["methods"]] == list(METHODS)
    assert plain["tau"] == 1 and plain["times_plain"]["value"] == 1
    for row in others:
        assert row["operations"] > 50 and (row["reads"] is None) is not torch.cuda.is_available()
    settings = result["settings"]
    assert settings["max_new_token"] == "12" and settings["total_token"] == 8
    assert "output" not in settings

    with pytest.raises(SystemExit, match="error: --ea-model-path is missing"):
        bench.main(target)


def test_growth_measures_and_plots_every_size(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "NODES", (4, 8))
    monkeypatch.setattr(growth, "DEPTHS", (1, 2))
    monkeypatch.setattr(growth, "SLOTS", (2, 4))
    monkeypatch.setattr(growth, "CONTEXTS", (8, 16, 4000))
    monkeypatch.setattr(growth, "VOCABULARIES", (100, 200))
    command = f"--base-model-path {pair}/target --ea-model-path {pair}/head".split()
    growth.main([*command, "--rounds", "1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "growth.json").read_text())["curves"]
    assert found["committed context"]["x"] == [8, 16]  # 4000 is beyond the target's positions
    assert len(found) == 5
    for curve in found.values():
        assert all(len(ms) == 2 and min(ms) > 0 for ms in curve["ms"].values())
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    lines = (tmp_path / "growth.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    row = next(row for row in cells if row[:2] == ["depth: drafting", "Top-K"])
    assert row[2].startswith("1: ")
    with pytest.raises(SystemExit, match="--rounds is 0"):
        growth.main([*command, "--rounds", "0"])
