"""Tables of docs/results that commands make."""

import pytest

from experiments import figures
from experiments.figures import FIGURES, Figure, found_in, main, placed, state_of
from experiments.lib.cli import UserError

PAGE = "# Page\n\n<!-- sizes -->\n| a |\n| --- |\n| 1 |\n<!-- end sizes -->\n\ntext\n"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_stands_on_its_page(name):
    figure = FIGURES[name]
    page = (figures.RESULTS / f"{figure.page}.md").read_text()
    assert page.count(f"<!-- end {name} -->") == 1
    assert figure.accelerator or found_in(page, name)["rows"].count("\n| ") >= 3
    assert (figures.ROOT / "experiments" / figure.source).exists()
    assert figure.minutes < 60
    if figure.picture is not None:
        assert (figures.IMAGES / figure.picture[1]).stat().st_size > 1000
        assert f"images/{figure.picture[1]}" in page


def test_rows_are_placed_between_the_markers_again_and_again():
    once = placed(PAGE, "sizes", ["| a |", "| --- |", "| 2 |"], "today, code 12")
    assert once == PAGE.replace("| 1 |", "| 2 |").replace("<!-- sizes -->", "<!-- sizes: today, code 12 -->")
    assert placed(once, "sizes", ["| a |", "| --- |", "| 1 |"], "later").replace(": later", "") == PAGE


def test_a_page_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="no <!-- other -->"):
        placed(PAGE, "other", [], "today")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """One figure, on a page of its own."""
    (tmp_path / "page.md").write_text(PAGE.replace("sizes", "scale"))
    figure = Figure("page", "scale --workers 8 --entries 1e6", "scale/__init__.py", 1)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", {"scale": figure, "text": figure._replace(command="local --data {data}")})
    return figure, tmp_path / "page.md"


def test_a_table_is_stale_until_it_is_made_and_after_its_code_changes(small, monkeypatch):
    figure, page = small
    assert state_of("scale", figure) == ("", True)
    new = figures.make("scale", figure, None)
    assert any("two_shot" in row for row in new)
    made, stale = state_of("scale", figure)
    assert "JAX" in made
    assert not stale
    assert "| 1 |" not in page.read_text()
    monkeypatch.setattr(figures, "code_at", lambda path: "")
    assert state_of("scale", figure) == (made, True)


def test_code_is_the_same_code_in_every_version_of_python():
    """`ast.unparse` quotes the inside of an f-string otherwise from 3.12 on, and `ast.dump` lists new fields."""
    value = "Subscript(value=Name(id='x', ctx=Load()), slice=Constant(value='k'), ctx=Load())"
    number = "FormattedValue(value=Name(id='n', ctx=Load()), conversion=-1)"
    spec = f"JoinedStr(values=[Constant(value='>'), {number}])"
    text = f"JoinedStr(values=[FormattedValue(value={value}, conversion=-1, format_spec={spec}), Constant(value='b')])"
    args = "arguments(args=[arg(arg='x'), arg(arg='n')])"
    function = f"FunctionDef(name='f', args={args}, body=[Return(value={text})])"
    source = """def f(x, n):\n    return f'{x["k"]:>{n}}' 'b'\n"""
    assert figures.code_in(source) == f"Module(body=[{function}])"


def test_a_table_depends_on_what_it_uses():
    """Methods that it compares, and not all that the front door imports; the machinery where it holds times."""
    name = lambda path: path.relative_to(figures.ROOT).as_posix()
    demo, step = ({name(path) for path in figures.files_of(FIGURES[each])} for each in ("demo", "step"))
    assert {"jaxcomp/compressors/sidco.py", "jaxcomp/select.py", "experiments/lib/report.py"} <= demo & step
    assert {"experiments/train/compare.py", "jaxcomp/contrib/dgc.py", "jaxcomp/algorithms/power_sgd.py"} <= demo
    assert "jaxcomp/exchange/driver.py" in step - demo
    other = ("jaxcomp/federated", "jaxcomp/plan/", "jaxcomp/algorithms/isega.py", "experiments/peers")
    assert not any(path.startswith(other) for path in demo | step)


def test_what_needs_data_is_named(small):
    with pytest.raises(UserError, match="--data is needed for text"):
        main(["text"])
    with pytest.raises(UserError, match="unknown figure 'tables'"):
        main(["tables"])


def test_a_command_that_fails_leaves_the_page(small):
    figure, page = small
    before = page.read_text()
    with pytest.raises(UserError, match="ended with 2"):
        figures.make("scale", figure._replace(command="scale --workers 0"), None)
    assert page.read_text() == before


def test_what_needs_an_accelerator_is_neither_stale_nor_made_here(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("sizes", "chip"))
    figure = Figure("page", "accelerator", "accelerator", 5, accelerator=True)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", {"chip": figure})
    listed = lambda *words: (main([*words]), capsys.readouterr().out)[1]
    assert "needs an accelerator" in listed()
    assert "left out, it needs an accelerator" in listed("--all")
    assert "stale;" not in listed()
    with pytest.raises(UserError, match="chip needs a GPU or a TPU; run python -m experiments accelerator there"):
        main(["chip"])
    page.write_text(placed(page.read_text(), "chip", ["rows"], "2026, JAX 1 on a chip, code 0"))
    assert "stale; needs an accelerator" in listed()
    page.write_text(placed(page.read_text(), "chip", ["rows"], figures.stamp_of(figure, "JAX 1 on a chip")))
    assert "JAX 1 on a chip" in listed()
    assert "needs" not in listed()
