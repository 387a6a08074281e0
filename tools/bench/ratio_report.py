"""Figures of tools/bench/all as JSON and as an SVG picture. A row is a name, a ratio, its floor (or None) and the
arguments of the `rekindle bench` that measured it. Nothing here measures or touches a file."""
import html

FIELDS = ("name", "ratio", "floor", "command")


def to_json(rows, about):
    return {"bench": "all", "conditions": about, "ratios": [dict(zip(FIELDS, row)) for row in rows]}


def from_json(report):
    """Rows and conditions."""
    return [tuple(row[field] for field in FIELDS) for row in report["ratios"]], report["conditions"]


def svg(rows, about):
    """Bars of the ratios with a line at 1 and a mark at each floor; readable on light and on dark paper."""
    labels, scale, line = 430, 260, 22
    height = 60 + line * len(rows) + 30
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" font-family="sans-serif">',
             "<style>text { font-size: 13px; fill: #24292f } .bar { fill: #0969da } .floor { stroke: #cf222e }"
             " .one { stroke: #6e7781 } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 }"
             " .bar { fill: #58a6ff } .one { stroke: #8b949e } }</style>",
             '<text x="16" y="24">Ratio to the limit measured in the same run; the red mark is the floor</text>']
    for index, (name, ratio, floor, _) in enumerate(rows):
        y = 48 + line * index
        parts.append(f'<text x="{labels - 8}" y="{y + 11}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(f'<rect class="bar" x="{labels}" y="{y}" width="{min(ratio, 1.7) * scale:.1f}" height="14"/>')
        parts.append(f'<text x="{labels + min(ratio, 1.7) * scale + 6:.1f}" y="{y + 11}">{ratio:.2f}</text>')
        if floor is not None:
            x = labels + floor * scale
            parts.append(f'<line class="floor" stroke-width="2" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + 16}"/>')
    x = labels + scale
    parts.append(f'<line class="one" x1="{x}" x2="{x}" y1="40" y2="{48 + line * len(rows)}"/>')
    parts.append(f'<text x="16" y="{height - 10}">{html.escape(about)}</text></svg>')
    return "\n".join(parts) + "\n"
