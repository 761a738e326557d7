"""The worker that runs cases on vLLM, in vLLM's own environment; see ``peers``."""

import json
import sys
import time


def main() -> None:
    """Answer cases until the input ends."""
    start = time.perf_counter()
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    llm = LLM(
        model=sys.argv[1],
        dtype=sys.argv[2],
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        seed=0,
    )
    print(json.dumps({"load_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
        params = [
            SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False)
            for limit in case["max_tokens"]
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        answer: dict[str, object] = {"seconds": seconds, "tokens": sum(map(len, ids))}
        if case.get("want_ids"):
            answer["ids"] = ids
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
