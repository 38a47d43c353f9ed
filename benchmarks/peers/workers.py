"""Engines that SpecRelay is measured against, each behind the same two lines: a prompt in, its answer and times out.

Run by the interpreter of the peer's own environment, without any of our code: `python workers.py KIND FOLDER`.
Reads JSON lines {"prompt": [token ids], "tokens": N} and writes {"tokens": [...], "seconds": …}, first {"ready": …}.
"""

import json
import os
import sys
import time
from collections.abc import Callable

Answer = Callable[[list[int], int], list[int]]


def transformers_plain(folder: str) -> Answer:
    return _transformers(folder, {})


def transformers_lookup(folder: str) -> Answer:
    return _transformers(folder, {"prompt_lookup_num_tokens": 10})


def _transformers(folder: str, options: dict[str, object]) -> Answer:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return [int(token) for token in made[0, len(prompt) :]]

    return answer


def llama_cpp(path: str) -> Answer:
    """`path`: a GGUF file."""
    import llama_cpp

    threads = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(model_path=path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)

    def answer(prompt: list[int], count: int) -> list[int]:
        model.reset()
        made: list[int] = []
        for token in model.generate(prompt, temp=0.0, reset=True):
            made.append(int(token))
            if len(made) == count:
                return made
        return made

    return answer


def vllm_plain(folder: str) -> Answer:
    return _vllm(folder, None)


def vllm_ngram(folder: str) -> Answer:
    return _vllm(folder, {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})


def _vllm(folder: str, speculative: dict[str, object] | None) -> Answer:
    import vllm

    model = vllm.LLM(
        folder, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False, speculative_config=speculative
    )

    def answer(prompt: list[int], count: int) -> list[int]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        [made] = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(made.outputs[0].token_ids)

    return answer


KINDS: dict[str, Callable[[str], Answer]] = {
    "transformers": transformers_plain,
    "transformers-lookup": transformers_lookup,
    "llama.cpp": llama_cpp,
    "vllm": vllm_plain,
    "vllm-ngram": vllm_ngram,
}


def main() -> None:
    kind, source = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")  # what libraries print must not come between the replies
    os.dup2(2, 1)
    answer = KINDS[kind](source)
    print(json.dumps({"ready": kind}), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started_s = time.perf_counter()
        tokens = answer(asked["prompt"], asked["tokens"])
        took_s = time.perf_counter() - started_s
        print(json.dumps({"tokens": tokens, "seconds": took_s}), file=replies, flush=True)


if __name__ == "__main__":
    main()
