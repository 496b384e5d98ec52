"""Draws the newest call of a results file as horizontal bars, in plain SVG that is readable in light and dark mode.

Where calls are named, it draws the newest figure of each variant in them.

python -m benchmarks.plot pretrain-124m tokens_per_s docs/pretrain-124m.svg
python -m benchmarks.plot ablations times_as_fast docs/ablation-lora.svg lora
python -m benchmarks.plot ablations times_as_fast docs/ablation-rl.svg rl CALL CALL
"""

from __future__ import annotations

import sys
from dataclasses import replace
from html import escape
from pathlib import Path

from benchmarks.results import FOLDER, Result, read

ROW, LEFT, BAR, RIGHT = 34, 270, 420, 90


def svg(results: list[Result], *, title: str) -> str:
    top = max(r.high for r in results)
    rows = []
    for i, r in enumerate(results):
        y = 46 + i * ROW
        width = BAR * r.value / top
        low, high = LEFT + BAR * r.low / top, LEFT + BAR * r.high / top
        colour = "#2563eb" if r.unit == "ratio" or r.variant.startswith("flatout") else "#94a3b8"
        seen = f"{r.value:.2f} x" if r.unit == "ratio" else f"{r.value:,.0f}"
        rows += [
            f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(r.variant)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="22" rx="3" fill="{colour}"/>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 11}" y2="{y + 11}" stroke="#0f172a" stroke-width="2"/>',
            f'<text x="{max(LEFT + width, high) + 8:.1f}" y="{y + 16}">{seen}</text>',
        ]
    height = 60 + len(results) * ROW
    width = LEFT + BAR + RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'font-size="14" fill="#64748b" role="img"><title>{escape(title)}</title>'
        f'<text x="10" y="24" font-weight="600">{escape(title)}</text>' + "".join(rows) + "</svg>\n"
    )


def main() -> None:
    benchmark, metric, target, *more = sys.argv[1:]
    rows = [r for r in read(FOLDER / f"{benchmark}.jsonl") if r.metric == metric]
    jobs, calls = more[:1], more[1:]
    if jobs:
        without = f"{jobs[0]}: - "
        rows = [replace(r, variant=r.variant.removeprefix(without)) for r in rows if r.variant.startswith(without)]
    newest = list({r.variant: r for r in rows if r.call in (calls or [rows[-1].call])}.values())
    newest.sort(key=lambda r: r.value if jobs else -r.value)
    one = newest[0]
    least, most = (f({r.repeats for r in newest}) for f in (min, max))
    if jobs:
        blocks = f"{least} blocks" if least == most else f"{least} to {most} blocks"
        title = f"{jobs[0]}: speed of the full plan without each switch, {one.hardware}, {blocks}"
    else:
        runs = f"median of {most}" if least == most else f"{least} to {most} runs each"
        title = f"{benchmark}: {one.unit} on one {one.hardware}, torch {one.versions['torch']}, {runs}"
    Path(target).write_text(svg(newest, title=title))


if __name__ == "__main__":
    main()
