"""Turns measured rates into plans, and is the operator's command line.

Read in this order: `admission` and `placement` (the two decisions), `build` (rates to plan), `job` (the cycle); `cli/`
has one file a command group.
"""
