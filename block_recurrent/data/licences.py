"""Which licence a repository is under, as SPDX identifiers, told from its texts by key phrases: no code is run."""

import re

from block_recurrent.data.source_files import language_of

PERMISSIVE = (
    "MIT MIT-0 X11 BSD BSD-1-Clause BSD-2-Clause BSD-3-Clause 0BSD Apache-2.0 ISC Zlib Libpng Unlicense CC0-1.0 WTFPL "
    "BSL-1.0 PostgreSQL NCSA Python-2.0 PSF-2.0 BlueOak-1.0.0"
)
UNKNOWN = "unknown"
LICENCE_NAMES = re.compile(r"((.*[-_.])?(un)?licen[cs]e|copying|copyright)s?([-_.].*)?", re.IGNORECASE)
OTHERS = re.compile(r"third|3rd|vendor", re.IGNORECASE)  # licences of what a repository brings along
MANIFESTS = {
    "package.json": re.compile(r'"license"\s*:\s*(?:\{[^}]*"type"\s*:\s*)?"([^"\n]{1,80})"'),
    "pyproject.toml": re.compile(r"""^license\s*=\s*(?:\{\s*text\s*=\s*)?["']([^"'\n]{1,80})["']""", re.MULTILINE),
    "Cargo.toml": re.compile(r"""^license\s*=\s*["']([^"'\n]{1,80})["']""", re.MULTILINE),
}
STRAIGHT = str.maketrans("‘’“”", "''\"\"")  # quotation marks
LONGEST = 200_000  # bytes of a file that may tell the licence

# In this order: the first whose phrases a text holds, all of them, in lower case and with single spaces. The GNU
# licences name each other in their texts, so each goes by its title, or by the notice that it asks for.
PHRASES = [
    ("AGPL-3.0", "gnu affero general public license version 3, 19 november 2007"),
    ("LGPL-3.0", "gnu lesser general public license version 3, 29 june 2007"),
    ("LGPL-2.1", "gnu lesser general public license version 2.1, february 1999"),
    ("LGPL-2.0", "gnu library general public license version 2, june 1991"),
    ("GPL-3.0", "gnu general public license version 3, 29 june 2007"),
    ("GPL-2.0", "gnu general public license version 2, june 1991"),
    ("AGPL-3.0", "gnu affero general public license as published by", "version 3"),
    ("LGPL-3.0", "gnu lesser general public license as published by", "version 3"),
    ("LGPL-2.1", "gnu lesser general public license as published by", "version 2.1"),
    ("GPL-3.0", "gnu general public license as published by", "version 3"),
    ("GPL-2.0", "gnu general public license as published by", "version 2"),
    ("MPL-2.0", "mozilla public license", "2.0"),
    ("EPL-2.0", "eclipse public license", "2.0"),
    ("EPL-1.0", "eclipse public license", "1.0"),
    ("Apache-2.0", "apache license", "version 2.0"),
    ("Artistic-2.0", "the artistic license 2.0"),
    ("CC0-1.0", "cc0 1.0 universal"),
    ("Unlicense", "this is free and unencumbered software released into the public domain"),
    ("BSL-1.0", "boost software license", "version 1.0"),
    ("WTFPL", "do what the fuck you want to public license"),
    ("Zlib", "this software is provided 'as-is'", "altered source versions must be plainly marked"),
    ("BSD-3-Clause", "redistribution and use in source and binary forms", "endorse or promote products"),
    ("BSD-2-Clause", "redistribution and use in source and binary forms", "this list of conditions"),
    ("ISC", "permission to use, copy, modify, and/or distribute this software for any purpose", "copyright notice and"),
    ("ISC", "permission to use, copy, modify, and distribute this software for any purpose", "copyright notice and"),
    ("0BSD", "permission to use, copy, modify, and/or distribute this software for any purpose"),
    ("MIT", "permission is hereby granted, free of charge", "above copyright notice and this permission notice"),
    ("MIT-0", "permission is hereby granted, free of charge", 'the software is provided "as is"'),
    ("Python-2.0", "python software foundation license version 2"),
]


def tells_licence(path: str) -> bool:
    """Whether a file, by its path below the repository, may tell the licence."""
    folder, _, name = path.rpartition("/")
    if OTHERS.search(name):
        return False
    if folder:
        return folder.upper() == "LICENSES"
    return name in MANIFESTS or (LICENCE_NAMES.fullmatch(name) is not None and language_of(name) is None)


def licence_of(texts: dict[str, bytes]) -> str:
    """An SPDX expression from the files that may tell it.

    Several licence texts are a choice between them; but a folder LICENSES holds all that any of the files are under.
    """
    manifests = {name: texts[name] for name in MANIFESTS if name in texts}
    found = {path: spdx for path in texts.keys() - manifests if (spdx := recognise(texts[path]))}
    if all_of := {spdx for path, spdx in found.items() if "/" in path}:
        return " AND ".join(sorted(all_of))
    if not found:
        for name, content in manifests.items():
            if match := MANIFESTS[name].search(content.decode(errors="replace")):
                return match[1]
    return " OR ".join(sorted(set(found.values()))) or UNKNOWN


def recognise(content: bytes) -> str | None:
    text = " ".join(content.decode(errors="replace").lower().translate(STRAIGHT).split())
    return next((spdx for spdx, *phrases in PHRASES if all(phrase in text for phrase in phrases)), None)


def wanted_licences(names: tuple[str, ...]) -> frozenset[str]:
    """Lower-case identifiers, without what version comes after; "permissive" stands for all such licences."""
    spelled_out = " ".join(PERMISSIVE if name.lower() == "permissive" else name for name in names)
    return frozenset(map(plain, spelled_out.split()))


def is_wanted(expression: str, wanted: frozenset[str]) -> bool:
    """Whether one of an expression's alternatives asks for wanted licences alone."""
    alternatives = [re.split(r"\s+and\s+", part) for part in re.split(r"\s+or\s+|/|,", expression.lower())]
    if "(" in expression and any(len(names) > 1 for names in alternatives):
        alternatives = [[name for names in alternatives for name in names]]  # nested: the strictest reading
    return any(all(plain(name) in wanted for name in names) for names in alternatives)


def plain(name: str) -> str:
    """A licence's identifier without its exception and without "or later": what its text alone tells."""
    name = re.sub(r"\s+with\s.*", "", name.strip("() \t").lower())
    return re.sub(r"(-only|-or-later|\+)$", "", name)
