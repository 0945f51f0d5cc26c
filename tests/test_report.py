"""Pages of runs and of comparisons: what is in them, that nothing in a run's folder becomes HTML, and in a browser."""

import json
import shutil
import socketserver
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from block_recurrent import evaluate, report, train
from block_recurrent.data.train_vocabulary import train_sentencepiece
from block_recurrent.errors import UserError
from block_recurrent.pages import element, page
from block_recurrent.plots import curves_svg, intervals_svg
from block_recurrent.prepare import prepare
from block_recurrent.reported_runs import samples_of
from tests.test_compare import ABOUT, COST, PLANNED, finished
from tests.training.test_runs import arguments

HOSTILE = "</pre></title><script>alert(1)</script><img src=http://evil.test/x onerror=alert(1)>\"'&$\x00\ud800"
EMPTY = {"meta", "br", "img", "link", "input", "hr"}  # elements of HTML that have no end


class Page(HTMLParser):
    """A page taken apart: its elements with their attributes, and its text; refuses one that is not well formed."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.inside, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.inside, f"not ended: {self.inside}"

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(set(names)) == len(names), f"an attribute twice in {tag}: {names}"
        self.elements.append((tag, dict(attributes)))
        if tag not in EMPTY:
            self.inside.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag

    def handle_data(self, data):
        if "style" not in self.inside:
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def labels(self):
        """What the pictures are read out as."""
        return [attributes["aria-label"] for attributes in self.all("svg")]


def read(file) -> Page:
    """A page that is well formed, accessible, and has nothing to load or to run."""
    text = Path(file).read_text()
    found = Page(text)
    assert text.startswith("<!doctype html>") and found.all("html") == [{"lang": "en"}] and len(found.all("title")) == 1
    assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in found.elements}
    for _, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert attributes.get("href", "#").startswith(("#", "./"))
    assert "url(http" not in text and "@import" not in text
    assert all("scope" in attributes for attributes in found.all("th"))
    assert all(attributes["role"] == "img" for attributes in found.all("svg"))
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    return found


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory):
    """A run that was evaluated with history and without."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    train.main(arguments(corpus, workdir, "--gin.STEPS=4"))
    evaluate.main([str(workdir)])
    evaluate.main([str(workdir), "--split=validation", "--history=4"])
    return workdir


@pytest.fixture
def copied(workdir, tmp_path):
    return shutil.copytree(workdir, tmp_path / "copied")


@pytest.fixture(scope="module")
def made(workdir):
    report.main([str(workdir)])
    return workdir / "report.html"


def test_a_run_has_its_page_and_its_commands(workdir, capsys):
    report.main([str(workdir)])
    told = capsys.readouterr().out
    assert f"report       {workdir / 'report.html'}" in told
    for command in ("train", "evaluate", "generate", "prepare"):
        assert f"-m block_recurrent.{command}" in told
    found = read(workdir / "report.html")
    for split in ("test", "validation"):
        score = json.loads((workdir / "evaluation" / f"{split}-4.json").read_text())
        assert f"{score['bits_per_byte']:.3f} bits per byte on {split} at step 4" in told
        low, high = score["bits_per_token_interval"]
        assert f"{score['bits_per_token']:.4f}" in found.text and f"{low:.4f} to {high:.4f}" in found.text
        assert f"{split}: {score['documents']} documents, worst first" in found.text
    assert "PATTERN = '2*slide'" in found.text and "config.gin" in found.text
    assert found.labels == [
        "Loss in training",
        "Held-out documents",
        "Bits per token by tokens into the document",
        "Bits per token by tokens of history",
    ]
    assert "Step 4, temperature 0.8, 200 tokens each, after the beginnings of held-out documents" in found.text
    assert len(found.all("b")) == 2


def test_a_page_without_samples_and_of_an_older_version(copied):
    """Evaluations once had totals alone."""
    (copied / "evaluation" / "validation-4.json").unlink()
    file = copied / "evaluation" / "test-4.json"
    totals = {name: value for name, value in json.loads(file.read_text()).items() if not isinstance(value, dict | list)}
    file.write_text(json.dumps(totals))
    (copied / "train.log").unlink()
    report.main([str(copied), "--no_samples", f"--output={copied / 'pages' / 'one.html'}"])
    found = read(copied / "pages" / "one.html")
    assert found.labels == ["Loss in training", "Held-out documents"]
    assert "Samples" not in found.text and f"{totals['bits_per_byte']:.4f}" in found.text


def test_what_keeps_samples_from_being_made_is_told(copied):
    shutil.rmtree(copied / "checkpoints")
    report.main([str(copied)])
    assert "There are no samples: " in read(copied / "report.html").text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["words", "sentencepiece"])
def test_samples_of_every_vocabulary(corpus, tmp_path, kind):
    texts = Path(corpus.folder).parent / "texts"
    if kind == "words":
        vocabulary = tmp_path / "words.txt"
        vocabulary.write_text("<eos>\n<unk>\nalpha\nbeta\ngamma\ndelta\nepsilon\n")
    else:
        vocabulary = tmp_path / "pieces.model"
        train_sentencepiece((file.read_bytes() for file in sorted(texts.glob("train/*"))), 280, vocabulary)
    store, _ = prepare("text_files", tmp_path / "store", vocabulary=str(vocabulary), input=str(texts))
    train.main(arguments(store, tmp_path / "run", "--gin.STEPS=1", "--gin.VOCABULARY=300"))
    found = samples_of(tmp_path / "run", [])
    assert len(found.texts) == 2 and "held-out documents" in found.about
    for sample, name in zip(found.texts, ("00.txt", "02.txt"), strict=True):
        given = sample.text[: sample.given].split()[:-1]  # its last word may be cut
        assert given and (texts / "validation" / name).read_text().split()[: len(given)] == given
        assert sample.given < len(sample.text)
    shutil.rmtree(store.folder)
    assert "after a newline" in samples_of(tmp_path / "run", []).about


def test_runs_side_by_side_show_what_differs(workdir, copied, capsys):
    config = (copied / "config.gin").read_text().replace("DROPOUT = 0.1", "DROPOUT = 0.3")
    (copied / "config.gin").write_text(config)
    report.main([str(copied), str(workdir), str(copied), "--no_samples"])
    assert f"report       {copied.parent / 'side_by_side.html'}" in capsys.readouterr().out
    found = read(copied.parent / "side_by_side.html")
    assert "2 runs side by side" in found.text and "DROPOUT0.30.1" in found.text and "WINDOW" not in found.text
    assert "copied, validation" in found.text and "run, validation" in found.text

    twin = shutil.copytree(workdir, copied.parent / "other" / "copied")
    report.main([str(copied), str(twin), "--no_samples", f"--output={copied.parent / 'twins.html'}"])
    assert str(twin) in read(copied.parent / "twins.html").text


def test_health_is_drawn_by_layer(copied):
    rows = [{"step": s, "health/layers_1/state_norm": 1.0 * s, "health/layers_3/state_norm": 2.0} for s in (1, 2)]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.main([str(copied), "--no_samples"])
    found = read(copied / "report.html")
    assert found.labels[0] == "State norm" and "layers_1" in found.text and "layers_3" in found.text


@pytest.fixture
def comparison(workdir, tmp_path):
    """A folder as `compare` leaves it, with two runs in it."""
    from block_recurrent.comparison import write

    rng, tokens = np.random.default_rng(0), [50] * 20
    scores = dict(finished(tmp_path / "made_up", each, 0, rng.normal(100, 9, 20), tokens) for each in PLANNED)
    output = tmp_path / "compared"
    output.mkdir()
    write(output, ABOUT, scores, dict.fromkeys(PLANNED, COST))
    for each in PLANNED:
        shutil.copytree(workdir, output / f"{each.name}-seed0")
    return output


def test_a_comparison_has_its_table_and_leads_to_its_runs(comparison):
    report.main([str(comparison), "--no_samples"])
    found = read(comparison / "report.html")
    assert found.labels[:2] == ["Bits per byte on test", "Held-out bits per byte in training"]
    assert "Not finished: two-seed2." in found.text and "Their configs are the same." in found.text
    links = [attributes["href"] for attributes in found.all("a") if not attributes["href"].startswith("#")]
    assert links == ["./one-seed0/report.html", "./two-seed0/report.html"]
    for link in links:
        read(comparison / link)


def test_mistakes_are_told(workdir, comparison, copied):
    with pytest.raises(UserError, match=r"is a folder of `compare`, whose page is in it: give it alone"):
        report.main([str(workdir), str(comparison)])
    (comparison / "comparison.json").write_text('{"tokens": 3, "store": "x", "configs": [{}]}')
    with pytest.raises(UserError, match=r"comparison.json is not what `compare` writes \(KeyError"):
        report.main([str(comparison), "--no_samples"])
    (copied / "evaluation" / "test-4.json").write_text('{"of": "test", "step": [')
    with pytest.raises(UserError, match=r"test-4.json is not what `evaluate` writes .*: remove it and evaluate again"):
        report.main([str(copied)])
    (copied / "metrics.jsonl").write_text('7\n"text"\n{"loss": 3}\n')
    with pytest.raises(UserError, match=r"has metrics.jsonl without a row: give the folder of a training run"):
        report.main([str(copied)])


def test_nothing_in_a_folder_becomes_html(workdir, tmp_path):
    """Names, metrics, evaluations, config and comparison of somebody who means harm."""
    name = HOSTILE.replace("/", "_").replace("\x00", "").replace("\ud800", "")
    hostile = shutil.copytree(workdir, tmp_path / name)
    with (hostile / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 4, f"health/{HOSTILE}": 1.0, "loss": HOSTILE, HOSTILE: 10**400}) + "\n")
    for file in (hostile / "evaluation").glob("*.json"):
        score = json.loads(file.read_text())
        score |= {"of": HOSTILE, "changed": [HOSTILE], "by_word": [{**score["by_position"][0], "of": HOSTILE}]}
        score["per_document"]["name"] = [HOSTILE] * len(score["per_document"]["name"])
        file.write_text(json.dumps(score))
    with (hostile / "config.gin").open("a") as config:
        config.write(f"\n# {name}\nX = '{name}'\n")
    for folders in ([hostile], [hostile, workdir]):
        output = tmp_path / "page.html"
        report.main([*map(str, folders), f"--output={output}"])
        found = read(output)
        assert "<script>alert(1)</script>" in found.text, "it is shown as text"


def test_what_is_put_into_an_element_is_escaped():
    made = page(HOSTILE, HOSTILE, {HOSTILE: element("p", HOSTILE, title=HOSTILE)})
    found = Page(made)
    assert "script" not in {tag for tag, _ in found.elements}
    assert [attributes for attributes in found.all("p") if "title" in attributes] == [
        {"title": HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")}
    ]


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # names as long as the picture is wide
def test_drawings_take_any_name_and_the_colour_of_the_page():
    drawn = curves_svg({HOSTILE: ([1, 2], [3, 4])}, HOSTILE, HOSTILE)
    for svg in (drawn, intervals_svg({HOSTILE: {HOSTILE: (1.0, None)}}, HOSTILE)):
        found = Page(svg)
        assert "script" not in {tag for tag, _ in found.elements} and "<script>" in found.text
        assert "currentColor" in svg and "#000000" not in svg and "http" not in svg.replace("http://evil.test", "")


def browser() -> str | None:
    """A browser that starts."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name) and subprocess.run([name, "--version"], capture_output=True).returncode == 0:
            return name
    return None


BROWSER = browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium to open the pages in one")
DARK, LIGHT = "--blink-settings=preferredColorScheme=0", "--blink-settings=preferredColorScheme=1"


class Proxy(socketserver.ThreadingTCPServer):
    """Takes what pages would ask of the network, and gives nothing."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), None)
        self.asked = []

    def finish_request(self, request, _):
        line = request.recv(1000).split(b"\r\n")[0].decode()
        # A browser may open a connection and ask nothing; google.com and googleapis.com it asks with an empty page too.
        if line and ".google" not in line:
            self.asked.append(line)


@pytest.fixture
def proxy():
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


@pytest.fixture
def browse(proxy, tmp_path):
    """Opens a file in a browser whose only network is the proxy; what it printed and what it complained of."""

    def browse(file, *options) -> tuple[str, str]:
        command = [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
            *(f"--proxy-server=127.0.0.1:{proxy.server_address[1]}", "--proxy-bypass-list=<-loopback>"),
            *(*options, Path(file).as_uri()),
        ]
        told = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert told.returncode == 0, told.stderr
        return told.stdout, told.stderr

    return browse


@needs_browser
def test_a_browser_loads_nothing_and_has_no_complaint(made, browse, proxy, tmp_path):
    dom, complaints = browse(made, "--dump-dom")
    assert len(Page(dom).all("svg")) == 4 and Page(dom).all("h1")
    assert "CONSOLE" not in complaints and proxy.asked == []

    (tmp_path / "other.html").write_text("<img src=http://evil.test/x><script>console.error(1)</script>")
    _, complaints = browse(tmp_path / "other.html", "--dump-dom")
    assert "CONSOLE" in complaints and set(proxy.asked) == {"GET http://evil.test/x HTTP/1.1"}, "these would be seen"


MEASURE = """<!doctype html><iframe src="FILE" width="WIDTH" height="3000"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, style = frame.contentWindow.getComputedStyle(page.body), overlaps = [];
  for (const details of page.querySelectorAll("details")) details.open = true;
  for (const svg of page.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [a, p] of texts) for (const [b, q] of texts) {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (p !== q && wide > 2 && high > 4) overlaps.push([a, b]);
    }
  }
  const width = page.documentElement.scrollWidth;
  const result = {width, overlaps, ink: style.color, paper: style.backgroundColor};
  document.querySelector("pre").textContent = JSON.stringify(result);
};
</script>"""


def brightness(colour: str) -> float:
    """Of "rgb(1, 2, 3)"."""
    return float(np.mean([int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]))


@needs_browser
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_a_page_fits_every_screen_in_light_and_dark(made, browse, tmp_path, width, scheme):
    from matplotlib import pyplot

    file = tmp_path / "measure.html"
    file.write_text(MEASURE.replace("FILE", made.as_uri()).replace("WIDTH", str(width)))
    dom, _ = browse(file, "--dump-dom", "--allow-file-access-from-files", scheme)
    found = json.loads(Page(dom).text.strip().partition("const frame")[0])
    assert found["width"] <= width and found["overlaps"] == []
    is_dark = brightness(found["paper"]) < brightness(found["ink"])
    assert is_dark == (scheme == DARK) and abs(brightness(found["paper"]) - brightness(found["ink"])) > 150

    screenshot = tmp_path / "page.png"
    browse(made, f"--screenshot={screenshot}", f"--window-size={width},2000", scheme)
    pixels = pyplot.imread(screenshot)[..., :3].mean(axis=2)
    assert pixels.shape == (2000, width)
    paper = brightness(found["paper"]) / 255
    drawn = np.abs(pixels - paper) > 0.3
    assert 0.005 < drawn.mean() < 0.3, "mostly paper, with something on it"
