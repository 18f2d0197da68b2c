"""The paper's analyses: their rows are recipes, their numbers the paper's, and each runs small from one command."""

import pytest
import torch

from letkd.cli.main import app
from letkd.data import Dataset, Split
from letkd.errors import RecipeError
from letkd.functional import pixels
from letkd.methods import letkd2
from letkd.models import create_model
from letkd.recipes import resolve
from letkd.report.analyses import ANALYSES, as_chart, as_grid, find_analysis
from letkd.report.charts import draw
from letkd.report.geometry import geometry, pooled
from letkd.report.layer_cost import layer_cost, medians, with_layer
from tests.support.pair import SIZE, C, a_distiller, a_stream

# Printed by the paper, or read off its plot, from its tables' first row to the last.
PRINTED = {
    "alpha": [70.64, 70.80, 71.84, 72.44, 71.70, 72.13, 72.78, 73.27],
    "geometry": [52.71, 51.71, 56.36],
    "k-inter": [72.69, 72.83, 73.27, 73.26, 73.26],
    "3x3": [71.84, 71.92, 72.44, 72.11],
    "multi-layer": [71.84, 71.79, 72.44, 72.73, 73.27],
    "fitnet": [71.59, 71.80, 73.36],
}


@pytest.mark.parametrize("name", ANALYSES)
def test_rows_are_recipes_and_the_papers_numbers_stand_beside(name):
    analysis = ANALYSES[name]
    for line in analysis.lines:
        for pair in (analysis.pair, "digits/tiny"):
            resolve(pair, method=line.method, settings=line.settings)
    assert [analysis.paper(line, analysis.pair).mean for line in analysis.lines] == PRINTED[name]
    values = [[50.0 + k, 52.0 + k] for k in range(len(analysis.lines))]
    grid = as_grid(analysis, "digits/tiny", values)
    assert [row[2].text for row in grid.rows] == [f"{51 + k}.00 ± 1.41" for k in range(len(values))]
    assert all(f"{mean:.2f}" in row[4].text for mean, row in zip(PRINTED[name], grid.rows, strict=True))
    assert f"are for {analysis.pair}, another pair" in grid.notes[1]
    assert f"are for {analysis.pair}." in as_grid(analysis, analysis.pair, values).notes[1]


def test_alphas_are_those_of_the_titles():
    for line in ANALYSES["alpha"].lines:
        recipe = resolve("cifar100/rn56-rn20", method=line.method)
        found = {}
        for method, table in recipe.methods.items():
            for role, site in table["sites"].items():
                found[role] = site.get("alpha", 1.0) if method == "letkd" else 0.0
        inter, penult = (f"{found[role]:g}" if role in found else "–" for role in ("intermediate", "penultimate"))
        assert line.title == f"α inter {inter}, penult {penult}"


def test_the_curve_has_ours_and_the_papers():
    analysis, values = ANALYSES["k-inter"], [[1.0, 3.0], [4.0], [5.0], [], [6.0]]
    lines = draw(as_chart(analysis, analysis.pair, values)).axes[0].lines
    assert list(lines[0].get_xdata()) == [1, 4, 8, 16, 32]
    assert list(lines[0].get_ydata())[:3] == [2, 4, 5]
    assert list(lines[1].get_ydata()) == PRINTED["k-inter"]
    axes = draw(as_chart(analysis, "digits/tiny", values)).axes[0]
    assert axes.get_ylabel() == "difference from K_inter 1, points"
    assert list(axes.lines[0].get_ydata())[:3] == [0, 2, 3]
    assert list(axes.lines[1].get_ydata()) == pytest.approx([mean - 72.69 for mean in PRINTED["k-inter"]])


def test_geometry_is_lda_on_pooled_features_before_and_after_the_layer():
    distiller = a_distiller(letkd2(6, 2)).fit(a_stream())
    g = torch.Generator().manual_seed(0)
    labels = [torch.arange(n) % C for n in (30, 3, 30)]
    colours = torch.tensor([[250, 20, 20], [20, 250, 20], [20, 20, 250]], dtype=torch.uint8)
    images = [
        (colours[y][:, :, None, None] + torch.randint(0, 5, (len(y), 3, *SIZE), generator=g)).clamp(0, 255).to(torch.uint8)
        for y in labels
    ]
    splits = [Split(x, y) for x, y in zip(images, labels, strict=True)]
    data = Dataset("colours", *splits, classes=("r", "g", "b"), mean=(0.5,) * 3, std=(0.25,) * 3, flip=False)
    x, x_hat = pooled(distiller, data, data.test, "intermediate")
    seen = []
    layer = distiller.student.last[0].kd_intermediate
    handle = layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    distiller.student.eval()((data.test.images.float() / 255 - 0.5) / 0.25)
    handle.remove()
    for ours, theirs in zip((x, x_hat), seen[0], strict=True):
        means = torch.stack([pixels(one[None]).mean(dim=0) for one in theirs])
        torch.testing.assert_close(ours, means, atol=1e-4, rtol=1e-3)
    assert geometry(distiller, data) == {"x": 100.0, "x_hat": 100.0}, "colours are told apart"


def test_cost_counts_the_layer():
    grid = layer_cost("resnet8_tiny", 10, batch=2, rounds=1)
    names = [row[0].text for row in grid.rows]
    assert names[0] == "resnet8_tiny alone"
    assert names[1:3] == ["intermediate, K = 80 (8 per class)", "penultimate, K = 64"]
    bare, layered = create_model("resnet8_tiny", num_classes=10), with_layer("resnet8_tiny", 10, "penultimate", 64)
    d = bare.fc.in_features
    more = sum(p.numel() for p in layered.parameters()) - sum(p.numel() for p in bare.parameters())
    assert more == 2 * 64 * d + 2 * 64 + 2
    assert grid.rows[2][5].text == f"{sum(p.numel() for p in layered.parameters()):,}"
    assert [row[3].text for row in grid.rows] == ["–", "about 2 %", "2 %", "–", "–", "20 %"]
    assert medians({"a": lambda: None}, rounds=3)["a"] >= 0


def test_cost_of_a_network_without_an_input_size_is_that_of_small_images(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from letkd import create_model\n"
        "def net(num_classes):\n"
        "    model = create_model('resnet8_tiny', num_classes=num_classes)\n"
        "    model.input_size = 32\n"
        "    return model\n"
    )
    own, known = (layer_cost(name, 10, batch=2, rounds=1) for name in (f"{file}:net", "resnet8_tiny"))
    assert [row[4].text for row in own.rows] == [row[4].text for row in known.rows]


def test_a_wrong_name_is_told():
    with pytest.raises(RecipeError, match=r"unknown analysis 'alpa' .*; the analyses are alpha, geometry, .*cost"):
        find_analysis("alpa", "cost")


SMALL = ["--set", "student.model=resnet8_tiny", "--set", "teacher.model=resnet8_tiny"]


def test_from_the_command_line_and_again_for_nothing(tmp_path, capsys, monkeypatch):
    command = [
        "analyse",
        "k-inter",
        "--data",
        "digits",
        "--trials",
        "1",
        "--out",
        str(tmp_path),
        "--set",
        "train.epochs=1",
        *SMALL,
    ]
    command += ["--set", "data.fraction=0.05", "--set", "train.steps=2"]
    with pytest.raises(SystemExit) as stop:
        app(command)
    assert not stop.value.code
    assert {path.name for path in tmp_path.iterdir()} >= {"k-inter.md", "k-inter.tex", "k-inter.csv", "k-inter-curve.png"}
    table = (tmp_path / "k-inter.md").read_text()
    assert "K\\_inter 32" in table
    assert "about 73.26" in table
    assert sorted(path.name for path in tmp_path.glob("letkd-2*")) == [
        *("letkd-2", "letkd-2-K-1", "letkd-2-K-16", "letkd-2-K-32", "letkd-2-K-4"),
    ]
    import letkd.training.loop as loop

    monkeypatch.setattr(loop, "build_distiller", None)  # nothing is built a second time
    with pytest.raises(SystemExit):
        app(command)
    assert (tmp_path / "k-inter.md").read_text() == table
    capsys.readouterr()
