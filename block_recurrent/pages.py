"""HTML pages that need nothing but themselves: no server, no network, no script.

What is put into a page is text, and escaped, unless one of these functions has made it:

element("p", "a < b ", element("b", "is shown as it is"))
"""

import html
import re
from collections.abc import Mapping, Sequence

# Nothing is ever loaded or run, whatever should have come into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root {
  color-scheme: light dark; --page: #fdfdfc; --ink: #1d2329; --quiet: #58616a; --line: #dcdfe3; --raised: #f3f4f5;
  --link: #0067a0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --ink: #e4e7ea; --quiet: #a0a9b2; --line: #343a41; --raised: #1e2227; --link: #6cbcf0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
}
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.75rem; }
h2 { margin: 2.75rem 0 0.75rem; padding-bottom: 0.3rem; border-bottom: 1px solid var(--line); font-size: 1.25rem; }
h3 { margin: 1.5rem 0 0.5rem; font-size: 1rem; }
p { margin: 0.5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
p.quiet { color: var(--quiet); font-size: 0.92rem; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; margin-top: 1rem; font-size: 0.95rem; }
.wide { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.9rem 0.35rem 0; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
th:last-child, td:last-child { padding-right: 0; }
tr { border-bottom: 1px solid var(--line); }
thead th { min-width: 5rem; color: var(--quiet); font-weight: 500; vertical-align: bottom; }
tbody th { font-weight: 500; min-width: 9.5rem; max-width: 24rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) { thead th { white-space: nowrap; } }
td { white-space: pre; }
table.text td { min-width: 8rem; max-width: 20rem; text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.text thead th { min-width: 8rem; text-align: left; overflow-wrap: anywhere; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem; }
figure { margin: 0.5rem 0; max-width: 34rem; }
figcaption { margin-bottom: 0.4rem; font-weight: 500; }
svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) { svg { filter: brightness(1.3); } }
svg text { fill: currentColor !important; font-family: inherit !important; }
pre {
  margin: 0.5rem 0; padding: 0.8rem 1rem; overflow-x: auto; border-radius: 6px; background: var(--raised);
  font: 0.85rem/1.5 ui-monospace, "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
pre.wrapped { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; color: var(--link); overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
"""


class Html(str):
    """Text that is HTML; any other is escaped where it is put into an element."""


def element(tag: str, *content: str, **attributes: str) -> Html:
    """An element and what is in it; `class_="quiet"` and `aria_label=...` are written as HTML has them."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(printable(value))}"' for name, value in attributes.items()
    )
    inside = "".join(part if isinstance(part, Html) else html.escape(printable(part)) for part in content)
    return Html(f"<{tag}{written}>{inside}</{tag}>")


def joined(*parts: Html) -> Html:
    return Html("\n".join(parts))


def printable(text: str) -> str:
    """Text without control characters and halves of characters, which no page may have."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text)


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], class_: str = "figures") -> Html:
    """A table whose first column names its rows; it scrolls by itself where the screen is narrow."""
    head = element("tr", *(element("th", name, scope="col") for name in header))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    made = element("table", element("thead", head), element("tbody", *body), class_=class_)
    return element("div", made, class_="wide", role="region", aria_label=caption, tabindex="0")


def picture(caption: str, svg: str) -> Html:
    """A drawing, read out as its caption."""
    label = html.escape(printable(caption))
    drawing = Html(f'<svg role="img" aria-label="{label}"{svg.removeprefix("<svg")}')
    return element("figure", element("figcaption", caption), drawing)


def pictures(*made: Html) -> Html:
    return element("div", *made, class_="pictures")


def folded(summary: str, *content: Html) -> Html:
    return element("details", element("summary", summary), *content)


def quiet(text: str) -> Html:
    """A paragraph about what is shown."""
    return element("p", text.replace(" %", "\u00a0%"), class_="quiet")


def page(title: str, about: str, sections: Mapping[str, Html]) -> str:
    """A whole page: its title, a line about it, and its sections under their headings."""
    numbered = list(enumerate(sections.items(), start=1))
    links = [element("a", name, href=f"#part{number}") for number, (name, _) in numbered]
    parts = [element("section", element("h2", name, id=f"part{number}"), part) for number, (name, part) in numbered]
    head = joined(
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    top = element("header", element("h1", title), quiet(about), element("nav", *links, aria_label="Parts of this page"))
    body = element("body", top, element("main", *parts))
    return f"<!doctype html>\n{element('html', element('head', head), body, lang='en')}\n"
