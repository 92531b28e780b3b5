"""vLLM's backend before it serves: how it becomes known, and which configurations it takes or refuses, with reasons."""

import pickle
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch
from vllm_standins import RELEASES, AttentionType
from vllm_tools import MIXED, every_release, make_builder, make_cache, make_common, make_impl

from uniattn.testing import make_batch


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


def test_the_added_name_is_pickled_so_that_a_new_process_registers_it_first(load):
    ours = load()
    ours.plugin.register()
    registry = ours.vllm["vllm.v1.attention.backends.registry"]
    pickled = pickle.dumps(registry.AttentionBackendEnum["UNIATTN"])
    registry.overrides.clear()
    assert pickle.loads(pickled) is registry.AttentionBackendEnum["UNIATTN"]
    assert set(registry.overrides) == {"CUSTOM", "UNIATTN"}


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
    [entry] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "uniattn"]
    assert entry.value == "uniattn.integrations.vllm:register"


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


def test_fp8_caches_are_taken_where_the_operator_takes_them(load, monkeypatch):
    ours = load()
    reasons = ours.backend.UniattnBackend.validate_configuration(**FINE | dict(kv_cache_dtype="fp8", use_per_head_quant_scales=True))
    assert (reasons == []) is ours.backend.FP8_CACHES


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_bytes_of_an_fp8_cache_go_to_the_operator_as_what_they_are_with_the_layers_scales(load, monkeypatch, name, dtype):
    ours = load()
    batch = make_batch(MIXED, layout="packed")
    impl = make_impl(ours, batch, kv_cache_dtype=name)
    cache = torch.zeros(make_cache(batch, "packed").shape, dtype=torch.uint8)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor([0.25]))
    calls = []
    monkeypatch.setattr(ours.steps, "plan", lambda *args, **kwargs: None)
    for operator in ("attention", "write_kv"):
        monkeypatch.setattr(ours.impl, operator, lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(ours.warm, "warmup", lambda **arguments: calls.append(((), arguments)) or 0)
    metadata = make_builder(ours, impl).build(0, make_common(batch))
    new = torch.zeros(2, 1, 64)
    impl.do_kv_cache_update(layer, new, new, cache, metadata.slot_mapping[:2])
    impl.forward(layer, batch.q, None, None, cache, metadata, torch.zeros_like(batch.q))
    (_, warm), (write, scales_written), (attend, scales_read) = calls
    assert warm["kv_dtype"] is dtype
    assert warm["k_scale"] is warm["v_scale"] is True
    assert {x.dtype for x in (*write[2:4], *attend[1:3])} == {dtype}
    for scales in (scales_written, scales_read):
        assert scales["k_scale"] is layer._k_scale
        assert scales["v_scale"] is layer._v_scale


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
