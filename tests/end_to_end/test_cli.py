"""The command line as a person meets it: what it prints, and what a wrong input gets."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from letkd.recipes import list_cells, list_methods, resolve
from letkd.runs.folder import RunFolder

SMALL = ["--set", "train.epochs=1", "--set", "data.fraction=0.05"]
TINY = [*SMALL, "--student", "resnet8_tiny"]


@pytest.fixture
def teacher(letkd, tmp_path):
    assert letkd("train", "digits/tiny/teacher", *SMALL, "--teacher", "resnet8_tiny", "--out", "teacher")[0] == 0
    return tmp_path / "teacher" / "student.safetensors"


def test_help_needs_no_torch():
    code = "import sys; sys.argv = ['letkd', '--help']\nfrom letkd.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb in ("demo", "train", "fit", "eval", "compare", "methods"):
        assert re.search(rf"^\s+{verb}  +[A-Z].*\.$", done.stdout, re.M), "a whole sentence"
    assert "...\n" not in done.stdout.partition("Commands:")[2]
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize("arguments", [["list"], ["show", "cifar100/rn50-mnv2/letkd-2"]])
def test_list_and_show_need_no_torch(arguments):
    code = f"import sys; sys.argv = ['letkd', *{arguments}]\nfrom letkd.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cifar100" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


def test_list_shows_every_cell_with_the_papers_number(letkd):
    code, out, err = letkd("list")
    assert (code, err) == (0, "")
    rows = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines()[1:])
    assert list(rows) == list_cells()
    assert re.split("  +", rows["cifar100/rn56-rn20/letkd-2"]) == ["73.27 ± 0.16", "paper"]
    source = "README of sunshangquan/logit-standardization-KD (best test epoch)"
    assert re.split("  +", rows["cifar100/rn56-rn20/kd-ls"]) == ["71.43", source]
    assert rows["cifar100/rn50-mnv2/fsp"] == rows["digits/tiny/kd"] == "–"
    code, out, _ = letkd("list", "--filter", "rn110-rn32/")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [f"cifar100/rn110-rn32/{method}" for method in list_methods()]


@pytest.mark.parametrize(
    ("cell", "more"),
    [
        ("cifar100/rn56-rn20/letkd-2", []),
        ("cifar100/rn56-rn20/ab", ["--quick"]),
        ("cifar100/rn50-mnv2/teacher", []),
        ("digits/tiny/at", ["--set", 'teacher.taps."a.b"=layer3', "--set", "data.mean=[0.5, 0.4, 0.3]"]),
    ],
)
def test_show_prints_a_recipe_file(letkd, tmp_path, cell, more):
    code, out, err = letkd("show", cell, *more)
    assert (code, err) == (0, "")
    (tmp_path / "own.toml").write_text(out)
    assert resolve(tmp_path / "own.toml") == resolve(cell, settings=more[1::2], quick="--quick" in more)


def test_show_says_where_each_value_comes_from(letkd):
    _, out, _ = letkd("show", "cifar100/rn50-mnv2", "--method", "letkd-1", "--set", "train.seed=7", "--quick")
    assert "the paper reports 69.97 ± 0.18 % top-1, mean of 5 trials" in out
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    sources = {line.split(" = ")[0]: line.rpartition("  # ")[2] for line in lines}
    shown = tomllib.loads(out)["train"]
    assert (shown["epochs"], shown["seed"], shown["steps"]) == (1, 7, 2)
    assert sources["train.fused"] == "default"
    assert "# train.cache_views is not set" in out.splitlines()
    assert sources["train.seed"] == "--set"
    assert sources["train.epochs"] == "--quick"
    assert sources["optim.gamma"] == "base.toml"
    assert sources["optim.lr"] == "pairs/cifar100/rn50-mnv2.toml"
    assert sources["title"] == "methods/letkd-1.toml"
    assert sources["methods.letkd.sites.penultimate.alpha"] == "pairs/cifar100/rn50-mnv2.toml, exceptions.letkd-1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "--filter", "rn57"], "no cell has 'rn57' in its name; nearest: "),
        (["show", "cifar100/rn57-rn20/kd"], "unknown recipe 'cifar100/rn57-rn20/kd'; nearest: cifar100/rn56-rn20"),
        (["show", "digits/tiny/letkd"], "unknown method 'letkd'; nearest: letkd-"),
        (["show", "digits/tiny/kd", "--set", "optim.lrr=1"], "unknown key 'optim.lrr' (nearest: lr)"),
        (["show", "nowhere.toml"], "the recipe file nowhere.toml does not exist"),
    ],
)
def test_list_and_show_with_wrong_names(letkd, arguments, says):
    code, out, err = letkd(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("letkd: ")
    assert says in err


def test_quick_train_and_compare(letkd, teacher, tmp_path):
    code, out, err = letkd("train", "digits/tiny/letkd-2", "--teacher", "resnet8_tiny", "--teacher-weights", teacher, "--quick")
    assert code == 0, err
    assert "run folder: runs/digits-tiny-letkd-2-quick" in out.replace(os.sep, "/")
    held = tomllib.loads((tmp_path / "runs" / "digits-tiny-letkd-2-quick" / "recipe.toml").read_text())
    assert (held["train"]["epochs"], held["train"]["steps"], held["data"]["fraction"]) == (1, 2, 0.02)
    methods = ["ab", "tdd-crd", "quest-3x3", "letkd-1-2"]  # phases, negatives and trees, no K at all, K twice
    small = ["--set", "teacher.model=resnet8_tiny", "--methods", ",".join(methods), "--trials", 1]
    code, out, err = letkd("compare", "digits/tiny", "--quick", *small)
    assert code == 0, err
    assert "run folder: runs/compare-digits-tiny-quick" in out.replace(os.sep, "/")
    table = (tmp_path / "runs" / "compare-digits-tiny-quick" / "table.md").read_text()
    assert len(re.findall(r"\| \d+\.\d\d \| 1 \|", table)) == 1 + len(methods), table
    for method in methods:
        held = tmp_path / "runs" / "compare-digits-tiny-quick" / method / "seed-0" / "metrics.jsonl"
        assert len(held.read_text().splitlines()) == (2 if method == "ab" else 1)


def test_installed_command_answers():
    done = subprocess.run([sys.executable, "-m", "letkd", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)


def test_demo(letkd, tmp_path, monkeypatch):
    code, out, err = letkd("demo", "--trials", 2, *SMALL, "--set", "teacher.model=resnet8_tiny", "--out", "demo")
    assert code == 0, err
    for title in ("Teacher", "Student", "KD", "QUEST", "letKD-1", "letKD-2"):
        assert re.search(rf"│ {title} +│ +\d+\.\d\d", out), title
    assert "run folder: demo" in out
    table = (tmp_path / "demo" / "table.md").read_text()
    assert len(re.findall(r"± \d+\.\d\d \| 2 \|", table)) == 6
    assert (tmp_path / "demo" / "report.html").exists()
    monkeypatch.setattr("letkd.report.write.write_report", lambda runs, out: Path(out) / "report.html")  # once is enough
    code, again, err = letkd("demo", "--trials", 2, *SMALL, "--set", "teacher.model=resnet8_tiny", "--out", "demo")
    assert (code, again) == (0, out), "a demo that is done should just show its table"


def test_train_fit_eval(letkd, teacher):
    given = [*TINY, "--teacher", "resnet8_tiny", "--teacher-weights", teacher]
    code, out, err = letkd("fit", "digits/tiny/letkd-2", *given, "--out", "run")
    assert code == 0, err
    assert "fitted SubclassSupervision(K=8, r=60) at intermediate" in err
    code, out, err = letkd("fit", "digits/tiny/letkd-2", *given, "--out", "run")
    assert code == 0
    assert "fitted Sub" not in err
    assert err.count("reused") == 2
    code, out, err = letkd("train", "digits/tiny/letkd-2", *given, "--out", "run")
    assert code == 0, err
    assert err.count("reused") == 2
    reported = re.search(r"letKD-2 +│ +(\d+\.\d\d) ", out)
    code, out, err = letkd("eval", "run")
    assert code == 0, err
    assert reported[1] in out
    assert letkd("eval", "run/student.safetensors", "--split", "val")[0] == 0


def test_own_models_by_file(letkd, teacher, tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def small(num_classes):\n"
        "    body = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU())\n"
        "    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))\n"
    )
    given = [*SMALL, "--teacher", "resnet8_tiny", "--teacher-weights", teacher, "--student", "nets.py:small"]
    code, _, err = letkd("train", "digits/tiny/letkd-1", *given, "--student-tap", "penultimate=0", "--out", "own")
    assert code == 0, err
    code, _, err = letkd("train", "digits/tiny/letkd-1", *given, "--student-tap", "penultimate=bodi", "--out", "own2")
    assert (code, err.count("\n")) == (2, 2), "the milestones' line, and the error"
    assert "Sequential has no module 'bodi'; nearest: " in err.splitlines()[-1]
    code, _, err = letkd("eval", "own")
    assert code == 2
    assert "code is not run only because a file names it" in err
    assert letkd("eval", "own", "--student", "nets.py:small")[0] == 0
    code, _, err = letkd("train", "digits/tiny/letkd-1", *given, "--out", "own3")
    assert code == 0
    assert "student nets.py:small: no taps named, using those that `letkd taps` proposes: penultimate=0" in err
    code, _, err = letkd("train", "digits/tiny/fitnet", *given, "--out", "own4")
    assert code == 2
    assert "has no tap for the role 'stage2'" in err
    assert "--student-tap stage2=module.path" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["train", "--quick"],
            "nothing was named; name a cell, such as digits/tiny/letkd-1, your own TOML file, or --data and",
        ),
        (["train", "digits/tiny/letkd-3"], "unknown method 'letkd-3'; nearest: letkd-"),
        (
            ["train", "digits/tiny/ce", "--set", "optim.lrr=1", "--set", "train.epohcs=2"],
            "unknown key 'optim.lrr' (nearest: lr); unknown key 'train.epohcs'",
        ),
        (["train", "digits/tiny/kd", "--set", "methods.kd.Temp=2"], "kd has no key 'Temp' (nearest: T)"),
        (
            ["train", "digits/tiny/ce", "--student", "resnet21"],
            "there is no model 'resnet21' in the zoo; nearest: resnet",
        ),
        (["train", "--data", "cifar100", "--student", "resnet8", "--method", "ce"], "--root"),
        (["train", "digits/tiny/kd", "--teacher-weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["train", "digits/tiny/kd", "--teacher-tap", "penultimate"], "write role=module.path"),
        (["fit", "digits/tiny/letkd-1"], "needs a trained teacher"),
        (["train", "digits/tiny/kd", "--set", "methods.kd.T=warm"], "kd cannot be made of {'T': 'warm'}"),
        (["train", "digits/tiny/kd", "--set", "methods.kt.T=4"], "unknown method 'kt' (nearest: kd"),
        (["eval", "nowhere"], "nowhere does not exist"),
        (["train", "--student", "resnet8", "--quick"], "'data.name' is missing (name the data set with --data)"),
        (
            ["train", "digits/tiny/teacher", "--student-weights", "w.safetensors"],
            "the row teacher trains the teacher's network, so student.weights has no effect; name the network with --teacher",
        ),
        (
            ["compare", "--data", "digits", "--student", "resnet8_tiny", "--methods", "ce,kd"],
            "kd needs a teacher, but none is named",
        ),
        (["compare"], "your own TOML file, or --data, --student and --teacher"),
        (["compare", "digits/tiny", "--set", "train.time=60"], "has train.time, which only `letkd train --time` plans"),
    ],
)
def test_wrong_inputs_get_one_sentence_and_leave_nothing_behind(letkd, tmp_path, arguments, says):
    code, _, err = letkd(*arguments, *([] if arguments[0] == "eval" else ["--out", "run"]))
    assert code == 2
    assert err.startswith("letkd: ")
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ["search", "digits/tiny/ce", "--over", "optim.lr=0.01..0.1"],
        ["train", "digits/tiny/ce", "--trials", "2", "--jobs", "2"],
        ["compare", "digits/tiny", "--jobs", "2"],
    ],
)
def test_a_command_that_starts_its_runs_itself_is_not_started_by_torchrun(letkd, tmp_path, monkeypatch, command):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    code, _, err = letkd(*command, "--out", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "torchrun or SLURM started it in 2 processes, which would be one run; start it in one process" in err
    assert not list(tmp_path.iterdir())


def test_without_a_method_the_teacher_is_not_used_and_a_message_says_so(letkd, tmp_path):
    alone = "no method is named, so the student trains alone, without the teacher"
    assert alone in letkd("train", "digits/tiny", "--quick", "--out", "a")[2]
    assert alone not in letkd("train", "digits/tiny/ce", "--quick", "--out", "b")[2]
    assert alone not in letkd("train", "digits/tiny", "--method", "ce", "--quick", "--out", "c")[2]


def test_a_fit_with_a_preset_is_that_of_the_training_with_it(letkd, teacher):
    given = [*TINY, "--teacher", "resnet8_tiny", "--teacher-weights", teacher, "--preset", "fast", "--out", "run"]
    assert letkd("fit", "digits/tiny/letkd-1", *given)[0] == 0
    code, _, err = letkd("train", "digits/tiny/letkd-1", *given, "--epochs", 1)
    assert code == 0, err
    assert "same teacher, tap, data and settings; reused" in err


def test_debug_shows_the_traceback(letkd):
    with pytest.raises(Exception, match="unknown method"):
        letkd("--debug", "train", "digits/tiny/letkd-3")
    assert letkd("train", "digits/tiny/letkd-3")[0] == 2


def test_a_nothing_to_fit_method_says_so(letkd, teacher):
    code, out, _ = letkd("fit", "digits/tiny/kd", *TINY, "--teacher", "resnet8_tiny", "--teacher-weights", teacher)
    assert (code, out) == (0, "KD has nothing to fit\n")


def test_ctrl_c_says_how_to_go_on(letkd, monkeypatch):
    import letkd.training.loop as loop

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "read_data", stop)
    code, _, err = letkd("train", "digits/tiny/ce", "--out", "run")
    assert (code, err) == (130, "letkd: stopped; run the same command again to resume\n")


def test_default_run_folder_is_under_runs(letkd, tmp_path):
    code, out, err = letkd("train", "digits/tiny/ce", *TINY)
    assert code == 0, err
    assert "run folder: runs/digits-tiny-ce" in out.replace(os.sep, "/")
    assert (tmp_path / "runs" / "digits-tiny-ce" / "result.json").exists()


def test_compare(letkd, tmp_path):
    given = ["--methods", "ce,fsp,crd", "--trials", 1, *SMALL, "--set", "teacher.model=resnet8"]
    code, out, err = letkd("compare", "--data", "digits", *given)
    assert code == 0, err
    assert re.search(r"│ CRD +│ +\d+\.\d\d", out)
    assert re.search(r"│ FSP +│ +– ", out)
    assert "FSP does not support this pair: FSP compares channel with channel" in out
    assert "run folder: runs/compare-digits-tiny" in out
    assert (tmp_path / "runs" / "compare-digits-tiny" / "table.md").exists()
    code, _, err = letkd("compare", "--data", "mnist")
    assert (code, err.count("\n")) == (2, 1)
    assert "--data 'mnist': no pair uses this data set" in err


def test_methods(letkd):
    code, out, err = letkd("methods")
    assert code == 0, err
    for title in ("AB", "FitNet", "CRD+KD", "TDD+CRD", "letKD-2", "QUEST (2)"):
        assert re.search(rf"^{re.escape(title)} *$", out, re.M), title


def test_freeze_keeps_parameters_as_they_are(letkd, tmp_path):
    small = ["--set", "data.fraction=0.05", "--set", "student.model=resnet8_tiny", "--set", "train.steps=2", "--epochs", 1]
    code, _, err = letkd("train", "digits/tiny/ce", *small, "--freeze", "conv1.*", "--freeze", "bn1.*", "--out", "run")
    assert code == 0, err
    assert RunFolder("run").recipe.student.freeze == ["conv1.*", "bn1.*"]
    code, _, err = letkd("train", "digits/tiny/ce", *small, "--freeze", "stem.*", "--out", "other")
    assert (code, "matches the pattern 'stem.*'" in err) == (2, True)


def test_compare_takes_presets(letkd):
    small = ["--set", "data.fraction=0.05", "--set", "student.model=resnet8_tiny", "--set", "teacher.model=resnet14_tiny"]
    code, _, err = letkd("compare", "digits/tiny", "--methods", "ce", "--trials", 1, "--preset", "fast", "--quick", *small)
    assert code == 0, err
    recipe = RunFolder("runs/compare-digits-tiny-fast-quick/ce/seed-0").recipe
    assert (recipe.optim.schedule, recipe.optim.lr) == ("linear", 0.1)
    code, _, err = letkd("compare", "digits/tiny", "--methods", "ce", "--preset", "faster")
    assert (code, "unknown preset 'faster'; choose one of fast, finetune, paper" in err) == (2, True)
