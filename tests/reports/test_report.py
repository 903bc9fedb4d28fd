"""The page about runs: complete in one file, safe with any text, and alive in a real browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.commands import report_run
from megatron_lite.config import flatten
from megatron_lite.errors import DataError, StorageError
from megatron_lite.reports import charts, watch_page
from megatron_lite.reports.picture import Stroke, draw, read_losses
from megatron_lite.reports.report import MOST_FOLDERS, REPORT_FILE, page, write_report
from megatron_lite.reports.watched_run import read_runs
from megatron_lite.validation import resolve
from tests.support.launch import TINY, run

NODE = shutil.which("node")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def make_run(folder: Path, lines: int = 40, every: int = 10, **more: Any) -> Path:
    """Write the files of a run: two starts, a dropped update, validations, samples."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(1, lines + 1):
        iteration = index * every
        record = {
            "phase": "training",
            "iteration": iteration,
            "train_iters": lines * every,
            "loss": 5 - index / lines,
        }
        record |= {
            "learning_rate": 1e-3,
            "grad_norm": 2.0 / index,
            "tokens_per_sec_per_gpu": 1e4,
            "step_time_ms": 12.5,
        }
        record |= {
            "consumed_tokens": iteration * 256,
            "run": int(index > lines // 2),
            "time": 1.8e9 + index,
            **more,
        }
        if index == 5:
            record |= {"loss": None, "skip_reason": "iteration 50: loss nan", "save_s": 2.5}
        records.append(record)
        if index % 10 == 0:
            losses = {"loss": 5 - index / lines + 0.1, "averaged_loss": 5 - index / lines}
            records.append(
                {"phase": "validation", "iteration": iteration, "run": record["run"], **losses}
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(
        json.dumps({"num_layers": 3, "lr": 0.001, "data_path": ["a", "b"], "seed": 1234})
    )
    (folder / "exit.json").write_text(
        json.dumps({"exit_code": 0, "status": "done", "message": "training complete"})
    )
    sample = {"prompt": "Once upon", "text": " a time </script><b>"}
    (folder / "samples.jsonl").write_text(
        json.dumps({"iteration": 400, "samples": [sample]}) + "\n"
    )
    (folder / "checkpoints" / "400").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "400" / "manifest.json").write_bytes(b"x" * 1_500_000)
    return folder


class Elements(HTMLParser):
    """Elements of a page by tag, each with its attributes, and the links to anything outside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [
            str(value) for name, value in attrs if name in ("src", "href", "action", "data")
        ]


def data_of(text: str) -> dict[str, Any]:
    """Return the numbers that a page embeds."""
    (embedded,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.S
    )
    data: dict[str, Any] = json.loads(embedded)
    return data


def test_what_a_page_holds(tmp_path: Path) -> None:
    """Curves, marks, samples, times, checkpoints and options; nothing from outside."""
    text = page(read_runs([make_run(tmp_path / "first")]))
    elements = Elements(text)
    assert elements.outside == [] and elements.tags.count("script") == 2
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org)", text)
    data = data_of(text)
    titles = " | ".join(chart["title"] for chart in data["charts"])
    assert titles == "Loss | Learning rate | Gradient norm | Throughput | Time of a step"
    names = [entry["name"] for entry in data["charts"][0]["legend"]]
    assert names == ["training", "validation", "validation, averaged weights"]
    training = data["charts"][0]["series"][0]
    assert len(training["x"]) == 39 and 50 not in training["x"], (
        "a loss that is not finite has no point"
    )
    assert data["runs"] == [
        {"starts": [[210, "start 1, iteration 210"]], "dropped": [[50, "iteration 50: loss nan"]]}
    ]
    for shown in (
        "done",
        "training complete",
        "1.5 MB",
        "0:00:05",
        "checkpoints",
        "--num_layers",
        "Once upon",
    ):
        assert shown in text, shown
    assert (
        "<td>--seed</td><td>1234</td></tr>" in text
        and "<td>--seed</td><td>1234</td><td>" not in text
    ), "the default"


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    """Markup in names, samples, reasons and options ends no element and starts none."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    folder = make_run(tmp_path / evil.replace("/", "_"), skip_reason=evil)
    (folder / "config.json").write_text(json.dumps({evil: evil, "experiment_name": evil}))
    (folder / "exit.json").write_text(json.dumps({"exit_code": 1, "status": evil, "message": evil}))
    (folder / "samples.jsonl").write_text(
        json.dumps({"iteration": evil, "samples": [{"prompt": evil, "text": evil}]})
    )
    text = page(read_runs([folder]))
    elements = Elements(text)
    assert (
        elements.tags.count("script") == 2 and "img" not in elements.tags and elements.outside == []
    )
    assert evil[:100] in data_of(text)["runs"][0]["dropped"][0][1]


def test_several_runs_share_the_charts(tmp_path: Path) -> None:
    """Colors tell runs apart, dashes kinds; runs of the same name get their folders."""
    folders = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    text = page(read_runs(folders))
    loss = data_of(text)["charts"][0]
    assert {entry["name"].partition(":")[0] for entry in loss["legend"]} == {"a/run", "b/run"}
    assert {entry["color"] for entry in loss["legend"]} == {0, 1}
    assert len({entry["dash"] for entry in loss["legend"]}) == 3


def test_best_losses_share_a_row(tmp_path: Path) -> None:
    """Wherever each run had its own."""
    folders = [make_run(tmp_path / "short"), make_run(tmp_path / "long", lines=80)]
    text = page(read_runs(folders))
    assert (
        "<tr><td>best validation loss</td><td>4.1000 at 400</td><td>4.1000 at 800</td></tr>" in text
    )
    assert "<b>4.1000</b><span>best validation loss, at 400</span>" in page(read_runs(folders[:1]))


def test_the_newest_checkpoints_and_samples_are_shown(tmp_path: Path) -> None:
    """Of many; and a sample whose text repeats its prompt is shown whole."""
    folder = make_run(tmp_path / "run")
    sample = {"prompt": "la ", "text": "la la land"}
    (folder / "samples.jsonl").write_text(json.dumps({"iteration": 1, "samples": [sample]}))
    for iteration in range(1000, 1000 + MOST_FOLDERS):
        shutil.copytree(folder / "checkpoints" / "400", folder / "checkpoints" / str(iteration))
    text = page(read_runs([folder]))
    shown = {
        iteration: f"checkpoints/{iteration}<" in text
        for iteration in (999 + MOST_FOLDERS, 1000, 400)
    }
    assert list(shown.values()) == [True, True, False] and "<b>la </b>la la land</div>" in text


@pytest.mark.parametrize("inside", ["config.json", "400/manifest.json"])
def test_the_best_export_is_shown(tmp_path: Path, inside: str) -> None:
    """First, in the page and in watch_run, in either format of exports."""
    folder = make_run(tmp_path / "run")
    for path in ("best/" + inside, "200/config.json"):
        (folder / "export" / path).parent.mkdir(parents=True)
        (folder / "export" / path).write_text("{}")
    (run,) = read_runs([folder])
    rows = re.findall(
        r"<td>export</td><td>([^<]*)</td><td>0.0 MB</td><td>([^<]*)</td>", page([run])
    )
    assert rows == [("best", str(Path("export/best", inside).parent)), ("200", "export/200")]
    (line,) = (
        line
        for line in watch_page.page(run, run.exports[0].time_s, 80, True)
        if line.startswith("exports")
    )
    assert line == "exports: best (0:00:00 ago), 200 (0:00:00 ago)"


def test_several_runs_leave_their_folders_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their page stands where the command runs, under a name that no run uses; that of one run is
    in its folder."""
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    monkeypatch.chdir(folders[0])
    assert report_run.main(["../b"]) == 0 and "<h1>b</h1>" in (folders[1] / REPORT_FILE).read_text()
    assert report_run.main([".", "../b"]) == 0
    assert "<h1>2 runs</h1>" in Path("reports.html").read_text() and not Path(REPORT_FILE).exists()
    assert "<h1>b</h1>" in (folders[1] / REPORT_FILE).read_text()


def test_long_runs_make_short_pages(tmp_path: Path) -> None:
    """20,000 lines and 16 runs of 500 lines stay below 2 MB, with smooth curves before raw ones."""
    text = page(read_runs([make_run(tmp_path / "long", lines=20_000)]))
    loss = data_of(text)["charts"][0]["series"]
    assert len(text) < 1e6 and [
        series["raw"] for series in data_of(text)["charts"][2]["series"]
    ] == [True, False]
    assert loss[0]["raw"] and not loss[1]["raw"] and len(loss[0]["x"]) <= 2000
    many = [make_run(tmp_path / f"run{number}", lines=500) for number in range(16)]
    assert len(page(read_runs(many))) < 2e6


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run, no numbers, no place for the page."""
    with pytest.raises(DataError, match="there is no folder"):
        read_runs([tmp_path / "nowhere"])
    assert report_run.main([str(tmp_path)]) == 3
    with pytest.raises(StorageError, match="choose another --output"):
        write_report([make_run(tmp_path / "run")], tmp_path / "no" / "folder" / "page.html")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_damaged_files_beside_the_metrics_do_no_harm(tmp_path: Path) -> None:
    """Anything may stand in exit.json, config.json and samples.jsonl."""
    folder = make_run(tmp_path / "run")
    for name in ("exit.json", "config.json", "samples.jsonl"):
        for content in (
            "",
            "[1]",
            "{",
            '{"samples": [3, {}], "exit_code": "x", "message": {}}',
            "\xff",
        ):
            (folder / name).write_text(content, encoding="latin-1")
            assert "<h1>run</h1>" in page(read_runs([folder]))
        (folder / name).unlink()


def test_a_run_leaves_its_page(tmp_path: Path) -> None:
    """At its end, with the pauses of the run; with --report=0 there is none."""
    flags = [
        *TINY,
        "--device=cpu",
        "--checkpoint_interval=2",
        "--validation_iters=1",
        "--validation_interval=2",
    ]
    outcome = run([*flags, f"--experiment_dir={tmp_path}/run"])
    assert outcome.codes == [0], outcome.output
    text = (tmp_path / "run" / REPORT_FILE).read_text("utf-8")
    assert (
        "training complete" in text
        and "<td>checkpoints</td>" in text
        and "<td>validations</td>" in text
    )
    run([*flags, "--report=0", f"--experiment_dir={tmp_path}/other"])
    assert not (tmp_path / "other" / REPORT_FILE).exists()


# The parts of a document that report.js uses, 310 pixels wide as on a phone; prints what each chart
# shows.
DOCUMENT = """
const make = (tag) => ({ tag, attributes: {}, kids: [], style: {}, clientWidth: 310, textContent: "",
  addEventListener() {}, replaceChildren() { this.kids = []; }, appendChild(kid) { this.kids.push(kid); },
  setAttribute(name, value) { this.attributes[name] = value; }, querySelectorAll: () => [],
  querySelector(name) { return this[name] = this[name] || make(name); } });
const data = require("fs").readFileSync(0, "utf8"), figures = JSON.parse(data).charts.map(() => make("figure"));
globalThis.window = { addEventListener() {} };
globalThis.document = { getElementById: () => ({ textContent: data }), createElementNS: (_, tag) => make(tag),
  querySelectorAll: (name) => name === "figure.chart" ? figures : [], documentElement: { dataset: {} } };
require(process.argv[1]);
console.log(JSON.stringify(figures.map((figure) => {
  const all = figure.svg.kids.map((kid) => ({ ...kid.attributes, tag: kid.tag, words: kid.textContent }));
  const texts = all.filter((one) => one.tag === "text"), curves = all.filter((one) => one.class === "curve");
  return { down: texts.filter((one) => one.x === 52), across: texts.filter((one) => one.y === 224),
    widths: curves.map((one) => +one.style.split(":").pop()), readout: figure[".readout"].textContent };
})));
"""


def drawn_on_a_phone(folders: list[Path]) -> list[dict[str, Any]]:
    """Return the ticks, the widths of the curves and the read-out of each chart, as report.js draws
    them."""
    assert NODE is not None
    script = Path(charts.__file__).parent / "page" / "report.js"
    command = [NODE, "-e", DOCUMENT, str(script)]
    numbers = json.dumps(charts.page_data(read_runs(folders)))
    done = subprocess.run(command, input=numbers, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(NODE is None, reason="no node here")
@pytest.mark.parametrize(("lines", "every"), [(34, 10), (40, 25_000), (999, 1001), (2, 1)])
def test_charts_on_a_phone(tmp_path: Path, lines: int, every: int) -> None:
    """At least two ticks whose words do not touch, also on a log axis; the strip below has the last
    numbers."""
    loss, _, norm, *_ = drawn_on_a_phone([make_run(tmp_path / "run", lines=lines, every=every)])
    ends = [
        (tick["x"] - 3.5 * len(tick["words"]), tick["x"] + 3.5 * len(tick["words"]))
        for tick in loss["across"]
    ]
    assert len(ends) >= 2 and all(end <= start for (_, end), (start, _) in pairwise(ends)), loss[
        "across"
    ]
    heights = sorted(tick["y"] for tick in norm["down"])
    assert len(heights) >= 2 and all(after - y >= 14 for y, after in pairwise(heights)), norm[
        "down"
    ]
    assert loss["readout"].startswith(f"iteration {lines * every:,}: training 4"), loss["readout"]


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_zero_has_no_sign(tmp_path: Path) -> None:
    """The first tick of a run whose first validation is before the first iteration, and of rates
    that end at 0."""
    folder = make_run(tmp_path / "run", learning_rate=0.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "validation", "iteration": 0, "loss": 6.0, "run": 1}\n')
    for drawn in drawn_on_a_phone([folder]):
        assert drawn["across"][0]["words"] == "0" and all(
            tick["words"] != "-0" for tick in drawn["down"]
        ), drawn


def test_equal_curves_show_beside_each_other(tmp_path: Path) -> None:
    """In the page and the picture the line below is wider, also if the later run is shorter; others
    are as ever."""
    folders = [
        make_run(tmp_path / name, lines=lines) for name, lines in (("a", 40), ("b", 40), ("c", 30))
    ]
    loss, rate = charts.page_data(read_runs(folders))["charts"][:2]
    assert [series["widen"] for series in rate["series"]] == [4.0, 2.5, 1.0]
    trained = [
        series["widen"] for series in loss["series"] if series["name"].endswith(": training")
    ]
    assert trained == [2.5, 1.0, 1.0], "equal losses of a and b; the run of 30 lines has others"
    shapes = draw(read_losses(folders), []).shapes
    strokes = [shape for shape in shapes if isinstance(shape, Stroke) and not shape.filled]
    assert [stroke.width for stroke in strokes[-3:]] == [6.0, 3.75, 1.5]
    if NODE is not None:
        assert drawn_on_a_phone(folders)[1]["widths"] == [6.4, 4.0, 1.6]


def test_options_that_follow_from_others_are_no_difference(tmp_path: Path) -> None:
    """The table has what was given; the list of all marks what was derived, and a damaged file is
    shown as it is."""
    words = "--batch_size=8 --micro_batch_size=2 --train_iters=9 --dataset_source=random --hidden_size=128"
    config = flatten(resolve(parse(words.split()).config, 2))
    folder = make_run(tmp_path / "run")
    (folder / "config.json").write_text(json.dumps(config))
    shown = re.findall(
        r"<td>--(\w+)</td><td>([^<]*)</td><td>([^<]*)</td>", page(read_runs([folder]))
    )
    assert [f"--{name}={value}" for name, value, _ in shown] == sorted(
        words.split(), key=lambda word: [*config].index(word[2:].partition("=")[0])
    )
    text = page(read_runs([folder]))
    for row in (
        "ffn_hidden_size</td><td>512 (derived)",
        "seed</td><td>1234<",
        "window_size</td><td>(none)",
    ):
        assert f"<td>--{row}" in text, row
    (folder / "config.json").write_text(json.dumps(config | {"batch_size": {"a": 1}}))
    assert "<td>--batch_size</td><td>{" in page(read_runs([folder]))


@pytest.mark.parametrize("older", [True, False])
def test_throughput_is_that_of_all_ranks(tmp_path: Path, older: bool) -> None:
    """The chart has the total; that of a rank, by its name, stands in only for an older run without
    the total."""
    text = page(
        read_runs([make_run(tmp_path / "run", **({} if older else {"tokens_per_sec": 4e4}))])
    )
    (chart,) = (chart for chart in data_of(text)["charts"] if chart["title"] == "Throughput")
    shown = [(series["name"], series["y"][0]) for series in chart["series"]]
    assert chart["unit"] == "tokens/s" and shown == (
        [("per rank", 1e4)] if older else [("all ranks", 4e4)]
    )
    assert "<b>10,000</b><span>tokens/s per rank, median</span>" in text
    assert ("<b>40,000</b><span>tokens/s, median</span>" in text) is not older


PROBE = """
<script>
window.onerror = (message) => { document.body.dataset.error = message; };
</script>
"""
ACT = """
<script>
const svg = document.querySelector("figure.chart svg");
const box = svg.getBoundingClientRect();
const send = (kind, share, pointerType = "mouse") => svg.dispatchEvent(new PointerEvent(kind, {
  bubbles: true, pointerType, clientX: box.left + box.width * share, clientY: box.top + 100, pointerId: 1 }));
send("pointermove", 0.5);
document.body.dataset.readout = document.querySelector(".readout").textContent;
send("pointerleave", 0.5);
document.body.dataset.left = document.querySelector(".readout").textContent;
for (const kind of ["pointerdown", "pointerup", "pointerleave"]) send(kind, 0.8, "touch");
document.body.dataset.tapped = document.querySelector(".readout").textContent;
document.body.dataset.selected = svg.querySelectorAll(".selection").length;
send("pointerdown", 0.4); send("pointermove", 0.6); send("pointerup", 0.6);
document.body.dataset.ticks = [...svg.querySelectorAll("text")].map((text) => text.textContent).join(" ");
document.body.dataset.reset = [...document.querySelectorAll(".reset")].filter((button) => !button.hidden).length;
document.querySelector(".reset").click();
document.body.dataset.after = [...svg.querySelectorAll("text")].map((text) => text.textContent).join(" ");
const frame = svg.getBoundingClientRect();
document.body.dataset.cut = [...svg.querySelectorAll("text")].filter((text) => {
  const place = text.getBoundingClientRect();
  return place.left < frame.left || place.right > frame.right + 0.5;
}).length;
const rates = document.querySelectorAll("figure.chart svg")[1].querySelectorAll("text[text-anchor=end]");
document.body.dataset.rates = [...rates].map((text) => text.textContent).join(" ");
document.querySelector(".log").click();
document.querySelector(".legend button").click();
document.body.dataset.curves = svg.querySelectorAll("path.curve").length;
</script>
"""


@pytest.mark.guides
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_in_a_real_browser(tmp_path: Path) -> None:
    """No script error; curves are drawn; read-out, zoom, reset, log scale and the legend work."""
    assert BROWSER is not None
    text = page(read_runs([make_run(tmp_path / "run", every=25_000)]))
    text = text.replace("<body>", f"<body>{PROBE}").replace("</body>", f"{ACT}</body>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1000,900",
        "--virtual-time-budget=3000",
    ]
    command = [
        BROWSER,
        *flags,
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
        f"file://{tmp_path}/page.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    body = re.search(r"<body([^>]*)>", done.stdout)
    assert body is not None, done.stderr[-2000:]
    seen = dict(re.findall(r'data-(\w+)="([^"]*)"', body[1]))
    assert "error" not in seen, seen
    assert 'data-drawn="5"' in done.stdout and done.stdout.count('class="curve') >= 6
    assert re.match(
        r"iteration [\d,]+: training [\d.]+, validation [\d.]+ \(at [\d,]+\), ", seen["readout"]
    ), seen
    assert seen["left"].startswith("iteration 1,000,000: ") and seen["selected"] == "0", (
        "the last numbers again"
    )
    assert seen["tapped"].startswith("iteration 8") and seen["tapped"] != seen["readout"], (
        "that of a tap stays"
    )
    assert seen["reset"] == "5" and "1M" not in seen["ticks"] and seen["after"].endswith("1M"), seen
    assert seen["cut"] == "0", "all text is inside of the picture"
    assert set(seen["rates"].split()) <= {
        "0.0009",
        "0.00095",
        "0.001",
        "0.00105",
        "0.0011",
        "1M",
    }, seen
    assert seen["curves"] == "2", "the training curve is hidden"
