"""scripts/plot_run.py: a picture and a sparkline from metrics.jsonl, with and without matplotlib."""

import importlib.util
import json
import xml.etree.ElementTree as ElementTree

import pytest

from tests.support.loading import loaded

pytestmark = pytest.mark.guides


@pytest.fixture(scope="module")
def script():
    with loaded("plot_run") as module:
        yield module


def write_run(folder, num_lines, validation=True, **more):
    records = []
    for index in range(num_lines):
        iteration = 1 + 10 * index
        loss = 2 + 5 / (1 + index)
        records.append({"phase": "training", "iteration": iteration, "loss": loss, "learning_rate": 1e-3, **more})
        if validation and index % 5 == 0:
            records.append({"phase": "validation", "iteration": iteration, "loss": loss + 0.1})
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def no_matplotlib(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )


@pytest.mark.parametrize("num_lines", [1, 2, 40, 400])
def test_picture_with_matplotlib(num_lines, tmp_path, script, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run = write_run(tmp_path / "run_$x^2$", num_lines, consumed_tokens=12_345)
    assert script.main([str(run), "--baseline", "unigram entropy=5.5", "--baseline=a=b=6"]) == 0
    picture = (run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert f"loss curve: {run / 'loss.png'}" in capsys.readouterr().out


@pytest.mark.parametrize("peak", [0.0, 3e-5, 1e-4, 6e-4, 9.9e-4, 4e-3, 0.0101, 1.0])
def test_learning_rate_axis_can_be_read(peak, tmp_path, script, no_matplotlib, monkeypatch):
    """At least three round numbers that all differ, from zero to near the peak, in both kinds of picture."""
    run = write_run(tmp_path / "run", 0)
    lines = [{"phase": "training", "iteration": 1 + i, "loss": 2.0, "learning_rate": peak * i / 40} for i in range(41)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = script.read_curves(run, [])
    root = ElementTree.fromstring(script.draw_svg(curves))
    below = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if 420 < float(text.get("y")) < 520]
    svg = [text.text for text in below if text.get("text-anchor") == "end"]
    monkeypatch.undo()
    ticks = [svg]
    if importlib.util.find_spec("matplotlib"):
        figure = script.draw_with_matplotlib(curves)
        figure.canvas.draw()
        rate_axes = figure.axes[1]
        low, high = rate_axes.get_ylim()
        ticks.append([t.get_text() for t in rate_axes.get_yticklabels() if low <= t.get_position()[1] <= high])
    for shown in ticks:
        values = [float(text) for text in shown]
        assert 3 <= len(values) <= 7 and len(set(values)) == len(values) and values[0] == 0, shown
        assert values[-1] >= 0.75 * peak and all(len(text) <= 6 for text in shown)


@pytest.mark.parametrize("num_lines", [1, 2, 40, 400])
@pytest.mark.parametrize("validation", [False, True])
def test_svg_without_matplotlib(num_lines, validation, tmp_path, script, capsys, no_matplotlib):
    run = write_run(tmp_path / "a & <b>", num_lines, validation)
    assert script.main([str(run), "--output", str(tmp_path / "new/loss.png"), "--baseline", "x<y=5.5"]) == 0
    out = capsys.readouterr().out
    assert "matplotlib is not installed" in out and f"loss curve: {tmp_path / 'new/loss.svg'}" in out
    root = ElementTree.fromstring((tmp_path / "new/loss.svg").read_text(encoding="utf-8"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a & <b>" and "x<y: 5.500" in texts and any("training" in text for text in texts)
    assert any("validation" in text for text in texts) is validation
    numbers = [
        float(pair.split(",")[1])
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
        for pair in line.get("points").split()
    ]
    assert all(0 <= number <= 600 for number in numbers)  # inside the picture


def test_losses_that_are_not_finite_are_left_out(tmp_path, script, no_matplotlib):
    run = write_run(tmp_path / "run", 3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "training", "iteration": 99, "loss": null}\n{"phase": "training", "iter')
    curves = script.read_curves(run, [])
    assert [iteration for iteration, _ in curves.training] == [1, 11, 21]
    assert script.main([str(run)]) == 0


def test_no_run_and_no_loss_yet_are_clear(tmp_path, script, capsys):
    assert script.main([str(tmp_path / "nowhere")]) == 3
    (tmp_path / "metrics.jsonl").write_text("")
    assert script.main([str(tmp_path)]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert "nowhere" in first and "No such file" in first and "no record yet" in second


def test_an_unwritable_output_is_one_clear_line(tmp_path, script, capsys):
    run = write_run(tmp_path / "run", 3)
    (tmp_path / "file").write_text("")
    assert script.main([str(run), "--output", str(tmp_path / "file/loss.png")]) == 8
    assert "--output" in capsys.readouterr().err
    if importlib.util.find_spec("matplotlib"):
        assert script.main([str(run), "--output", str(tmp_path / "loss.docx")]) == 2
        assert "loss.docx" in capsys.readouterr().err


@pytest.mark.parametrize("baseline", ["x", "=3", "x=", "x=nan", "x=inf"])
def test_bad_baselines_are_usage_errors(baseline, script):
    with pytest.raises(SystemExit) as error:
        script.main([".", "--baseline", baseline])
    assert error.value.code == 2


def test_sparkline(script):
    assert script.sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8, unicode=True) == "█▇▆▅▄▃▂▁"
    assert script.sparkline([3.0], 60, unicode=True) == "▁"
    assert script.sparkline([1.0] * 1000, 60, unicode=False) == "_" * 60
    assert len(script.sparkline(list(range(61)), 60, unicode=True)) == 60


def test_smoothing_keeps_a_straight_line(script):
    """No lag and no bias away from the ends, where the average is one-sided."""
    line = [(index, 3.0 - 0.001 * index) for index in range(1000)]
    assert script.smooth(line)[3:-3] == [(index, pytest.approx(value)) for index, value in line[3:-3]]
    assert script.smooth(line[:20]) == [(index, pytest.approx(value)) for index, value in line[:20]]


def test_round_ticks(script):
    assert script.round_ticks(0.3, 5.9, 6) == [1, 2, 3, 4, 5]
    assert script.round_ticks(0, 3e-4, 2) == pytest.approx([0, 2e-4])
