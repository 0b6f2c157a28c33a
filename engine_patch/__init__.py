"""Runs inside each vLLM: eviction policies for its KV cache, and what picks one from live traffic."""
