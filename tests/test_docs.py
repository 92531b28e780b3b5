"""Every example of the README and of the public docstrings runs."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import uniattn
from uniattn import cli

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
MODULES = ["uniattn.attention", "uniattn.problem.check_values", "uniattn.schedule.build"]


def run_block(number, **names):
    # Empty lines in front, so that a traceback names the README's own lines.
    line = README.read_text()[: README.read_text().index(BLOCKS[number])].count("\n")
    exec(compile("\n" * line + BLOCKS[number], str(README), "exec"), names)
    return names


def test_readme_has_the_blocks_below():
    assert len(BLOCKS) == 2


def test_readme_first_call():
    names = run_block(0)
    # A prompt's first token sees itself alone; query heads 0 to 3 share KV head 0.
    assert names["torch"].allclose(names["out"][0, :4], names["v"][0, 0].expand(4, -1), atol=1e-6)


def test_readme_transformers(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=8)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    run_block(1, path=tmp_path, prompts=[[1, 2, 3], list(range(40))])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_readme_error_is_the_one_raised():
    x, lengths = torch.randn(3, 2, 16), torch.tensor([0, 1, 2, 3])
    with pytest.raises(uniattn.ArgumentError) as error:
        uniattn.attention(x, x, x, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    assert f"ArgumentError: {error.value}\n" in README.read_text()


def test_readme_explains_a_batch_as_the_command_does(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    monkeypatch.setenv("UNIATTN_TUNING_DIR", str(tmp_path))
    block = re.search(r"^\$ uniattn explain.*?(?=^```)", README.read_text(), re.DOTALL | re.MULTILINE)
    command, card, _, *told = block[0].splitlines()
    assert cli.main(command.removeprefix("$ uniattn ").split()) == 0
    out = capsys.readouterr().out.splitlines()
    # The second line names folders.
    assert (out[0], out[2:]) == (card, told)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_public_functions_have_examples():
    for name in ("attention", "check_values", "merge_states", "plan", "write_kv"):
        assert ">>> " in getattr(uniattn, name).__doc__, name
