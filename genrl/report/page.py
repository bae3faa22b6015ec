"""The page around the charts: style sheet, sections, tables. Nothing in it is loaded from elsewhere."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

# The policy lets the browser check the promise: no script, no request, images and videos only from the file itself.
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#16191f;--soft:#5d6675;--rule:#e3e6eb;--grid:#eceef2;--zero:#b4bbc7;
--good:#0f7b4f;--good-bg:#e2f4eb;--warn:#9a5b00;--warn-bg:#fdf0d9;--bad:#b3261e;--bad-bg:#fbe6e4;--code:#f1f3f6;
--c0:#2563eb;--c1:#d9660a;--c2:#0d9274;--c3:#a21caf;--c4:#dc2656;--c5:#64748b;--c6:#a17c00;--c7:#0284a8}
@media (prefers-color-scheme:dark){:root{--bg:#0f1217;--card:#181c23;--ink:#e8eaee;--soft:#9aa4b4;--rule:#2a303a;
--grid:#252b34;--zero:#596274;--good:#6bd6a4;--good-bg:#12352a;--warn:#f0b95c;--warn-bg:#3a2c12;--bad:#ff9a92;
--bad-bg:#421d1b;--code:#12151b;--c0:#6ea0ff;--c1:#ff9d57;--c2:#3fd0ae;--c3:#e17cf0;--c4:#ff7d9c;--c5:#9fb0c6;
--c6:#e2bf4e;--c7:#4cc4e6}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1160px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 8px;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:40px 0 4px;letter-spacing:-.01em}
h3{font-size:.95rem;margin:22px 0 8px}
p{margin:4px 0 10px}.lead,.meta,.note{color:var(--soft)}.lead{max-width:78ch;margin-bottom:14px}
.meta{font-size:.9rem;margin:0}.note{font-size:.8rem;margin:6px 0 0}
.chip{display:inline-block;padding:2px 10px;border-radius:99px;font-size:.82rem;font-weight:600;background:var(--grid);
margin:0 6px 6px 0;overflow-wrap:anywhere}
.good{color:var(--good);background:var(--good-bg)}.warn{color:var(--warn);background:var(--warn-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:22px 0 0}
.tile,.card,.chart,details{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tile{padding:12px 14px}.tile b{display:block;font-size:1.5rem;line-height:1.3;letter-spacing:-.02em}
.tile span{display:block;font-size:.8rem;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:14px}
.chart{margin:0;padding:12px 14px 10px;min-width:0;display:flex;flex-direction:column}
.chart svg{margin-top:auto}figcaption{font-weight:600;font-size:.92rem}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.8rem;color:var(--soft);margin:2px 0 6px}
.key i{display:inline-block;width:16px;border-top:2.5px solid var(--c);margin-right:6px;vertical-align:middle}
.key.dash i{border-top-style:dashed}
svg{display:block;width:100%;height:auto;font-family:inherit}
.tick,.axis,.reftext{font-size:10.5px;fill:var(--soft)}.grid{stroke:var(--grid)}.zero{stroke:var(--zero)}
.ref{stroke:var(--soft);stroke-dasharray:1.5 3.5;stroke-linecap:round}.reftext{font-style:italic;paint-order:stroke;
stroke:var(--card);
stroke-width:3px;stroke-linejoin:round}
.line{fill:none;stroke:var(--c);stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.line.dash{stroke-dasharray:5 4}.band{fill:var(--c);opacity:.15}.bar{stroke:var(--c);opacity:.5;stroke-width:1.5}
.dot{fill:var(--c)}.hit rect{fill:transparent}.hit line{stroke:transparent}.hit:hover line{stroke:var(--zero)}
.scroll{overflow-x:auto}.card{padding:4px 14px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap;vertical-align:top}
tr:last-child td{border-bottom:0}th{font-size:.8rem;color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;padding-left:0}th:last-child,td:last-child{padding-right:0}
td small{color:var(--soft);display:block;font-size:.78rem}tr.group td{font-weight:600;padding-top:16px}
table.pairs td{text-align:left;white-space:normal;overflow-wrap:anywhere}
table.pairs td:first-child{color:var(--soft);white-space:nowrap;width:1%;padding-right:26px}
.grids{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:14px}
.shot{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.shot img,.shot video{display:block;width:100%;height:auto;margin-top:8px;border-radius:4px}
.pixels{image-rendering:pixelated}
.strip{display:flex;gap:12px;overflow-x:auto;padding:4px 14px 14px}.strip .shot{flex:0 0 240px;padding:8px 10px}
details{margin:14px 0 0}summary{cursor:pointer;padding:10px 14px;font-weight:600;font-size:.92rem}
details>.inner{padding:0 14px 12px}
pre{margin:0;padding:12px;border-radius:6px;background:var(--code);overflow-x:auto;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre.wrap{white-space:pre-wrap;overflow-wrap:anywhere}
ul.list{margin:0;padding:0;list-style:none}ul.list li{padding:8px 0;border-bottom:1px solid var(--rule)}
ul.list li:last-child{border-bottom:0}.absent{color:var(--soft);font-style:italic}
.split{display:flex;height:26px;border-radius:6px;overflow:hidden;gap:2px;margin:12px 0 8px}
.split i{display:block;background:var(--c);min-width:2px}
@media (max-width:520px){main{padding:18px 12px 40px}h1{font-size:1.4rem}.tile b{font-size:1.25rem}
.tiles{grid-template-columns:1fr 1fr}.chart{padding:10px 8px 8px}.card{padding:2px 10px}th,td{padding:7px 8px}
th,td:first-child,tr.group td{white-space:normal}td small{font-size:.72rem}}
@media print{body{background:#fff}.chart,.tile,.shot{break-inside:avoid}}
""" + "".join(f".c{i}{{--c:var(--c{i})}}" for i in range(8))


def page(title: str, body: str) -> str:
    """A complete HTML document. `title` is plain text, `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def write_page(file: Path, html: str) -> Path:
    """Writes through a temporary file, so that a reader never sees half a page."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(html, encoding="utf-8", errors="replace")
    os.replace(part, file)
    return file


def section(title: str, body: str, lead: str = "") -> str:
    lead = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def absent(text: str) -> str:
    """Says what is not there, in place of it."""
    return f'<p class="absent">{escape(text)}</p>'


def chart_grid(charts: Iterable[str]) -> str:
    """Charts side by side; empty ones are dropped, `""` if none is left."""
    shown = [chart for chart in charts if chart]
    return f'<div class="charts">{"".join(shown)}</div>' if shown else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str] | str]) -> str:
    """A table in a card. Cells are HTML (escape them); a row that is a string is a heading over the rows below it."""
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines.append(f'<tr class="group"><td colspan="{len(head)}">{row}</td></tr>')
        else:
            lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return (
        f'<div class="card scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def pairs(items: Iterable[tuple[str, str]]) -> str:
    """A two-column table of plain texts."""
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in items)
    return f'<div class="scroll"><table class="pairs"><tbody>{rows}</tbody></table></div>' if rows else ""


def details(title: str, body: str, inner: bool = True) -> str:
    """A block that opens on a click. `body` is HTML."""
    body = f'<div class="inner">{body}</div>' if inner else body
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def image(file: Path, caption: str) -> str:
    """A picture (it may move) with a caption, embedded in the page; a note in its place if the file cannot be read."""
    from PIL import Image, UnidentifiedImageError

    data = file.read_bytes()
    try:
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            width, height = picture.size
            kind = Image.MIME.get(picture.format or "", "image/png")
    except (OSError, SyntaxError, UnidentifiedImageError):  # Pillow reports broken PNG chunks as SyntaxError
        damaged = absent(f"{file.name} is damaged.")
        return f'<figure class="shot"><figcaption>{escape(caption)}</figcaption>{damaged}</figure>'
    # Small pictures are enlarged by the page: show their pixels instead of a blur.
    pixels = ' class="pixels"' if width < 400 else ""
    source = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return (
        f'<figure class="shot"><figcaption>{escape(caption)}</figcaption>'
        f'<img{pixels} src="{source}" width="{width}" height="{height}" alt="{escape(caption)}"></figure>'
    )


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 14 min`."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
