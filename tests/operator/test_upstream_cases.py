"""The shapes that vLLM's own tests of its unified kernel run, here and on a GPU; in the interpreter the same mixes, shortened.

Heads, head dims, page size, windows and softcap are upstream's; the tolerance is this project's own.
"""

import pytest
import torch

# Both are upstream's; a full window or cap is None.
MIXES = {
    "prefill-chunk-decode": [(1, 1328), (5, 18), (129, 463)],
    "decodes": [(1, 523), (1, 37), (1, 2011)],
}
SHORT = {
    "prefill-chunk-decode": [(1, 90), (5, 18), (17, 40)],
    "decodes": [(1, 53), (1, 7), (1, 101)],
}
SPEC_DECODE = [(8, 8), (6, 129), (1, 257), (0, 0), (3, 64)]


def lengths_of(backend, name):
    return SHORT[name] if backend.name == "triton-interpreter" else MIXES[name]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (8, 2), (5, 1)])
def test_heads(backend, mix, num_q_heads, num_kv_heads):
    how = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": 16 if not backend.is_gpu else 128}
    backend.check(backend.batch(lengths_of(backend, mix), dtype=torch.bfloat16, **how))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_windows_and_softcap(backend, mix, window, softcap):
    if backend.name == "triton-interpreter":
        window //= 8
    how = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 32 if not backend.is_gpu else 128}
    batch = backend.batch(lengths_of(backend, mix), dtype=torch.float16, window=(window - 1, 0), softcap=softcap, **how)
    backend.check(batch)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(128, 128), (256, 256), (96, 96), (192, 128)])
def test_head_dims(backend, head_dim, v_head_dim):
    lengths = [(1, 40), (5, 18)] if backend.name == "triton-interpreter" else MIXES["prefill-chunk-decode"]
    backend.check(backend.batch(lengths, head_dim=head_dim, v_head_dim=v_head_dim, dtype=torch.bfloat16))


@pytest.mark.parametrize("kv_len", [128, 129, 257])
@pytest.mark.parametrize("q_len", [2, 5, 8])
def test_speculative_decoding(backend, q_len, kv_len):
    """Ends at, just past and far past a page of 128."""
    batch = backend.batch([(q_len, kv_len)], num_q_heads=2, head_dim=16, page_size=128, dtype=torch.float16)
    backend.check(batch)


def test_speculative_decoding_mixed(backend):
    backend.check(backend.batch(SPEC_DECODE, num_q_heads=2, head_dim=16, page_size=128, dtype=torch.float16))


@pytest.mark.parametrize("causal", [[True, False, True], [False, True, False], [False] * 3], ids=str)
def test_mixed_causal(backend, causal):
    lengths = [(1, 40), (5, 30), (1, 55)] if backend.name == "triton-interpreter" else [(1, 128), (5, 64), (1, 256)]
    backend.check(backend.batch(lengths, num_q_heads=2, head_dim=16, causal=causal, dtype=torch.bfloat16))


@pytest.mark.parametrize("lengths", [[(1, 1)] * 533, [(33, 33)] * 33], ids=["533 decodes", "33 prefills"])
def test_many_sequences(backend, lengths):
    if backend.name == "triton-interpreter":
        lengths = [(q, kv) for q, kv in lengths[:: len(lengths) // 16]]
    how = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128} if backend.is_gpu else {"num_q_heads": 1, "head_dim": 8}
    backend.check(backend.batch(lengths, dtype=torch.bfloat16, **how))
