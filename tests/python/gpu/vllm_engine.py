"""A real vLLM that generates, its engine in this process. Its argument is JSON; it answers each
line of its input by one of its output that begins with SAID."""
import json
import os
import sys

job = json.loads(sys.argv[1])
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm  # noqa: E402

PROMPTS = [[1, 5, 9, 200, 31], list(range(40, 90)), [7]]


def say(said):
    print("SAID", json.dumps(said), flush=True)


def generate(llm):
    """Tokens, and how likely each was, to the last bit."""
    asked = vllm.SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, ignore_eos=True,
                                detokenize=False)
    done = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], asked,
                        use_tqdm=False)
    return [[[token, held[token].logprob] for token, held in zip(one.token_ids, one.logprobs)]
            for request in done for one in request.outputs]


def main():
    say({"starts": vllm.__version__})
    llm = vllm.LLM(
        model=job["path"], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        max_model_len=256, seed=0, load_format=job["load_format"],
        model_loader_extra_config=job.get("options", {}),
        worker_extension_cls="rekindle.vllm.WorkerExtension", **{"gpu_memory_utilization": 0.2, **job.get("more", {})})
    say({"status": llm.collective_rpc("rekindle_status"),
         "kv_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks})
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        try:
            if order == "generate":
                say({"outputs": generate(llm)})
            elif order == "forget":  # what was computed by the weights of before
                say({"forgotten": llm.reset_prefix_cache()})
            else:
                say({order: llm.collective_rpc(order, args=tuple(arguments))})
        except Exception as why:  # of a rank elsewhere: told as RuntimeError
            say({"error": [type(why).__name__, str(why)]})


if __name__ == "__main__":  # its ranks import this file
    main()
