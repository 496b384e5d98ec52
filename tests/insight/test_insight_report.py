"""The report as a file: whole, quiet, accessible, and deaf to what strangers write into it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from tests.insight import hostile, made

from flatout.hardware import named
from flatout.insight import numbers
from flatout.insight.diagnose.runs import diagnose
from flatout.insight.report import page, render
from flatout.insight.report.charts import Chart
from flatout.insight.report.figures import charts
from flatout.insight.report.html import Html, join, tag
from flatout.insight.story import tell
from flatout.record import Diagnosis, Finding, Run, Span, StepExtra, StepRecord
from flatout.record.events import Compiled, HardwareFound, PathsRan, Planned

ALLOWED = """
html head meta title style body a header main footer p nav ul li section div h1 h2 h3 h4 h5 dl dt dd article figure
figcaption svg desc line text tspan polyline polygon circle path rect details summary table caption thead tbody tr th td
strong span code pre
"""
VOID = {"meta", "br", "hr", "link", "img", "input"}


class Page(HTMLParser):
    """A page as a list of (tag, attributes) and the text in it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, name: str) -> Iterator[dict[str, str | None]]:
        return (attributes for tag, attributes in self.tags if tag == name)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def harmless(found: Page) -> None:
    """No tag that runs or fetches, no handler, no style, no link that leaves the page."""
    allowed = set(ALLOWED.split())
    for name, attributes in found.tags:
        assert name in allowed, name
        for key, value in attributes.items():
            assert not key.startswith("on"), key
            assert key not in ("style", "src", "srcdoc", "action", "formaction", "xlink:href"), key
            assert key != "href" or (value or "").startswith("#")
    assert found.open == []


def test_the_page_is_whole_and_fetches_nothing(h200: Run):
    text = render([h200])
    found = Page(text)
    harmless(found)
    assert text.startswith("<!doctype html>")
    assert not re.search(r"https?://", text)
    assert "url(" not in text
    assert "@import" not in text
    assert len(text) < 500_000


def test_the_policy_allows_only_the_style_sheet_that_is_there(h200: Run):
    text = render([h200])
    (policy,) = [meta["content"] for meta in Page(text).named("meta") if meta.get("http-equiv")]
    sheet = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "style-src": f"'sha256-{digest}'",
    }


def test_the_verdict_comes_first_and_all_sections_follow(h200: Run):
    found = Page(render([h200]))
    ids = [section["id"] for section in found.named("section")]
    assert ids == [
        "verdict",
        "findings",
        "charts",
        "time",
        "plan",
        "criteria",
        "machine",
        "events",
        "environment",
        "provenance",
    ]
    titles = [figure["id"] for figure in found.named("figure")]
    assert titles == ["loss", "lr", "grad_norm", "speed", "mfu", "memory", "phases", "utilisation", "roofline"]


def test_links_lead_somewhere_and_names_are_unique(h200: Run, long_run: Run):
    for runs in ([h200], [h200, long_run]):
        found = Page(render(runs))
        ids = Counter(attributes["id"] for _, attributes in found.tags if "id" in attributes)
        assert [name for name, count in ids.items() if count > 1] == []
        for link in found.named("a"):
            assert link["href"][1:] in ids
        for _, attributes in found.tags:
            for name in (attributes.get("aria-labelledby") or "").split():
                assert name in ids


def test_it_can_be_read_without_seeing_it(h200: Run):
    found = Page(render([h200]))
    assert next(found.named("html"))["lang"] == "en"
    for landmark in ("header", "main", "nav", "footer"):
        assert len(list(found.named(landmark))) == 1, landmark
    levels = [int(name[1]) for name, _ in found.tags if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    tables = list(found.named("table"))
    assert len(list(found.named("caption"))) == len(tables) > 8
    assert all(head.get("scope") in ("col", "row") for head in found.named("th"))
    for chart in found.named("svg"):
        assert chart.get("role") == "img" or chart.get("aria-hidden") == "true"
    for region in found.named("div"):
        if "scroll" in (region.get("class") or ""):
            assert (region["tabindex"], region["role"]) == ("0", "region")
            assert region["aria-label"]


def test_the_numbers_of_the_first_section_are_named_with_their_sources(h200: Run):
    text = render([h200])
    provenance = text[text.index('id="provenance"') :]
    for figure in numbers.figures(tell(h200)):
        assert join(figure.text) in provenance
        assert join(figure.source) in provenance


def test_utilisation_is_drawn_at_the_step_that_was_under_way(h200: Run):
    (chart,) = [chart for chart in charts(tell(h200), id="") if chart.id == "utilisation"]
    lines = {line.name: line.points for line in chart.lines}
    assert set(lines) == {"GPU busy", "SM", "tensor", "DRAM", "CPU"}
    steps = [record.time for record in h200.latest_steps()]
    for point, sample in zip(lines["tensor"], h200.samples(), strict=True):
        under_way = sum(done <= sample["time"] for done in steps)
        assert point.x == pytest.approx(under_way, abs=4)
        assert point.y == sample["gpus"][0]["tensor_active"]


def roof_of(run: Run) -> Chart | None:
    return next((chart for chart in charts(tell(run), id="") if chart.id == "roofline"), None)


def test_each_phase_lies_below_the_roof(h200: Run):
    chart = roof_of(h200)
    limit, *phases = chart.lines
    assert [line.name for line in phases] == ["forward", "backward", "optimize"]
    card = named("H200")
    assert limit.points[-1].y == card.peak_flops["fp8"], "the plan has 8-bit matmuls"
    assert limit.points[0].y / limit.points[0].x == pytest.approx(card.bandwidth)
    limits = {point.x: point.y for point in limit.points}
    for line in phases:
        (point,) = line.points
        assert point.y < limits[point.x] == min(card.peak_flops["fp8"], point.x * card.bandwidth)
    done = tell(h200).rates.flops.executed * 65536
    spent = {line.name: line.points[0].y for line in phases}
    # The median step of the made run takes 1 % longer than its spans say.
    assert 0.036 * spent["forward"] + 0.071 * spent["backward"] == pytest.approx(done, rel=0.02)


def test_the_roofline_is_that_of_the_last_attempt(tmp_path: Path):
    """Resumed on a machine with half the bandwidth, where every phase takes ten times as long."""
    run = made.make(tmp_path / "run", steps=40, ended=False)
    before = roof_of(run)
    slow = named("H200").to_json() | {"bandwidth": 2.4e12}
    with run.recorder() as recorder:
        recorder.event(HardwareFound(facts=slow))
        for step in range(40, 60):
            record = made.h200_step(step, attempt=recorder.attempt, clock=made.BEGAN + step, steps=60, spike_at=None)
            spans = tuple(replace(span, seconds=10 * span.seconds) for span in record.spans)
            recorder.step(replace(record, seconds=10 * record.seconds, spans=spans))
    after = roof_of(run)
    assert after.lines[0].points[0].y / after.lines[0].points[0].x == pytest.approx(2.4e12)
    for old, new in zip(before.lines[1:], after.lines[1:], strict=True):
        assert new.points[0].y == pytest.approx(old.points[0].y / 10, rel=0.05)


def test_the_loss_of_a_few_targets_is_less_work(tmp_path: Path):
    every, few = (made.make(tmp_path / name, steps=20, ended=False) for name in ("every", "few"))
    for run, share in ((every, 1.0), (few, 0.25)):
        with run.recorder() as recorder:
            for step in range(20, 40):
                record = made.h200_step(
                    step, attempt=recorder.attempt, clock=made.BEGAN + step, steps=40, spike_at=None
                )
                recorder.step(replace(record, extra=StepExtra(targets=int(share * record.tokens))))
    forward = [roof_of(run).lines[1].points[0] for run in (every, few)]
    assert forward[1].y < 0.8 * forward[0].y


@pytest.mark.parametrize("changes", [{"recipe": "rl"}, {"train": {"objective": "mine:loss"}}])
def test_phases_whose_work_is_unknown_have_no_roofline(tmp_path: Path, changes: dict[str, object]):
    run = made.make(tmp_path / "run", steps=12, config={"recipe": "pretrain"} | changes)
    assert roof_of(run) is None


@pytest.mark.parametrize("steps", [2, 12])
def test_a_few_steps_have_no_roofline_yet(tmp_path: Path, steps: int):
    run = made.make(tmp_path / "run", steps=steps, config={"recipe": "pretrain", "train": None})
    assert (roof_of(run) is None) == (steps == 2)


@pytest.mark.parametrize("lacks", [{"bandwidth": None}, {"peak_flops": {}}])
def test_a_device_whose_limits_are_unknown_has_no_roofline(tmp_path: Path, lacks: dict[str, object]):
    run = made.make(tmp_path / "run", steps=12, ended=False)
    with run.recorder() as recorder:
        recorder.event(HardwareFound(facts=named("H200").to_json() | lacks))
    assert roof_of(run) is None
    harmless(Page(render([run])))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("decisions", "precision"), "fp4"),
        (("decisions", "accumulation"), None),
        (("decisions", "sharding"), ...),
        (("job", "shape", "hidden"), "wide"),
        (("job", "shape"), ...),
        (("rates", "flops", "backward"), 0.0),
    ],
    ids=str,
)
def test_a_plan_of_another_version_is_drawn_as_far_as_it_is_known(tmp_path: Path, keys: tuple[str, ...], value: object):
    plan = made.h200_plan(12).to_json()
    part = plan
    for key in keys[:-1]:
        part = part[key]
    if value is ...:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    run = made.make(tmp_path / "run", steps=12, ended=False)
    with run.recorder() as recorder:
        recorder.event(Planned(facts=plan))
    chart = roof_of(run)
    assert ([line.name for line in chart.lines] if chart else []) == (
        ["limit", "forward", "optimize"] if keys[-1] == "backward" else []
    )


def test_compiling_has_paid_off_where_the_lines_cross(tmp_path: Path):
    run = made.make(tmp_path / "run", steps=200, ended=False)
    with run.recorder() as recorder:
        recorder.event(Compiled(step=3, seconds=40.0, break_even=5_000))
    (chart,) = [chart for chart in charts(tell(run), id="") if chart.id == "payback"]
    compiled, plain = (line.points for line in chart.lines)
    assert (compiled[0].y, plain[0].y) == (40.0, 0.0)
    assert compiled[1].x == 5_000
    assert compiled[1].y == pytest.approx(plain[1].y)
    assert compiled[2].y < plain[2].y
    assert compiled[2].x == 10_000, "the crossing is in the middle"
    assert "pays off at step 5,000" in render([run])


def test_a_gain_that_is_unknown_has_no_payback(tmp_path: Path):
    run = made.make(tmp_path / "run", steps=8, ended=False)
    with run.recorder() as recorder:
        recorder.event(Compiled(step=3, seconds=40.0, break_even=None))
    assert "payback" not in [chart.id for chart in charts(tell(run), id="")]


def test_unknown_is_said_as_such(bare: Run):
    found = Page(render([bare]))
    harmless(found)
    assert "the peak of this device or the FLOPs of this model are unknown" in found.text
    tiles = re.findall(r'<div class="tile"><dt>(.*?)</dt><dd>(.*?)</dd></div>', render([bare]))
    assert dict(tiles)["tokens/s"] == dict(tiles)["MFU, as done"] == "n/a"


def test_several_runs_stand_side_by_side(h200: Run, long_run: Run):
    text = render([h200, long_run])
    found = Page(text)
    harmless(found)
    assert "2 runs side by side" in found.text
    assert {"runs", "same-axes", "differences", "r1-verdict", "r2-verdict"} <= {
        section.get("id") for section in found.named("section")
    }
    assert "<code>train.steps</code></th><td>600</td><td>20000</td>" in text
    levels = [int(name[1]) for name, _ in found.tags if re.fullmatch(r"h[1-6]", name)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_a_long_run_is_read_by_its_roll_ups_and_its_spike_is_seen(long_run: Run):
    def bytes_read() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    before = bytes_read()
    text = render([long_run])
    assert bytes_read() - before < (long_run.path / "steps.jsonl").stat().st_size / 5
    assert re.search(r"43\.\d at 12\.5k", text)  # the mean of its 256 steps would hide it
    assert len(text) < 500_000


# Strangers' words


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every payload everywhere a stranger can write: names, settings, events, phases, findings, the environment."""
    name = "run<img src=x onerror=alert(1)>\"'&"
    payloads = {payload: payload for payload in hostile.ALL}
    run = Run.create(
        tmp_path_factory.mktemp("hostile") / name,
        config_text="\n".join(hostile.ALL),
        config={"recipe": hostile.ALL[0], **payloads, "criteria": {}},
        plan={
            "decisions": payloads,
            "reasons": payloads,
            "predicted": {"memory_gib": dict.fromkeys(hostile.ALL, 1.0), "tokens_per_s": None},
        },
        hardware={"gpu": hostile.ALL[10], **payloads},
        environment={"packages": payloads, "hostname": hostile.ALL[11]},
    )
    with run.recorder() as recorder:
        recorder.event("active", **{f"path{at}": payload for at, payload in enumerate(hostile.ALL)})
        for at, payload in enumerate(hostile.ALL):
            recorder.event("notice", text=payload)
            recorder.event("save-failed", step=at, error=payload)
            spans = (Span(phase=payload, seconds=0.1), Span(phase="forward", role=payload, seconds=0.1))
            recorder.step(
                StepRecord(
                    attempt=1, step=at, time=1e9 + at, seconds=0.5, tokens=10, padded_tokens=10, loss=2.0, spans=spans
                )
            )
        gpu = {"index": 0, "busy": 1.0, "throttle": list(hostile.ALL)}
        recorder.sample({"time": 1e9, "gpus": [gpu]})
        verdict = {"criterion": hostile.ALL[0], "wanted": hostile.ALL[1], "got": hostile.ALL[2], "met": False}
        recorder.event("end", step=60, outcome={"stopped_by": hostile.ALL[12]}, verdicts=[verdict])
    findings = [
        Finding(cause=it, sentence=it, share=0.1, gain=0.1, status="measured", evidence=(it,), fix=it)
        for it in hostile.ALL
    ]
    run.write_diagnosis(Diagnosis(verdict=hostile.ALL[0], limit={"share": 0.5}, findings=tuple(findings)))
    return run


def test_nothing_of_strangers_becomes_markup(hostile_run: Run):
    for runs in ([hostile_run], [hostile_run, hostile_run]):
        found = Page(render(runs))
        harmless(found)
        # It is there to be read, as text.
        for payload in hostile.SCRIPTS + hostile.HANDLERS + hostile.LINKS:
            assert payload in found.text


def test_nothing_that_moves_a_cursor_or_turns_a_line_is_left(hostile_run: Run):
    for format in ("html", "md"):
        text = render([hostile_run], format=format)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_markdown_has_no_markup_of_strangers(hostile_run: Run):
    text = render([hostile_run], format="md")
    assert not re.search(r"(?<!\\)<", text)
    assert not re.search(r"(?<!\\)!?\[[^\]]*\](?=\()", text)
    rows = [len(re.findall(r"(?<!\\)\|", row)) if row.startswith("|") else 0 for row in text.splitlines()]
    for above, below in pairwise(rows):
        assert not (above and below) or above == below, "a table with rows of different lengths"


@pytest.mark.parametrize("attributes", [{"onclick": "x()"}, {"style": "color: red"}, {"href": "https://example.org"}])
def test_what_could_run_or_fetch_cannot_be_written(attributes: dict[str, str]):
    with pytest.raises(ValueError, match="has no place in a report"):
        tag("a", "x", **attributes)


def test_text_is_escaped_unless_it_was_made_here():
    assert tag("p", "a < b", Html("<br>"), title='"x"') == '<p title="&quot;x&quot;">a &lt; b<br></p>'
    assert tag("p", hidden=True, title=None, lang=False) == "<p hidden></p>"


# Plain forms


def test_json_is_strict_and_has_the_same_numbers(h200: Run, bare: Run):
    with bare.recorder() as recorder:
        record = StepRecord(attempt=1, step=0, time=1.0, seconds=0.5, tokens=1, padded_tokens=1, loss=float("nan"))
        recorder.step(record)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    one, other = json.loads(render([h200, bare], format="json"), parse_constant=refuse)
    story = tell(h200)
    assert one["figures"]["tokens_per_s"]["value"] == story.speed.tokens_per_s
    assert sum(part["num_steps"] for part in one["history"]) == 600
    assert other["history"][0]["loss"] is None
    assert other["figures"]["mfu"]["value"] is None


def test_markdown_has_the_verdict_first_and_the_same_numbers(h200: Run):
    text = render([h200], format="md")
    assert text.startswith("# h200\n\n**Good.** Finished. 4 of 4 criteria met.")
    for figure in numbers.figures(tell(h200)):
        assert figure.text in text


def ended(path: Path, *, stopped_by: str = "end", of_predicted: float = 1.0) -> Run:
    """A run without criteria, at a share of the speed that its plan predicted."""
    run = made.make(path, steps=600, ended=False, config={"recipe": "pretrain"})
    plan = made.h200_plan(600).to_json()
    plan["predicted"]["tokens_per_s"] = (tell(run).speed.tokens_per_s or 0.0) / of_predicted
    with run.recorder() as recorder:
        recorder.event(Planned(facts=plan))
        recorder.event("end", step=600, outcome={"stopped_by": stopped_by}, verdicts=[])
    return run


@pytest.mark.parametrize(
    ("stopped_by", "of_predicted", "begins", "word"),
    [
        ("end", 1.0, "Finished", "Unjudged"),
        ("end", 0.45, "Finished", "Slow"),
        ("SIGTERM", 1.0, "Stopped by SIGTERM", "Unfinished"),
    ],
)
def test_the_verdict_is_one_clear_word(
    tmp_path: Path, stopped_by: str, of_predicted: float, begins: str, word: str
) -> None:
    run = ended(tmp_path / "run", stopped_by=stopped_by, of_predicted=of_predicted)
    assert render([run], format="md").startswith(f"# run\n\n**{word}.** {begins}.")
    assert f">{word}.</strong> {begins}: " in render([run], format="html")


def test_nothing_found_in_a_slow_run_is_not_called_no_problem(tmp_path: Path) -> None:
    slow = render([ended(tmp_path / "slow", of_predicted=0.45)], format="md")
    assert "It reached 45.0 % of the predicted speed." in slow.splitlines()[2]
    assert "No cause was found by these checks." in slow
    assert "No problem was found" not in slow
    assert "No problem was found by these checks." in render([ended(tmp_path / "run")], format="md")
    assert diagnose(Run.open(tmp_path / "slow")).verdict.startswith(
        "no cause found, but only 45% of the predicted speed;"
    )
    assert diagnose(Run.open(tmp_path / "run")).verdict.startswith("no problem found")


# Colours


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_all_text_stands_out_from_the_page_in_light_and_dark():
    light, dark = page.style().split("@media screen and (prefers-color-scheme: dark)")[:2]
    for sheet in (light, dark):
        colours = dict(re.findall(r"--([a-z]+\d?): (#[0-9a-f]{6})", sheet[: sheet.index("}")]))
        for name in ("ink", "soft", "link", "good", "bad", "open", "c1", "c2", "c3", "c4", "c5", "c6"):
            one, other = sorted((luminance(colours[name]), luminance(colours["paper"])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, name


def test_the_learning_rate_and_the_gradient_norm_are_drawn(h200: Run) -> None:
    page = render([h200])
    for title in ("Learning rate", "Gradient norm"):
        assert f">{title}</title>" in page or f">{title}<" in page, title


def test_values_are_shown_under_the_pointer(h200: Run) -> None:
    page = render([h200])
    strips = re.findall(r'<rect[^>]*class="strip"[^>]*><title>([^<]*)</title>', page)
    assert len(strips) > 100
    assert any(re.fullmatch(r"step \S+: training \S+, validation \S+", said) for said in strips)


def test_runs_side_by_side_have_names_and_validation(h200: Run, tmp_path: Path) -> None:
    other = made.make(tmp_path / "second-run", steps=40)
    same = made.make(tmp_path / "again" / "second-run", steps=40)
    page = render([h200, other, same])
    for name in (h200.path.name, "second-run (2)", "second-run (3)"):
        assert f">{name}</th>" in page, name
    assert "Validation loss over" in page
    assert "run 1" not in page


def test_a_watched_script_has_no_settings_that_differ(h200: Run, tmp_path: Path) -> None:
    script = Run.create(
        tmp_path / "script", config_text="", config={"command": "python train.py"}, plan={"foreign": True}, hardware={},
        environment={},
    )  # fmt: skip
    page = render([h200, script])
    assert "a watched script has no settings of flatout to compare" in page
    assert "<code>train.lr</code>" not in page.split("Settings that differ")[-1].split("</section>")[0]


def test_what_ran_stands_beside_the_decision_and_says_where_it_is_another(tmp_path: Path) -> None:
    run = made.make(tmp_path / "run", steps=20)
    path = {"planned": "cudnn", "ran": "math", "seen": "aten::_scaled_dot_product_attention_math called 12 times"}
    with run.recorder() as recorder:
        recorder.event(
            PathsRan(facts={"attention": path, "precision": {"planned": "bf16", "ran": "bf16", "seen": "all"}})
        )
    said = "not as planned: math (aten::_scaled_dot_product_attention_math called 12 times)"
    assert said in render([run], format="html")
    assert said.replace("_", r"\_") in render([run], format="md")
    assert "bf16 (all)" in render([run], format="md")
