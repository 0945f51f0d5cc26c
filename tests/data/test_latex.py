"""A paper's files become one text: the right main file, with what it includes in its place."""

import pytest

from block_recurrent.data import latex
from block_recurrent.data.latex import Unusable, assemble


def document(body: str, head: str = "") -> str:
    return f"\\documentclass{{article}}{head}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"


def text_of(files: dict[str, str], name: str = "1001.0001") -> str:
    return assemble({path: text.encode() for path, text in files.items()}, name)


def reason_of(files: dict[str, str | bytes]) -> str:
    with pytest.raises(Unusable) as caught:
        assemble({path: text if isinstance(text, bytes) else text.encode() for path, text in files.items()}, "x")
    return str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        r"\input{a}",
        r"\input{a.tex}",
        r"\input{ ./a }",
        r"\input a ",
        r"\input a.tex ",
        r'\input "a"',
        r'\input{"a"}',
        r"\include{a}",
        r"\subfile{a}",
        r"\import{./}{a}",
        r"\subimport{.}{a.tex}",
        r"\\\input{a}",
        r"50\% \input{a}",
        "% comment\n\\input{a}",
    ],
)
def test_an_include_is_replaced_by_the_file(command):
    assert "\nINCLUDED\n" in text_of({"main.tex": document(command), "a.tex": "\nINCLUDED\n"})


@pytest.mark.parametrize(
    "command",
    [
        r"% \input{a}",
        r"\\% \input{a}",
        r"\input{missing}",
        r"\input missing ",
        r"\input{}",
        r"\input{#1}",
        r"\input{../a}",
        r"\input{/a}",
        r"\inputa",
        r"\includegraphics{a}",
        r"\includeonly{a}",
        r"\import{missing}{a}",
        r"\bibliography{a}",
        r"\bibliographystyle{a}",
        "\\",
    ],
)
def test_what_includes_nothing_stays_as_it_is_written(command):
    main = document(command)
    assert text_of({"main.tex": main, "a.tex": "INCLUDED"}) == main


def test_a_name_without_an_ending_means_the_tex_file_first():
    files = {"main.tex": document(r"\input{a}"), "a": "BARE", "a.tex": "TEX"}
    assert "TEX" in text_of(files)
    del files["a.tex"]
    assert "BARE" in text_of(files)


def test_paths_are_relative_to_the_main_file_and_to_the_including_one():
    files = {
        "src/main.tex": document(r"\input{parts/a}"),
        "src/parts/a.tex": r"A \input{parts/b} \input{c}",
        "src/parts/b.tex": "B",
        "src/parts/c.tex": "C",
    }
    assert "A B C" in text_of(files)


def test_an_imported_file_includes_from_its_own_folder():
    files = {"main.tex": document(r"\import{parts/}{a}"), "parts/a.tex": r"A \input{b}", "parts/b.tex": "B"}
    assert "A B" in text_of(files)


def test_the_end_of_a_file_ends_its_comment():
    files = {"main.tex": document(r"\input{a} after"), "a.tex": "A % a comment"}
    assert "A % a comment\n after" in text_of(files)


def test_a_cycle_ends_at_the_file_that_is_being_read():
    files = {"main.tex": document(r"\input{a}"), "a.tex": r"A \input{b}", "b.tex": r"B \input{a} \input{main}"}
    assert r"A B \input{a} \input{main}" in text_of(files)


def test_a_chain_that_is_too_long_stops(monkeypatch):
    monkeypatch.setattr(latex, "DEPTH", 3)
    files = {"main.tex": document(r"\input{1}"), **{f"{i}.tex": f"<{i}> \\input{{{i + 1}}}" for i in range(1, 9)}}
    assert r"<1> <2> \input{3}" in text_of(files)


@pytest.mark.parametrize("leaf", ["", "text"])
def test_exponential_inclusion_is_refused(leaf):
    tripling = {f"{i}.tex": f"\\input{{{i + 1}}}" * 3 for i in range(1, 18)}
    assert reason_of({"main.tex": document(r"\input{1}"), **tripling, "18.tex": leaf}) == "includes too much"


def test_a_large_file_included_again_and_again_is_refused(monkeypatch):
    monkeypatch.setattr(latex, "TEXT_LIMIT", 10_000)
    files = {"main.tex": document(r"\input{a}" * 20), "a.tex": "x" * 1000}
    assert reason_of(files) == "includes too much"


def test_the_bibliography_is_the_main_files():
    files = {"main.tex": document(r"\bibliography{refs,more}"), "main.bbl": "MAIN", "other.bbl": "OTHER"}
    assert text_of(files) == document("MAIN")


def test_else_the_bibliography_is_the_only_one_and_comes_once():
    files = {"main.tex": document(r"\input{a} \bibliography{b}"), "a.tex": r"\bibliography{a}", "x.bbl": "ONLY"}
    assert text_of(files) == document(r"ONLY \bibliography{b}")


def test_biblatex_and_the_name_of_the_job_bring_the_bibliography_too():
    for command in (r"\printbibliography", r"\printbibliography[heading=none]", r"\input{\jobname.bbl}"):
        assert text_of({"main.tex": document(command), "main.bbl": "MAIN"}) == document("MAIN")


def test_one_of_several_bibliographies_is_not_guessed():
    main = document(r"\bibliography{refs}")
    assert text_of({"main.tex": main, "x.bbl": "X", "y.bbl": "Y"}) == main


def test_comments_and_macros_stay():
    main = document("% a comment\n\\foo", head="\\newcommand{\\foo}{bar} % why")
    assert text_of({"main.tex": main}) == main


@pytest.mark.parametrize(
    "files",
    [
        {"x.tex": "RIGHT", "a.tex": "", "README": ""},
        {"x.tex": "RIGHT", "anc/ms.tex": "WRONG, only goes with the paper"},
        {"x.tex": "RIGHT", "old/main.tex": "WRONG, a draft with a main file's name"},
        {"x": "RIGHT"},
        {"x.LTX": "RIGHT"},
        {"x.tex": "RIGHT and the longer one", "y.tex": "WRONG"},
        {"x.tex": r"RIGHT \subfile{ms}", "ms.tex": "WRONG since it is included"},
        {"x.tex": "WRONG by name", "ms.tex": "RIGHT", "main.tex": "WRONG"},
        {"1001.0001.tex": "WRONG", "paper.tex": "RIGHT"},
        {"1001.0001.tex": "RIGHT", "x.tex": "WRONG and longer"},
    ],
)
def test_the_main_file_is_found(files):
    text = text_of({path: document(body) if body else body for path, body in files.items()})
    assert text.splitlines()[2].startswith("RIGHT")


def test_a_main_file_has_a_document():
    assert "RIGHT" in text_of({"ms.tex": "\\documentclass{a}" + "WRONG" * 99, "x.tex": document("RIGHT")})


def test_a_class_in_a_comment_does_not_count():
    assert "RIGHT" in text_of({"ms.tex": "%\\documentclass{article}\nWRONG", "x.tex": document("RIGHT")})


def test_the_class_may_be_in_a_preamble():
    assert "HERE" in text_of({"x.tex": "\\input{preamble}\\begin{document}HERE\\end{document}"})


@pytest.mark.parametrize(
    "files",
    [
        {"x.tex": "\\input{ms}\\begin{document}HERE\\end{document}", "ms.tex": "\\documentclass{article}"},
        {"x.tex": "\\documentclass{article}\\input{ms}", "ms.tex": "\\begin{document}HERE\\end{document}"},
    ],
)
def test_class_and_document_may_be_in_two_files(files):
    assert text_of(files) == "\\documentclass{article}\\begin{document}HERE\\end{document}"


def test_latex_without_a_preamble_is_known_by_its_markup():
    assert "HERE" in text_of({"x.tex": "\\chapter{One}\\begin{theorem}HERE\\end{theorem}"})


def test_old_latex_is_latex():
    assert "HERE" in text_of({"x.tex": "\\documentstyle[12pt]{article}\\begin{document}HERE\\end{document}"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("00README.XXX", "ms.tex ignore\nx.tex toplevelfile\n"),
        ("00README.json", '{"sources": [{"usage": "toplevel", "filename": "x.tex"}, {"filename": "ms.tex"}]}'),
        ("00README.yaml", "sources:\n  - filename: x.tex\n    usage: toplevel\n  - filename: ms.tex\n"),
        ("00README.yaml", "sources:\n- usage: 'toplevel'\n  filename: 'x.tex'\n- filename: ms.tex\n  usage: ignore\n"),
    ],
)
def test_the_papers_readme_says_which_file_is_the_main_one(name, hint):
    assert "RIGHT" in text_of({"ms.tex": document("WRONG"), "x.tex": document("RIGHT"), name: hint})


@pytest.mark.parametrize(
    "hint", ["missing.tex toplevelfile", "toplevelfile", '{"sources": [{"usage": "toplevel"', "\0"]
)
def test_a_hint_that_leads_nowhere_is_ignored(hint):
    assert "RIGHT" in text_of({"ms.tex": document("RIGHT"), "x.tex": document("WRONG"), "00README.XXX": hint})


@pytest.mark.parametrize(
    ("reason", "files"),
    [
        ("not LaTeX", {}),
        ("not LaTeX", {"x.tex": ""}),
        ("not LaTeX", {"x.tex": "\\magnification 1200 Plain \\TeX. \\bye"}),
        ("not LaTeX", {"x.tex": "\\input amstex\n\\documentstyle{amsppt}\\document\nText\n\\enddocument"}),
        ("not LaTeX", {"x.eps": "%!PS", "x.html": "<html>"}),
        ("binary", {"x.tex": "\\documentclass{a}\0"}),
        ("withdrawn", {"x.tex": "%auto-ignore\n" + document("x" * 9999)}),
        ("withdrawn", {"x.tex": "This paper has been withdrawn by the author."}),
        ("withdrawn", {"x.tex": document("This paper was Withdrawn.")}),
        ("withdrawn", {"x.tex": document(r"\input{a.txt}"), "a.txt": "The author withdrew it."}),
    ],
)
def test_what_is_no_paper_in_latex_is_refused(reason, files):
    assert reason_of(files) == reason


def test_a_paper_that_speaks_of_withdrawal_is_kept():
    assert "withdrawn" in text_of({"x.tex": document("Money is withdrawn at rate r. " * 99)})


def test_a_file_not_to_run_tex_on_is_still_included():
    files = {"x.tex": document(r"\input{ms}"), "ms.tex": "%auto-ignore\n" + document("PART")}
    assert "PART" in text_of(files)


@pytest.mark.parametrize("content", ["é€".encode(), b"\xef\xbb\xbf\xc3\xa9\xe2\x82\xac"])
def test_utf8_is_read_as_such(content):
    assert latex.decode(content) == "é€"


def test_other_bytes_are_latin_1():
    assert latex.decode(b"caf\xe9") == "café"


def test_files_of_one_paper_may_differ_in_encoding():
    files = {"x.tex": document(r"é \input{a}").encode(), "a.tex": b"\xfc"}
    assert "é ü" in assemble(files, "x")


def test_an_included_file_that_is_binary_stays_out():
    main = document(r"\input{a}")
    assert assemble({"x.tex": main.encode(), "a.tex": b"\0"}, "x") == main


def test_lines_end_in_newlines():
    assert latex.decode(b"a\r\nb\rc\n\r\nd") == "a\nb\nc\n\nd"


@pytest.mark.parametrize("piece", ["\\documentclass[", "\\begin{", "\\input{", "\\bibliography{", "\\", "\\input   "])
def test_brackets_that_never_close_take_no_time(piece):
    main = document("") + piece * 100_000
    assert text_of({"x.tex": main}) == main
