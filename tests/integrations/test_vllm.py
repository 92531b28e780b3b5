"""vLLM's backend on stand-ins of several releases: registration, refusals, batches against the oracle, steps, context parallel."""

import threading
from types import SimpleNamespace

import pytest
import torch
import vllm_standins
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_standins import RELEASES, AttentionType, Common, CUDAGraphMode, make_config

import uniattn
from uniattn.launch.cache import num_compilations
from uniattn.testing import assert_matches_oracle, assert_within, make_batch, oracle, poison_unread

NEWEST = RELEASES[-1]
MIXED = [(1, 40), (1, 17), (5, 37), (23, 23), (0, 0), (7, 64)]
LAYER = SimpleNamespace()
every_release = pytest.mark.parametrize("release", RELEASES, ids=str)


@pytest.fixture
def load(monkeypatch):
    """Imports the backend on a release's stand-ins."""
    return lambda release=NEWEST: vllm_standins.install(release, monkeypatch)


def make_impl(ours, batch, **options):
    """A layer with the batch's sizes and options."""
    asked = dict(
        sinks=batch.options.get("sinks"), logits_soft_cap=batch.options.get("softcap"),
        alibi_slopes=None if batch.options.get("alibi_slopes") is None else batch.options["alibi_slopes"].tolist(),
        sliding_window=None if batch.options.get("window") is None else batch.options["window"][0] + 1,
    )  # fmt: skip
    _, num_heads, head_size = batch.q.shape
    return ours.impl.UniattnImpl(num_heads, head_size, head_size**-0.5, batch.k_cache.shape[-2], **asked | options)


def make_builder(ours, impl, page_size=16, **config):
    """A builder for one layer, on the CPU."""
    config = make_config({"layer": SimpleNamespace(impl=impl)}, **config)
    return ours.metadata.UniattnMetadataBuilder(SimpleNamespace(block_size=page_size), ["layer"], config, torch.device("cpu"))


def make_common(batch, **changes):
    """The batch as vLLM tells it, with the slots of the new tokens; vLLM fills its tables up with page 0."""
    slots = []
    for seq, (q_len, kv_len) in enumerate(batch.lengths):
        positions = torch.arange(max(kv_len - q_len, 0), kv_len)
        page_size = batch.k_cache.shape[1]
        slots.append(batch.page_table[seq].long()[positions // page_size] * page_size + positions % page_size)
    lengths = [q_len for q_len, _ in batch.lengths]
    fields = dict(
        query_start_loc=batch.cu_seqlens_q, seq_lens=batch.seqlens_k, num_actual_tokens=batch.num_tokens,
        max_query_len=max(lengths), max_seq_len=int(batch.seqlens_k.max()), block_table_tensor=batch.page_table.clamp(min=0),
        slot_mapping=torch.cat(slots), causal=batch.options["causal"],
    )  # fmt: skip
    return Common(**fields | changes)


def make_cache(batch, layout):
    """The one tensor that vLLM gives a layer as its cache, of which the batch's caches are views."""
    base = batch.k_cache._base
    return base.permute(0, 2, 1, 3) if layout == "packed" else base


def run(impl, metadata, batch, cache, key=None, value=None):
    """One layer's forward, into an output that is NaN before."""
    out = torch.full_like(batch.q, torch.nan)
    assert impl.forward(LAYER, batch.q, key, value, cache, metadata, out) is out
    return out


# Registration


@every_release
def test_register_names_the_backend_and_may_be_called_again(load, release):
    ours = load(release)
    registry = ours.vllm["vllm.v1.attention.backends.registry"]
    for _ in range(2):
        ours.plugin.register()
    names = {"CUSTOM", "UNIATTN"} if release.adds_names else {"CUSTOM"}
    assert registry.overrides == dict.fromkeys(names, "uniattn.integrations.vllm.backend.UniattnBackend")
    name = ours.backend.UniattnBackend.get_name()
    assert name in registry.AttentionBackendEnum.__members__
    assert name == ("UNIATTN" if release.adds_names else "CUSTOM")


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0rc1", "1.0.0", "dev"])
def test_an_unknown_release_gets_a_backend_that_says_why_it_refuses(load, version):
    ours = load()
    ours.vllm["vllm"].__version__ = version
    ours.plugin.register()
    path = ours.vllm["vllm.v1.attention.backends.registry"].overrides["CUSTOM"]
    assert path == "uniattn.integrations.vllm.refused.RefusedBackend"
    reasons = ours.refused.RefusedBackend.validate_configuration(head_size=128, anything=True)
    assert reasons == [f"this uniattn knows vLLM 0.20 to 0.33, not {version}; install a uniattn that does, or use another backend"]


@pytest.mark.parametrize("version", ["0.20.0", "0.26.1.dev3+gabc", "0.33.7"])
def test_known_releases(load, version):
    ours = load()
    ours.vllm["vllm"].__version__ = version
    assert ours.releases.unknown_release() == ""


def test_a_vllm_without_a_registry_is_left_alone(load, monkeypatch, caplog):
    ours = load()
    monkeypatch.setitem(__import__("sys").modules, "vllm.v1.attention.backends.registry", None)
    ours.plugin.register()
    assert "no registry" in caplog.text


def test_the_installed_package_has_the_entry_point():
    from importlib.metadata import entry_points

    [entry] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "uniattn"]
    assert entry.value == "uniattn.integrations.vllm:register"


# Configurations

FINE = dict(
    head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True, use_sparse=False,
    use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=(9, 0), attn_type="decoder", has_sliding_window=True,
    use_non_causal=True, use_batch_invariant=False, use_kv_connector=False, use_pcp=False, use_dcp=True, use_rswa=False,
    use_adaptive_verification=True,
)  # fmt: skip


@every_release
def test_fine_configurations(load, release):
    backend = load(release).backend.UniattnBackend
    for changes in ({}, dict(dtype=torch.float32), dict(head_size=80, block_size=1056), dict(kv_cache_dtype="bfloat16"),
                    dict(block_size=None, kv_cache_dtype=None), *(dict(attn_type=t) for t in AttentionType)):  # fmt: skip
        assert backend.validate_configuration(**FINE | changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(head_size=4), "head sizes are 8 to 512, not 4"),
        (dict(head_size=576), "head sizes are 8 to 512, not 576"),
        (dict(block_size=8), "block_size"),
        (dict(kv_cache_dtype="float16"), "a cache of float16 under a model of torch.bfloat16"),
        (dict(kv_cache_dtype="int8_per_token_head"), "kv_cache_dtype"),
        (dict(use_mm_prefix=True), "image ranges"),
        (dict(use_batch_invariant=True), "batch invariance"),
        (dict(use_rswa=True), "rswa"),
        (dict(use_mla=True), "MLA"),
        (dict(device_capability=(7, 5)), "bfloat16 needs compute capability 8.0"),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, dict) else None,
)
def test_refused_configurations_say_why(load, changes, reason):
    backend = load().backend.UniattnBackend
    assert backend.validate_configuration(**FINE) == []
    assert any(reason in text for text in backend.validate_configuration(**FINE | changes))


def test_refused_without_a_gpu_or_triton(load, monkeypatch):
    ours = load()
    assert ours.backend.UniattnBackend.validate_configuration(**FINE) == []
    monkeypatch.setattr("uniattn.launch.triton_version.installed", lambda: "3.5.0")
    ours.backend.triton_version.require.cache_clear()
    [reason] = ours.backend.UniattnBackend.validate_configuration(**FINE)
    assert "Triton 3.5.0" in reason
    ours.vllm["vllm.platforms"].current_platform.is_cuda_alike = lambda: False
    assert ours.backend.UniattnBackend.validate_configuration(**FINE) == ["uniattn's kernels run on NVIDIA and AMD GPUs"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(chunk_lookback=1), "chunk_lookback"),
        (dict(use_alibi_sqrt=True), "use_alibi_sqrt"),
        (dict(attn_type=AttentionType.ENCODER_ONLY, kv_cache_dtype="fp8"), "encoder attention keeps no cache"),
    ],
    ids=str,
)
def test_layers_that_ask_for_more_are_refused_when_they_are_made(load, options, reason):
    ours, batch = load(), make_batch(MIXED)
    make_impl(ours, batch, chunk_lookback=-1, use_alibi_sqrt=False)
    with pytest.raises(ValueError, match=f"CUSTOM .* is not valid for this configuration. Reason: .*{reason}"):
        make_impl(ours, batch, **options)


def test_rswa_models_are_refused_where_vllm_does_not_ask(load):
    ours, batch = load(RELEASES[1]), make_batch(MIXED)
    impl = make_impl(ours, batch)
    make_builder(ours, impl)
    with pytest.raises(ValueError, match="R-SWA"):
        make_builder(ours, impl, model_config=SimpleNamespace(dtype=torch.float32, rswa_window=4))


@pytest.mark.parametrize("release", [r for r in RELEASES if r.gives_shape], ids=str)
def test_the_cache_has_the_shape_that_vllms_own_backend_gives_it(load, release):
    ours = load(release)
    backend, theirs = ours.backend.UniattnBackend, ours.vllm["vllm.v1.attention.backends.triton_attn"].TritonAttentionBackend
    shape = backend.get_kv_cache_shape(7, 32, 2, 64, cache_dtype_str="auto")
    assert shape == theirs.get_kv_cache_shape(7, 32, 2, 64)
    assert backend.get_kv_cache_stride_order(include_num_layers_dimension=True) == theirs.get_kv_cache_stride_order(True)
    k, v = ours.releases.pages(torch.empty(shape), 64)
    assert k.shape == v.shape == (7, 32, 2, 64)


# Batches

KINDS = {
    "plain": {},
    "heads of 80 in groups of 3": dict(num_q_heads=6, num_kv_heads=2, head_dim=80),
    "window": dict(window=(11, 0)),
    "softcap": dict(softcap=20.0),
    "sinks": dict(sinks=True),
    "alibi": dict(alibi=True),
    "pages of 48": dict(page_size=48),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@every_release
def test_batches(load, release, kind):
    """New K/V are written into their slots, then a mixed batch is attended, with NaN wherever nothing may be read."""
    ours = load(release)
    for layout in release.layouts:
        batch = poison_unread(make_batch(MIXED, layout=layout, **kind))
        cache, common = make_cache(batch, layout), make_common(batch)
        page_size = batch.k_cache.shape[1]
        slots = common.slot_mapping
        written = [x[slots // page_size, slots % page_size].clone() for x in (batch.k_cache, batch.v_cache)]
        for x in (batch.k_cache, batch.v_cache):
            x[slots // page_size, slots % page_size] = torch.nan
        impl = make_impl(ours, batch)
        metadata = make_builder(ours, impl, page_size).build(0, common)
        padded = [torch.cat([x, torch.full_like(x[:3], torch.nan)]) for x in written]
        impl.do_kv_cache_update(LAYER, *padded, cache, metadata.slot_mapping)
        assert_matches_oracle(batch, run(impl, metadata, batch, cache))


@every_release
def test_a_filled_up_graph(load, release):
    """More tokens and sequences than the batch has: plateaus, lengths of 0, slots of -1, and rows that the metadata leaves out."""
    ours, layout = load(release), release.layouts[0]
    batch = make_batch([*MIXED, (0, 0), (0, 0)], layout=layout, num_padding_rows=4)
    impl = make_impl(ours, batch)
    common = make_common(batch, num_actual_tokens=batch.num_tokens - 1)
    metadata = make_builder(ours, impl).build_for_cudagraph_capture(common)
    out = run(impl, metadata, batch, make_cache(batch, layout))
    right = oracle(batch)
    assert_within(out[:-1], right.out[:-1], right.out_allowed[:-1])
    assert out[-1].isnan().all()


def test_a_length_beyond_the_table_reads_none_past_its_row(load):
    """Graphs are captured with lengths up to the largest model length rounded up."""
    ours = load()
    batch = make_batch([(1, 40)], layout="packed", num_spare_columns=0)
    longer = batch.replace(seqlens_k=torch.full_like(batch.seqlens_k, 1000), lengths=((1, 1000),))
    impl = make_impl(ours, batch)
    # A wider table behind the row, as vLLM's slices have, with an id that would be a bad read.
    table = torch.full((1, 8), 2**30, dtype=torch.int32)
    table[:, :3] = batch.page_table
    metadata = make_builder(ours, impl).build(0, make_common(batch, seq_lens=longer.seqlens_k, block_table_tensor=table[:, :3]))
    for x in (batch.k_cache, batch.v_cache):
        x[batch.page_table[0, 2], 8:] = 0.0
    assert_matches_oracle(longer, run(impl, metadata, batch, make_cache(batch, "packed")))


def test_while_vllm_measures_memory_the_output_is_zero(load):
    ours, batch = load(), make_batch(MIXED)
    assert (run(make_impl(ours, batch), None, batch, torch.tensor([])) == 0).all()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
def test_encoders_attend_their_own_tokens_both_ways(load, attn_type, window):
    ours = load()
    lengths = [(9, 9), (1, 1), (30, 30)]
    sides = None if window is None else (window - 1, window - 1)
    tokens = make_batch(lengths, page_size=None, causal=False, window=sides)
    impl = make_impl(ours, tokens, attn_type=attn_type, sliding_window=window)
    impl.do_kv_cache_update(LAYER, tokens.k_cache, tokens.v_cache, None, torch.zeros(40, dtype=torch.int64))
    paged = make_batch(lengths, layout="packed")
    metadata = make_builder(ours, impl).build(0, make_common(paged, causal=False))
    out = run(impl, metadata, tokens, torch.tensor([]), tokens.k_cache, tokens.v_cache)
    assert_matches_oracle(tokens, out)


def test_cross_attention_sees_the_whole_encoder_and_writes_only_what_is_new(load):
    ours = load()
    batch = make_batch([(1, 30), (4, 12), (1, 1)], layout="packed", causal=False)
    impl = make_impl(ours, batch, attn_type=AttentionType.ENCODER_DECODER)
    metadata = make_builder(ours, impl).build(0, make_common(batch))
    assert_matches_oracle(batch, run(impl, metadata, batch, make_cache(batch, "packed")))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_sequences_that_are_not_causal_have_windows_to_both_sides(load, dtype):
    ours = load()
    flags = [True, False, True, False, True, False]
    batch = make_batch(MIXED, layout="packed", causal=flags, window=(5, 5))
    impl = make_impl(ours, batch)
    common = make_common(batch, causal=torch.tensor(flags).to(dtype))
    metadata = make_builder(ours, impl).build(0, common)
    assert_matches_oracle(batch, run(impl, metadata, batch, make_cache(batch, "packed")))
    batch = make_batch(MIXED, layout="packed", causal=False, window=(5, 5))
    metadata = make_builder(ours, impl).build(0, make_common(batch))
    assert_matches_oracle(batch, run(impl, metadata, batch, make_cache(batch, "packed")))


# Steps


@pytest.fixture
def plans(monkeypatch):
    """Counts the plans that are built, after the backend was loaded: `plans(ours)` starts it and returns the list of their windows."""

    def start(ours):
        built = []

        def plan(*args, **kwargs):
            built.append(kwargs["window"])
            return uniattn.plan(*args, **kwargs)

        monkeypatch.setattr(ours.steps, "plan", plan)
        return built

    return start


def test_layers_alike_share_one_plan_a_pass(load, plans):
    ours = load()
    batch = make_batch(MIXED, layout="packed")
    cache, built = make_cache(batch, "packed"), plans(ours)
    full = [make_impl(ours, batch) for _ in range(3)]
    windowed = [make_impl(ours, batch, sliding_window=9) for _ in range(2)]
    builder = make_builder(ours, full[0])
    metadata = builder.build(0, make_common(batch))
    for _ in range(2):
        for impl in (full[0], windowed[0], full[1], windowed[1], full[2]):
            run(impl, metadata, batch, cache)
    assert built == [None, (8, 0)] * 2


def test_groups_with_tables_of_their_own_share_the_plan(load, plans):
    ours = load()
    batch, other = (make_batch(MIXED, layout="packed", seed=seed) for seed in (0, 1))
    built = plans(ours)
    impls = [make_impl(ours, batch) for _ in range(2)]
    builder = make_builder(ours, impls[0])
    assert builder.supports_update_block_table
    first = builder.build(0, make_common(batch))
    common = make_common(other)
    second = builder.update_block_table(first, common.block_table_tensor, common.slot_mapping)
    assert second.slot_mapping is common.slot_mapping
    for impl, metadata, each in ((impls[0], first, batch), (impls[1], second, other)):
        assert_matches_oracle(each, run(impl, metadata, each, make_cache(each, "packed")))
    assert len(built) == 1


def test_a_pass_sees_lengths_that_moved_under_one_metadata(load, plans):
    """Draft steps move the lengths in place, and a graph is warmed up and captured with one description."""
    ours = load()
    batch = make_batch([(1, 30), (1, 20)], layout="packed")
    longer = batch.replace(seqlens_k=batch.seqlens_k.clone(), lengths=((1, 32), (1, 32)))
    for x in (batch.k_cache, batch.v_cache):
        x.nan_to_num_(0.5)
    built = plans(ours)
    impls = [make_impl(ours, batch) for _ in range(2)]
    builder = make_builder(ours, impls[0])
    assert builder.supports_draft_decode_metadata_update
    metadata = builder.build(0, make_common(batch, seq_lens=longer.seqlens_k))
    for each, lengths in ((batch, batch.seqlens_k), (longer, torch.tensor([32, 32], dtype=torch.int32))):
        longer.seqlens_k.copy_(lengths)
        builder.update_draft_decode_metadata(metadata)
        for impl in impls:
            assert_matches_oracle(each, run(impl, metadata, batch, make_cache(batch, "packed")))
    assert len(built) == 2


def test_bounds_of_the_query_lengths(load):
    ours = load()
    batch = make_batch([(1, 9), (3, 9)], layout="packed")
    impl, common = make_impl(ours, batch), make_common(batch)
    builder = make_builder(ours, impl)
    assert builder.build(0, common).max_query_len == 3
    # Decodes are captured apart, and such a graph replays with no longer query.
    assert builder.build_for_cudagraph_capture(common).max_query_len == 3
    # A graph for everything is captured with short queries and may replay with one long one.
    builder = make_builder(ours, impl, mode=CUDAGraphMode.FULL)
    assert builder.build_for_cudagraph_capture(common).max_query_len is None
    assert builder.build(0, common).max_query_len == 3
    # Verified drafts may be dealt out on the device.
    drafts = make_builder(ours, impl, speculative_config=SimpleNamespace(num_speculative_tokens=7))
    assert drafts.build_for_drafting(common, 0).max_query_len == 8
    assert builder._cudagraph_support.name == "ALWAYS"


class NothingRead(TorchDispatchMode):
    """Fails where a tensor's value is read on the host, which on a GPU would wait for the device and end a capture."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read on the host"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("causal", [True, "tensor"])
def test_a_step_reads_nothing_on_the_host(load, monkeypatch, causal):
    """The operator's own calls are tested elsewhere: here they are left out, since the path for CPU tensors does read lengths."""
    ours = load()
    batch = make_batch(MIXED, layout="packed")
    impl = make_impl(ours, batch)
    builder = make_builder(ours, impl)
    common = make_common(batch, causal=True if causal is True else torch.ones(len(MIXED), dtype=torch.int32))
    calls = []
    monkeypatch.setattr(ours.steps, "plan", lambda *args, **kwargs: None)
    monkeypatch.setattr(ours.impl, "attention", lambda *args, **kwargs: calls.append("attention"))
    monkeypatch.setattr(ours.impl, "write_kv", lambda *args, **kwargs: calls.append("write_kv"))
    with NothingRead():
        metadata = builder.build_for_cudagraph_capture(common)
        impl.do_kv_cache_update(LAYER, batch.q[:, :1], batch.q[:, :1], make_cache(batch, "packed"), metadata.slot_mapping)
        run(impl, metadata, batch, make_cache(batch, "packed"))
    assert calls == ["write_kv", "attention"]


# Warm-up


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for the compiler")
@pytest.mark.parametrize("kind", [{}, dict(window=(5, 0), sinks=True), dict(softcap=5.0)], ids=str)
def test_nothing_is_compiled_after_the_builder_is_made(load, monkeypatch, kind):
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    ours = load()
    batches = [
        make_batch(lengths, layout="packed", num_q_heads=4, head_dim=24, seed=seed, **kind)
        for seed, lengths in enumerate([[(1, 5)], [(1, 40)] * 3, [(20, 33), (1, 7)], [(70, 70)]])
    ]
    impl = make_impl(ours, batches[0])
    builder = make_builder(ours, impl)
    before = num_compilations()
    for batch in batches:
        common = make_common(batch)
        metadata, cache = builder.build(0, common), make_cache(batch, "packed")
        new = torch.randn(len(common.slot_mapping), 2, 24).split(1, dim=1)
        impl.do_kv_cache_update(LAYER, *new, cache, common.slot_mapping)
        run(impl, metadata, batch, cache)
    assert num_compilations() == before


def test_each_way_of_calling_is_warmed_up(load, monkeypatch):
    ours, batch = load(), make_batch(MIXED)
    calls = []
    monkeypatch.setattr(ours.warm, "warmup", lambda **arguments: calls.append(arguments) or 0)

    def causality_of(attn_type="decoder", **config):
        calls.clear()
        make_builder(ours, make_impl(ours, batch, attn_type=attn_type), **config)
        return [(call["page_size"], call["causal"]) for call in calls]

    assert causality_of() == [(16, True)]
    assert causality_of(AttentionType.ENCODER_DECODER) == [(16, False)]
    assert causality_of(AttentionType.ENCODER_ONLY) == [(None, False)] * 2
    assert causality_of(attention_config=SimpleNamespace(use_non_causal=True)) == [(16, True), (16, False), (16, None)]


# Decode context parallelism


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
    monkeypatch.setattr(
        ours.vllm[f"vllm.v1.attention.ops.{'dcp' if release.dcp_module == 'dcp' else place}"], name, combine, raising=False
    )
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
