"""A program with vLLM's EngineCore in its own process, which gets the patch by entry point; prints one JSON object."""

import json
import os
import sys
import time

from tests.engine.tiny_model import ENGINE, ENVIRONMENT, tiny_model


def main() -> None:
    """Serve, switch over RPC, serve, and tell: answers, statuses and the shadow's process before and after the end."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    from tests.engine.attached import answers, hot_hit_rate, mixed, outputs

    llm, prompts = LLM(tiny_model(), **ENGINE), mixed(7, 40)
    core, executor = llm.llm_engine.engine_core, llm.llm_engine.vllm_config.parallel_config.distributed_executor_backend
    told = {"here": os.getpid(), "executor": executor, "start": core.call_utility("wakman_status")}
    told |= {"answers": {}, "hot": {}}
    for policy in ("lru", "s3fifo", "arc") if told["start"]["attached"] else ():
        core.call_utility("wakman_set_policy", policy, "test", "try it")
        told["answers"][policy] = answers(llm, prompts)
        told["hot"][policy] = hot_hit_rate(outputs(llm, prompts))
    told["history"] = core.call_utility("wakman_history")
    core.call_utility("wakman_set_policy", "off", "test", "enough")
    told["answers"]["stock"] = answers(llm, prompts)
    told["end"] = core.call_utility("wakman_status")
    core.shutdown()
    shadow, ends = told["start"].get("shadow", {}).get("pid"), time.monotonic() + 10
    while shadow and os.path.exists(f"/proc/{shadow}") and time.monotonic() < ends:
        time.sleep(0.05)
    told["shadow_left"] = bool(shadow) and os.path.exists(f"/proc/{shadow}")
    sys.stdout.write("\nTOLD " + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
