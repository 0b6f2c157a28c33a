"""A fleet on one machine: traces, simulated engines, the lab that runs the real parts around them, the demonstration.

Read in this order: `block_cache` and `engine_model` (one engine, pure), `sim_engine` (the same over HTTP), `workload`
(what is sent), `processes` and `lab` (the fleet), `demo` and `verdict` (two policies compared).
"""
