"""scripts/check_mup.py: its sums of rows against lines and parabolas, and its command line."""

import math

import pytest

from scripts.check_mup import best, main, slope


def test_rows_are_summed_up_by_lines_and_parabolas() -> None:
    """The exponent of a power law; the minimum of a parabola over log(rate), off the grid."""
    widths = [64, 128, 512]
    assert slope(widths, [3 * width**-0.7 for width in widths]) == pytest.approx(-0.7)
    rates = [0.001, 0.002, 0.004, 0.008]
    losses = [2 + math.log(rate / 0.0033) ** 2 for rate in rates]
    assert best(rates, losses) == pytest.approx(0.0033)
    assert math.isnan(best(rates, [1.0, 2.0, 3.0, 4.0]))


def test_it_prints_slopes_or_best_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """The first block's output moves alike at both widths with muP, and without far more in the
    wider model."""
    flags = ["--", "--dataset_source=random", "--vocab_size=64"]

    def slopes(*more: str) -> dict[str, float]:
        main(["--widths", "64", "256", *flags, *more])
        title, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
        assert title == ["64", "256", "slope"]
        return {name: float(numbers[-1]) for name, *numbers in rows}

    with_mup, without = slopes(), slopes("--mup=0")
    blocks = [f"blocks.{index}{part}" for index in (0, 1) for part in (".attention", ".mlp", "")]
    assert [*with_mup] == ["embedding", *blocks, "logits"]
    assert abs(with_mup["blocks.0"]) < 0.25 and without["blocks.0"] > 1.0
    main(["--widths", "16", "--rates", "0.1", "0.2", *flags, "--train_iters=4"])
    title, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert title == ["0.1", "0.2", "best"] and row[:3] == ["loss", "at", "16"]
