"""What `make` writes: all files, the drawn data, the same bytes again; and what is visible in the pictures."""

import subprocess
import sys
from pathlib import Path

import jinja2
import matplotlib as mpl
import pandas as pd
import pytest
import yaml
from docutils.core import publish_doctree
from PIL import Image

from megagraph.config import FigureConfig, ModelConfig, ParallelConfig, SamplingConfig, TrainConfig, load_experiment
from megagraph.figures import fig08b, fig09a, fig09b, fig10, style, table01
from megagraph.figures.registry import FIGURES

ROOT = Path(__file__).parents[3]


def test_every_figure_has_its_files(drawn):
    names = {path.name for path in (drawn.results / "figures").iterdir()}
    expected = {f"{name}.{kind}" for name in FIGURES for kind in ("pdf", "png", "csv")} | {"table1.md", "table1.tex"}
    assert names == expected


def test_a_second_call_gives_the_same_bytes(drawn):
    for name, before in drawn.first.items():
        assert (drawn.results / "figures" / name).read_bytes() == before, name


@pytest.mark.parametrize("name", list(FIGURES))
def test_pictures_have_the_papers_width_and_no_dates(drawn, name):
    folder = drawn.results / "figures"
    width = style.PAGE_INCHES if name == "table1" else style.COLUMN_INCHES
    with Image.open(folder / f"{name}.png") as image:
        assert image.width == round(width * 300)
        assert "Software" not in image.info
    pdf = (folder / f"{name}.pdf").read_bytes()
    assert b"CreationDate" not in pdf
    assert b"/Subtype /Type3" not in pdf


def test_the_csv_is_the_frame(drawn):
    written = pd.read_csv(drawn.results / "figures" / "table1.csv")
    frame = table01.collect(drawn.results, FigureConfig(runs=("single", "cp", "even", "uneven")))
    pd.testing.assert_frame_equal(written, pd.read_csv(_as_csv(frame)), check_exact=True)


def _as_csv(frame):
    from io import StringIO

    return StringIO(frame.to_csv(index=False))


def test_table1_bolds_only_the_best(drawn):
    markdown = (drawn.results / "figures" / "table1.md").read_text()
    latex = (drawn.results / "figures" / "table1.tex").read_text()
    assert [cell for cell in markdown.split() if cell.startswith("**")] == ["**0.0160**", "**0.0160**", "**2.20**"]
    assert latex.count(r"\textbf{") == 3 and r"\textbf{2.20}" in latex
    assert r"\toprule" in latex and "(1,2,1)" in latex


def test_estimated_and_measured_plans_never_share_a_marker(drawn):
    frame = pd.read_csv(drawn.results / "figures" / "fig10.csv")
    lines = [line for line in fig10.draw(frame).axes[0].lines if line.get_marker() not in ("None", None, "*", "x")]
    hollow = [line for line in lines if line.get_markerfacecolor() == "none" and line.get_markersize() < 9]
    solid = [line for line in lines if line.get_markerfacecolor() != "none"]
    assert sum(len(line.get_xdata()) for line in hollow) == (frame["source"] == "estimated").sum()
    shown = ((frame["source"] == "measured") & (frame["status"] == "ok")).sum()
    assert sum(len(line.get_xdata()) for line in solid) == shown


def test_a_plan_out_of_memory_is_a_cross_and_a_far_limit_is_named(drawn):
    frame = pd.read_csv(drawn.results / "figures" / "fig10.csv")
    axes = fig10.draw(frame).axes[0]
    assert sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "x") == 1
    axes = fig10.draw(frame.assign(limit_bytes=8e9)).axes[0]
    assert any("limit 8,000 MB" in text.get_text() for text in axes.texts)


def test_the_worst_cell_is_named(drawn):
    frame = pd.read_csv(drawn.results / "figures" / "fig9a.csv")
    worst = frame.loc[frame["error_percent"].abs().idxmax()]
    text = fig09a.draw(frame).axes[0].texts[0].get_text()
    assert f"b={worst['batch']} L={worst['layers']} H={worst['heads']} D={worst['hidden']}" in text
    assert f"{frame['mape_percent'].iloc[0]:.2f} %" in text


def test_the_break_is_drawn_where_it_was_fitted(drawn, make):
    axes = fig09b.draw(pd.read_csv(drawn.results / "figures" / "fig9b.csv")).axes[0]
    assert any(list(line.get_xdata()) == [make.l_break, make.l_break] for line in axes.lines)
    assert "1.68" in axes.texts[0].get_text()


def test_runs_of_one_system_differ_by_line_style_and_name(results, make):
    make.write_run(results, make.summary("other", make.plan(1, 1, 1, (4,))))
    figure = fig08b.draw(fig08b.collect(results, FigureConfig(runs=("mega", "other", "gcn"))))
    labels = {line.get_label(): line.get_linestyle() for line in figure.legends[0].get_lines()}
    assert labels["MegaGraph (mega)"] != labels["MegaGraph (other)"]
    assert "GCN" in labels


def test_style_leaves_matplotlib_as_it_was():
    before = dict(mpl.rcParams)
    with style.style():
        assert mpl.rcParams["pdf.fonttype"] == 42
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("value", "unit", "shown"), [(16.53e9, "GB", 16.53), (7e6, "MB", 7.0), (6e8, "GB", 0.6), (2e3, "kB", 2.0)]
)
def test_memory_units_are_powers_of_ten(value, unit, shown):
    divisor, name = style.memory_unit(value)
    assert (name, value / divisor) == (unit, pytest.approx(shown))


@pytest.mark.parametrize(("low", "high"), [(2.0, 40.0), (0.33, 1.8), (1e-3, 0.9), (0.5, 4000.0)])
def test_log_axes_have_few_plain_ticks(low, high):
    axes = style.new_figure()[1]
    style.log_scale(axes, "x", low, high)
    axes.set_xlim(low, high)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert 3 <= len(labels) <= 6 and all("times" not in text for text in labels)
    assert [float(text) for text in labels] == pytest.approx(list(axes.get_xticks()))


def test_figures_import_no_torch():
    code = (
        "import sys; import megagraph.figures.registry, megagraph.figures.report; "
        "bad = {'torch', 'torch_geometric', 'matplotlib.pyplot'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def _caption(name, config):
    snakemake = type("Snakemake", (), {"config": config})
    source = (ROOT / "workflow" / "report" / f"{name}.rst").read_text()
    return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(source).render(snakemake=snakemake)


@pytest.mark.parametrize("name", ["workflow", *FIGURES])
def test_captions_render_from_the_demo_config(name):
    text = _caption(name, yaml.safe_load((ROOT / "config" / "demo.yaml").read_text()))
    document = publish_doctree(text, settings_overrides={"report_level": 2, "halt_level": 2})
    assert len(document.astext()) > 100
    assert "None" not in text


def test_captions_fall_back_to_the_defaults_of_the_configuration():
    config = {
        "title": "t",
        "datasets": {"d": {"source": "digits"}},
        "defaults": {"dataset": "d"},
        "runs": {"one": {}},
        "figures": {name: {"runs": ["one"], "search": "one"} for name in FIGURES},
    }
    load_experiment(config)
    sampling, model, train, parallel = SamplingConfig(), ModelConfig(), TrainConfig(), ParallelConfig()
    tokens = 2 + sampling.num_sampled + sampling.num_super + model.global_tokens
    text = _caption("fig10", config)
    assert f"B up to {train.batch * sampling.samples} sequences per step, N={tokens} tokens" in text
    assert f"{parallel.attention} attention (ring where cp > 1), {parallel.world_size} rank(s) on cpu" in text
    assert f"limit {parallel.memory_limit_gb} GB" in text
    assert f"{train.epochs} epochs" in _caption("fig8b", config)
