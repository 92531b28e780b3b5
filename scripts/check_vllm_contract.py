#!/usr/bin/env python3
"""Holds what uniattn's vLLM backend relies on against vLLM's own files, release by release.

    python scripts/check_vllm_contract.py vllm-0.26.0-*.whl path/to/vllm-checkout ...

Each argument is a wheel, or a folder that holds `vllm/`. The files are parsed, never imported, so neither vLLM nor a GPU is needed.
Prints a Markdown table with a row for each thing relied on and a column for each release; exits 1 where something is amiss.
"""

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

BACKEND, ATTENTION = "v1/attention/backend.py", "model_executor/layers/attention/attention.py"
BUILDER = ("__init__", "build")
TEN = ["num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype", "logits_soft_cap",
       "attn_type", "kv_sharing_target_layer_name"]  # fmt: skip
FORWARD = ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale"]
BATCH = ["query_start_loc", "seq_lens", "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping",
         "causal"]  # fmt: skip


class Tree:
    """A release's files by their path below `vllm/`."""

    def __init__(self, path: Path):
        self.path = path
        self.parsed: dict[str, ast.Module] = {}

    def text(self, name: str) -> str | None:
        """A file's text, None where there is none."""
        if self.path.is_file():
            with zipfile.ZipFile(self.path) as wheel:
                return wheel.read(f"vllm/{name}").decode() if f"vllm/{name}" in wheel.namelist() else None
        file = self.path / "vllm" / name
        return file.read_text() if file.exists() else None

    def module(self, name: str) -> ast.Module:
        """A file parsed, empty where there is none."""
        if name not in self.parsed:
            self.parsed[name] = ast.parse(self.text(name) or "")
        return self.parsed[name]

    def find(self, file: str, *names: str) -> ast.AST | None:
        """A class or function by its names from the outside in."""
        node: ast.AST | None = self.module(file)
        for name in names:
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            node = next((n for n in ast.iter_child_nodes(node) if isinstance(n, kinds) and n.name == name), None) if node else None
        return node

    def parameters(self, file: str, *names: str) -> list[str] | None:
        """Names of a function's parameters, without self and cls; None where there is no such function."""
        node = self.find(file, *names)
        if not isinstance(node, ast.FunctionDef):
            return None
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return [name for name in arguments if name not in ("self", "cls")]

    def members(self, file: str, name: str) -> set[str]:
        """What a class body defines: methods, fields, members."""
        node = self.find(file, name)
        found = set()
        for child in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(child.name)
            targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
            found |= {t.id for t in targets if isinstance(t, ast.Name)}
        return found

    def source(self, file: str, *names: str) -> str:
        """A class's or function's text."""
        node = self.find(file, *names)
        return ast.unparse(node) if node else ""

    @cached_property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @cached_property
    def version(self) -> str:
        """From `_version.py`, or from the wheel's name."""
        found = re.search(r"__version__ = version = '([^']+)'", self.text("_version.py") or "")
        found = found or re.search(r"vllm-([0-9.]+)", self.path.name)
        if found is None:
            raise SystemExit(f"{self.path}: holds no vllm/_version.py")
        return found[1]


def lacking(needed: list[str], there: set[str] | list[str] | None, where: str) -> Iterator[str]:
    """Those needed that are not there."""
    yield from (f"{where} has no {name}" for name in needed if name not in (there or ()))


def registry(t: Tree) -> Iterator[str]:
    """CUSTOM can be registered by its class's path; a plugin may add a name from 0.32 on; the plugins' group has its name."""
    file = "v1/attention/backends/registry.py"
    members = t.members(file, "AttentionBackendEnum")
    yield from lacking(["CUSTOM"], members, "AttentionBackendEnum")
    if (t.parameters(file, "register_backend") or [])[:2] != ["backend", "class_path"]:
        yield "register_backend takes other arguments"
    if ("register" in members) != (t.release >= (0, 32)):
        yield "names can be added before 0.32, or not from then on"
    if '"vllm.general_plugins"' not in (t.text("plugins/__init__.py") or ""):
        yield "no plugin group vllm.general_plugins"


def questions(t: Tree) -> Iterator[str]:
    """The questions that the backend answers are asked, and a refusal stops vLLM with the reasons."""
    asked = ["supports_head_size", "supports_block_size", "supports_sink", "supports_non_causal", "supports_attn_type",
             "get_supported_kernel_block_sizes", "supported_dtypes", "supported_kv_cache_dtypes",
             "forward_includes_kv_cache_update"]  # fmt: skip
    asked += ["supports_sliding_window"] if t.release >= (0, 26) else []
    yield from lacking(asked, t.members(BACKEND, "AttentionBackend"), "AttentionBackend")
    parameters = t.parameters(BACKEND, "AttentionBackend", "validate_configuration")
    yield from lacking(["dtype", "kv_cache_dtype", "head_size", "device_capability"], parameters, "validate_configuration")
    for platform in ("cuda", "rocm"):
        if "is not valid for this configuration. Reason: " not in ast.unparse(t.module(f"platforms/{platform}.py")):
            yield f"{platform} refuses in other words"


def abstract(t: Tree) -> Iterator[str]:
    """Nothing is abstract that the backend does not define."""
    ours = {
        "AttentionBackend": {"get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape"},
        "AttentionMetadataBuilder": {"__init__", "build"},
        "AttentionImplBase": set(),
        "AttentionImpl": {"__init__", "forward"},
    }
    for name, defined in ours.items():
        node = t.find(BACKEND, name)
        if not isinstance(node, ast.ClassDef):
            yield f"no class {name}"
            continue
        for method in node.body:
            decorators = [ast.unparse(d) for d in getattr(method, "decorator_list", ())]
            if "abstractmethod" in decorators and method.name not in defined:
                yield f"{name}.{method.name} is abstract"


def layer(t: Tree) -> Iterator[str]:
    """A layer makes its attention with ten arguments by position, calls it and its cache write as the backend expects."""
    if (t.parameters(BACKEND, "AttentionImpl", "__init__") or [])[:10] != TEN:
        yield "AttentionImpl.__init__ takes other arguments"
    if t.parameters(BACKEND, "AttentionImpl", "forward") != FORWARD:
        yield "AttentionImpl.forward takes other arguments"
    made = [n for n in ast.walk(t.module(ATTENTION)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "impl_cls"]
    if [len(call.args) for call in made] != [10] or any(k.arg is not None for k in made[0].keywords):
        yield "Attention makes its impl otherwise"
    if "AttentionBackendEnum[self.attn_backend.get_name()]" not in t.source(ATTENTION, "Attention"):
        yield "Attention looks the backend's name up otherwise"
    if "do_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping)" not in t.source(ATTENTION, "unified_kv_cache_update"):
        yield "the cache is written by another call"
    for scale in ("_k_scale", "_v_scale"):
        if f"register_buffer('{scale}', torch.tensor(1.0, dtype=torch.float32))" not in ast.unparse(t.module(ATTENTION)):
            yield f"layers have no {scale}"


def batch(t: Tree) -> Iterator[str]:
    """The batch's description has what the builder reads."""
    yield from lacking(BATCH, t.members(BACKEND, "CommonAttentionMetadata"), "CommonAttentionMetadata")


def builder(t: Tree) -> Iterator[str]:
    """Builders are made and called as ours is, and may say that they serve every CUDA graph."""
    name = "AttentionMetadataBuilder"
    expected = {
        "__init__": ["kv_cache_spec", "layer_names", "vllm_config", "device"],
        "build": ["common_prefix_len", "common_attn_metadata", "fast_build"],
        "build_for_cudagraph_capture": ["common_attn_metadata"],
        "build_for_drafting": ["common_attn_metadata", "draft_index"],
        "update_block_table": ["metadata", "blk_table", "slot_mapping"],
    }
    for method, parameters in expected.items():
        if t.parameters(BACKEND, name, method) != parameters:
            yield f"{name}.{method} takes other arguments"
    yield from lacking(["_cudagraph_support", "supports_update_block_table"], t.members(BACKEND, name), name)
    yield from lacking(["ALWAYS"], t.members(BACKEND, "AttentionCGSupport"), "AttentionCGSupport")
    types = ["DECODER", "ENCODER", "ENCODER_ONLY", "ENCODER_DECODER"]
    yield from lacking(types, t.members(BACKEND, "AttentionType"), "AttentionType")
    if "supports_draft_decode_metadata_update" in t.members(BACKEND, name):
        if t.parameters(BACKEND, name, "update_draft_decode_metadata") != ["metadata"]:
            yield f"{name}.update_draft_decode_metadata takes other arguments"
    elif t.release >= (0, 28):
        yield "no supports_draft_decode_metadata_update"


def config(t: Tree) -> Iterator[str]:
    """The configuration has what the builder reads."""
    read = {
        ("vllm", "VllmConfig"): ["model_config", "attention_config", "compilation_config", "parallel_config", "speculative_config"],
        ("attention", "AttentionConfig"): ["use_non_causal"],
        ("compilation", "CompilationConfig"): ["cudagraph_mode", "static_forward_context"],
        ("compilation", "CUDAGraphMode"): ["FULL", "mixed_mode"],
        ("parallel", "ParallelConfig"): ["cp_kv_cache_interleave_size", "dcp_comm_backend"],
        ("speculative", "SpeculativeConfig"): ["num_speculative_tokens"],
    }
    for (file, name), attributes in read.items():
        yield from lacking(attributes, t.members(f"config/{file}.py", name), name)
    if ("rswa_window" in t.members("config/model.py", "ModelConfig")) != (t.release >= (0, 25)):
        yield "R-SWA came with another release than 0.25"


def cache(t: Tree) -> Iterator[str]:
    """vLLM's own Triton backend gives the cache the shape that `releases.pages` takes apart, until 0.28; then vLLM does."""
    file = "v1/attention/backends/triton_attn.py"
    shape = t.source(file, "TritonAttentionBackend", "get_kv_cache_shape")
    split, packed = "(num_blocks, 2, block_size, num_kv_heads, head_size)", "(num_blocks, num_kv_heads, block_size, 2 * head_size)"
    expected = "" if t.release >= (0, 29) else packed if t.release >= (0, 26) else split
    if (shape and not expected) or f"return {expected}" not in (shape or "return "):
        yield f"the cache's shape is not {expected or 'left to vLLM'}"
    taken_apart = "kv_cache.unbind(1)" if t.release < (0, 26) else "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"
    if taken_apart not in t.source(file, "TritonAttentionImpl", "do_kv_cache_update"):
        yield f"vLLM does not take it apart by {taken_apart}"


def context_parallel(t: Tree) -> Iterator[str]:
    """The ranks' results are merged by functions of these names, where `context_parallel_combine` looks for them."""
    both = {"cp_lse_ag_out_rs": "common", "dcp_a2a_lse_reduce": "dcp_alltoall"}
    for name, older in both.items():
        file = f"v1/attention/ops/{'dcp' if t.text('v1/attention/ops/dcp.py') else older}.py"
        parameters = t.parameters(file, name) or []
        if parameters[:3] != ["cp_attn_out", "cp_attn_lse", "cp_group"] or "return_lse" not in parameters:
            yield f"no {name}(out, lse, group, return_lse) in {file}"
    if t.parameters("distributed/parallel_state.py", "get_dcp_group") != []:
        yield "no get_dcp_group()"
    made = t.source(BACKEND, "AttentionImplBase", "__new__")
    yield from (f"an impl is made without {name}" for name in ("self.dcp_world_size", "self.dcp_rank") if name not in made)


def platform(t: Tree) -> Iterator[str]:
    """The platform tells what the backend asks it."""
    file = "platforms/interface.py"
    yield from lacking(["is_cuda_alike", "is_cuda", "fp8_dtype"], t.members(file, "Platform"), "Platform")
    yield from lacking(["major", "minor"], t.members(file, "DeviceCapability"), "DeviceCapability")


CHECKS: tuple[Callable[[Tree], Iterator[str]], ...] = (
    registry, questions, abstract, layer, batch, builder, config, cache, context_parallel, platform,
)  # fmt: skip


def main() -> int:
    """Check every release named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", help="wheels, or folders that hold vllm/")
    trees = sorted((Tree(path) for path in parser.parse_args().paths), key=lambda t: [int(n) for n in t.version.split(".")[:3]])
    problems = {(check.__name__, t.version): list(check(t)) for check in CHECKS for t in trees}
    print("| relied on |" + "".join(f" {t.version} |" for t in trees))
    print("|---|" + "---|" * len(trees))
    for check in CHECKS:
        words = (check.__doc__ or "").split(". ")[0].rstrip(".")
        print(f"| {words} |" + "".join(f" {'no' if problems[check.__name__, t.version] else 'yes'} |" for t in trees))
    amiss = [f"{version}: {problem}" for (_, version), found in problems.items() for problem in found]
    print("\n" + "\n".join(amiss or ["Nothing is amiss."]))
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main())
