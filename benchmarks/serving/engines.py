"""One offline engine of vLLM in a process of its own: a job goes in as JSON, tokens and log-probabilities come out."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any] | None:
    """Generate in a new process, whose memory is free again afterwards; None where it failed, with its words on stderr.

    The job: `engine` (arguments of vLLM's `LLM`; those that the release lacks are left out), `prompts` (token ids), `sampling`
    (arguments of `SamplingParams`). The result: for each prompt `tokens` and `logprobs` of what was generated and
    `prompt_logprobs` (null for the first token, and where none were asked for), and how many kernels uniattn compiled before and
    while generating.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "job.json"), Path(folder, "result.json")
        files[0].write_text(json.dumps(job))
        # In one process, so that uniattn's counter is at hand.
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        subprocess.run([sys.executable, __file__, *map(str, files)], env=environment, check=False)
        return json.loads(files[1].read_text()) if files[1].exists() else None


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job in this process."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from uniattn.launch.cache import num_compilations

    known = {field.name for field in fields(EngineArgs)}
    llm = LLM(**{name: value for name, value in job["engine"].items() if name in known})
    before = num_compilations()
    sampling = SamplingParams(detokenize=False, **job["sampling"])
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling)
    compiled = [before, num_compilations() - before]
    results = []
    for output in outputs:
        [choice] = output.outputs
        results.append(
            dict(
                tokens=list(choice.token_ids),
                logprobs=[at[token].logprob for at, token in zip(choice.logprobs or [], choice.token_ids, strict=False)],
                prompt_logprobs=[
                    at and at[token].logprob for at, token in zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=False)
                ],
            )
        )
    return dict(outputs=results, compiled=compiled)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(generate(json.loads(Path(sys.argv[1]).read_text()))))
