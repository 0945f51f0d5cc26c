"""A paper's files as one LaTeX text: which of them is the main one, and what it includes in its place.

Nothing is taken out: comments, macros and the bibliography stay.
"""

import posixpath
import re
from collections.abc import Mapping

TEXT_LIMIT = 50_000_000  # characters of one paper with all it includes
INCLUSIONS = 10_000  # files that include each other twice are exponentially many
DEPTH = 20
STUB = 2000  # characters; a text this short that says so is a notice of withdrawal, not a paper

MAIN_NAMES = ("ms", "main", "paper")
TEX_ENDINGS = (".tex", ".ltx", ".latex", "")

COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%[^\n]*")
AUTO_IGNORE = re.compile(r"\s*%\s*auto-ignore")
WITHDRAWN = re.compile(r"withdrawn|withdrew", re.IGNORECASE)
# The bounds keep a search linear where brackets are never closed.
CLASS = re.compile(r"\\document(?:class|style)(?![a-zA-Z@])\s{0,99}(?:\[[^\]]{0,2000}\]\s{0,99})?\{")
BEGIN_DOCUMENT = re.compile(r"\\begin\s{0,99}\{\s{0,99}document\s{0,99}\}")
BEGIN = re.compile(r"\\begin\s{0,99}\{")
AMS_TEX = re.compile(r"\\enddocument(?![a-zA-Z@])")  # its \documentstyle and \document look like LaTeX's
COMMAND = re.compile(
    r"""
    %[^\n]* | \\[^a-zA-Z]  # comments and signs such as \% and \\ are stepped over
    | \\(?:input|include|subfile|subfileinclude)(?![a-zA-Z@])\s*
      (?: \{(?P<braced>[^{}\n]*)\} | "(?P<quoted>[^"\n]*)" | (?P<bare>[^\s\\{}%"]+) )
    | \\(?:sub)?(?:import|inputfrom|includefrom)(?![a-zA-Z@])\*?\s*
      \{(?P<folder>[^{}\n]*)\}\s*\{(?P<imported>[^{}\n]*)\}
    | \\(?P<bibliography>bibliography(?![a-zA-Z@])\s*\{[^{}]*\} | printbibliography(?![a-zA-Z@])(?:\[[^\]]{0,500}\])?)
    """,
    re.VERBOSE,
)


class Unusable(Exception):
    """A paper that has no LaTeX text to give; the message is the reason."""


def assemble(files: Mapping[str, bytes], name: str) -> str:
    """The one text of a paper's files (by normal relative paths); `name` is the paper's, as a file would have it."""
    paper = Paper(files)
    main = paper.main(name)
    text = paper.with_includes(main)
    bare = uncommented(text)
    if len(text) < STUB and WITHDRAWN.search(bare):
        raise Unusable("withdrawn")
    if AMS_TEX.search(bare) and not BEGIN_DOCUMENT.search(bare):
        raise Unusable("not LaTeX")
    return text


def uncommented(text: str) -> str:
    return COMMENT.sub(r"\1", text)


def decode(content: bytes) -> str | None:
    """UTF-8 or else Latin-1, with lines that end in \\n; None for what is no text."""
    if b"\0" in content:
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Paper:
    """The files of one paper, decoded when they are asked for."""

    def __init__(self, files: Mapping[str, bytes]):
        self.files = files
        self.decoded: dict[str, str | None] = {}
        self.bibliographies = [path for path in files if path.lower().endswith(".bbl")]

    def text(self, path: str) -> str | None:
        if path not in self.decoded:
            self.decoded[path] = decode(bytes(self.files[path]))
        return self.decoded[path]

    def main(self, name: str) -> str:
        """The path of the file that TeX is to be run on."""
        hints = self.hints()
        paths = [path for path in self.files if is_tex(path) or path in hints]
        texts = {path: text for path in paths if (text := self.text(path)) is not None}
        if not texts:
            raise Unusable("binary" if paths else "not LaTeX")
        # arXiv never runs TeX on a file that begins so. Alone, it says that there is no paper.
        texts = {path: text for path, text in texts.items() if not AUTO_IGNORE.match(text)}
        if not texts or (sum(map(len, texts.values())) < STUB and any(map(WITHDRAWN.search, texts.values()))):
            raise Unusable("withdrawn")
        bare = {path: uncommented(text) for path, text in texts.items()}
        classes = [path for path in bare if CLASS.search(bare[path])]
        documents = [path for path in bare if BEGIN_DOCUMENT.search(bare[path])]
        # The class may be in a preamble, which may not even come with the paper; a chapter alone has LaTeX's markup.
        alone = [path for path in bare if len(bare) == 1 and BEGIN.search(bare[path])]
        hinted = [path for path in bare if path in hints and (path in classes or path in documents)]
        candidates = hinted or sorted({*classes, *documents}) or alone
        if not candidates:
            raise Unusable("not LaTeX")
        return candidates[0] if len(candidates) == 1 else self.best(candidates, bare, name)

    def best(self, candidates: list[str], bare: Mapping[str, str], name: str) -> str:
        """The likeliest of several main files."""
        included = {target for path in bare for target in self.targets(path)}
        names = (*MAIN_NAMES, name.lower())

        def rank(path: str) -> tuple:
            stem = stem_of(path).lower()
            return (
                path in included,
                not BEGIN_DOCUMENT.search(bare[path]),
                not CLASS.search(bare[path]),
                path.count("/"),  # arXiv runs TeX at the top; below are drafts, templates and figures
                names.index(stem) if stem in names else len(names),
                -len(bare[path]),
                path,
            )

        return min(candidates, key=rank)

    def hints(self) -> set[str]:
        """The files that the paper's 00README names as the ones to run TeX on."""
        hints = set()
        for path in self.files:
            if path.upper().startswith("00README."):
                text = self.text(path) or ""
                hints |= {match[1] for match in re.finditer(r"(?m)^[ \t]*(\S+)[ \t]+toplevelfile\b", text)}
                # JSON, YAML and TOML alike: an item of a list with `filename` and `usage`.
                for item in re.split(r"[{}]|^[ \t]*-[ \t]|\[\[", text, flags=re.MULTILINE):
                    fields = dict(re.findall(r"""["']?\b(filename|usage)\b["']?\s?[:=]\s?["']?([^"'\n,]+)""", item))
                    if fields.get("usage", "").strip() == "toplevel":
                        hints.add(fields.get("filename", "").strip())
        return {posixpath.normpath(hint) for hint in hints if hint}

    def targets(self, path: str) -> set[str]:
        """The files that a main file would include directly."""
        found = (self.target(match, path, path) for match in COMMAND.finditer(self.text(path) or ""))
        return {target for target in found if target is not None} - {path}

    def target(self, match: re.Match, path: str, main: str) -> str | None:
        """The file that a command in the file `path` includes; None where there is none that is text."""
        if match["bibliography"]:
            return self.bibliography(main)
        name = match["braced"] or match["quoted"] or match["bare"] or match["imported"]
        if name is None:
            return None
        name = name.replace("\\jobname", stem_of(main))
        name = posixpath.join((match["folder"] or "").strip(), name.strip().strip('"'))
        for folder in dict.fromkeys((posixpath.dirname(main), posixpath.dirname(path))):
            for ending in (".tex", ""):  # the order that TeX tries them in
                found = posixpath.normpath(posixpath.join(folder, name + ending))
                if found in self.files and self.text(found) is not None:
                    return found
        return None

    def bibliography(self, main: str) -> str | None:
        """The bibliography that BibTeX made for the main file, or the only one."""
        own = posixpath.splitext(main)[0] + ".bbl"
        chosen = [own] if own in self.files else self.bibliographies
        return chosen[0] if len(chosen) == 1 and self.text(chosen[0]) is not None else None

    def with_includes(self, main: str) -> str:
        characters, inclusions, cited = 0, 0, False

        def expand(path: str, trail: tuple[str, ...]) -> str:
            nonlocal characters, inclusions, cited
            text = self.text(path)
            characters, inclusions = characters + len(text), inclusions + 1
            if characters > TEXT_LIMIT or inclusions > INCLUSIONS:
                raise Unusable("includes too much")
            pieces, at = [], 0
            for match in COMMAND.finditer(text):
                if match["bibliography"] and cited:
                    continue
                target = self.target(match, path, main)
                if target is None or target in trail or len(trail) >= DEPTH:
                    continue  # stays as it is written
                cited = cited or bool(match["bibliography"])
                pieces += [text[at : match.start()], expand(target, (*trail, target))]
                at = match.end()
                if ends_in_comment(pieces[-1]) and not text.startswith("\n", at):
                    pieces.append("\n")  # the end of a file ends its last line
            return "".join([*pieces, text[at:]])

        return expand(main, (main,))


def is_tex(path: str) -> bool:
    """What could be a main file, by its name; in the folder anc are files that go with a paper."""
    return posixpath.splitext(path)[1].lower() in TEX_ENDINGS and not path.startswith("anc/")


def stem_of(path: str) -> str:
    return posixpath.splitext(posixpath.basename(path))[0]


def ends_in_comment(text: str) -> bool:
    return COMMENT.search(text, text.rfind("\n") + 1) is not None
