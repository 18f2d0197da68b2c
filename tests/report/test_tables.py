"""Runs as rows and columns: the paper's order, its numbers, what is missing, and each format's own escapes."""

import csv
import io
import json
from dataclasses import replace

import pytest

import letkd.report.collect as collect
from letkd.errors import RecipeError, RunError, UnsupportedPair
from letkd.methods import KD, METHODS
from letkd.recipes import list_methods, resolve
from letkd.report.collect import find_groups
from letkd.report.curves import curves, training
from letkd.report.pair_tables import best_of, detail, matrix, plain, reference_of
from letkd.report.paper import ORDER, named_methods, paper_results, table_position
from letkd.report.results_table import as_markdown as rows_as_markdown
from letkd.report.write import write_report
from letkd.runs.folder import RunFolder
from letkd.runs.grid import Cell, Grid, as_csv, as_html, as_latex, as_markdown
from letkd.runs.records import Note
from letkd.runs.results import Row
from letkd.training.trials import compare
from tests.support.runs import a_run

PAIR = "cifar100/rn56-rn20"


def test_averages_of_the_weights_have_a_column_of_their_own(tmp_path):
    a_run(tmp_path / "a/0", f"{PAIR}/at", 70.0)
    a_run(tmp_path / "b/0", f"{PAIR}/kd", 71.0, settings=("train.ema=0.99", "data.mix=cutmix", "train.accumulate=2"))
    text = as_markdown(detail(PAIR, find_groups([tmp_path]), {}))
    assert "EMA" not in text
    run = RunFolder(tmp_path / "b/0")
    run.finish(replace(run.result, ema_test=72.5))
    groups = find_groups([tmp_path])
    header, _, *lines = [line for line in as_markdown(detail(PAIR, groups, {})).splitlines() if line.startswith("|")]
    at = [name.strip() for name in header.split("|")].index("test %, EMA")
    assert [line.split("|")[at].strip() for line in lines] == ["72.50", "–"]
    by_csv = {row["title"]: row["ema_test_mean"] for row in csv.DictReader(io.StringIO(as_csv(*plain(groups, {}))))}
    assert by_csv == {"AT": "", "KD": "72.5"}
    held = [run.result for run in (RunFolder(tmp_path / "a/0"), RunFolder(tmp_path / "b/0"))]
    table = rows_as_markdown([Row("AT", held[:1], name="at"), Row("KD", held[1:], name="kd")], "at")
    assert "test %, EMA" in table
    assert "Difference in test accuracy" in table
    assert "EMA" not in rows_as_markdown([Row("AT", held[:1])])


def test_probes_and_terms_on_held_out_images_have_columns_in_the_csv_file(tmp_path):
    for seed, linear in enumerate((60.0, 62.0)):
        a_run(tmp_path / f"a/{seed}", f"{PAIR}/quest", 70.0, settings=(f"train.seed={seed}",))
        run = RunFolder(tmp_path / f"a/{seed}")
        run.finish(replace(run.result, last_test=None, held_out={"kd/penultimate": 1.5}, probe={"linear": linear}))
    a_run(tmp_path / "b/0", f"{PAIR}/kd", 71.0)
    kd, quest = csv.DictReader(io.StringIO(as_csv(*plain(find_groups([tmp_path]), {}))))
    assert (quest["n"], quest["last_test_mean"]) == ("2", "")
    assert (quest["probe_linear_mean"], quest["held_out_kd/penultimate_std"]) == ("61.0", "0.0")
    assert (kd["n"], kd["last_test_mean"], kd["probe_linear_mean"]) == ("1", "71.0", "")


def test_the_report_says_how_rows_were_trained(tmp_path):
    a_run(tmp_path / "a/0", f"{PAIR}/at", 70.0)
    a_run(
        tmp_path / "b/0",
        f"{PAIR}/kd",
        71.0,
        settings=("train.ema=0.99", "data.mix=cutmix", "train.accumulate=2", "schedule=linear"),
    )
    table = training(find_groups([tmp_path]))
    assert table is not None
    shown = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert shown == {
        "AT": ["sgd, lr 0.05", "milestones [150, 180, 210]", "240", "64", "crop", "none", "–"],
        "KD": ["sgd, lr 0.05", "linear", "240", "64 × 2", "crop", "cutmix, α 1", "0.99"],
    }


def test_the_order_is_the_papers():
    assert set(ORDER) == set(list_methods())
    tables: dict[str, list[str]] = {}
    for cell in paper_results():
        data, pair, method = cell.split("/")
        if data in ("cifar100", "tiny-imagenet", "imagenet"):
            tables.setdefault(f"{data}/{pair}", []).append(method)
    for held in tables.values():
        main = [method for method in held if table_position(method) <= table_position("letkd-2")]
        assert main == sorted(main, key=table_position)
    assert table_position("a method of somebody's own") == table_position(None) > table_position("fitnet-letkd-1")


def test_rows_columns_means_and_the_papers_numbers(tmp_path):
    for seed, test in enumerate((72.0, 74.0)):
        a_run(tmp_path / f"a/{seed}", f"{PAIR}/letkd-2", test, seed=seed)
        a_run(tmp_path / f"b/{seed}", f"{PAIR}/at", test - 3, seed=seed)
    a_run(tmp_path / "c", "cifar100/rn110-rn32/letkd-2", 70.5)
    a_run(tmp_path / "d", f"{PAIR}/ce", 69.0)
    groups = find_groups([tmp_path])
    assert [(group.pair, group.title, len(group.runs)) for group in groups] == [
        ("cifar100/rn110-rn32", "letKD-2", 1),
        (PAIR, "Student", 1),
        (PAIR, "AT", 2),
        (PAIR, "letKD-2", 2),
    ]
    text = as_markdown(matrix(groups))
    assert "| letKD-2 | 70.50 (1) (paper 74.62 ± 0.20) | **73.00 ± 1.41 (2)** (paper 73.27 ± 0.16) |" in text
    assert "| AT | – | 70.00 ± 1.41 (2) (paper 70.55) |" in text
    grid = detail(PAIR, groups[1:], {groups[3].key: 40_810_000})
    assert grid.head == [
        "method",
        "test %, last epoch",
        "n",
        "Δ to Student",
        "test %, best validation epoch",
        "paper",
        "parameters",
        "MACs",
        "time per run",
    ]
    assert [cell.text for cell in grid.rows[2]] == [
        *("letKD-2", "73.00 ± 1.41", "2", "+3.00 (1)", "74.00 ± 1.41", "73.27 ± 0.16", "1,000", "40.81 M", "2.0 h"),
    ]
    assert [row[1].bold for row in grid.rows] == [False, False, True]
    rows = list(csv.DictReader(io.StringIO(as_csv(*plain(groups, {})))))
    assert (rows[3]["pair"], rows[3]["n"], float(rows[3]["last_test_mean"]), rows[3]["paper_mean"]) == (
        PAIR,
        "2",
        73.0,
        "73.27",
    )
    assert rows[0]["last_test_std"] == ""
    assert (rows[3]["paper_source"], rows[3]["paper_mark"]) == ("paper", "")
    against = detail(PAIR, groups[1:], {}, against="at")
    assert [row[3].text for row in against.rows] == ["+0.00 (1)", "–", "+3.00 [+3.00, +3.00] (2)"]
    assert r"$\Delta$ to AT" in as_latex(against)
    by_csv = {row["title"]: row for row in csv.DictReader(io.StringIO(as_csv(*plain(groups, {}, against="AT"))))}
    assert (by_csv["letKD-2"]["difference_to"], float(by_csv["letKD-2"]["difference_mean"])) == ("AT", 3.0)


def test_numbers_that_are_not_the_papers_name_their_source_and_mark(tmp_path):
    a_run(tmp_path / "a", f"{PAIR}/kd-ls", 71.0)
    a_run(tmp_path / "b", f"{PAIR}/dist", 71.5)
    groups = find_groups([tmp_path])
    text = as_markdown(matrix(groups))
    assert "| KD-LS | 71.00 (1) (published 71.43, best test epoch) |" in text
    assert "| DIST | **71.50 (1)** (published 71.75 ± 0.30) |" in text
    grid = detail(PAIR, groups, {})
    assert [(row[5].text, row[5].below) for row in grid.rows] == [("71.43", "best test epoch"), ("71.75 ± 0.30", "")]
    source = "README of sunshangquan/logit-standardization-KD"
    assert f"KD-LS: 71.43 is not from the paper; source: {source}." in grid.notes
    rows = list(csv.DictReader(io.StringIO(as_csv(*plain(groups, {})))))
    assert (rows[0]["paper_mean"], rows[0]["paper_source"], rows[0]["paper_mark"]) == ("71.43", source, "best test epoch")


def test_groups_of_methods():
    assert set(named_methods("all")) == set(list_methods()) - {"teacher"}
    assert named_methods("paper")[:2] == ["ce", "kd"]
    assert named_methods("paper")[-2:] == ["letkd-1", "letkd-2"]
    modern = named_methods("modern")
    assert modern[:6] == ["kd-ls", "dkd-ls", "dist", "reviewkd", "srd", "mlkd"]
    assert all(name.startswith("letkd-") for name in modern[6:])
    assert not set(modern) & set(named_methods("paper"))
    assert named_methods("letkd-2, modern,kd,letkd-2") == ["letkd-2", *modern, "kd"]
    assert named_methods("kd,no-such") == ["kd", "no-such"]


def test_a_teacher_stands_with_the_pairs_of_its_students_and_does_not_compete(tmp_path):
    a_run(tmp_path / "t", "cifar100/rn110-rn32/teacher", 99.0)
    a_run(tmp_path / "s", "cifar100/rn110-rn20/kd", 70.0)
    a_run(tmp_path / "u", "cifar100/rn110-rn20/ce", 70.001)
    groups = find_groups([tmp_path])
    assert [(group.pair, group.title) for group in groups] == [
        ("cifar100/rn110-rn20", "Teacher"),
        ("cifar100/rn110-rn20", "Student"),
        ("cifar100/rn110-rn20", "KD"),
    ]
    assert best_of(groups) == {groups[1].key, groups[2].key}, "equal as printed"


def test_other_settings_make_another_row_and_are_told(tmp_path):
    key = "methods.letkd.sites.intermediate.supervision.K"
    a_run(tmp_path / "a", f"{PAIR}/letkd-2", 73.0)
    a_run(tmp_path / "b", f"{PAIR}/letkd-2", 72.0, settings=(f"{key}=16",))
    groups = find_groups([tmp_path])
    assert [group.title for group in groups] == [
        "letKD-2 (letkd.sites.intermediate.supervision.K 16)",
        "letKD-2 (letkd.sites.intermediate.supervision.K 8)",
    ]
    notes = " ".join(detail(PAIR, groups, {}).notes)
    assert f"settings that differ from the recipe: {key} = 16." in notes


def test_how_often_runs_were_evaluated_makes_no_other_row(tmp_path):
    a_run(tmp_path / "a", f"{PAIR}/kd", 73.0)
    a_run(tmp_path / "b", f"{PAIR}/kd", 72.0, settings=("train.seed=1", "train.validate_every=5"))
    (group,) = find_groups([tmp_path])
    assert len(group.runs) == 2
    assert "validate_every" not in " ".join(detail(PAIR, [group], {}).notes)


def test_how_good_the_teacher_was_stands_below_the_table(tmp_path):
    a_run(tmp_path / "a", f"{PAIR}/kd", 70.0)
    assert "Accuracy of the teacher" not in " ".join(detail(PAIR, find_groups([tmp_path]), {}).notes)
    path = tmp_path / "a" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "teacher_top1": 72.5}))
    assert "Accuracy of the teacher before training: 72.50 % on validation images" in " ".join(
        detail(PAIR, find_groups([tmp_path]), {}).notes
    )


def test_numbers_of_runs_without_labels_stand_below_the_table(tmp_path):
    for seed, loss in enumerate((0.25, 0.75)):
        a_run(tmp_path / str(seed), f"{PAIR}/letkd-1", 70.0, seed=seed)
        run = RunFolder(tmp_path / str(seed))
        numbers = {"held_out": {"kd/penultimate": loss}, "probe": {"knn": 40.0, "linear": 45.0}}
        run.finish(replace(run.result, last_test=None, best_val_test=None, **numbers))
    a_run(tmp_path / "kd", f"{PAIR}/kd", 70.0)
    notes = detail(PAIR, find_groups([tmp_path]), {}).notes
    told = (
        "letKD-1: kd/penultimate on held-out images: 0.5000 ± 0.3536; knn probe: 40.00 ± 0.00 %; linear probe: 45.00 ± 0.00 %."
    )
    assert told in notes
    assert not any(note.startswith("KD:") for note in notes)
    out = write_report([tmp_path], tmp_path / "out")
    assert told in out.read_text()
    assert r"letKD-1: kd/penultimate on held-out images: 0.5000" in (tmp_path / "out/report/table.md").read_text()


def test_seeds_of_two_machines_are_one_row(tmp_path):
    for seed, (workers, weights) in enumerate([(0, "/a/t.safetensors"), (4, "/b/t.safetensors"), (8, "/b/t.safetensors")]):
        settings = (f"data.workers={workers}", f"teacher.weights={weights!r}")
        a_run(tmp_path / f"seed-{seed}", f"{PAIR}/kd", 70.0 + seed, seed=seed, settings=settings)
        if seed < 2:  # the third is older and has no fingerprints
            (tmp_path / f"seed-{seed}" / "inputs.json").write_text('{"teacher": "abc"}')
    (group,) = find_groups([tmp_path])
    assert [result.last_test for result in group.results] == [70.0, 71.0, 72.0]
    (tmp_path / "seed-1" / "inputs.json").write_text('{"teacher": "another"}')
    assert sorted(len(group.runs) for group in find_groups([tmp_path])) == [1, 2]


def test_what_is_not_finished_is_not_counted(tmp_path):
    a_run(tmp_path / "0", f"{PAIR}/kd", 70.0)
    a_run(tmp_path / "1", f"{PAIR}/kd", None, seed=1)
    (group,) = find_groups([tmp_path])
    grid = detail(PAIR, [group], {})
    assert grid.rows[0][2].text == "1"
    assert "KD: 1 of 2 runs are not finished and not counted." in grid.notes


def test_a_method_that_does_not_serve_the_pair_has_a_dash_and_a_reason(tmp_path, monkeypatch):
    class Refuses(KD):
        def build(self, student, teacher):
            raise UnsupportedPair("the moon is in the wrong house")

    monkeypatch.setitem(METHODS._items, "kd", Refuses)
    small = ["train.epochs=1", "data.fraction=0.05", "student.model=resnet8_tiny", "teacher.model=resnet8_tiny"]
    compare("digits/tiny", ["kd"], tmp_path, trials=1, settings=small)
    group = next(group for group in find_groups([tmp_path]) if group.method == "kd")
    assert matrix([group]).rows[0][1].text == "–"
    assert detail("x", [group], {}).notes[1:] == ["KD does not support this pair: the moon is in the wrong house."]
    monkeypatch.undo()
    compare("digits/tiny", ["kd"], tmp_path, trials=1, settings=small)
    assert not list(tmp_path.rglob("note.json")), "once it runs, the note is gone"


def test_folders_without_runs_are_told(tmp_path):
    with pytest.raises(RunError, match=r"contains no run: there is no recipe\.toml"):
        find_groups([tmp_path])
    with pytest.raises(RunError, match="is not a folder"):
        find_groups([tmp_path / "nowhere"])
    a_run(tmp_path / "run", f"{PAIR}/kd", 70.0)
    (tmp_path / "run" / "result.json").write_text('{"last_test": 1')
    assert find_groups([tmp_path])[0].results == [], "a damaged result counts as none"


def test_a_run_that_a_kill_cut_off_is_read(tmp_path):
    a_run(tmp_path / "run", f"{PAIR}/kd", None)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "lo')
    (group,) = find_groups([tmp_path])
    assert [row["epoch"] for row in group.runs[0].rows] == [1]


def test_every_format_escapes_what_it_must():
    grid = Grid("a_b & <c>", ["50 %", "x"], [[Cell("a|b_{c}", bold=True), Cell("<i>", below="α ± 1")]], ["note_1 <b>"])
    markdown, latex, page = as_markdown(grid), as_latex(grid), as_html(grid)
    assert "| **a\\|b\\_{c}** | &lt;i> (α ± 1) |" in markdown
    assert r"50 \% & x \\" in latex
    assert r"\textbf{a|b\_\{c\}} & <i> ($\alpha$ $\pm$ 1) \\" in latex
    assert '<th scope="row"><strong>a|b_{c}</strong></th><td>&lt;i&gt;<small>α ± 1</small></td>' in page
    assert "<b>" not in page
    assert as_csv(["a"], [["=1+1"], [-1.5], [None]]) == 'a\n\'=1+1\n-1.5\n""\n'


def test_runs_on_other_images_are_not_averaged(tmp_path):
    """Two folders of images have the same data set's name, the same recipe and the same seeds."""
    own = {"data.name": "folder", "data.size": 32}
    for root in ("cats", "dogs"):
        for seed in range(2):
            folder = tmp_path / root / f"seed-{seed}"
            a_run(folder, "digits/tiny/ce", 50.0, seed=seed, **own, **{"data.root": root})
            inputs = {"training images": f"{root} 1", "validation images": f"{root} 2", "test images": f"{root} 3"}
            RunFolder(folder).inputs.write_text(json.dumps(inputs))
    groups = find_groups([tmp_path])
    assert [group.pair.rpartition(", ")[2] for group in groups] == ["cats", "dogs"]
    assert [len(group.runs) for group in groups] == [2, 2]
    assert [{run.recipe.data.root for run in group.runs} for group in groups] == [{"cats"}, {"dogs"}]

    moved = tmp_path / "dogs" / "seed-0"
    RunFolder(moved).inputs.write_text((RunFolder(tmp_path / "cats" / "seed-0")).inputs.read_text())
    RunFolder(tmp_path / "dogs" / "seed-1").inputs.unlink()
    (group,) = find_groups([tmp_path])
    assert len(group.runs) == 4, "the same images from another place, and a run that does not know its images"
    assert group.pair == "folder/resnet14-resnet14_tiny"


def test_other_images_at_the_same_place_have_a_column_of_their_own(tmp_path):
    own = {"data.name": "folder", "data.size": 32, "data.root": "photos"}
    for images, row, test in (("old", "ce", 70.0), ("old", "kd", 80.0), ("new", "ce", 50.0), ("new", "kd", 60.0)):
        folder = tmp_path / images / row / "seed-0"
        a_run(folder, f"digits/tiny/{row}", test, **own)
        RunFolder(folder).inputs.write_text(json.dumps({"training images": "same", "test images": images}))
    groups = find_groups([tmp_path])
    assert {group.pair.partition(", ")[2] for group in groups} == {"photos, images old", "photos, images new"}
    for pair in {group.pair for group in groups}:
        same = [group for group in groups if group.pair == pair]
        assert "+10.00" in as_markdown(detail(pair, same, {}))


def test_seeds_with_another_teacher_are_another_row(tmp_path):
    for seed, teacher in enumerate(("0123456789", "0123456789", "abcdefghij")):
        folder = tmp_path / f"seed-{seed}"
        a_run(folder, f"{PAIR}/kd", 70.0 + seed, seed=seed)
        RunFolder(folder).inputs.write_text(json.dumps({"teacher": teacher}))
    groups = find_groups([tmp_path])
    assert {group.title: len(group.runs) for group in groups} == {"KD (teacher 012345)": 2, "KD (teacher abcdef)": 1}


def test_rows_whose_names_differ_in_signs_alone(tmp_path):
    for name, test in (("T = -2", 90.0), ("T = +2", 50.0), ("T 2", 60.0)):
        a_run(tmp_path / name, f"{PAIR}/kd", test, title=name)
    groups = find_groups([tmp_path])
    assert len({group.key for group in groups}) == 3
    bold = [row[0].text for row in detail(PAIR, groups, {}).rows if row[1].bold]
    assert bold == ["T = -2"]


def test_a_row_of_ones_own_with_a_failed_seed_is_one_row_with_its_note(tmp_path):
    for seed in range(2):
        a_run(tmp_path / f"soft/seed-{seed}", f"{PAIR}/kd", 70.0, seed=seed, title="KD, T = 8")
    a_run(tmp_path / "kd/seed-0", f"{PAIR}/kd", 71.0)
    RunFolder(tmp_path / "soft").keep_note(Note(PAIR, "soft", "KD, T = 8", "failed: seed 2"))
    groups = find_groups([tmp_path])
    assert [(group.title, len(group.runs), group.note) for group in groups] == [
        ("KD", 1, ""),
        ("KD, T = 8", 2, "failed: seed 2"),
    ]
    assert reference_of(groups, "soft").title == "KD, T = 8"  # by the name of its folder
    assert "KD, T = 8 failed: seed 2." in detail(PAIR, groups, {}).notes


def test_a_first_seed_without_epochs_does_not_end_the_report(tmp_path):
    for seed in range(2):
        a_run(tmp_path / f"seed-{seed}", f"{PAIR}/kd", 70.0, seed=seed)
    (tmp_path / "seed-0" / "metrics.jsonl").unlink()
    assert [chart.key for chart in curves(PAIR, find_groups([tmp_path]))]


def test_a_recipe_of_a_plugin_that_is_wrong_is_left_out(tmp_path, monkeypatch, caplog):
    def refusing(pair, *, method=None, **given):
        if method == "at":
            raise RecipeError("recipe at.toml: unknown key 'train.old_key'")
        return resolve(pair, method=method, **given)

    a_run(tmp_path / "kd", f"{PAIR}/kd", 70.0)
    collect._titles.cache_clear()
    monkeypatch.setattr(collect, "resolve", refusing)
    try:
        assert [group.method for group in find_groups([tmp_path])] == ["kd"]
    finally:
        collect._titles.cache_clear()
    assert "at is left out of the report: recipe at.toml: unknown key 'train.old_key'" in caplog.text


def test_the_first_student_is_the_row_to_compare_with(tmp_path):
    """Also next to a row of one's own, which has no method's name."""
    a_run(tmp_path / "own/0", f"{PAIR}/letkd-1", 72.0, title="mine")
    a_run(tmp_path / "ce/0", f"{PAIR}/ce", 70.0)
    a_run(tmp_path / "kd/0", f"{PAIR}/kd", 71.0)
    groups = find_groups([tmp_path])
    assert groups[-1].method is None
    assert reference_of(groups).method == "ce"
    assert reference_of(groups, "mine").title == "mine"
    assert reference_of(groups, "nothing") is None
    assert reference_of(groups[:1]) is None
