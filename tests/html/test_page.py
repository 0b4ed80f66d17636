"""The HTML report in a real browser: it shows what was recorded, and nothing leaves the page."""

from __future__ import annotations

import pickle
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import browser as chromium
import pytest
import recording
from reports import PROGRAM, Report

pytestmark = pytest.mark.skipif(bool(chromium.MISSING), reason=chromium.MISSING or "-")

#: What a page stays below, whatever the snapshot.
MOST_BYTES = 5_000_000
HOME, PLUS = "\ue011", "+"


@pytest.fixture
def opened(browser: chromium.Browser, training: Report) -> chromium.Browser:
    """The page of the training steps, at the usual size, as it opens."""
    browser.resize(1280, 1000)
    browser.emulate(prefers_color_scheme="light")
    browser.log()
    browser.open(training.page)
    return browser


def change(browser: chromium.Browser, selector: str, value: str, event: str = "change") -> None:
    browser.run(
        "const control = document.querySelector(arguments[0]); control.value = arguments[1];"
        "control.dispatchEvent(new Event(arguments[2]))",
        selector,
        value,
        event,
    )
    browser.settle()


def view(browser: chromium.Browser, expression: str) -> Any:
    return browser.run(f"const view = window.memfit.view; return {expression}")


def do(browser: chromium.Browser, action: str) -> None:
    browser.run(f"const view = window.memfit.view; {action}")
    browser.settle()


def test_it_opens_without_network_or_complaint(opened, training):
    assert opened.requests()[-1] == training.page.as_uri()
    outside = [url for url in opened.requests() if not url.startswith(("chrome:", "data:"))]
    assert outside == []
    assert opened.log() == []
    text = training.page.read_text()
    assert re.findall(r"(?:https?:|wss?:|//)[\w-]+\.\w+", text) == []
    # Even a script that got in could not reach out.
    opened.run("fetch('http://127.0.0.1:9/').catch(() => 0)")
    opened.settle()
    assert any("Content Security Policy" in line for line in opened.log())


def test_the_peak_is_that_of_the_explanation(opened, training):
    peak = training.json["devices"][0]["peak"]
    assert view(opened, "view.device.head.peak.allocated_bytes") == peak["allocated_bytes"]
    assert view(opened, "view.device.head.peak.moment") == peak["event"] + 1
    assert peak["allocated_bytes"] == max(training.recordings[0].allocated)
    shown = f"{peak['allocated_bytes'] / 2**20:.1f} MiB"
    assert f"Peak {shown} allocated" in opened.text("#headline")
    assert f"{shown} allocated" in opened.text("#readout")
    assert shown in opened.run("return document.querySelector('#plot').getAttribute('aria-label')")


def test_owners_add_up_to_the_peak(opened, training):
    owners = view(opened, "view.device.head.owners.map((owner) => owner.peak_bytes)")
    assert sum(owners) == training.json["devices"][0]["peak"]["allocated_bytes"]
    assert opened.run("return document.querySelectorAll('#owners tbody tr').length") == len(owners)


def highest_shown(browser: chromium.Browser) -> list[int]:
    """For what is in view: from and to, the highest allocated and reserved bytes drawn."""
    return browser.run(
        "const view = window.memfit.view;"
        "const column = view.device.query(view.from, view.to);"
        "return [view.from, view.to, column.allocated, column.reserved]"
    )


@pytest.mark.parametrize("name", ["training", "long"])
def test_every_zoom_shows_its_own_maximum(name, browser, request):
    report = request.getfixturevalue(name)
    browser.open(report.page)
    allocated, reserved = report.recordings[0].allocated, report.recordings[0].reserved
    moments = len(allocated)
    width = view(browser, "view.device.grids[0].width")
    assert (width == 1) == (name == "training")
    for start, end in [(0, 1), (0.31, 0.36), (0.5, 0.52), (0.9, 1)]:
        do(browser, f"view.show({start * moments}, {end * moments})")
        shown_from, shown_to, most, most_reserved = highest_shown(browser)
        # Columns that are cut by the edge of the view count whole.
        first = int(shown_from // width) * width
        last = -int(-shown_to // width) * width
        assert most == max(allocated[first:last])
        assert most_reserved == max(reserved[first:last])


def test_single_events_around_the_peak_are_there_in_long_traces(browser, long):
    browser.open(long.page)
    allocated = long.recordings[0].allocated
    peak = allocated.index(max(allocated))
    shown = view(
        browser,
        f"[...Array(41).keys()].map((i) => {peak - 20} + i)"
        ".map((moment) => view.device.query(moment, moment + 1).allocated)",
    )
    assert shown == allocated[peak - 20 : peak + 21]


def test_keys_and_wheel_zoom_and_move(opened):
    whole = view(opened, "view.length")
    opened.press("#plot", PLUS, PLUS)
    assert view(opened, "view.to - view.from") == pytest.approx(whole / 4)
    before = view(opened, "view.from")
    opened.press("#plot", "\ue014")
    assert view(opened, "view.from") > before
    opened.wheel("#plot", 0.5, 0.5, -300)
    assert view(opened, "view.to - view.from") < whole / 5
    opened.press("#plot", HOME)
    assert view(opened, "[view.from, view.to]") == [0, whole]
    opened.click("#overview", 0.3, 0.5, drag_to=0.5)
    assert view(opened, "view.to - view.from") < whole / 2
    opened.press("#plot", "p")
    assert view(
        opened, "view.from < view.device.head.peak.moment && view.device.head.peak.moment < view.to"
    )


def test_a_click_into_the_memory_map_tells_the_allocation(opened):
    # The middle of a rectangle, as a fraction of the map.
    life, x, y = opened.run(
        """
        const view = window.memfit.view; const { lives } = view.device;
        const canvas = document.querySelector("#memory");
        const area = (i) => (lives.birth[i] > 0) * (lives.end[i] - lives.birth[i]) * lives.size[i];
        let life = 0;
        for (let i = 0; i < lives.count; i++) {
          if (lives.birth[i] > 0 && area(i) > area(life)) life = i;
        }
        const middle = (lives.birth[life] + lives.end[life]) / 2;
        const left = 74, right = 12, top = 6, bottom = 20;
        const x = left + (middle / view.length) * (canvas.clientWidth - left - right);
        const part = (lives.place[life] + lives.size[life] / 2) / view.device.addressBytes;
        const y = canvas.clientHeight - bottom - part * (canvas.clientHeight - bottom - top);
        return [life, x / canvas.clientWidth, y / canvas.clientHeight];
        """
    )
    opened.click("#memory", x, y)
    assert view(opened, "view.pinned") == life
    panel = opened.text("#pinned-body")
    size = view(opened, f"view.device.lives.size[{life}]")
    assert f"({size:,} bytes)" in panel
    stack = view(
        opened, f"view.device.stack(view.device.lives.stack[{life}]).frames.map((f) => f.name)"
    )
    assert len(stack) >= 4
    assert all(name in panel for name in stack)
    assert "/home/ada/gpt/" in panel


def test_a_click_into_the_timeline_tells_owner_and_stack(opened, training):
    peak = view(opened, "(view.device.head.peak.moment + 0.5) / view.length")
    opened.click(
        "#plot",
        (74 + peak * (view(opened, "document.querySelector('#plot').clientWidth") - 86))
        / view(opened, "document.querySelector('#plot').clientWidth"),
        0.9,
    )
    owner = view(opened, "view.device.head.owners[view.owner].name")
    assert owner in opened.text("#pinned-body")
    assert (
        opened.run(
            "return document.querySelector('#owners tr[aria-selected=true]').textContent"
        ).count(owner)
        == 1
    )


@pytest.mark.parametrize("place", ["peak", "end", "start", "out_of_memory"])
def test_the_segment_map_adds_up_to_reserved(place, opened, training):
    moment = view(
        opened,
        f"(view.device.head.chosen.find((one) => one.reason === '{place}')"
        " ?? view.device.head.refusals[0]).moment",
    )
    do(opened, f"view.set({{ moment: {moment} }})")
    recorded = training.recordings[0]
    assert (
        int(opened.run("return document.querySelector('#segments-summary').dataset.reservedBytes"))
        == recorded.reserved[moment]
    )
    # What is drawn as held by tensors is what was allocated.
    held = view(
        opened,
        "view.device.livesAt(view.moment)"
        ".filter((i) => view.device.lives.released[i] > view.moment)"
        ".reduce((sum, i) => sum + view.device.lives.size[i], 0)",
    )
    assert held == recorded.allocated[moment]


def test_the_slider_moves_the_segment_map(opened):
    before = opened.text("#segments-summary")
    change(opened, "#moment-slider", "0", "input")
    assert opened.text("#segments-summary") != before
    assert opened.text("#segments-summary").startswith("before the first event")


def test_tables_sort_and_highlight(opened):
    opened.run("document.querySelector('#owners thead th:nth-child(2) button').click()")
    opened.settle()
    names = opened.run(
        "const cells = document.querySelectorAll('#owners tbody td:nth-child(2)');"
        "return [...cells].map((cell) => cell.textContent)"
    )
    assert names == sorted(names, key=str.lower)
    opened.run("document.querySelector('#owners tbody tr:nth-child(2)').click()")
    opened.settle()
    assert view(opened, "view.device.head.owners[view.owner].name") == names[1]


def test_the_time_axis_keeps_the_stretch(opened):
    do(opened, "view.show(200, 400)")
    change(opened, "#axis", "time")
    assert view(opened, "[view.momentAt(view.from), view.momentAt(view.to)]") == pytest.approx(
        [200, 400], abs=2
    )
    assert opened.log() == []


def test_refused_requests_and_findings_are_listed(opened, training):
    findings = opened.text("#findings")
    assert "Refused requests" in findings
    assert f"event {training.json['devices'][0]['oom'][0]['event']:,}" in findings
    assert "8.00 GiB" in findings


def test_hostile_names_stay_text(browser, tmp_path):
    attack = (
        "</script><img src=x onerror=\"window.hit = 1\"><svg onload='window.hit = 2'>"
        "{{script}}\u202e"
    )
    made = recording.Recording()
    made.start()
    stack = recording.frames("a.py:1 f")
    stack += [{"filename": f"/{attack}.py", "line": 7, "name": attack}]
    held = made.alloc(3 << 20, stack)
    made.release(held)
    made.alloc(5 << 20, stack)
    annotations = [{"stage": "START", "name": attack, "device": 0, "time_us": made.time_us}]
    path = tmp_path / "<img src=x onerror=window.hit=3>.pickle"
    report = Report(recording.write(path, made, annotations=annotations), made)
    browser.log()
    browser.open(report.page)
    browser.run("document.querySelector('#owners tbody tr').click()")
    browser.settle()
    assert attack in browser.text("#pinned-body")
    assert browser.run("return window.hit ?? null") is None
    assert browser.run("return document.querySelectorAll('img, svg, iframe').length") == 0
    assert browser.log() == []


def test_empty_and_tiny_traces_open(browser, tmp_path):
    nothing = recording.Recording()
    nothing.start()
    one = recording.Recording()
    one.start()
    one.alloc(700, recording.frames("a.py:1 f"))
    before = recording.Recording(is_recording=False)
    before.alloc(30 << 20, recording.frames("a.py:1 f"))
    before.start()
    browser.log()
    for name, made in (("one", one), ("before", before)):
        report = Report(recording.write(tmp_path / f"{name}.pickle", made), made)
        browser.open(report.page)
        assert view(browser, "view.device.head.peak.allocated_bytes") == max(made.allocated)
    assert browser.log() == []


def test_devices_can_be_chosen(browser, tmp_path):
    low, high = recording.training(steps=1, layers=4), recording.training(steps=1, layers=8)
    report = Report(recording.write(tmp_path / "two.pickle", low, high), low, high)
    browser.open(report.page)
    assert view(browser, "view.device.head.peak.allocated_bytes") == max(high.allocated)
    change(browser, "#device", "0")
    deadline = time.monotonic() + 5
    while view(browser, "view.device.head.index") != 0 and time.monotonic() < deadline:
        browser.settle()
    assert view(browser, "view.device.head.peak.allocated_bytes") == max(low.allocated)


def test_long_traces_open_fast_and_stay_small(browser, long):
    assert long.page.stat().st_size < MOST_BYTES
    start = time.monotonic()
    browser.open(long.page)
    assert time.monotonic() - start < 4
    # A frame of all plots while zooming.
    milliseconds = browser.run(
        "const view = window.memfit.view; const start = performance.now();"
        "view.show(1000, view.length / 2); for (const draw of view.listeners) draw(view);"
        "return performance.now() - start"
    )
    assert milliseconds < 500


def test_without_decompression_the_text_is_shown(browser, training):
    gone = {"source": "delete window.DecompressionStream"}
    script = browser.protocol("Page.addScriptToEvaluateOnNewDocument", **gone)
    try:
        browser.run("location.href = arguments[0]", training.page.as_uri())
        deadline = time.monotonic() + 5
        while (
            "DecompressionStream" not in browser.text("#fallback") and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert "DecompressionStream" in browser.text("#fallback")
        shown = browser.run(
            "const shown = (one) => one.offsetParent && one.textContent.length > 100;"
            "return [...document.querySelectorAll('pre')].some(shown)"
        )
        assert shown
    finally:
        browser.protocol(
            "Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"]
        )
        browser.log()


def test_narrow_dark_and_printed_pages_draw_without_overflow(opened):
    for width in (1280, 420):
        opened.resize(width, 900)
        for scheme in ("dark", "light"):
            opened.emulate(prefers_color_scheme=scheme)
            wide = opened.run("return document.documentElement.scrollWidth")
            assert wide <= width
            # Something is drawn in the plot: not all pixels are alike.
            shades = opened.run(
                "const c = document.querySelector('#plot');"
                "const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
                "const seen = new Set();"
                "for (let i = 0; i < p.length; i += 400) seen.add(p.slice(i, i + 3).join());"
                "return seen.size"
            )
            assert shades > 8
    opened.resize(1280, 1000)
    # Chromium's advice about reading pixels back is about this test.
    assert [line for line in opened.log() if "willReadFrequently" not in line] == []


def test_marks_differ_without_colour(opened):
    """Two owners' marks differ in grey as well: by pattern, lightness or letter."""
    greys = opened.run(
        """
        return [...document.querySelectorAll("#owners .swatch")].slice(0, 12).map((canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, 9, 18);
          const grey = [];
          for (let i = 0; i < data.length; i += 4) {
            grey.push(Math.round(0.299 * data[i] + 0.587 * data[i + 1] + 0.114 * data[i + 2]));
          }
          return grey;
        })
        """
    )
    for number, one in enumerate(greys):
        for other in greys[:number]:
            difference = sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
            assert difference > 8


def test_the_program_refuses_a_page_it_cannot_write(training, tmp_path: Path):
    page = tmp_path / "absent" / "report.html"
    snapshot = training.page.with_suffix(".pickle")
    done = subprocess.run(
        [PROGRAM, "explain", snapshot, "--html", page], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"cannot write `{page}`" in done.stderr


FIXTURES = Path(__file__).parents[2] / "crates" / "memfit-engine" / "tests" / "data" / "snapshots"


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.pickle")))
def test_snapshots_of_the_real_allocator_add_up(name, browser, tmp_path):
    """Expandable segments, streams, private pools and refusals, as PyTorch itself recorded them."""
    snapshot = tmp_path / f"{name}.pickle"
    snapshot.write_bytes((FIXTURES / snapshot.name).read_bytes())
    report = Report(snapshot)
    browser.log()
    browser.open(report.page)
    (device,) = report.json["devices"]
    chosen = view(browser, "view.device.head.chosen")
    assert max(one["allocated_bytes"] for one in chosen) == device["peak"]["allocated_bytes"]
    assert view(browser, "view.device.highest") == device["peak"]["reserved_bytes"]
    # Every block lies in a segment, and blocks do not overlap: they add up to what is active.
    sums = browser.run(
        "const { view, segmentsAt } = window.memfit;"
        "const sum = (rows, name) => rows.reduce((sum, row) => sum + row[name], 0);"
        "return arguments[0].map((moment) => {"
        "  const { rows, outside } = segmentsAt(view.device, moment);"
        "  return [sum(rows, 'size'), sum(rows, 'used'), outside];"
        "})",
        [one["moment"] for one in chosen],
    )
    assert sums == [[one["reserved_bytes"], one["active_bytes"], 0] for one in chosen]
    last = chosen[-1]
    # The project's own file.
    segments = pickle.loads(snapshot.read_bytes())["segments"]  # noqa: S301
    assert last["reserved_bytes"] == sum(segment["total_size"] for segment in segments)
    assert browser.log() == []
