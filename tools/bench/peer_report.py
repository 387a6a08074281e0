"""Figures of tools/bench/peers as a table, as JSON and as an SVG picture. Nothing here measures or touches a file."""
import dataclasses
import html
import statistics
from typing import NamedTuple

MEDIA = {"tcp": "Over TCP on loopback", "memory": "Through memory of this host", "gpu": "Into a GPU"}


class Key(NamedTuple):
    """A row of the report. `memory` is the state of the destination: warm, cold, or "" where neither applies."""
    medium: str
    system: str
    memory: str
    digests: bool = False


@dataclasses.dataclass
class Sample:
    seconds: float
    # User and system time of all processes that take part. None: not measured.
    cpu_seconds: float | None = None


@dataclasses.dataclass
class Row:
    key: Key
    size_bytes: int
    # One for each round.
    samples: list[Sample] = dataclasses.field(default_factory=list)
    # Says why there are no figures.
    reason: str = ""
    needs_gpu: bool = False

    def rates(self):
        """Decimal gigabytes per second, one for each round."""
        return [self.size_bytes / sample.seconds / 1e9 for sample in self.samples]

    def cpu_seconds_per_gb(self):
        known = [sample.cpu_seconds for sample in self.samples if sample.cpu_seconds is not None]
        return statistics.median(known) / (self.size_bytes / 1e9) if known else None


def baseline(key):
    """Rekindle's row that a row is compared with: the same medium, the same state of memory, no digests."""
    return Key(key.medium, "Rekindle", key.memory or "cold")


def ratio(row, rows):
    """The median of `row`'s rate over Rekindle's in the same round. None: one of them has no figures."""
    other = next((found for found in rows if found.key == baseline(row.key)), None)
    if other is None or not other.samples or not row.samples:
        return None
    return statistics.median(mine / theirs for mine, theirs in zip(row.rates(), other.rates()))


def ordered(rows):
    """By medium, then warm before cold, then in the order in which they were measured."""
    media = list(MEDIA)
    return sorted(rows, key=lambda row: (media.index(row.key.medium), row.key.memory == "cold"))


def cells(row, rows):
    head = [row.key.system, row.key.memory or "-", "yes" if row.key.digests else "no"]
    if not row.samples:
        return head + [row.reason]
    rates = row.rates()
    cpu, compared = row.cpu_seconds_per_gb(), ratio(row, rows)
    return head + [f"{statistics.median(rates):.2f}", f"{min(rates):.2f}–{max(rates):.2f}",
                   "-" if cpu is None else f"{cpu:.2f}", "-" if compared is None else f"{compared:.2f}"]


TITLES = ["", "memory", "digests", "GB/s", "min–max", "CPU s/GB", "of Rekindle"]


def table(rows, conditions):
    """Plain text. The last column is the row's rate over Rekindle's; `conditions` is a list of (name, value)."""
    rows = ordered(rows)
    lines = {row.key: cells(row, rows) for row in rows}
    full = [line for line in lines.values() if len(line) == len(TITLES)]
    widths = [max(len(line[column]) for line in [*lines.values(), TITLES]) if column < 3 else
              max(len(line[column]) for line in [*full, TITLES]) for column in range(len(TITLES))]
    widths[0] = max(widths[0], *map(len, MEDIA.values()))

    def layout(line):
        parts = [cell.ljust(width) if column < 3 or len(line) < len(TITLES) else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(line, widths))]
        return "  ".join(parts).rstrip()

    text = []
    for medium, title in MEDIA.items():
        group = [row for row in rows if row.key.medium == medium]
        if group:
            text += [layout([title, *TITLES[1:]]), *(layout(lines[row.key]) for row in group), ""]
    text += [f"{name}: {value}" for name, value in conditions]
    return "\n".join(text) + "\n"


def to_json(rows, conditions):
    def item(row):
        rates = row.rates()
        return {**row.key._asdict(), "reason": row.reason or None, "needs_gpu": row.needs_gpu,
                "gb_per_second": statistics.median(rates) if rates else None,
                "lowest": min(rates, default=None), "highest": max(rates, default=None),
                "cpu_seconds_per_gb": row.cpu_seconds_per_gb(), "of_rekindle": ratio(row, rows),
                "rounds": [dataclasses.asdict(sample) for sample in row.samples]}

    return {"bench": "peers", "conditions": dict(conditions), "rows": [item(row) for row in ordered(rows)]}


def from_json(report):
    """Rows and conditions, as table() and svg() take them."""
    rows = []
    for item in report["rows"]:
        key = Key(item["medium"], item["system"], item["memory"], item["digests"])
        # The report has no size, but the slowest round has the lowest rate.
        slowest = max((one["seconds"] for one in item["rounds"]), default=0)
        size = round(item["lowest"] * 1e9 * slowest) if slowest else 0
        rows.append(Row(key, size, [Sample(**one) for one in item["rounds"]], item["reason"] or "", item["needs_gpu"]))
    return rows, list(report["conditions"].items())


STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; }
  .medium { font-weight: 600; }
  .small { font-size: 11px; fill: #59636e; }
  .rekindle { fill: #0969da; }
  .peer { fill: #8c959f; }
  .spread { stroke: #1f2328; stroke-width: 1.5; }
  .axis { stroke: #d1d9e0; }
  .paper { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .small { fill: #9198a1; }
    .rekindle { fill: #4493f8; }
    .peer { fill: #656c76; }
    .spread { stroke: #f0f6fc; }
    .axis { stroke: #3d444d; }
    .paper { fill: #0d1117; }
  }
"""
WIDTH, LABELS, RIGHT, LINE = 960, 300, 130, 22


class Picture:
    """Elements of an SVG, from the top to the bottom."""

    def __init__(self):
        self.parts = []
        self.y = 0

    def text(self, x, content, kind="", anchor="start"):
        self.parts.append(f'<text x="{x}" y="{self.y}" class="{kind}" text-anchor="{anchor}">'
                          f"{html.escape(content)}</text>")

    def line(self, x1, y1, x2, y2, kind):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def bar(self, row, scale):
        rates = row.rates()
        middle, kind = statistics.median(rates), "rekindle" if row.key.system.startswith("Rekindle") else "peer"
        self.parts.append(f'<rect x="{LABELS}" y="{self.y - 12}" width="{middle * scale:.1f}" height="14" '
                          f'class="{kind}"/>')
        low, high = (LABELS + rate * scale for rate in (min(rates), max(rates)))
        self.line(low, self.y - 5, high, self.y - 5, "spread")
        for end in (low, high):
            self.line(end, self.y - 9, end, self.y - 1, "spread")
        self.text(round(max(high, LABELS + middle * scale)) + 8,
                  f"{middle:.2f} ({min(rates):.2f}–{max(rates):.2f})", "small")


def wrapped(words, width=150):
    """Lines of at most about `width` characters, broken between the items of `words`."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += ("; " if lines[-1] else "") + word
    return lines


def svg(rows, conditions):
    """Bars of the medians, with lines from the lowest to the highest round; readable on light and on dark paper."""
    rows, picture = ordered(rows), Picture()
    highest = max((max(row.rates()) for row in rows if row.samples), default=1.0)
    scale = (WIDTH - LABELS - RIGHT) / highest
    picture.y = 28
    picture.text(16, "Rekindle beside other systems: GB/s, median of the rounds and lowest–highest", "title")
    for medium, title in MEDIA.items():
        group = [row for row in rows if row.key.medium == medium]
        if not group:
            continue
        picture.y += 34
        picture.text(16, title, "medium")
        top = picture.y + 8
        for row in group:
            picture.y += LINE
            notes = [note for note in (row.key.memory, "digests" if row.key.digests else "") if note]
            picture.text(LABELS - 8, ", ".join([row.key.system, *notes]), anchor="end")
            if row.samples:
                picture.bar(row, scale)
            else:
                picture.text(LABELS + 4, row.reason[:100], "small")
        picture.line(LABELS, top, LABELS, picture.y + 6, "axis")
    picture.y += 18
    for line in wrapped([f"{name}: {value}" for name, value in conditions]):
        picture.y += 16
        picture.text(16, line, "small")
    height = picture.y + 16
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}">\n<style>{STYLE}</style>\n'
            f'<rect width="100%" height="100%" class="paper"/>\n' + "\n".join(picture.parts) + "\n</svg>\n")
