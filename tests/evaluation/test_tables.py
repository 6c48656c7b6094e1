"""Tables, figures and the page of the paper's experiments, on a tiny pair."""

import csv
import json
import math
import re

import pytest

from evaluation import report
from evaluation.common.answer_file import read_answers
from evaluation.paper import experiment, grids, page, results, tables


def csv_rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def accept_lengths(paths):
    return [
        n
        for record in read_answers(paths)
        for turn in record["choices"][0]["accept_lengths"]
        for n in turn
    ]


def table_line(path, first_cell):
    """The cells of the first line of a Markdown table that begins with a cell."""
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if cells[0] == first_cell:
            return cells
    raise AssertionError(f"{path} has no line {first_cell}")


@pytest.fixture
def table2(run, capsys):
    """The folder of table 2 with two seeds, and what was printed."""
    return run("table2", "--seeds 2"), capsys.readouterr().out


def test_table2_has_the_numbers_of_its_answers(table2):
    folder, out = table2
    assert len([path for path in folder.glob("*/*") if path.is_dir()]) == 6 * 3 * 2
    assert "36 cells, 108 answers" in out and "**minus topk**" in out
    assert table_line(folder / "table2.md", "topk")[1] == "1"
    rows = {(row["method"], row["bench"]): row for row in csv_rows(folder / "table2.csv")}
    assert len(rows) == 3 * 7
    lengths = accept_lengths(folder / f"qa/rheo-m1-T1-seed{seed}/1-of-1.jsonl" for seed in (0, 1))
    row = rows["rheo-m1", "qa"]
    assert float(row["tau"]) == pytest.approx(sum(lengths) / len(lengths))
    assert int(row["cycles"]) == len(lengths)
    taus = [float(rows["rheo-m1", bench]["tau"]) for bench in grids.BENCHES]
    gains = [tau - float(rows["topk", b]["tau"]) for tau, b in zip(taus, grids.BENCHES)]
    assert float(rows["rheo-m1", "mean"]["tau"]) == pytest.approx(sum(taus) / 6)
    assert float(rows["rheo-m1", "mean"]["difference"]) == pytest.approx(sum(gains) / 6)
    assert rows["none", "qa"]["tau"] == "" and rows["topk", "mean"]["difference"] == ""
    content = json.loads((folder / "table2.json").read_text())
    sources = {row["method"]: row for row in content["sources"]}
    assert list(sources) == ["topk", "rheo-m1"] and sources["topk"]["survival"] is None
    assert 0 < sources["rheo-m1"]["survival"] <= 1
    assert "sampled slot survives" in (folder / "table2.md").read_text()
    # What is accepted, added up by kind or level by level, is tau minus 1 over all cycles.
    for method, row in sources.items():
        lengths = accept_lengths(folder.glob(f"*/{method}-*/*.jsonl"))
        accepted = pytest.approx(sum(lengths) / len(lengths) - 1)
        assert sum(row["kinds"].values()) == accepted
        assert sum(math.prod(row["levels"][: k + 1]) for k in range(len(row["levels"]))) == accepted


@pytest.mark.parametrize("name, cells", [("figure3", 6), ("figure4", 15)])
def test_figures_are_plotted(run, name, cells):
    folder = run(name, "--bench-name mt_bench --limit 2")
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    rows = csv_rows(folder / f"{name}.csv")
    assert len({(row["method"], row["temperature"]) for row in rows}) == cells


def test_one_page_gathers_tables_figures_and_settings(run, tmp_path, capsys):
    pytest.importorskip("markdown2")
    run("figure3", "--bench-name mt_bench --limit 2")
    run("table3", "--bench-name qa --seeds 1")
    report.main(["--html", str(tmp_path / "results")])
    text = (tmp_path / "results/index.html").read_text()
    assert capsys.readouterr().out.rstrip().endswith("index.html")
    assert text.count("<section") == 2 and text.count("<details>") == 2
    sources = re.findall('<img src="([^"]*)"', text)
    assert len(sources) == 3 and all((tmp_path / "results" / source).exists() for source in sources)
    assert "total_token 60, depth 7" in text and "<em>" not in text
    assert "<td>rheo-m1-rrsw</td>" in text and "&quot;dtype&quot;: &quot;float32&quot;" in text
    with pytest.raises(SystemExit, match="holds no tables"):
        report.main(["--html", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="no answer files are given"):
        report.main([])


def test_the_page_has_the_main_results_first_then_the_papers_order(tmp_path):
    pytest.importorskip("markdown2")
    names = ("contexts", "figure3", "figure4", "table1", "table2", "table3", "table4", "table5")
    for name in names:
        (tmp_path / name / "demo").mkdir(parents=True)
        (tmp_path / name / "demo/t.md").write_text("| a |\n| --- |\n| b |\n")
    anchors = re.findall('<section id="([^-"]*)', page.write_page(tmp_path).read_text())
    expected = "table2 figure3 table1 table3 table4 table5 figure4 contexts"
    assert anchors == expected.split()


def test_missing_answers_are_reported(run, tmp_path):
    how = "python -m evaluation.experiment table5 makes them"
    with pytest.raises(SystemExit, match=f"holds no answers; {how}"):
        tables.main(f"table5 --pair demo --results {tmp_path}".split())


def test_a_table_is_of_the_benches_and_seeds_asked_for(run, monkeypatch):
    run("table3", "--bench-name qa --seeds 1")
    folder = run("table3", "--bench-name sum --seeds 1")
    path = folder / "table3.md"
    text = path.read_text()
    assert table_line(path, "method")[2:4] == ["Sum", "mean"] and "QA" not in text
    assert "3 questions, 1 seed(s)" in text
    original = experiment.answer
    monkeypatch.setattr(experiment, "answer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run("table3", "--bench-name sum --seeds 2")
    monkeypatch.setattr(experiment, "answer", original)
    run("table3", "--bench-name sum --seeds 1")  # the other seed, just begun, does not count
    assert path.read_text() == text
    run("table3", "--bench-name sum --seeds 1 --limit 2")
    assert "2 questions, 1 seed(s)" in path.read_text()
    flags = f"--pair demo --max-new-token 6 --seeds 1 --limit 1 --results {folder.parents[2]}"
    tables.main(["table3", "--bench-name", "sum", *flags.split()])
    assert "1 questions, 1 seed(s)" in path.read_text()


def test_answers_that_do_not_belong_together_are_refused(run):
    folder = run("table3", "--bench-name qa --seeds 1")
    path = folder / "qa/topk-T1-seed0/1-of-1.jsonl"
    whole = path.read_text()
    path.with_name("2-of-2.jsonl").write_text(whole)
    with pytest.raises(ValueError, match="question 0 is answered twice"):
        results.Results("table3", "demo", folder)
    path.with_name("2-of-2.jsonl").unlink()
    path.write_text(whole.replace('"head": "', '"head": "x'))
    with pytest.raises(ValueError, match="answers with head 'x.*' and '.*' lie in one folder"):
        results.Results("table3", "demo", folder)
    path.write_text(re.sub(', "head": "[0-9a-f]*"', "", whole))
    with pytest.raises(ValueError, match="answers with head None and '.*' lie in one folder"):
        results.Results("table3", "demo", folder)
    # The number of threads changes no token, but it does change times.
    path.write_text(whole.replace('"threads": ', '"threads": 7'))
    tables.main(f"table3 --pair demo --max-new-token 6 --results {folder.parents[2]}".split())
    assert "threads: their times cannot be compared" in (folder / "table3.md").read_text()


def test_one_question_gives_no_interval_and_one_token_gives_no_tau(run, capsys):
    run("table2", "--bench-name qa --seeds 1 --limit 1")
    assert "(p " not in capsys.readouterr().out
    folder = run("table2", "--bench-name qa --seeds 1 --max-new-token 1")
    rows = csv_rows(folder.with_name("cap1") / "table2.csv")
    assert all(row["tau"] == "" and row["difference"] == "" for row in rows)
    assert rows[0]["cycles"] == "0"


def test_the_papers_mean_stands_only_beside_the_mean_of_all_six_benches(run, monkeypatch):
    reported = grids.taus(1.11, 1.22, 1.33, 1.44, 1.55, 1.66, 1.77, speedup=1.88)
    monkeypatch.setitem(grids.PAPER, ("table2", "demo", "topk"), reported)
    folder = run("table2", "--bench-name qa --seeds 1 --limit 2")
    line = table_line(folder / "table2.md", "topk, paper")
    assert "1.55" in line and "1.77" not in line and "1.88" not in line
    folder = run("table2", "--seeds 1 --limit 2")
    line = table_line(folder / "table2.md", "topk, paper")
    assert "1.55" in line and "1.77" in line and "1.88" in line
