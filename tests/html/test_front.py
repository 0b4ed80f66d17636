"""The page of a Pareto front in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import browser as chromium
import pytest

from program import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(bool(chromium.MISSING), reason=chromium.MISSING or "-")

MODEL = """
import memfit, torch
from torch import nn

def build():
    return memfit.Workload(
        model=nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]),
        batch=torch.randn(1024, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params),
    )
"""
#: A name that breaks out of markup, attributes and scripts where it is not escaped.
HOSTILE = "<img src=x onerror=alert(1)>'{{rows}}&quot;.py"
ARROW_RIGHT = "\ue014"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("front")
    (folder / HOSTILE).write_text(MODEL)
    words = ["plan", f"{HOSTILE}:build", "--pareto", "front.html", "--format", "json"]
    done = run(*words, folder=folder)
    assert done.code == 0, done.stderr
    return folder / "front.html", done.json


def test_every_plan_is_shown_and_said(browser: chromium.Browser, front: tuple[Path, Any]):
    page, said = front
    points = said["points"]
    assert {point["promise"] for point in points} == {"exact", "equivalent"}
    browser.resize(1180, 1000)
    browser.emulate(prefers_color_scheme="light")
    browser.log()
    browser.open(page)
    assert browser.log() == []
    outside = [
        url for url in browser.requests() if not url.startswith(("file:", "chrome:", "data:"))
    ]
    assert outside == []
    # The name is text, wherever it stands.
    assert browser.run("return document.images.length") == 0
    assert HOSTILE in browser.text(".source")
    for plot in ("wide", "narrow"):
        marks = browser.run(
            "return document.querySelectorAll(`svg.${arguments[0]} .point[data-point]`).length",
            plot,
        )
        assert marks == len(points)
    assert browser.run("return document.querySelectorAll('#plans tbody tr').length") == len(points)
    # Marks lie as the numbers do: more memory to the right, more time above.
    places = browser.run(
        "return [...document.querySelectorAll('svg.wide .point[data-point]')]"
        ".map(({dataset}) => [Number(dataset.x), Number(dataset.y)])"
    )
    by_peak = sorted(range(len(points)), key=lambda i: points[i]["predicted_peak_bytes"])
    assert [places[i][0] for i in by_peak] == sorted(place[0] for place in places)
    by_time = sorted(range(len(points)), key=lambda i: -points[i]["predicted_step_ratio"])
    assert [places[i][1] for i in by_time] == sorted(place[1] for place in places)


def test_a_plan_is_told_by_pointer_and_keyboard(browser: chromium.Browser, front: tuple[Path, Any]):
    page, said = front
    browser.resize(1180, 1000)
    browser.open(page)
    budget = said["points"][0]["budget_bytes"]
    browser.press("svg.wide [data-point='0']", "\ue004")
    browser.press("svg.wide [data-point='0']", ARROW_RIGHT)
    assert browser.run("return document.getElementById('readout').dataset.point") == "1"
    browser.run("window.memfit.choose(0)")
    told = browser.text("#readout")
    assert f"memfit plan {HOSTILE}:build --budget {budget}" in told
    assert "loss and gradients stay bitwise equal" in told
    box = browser.run(
        "const {width, height} = document.querySelector('svg.wide').viewBox.baseVal;"
        "const {x, y} = document.querySelector(\"svg.wide [data-point='2']\").dataset;"
        "return [x / width, y / height]"
    )
    browser.click("svg.wide", *box)
    assert browser.run("return document.getElementById('readout').dataset.point") == "2"
    # The image that the button saves is a PNG with something in it.
    size = browser.run("return window.memfit.png().then((blob) => [blob.type, blob.size])")
    assert size[0] == "image/png"
    assert size[1] > 20_000
    assert browser.log() == []
