"""The command line: what is asked of the demo, and how a wrong command line is told."""

import runpy
import sys

import pytest

from uniattn import UnsupportedError, cli, demo


def test_options_reach_the_demo(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(demo, "run", lambda **options: seen.append(options) or True)
    assert cli.main(["demo"]) == 0
    line = ["demo", "--prompt", "a", "--prompt", "b", "--model", str(tmp_path), "--max-new-tokens", "7", "--interpret"]
    assert cli.main(line) == 0
    assert seen == [
        {"texts": None, "model_path": None, "max_new_tokens": None, "interpret": False},
        {"texts": ["a", "b"], "model_path": tmp_path, "max_new_tokens": 7, "interpret": True},
    ]


@pytest.mark.parametrize(("outcome", "status"), [(True, 0), (False, 1)])
def test_exit_status(outcome, status, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda **options: outcome)
    assert cli.main(["demo"]) == status


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UnsupportedError("gguf", "nothing", "it is needed", "pip install gguf"), 2, "uniattn demo: gguf: got nothing; "),
        (KeyboardInterrupt(), 130, "uniattn demo: stopped"),
    ],
    ids=["something is missing", "control-C"],
)
def test_errors_are_told_without_a_traceback(error, status, told, monkeypatch, capsys):
    def raising(**options):
        raise error

    monkeypatch.setattr(demo, "run", raising)
    assert cli.main(["demo"]) == status
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("line", [[], ["dance"], ["demo", "--max-new-tokens", "0"], ["demo", "--max-new-tokens", "1.5"]])
def test_a_wrong_command_line(line, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(line)
    assert stop.value.code == 2
    assert "usage: uniattn" in capsys.readouterr().err


def test_python_m_uniattn(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["uniattn", "demo", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("uniattn", run_name="__main__")
    assert stop.value.code == 0
    assert "--max-new-tokens N" in capsys.readouterr().out
