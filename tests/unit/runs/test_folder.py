"""Run folders and tables."""

import json
import re
import subprocess
import sys

import pytest

from letkd.errors import RunError
from letkd.progress import set_quiet
from letkd.recipes import resolve
from letkd.recipes.schedule import why_not_extended
from letkd.report.results_table import as_markdown
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result
from letkd.runs.results import Row, mean_std


def result(test: float, **changes) -> Result:
    none = dict.fromkeys(("last_val", "best_val", "best_val_epoch", "best_val_test"))
    return Result(
        **{**none, "last_test": test, "last_test_top5": 99.0, "parameters": 1234, "epochs": 3, "seconds": 2.0, **changes}
    )


def begun(path) -> RunFolder:
    run = RunFolder(path, resolve("digits/tiny/ce"))
    with run.begin():
        return run


def test_a_folder_keeps_its_recipe_and_refuses_another(tmp_path):
    recipe = resolve("digits/tiny/letkd-2")
    run = RunFolder(tmp_path / "run", recipe)
    assert not run.path.exists()
    with run.begin():
        run.log({"epoch": 1})
    assert RunFolder(tmp_path / "run").recipe == recipe
    RunFolder(tmp_path / "run", recipe)
    other = resolve("digits/tiny/letkd-2", settings=["optim.lr=0.1", "methods.letkd.sites.penultimate.alpha=0.5"])
    with pytest.raises(RunError, match=r"holds another run \(it differs in methods.letkd.sites.penultimate.alpha, optim.lr\)"):
        RunFolder(tmp_path / "run", other)


def test_a_start_that_trained_nothing_gives_its_folder_to_another_recipe(tmp_path, said):
    with RunFolder(tmp_path / "run", resolve("digits/tiny/ce")).begin():
        pass
    (tmp_path / "run" / "inputs.json").write_text("{}")
    run = RunFolder(tmp_path / "run", resolve("digits/tiny/ce", settings=["optim.lr=0.9"]))
    with run.begin():
        assert not run.inputs.exists()
    assert "an earlier start with another recipe trained nothing; its files are replaced" in said()
    assert RunFolder(tmp_path / "run").recipe.optim.lr == 0.9


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="holds files that are not a run"):
        RunFolder(tmp_path, resolve("digits/tiny/ce"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_with_fitted_supervision_becomes_a_run(tmp_path):
    (tmp_path / "supervision").mkdir()
    RunFolder(tmp_path, resolve("digits/tiny/ce"))


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    run = begun(tmp_path / "run")
    for epoch in (1, 2, 3):
        run.log({"epoch": epoch})
    run.log({"epoch": 2, "again": 1.0})
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.rows() == [{"epoch": 1}, {"epoch": 2, "again": 1.0}]
    (run.path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo')
    assert run.rows() == [{"epoch": 1}]


HOLD = """
import sys
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
with RunFolder(sys.argv[1], resolve("digits/tiny/ce")).begin():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_the_second_process_on_a_folder_is_refused_until_the_first_ends(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdin
    assert first.stdout
    assert first.stdout.readline() == "held\n"
    second = RunFolder(tmp_path, resolve("digits/tiny/ce"))
    with (
        pytest.raises(RunError, match=rf"is in use by another process \(process {first.pid} on .*\); wait for it"),
        second.begin(),
    ):
        pass
    first.kill()  # no word of farewell: the system itself lets go of the folder
    first.wait()
    with second.begin():
        pass


def test_what_a_killed_writer_left_is_swept(tmp_path):
    run = begun(tmp_path / "run")
    (run.path / f".student.safetensors.{'01' * 16}.tmp").write_text("half a")
    with run.begin():
        assert not list(run.path.glob("*.tmp"))


def test_a_start_killed_before_its_recipe_was_written_can_start_again(tmp_path):
    for name in (".lock", "env.json", f".recipe.toml.{'01' * 16}.tmp"):
        (tmp_path / name).write_text("")
    RunFolder(tmp_path, resolve("digits/tiny/ce"))


def test_going_on_elsewhere_is_told(tmp_path, capsys, monkeypatch):
    set_quiet(False)
    run = begun(tmp_path / "run")
    held = json.loads((run.path / "env.json").read_text())
    (run.path / "env.json").write_text(json.dumps(held | {"threads": 999}))
    with run.begin():
        assert "started in another environment (threads differ)" in capsys.readouterr().err


def test_the_environment_is_recorded(tmp_path):
    run = begun(tmp_path / "run")
    held = json.loads((run.path / "env.json").read_text())
    assert held["libraries"]["torch"].startswith("2.")
    assert held["threads"] >= 1


def test_not_a_run(tmp_path):
    with pytest.raises(RunError, match=r"is not a run folder: it has no recipe\.toml"):
        _ = RunFolder(tmp_path).recipe


def test_result_round_trip(tmp_path):
    run = begun(tmp_path / "run")
    assert run.result is None
    run.finish(result(91.5, best_val=93.0))
    assert run.result == result(91.5, best_val=93.0)


def test_mean_std():
    assert mean_std([1.0, 2.0, 4.0]) == "2.33 ± 1.53"
    assert mean_std([5.0]) == "5.00"
    assert mean_std([None, None]) == "–"


def test_markdown():
    text = as_markdown([Row("KD", [result(90.0, best_val_test=92.0), result(92.0, best_val_test=94.0)])])
    head, _, row = text.splitlines()
    assert "test %, last epoch" in head
    assert row == "| KD | 91.00 ± 1.41 | 2 | 93.00 ± 1.41 | 1,234 | 2 s |"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "longer", "why"),
    [
        (["schedule=constant"], ["epochs=9"], None),
        (["milestones=[1, 2]"], ["epochs=9", "milestones=[1, 2]"], None),
        (["milestones=[1, 2]"], ["epochs=9", "milestones=[1, 2, 5]"], None),
        (["milestones=[]"], ["epochs=9", "milestones=[4]"], None),
        (
            ["milestones=[1, 2]"],
            ["epochs=8", "milestones=[2, 4]"],
            "0.005 became 0.05 in epoch 2; keep them with `optim.milestones=",
        ),
        (["schedule=cosine"], ["epochs=5"], "in epoch 1$"),
        (["schedule=linear"], ["epochs=5"], "in epoch 1$"),
        (["schedule=constant", "warmup=0.5"], ["epochs=5"], "in epoch 1$"),
        (["schedule=constant", "warmup=1"], ["epochs=5"], None),
        (["schedule=constant"], ["epochs=3"], "it has 4 epochs, and 3 are not more"),
    ],
)
def test_a_run_is_extended_where_its_rates_would_have_been_the_same(more, longer, why):
    held = resolve("digits/tiny/ce", settings=["lr=0.05", "epochs=4", *more])
    asked = resolve("digits/tiny/ce", settings=["lr=0.05", *more, *longer])
    found = why_not_extended(held, asked)
    assert (found is None) == (why is None), found
    if why is not None and found is not None:
        assert re.search(why, found)


def test_only_epochs_and_milestones_may_differ(tmp_path):
    settings = ["schedule=constant", "epochs=4"]
    run = RunFolder(tmp_path / "run", resolve("digits/tiny/ce", settings=settings))
    with run.begin():
        run.log({"epoch": 1})
    assert RunFolder(tmp_path / "run", resolve("digits/tiny/ce", settings=[*settings, "epochs=5"])).extends
    with pytest.raises(RunError, match=r"differs in optim\.lr, train\.epochs"):
        RunFolder(tmp_path / "run", resolve("digits/tiny/ce", settings=[*settings, "epochs=5", "lr=1"]))
