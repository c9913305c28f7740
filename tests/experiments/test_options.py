"""Options that cannot be: one line that says what is allowed, and nothing is left behind."""

import pytest
from programs import run_inside

COMPARE = [
    ("--workers 0", "argument --workers: must be an integer of at least 1; got '0'"),
    ("--methods magic", "argument --methods: invalid choice: 'magic' (choose from 'dense-f32'"),
    ("--data mnist", "error: mnist needs --data-dir"),
    ("--data mnist --data-dir /no/such", "no folder /no/such"),
    ("--ratio 2", "argument --ratio: must be a number in (0, 1]; got '2'"),
    ("--resume --name nothing", "there is no run"),
    ("--resume", "--resume needs --name"),
    ("--name ../x", "--name must be a folder below --runs; got ../x"),
    ("--workers 100 --alpha 0", "argument --alpha: must be a number above 0"),
]
DAGC = [
    ("--rules best", "argument --rules: must be sqrt, phi, released, uniform or a number >= 0"),
    ("--rules threshold:phi", "thresholds have the rules sqrt, released, uniform or a number"),
    ("--skews 0.5", "argument --skews: must be a number of at least 1; got '0.5'"),
    ("--ratios 2", "argument --ratios: must be a number in (0, 1]"),
    ("--task mnist", "error: mnist needs --data-dir"),
]
SMOOTHNESS = [
    ("--data /no/such.npz", "no file /no/such.npz"),
    ("--workers 5000", "5000 workers for 1797 rows; each needs at least one"),
    ("--only sgd", "no method 'sgd' in this study; it has dcgd rand"),
    ("magic", "invalid choice: 'magic'"),
]
SIDCO = [
    ("speed", "unknown name 'speed' after sidco; choose from quality, training"),
    ("quality --ratios 2", "must be a number in (0, 1]; got '2'"),
    ("quality --mnist /nowhere", "no folder /nowhere"),
    ("training --methods magic", "invalid choice: 'magic'"),
]
SKCOMPRESS = [
    ("speed", "unknown name 'speed' after skcompress; choose from sizes, training"),
    ("sizes --data /nowhere", "no file /nowhere"),
    ("sizes --steps 2", "argument --steps: must be an integer of at least 3; got '2'"),
    ("training --problems magic", "invalid choice: 'magic'"),
]
OTHERS = [
    ("network --name ../x", "--name must be a folder below --runs; got ../x"),
    ("bench select --log2-sizes 40", "argument --log2-sizes: invalid choice: 40"),
    ("magic", "unknown experiment 'magic'; choose from compare, "),
]
OF_EACH = {"compare": COMPARE, "dagc": DAGC, "smoothness": SMOOTHNESS, "sidco": SIDCO, "skcompress": SKCOMPRESS}
ERRORS = dict(OTHERS) | {f"{name} {words}": said for name, some in OF_EACH.items() for words, said in some}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_are_one_line_and_leave_nothing_behind(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = run_inside(capsys, *words.split())
    assert result.returncode == 2
    assert ERRORS[words] in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.glob("runs/*")) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}


def test_a_subject_alone_lists_its_experiments(capsys):
    result = run_inside(capsys, "sidco")
    assert (result.returncode, result.stderr) == (2, "")
    assert "sidco quality" in result.stdout
