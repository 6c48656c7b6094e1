"""The paper's experiments on a tiny pair: cells, parts, resuming, tables and figures."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from support.tiny import save_pair, tiny_pair

from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from evaluation import report
from evaluation.common.answer_file import read_answers
from evaluation.common.questions import Question
from evaluation.common.statistics import Statistic
from evaluation.paper import coverage, experiment, grids, one_level, tables
from rheo import SAMPLED, Draws, build_pools
from rheo.analysis import one_level as theory


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    for bench in grids.BENCHES:
        place = folder / "home/rheosampling" / bench
        place.mkdir(parents=True)
        questions = [
            {"question_id": i, "category": bench, "turns": [f"w{i} w{len(bench)}"]}
            for i in range(5)
        ]
        (place / "question.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


@pytest.fixture
def run(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(pair / "home"))
    monkeypatch.setitem(
        grids.PAIRS,
        "demo",
        grids.Pair("demo", str(pair / "target"), str(pair / "head"), "auto", "fp32"),
    )

    def run(name, more="", results=tmp_path / "results"):
        experiment.main(
            f"{name} --pair demo --limit 3 --max-new-token 6 --results {results} {more}".split()
        )
        return results / name / "demo/cap6"

    return run


def without_times(records):
    return [
        {
            "question_id": r["question_id"],
            "choices": [
                {k: v for k, v in c.items() if k not in ("wall_time", "seconds")}
                for c in r["choices"]
            ],
        }
        for r in records
    ]


def test_table2_has_every_cell_and_its_numbers_are_those_of_the_answers(run, capsys):
    folder = run("table2", "--seeds 2")
    cells = [path for path in folder.glob("*/*") if path.is_dir()]
    assert len(cells) == 6 * 3 * 2
    out = capsys.readouterr().out
    assert "36 cells, 108 answers" in out and "| topk | 1 |" in out and "minus topk" in out
    rows = {
        (row["method"], row["bench"]): row for row in csv.DictReader((folder / "table2.csv").open())
    }
    assert len(rows) == 3 * 7
    lengths = [
        n
        for seed in (0, 1)
        for record in read_answers([folder / f"qa/rheo-m1-T1-seed{seed}/1-of-1.jsonl"])
        for n in record["choices"][0]["accept_lengths"][0]
    ]
    row = rows["rheo-m1", "qa"]
    assert float(row["tau"]) == pytest.approx(sum(lengths) / len(lengths)) and int(
        row["cycles"]
    ) == len(lengths)
    taus = [float(rows["rheo-m1", bench]["tau"]) for bench in grids.BENCHES]
    assert float(rows["rheo-m1", "mean"]["tau"]) == pytest.approx(sum(taus) / 6)
    gains = [
        float(rows["rheo-m1", b]["tau"]) - float(rows["topk", b]["tau"]) for b in grids.BENCHES
    ]
    assert float(rows["rheo-m1", "mean"]["difference"]) == pytest.approx(sum(gains) / 6)
    assert rows["none", "qa"]["tau"] == "" and rows["topk", "mean"]["difference"] == ""
    sources = {
        row["method"]: row for row in json.loads((folder / "table2.json").read_text())["sources"]
    }
    assert list(sources) == ["topk", "rheo-m1"] and sources["topk"]["survival"] is None
    for (
        method,
        row,
    ) in (
        sources.items()
    ):  # what is accepted by kind, and level by level, is tau minus 1 over all cycles
        cycles = [
            n
            for path in folder.glob(f"*/{method}-*/*.jsonl")
            for r in read_answers([path])
            for n in r["choices"][0]["accept_lengths"][0]
        ]
        assert sum(row["kinds"].values()) == pytest.approx(sum(cycles) / len(cycles) - 1)
        assert sum(
            math.prod(row["levels"][: k + 1]) for k in range(len(row["levels"]))
        ) == pytest.approx(sum(cycles) / len(cycles) - 1)
    assert (
        0 < sources["rheo-m1"]["survival"] <= 1
        and "sampled slot survives" in (folder / "table2.md").read_text()
    )


def test_the_dtype_of_a_pair_can_be_chosen_and_answers_of_two_dtypes_do_not_mix(run, capsys):
    plain = run("table3", "--bench-name qa --seeds 1")
    run("table3", "--bench-name qa --seeds 1 --dtype bf16")
    other = plain.parents[1] / "demo-bf16/cap6"
    for folder, dtype in ((plain, "float32"), (other, "bfloat16")):
        records = read_answers(folder.glob("qa/*/*.jsonl"))
        assert len(records) == 9 and {record["run"]["dtype"] for record in records} == {dtype}
    capsys.readouterr()
    tables.main(
        f"table3 --pair demo --dtype bf16 --max-new-token 6 --results {plain.parents[2]}".split()
    )
    assert f"{other}" in capsys.readouterr().out


def test_parts_together_are_the_whole_and_a_resumed_run_repeats_nothing(
    run, tmp_path, monkeypatch, capsys
):
    whole = run("table3", "--bench-name qa sum --seeds 1")
    made = []
    original = experiment.answer
    monkeypatch.setattr(experiment, "answer", lambda *args: made.append(1) or original(*args))
    for part in ("1/2", "2/2", "2/2"):
        parts = run("table3", f"--bench-name qa sum --seeds 1 --part {part}", tmp_path / "parts")
    assert len(made) == 2 * 3 * 3
    assert "0 answers made" in capsys.readouterr().out
    tables.main(f"table3 --pair demo --max-new-token 6 --results {tmp_path / 'parts'}".split())
    for bench in ("qa", "sum"):
        for cell in ("topk-T1-seed0", "rheo-m1-rrsw-T1-seed0", "rheo-m1-T1-seed0"):
            one = read_answers((whole / bench / cell).glob("*.jsonl"))
            two = sorted(
                read_answers((parts / bench / cell).glob("*.jsonl")), key=lambda r: r["question_id"]
            )
            assert without_times(one) == without_times(two)
    first, second = (list(csv.DictReader((f / "table3.csv").open())) for f in (whole, parts))
    assert [r["tau"] for r in first] == [r["tau"] for r in second]


def test_processes_of_one_launch_divide_the_questions(run, pair, tmp_path):
    whole = run("table3", "--bench-name qa --seeds 1")
    command = f"""
from evaluation.paper import experiment
from evaluation.paper import grids
grids.PAIRS["demo"] = grids.Pair("demo", {str(pair / "target")!r}, {str(pair / "head")!r}, "auto", "fp32")
experiment.main("table3 --pair demo --limit 3 --max-new-token 6 --bench-name qa --seeds 1 --results {tmp_path / "launched"}".split())
"""
    (tmp_path / "launched.py").write_text(command)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "launched.py"),
    ]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    cell = "qa/rheo-m1-T1-seed0"
    files = sorted(path.name for path in (tmp_path / "launched/table3/demo/cap6" / cell).iterdir())
    assert files == ["1-of-2.jsonl", "2-of-2.jsonl"]
    two = read_answers((tmp_path / "launched/table3/demo/cap6" / cell).glob("*.jsonl"))
    assert without_times(read_answers((whole / cell).glob("*.jsonl"))) == without_times(
        sorted(two, key=lambda r: r["question_id"])
    )


def test_a_cut_off_run_goes_on_and_cells_meet_each_question_together(run, monkeypatch):
    order = []
    original = experiment.answer

    def dies(model, request, question, block):
        if len(order) == 7:
            raise KeyboardInterrupt
        order.append((request.bench_name, question.question_id))
        return original(model, request, question, block)

    monkeypatch.setattr(experiment, "answer", dies)
    with pytest.raises(KeyboardInterrupt):
        run("table3", "--bench-name qa --seeds 1")
    assert order == [("qa", 0)] * 3 + [("qa", 1)] * 3 + [("qa", 2)]
    monkeypatch.setattr(experiment, "answer", original)
    folder = run("table3", "--bench-name qa --seeds 1")
    assert all(len(read_answers(cell.glob("*.jsonl"))) == 3 for cell in (folder / "qa").iterdir())


@pytest.mark.parametrize("name", ["figure3", "figure4"])
def test_figures_are_drawn(run, name):
    folder = run(name, "--bench-name mt_bench --limit 2")
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (
        folder / f"{name}.svg"
    ).read_text()
    rows = list(csv.DictReader((folder / f"{name}.csv").open()))
    assert len({(r["method"], r["temperature"]) for r in rows}) == (6 if name == "figure3" else 15)


def test_one_page_gathers_tables_figures_and_settings(run, tmp_path, capsys):
    run("figure3", "--bench-name mt_bench --limit 2")
    run("table3", "--bench-name qa --seeds 1")
    report.main(["--html", str(tmp_path / "results")])
    page = (tmp_path / "results/index.html").read_text()
    assert capsys.readouterr().out.rstrip().endswith("index.html")
    assert page.count("<section") == 2 and page.count("<svg") == 3 and page.count("<details>") == 2
    assert "total_token 60, depth 7" in page and "<em>" not in page
    assert "<td>rheo-m1-rrsw</td>" in page and "&quot;dtype&quot;: &quot;float32&quot;" in page
    with pytest.raises(SystemExit, match="holds no tables"):
        report.main(["--html", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="no answer files are given"):
        report.main([])


def test_what_is_missing_is_said(run, tmp_path):
    with pytest.raises(SystemExit, match="--part is '3/2'"):
        run("table3", "--part 3/2")
    for flag in ("limit", "seeds"):
        with pytest.raises(SystemExit, match=f"--{flag} is 0"):
            run("table3", f"--{flag} 0")
    with pytest.raises(
        SystemExit, match="holds no answers; python -m evaluation.experiment table5 makes them"
    ):
        tables.main(f"table5 --pair demo --results {tmp_path}".split())


def test_a_mean_of_benches_and_a_paired_difference_have_their_literal_errors():
    a, b = {1: 4.0, 2: 9.0, 3: 2.0}, {1: 2.0, 2: 3.0, 3: 2.0}
    c, d = {1: 3.0, 2: 9.0, 3: 1.0}, {1: 2.0, 2: 4.0, 3: 1.0}
    first, second = Statistic.ratio(a, b), Statistic.ratio(c, d)
    difference = first.minus(second)
    r, s = 15 / 7, 13 / 7
    u = [(a[k] - r * b[k]) / 7 - (c[k] - s * d[k]) / 7 for k in a]
    assert difference.value == pytest.approx(r - s)
    assert difference.error == pytest.approx((3 / 2 * sum(x * x for x in u)) ** 0.5)
    mean = Statistic.mean({"x": first, "y": second})
    assert mean.value == pytest.approx((r + s) / 2) and len(mean.influence) == 6
    assert first.minus(first).p_value() == 1.0 and Statistic(1.0, {1: 0.0, 2: 0.0}).p_value() == 0.0
    assert difference.p_value() == pytest.approx(2 * stats.t.sf((r - s) / difference.error, 2))


def test_one_level_counts_what_the_closed_forms_predict(monkeypatch):
    """Table 4 on a tiny pair: counted and predicted acceptance agree for every method (4 standard errors of 3,000 contexts)."""
    model = tiny_pair(vocab=12, total_token=4, depth=0, top_k=3)

    def text(model, question, template, probs, tokens, seed):
        return model.naivegenerate(
            torch.tensor([[3, 1]]), **probs, max_new_tokens=tokens, seed=question.question_id
        )[0], 2

    monkeypatch.setattr(one_level, "continuation", text)
    questions = [Question(i, "c", ("?",)) for i in range(15)]
    table = one_level.summarise(
        list(one_level.measure(model, {"qa": questions}, "auto", 1.0, 202, 1))
    )
    assert [row["method"] for row in table] == ["topk", "rheo-m1-rrsw", "rheo-m1"]
    for row in table:
        predicted, n = row["predicted"].value, row["contexts"]
        assert (
            n >= 3000
            and abs(row["difference"].value) < 4 * (predicted * (1 - predicted) / n) ** 0.5
        ), row
    by_method = {row["method"]: row["predicted"].value for row in table}
    assert by_method["topk"] + 0.05 < by_method["rheo-m1-rrsw"] < by_method["rheo-m1"]


def test_the_one_level_table_is_written(run, tmp_path, capsys):
    for temperature, name in ((1, "table4"), (0, "table4-T0")):
        more = f"--limit 2 --seeds 2 --max-new-token 20 --results {tmp_path} --temperature {temperature}"
        one_level.main(f"--pair demo --bench-name qa mt_bench {more}".split())
        content = json.loads((tmp_path / f"table4/demo/cap20/{name}.json").read_text())
        assert (
            len(content["answers"]) == 2 * 2 * 2 * 3
            and [row["bench"] for row in content["rows"]] == ["qa"] * 3 + ["mt_bench"] * 3
        )
        assert content["settings"]["dtype"] == "float32" and content["settings"]["seeds"] == 2
        rows = list(csv.DictReader((tmp_path / f"table4/demo/cap20/{name}.csv").open()))
        assert [float(row["counted"]) for row in rows] == pytest.approx(
            [row["counted"]["value"] for row in content["rows"]]
        )
        assert not any(math.isnan(row["predicted"]["value"]) for row in content["rows"])
        out = capsys.readouterr().out
        assert (
            "| MT | rheo-m1 |" in out
            and "| 0.854 |" in out
            and "Settings: pair demo" in (tmp_path / f"table4/demo/cap20/{name}.md").read_text()
        )
    greedy = [row["difference"]["value"] for row in content["rows"]]
    assert greedy == pytest.approx([0] * 6)  # without chance what is counted is what is predicted


def test_coverage_is_the_mass_of_the_support_over_all_nodes_with_a_pool(
    run, tmp_path, capsys, monkeypatch
):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert coverage.mass(logits, 2).item() == pytest.approx(logits.softmax(-1)[0, 2:].sum().item())
    assert coverage.mass(logits, 9).item() == pytest.approx(1)
    monkeypatch.setattr(coverage, "SUPPORTS", (4, 24))
    monkeypatch.setattr(coverage, "PAPER", {4: 0.5, 24: 1.0})
    coverage.main(
        f"--pair demo --bench-name qa --limit 2 --max-new-token 20 --results {tmp_path}".split()
    )
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "table5/demo/cap20/coverage.json").read_text())["rows"]
    assert [row["support"] for row in rows] == [4, 24] and "1.000 ± 0.000 |" in out
    assert 4 / 24 < rows[0]["coverage"]["value"] < 1 and rows[1]["coverage"][
        "value"
    ] == pytest.approx(1)


def test_a_part_of_several_processes_is_divided_again(monkeypatch):
    for index, expected in enumerate(((3, 9), (4, 9), (5, 9))):
        monkeypatch.setattr(
            experiment,
            "processes",
            lambda index=index: SimpleNamespace(num_processes=3, process_index=index),
        )
        assert experiment.parse_part("2/3") == expected and experiment.parse_part(None) == (
            index,
            3,
        )


def test_another_processes_file_is_left_alone(run, tmp_path):
    folder = run("table3", "--bench-name qa --seeds 1 --part 1/2")
    path = folder / "qa/topk-T1-seed0/1-of-2.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"question_id": 2, "cho')
    run("table3", "--bench-name qa --seeds 1 --part 2/2")
    assert path.read_bytes() == whole + b'{"question_id": 2, "cho'
    assert (
        len(tables.Results("table3", "demo", folder).records["qa", grids.TOPK, 1.0]) == 3
    )  # and a table is made without it
    run(
        "table3", "--bench-name qa --seeds 1 --part 1/2"
    )  # its own process drops what a kill has left
    assert path.read_bytes() == whole


def test_a_table_is_of_the_benches_and_seeds_asked_for(run, monkeypatch):
    run("table3", "--bench-name qa --seeds 1")
    folder = run("table3", "--bench-name sum --seeds 1")
    text = (folder / "table3.md").read_text()
    assert "| Sum | mean |" in text and "QA" not in text and "3 questions, 1 seed(s)" in text
    original = experiment.answer
    monkeypatch.setattr(experiment, "answer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run("table3", "--bench-name sum --seeds 2")
    monkeypatch.setattr(experiment, "answer", original)
    run("table3", "--bench-name sum --seeds 1")  # another seed has been begun: not ours
    assert (folder / "table3.md").read_text() == text
    run("table3", "--bench-name sum --seeds 1 --limit 2")
    assert "2 questions, 1 seed(s)" in (folder / "table3.md").read_text()
    tables.main(
        f"table3 --pair demo --max-new-token 6 --bench-name sum --seeds 1 --limit 1 --results {folder.parents[2]}".split()
    )
    assert "1 questions, 1 seed(s)" in (folder / "table3.md").read_text()


def test_answers_that_do_not_belong_together_are_refused(run):
    folder = run("table3", "--bench-name qa --seeds 1")
    path = folder / "qa/topk-T1-seed0/1-of-1.jsonl"
    whole = path.read_text()
    path.with_name("2-of-2.jsonl").write_text(whole)
    with pytest.raises(ValueError, match="question 0 is answered twice"):
        tables.Results("table3", "demo", folder)
    path.with_name("2-of-2.jsonl").unlink()
    path.write_text(whole.replace('"head": "', '"head": "x'))
    with pytest.raises(ValueError, match="answers with head 'x.*' and '.*' lie in one folder"):
        tables.Results("table3", "demo", folder)
    path.write_text(re.sub(', "head": "[0-9a-f]*"', "", whole))
    with pytest.raises(ValueError, match="answers with head None and '.*' lie in one folder"):
        tables.Results("table3", "demo", folder)
    path.write_text(whole.replace('"threads": ', '"threads": 7'))  # decides no token, but times
    tables.main(f"table3 --pair demo --max-new-token 6 --results {folder.parents[2]}".split())
    assert "threads: their times do not compare" in (folder / "table3.md").read_text()


def test_one_question_has_no_interval_and_one_token_no_cycle(run, capsys):
    run("table2", "--bench-name qa --seeds 1 --limit 1")
    assert "(p " not in capsys.readouterr().out
    folder = run("table2", "--bench-name qa --seeds 1 --max-new-token 1")
    rows = list(csv.DictReader((folder.with_name("cap1") / "table2.csv").open()))
    assert (
        all(row["tau"] == "" and row["difference"] == "" for row in rows)
        and rows[0]["cycles"] == "0"
    )


def test_the_papers_mean_stands_beside_that_of_all_six_benches_only(run, monkeypatch):
    monkeypatch.setitem(
        grids.PAPER, ("table2", "demo", "topk"), (1.11, 1.22, 1.33, 1.44, 1.55, 1.66, 1.77, 1.88)
    )
    folder = run("table2", "--bench-name qa --seeds 1 --limit 2")
    line = next(
        line
        for line in (folder / "table2.md").read_text().splitlines()
        if line.startswith("| topk, paper")
    )
    assert "1.55" in line and "1.77" not in line and "1.88" not in line
    folder = run("table2", "--seeds 1 --limit 2")
    line = next(
        line
        for line in (folder / "table2.md").read_text().splitlines()
        if line.startswith("| topk, paper")
    )
    assert "1.55" in line and "1.77" in line and "1.88" in line


def test_the_programs_of_one_script_take_the_same_arguments():
    arguments = "--pair demo --dtype bf16 --bench-name qa sum --limit 2 --max-new-token 5 --seeds 1 --results somewhere".split()
    seen = [program.build_parser().parse_args([*name, *arguments]) for program, name in (
        (experiment, ["table5"]), (tables, ["table5"]), (coverage, []), (one_level, []),
    )]  # fmt: skip
    assert len({str(tables.flags.study_folder(args, "table5")) for args in seen}) == 1
    with pytest.raises(SystemExit):
        experiment.build_parser().parse_args(
            ["table2", "--seed", "1"]
        )  # no abbreviation of --seeds


def test_closed_forms_and_pools_mean_the_same_tokens_where_logits_tie():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 64, generator=generator).mul(2).round().bfloat16()  # ties everywhere
    p = torch.randn(200, 64, generator=generator).double().softmax(-1)
    topk, _, rheo = grids.ONE_LEVEL.methods
    for method in (topk, rheo):
        options = DecodingOptions(
            WarperOptions(1.0), method.sampling, method.m, total_token=4, depth=0, tree_top_k=3
        ).tree
        pools = build_pools(logits, options.pool, Draws(torch.Generator().manual_seed(0)))
        found = one_level.predicted(p, logits, None, method, options)
        if method == topk:
            expected = p.gather(1, pools.tokens).sum(-1)
        else:  # the pool's own ranks and law
            m = pools.kinds.index(SAMPLED)
            order = torch.cat((pools.tokens[:, :m], pools.draft_tail), 1)
            expected = theory.rheo_acceptance(
                p, torch.zeros_like(p).scatter_(1, order, torch.arange(64, 0, -1).double().expand(200, -1)),
                torch.zeros_like(p).scatter_(1, pools.draft_tail, (pools.tail_weights / pools.tail_weights.sum(-1, keepdim=True)).double()), 3,
            )  # fmt: skip
        assert torch.allclose(found, expected, atol=1e-6), method
