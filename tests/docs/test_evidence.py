"""docs/evidence.md follows from the CSV files in docs/evidence, and these from run folders."""

import re
import statistics
import sys
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy.stats import t as students_t

from letkd.errors import LetkdError, RunError
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result

ROOT = Path(__file__).parents[2]
PAIR = "cifar10-rn56-rn8"
PAGE = "# A page\n\n<!-- results -->\n<!-- end of results -->\n\n<!-- choices -->\n<!-- end of choices -->\n\n"
PAGE += "<!-- without labels -->\n<!-- end of without labels -->\n\n<!-- presets -->\n<!-- end of presets -->\n"
PAGE += "\n<!-- sweeps -->\n<!-- end of sweeps -->\n\n<!-- fractions -->\n<!-- end of fractions -->\n"
TESTS = {"ce": [78.0, 79.0, 80.5], "kd": [80.0, 80.5, 82.5], "letkd-1": [81.0, 83.0]}


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOT / "evidence"))
    try:
        import collect
        import figures
        import study
        import tables
        import unlabelled

        yield SimpleNamespace(collect=collect, figures=figures, study=study, tables=tables, unlabelled=unlabelled)
    finally:
        sys.path.remove(str(ROOT / "evidence"))


@pytest.fixture
def published(tmp_path, scripts):
    """A page with the CSV file of one pair."""
    runs = [
        scripts.study.Run(PAIR, row, seed, "abc", 6, 80.0, test, 1234, 60 * (seed + 1), 999)
        for row, tests in TESTS.items()
        for seed, test in enumerate(tests)
    ]
    scripts.study.write_runs(PAIR, runs, tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    return page, runs


def test_the_page_follows_from_the_csv_files(scripts):
    assert scripts.tables.problems() == []
    assert scripts.tables.readme_problems() == []


@pytest.mark.parametrize("page", ["README.md", "docs/evidence.md"])
def test_intervals_in_the_text_are_those_of_two_rows(scripts, page):
    study, accuracies, known = scripts.study, scripts.tables.accuracies, set()
    counted = [accuracies(study.read_runs(pair)) for pair in study.PAIRS]
    validated = [accuracies(study.read_choices(name=name), "val") for name in (study.SWEEPS, study.FRACTIONS)]
    for by_seed in counted + validated:
        for one, other in permutations(by_seed.values(), 2):
            found = scripts.tables.paired_difference(one, other)
            if found is not None and found.half is not None:
                known.add(tuple(f"{found.mean + side * found.half:+.1f}".replace("-", "−") for side in (-1, 1)))
    text = set(re.findall(r"\\\[([+−]\d+\.\d), ([+−]\d+\.\d)\\\]", (ROOT / page).read_text(encoding="utf-8")))
    assert text
    assert text <= known


def test_a_table_has_every_row_with_its_paired_differences(scripts, tmp_path, published):
    text = scripts.tables.page_text(published[0].read_text(), tmp_path)
    rows = {cells[0]: cells for cells in ([c.strip() for c in line.strip("|").split("|")] for line in text.splitlines())}
    differences = [b - a for a, b in zip(TESTS["ce"], TESTS["kd"], strict=True)]
    mean, half = statistics.mean(differences), students_t.ppf(0.975, 2) * statistics.stdev(differences) / 3**0.5
    assert rows["KD"][1:3] == ["81.00 ± 1.32", "3"]
    assert rows["KD"][3].replace("\\", "") == f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}] (3)"
    assert rows["KD"][4:] == ["–", "1,234", "2.0 min"]
    assert rows["letKD-1"][1:3] == ["**82.00 ± 1.41**", "2"]
    assert rows["letKD-2"][1:] == ["–", "0", "–", "–", "–", "–"]  # no row is dropped
    assert [title for title in scripts.study.rows_of(PAIR).values() if title not in rows] == []


def test_every_control_answers_a_question(scripts, published):
    def answer(runs):
        (cell,) = [row[2] for row in scripts.tables.questions_table(PAIR, runs).rows if row[1].text == "letKD-1 − QUEST"]
        return cell.text

    runs = published[1]
    assert answer(runs) == "–"
    assert (
        answer([*runs, *(replace(run, row="quest", test=run.test - 2) for run in runs if run.row == "letkd-1")])
        == "+2.00 [+2.00, +2.00] (2)"
    )
    controls = {"ce-longer", "ce-larger", "layer-alone", "quest", "letkd-2", "letkd-1-kd", "letkd-2-kd"}
    assert controls <= {row for _, *rows in scripts.tables.QUESTIONS for row in rows} <= set(scripts.study.rows_of(PAIR))


def test_the_readme_has_the_leading_rows_of_both_pairs(scripts, tmp_path, published):
    other = "cifar100-rn32-rn8"
    scripts.study.write_runs(other, [replace(run, pair=other, test=run.test / 2) for run in published[1]], tmp_path)
    lines = scripts.tables.summary(tmp_path).splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["row", "---", "CE", "KD", "QUEST", "letKD-1", "letKD-1, sharp"]
    cells = [cell.strip() for cell in lines[5].strip("|").split("|")]
    assert (cells[1], cells[2], cells[3][:5], cells[4]) == ("1,234", "**82.00 ± 1.41**", "+3.50", "1.5 min")
    assert (cells[5], cells[6][:5], cells[7]) == ("**41.00 ± 0.71**", "+1.75", "1.5 min")


@pytest.mark.slow
def test_a_change_of_a_number_is_found(scripts, tmp_path, published):
    page, runs = published
    scripts.tables.write(page, tmp_path)
    assert scripts.tables.problems(page, tmp_path) == []
    before = (tmp_path / f"{PAIR}.svg").read_bytes()
    scripts.tables.write(page, tmp_path)
    assert (tmp_path / f"{PAIR}.svg").read_bytes() == before
    assert set(re.findall(r">([A-Z][\w-]+)</text>", before.decode())) >= {"CE", "KD"}
    scripts.study.write_runs(PAIR, [replace(runs[0], test=78.01), *runs[1:]], tmp_path)
    tables, figure = scripts.tables.problems(page, tmp_path)
    assert "page.md do not follow" in tables
    assert f"{PAIR}.svg does not follow from {PAIR}.csv" in figure
    (tmp_path / f"{PAIR}.csv").unlink()
    assert len(scripts.tables.problems(page, tmp_path)) == 2


def test_without_a_run_the_page_says_so(scripts, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert len(scripts.tables.problems(page, tmp_path)) == 1
    scripts.tables.write(page, tmp_path)
    assert "No counted run is finished yet." in page.read_text()
    assert scripts.tables.problems(page, tmp_path) == []


def test_labels_do_not_overlap(scripts):
    values = [1.0, 1.0, 1.01, 5.0, 9.99, 10.0]
    placed = scripts.figures.spread(values, 1.0, 0.0, 10.0)
    assert all(b - a >= 1 - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= 0
    assert placed[-1] <= 10
    assert placed[3] == 5.0


def test_the_figure_of_sweeps_has_a_line_per_method_and_a_panel_per_setting(scripts):
    def run(row: str, seed: int, val: float, perplexity: float):
        return scripts.study.Choice(
            "sweeps", f"{row}/{seed}", row, "", 0.1, 0, "auto", "512", "", 12, seed, perplexity=perplexity, val=val
        )

    runs = [
        run("letkd-1", 100, 66.0, 5.0),
        run("letkd-1", 101, 68.0, 5.0),
        run("quest", 100, 65.0, 5.0),
        run("K-64", 100, 60.0, 4.0),
    ]
    runs += [run("lambda-16", 100, 69.0, 5.0), run("lambda-auto-4", 100, 1.0, 5.0), run("tau-3", 100, 64.0, 1.5)]
    runs += [run("quest-lambda-8", 100, 66.0, 5.0), run("alpha-0.25", 100, 61.0, 5.0)]
    found = scripts.tables.sweep_panels(runs)
    base = (67.0, round(statistics.stdev([66.0, 68.0]), 4))
    assert {name: [(line.title, line.points) for line in lines] for name, lines in found.items()} == {
        "α": [("letKD-1", [(0.25, 61.0, 0.0), (1.0, *base)])],
        "λ": [("letKD-1", [(4.0, *base), (16.0, 69.0, 0.0)]), ("QUEST", [(4.0, 65.0, 0.0), (8.0, 66.0, 0.0)])],
        "labels per pixel (τ)": [("letKD-1", [(1.5, 64.0, 0.0), (5.0, *base)])],
        "K": [("letKD-1", [(64.0, 60.0, 0.0), (512.0, *base)])],
    }


def finished(folder: Path, row: str, seed: int, *settings: str, file: str = PAIR, done: bool = True, **changes) -> None:
    recipe = resolve(ROOT / f"evidence/{file}.toml", method=row, settings=[f"train.seed={seed}", "data.root='D'", *settings])
    none = dict.fromkeys(("last_test_top5", "best_val", "best_val_epoch", "best_val_test"))
    numbers = {"last_test": 80.12346, "last_val": 81.0, "parameters": 7, "epochs": 6, "seconds": 9.0, "cpu_seconds": 5.4}
    run = RunFolder(folder, recipe)
    with run.begin():
        run.log({"epoch": 1, "health": {"penultimate": {"perplexity_T": 2.71828, "matches": 21.0, "added": 0.5}}})
        if done:
            run.finish(Result(**none | numbers | changes))


def test_finished_runs_are_collected(scripts, tmp_path, capsys):
    finished(tmp_path / "runs/kd/seed-1", "kd", 1)
    finished(tmp_path / "runs/ce/seed-0", "ce", 0)
    finished(tmp_path / "runs/ce/seed-1", "ce", 1, done=False)
    scripts.collect.collect(PAIR, tmp_path / "runs", "first", tmp_path)
    assert "ce/seed-1: not finished, not collected" in capsys.readouterr().out
    first = (tmp_path / f"{PAIR}.csv").read_text().splitlines()
    assert first[1:] == [f"{PAIR},{row},first,6,81.0,80.1235,7,5,9" for row in ("ce,0", "kd,1")]
    finished(tmp_path / "more/ce/seed-2", "ce", 2)
    scripts.collect.collect(PAIR, tmp_path / "more", "second", tmp_path)
    scripts.collect.collect(PAIR, tmp_path / "runs", "third", tmp_path)  # the same numbers: the commit stays
    runs = scripts.study.read_runs(PAIR, tmp_path)
    assert [(run.row, run.seed, run.commit) for run in runs] == [("ce", 0, "first"), ("ce", 2, "second"), ("kd", 1, "first")]


def test_a_run_of_another_recipe_is_refused(scripts, tmp_path):
    finished(tmp_path / "kd/seed-0", "kd", 0, "weights.kd=7")
    with pytest.raises(RunError, match=r"is not a run of the row kd: it differs from .*toml in weights.kd"):
        scripts.collect.collect(PAIR, tmp_path, "abc", tmp_path)
    scripts.collect.collect(PAIR, tmp_path, "abc", tmp_path, settings=["weights.kd=7"])


def test_a_folder_without_runs_is_refused(scripts, tmp_path):
    with pytest.raises(RunError, match="holds no finished run"):
        scripts.collect.collect(PAIR, tmp_path, "abc", tmp_path)


def test_choices_are_collected(scripts, tmp_path):
    tau = "methods.letkd.sites.penultimate.supervision.tau=0.1"
    finished(tmp_path / "l16", "letkd-1", 100, 'weights."kd/penultimate"=16', tau)
    finished(tmp_path / "l4", "letkd-1", 100, 'weights."kd/penultimate"=4', tau, "optim.clip=5", last_val=82.5)
    finished(tmp_path / "ce", "ce", 100, "data.crop=4")
    scripts.collect.collect_choices(PAIR, [tmp_path / name for name in ("l16", "l4", "ce")], tmp_path)
    lines = (tmp_path / "choices.csv").read_text().splitlines()[1:]
    assert lines == [
        f"{PAIR},ce,ce,,0.1,4,,,,6,100,2.718,81.0,21.0,0.5",
        f"{PAIR},l16,letkd-1,kd/penultimate=16,0.1,0,0.1,512,,6,100,2.718,81.0,21.0,0.5",
        f"{PAIR},l4,letkd-1,kd/penultimate=4,0.1,0,0.1,512,optim.clip=5.0,6,100,2.718,82.5,21.0,0.5",
    ]
    text = scripts.tables.choices_text(tmp_path)
    assert "| letKD-1 | **82.50** | kd/penultimate=4 | 0.1 | flips | 512 | 0.1 | 2.72 | optim.clip=5.0 |" in text


def test_a_damaged_csv_file_is_one_sentence(scripts, tmp_path):
    (tmp_path / f"{PAIR}.csv").write_text("pair,row,seed\nx,y,z\n")
    with pytest.raises(LetkdError, match=r"rn8.csv is damaged \(.*\); write it again with evidence/collect.py"):
        scripts.study.read_runs(PAIR, tmp_path)


def test_presets_are_compared_method_by_method(scripts, tmp_path):
    for seed, (paper, fast) in enumerate([(50.0, 60.0), (52.0, 60.0)]):
        finished(tmp_path / f"runs/kd-paper/seed-{seed}", "kd-paper", seed, file="presets", last_test=paper, epochs=8)
        finished(tmp_path / f"runs/kd-fast/seed-{seed}", "kd-fast", seed, file="presets", last_test=fast, epochs=12)
    scripts.collect.collect("presets", tmp_path / "runs", "abc", tmp_path)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in scripts.tables.presets_text(tmp_path).splitlines()
    ]
    assert ["KD, paper", "51.00 ± 1.41", "2", "–", "–", "8", "0.1 min"] in rows
    (fast,) = [row for row in rows if row[0] == "KD, fast"]
    assert (fast[1:3], fast[3][:5], fast[4:]) == (["60.00 ± 0.00", "2"], "+9.00", ["–", "12", "0.1 min"])
    assert ["Student, fast", "–", "0", "–", "–", "–", "–"] in rows  # no row is dropped


def test_sweeps_show_every_setting_next_to_letkd_1(scripts, tmp_path):
    for seed, (own, wider) in enumerate([(70.0, 69.0), (72.0, 70.0)], start=100):
        finished(tmp_path / f"runs/letkd-1/seed-{seed}", "letkd-1", seed, file="sweeps", last_val=own)
        finished(tmp_path / f"runs/alpha-2/seed-{seed}", "alpha-2", seed, file="sweeps", last_val=wider)
    finished(tmp_path / "runs/lambda-auto/seed-100", "lambda-auto", 100, file="sweeps")
    *_, auto = lines = scripts.collect.collect_validated("sweeps", tmp_path / "runs", tmp_path)
    assert (len(lines), auto.weights) == (5, "kd/penultimate=auto")
    text = scripts.tables.sweeps_text(tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["letKD-1", "71.00 ± 1.41", "2", "–", "2.72", "21.00", "0.50"] in rows
    (row,) = [row for row in rows if row[0] == "α = 2"]
    assert (row[1:3], row[3][:5]) == (["69.50 ± 0.71", "2"], "−1.50")
    assert re.search(r"^Not trained yet: .*; K = 64; .*\.$", text, re.MULTILINE)  # no row is dropped
    finished(tmp_path / "runs/K-64/seed-100", "letkd-1", 100, file="sweeps")
    with pytest.raises(RunError, match="is not a run of the row K-64"):
        scripts.collect.collect_validated("sweeps", tmp_path / "runs", tmp_path)


def test_fractions_show_every_method_next_to_ce_with_the_same_labels(scripts, tmp_path):
    for seed, (all_labels, few, ce) in enumerate([(70.0, 60.0, 40.0), (72.0, 61.0, 43.0)], start=100):
        for row, val in {"kd": all_labels, "kd-1pc": few, "ce-1pc": ce}.items():
            finished(tmp_path / f"runs/{row}/seed-{seed}", row, seed, file="fractions", last_val=val)
    assert len(scripts.collect.collect_validated("fractions", tmp_path / "runs", tmp_path)) == 6
    text = scripts.tables.fractions_text(tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    (kd,) = [row for row in rows if row[0] == "KD"]
    assert (kd[1], kd[2][:6], kd[3:5], kd[5:]) == ("60.50 ± 0.71", "+19.00", ["–", "–"], ["71.00 ± 1.41", "–"])
    assert ["CE", "41.50 ± 2.12", "–", "–", "–", "–", "–"] in rows
    assert ["letKD-2", *"––––––"] in rows  # no row is dropped


PROBED = {"last_test": None, "last_val": None, "held_out": {"kd/penultimate": 1.5}, "probe": {"knn": 70.0, "linear": 75.0}}


def pretrained(folder: Path, row: str, seed: int) -> None:
    settings = "probe.name='cifar10'", "train.validate_every=1"
    finished(folder / f"{row}/seed-{seed}", row, seed, *settings, file="unlabelled-pretrain", **PROBED)


def finetuned(folder: Path, start: str, percent: int, seed: int, test: float, **changes) -> None:
    settings = [f"data.fraction={percent / 100}", f"train.epochs={200 if percent == 1 else 40}"]
    if start != "scratch":
        settings.append(f"student.weights='runs/{start}/seed-{seed}/student.safetensors'")
    finished(
        folder / f"{start}-{percent}/seed-{seed}", "ce", seed, *settings, file="unlabelled-finetune", last_test=test, **changes
    )


def test_runs_without_labels_are_collected_and_shown(scripts, tmp_path):
    runs = tmp_path / "runs"
    for seed, (scratch, letkd) in enumerate([(40.0, 50.0), (42.0, 54.0)]):
        pretrained(runs, "letkd-1", seed)
        finetuned(runs, "scratch", 1, seed, scratch)
        finetuned(runs, "letkd-1", 1, seed, letkd)
    finetuned(runs, "quest", 10, 0, 61.0)
    assert scripts.unlabelled.collect(runs, "abc", tmp_path) == 7
    assert scripts.unlabelled.collect(runs, "def", tmp_path) == 7
    assert "def" not in (tmp_path / "unlabelled-finetuned.csv").read_text(), "the same numbers: the commit stays"
    text = scripts.unlabelled.text(tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert ["From scratch", "450 labels (1 %)", "41.00 ± 1.41", "2", "–", "–", "7", "0.1 min"] in rows
    (row,) = [row for row in rows if row[:2] == ["Pre-trained by letKD-1", "450 labels (1 %)"]]
    assert row[2:4] == ["**52.00 ± 2.83**", "2"]
    assert row[4].startswith("+11.00")
    assert ["Pre-trained by QUEST", "4,500 labels (10 %)", "**61.00**", "1", "–", "–", "7", "0.1 min"] in rows
    assert ["letKD-1", "70.00 ± 0.00", "75.00 ± 0.00", "1.50 ± 0.00", "2", "7", "0.1 min"] in rows
    assert ["QUEST", "–", "–", "–", "0", "–", "–"] in rows  # no row is dropped


def test_a_run_from_another_start_is_refused(scripts, tmp_path):
    finetuned(tmp_path, "scratch", 1, 0, 50.0)
    (tmp_path / "scratch-1").rename(tmp_path / "quest-1")
    with pytest.raises(RunError, match=r"did not start from quest/seed-0/student.safetensors"):
        scripts.unlabelled.collect(tmp_path, "abc", tmp_path)
    (tmp_path / "quest-1").rename(tmp_path / "moved")
    finetuned(tmp_path, "quest", 1, 0, 50.0)
    (tmp_path / "quest-1").rename(tmp_path / "scratch-1")
    with pytest.raises(RunError, match=r"differs from unlabelled-finetune.toml in student.weights"):
        scripts.unlabelled.collect(tmp_path, "abc", tmp_path)


def test_a_counted_run_from_trained_weights_is_refused(scripts, tmp_path):
    finished(tmp_path / "ce/seed-0", "ce", 0, "student.weights='trained.safetensors'")
    with pytest.raises(RunError, match=r"differs from .*toml in student.weights"):
        scripts.collect.collect(PAIR, tmp_path, "abc", tmp_path)


def test_a_run_with_other_labels_is_refused(scripts, tmp_path):
    finetuned(tmp_path, "scratch", 10, 0, 50.0)
    (tmp_path / "scratch-10").rename(tmp_path / "scratch-1")
    with pytest.raises(RunError, match=r"differs from unlabelled-finetune.toml in .*data.fraction"):
        scripts.unlabelled.collect(tmp_path, "abc", tmp_path)
    with pytest.raises(RunError, match="holds no finished run"):
        scripts.unlabelled.collect(tmp_path / "empty", "abc", tmp_path)
