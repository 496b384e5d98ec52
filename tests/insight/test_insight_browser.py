"""The pages in a real browser: at desktop and phone width, in light and dark, by mouse, keyboard and printer."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.insight import hostile, made
from tests.insight.browser import Browser

from flatout.insight.machine import sampling_machine
from flatout.insight.report import render
from flatout.insight.web import Server, Site
from flatout.record import Diagnosis, Finding, Run

DESKTOP, PHONE = 1200, 375

# Names of elements whose boxes lie over each other though neither is inside the other; and what sticks out.
OVERLAPS = """
(() => {
  const boxes = (selector) => [...document.querySelectorAll(selector)].filter((it) => it.checkVisibility())
    .map((it) => [it, it.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  const say = (it) => `${it.tagName}.${it.getAttribute("class") || ""} ${(it.textContent || "").slice(0, 30)}`;
  const found = [];
  const apart = (group) => {
    for (const [at, [one, a]] of group.entries()) for (const [other, b] of group.slice(at + 1)) {
      if (one.contains(other) || other.contains(one)) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 1) found.push(`${say(one)} over ${say(other)}`);
    }
  };
  apart(boxes("header, nav, h1, h2, h3, h4, p, .tile, .finding, figure, .scroll, pre, summary, footer"));
  for (const chart of document.querySelectorAll("svg.chart")) {
    const inside = [...chart.querySelectorAll("text")].map((it) => [it, it.getBoundingClientRect()]);
    apart(inside);
    const box = chart.getBoundingClientRect();
    for (const [it, b] of inside) if (b.right > innerWidth + 0.5 || b.left < 0 || b.bottom > box.bottom + 1)
      found.push(`${say(it)} sticks out of ${chart.getAttribute("aria-labelledby")}`);
  }
  for (const [it, box] of boxes("main > *, section > *, figure, .tile *"))
    if (box.right > innerWidth + 0.5 && !it.closest(".scroll")) found.push(`${say(it)} is wider than the page`);
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  return found;
})()
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("svg.chart text")].map((it) => {
  const chart = it.closest("svg");
  return parseFloat(getComputedStyle(it).fontSize) * chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
}))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, h200: Run, long_run: Run) -> dict[str, str]:
    """Reports by name, as addresses."""
    folder = tmp_path_factory.mktemp("pages")
    bad = made.make(folder / "a-run-with-quite-a-long-name-and-no-space-in-it-anywhere-at-all", steps=40, ended=False)
    with bad.recorder() as recorder:
        recorder.event("notice", text="a-path/" * 40)
    finding = Finding(
        cause="data-starvation",
        sentence="The device waits for data in 31 % of the time: " + "a-long-word" * 8,
        share=0.31,
        gain=0.25,
        status="measured",
        evidence=("steps.jsonl, spans: data 31 %", "x" * 200),
        fix="DataLoader(num_workers=8, pin_memory=True)",
    )
    limit = {"share": 0.61, "ceiling_tokens_per_s": 912345.0}
    bad.write_diagnosis(Diagnosis(verdict="Data cannot keep up.", limit=limit, findings=(finding, finding)))
    empty = Run.create(folder / "empty", config_text="", config={}, plan={}, hardware={}, environment={})
    reports = {"one": [h200], "long": [long_run], "bad": [bad], "two": [h200, bad], "empty": [empty]}
    found = {}
    for name, runs in reports.items():
        (folder / f"{name}.html").write_text(render(runs))
        found[name] = f"file://{folder}/{name}.html"
    return found


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(DESKTOP, False, marks=pytest.mark.long),
        pytest.param(768, True, marks=pytest.mark.long),
        (PHONE, False),
    ],
)
@pytest.mark.parametrize("name", ["one", "long", "bad", "two", "empty"])
def test_nothing_lies_over_anything(browser: Browser, pages: dict[str, str], name: str, width: int, dark: bool):
    browser.look(width=width, dark=dark)
    browser.open(pages[name])
    assert browser.run(OVERLAPS) == []
    assert browser.complaints() == []
    assert browser.requests() == [pages[name]]


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_what_charts_say_can_be_read(browser: Browser, pages: dict[str, str], width: int):
    browser.look(width=width)
    browser.open(pages["one"])
    assert browser.run(SMALLEST_TEXT) >= 10
    assert browser.run("document.querySelectorAll('svg.chart').length") == 9


def test_the_user_chooses_light_or_dark(browser: Browser, pages: dict[str, str]):
    seen = []
    for dark in (False, True):
        browser.look(width=DESKTOP, dark=dark)
        browser.open(pages["one"])
        seen.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


def test_the_keyboard_reaches_everything(browser: Browser, pages: dict[str, str]):
    browser.look(width=DESKTOP)
    browser.open(pages["one"])
    wanted = browser.run("document.querySelectorAll('a, summary, .scroll:not(details *)').length")
    reached = []
    for _ in range(wanted + 5):
        browser.press("Tab")
        reached.append(
            browser.run(
                "(() => { const it = document.activeElement; const seen = getComputedStyle(it).outlineStyle !== 'none';"
                " return it === document.body ? null : [it.className || it.textContent, seen]; })()"
            )
        )
    before_wrap = reached[: reached.index(None)] if None in reached else reached[:wanted]
    assert before_wrap[0][0] == "skip"
    assert len(before_wrap) >= wanted
    assert all(seen for _, seen in before_wrap)


def test_a_chart_opens_its_numbers_by_keyboard(browser: Browser, pages: dict[str, str]):
    browser.look(width=PHONE)
    browser.open(pages["one"])
    browser.run("document.querySelector('#loss summary').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('#loss details').open") is True
    assert browser.run("document.querySelectorAll('#loss tbody tr').length") > 5
    assert browser.run(OVERLAPS) == []


def test_it_prints(browser: Browser, pages: dict[str, str]):
    browser.look(width=DESKTOP, dark=True)
    browser.open(pages["one"])
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"  # paper is white
    browser.call("Emulation.setEmulatedMedia", media="")
    printed = base64.b64decode(browser.call("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF-")


def test_strangers_words_do_nothing_in_a_real_browser(browser: Browser, tmp_path: Path):
    run = Run.create(
        tmp_path / "hostile<img src=x onerror=alert(1)>",
        config_text="\n".join(hostile.ALL),
        config={payload: payload for payload in hostile.ALL},
        plan={},
        hardware={},
        environment={payload: payload for payload in hostile.ALL},
    )
    with run.recorder() as recorder:
        for payload in hostile.ALL:
            recorder.event("notice", text=payload)
    (tmp_path / "hostile.html").write_text(render([run]))
    browser.look(width=DESKTOP)
    browser.open(f"file://{tmp_path}/hostile.html")
    assert browser.run("document.querySelectorAll('script, iframe, img, object, embed, form, base').length") == 0
    handlers = (
        "[...document.querySelectorAll('*')].flatMap((it) => it.getAttributeNames().filter((a) => /^on/.test(a)))"
    )
    assert browser.run(handlers) == []
    assert browser.requests() == [f"file://{tmp_path}/hostile.html"]
    assert browser.complaints() == []
    assert not [event for event in browser.events if event.get("method") == "Page.javascriptDialogOpening"]


def test_the_policy_stops_what_would_get_past_the_escaping(browser: Browser, pages: dict[str, str], tmp_path: Path):
    text = Path(pages["one"].removeprefix("file://")).read_text()
    planted = (
        "<script>document.title = 'owned'</script><img src='https://example.org/x.png' onerror='document.title=1'>"
    )
    (tmp_path / "planted.html").write_text(text.replace("<main", planted + "<main", 1))
    browser.open(f"file://{tmp_path}/planted.html")
    assert browser.run("document.title") == "h200: flatout report"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


# Live


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Server, Run]]:
    run = made.make(tmp_path / "live", steps=40, ended=False)
    with sampling_machine(disk=run.path, interval_s=0.25) as sampler:
        server = Server(Site([run], sampler))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, run
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_live_page_follows_the_run_and_keeps_what_was_opened(browser: Browser, live: tuple[Server, Run]):
    server, run = live
    browser.look(width=DESKTOP)
    browser.open(server.url)
    browser.run("document.querySelector('#loss summary').focus()")
    browser.run("document.querySelector('#loss details').open = true")
    browser.run("document.querySelector('#charts').dataset.old = 'yes'")
    with run.recorder() as recorder:
        for step in range(40, 80):
            clock = time.time()
            recorder.step(made.h200_step(step, attempt=2, clock=clock, steps=80, spike_at=None))
        browser.wait_for("document.querySelector('#verdict').textContent.includes('80')")
        browser.wait_for("!document.querySelector('#charts').dataset.old")
    assert browser.run("document.querySelector('#loss details').open") is True
    assert browser.run("document.activeElement.closest('#loss') !== null") is True
    assert browser.run(OVERLAPS) == []
    assert browser.complaints() == []
    assert {url.split("?")[0] for url in browser.requests()} <= {
        f"http://127.0.0.1:{server.port}/",
        f"http://127.0.0.1:{server.port}/content",
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_nothing_lies_over_anything_on_the_live_page(
    browser: Browser, live: tuple[Server, Run], width: int, dark: bool
):
    browser.look(width=width, dark=dark)
    browser.open(live[0].url)
    assert browser.run(OVERLAPS) == []


def test_a_page_whose_watcher_is_gone_says_so(browser: Browser, tmp_path: Path):
    run = made.make(tmp_path / "gone", steps=10, ended=False)
    with sampling_machine(disk=run.path, interval_s=0.25) as sampler:
        server = Server(Site([run], sampler))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        browser.open(server.url)
        server.shutdown()
        server.server_close()
        thread.join()
    browser.wait_for("document.querySelector('#made').textContent.includes('does not answer')")
