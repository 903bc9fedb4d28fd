"""scripts/plot_run.py: a picture and sparklines of one run or several, with and without
matplotlib."""

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_lite.commands import plot_run as script
from megatron_lite.reports.charts import LOSSES, POINTS, draw_chart
from megatron_lite.reports.picture import (
    PALETTE,
    Stroke,
    Words,
    draw,
    read_losses,
    round_ticks,
    to_figure,
    to_svg,
)

pytestmark = pytest.mark.guides


def write_run(folder, num_lines, validation=True, averaged=0.0, **more):
    records = []
    for index in range(num_lines):
        iteration = 1 + 10 * index
        loss = 2 + 5 / (1 + index)
        records.append(
            {
                "phase": "training",
                "iteration": iteration,
                "loss": loss,
                "learning_rate": 1e-3,
                **more,
            }
        )
        if validation and index % 5 == 0:
            losses = {
                "loss": loss + 0.1,
                **({"averaged_loss": loss + averaged} if averaged else {}),
            }
            records.append({"phase": "validation", "iteration": iteration, **losses})
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def no_matplotlib(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )


@pytest.mark.parametrize("num_lines", [1, 400])
def test_picture_with_matplotlib(num_lines, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run = write_run(tmp_path / "run_$x^2$", num_lines, consumed_tokens=12_345)
    assert script.main([str(run), "--baseline", "unigram entropy=5.5", "--baseline=a=b=6"]) == 0
    picture = (run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert f"loss curve: {run / 'loss.png'}" in capsys.readouterr().out


def test_learning_rate_axis_can_be_read(tmp_path):
    """At least three round numbers that all differ, from zero to near the peak."""
    run = write_run(tmp_path / "run", 0)
    for peak in (0.0, 3e-5, 1e-4, 6e-4, 9.9e-4, 4e-3, 0.0101, 1.0):
        line = {"phase": "training", "loss": 2.0}
        lines = [line | {"iteration": 1 + i, "learning_rate": peak * i / 40} for i in range(41)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = [shape for shape in draw(read_losses([run]), []).shapes if isinstance(shape, Words)]
        shown = [text.text for text in words if 436 < text.y < 536 and text.anchor == "end"]
        values = [float(text) for text in shown]
        assert 3 <= len(values) <= 7 and len(set(values)) == len(values) and values[0] == 0, shown
        assert values[-1] >= 0.75 * peak and all(len(text) <= 6 for text in shown), shown


@pytest.mark.parametrize("num_lines", [1, 40])
def test_matplotlib_draws_what_the_svg_shows(num_lines, tmp_path):
    """Every line, area and word of the one drawing, in its color and place; formulas are text."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawing = draw(
        read_losses([write_run(tmp_path / "run_$x^2$", num_lines, averaged=0.1)]), [("_a=$b", 5.5)]
    )
    figure = to_figure(drawing)
    figure.canvas.draw()
    (axes,) = figure.axes
    words = [shape for shape in drawing.shapes if isinstance(shape, Words)]
    strokes = [shape for shape in drawing.shapes if isinstance(shape, Stroke)]
    assert [(t.get_text(), t.get_color(), *t.get_position()) for t in axes.texts] == [
        (word.text, word.color, word.x, word.y) for word in words
    ]
    assert [line.get_color() for line in axes.lines] == [
        one.color for one in strokes if not one.filled
    ]
    assert len(axes.patches) == sum(one.filled for one in strokes) > 0
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, drawing.width), (drawing.height, 0))


@pytest.mark.parametrize(
    ("num_lines", "validation"), [(1, True), (2, True), (40, False), (400, True)]
)
def test_svg_without_matplotlib(num_lines, validation, tmp_path, capsys, no_matplotlib):
    run = write_run(tmp_path / "a & <b>", num_lines, validation)
    assert script.main([str(run), "--output", str(tmp_path / "new"), "--baseline", "x<y=5.5"]) == 0
    out = capsys.readouterr().out
    assert (
        "; for a PNG: python -m pip install matplotlib" in out
        and f"loss curve: {tmp_path / 'new/loss.svg'}" in out
    )
    root = ElementTree.fromstring((tmp_path / "new/loss.svg").read_text(encoding="utf-8"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert (
        texts[0] == "a & <b>"
        and "x<y: 5.500" in texts
        and any("training" in text for text in texts)
    )
    assert any("validation" in text for text in texts) is validation
    numbers = [
        float(pair.split(",")[1])
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
        for pair in line.get("points").split()
    ]
    assert all(0 <= number <= 600 for number in numbers)  # inside the picture


def test_losses_that_are_not_finite_are_left_out(tmp_path, no_matplotlib):
    run = write_run(tmp_path / "run", 3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"phase": "training", "iteration": 99, "loss": null}\n{"phase": "training", "iter'
        )
    (drawn, _) = draw_chart(LOSSES, read_losses([run]))
    assert drawn.curve.iterations.tolist() == [1, 11, 21]
    assert script.main([str(run)]) == 0


def test_no_run_and_no_loss_yet_are_clear(tmp_path, capsys):
    assert script.main([str(tmp_path / "nowhere")]) == 3
    (tmp_path / "metrics.jsonl").write_text("")
    assert script.main([str(tmp_path)]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert "there is no folder" in first and "nowhere" in first and "no record yet" in second


def test_an_unwritable_output_is_one_clear_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    (tmp_path / "file").write_text("")
    assert script.main([str(run), "--output", str(tmp_path / "file/loss.png")]) == 8
    assert "--output" in capsys.readouterr().err
    if importlib.util.find_spec("matplotlib"):
        assert script.main([str(run), "--output", str(tmp_path / "loss.docx")]) == 2
        assert "loss.docx" in capsys.readouterr().err


def test_round_ticks():
    assert round_ticks(0.3, 5.9, 6) == [1, 2, 3, 4, 5]
    assert round_ticks(0, 3e-4, 2) == pytest.approx([0, 2e-4])


def test_averaged_weights_are_drawn(tmp_path, capsys, no_matplotlib):
    """The loss of averaged weights has a line, a name and a sparkline of its own."""
    run = write_run(tmp_path / "run", 40, averaged=0.05)
    assert script.main([str(run)]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()][-4:-1] == [
        ["training", "loss", "7.000"],
        ["validation", "loss", "7.100"],
        ["averaged", "weights", "loss"],
    ]
    root = ElementTree.fromstring((run / "loss.svg").read_text(encoding="utf-8"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert (
        texts[2:5] == ["training", "validation", "averaged weights"]
        and "averaged weights 2.189" in texts[1]
    )


@pytest.mark.parametrize("with_matplotlib", [False, True])
def test_runs_are_laid_over_each_other(with_matplotlib, tmp_path, capsys, request):
    """Every run has its color in both panels, and once its name; runs of one name are told apart by
    their parents."""
    if with_matplotlib:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    else:
        request.getfixturevalue("no_matplotlib")
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
    first = write_run(tmp_path / "a" / "$x^2$_run", 40, averaged=0.1)
    second = write_run(tmp_path / "b" / "$x^2$_run", 400)
    third = write_run(tmp_path / "_<c>\x1b", 3, validation=False)
    runs = [str(run) for run in (first, second, third)]
    request.getfixturevalue("monkeypatch").chdir(tmp_path)
    assert script.main(runs) == 0
    out = capsys.readouterr().out
    output = Path("losses.png" if with_matplotlib else "losses.svg")
    assert (
        output.is_file()
        and not any(path.match("loss*") for path in first.iterdir())
        and f"loss curve: {output}" in out
        and "\x1b" not in out
    )
    names = ["a/$x^2$_run", "b/$x^2$_run", "_<c>?"]
    assert [
        line for line in out.splitlines() if "loss" not in line and "matplotlib" not in line
    ] == names
    shapes = draw(read_losses([first, second, third]), []).shapes
    texts = [shape.text for shape in shapes if isinstance(shape, Words)]
    assert texts[:5] == [
        "3 runs",
        "training solid · validation dashed · averaged weights dotted",
        *names,
    ]
    strokes = [shape for shape in shapes if isinstance(shape, Stroke) and not shape.filled]
    drawn = [stroke.color for stroke in strokes if stroke.color in PALETTE]
    assert [set(drawn[:-3]), set(drawn[-3:])] == [set(PALETTE[:3])] * 2


def test_a_long_title_has_its_line_for_itself(tmp_path):
    """The name of the axis stands below the title, where the words of no run reach it."""
    run = write_run(
        tmp_path / ("a_rather_long_name_of_a_run_" * 2),
        40,
        averaged=0.1,
        consumed_tokens=123_456_789,
    )
    words = [shape for shape in draw(read_losses([run]), []).shapes if isinstance(shape, Words)]
    (axis,) = (one for one in words if one.text == "loss, nats per token")
    beside = [one for one in words if one.y == axis.y and one is not axis]
    assert words[0].y not in (axis.y, *(one.y for one in words[1:])) and len(beside) == 1
    assert beside[0].x + 7 * len(beside[0].text) < axis.x - 7 * len(axis.text)


def test_long_runs_give_small_pictures(tmp_path):
    """A line has a bounded number of points, which keep the extremes."""
    run = write_run(tmp_path / "run", 20_000, validation=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "training", "iteration": 300000, "loss": 50.0}\n')
    ((raw, smoothed),) = (drawn.lines for drawn in draw_chart(LOSSES, read_losses([run])))
    assert max(len(raw), len(smoothed)) <= POINTS and raw.values.max() == 50.0
    assert len(to_svg(draw(read_losses([run]), []))) < 120_000


def test_too_many_runs_are_a_usage_error(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    assert script.main([str(run)] * (len(PALETTE) + 1)) == 2
    assert "up to 8" in capsys.readouterr().err
