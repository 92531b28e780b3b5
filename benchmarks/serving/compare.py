#!/usr/bin/env python3
"""Do vLLM's attention backends generate the same with small models of random weights?

    python benchmarks/serving/compare.py                 # a Llama, and a Gemma 2 with windows and softcaps
    python benchmarks/serving/compare.py --models llama --quick

Each model generates greedily for prompts of 1 to 1,500 tokens, with CUDA graphs, chunked prefills and decodes in one step. In fp32
our tokens must be those of transformers' eager attention, with graphs of decodes alone and with graphs of every batch; FLASH_ATTN has
no fp32, and TRITON_ATTN multiplies in TF32. In bf16, where rounding may turn a token, the table shows how the backends agree with
each other, as a measure for ours. Exits 1 where fp32 differs, an engine fails, or uniattn compiles a kernel while generating. Needs
a GPU, vLLM, and uniattn installed as a package.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import engines

NUM_TOKENS, VOCAB = 48, 2048
SIZES = dict(
    vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=4096, initializer_range=0.05, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(sliding_window=64, query_pre_attn_scalar=64, attn_logit_softcapping=20.0, final_logit_softcapping=30.0),
    ),
}
# (dtype, backend, mode of CUDA graphs)
RUNS = [
    ("float32", "TRITON_ATTN", None),
    ("float32", "CUSTOM", None),
    ("float32", "CUSTOM", "FULL"),
    ("bfloat16", "FLASH_ATTN", None),
    ("bfloat16", "TRITON_ATTN", None),
    ("bfloat16", "CUSTOM", None),
]
EAGER = ("eager", None)
PAIRS = [
    ("float32", ("CUSTOM", None), EAGER),
    ("float32", ("CUSTOM", "FULL"), EAGER),
    ("float32", ("TRITON_ATTN", None), EAGER),
    ("bfloat16", ("CUSTOM", None), ("FLASH_ATTN", None)),
    ("bfloat16", ("CUSTOM", None), ("TRITON_ATTN", None)),
    ("bfloat16", ("TRITON_ATTN", None), ("FLASH_ATTN", None)),
]


def make_model(name: str, folder: Path) -> Path:
    """A model with random weights, large enough that attention decides the tokens."""
    import torch
    import transformers

    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES | options)
    model = getattr(transformers, model_class)(config)
    if config.tie_word_embeddings:
        model.get_input_embeddings().weight.data *= 0.1  # else each token repeats the one before, whatever attention says
    model.save_pretrained(folder / name)
    return folder / name


def eager(folder: Path) -> dict[str, Any]:
    """What transformers generates in fp32, one prompt after another, as `engines.run` returns it."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to("cuda").eval()
    how = GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    outputs = []
    for prompt in make_prompts():
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            out = model.generate(ids, generation_config=how, attention_mask=torch.ones_like(ids))
        tokens = out.sequences[0, len(prompt) :]
        logprobs = torch.cat(out.logits).float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        outputs.append(dict(tokens=tokens.tolist(), logprobs=logprobs.tolist()))
    return dict(outputs=outputs)


def make_prompts() -> list[list[int]]:
    """Prompts of mixed lengths, the same for every engine."""
    draw = random.Random(0)
    lengths = [1, 2, 5, 17, 64, 129, 300, 700, 1500] + [draw.randint(1, 400) for _ in range(15)]
    return [draw.choices(range(10, VOCAB), k=n) for n in lengths]


def job(model: Path, dtype: str, backend: str, mode: str | None, jit_error: bool) -> dict[str, Any]:
    """What `engines.run` is given. 512 tokens a step cut the longer prompts into chunks."""
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]}
    if mode:
        graphs["cudagraph_mode"] = mode
    engine = dict(
        model=str(model), dtype=dtype, attention_backend=backend, skip_tokenizer_init=True, max_model_len=2048,
        max_num_batched_tokens=512, max_num_seqs=32, gpu_memory_utilization=0.3, compilation_config=graphs,
        jit_monitor_mode="error" if jit_error and backend == "CUSTOM" else "warn",
    )  # fmt: skip
    return dict(engine=engine, prompts=make_prompts(), sampling=dict(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0))


def agreement(a: dict[str, Any], b: dict[str, Any]) -> tuple[int, float, float]:
    """Prompts with equal tokens, mean number of equal tokens before the first other one, largest difference of log-probabilities
    up to there."""
    equal, prefixes, difference = 0, [], 0.0
    for x, y in zip(a["outputs"], b["outputs"], strict=True):
        n = next((i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t), len(x["tokens"]))
        equal += n == len(x["tokens"])
        prefixes.append(n)
        difference = max([difference, *(abs(p - q) for p, q in zip(x["logprobs"][:n], y["logprobs"][:n], strict=True))])
    return equal, sum(prefixes) / len(prefixes), difference


def main() -> int:
    """Run every engine, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="fp32 and graphs of decodes alone")
    parser.add_argument("--jit-error", action="store_true", help="let vLLM stop where a kernel is compiled while generating (0.25)")
    a = parser.parse_args()
    runs = RUNS[:2] if a.quick else RUNS
    lines = ["| model | dtype | backends | equal | tokens before the first other | log-probability |", "|---" * 6 + "|"]
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for name in a.models:
            model = make_model(name, Path(folder))
            done: dict[tuple[str, tuple[str, str | None]], dict[str, Any] | None] = {}
            for dtype, backend, mode in runs:
                done[dtype, (backend, mode)] = engines.run(job(model, dtype, backend, mode, a.jit_error))
                print(f"{name} {dtype} {backend} {mode or ''}: done", file=sys.stderr, flush=True)
            for (dtype, (backend, mode)), result in done.items():
                words = f"{name} {dtype} {backend}{' ' + mode if mode else ''}"
                if result is None:
                    lines.append(f"{words}: failed")
                    right = False
                elif backend == "CUSTOM":
                    lines.append(f"{words}: {result['compiled'][0]} kernels ready, {result['compiled'][1]} compiled while generating")
                    right &= result["compiled"][0] > 0 and result["compiled"][1] == 0
            done["float32", EAGER] = eager(model)
            for dtype, one, other in PAIRS:
                first, second = done.get((dtype, one)), done.get((dtype, other))
                if first and second:
                    equal, prefix, difference = agreement(first, second)
                    count = len(first["outputs"])
                    pair = " and ".join(" ".join(filter(None, each)) for each in (one, other))
                    lines.append(f"| {name} | {dtype} | {pair} | {equal}/{count} | {prefix:.1f} | {difference:.2g} |")
                    right &= dtype != "float32" or one[0] != "CUSTOM" or equal == count
    table = [line for line in lines if line.startswith("|")]
    print("\n".join([line for line in lines if not line.startswith("|")] + [""] + table + ["", "all right" if right else "NOT RIGHT"]))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
