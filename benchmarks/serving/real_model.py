#!/usr/bin/env python3
"""A real model in vLLM with each attention backend: log-probabilities, greedy tokens against transformers, GSM8K by lm_eval.

    python benchmarks/serving/real_model.py convert SmolLM2-135M-Instruct.gguf model/     # a GGUF into what vLLM loads
    python benchmarks/serving/real_model.py logprobs model/ --data gsm8k/test.jsonl
    python benchmarks/serving/real_model.py greedy model/ --data gsm8k/test.jsonl
    python benchmarks/serving/real_model.py gsm8k model/ --data gsm8k/test.jsonl           # needs lm_eval

- `logprobs`: mean log-probability a token over the questions and answers, in bf16; each backend within 0.002 nats of the first.
- `greedy`: tokens in fp32, equal to those of transformers' eager attention (FLASH_ATTN has no fp32, TRITON_ATTN multiplies in TF32).
- `gsm8k`: exact match as lm_eval counts it, with five examples, in bf16; each backend within the standard error of the first.

Each exits 1 where that does not hold for uniattn. `--data` is GSM8K's test split as JSON lines with `question` and `answer`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import engines

NATS = 0.002
OURS = ("CUSTOM", "UNIATTN")


def texts(data: Path, limit: int | None) -> list[str]:
    """Each question with its answer."""
    rows = [json.loads(line) for line in data.read_text().splitlines()][:limit]
    return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF's weights and tokenizer as transformers and vLLM load them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers holds what it read from a GGUF to be quantised, and does not write it; the weights are plain by now.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def encode(folder: Path, words: list[str]) -> list[list[int]]:
    """Token ids of each text, by the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return [tokenizer(text)["input_ids"] for text in words]


def engine(folder: Path, dtype: str, backend: str) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    return dict(
        model=str(folder), dtype=dtype, attention_backend=backend, skip_tokenizer_init=True, max_model_len=2048,
        enable_prefix_caching=False, gpu_memory_utilization=0.6, max_num_batched_tokens=8192,
    )  # fmt: skip


def logprobs(a: argparse.Namespace) -> bool:
    """Mean log-probability of the texts' tokens, by prompt log-probabilities."""
    prompts = encode(a.model, texts(a.data, a.limit))
    sampling = dict(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    print("| backend | tokens | mean log-probability | off the first |\n|---|---|---|---|")
    first, right = None, True
    for backend in a.backends:
        result = engines.run(dict(engine=engine(a.model, "bfloat16", backend), prompts=prompts, sampling=sampling))
        if result is None:
            print(f"| {backend} | failed | | |")
            right = False
            continue
        values = [p for output in result["outputs"] for p in output["prompt_logprobs"] if p is not None]
        first = mean(values) if first is None else first
        print(f"| {backend} | {len(values):,} | {mean(values):.5f} | {mean(values) - first:+.5f} |", flush=True)
        right &= backend not in OURS or abs(mean(values) - first) <= NATS
    return right


def greedy(a: argparse.Namespace) -> bool:
    """Greedy tokens in fp32 beside transformers' eager attention, which FLASH_ATTN cannot do."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    prompts = encode(a.model, [text.split("\nAnswer:")[0] + "\nAnswer:" for text in texts(a.data, a.limit or 32)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(a.model, local_files_only=True, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    eager = []
    # Neither engine stops at the end of an answer, so that all are of one length.
    how = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, generation_config=how, attention_mask=torch.ones_like(ids))
        eager.append(out[0, len(prompt) :].tolist())
    del model
    torch.cuda.empty_cache()
    print("| backend | answers equal to transformers' |\n|---|---|")
    right = True
    for backend in [backend for backend in a.backends if backend != "FLASH_ATTN"]:
        sampling = dict(max_tokens=64, temperature=0.0, ignore_eos=True)
        result = engines.run(dict(engine=engine(a.model, "float32", backend), prompts=prompts, sampling=sampling))
        equal = 0 if result is None else sum(o["tokens"] == e for o, e in zip(result["outputs"], eager, strict=True))
        print(f"| {backend} | {equal}/{len(eager)}{'' if result else ' (failed)'} |", flush=True)
        right &= backend not in OURS or equal == len(eager)
    return right


TASK = """\
task: gsm8k_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: generate_until
test_split: test
fewshot_split: test
num_fewshot: 5
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:", "</s>", "<|im_end|>"], do_sample: false, temperature: 0.0, max_gen_toks: 256}}
filter_list:
  - name: flexible
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
      - {{function: take_first}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
"""


def gsm8k(a: argparse.Namespace) -> bool:
    """Exact match by lm_eval, run as its users run it, with a task that reads the local file."""
    print("| backend | exact match | standard error |\n|---|---|---|")
    first, right = None, True
    for backend in a.backends:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "gsm8k_local.yaml").write_text(TASK.format(data=a.data.resolve()))
            arguments = f"pretrained={a.model},dtype=bfloat16,attention_backend={backend},gpu_memory_utilization=0.6,max_model_len=4096"
            command = [
                sys.executable, "-m", "lm_eval", "--model", "vllm", "--model_args", arguments, "--tasks", "gsm8k_local",
                "--include_path", folder, "--batch_size", "auto", "--output_path", f"{folder}/out",
                *(["--limit", str(a.limit)] if a.limit else []),
            ]  # fmt: skip
            subprocess.run(command, env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}, check=False)
            found = sorted(Path(folder, "out").rglob("results_*.json"))
            if not found:
                print(f"| {backend} | failed | |")
                right = False
                continue
            scores = json.loads(found[-1].read_text())["results"]["gsm8k_local"]
        value, error = scores["exact_match,flexible"], scores["exact_match_stderr,flexible"]
        first = value if first is None else first
        print(f"| {backend} | {value:.4f} | {error:.4f} |", flush=True)
        right &= backend not in OURS or abs(value - first) <= error
    return right


def main() -> int:
    """One part, named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    converting = parts.add_parser("convert")
    converting.add_argument("gguf", type=Path)
    converting.add_argument("folder", type=Path)
    for part in (logprobs, greedy, gsm8k):
        sub = parts.add_parser(part.__name__, help=part.__doc__)
        sub.add_argument("model", type=Path, help="a model's folder")
        sub.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl")
        sub.add_argument("--backends", nargs="+", default=["FLASH_ATTN", "TRITON_ATTN", "CUSTOM"])
        sub.add_argument("--limit", type=int, help="so many questions only")
    a = parser.parse_args()
    if a.part == "convert":
        convert(a.gguf, a.folder)
        return 0
    right = {part.__name__: part for part in (logprobs, greedy, gsm8k)}[a.part](a)
    print("all right" if right else "NOT RIGHT")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
