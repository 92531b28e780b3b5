"""TMA maps of caches: what the driver is asked for, and how often."""

from types import SimpleNamespace

import pytest
import torch

from uniattn.launch import tensor_map


@pytest.fixture
def asked(monkeypatch):
    """What the driver's function is called with, in place of the driver."""
    triton = pytest.importorskip("triton")
    calls = []

    def fill(*arguments):
        calls.append(arguments)
        return f"map {len(calls)}"

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=fill)), raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: self._active), raising=False)
    monkeypatch.setattr(tensor_map, "_made", {})
    return calls


def test_a_cache_is_read_by_pages_heads_slots(asked):
    cache = torch.zeros(5, 32, 2, 128, dtype=torch.bfloat16)
    made = tensor_map.of_cache(cache, 32, 128)
    assert made == ("map 1", 5, 2, 32, 128, 32 * 256, 128, 256, 1)
    address, swizzle, itemsize, dtype, box, sizes, strides, padding = asked[0]
    assert (address, swizzle, itemsize, dtype, padding) == (cache.data_ptr(), 3, 2, 9, 0)
    assert (box, sizes, strides) == ([1, 1, 32, 64], [5, 2, 32, 128], [32 * 256, 128, 256, 1])


def test_a_map_is_made_once_for_a_cache_and_anew_for_another(asked):
    cache = torch.zeros(5, 32, 2, 64, dtype=torch.float16)
    first = tensor_map.of_cache(cache, 32, 64)
    assert tensor_map.of_cache(cache, 32, 64) is first
    for other in (cache[1:], cache.transpose(1, 2).contiguous().transpose(1, 2), cache.view(torch.bfloat16)):
        tensor_map.of_cache(other, 32, 64)
    tensor_map.of_cache(cache, 16, 64)
    assert len(asked) == 5
    assert {call[3] for call in asked} == {6, 9}


def test_maps_are_not_kept_without_bound(asked, monkeypatch):
    monkeypatch.setattr(tensor_map, "_MOST", 3)
    cache = torch.zeros(8, 16, 1, 64, dtype=torch.float16)
    for i in range(7):
        tensor_map.of_cache(cache[i:], 16, 64)
    assert len(tensor_map._made) <= 3


def test_strides_of_lone_dims_are_made_whole(asked):
    cache = torch.zeros(1, 16, 1, 64, dtype=torch.float16).as_strided((1, 16, 1, 64), (3, 64, 5, 1))
    tensor_map.of_cache(cache, 16, 64)
    assert asked[0][6] == [1024, 1024, 64, 1]
