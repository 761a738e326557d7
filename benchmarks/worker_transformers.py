"""The worker that runs cases on transformers' continuous batching; see ``peers``."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    """Answer cases until the input ends."""
    start = time.perf_counter()
    torch.set_num_threads(int(sys.argv[3]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
    model.eval()
    print(json.dumps({"load_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        start = time.perf_counter()
        tokens = 0
        with torch.inference_mode():
            # Rows of one length go through `generate` together; it pads nothing then.
            groups: dict[tuple[int, int], list[list[int]]] = {}
            for ids, limit in zip(case["prompts"], case["max_tokens"], strict=True):
                groups.setdefault((len(ids), limit), []).append(ids)
            for (length, limit), rows in groups.items():
                config = GenerationConfig(
                    do_sample=False, max_new_tokens=limit, min_new_tokens=limit, pad_token_id=0
                )
                out = model.generate(torch.tensor(rows), generation_config=config)
                tokens += len(rows) * (out.shape[1] - length)
        print(
            json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}),
            flush=True,
        )


if __name__ == "__main__":
    main()
