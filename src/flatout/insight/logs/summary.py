"""Reads figures that stand outside a training loop: summaries, tables, before and after, and printed settings.

Of two figures, before and after a change, the earlier one describes the run; the later one is a claim to be checked.
A range counts by its middle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from flatout.insight.logs.names import reader_of

# Summaries and settings are printed at the beginning or the end; what lies between is the loop.
_LONGEST_PART = 1 << 18
_LONGEST_LINE = 400
_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FIGURE = re.compile(
    r"(?:(?i:only|about|around|approximately)\s)?[~≈]?\s?(?P<low>\d[\d,]*(?:\.\d+)?)\s?(?P<many>[kKM]?)(?:\s?(?P<unit_low>%|[GM]i?B))?"
    r"(?:\s?(?:-|\u2013|to)\s?(?P<high>\d[\d,]*(?:\.\d+)?)\s?(?P<many_high>[kKM]?))?\+?\s?"
    r"(?P<unit>%|tok(?:en)?s?/s(?:ec(?:ond)?)?\b|it/s|s/it|[GM]i?B|ms|min(?:ute)?s?\b|h(?:ours?)?\b|days?\b|s(?:ec(?:ond)?s?)?\b)?"
    r"(?:\s?/\s?(?P<total>\d[\d,.]*)\s?(?:[GM]i?B))?"
)
_SWITCH = re.compile(r"(?i)(?P<off>not (?:enabled|used|configured|set)|disabled|off|false|no|none)|enabled|on|true|yes")
_BEFORE = re.compile(r"(?i)^(?:before|original|baseline|current|old)\b")
_AFTER = re.compile(r"(?i)^(?:after|optimi[sz]ed|improved|new|expected|target|with)\b")
_AFTER_HEADING = re.compile(r"(?i)^(?:after|optimi[sz]ed|expected)\b")
_DECORATION = re.compile(r"^[^\w(|/~]+(?:\d+[.)]\s+)?|^\d+[.)]\s+|[*`]+")
_PAIR = re.compile(r"""^(?P<key>[A-Za-z_'"+][^:=|]{0,60}?)['"]?\s*[:=]\s*(?P<value>\S.*)$""")
_ARROW = re.compile(r"\s*(?:→|->|=>)\s*")
_IDLE = re.compile(r"(\d+(?:\.\d+)?)\s?% (?:GPU )?utili[sz]ation")
_TIMES_OF = re.compile(r"(\d[\d,]*)\s*[x×*]\s*(\d+(?:\.\d+)?)\s?(ms|s)\b")
# A progress bar of something other than training: how long it takes in all.
_BAR = re.compile(r"\d/\d+ \[([\d:]{4,9})<([\d:]{4,9})")
_ELAPSED = re.compile(r"^(real|user|sys)\s+(?:(\d+)m)?(\d+(?:[.,]\d+)?)s?$")

# The names of settings, by the last part of a dotted name.
_SETTINGS = {
    "micro_batch": (
        *("micro_batch_size", "micro_batch", "per_device_train_batch_size", "ppo_micro_batch_size_per_gpu"),
        *("train_micro_batch_size_per_gpu", "micro_batch_size_per_gpu", "device_batch_size"),
    ),
    "batch_rows": ("batch_size", "train_batch_size", "global_batch_size", "effective_batch_size"),
    "length": ("sequence_length", "seq_len", "max_seq_length", "max_length", "block_size", "context_length"),
    "prompt_length": ("max_prompt_length",),
    "response_length": ("max_response_length", "max_completion_length"),
    "workers": ("num_workers", "dataloader_num_workers", "dataloader_workers", "loader_workers"),
    "checkpointing": ("gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing"),
    "mixed": ("mixed_precision", "use_mixed_precision", "use_amp", "amp", "fp16", "bf16"),
    "bits": ("precision", "dtype", "torch_dtype"),
}
_SETTING_OF = {name: canon for canon, names in _SETTINGS.items() for name in names}


@dataclass(kw_only=True)
class Summary:
    """Figures of the run, figures claimed for after a change, and settings that were printed."""

    figures: dict[str, float] = field(default_factory=dict)
    claimed: dict[str, float] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)


def summary_of(text: str) -> Summary:
    parts = [text] if len(text) <= 2 * _LONGEST_PART else [text[:_LONGEST_PART], text[-_LONGEST_PART:]]
    reader = _Reader()
    for part in parts:
        for line in part.splitlines():
            if len(line) <= _LONGEST_LINE:
                reader.read(line)
    found = reader.found
    if not found.figures:  # all that there is describes the run
        return Summary(figures=found.claimed, settings=found.settings)
    return found


class _Reader:
    def __init__(self) -> None:
        self.found = Summary()
        self._heading = ""
        self._after = False  # below a heading such as "After optimization"
        self._columns: list[str] = []  # of the table that is being read

    def read(self, line: str) -> None:
        cells = _cells(line)
        if cells is not None:
            if cells:
                self._row(cells)
            return
        if line.strip():
            self._columns = []
        plain = _DECORATION.sub("", line.strip()).strip()
        for share in _IDLE.finditer(plain):
            self._put("gpu_util", float(share[1]) / 100, claimed="gpu_util" in self.found.figures)
        if cost := _TIMES_OF.search(plain):
            self._cost(cost)
        elif elapsed := _ELAPSED.match(plain):
            if elapsed[1] == "real":
                self._put("wall_s", 60 * float(elapsed[2] or 0) + float(elapsed[3].replace(",", ".")), claimed=False)
        elif bar := _BAR.search(plain):
            self._put("wall_s", sum(map(_clock, bar.groups())), claimed=False)
        elif pair := _PAIR.match(plain.rstrip(", \\")):
            self._pair(pair["key"], pair["value"])
        elif 0 < len(plain) <= 60:
            self._begin(plain)

    def _begin(self, heading: str) -> None:
        self._heading = re.sub(r"^\d+[.)]\s*", "", heading).rstrip(":")
        self._after = _AFTER_HEADING.match(self._heading) is not None

    def _pair(self, key: str, value: str) -> None:
        """`key: value`; below a heading `Before: value`; or `key: value -> value`."""
        key = key.strip().strip("'\"+").lstrip("-")
        after = self._after
        if _BEFORE.match(key) and len(key.split()) == 1:
            key, after = self._heading, False
        elif _AFTER.match(key) and len(key.split()) == 1:
            key, after = self._heading, True
        elif (first := re.match(r"(?i)(current|expected)\s+(?=\w)", key)) is not None:
            key, after = key[first.end() :], first[1].lower() == "expected"
        now, *later = _ARROW.split(value, maxsplit=1)
        self._figure(key, now, claimed=after)
        if later:
            self._figure(key, later[0], claimed=True)

    def _row(self, cells: list[str]) -> None:
        if not self._columns:
            self._columns = cells
            if len(cells) == 2 and not any(_BEFORE.match(cell) for cell in cells):
                self._figure(cells[0], cells[1], claimed=False)
            return
        for name, cell in zip(self._columns[1:], cells[1:], strict=False):
            if _BEFORE.match(name) or len(self._columns) == 2:
                self._figure(cells[0], cell, claimed=False)
            elif _AFTER.match(name):
                self._figure(cells[0], cell, claimed=True)

    def _figure(self, key: str, value: str, *, claimed: bool) -> None:
        for name, number in _named(key, value):
            if name.startswith("setting:"):
                if not claimed:
                    self._set(name.removeprefix("setting:"), number)
            else:
                self._put(name, number, claimed=claimed)

    def _cost(self, found: re.Match[str]) -> None:
        """`900 x 50ms`, of what the lines before name."""
        if "cache" in self._heading.lower() or "cache" in found.string.lower():
            seconds = float(found[1].replace(",", "")) * float(found[2]) * (1e-3 if found[3] == "ms" else 1.0)
            self._put("empty_cache_s", seconds, claimed="empty_cache_s" in self.found.figures)

    def _set(self, name: str, number: float) -> None:
        kept = self.found.settings.setdefault(name, number)
        if name == "mixed":  # fp16=False beside bf16=True
            self.found.settings[name] = max(kept, number)

    def _put(self, name: str, number: float, *, claimed: bool) -> None:
        (self.found.claimed if claimed else self.found.figures).setdefault(name, number)


def _cells(line: str) -> list[str] | None:
    """The cells of a row of a table, in Markdown or drawn with characters; none for a rule, None for other lines."""
    stripped = line.strip().replace("│", "|").replace("┃", "|")
    if re.fullmatch(r"[+├┼┤┌┬┐└┴┘╞═─━-]{8,}", stripped):
        return []
    if not (stripped.startswith("|") and stripped.endswith("|") and stripped.count("|") >= 3):
        return None
    cells = [re.sub(r"[*`]", "", cell).strip() for cell in stripped.strip("|").split("|")]
    return [] if all(re.fullmatch(r"[-:=+─━ ]*", cell) for cell in cells) else cells


def _named(key: str, value: str) -> Iterator[tuple[str, float]]:
    """The names and numbers of a figure or a setting; a name that begins with `setting:` is of a setting."""
    words = re.sub(r"\s*\([^)]*\)", "", key).strip().lower()
    last = re.sub(r"[\s-]+", "_", re.split(r"[./]", words)[-1])
    if (setting := _SETTING_OF.get(last)) is not None:
        if (number := _setting(setting, value)) is not None:
            yield f"setting:{setting}", number
        return
    value = value.strip("'\" ")
    found = _FIGURE.match(value)
    if found is None:
        return
    number = _middle(found)
    unit = found["unit"] or found["unit_low"] or ""
    if "mem" in words and "system" not in words and "cpu" not in words:
        yield from _memory(found, number, unit)
    elif unit == "%":
        name = _share_of(words)
        if name is not None:
            yield name, number / 100
    elif unit.startswith("tok"):
        yield ("tokens_per_s" if not unit.endswith("/gpu") else "gpu_tokens_per_s"), number
    elif unit in ("it/s", "s/it"):
        yield "seconds", number if unit == "s/it" else 1 / number if number else 0.0
    elif (seconds := _TIMES.get(unit[:1])) is not None and unit not in ("ms",):
        name = _time_of(words + value[found.end() :].lower())
        if name is not None:
            yield name, number * seconds
    elif not unit and (reader := reader_of(words, "")) is not None and reader[0] in _PLAIN:
        yield reader[0], number


# Figures that a summary gives without a unit.
_PLAIN = ("loss", "val_loss", "tokens_per_s", "gpu_tokens_per_s")


def _middle(found: re.Match[str]) -> float:
    low = float(found["low"].replace(",", ""))
    high = float(found["high"].replace(",", "")) if found["high"] else low
    many = {"k": 1e3, "m": 1e6}
    scale_high = many.get((found["many_high"] or found["many"]).lower(), 1.0)
    scale_low = many.get(found["many"].lower(), scale_high if found["high"] else 1.0)
    return (low * scale_low + high * scale_high) / 2


def _memory(found: re.Match[str], number: float, unit: str) -> Iterator[tuple[str, float]]:
    if unit == "%":
        yield "memory_share", number / 100
    elif unit:
        yield "memory_gib", number / (1024 if unit.startswith("M") else 1)
        if found["total"]:
            yield "memory_share", number / float(found["total"].replace(",", "").rstrip("."))


def _clock(text: str) -> float:
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part or 0)
    return seconds


def _share_of(words: str) -> str | None:
    if "mfu" in words or "flop" in words:
        return "mfu"
    if "cpu" in words:
        return "cpu_util"
    return "gpu_util" if re.search(r"\bgpu\b.*\b(?:util|usage|load)|^util", words) else None


def _time_of(words: str) -> str | None:
    if "epoch" in words:
        return "epoch_s"
    if "generat" in words or "rollout" in words:
        return "generation_s"
    return "training_s" if re.search(r"\btrain(?:ing)?\b", words) and "speed" not in words else None


def _setting(name: str, value: str) -> float | None:
    value = value.strip("'\" ,")
    if name == "bits":
        found = re.search(r"(?:fp|float|bf)(\d+)", value.lower())
        return float(found[1]) if found and len(found[1]) < 4 else None
    if switch := _SWITCH.match(value):
        return 0.0 if switch["off"] else 1.0
    number = re.match(r"(\d{1,9})(?![\d.]*[\w%])", value)
    return float(number[1]) if number else 1.0 if name == "mixed" and re.match(r"(?i)fp16|bf16", value) else None
