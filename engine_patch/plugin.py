"""The entry point `wakman` of vLLM's general plugins: prepares classes, and does nothing else.

1. vLLM calls `register` in every process (front end, engine, worker, model inspection; three to five times a server)
   and lets its exceptions kill the process: it never raises, and a second call changes nothing.
2. It wraps `Scheduler.__init__`, which only the process with the engine runs, and adds the control methods to
   `EngineCore`. A child that was forked has both, and vLLM does not call `register` there: so nothing here hangs on a
   process (no thread, port, file, child process, process id).
3. Both classes are patched on themselves, in place: vLLM may have imported them already. Cost: 14 ms to import the
   scheduler in a worker (which has most of vLLM by then), up to 1.4 s where nothing of vLLM was imported yet.
"""

import logging

logger = logging.getLogger("vllm.wakman")


# Why this process could not be prepared, for the status; empty when it was.
failure = ""


def register() -> None:
    """Prepare this process for control and for a late attach, each whatever became of the other. Never raises."""
    global failure  # noqa: PLW0603 - one fact about this process
    try:
        from engine_patch import control

        control.install()
    except Exception as error:
        logger.warning(
            "wakman: no control over RPC: EngineCore cannot be extended (%s: %s)", type(error).__name__, error
        )
    try:
        from engine_patch import attach

        attach.install()
        failure = ""
    except Exception as error:
        failure = f"vLLM's scheduler cannot be wrapped ({type(error).__name__}: {error})"
        logger.warning("wakman: not attached: %s", failure)
