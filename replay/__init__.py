"""Simulated engines and fleets, workloads, and the lab that starts a whole fleet on one machine."""
