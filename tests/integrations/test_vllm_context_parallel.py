"""vLLM's decode context parallelism: ranks that share a sequence's cache, as threads."""

import threading
from types import SimpleNamespace

import pytest
import torch
from vllm_standins import RELEASES
from vllm_tools import MIXED, NEWEST, make_builder, make_cache, make_common, make_impl, run

from uniattn.testing import assert_within, make_batch, oracle


class Group:
    """Ranks as threads: a collective waits for all and gives each what it would get."""

    def __init__(self, size):
        self.world_size = size
        self.barrier = threading.Barrier(size)
        self.given = [None] * size
        self.here = threading.local()

    @property
    def rank_in_group(self):
        return self.here.rank

    def exchange(self, given):
        self.given[self.rank_in_group] = given
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything

    def all_gather(self, x, dim):
        return torch.cat(self.exchange(x), dim=dim)


def combine(out, lse, group, return_lse=False):
    """What vLLM's combining functions do, by definition: `out` `[tokens, all heads, dim]`, `lse` `[tokens, all heads]`."""
    assert return_lse
    outs, lses = (torch.stack(x) for x in zip(*group.exchange((out, lse)), strict=True))
    total = lses.logsumexp(dim=0)
    weight = (lses - total).exp().nan_to_num(0.0)
    merged = (weight.unsqueeze(-1) * outs).sum(dim=0)
    mine = slice(*(out.shape[1] // group.world_size * (group.rank_in_group + i) for i in (0, 1)))
    return merged[:, mine], total[:, mine]


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
@pytest.mark.parametrize("release", [RELEASES[0], NEWEST], ids=str)
def test_ranks_that_share_a_cache(load, monkeypatch, release, backend, interleave):
    """Two ranks with two of four query heads each; the KV head is with both, its tokens are dealt out. Sinks count once."""
    size, ours, layout = 2, load(release), release.layouts[0]
    group = Group(size)
    ours.vllm["vllm.distributed.parallel_state"].get_dcp_group = lambda: group
    places = {"ag_rs": ("common", "cp_lse_ag_out_rs"), "a2a": ("dcp_alltoall", "dcp_a2a_lse_reduce")}
    place, name = places[backend]
    monkeypatch.setattr(ours.vllm[f"vllm.v1.attention.ops.{'dcp' if release.dcp_module == 'dcp' else place}"], name, combine, raising=False)
    lengths = [(1, 40), (5, 37), (9, 9), (1, 2), (1, 1)]
    batch = make_batch(lengths, num_q_heads=4, layout=layout, sinks=True)
    parallel = SimpleNamespace(cp_kv_cache_interleave_size=interleave, dcp_comm_backend=backend)
    outs, failures = [None] * size, []

    def rank_main(rank):
        group.here.rank = rank
        try:
            outs[rank] = of_rank(rank)
        except BaseException as error:
            failures.append(error)
            group.barrier.abort()

    def of_rank(rank):
        # This rank's cache: of the tokens before the batch's own, every turn of `interleave` that is its own.
        here = make_batch([(q, kv) for q, kv in lengths], num_q_heads=4, layout=layout)
        for x in (here.k_cache, here.v_cache):
            x.fill_(torch.nan)
        new_k, new_v, page_size = [], [], 16
        for seq, (q_len, kv_len) in enumerate(lengths):
            positions = torch.arange(kv_len)
            pages, places = batch.page_table[seq].long()[positions // page_size], positions % page_size
            k, v = batch.k_cache[pages, places], batch.v_cache[pages, places]
            mine = [p for p in range(kv_len - q_len) if p // interleave % size == rank]
            slots = torch.arange(len(mine))
            here_pages = batch.page_table[seq].long()[slots // page_size]
            here.k_cache[here_pages, slots % page_size], here.v_cache[here_pages, slots % page_size] = k[mine], v[mine]
            new_k.append(k[kv_len - q_len :])
            new_v.append(v[kv_len - q_len :])
        heads = slice(2 * rank, 2 * rank + 2)
        impl = ours.impl.UniattnImpl(2, 64, 64**-0.5, 1, sinks=batch.options["sinks"][heads].contiguous())
        assert impl.dcp_world_size == size
        metadata = make_builder(ours, impl, parallel_config=parallel).build(0, make_common(batch))
        mine = batch.replace(q=batch.q[:, heads])
        return run(impl, metadata, mine, make_cache(here, layout), torch.cat(new_k), torch.cat(new_v))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    right = oracle(batch)
    # Merging twice rounds twice more.
    assert_within(torch.cat(outs, dim=1), right.out, right.out_allowed * 3)


@pytest.mark.parametrize(("options", "reason"), [(dict(alibi_slopes=[0.5, 0.25]), "ALiBi"), (dict(sliding_window=8), "window")])
def test_what_ranks_that_share_a_cache_cannot_do_is_refused(load, options, reason):
    ours, batch = load(), make_batch(MIXED)
    make_impl(ours, batch, **options)
    ours.vllm["vllm.distributed.parallel_state"].get_dcp_group = lambda: SimpleNamespace(world_size=2, rank_in_group=0)
    make_impl(ours, batch)
    with pytest.raises(ValueError, match=f"{reason} with decode context parallelism|{reason}.* with decode context"):
        make_impl(ours, batch, **options)
