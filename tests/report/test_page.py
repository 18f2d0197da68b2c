"""The page in a real browser: no complaints, no network, the numbers of metrics.jsonl, mouse, finger and keyboard."""

import json
import re
import statistics
from pathlib import Path

import pytest

from letkd.recipes import resolve
from letkd.report.collect import find_groups
from letkd.report.knowledge import knowledge
from letkd.report.opened import RunOpener
from letkd.report.write import write_report
from letkd.runs.folder import RunFolder
from tests.support.browser import Browser
from tests.support.runs import a_run


@pytest.fixture
def page(report) -> Path:
    return report / "report.html"


def metrics(runs: Path, method: str) -> list[list[dict]]:
    """The rows of each seed."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(runs.glob(f"{method}/seed-*/metrics.jsonl"))
    ]


def chart(browser: Browser, title: str) -> str:
    """A selector of the chart with this title."""
    number = browser.run(
        f"[...document.querySelectorAll('[data-chart]')].findIndex((c) => c.querySelector('h4 span').textContent === {json.dumps(title)})"
    )
    assert number >= 0, title
    browser.run(f"document.querySelectorAll('[data-chart]')[{number}].id = 'chart{number}'")
    return f"#chart{number}"


def legend(browser: Browser, selector: str) -> dict[str, str]:
    return dict(
        browser.run(
            f"[...document.querySelectorAll('{selector} .keys button')].map((b) => "
            "[b.querySelector('.name').textContent, b.querySelector('.value').textContent])"
        )
    )


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_it_opens_without_a_complaint_and_fits_the_screen(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    drawn = browser.run("[...document.querySelectorAll('[data-chart]')].filter((c) => c.querySelector('.plot *')).length")
    assert drawn == browser.run("JSON.parse(document.getElementById('data').textContent).charts.length") > 5
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground))) < 60) == dark


def test_the_table_says_what_the_results_say(browser, page, runs):
    browser.open(page)
    rows = browser.run(
        "[...document.querySelectorAll('#results tbody tr')].map((r) => [...r.children].map((c) => c.textContent))"
    )
    assert [row[0] for row in rows] == ["Teacher", "Student", "KD", "QUEST", "letKD-2"]
    for row, method in zip(rows[1:], ["ce", "kd", "quest", "letkd-2"], strict=True):
        results = [json.loads(path.read_text()) for path in sorted(runs.glob(f"{method}/seed-*/result.json"))]
        last = [result["last_test"] for result in results]
        assert row[1] == f"{statistics.mean(last):.2f} ± {statistics.stdev(last):.2f}"
        assert row[2] == "2"
        assert row[6] == f"{results[0]['parameters']:,}"
    assert browser.run("document.querySelectorAll('#results tbody strong').length") >= 1


def test_pointing_at_a_curve_tells_the_metrics(browser, page, runs):
    browser.open(page)
    accuracy = chart(browser, "Validation accuracy")
    for share, epoch in ((0.15, 1), (0.95, 2)):
        browser.hover(f"{accuracy} svg", x=share)
        assert browser.run(f"document.querySelector('{accuracy} output').textContent") == f"epoch {epoch}"
        shown = legend(browser, accuracy)
        for title, method in (("Student", "ce"), ("KD", "kd"), ("letKD-2", "letkd-2")):
            mean = statistics.mean(rows[epoch - 1]["val_top1"] for rows in metrics(runs, method))
            assert shown[title] == f"{mean:.2f}"
    browser.run(f"document.querySelector('{accuracy} svg').focus()")
    browser.press("ArrowLeft")
    assert browser.run(f"document.querySelector('{accuracy} output').textContent") == "epoch 1"


def test_each_line_starts_with_its_own_last_value(browser, tmp_path):
    """AB has one epoch more than the other rows."""
    for method, epochs in (("ce", 2), ("ab", 3)):
        run = RunFolder(tmp_path / method, resolve(f"digits/tiny/{method}"))
        with run.begin():
            for epoch in range(1, epochs + 1):
                run.log({"epoch": epoch, "lr": 0.1, "train_top1": 1.0, "loss": 1.0, "ce": 1.0, "val_top1": 10.0 * epoch})
    browser.open(write_report([tmp_path], tmp_path / "out"))
    accuracy = chart(browser, "Validation accuracy")
    readout = f"document.querySelector('{accuracy} output').textContent"
    assert legend(browser, accuracy) == {"Student": "20.00", "AB": "30.00"}
    assert browser.run(readout) == "last epoch"
    browser.hover(f"{accuracy} svg", x=0.95)
    assert legend(browser, accuracy) == {"Student": "–", "AB": "30.00"}
    assert browser.run(readout) == "epoch 3"
    assert browser.complaints() == []


def test_rows_with_the_same_colour_have_other_marks(browser, tmp_path):
    for k in range(17):
        a_run(tmp_path / str(k), "digits/tiny/ce", 50.0, title=f"row {k:02}")
    browser.open(write_report([tmp_path], tmp_path / "out"))
    keys = browser.run(
        f"[...document.querySelectorAll('{chart(browser, 'Training accuracy (augmented images)')} .key')].map((key) => key.innerHTML)"
    )
    assert len(keys) == len(set(keys)) == 17


def test_a_name_hides_its_line(browser, page):
    browser.open(page)
    accuracy = chart(browser, "Validation accuracy")
    lines = f"document.querySelectorAll('{accuracy} svg path').length"
    before = browser.run(lines)
    browser.click(f"{accuracy} .keys li:nth-child(2) button")
    assert browser.run(lines) == before - 1
    assert browser.run(f"document.querySelector('{accuracy} .keys li:nth-child(2) button').ariaPressed") == "false"
    browser.click(f"{accuracy} .keys li:nth-child(2) button")
    assert browser.run(lines) == before


def test_losses_are_chosen_by_method(browser, page, runs):
    browser.open(page)
    choose = "(() => { const s = document.querySelector('#curves select'); s.value = [...s.options].find((o) => o.text === %s).value; "
    browser.run(choose % "'KD'" + "s.dispatchEvent(new Event('change')); })()")
    visible = "[...document.querySelectorAll('#curves [data-name]')].filter((p) => !p.hidden).map((p) => p.dataset.name)"
    assert browser.run(visible) == ["KD"]
    shown = legend(browser, chart(browser, "Loss: KD"))
    for term in ("loss", "ce", "kd"):
        assert shown[term] == f"{statistics.mean(rows[1][term] for rows in metrics(runs, 'kd')):.2f}"


def test_health_by_epoch(browser, page):
    browser.open(page)
    used = chart(browser, "templates used")
    assert legend(browser, used) == {"letKD-2": "20.5"}
    browser.run(f"document.querySelector('{used} svg').focus()")
    browser.press("Home")
    assert legend(browser, used) == {"letKD-2": "10.5"}
    assert legend(browser, chart(browser, "pixels that discard all, %")) == {"letKD-2": "25.00"}


def test_a_location_tells_what_passes_there(browser, page, runs):
    group = next(group for group in find_groups([runs]) if group.method == "letkd-2")
    opened = RunOpener()
    run = group.runs[0]
    sites = {one.site: one for one in knowledge(opened.distiller(run), opened.data(run))}
    one = sites["intermediate"]
    browser.open(page)
    browser.run(
        "(() => { const s = document.querySelector('#knowledge select'); s.value = [...s.options].find((o) => "
        "o.text === 'letKD-2, intermediate').value; s.dispatchEvent(new Event('change')); })()"
    )
    number = browser.run(
        "JSON.parse(document.getElementById('data').textContent).knowledge.findIndex("
        "(k) => k.site === 'intermediate' && k.title === 'letKD-2')"
    )
    here = f"[data-knowledge='{number}']"

    def told() -> list[str]:
        return browser.run(f'[...document.querySelectorAll("{here} .story, {here} .bars p")].map((p) => p.textContent)')

    def expected(picture: int, k: int) -> list[str]:
        at = one.pictures[picture].locations[k]
        lists = [at.p_T, at.p_S, at.kept or []]
        bars = [
            ", ".join(f"{one.name(j)}\xa0{round(v, 3):.2f}" for j, v in entries[:4] if round(v, 3) > 0) for entries in lists
        ]
        return [one.name(at.label), *(text or "nothing" for text in bars)]

    for k, act in ((0, browser.hover), (11, browser.click), (63, browser.tap)):
        act(f"{here} .map button:nth-child({k + 1})")
        story, *bars = told()
        label, *wanted = expected(0, k)
        assert f"sub-class here is {label}." in story
        assert bars == wanted
        assert browser.run(f"document.querySelectorAll(\"{here} .map [aria-pressed='true']\").length") == 1
    browser.click(f"{here} .thumbs button:nth-child(3)")
    browser.run(f"document.querySelector(\"{here} .map button[tabindex='0']\").focus()")
    middle = 4 * 8 + 4
    assert told()[1:] == expected(2, middle)[1:]
    for key, k in (("ArrowUp", middle - 8), ("ArrowRight", middle - 7), ("ArrowDown", middle + 1)):
        browser.press(key)
        assert told()[1:] == expected(2, k)[1:]
    assert browser.complaints() == []


def test_a_class_of_the_feature_plot_can_be_faded(browser, page):
    browser.open(page)
    faded = "[...document.querySelectorAll('#features circle')].filter((c) => c.style.opacity === '0.06').length"
    browser.click("#features .keys li:nth-child(1) button")
    assert browser.run(faded) == 30 * browser.run("document.querySelectorAll('#features svg').length")


def test_text_from_files_is_text(browser, tmp_path):
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    folder = tmp_path / "run"
    run = RunFolder(folder, resolve("digits/tiny/ce", overrides={"title": evil}))
    with run.begin():
        run.log({"epoch": 1, "lr": 0.1, "train_top1": 10.0, "loss": 1.0, "ce": 1.0, evil: 2.0, "val_top1": 3.0, "seconds": 1.0})
    browser.open(write_report([folder], tmp_path / "out"))
    assert browser.complaints() == []
    assert browser.run("document.images.length") == 0
    assert evil in browser.run("document.querySelector('#results tbody').textContent")


def test_several_pairs_share_a_table_and_each_has_its_own_part(browser, tmp_path):
    for cell in ("cifar100/rn56-rn20/letkd-2", "cifar100/rn110-rn32/letkd-2", "cifar100/rn110-rn32/at"):
        a_run(tmp_path / cell.replace("/", "-"), cell, 70.0)
    browser.open(write_report([tmp_path], tmp_path / "out"), width=390)
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= 390
    captions = browser.run("[...document.querySelectorAll('#results caption')].map((c) => c.textContent)")
    assert captions == ["Methods by pairs", "cifar100/rn110-rn32", "cifar100/rn56-rn20"]
    rows = browser.run("[...document.querySelectorAll('#results tbody')][0].innerText.split(/[\\t\\n]+/)")
    assert rows == [
        "AT",
        "70.00 (1)",
        "paper 72.31",
        "–",
        "letKD-2",
        "70.00 (1)",
        "paper 74.62 ± 0.20",
        "70.00 (1)",
        "paper 73.27 ± 0.16",
    ]
    assert browser.run("[...document.querySelectorAll('#curves h3')].map((c) => c.textContent)") == captions[1:]
    told = browser.run("document.querySelector('#made').innerText")
    assert "MACs of AT left out" in told
    assert "has no student.safetensors; finish the run" in told
