"""The external processor that Envoy asks where a request shall go.

Read in this order: `dispatch` (the decision), `table` and `fleet` (what it reads), `extproc` (one stream, one request),
then `plan` and `store` (how a table gets here), `feed` (what keeps it in step), `__main__` (how it is put together).
"""
