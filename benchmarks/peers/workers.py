"""Engines that SpecRelay is measured against, each behind the same two lines: prompts in, their answers and times out.

Run by the interpreter of the peer's own environment, without any of our code: `python workers.py KIND FOLDER`.
Reads JSON lines {"prompts": [[token ids], …], "tokens": N} and writes {"counts": [tokens made, …], "seconds": …}, first
{"ready": …}. What an engine cannot compute at once it computes one after another.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

Answer = Callable[[list[list[int]], int], list[int]]


def transformers(folder: str, options: dict[str, object]) -> Answer:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer(prompt: list[int], count: int) -> int:
        ids = torch.tensor([prompt])
        limits = {"max_new_tokens": count, "min_new_tokens": count}
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **limits, **options)
        return int(made.shape[1]) - len(prompt)

    return one_by_one(answer)


def llama_cpp(folder: str, kind: str | None) -> Answer:
    """The GGUF file that a package in this environment carries; or the same in another kind, made at the first run."""
    del folder
    import llama_cpp

    path = next(Path(sys.prefix).rglob("site-packages/**/*.gguf"))
    if kind is not None:
        carried, path = path, Path(sys.prefix) / f"{path.stem}-{kind}.gguf"
        if not path.exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
            assert llama_cpp.llama_model_quantize(str(carried).encode(), str(path).encode(), params) == 0, path
    threads = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(str(path), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)

    def answer(prompt: list[int], count: int) -> int:
        model.reset()
        for made, _ in enumerate(model.generate(prompt, temp=0.0, reset=True), start=1):
            if made == count:
                break
        return made

    return one_by_one(answer)


def vllm(folder: str, speculative: dict[str, object] | None) -> Answer:
    import vllm

    model = vllm.LLM(
        folder,
        dtype="bfloat16",
        max_model_len=4096,
        gpu_memory_utilization=0.1,  # of the main memory, here
        enable_prefix_caching=False,
        speculative_config=speculative,
    )

    def answer(prompts: list[list[int]], count: int) -> list[int]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [len(made.outputs[0].token_ids) for made in model.generate(asked, sampling, use_tqdm=False)]

    return answer


def one_by_one(answer: Callable[[list[int], int], int]) -> Answer:
    return lambda prompts, count: [answer(prompt, count) for prompt in prompts]


NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
KINDS: dict[str, Callable[[str], Answer]] = {
    "transformers": partial(transformers, options={}),
    "transformers-lookup": partial(transformers, options={"prompt_lookup_num_tokens": 10}),
    "llama.cpp-Q4_1": partial(llama_cpp, kind=None),
    "llama.cpp-BF16": partial(llama_cpp, kind="BF16"),
    "vllm": partial(vllm, speculative=None),
    "vllm-ngram": partial(vllm, speculative=NGRAM),
}


def main() -> None:
    kind, folder = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")  # what libraries print must not come between the replies
    os.dup2(2, 1)
    answer = KINDS[kind](folder)
    print(json.dumps({"ready": kind}), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started_s = time.perf_counter()
        counts = answer(asked["prompts"], asked["tokens"])
        took_s = time.perf_counter() - started_s
        print(json.dumps({"counts": counts, "seconds": took_s}), file=replies, flush=True)


if __name__ == "__main__":
    main()
