"""`merge_states` against its float64 twin, and parts of real attention merged to the whole."""

import pytest
import torch

import uniattn
from uniattn import reference
from uniattn.testing import assert_within, poisoned_allocations
from uniattn.testing.compare import unit_roundoff


def parts_of(num_parts, num_tokens=3, num_heads=2, dim=24, dtype=torch.float32, device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    outs = torch.randn(num_parts, num_tokens, num_heads, dim, generator=gen).to(dtype).to(device)
    lses = (4 * torch.randn(num_parts, num_heads, num_tokens, generator=gen)).to(device)
    return outs, lses


def check(outs, lses, output_roundings=1):
    """Each output is a mean of parts: one rounding to its dtype, and fp32 roundings of weights, at most four a part."""
    with poisoned_allocations():
        out, lse = uniattn.merge_states(outs, lses)
    want_out, want_lse = reference.merge_states(outs, lses)
    assert out.dtype == outs[0].dtype
    assert lse.dtype == torch.float32
    stacked = torch.stack(list(outs)).double().nan_to_num(0.0)
    u32, num_parts = unit_roundoff(torch.float32), len(outs)
    spread = torch.stack(list(lses)).nan_to_num(0.0, neginf=0.0).abs().max().item()
    relative = output_roundings * unit_roundoff(out.dtype) + (4 * num_parts + 4 * spread) * u32
    assert_within(out, want_out, stacked.abs().amax(0) * relative)
    assert_within(lse, want_lse, (4 * num_parts + 4 * spread) * u32)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_parts", [1, 2, 5, 16, 17, 40])
def test_numbers_of_parts(backend, num_parts, dtype):
    # Triton's interpreter cuts fp32 to bf16 off instead of rounding it.
    cut_off = backend.name == "triton-interpreter" and dtype == torch.bfloat16
    check(*parts_of(num_parts, num_tokens=2, dtype=dtype, device=backend.device), output_roundings=2 if cut_off else 1)


@pytest.mark.parametrize("dim", [8, 64, 80, 192, 512])
def test_dims(backend, dim):
    check(*parts_of(3, num_tokens=2, dim=dim, device=backend.device))


def test_lists_and_tensors(backend):
    outs, lses = parts_of(3, device=backend.device)
    want = check(outs, lses)
    got = check(list(outs), list(lses))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_empty_parts_may_hold_anything(backend):
    outs, lses = parts_of(4, device=backend.device)
    lses[1, :, 0] = lses[2] = -torch.inf
    outs[1, 0], outs[2] = torch.nan, torch.inf
    out, _ = check(outs, lses)
    assert out.isfinite().all()


def test_all_parts_empty(backend):
    outs, lses = parts_of(2, device=backend.device)
    outs[:, 1], lses[:, :, 1] = torch.nan, -torch.inf
    out, lse = check(outs, lses)
    assert (out[1] == 0).all()
    assert (lse[:, 1] == -torch.inf).all()


@pytest.mark.parametrize("offset", [-3e4, -200.0, 200.0, 3e4])
def test_lses_far_from_0(backend, offset):
    outs, lses = parts_of(3, device=backend.device)
    check(outs, lses + offset)


def test_one_part_is_a_copy(backend):
    outs, lses = parts_of(1, dtype=torch.bfloat16, device=backend.device)
    out, lse = check(outs, lses)
    assert torch.equal(out, outs[0])
    torch.testing.assert_close(lse, lses[0])


def test_strided_parts(backend):
    outs, lses = parts_of(6, num_heads=4, dim=32, device=backend.device)
    check(outs[::2, :, 1:3, :24], lses[::2, 1:3])


def test_no_tokens(backend):
    outs, lses = parts_of(2, num_tokens=0, device=backend.device)
    out, lse = uniattn.merge_states(outs, lses)
    assert out.shape == (0, 2, 24)
    assert lse.shape == (2, 0)


@pytest.mark.parametrize("sinks", [False, True])
def test_prefix_and_suffix_merge_to_the_whole(backend, sinks):
    """Cascade attention: 3072 shared keys, then 64 causal ones. A LSE in base 2 on one side would be 12% off."""
    prefix, suffix = (3072, 64) if backend.name != "triton-interpreter" else (200, 40)
    whole = backend.batch([(4, prefix + suffix)], head_dim=16, page_size=8, sinks=sinks)
    out, lse = backend.check(whole)
    pages = prefix // 8
    first = whole.replace(lengths=((4, prefix),), seqlens_k=torch.tensor([prefix], dtype=torch.int32, device=backend.device))
    second = whole.replace(
        lengths=((4, suffix),),
        seqlens_k=torch.tensor([suffix], dtype=torch.int32, device=backend.device),
        page_table=whole.page_table[:, pages:],
    )
    parts = [backend.run(first, causal=False, sinks=None), backend.run(second)]
    merged_out, merged_lse = uniattn.merge_states(*zip(*parts, strict=True))
    torch.testing.assert_close(merged_out, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-6, atol=1e-6)
