"""Names that nothing has end a command, which says which there are."""

import pytest

from benchmarks.commands import check_names
from benchmarks.precision.__main__ import main


def refuse(message):
    raise SystemExit(message)


def test_unknown_names_are_told_with_those_there_are():
    check_names("model", ["GPT", "ViT"], ["ViT", "GPT"], refuse)
    with pytest.raises(SystemExit, match=r"unknown model 'GTP': expected one of ViT, GPT\. Did you mean 'GPT'\?"):
        check_names("model", ["ViT", "GTP"], ["ViT", "GPT"], refuse)
    with pytest.raises(SystemExit, match=r"expected one of ViT\.$"):
        check_names("model", ["none"], ["ViT"], refuse)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "plain/mlp,nosuch"], "no model has 'nosuch' in its name: there are"),
        (["--models", "plain/mlp", "--only", "nosuch"], "unknown candidate 'nosuch': expected one of float32"),
    ],
)
def test_the_precision_benchmark_measures_nothing_of_no_model(arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--static", "--rounds", "0"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
