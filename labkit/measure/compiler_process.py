"""The process that compiles for this one: started when first needed, kept, and replaced if it hangs or dies.

Starting it costs a second or two (it loads torch and Triton); a kernel after that costs what compiling costs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from labkit.errors import LabError

WORKER = Path(__file__).with_name("compile_worker.py")
TIMEOUT_S = 300

_lock = threading.Lock()  # one request at a time: replies carry no name
_process: subprocess.Popen | None = None
_owner = 0  # the process id that started it: after a fork, a child must not share its parent's pipes


def ask(request: dict, timeout_s: float = TIMEOUT_S) -> dict:
    """Send one request (see ``compile_worker``) and wait for its reply.

    Raises LabError if compiling takes more than ``timeout_s`` seconds, or crashes.
    """
    with _lock:
        message = pickle.dumps(request)
        try:
            pipe = _running()
            pipe.stdin.write(len(message).to_bytes(8, "big") + message)
            pipe.stdin.flush()
            end = time.monotonic() + timeout_s
            reply = json.loads(_read(pipe, int.from_bytes(_read(pipe, 8, end), "big"), end))
        except TimeoutError:
            stop()
            raise LabError(
                f"{request['name']}: the compiler took more than {timeout_s:g} s; take smaller blocks."
            ) from None
        except (EOFError, BrokenPipeError) as error:
            code = stop()
            raise LabError(f"{request['name']}: the compiler process ended with code {code}; try it again.") from error
    if "crash" in reply:
        raise LabError(f"{request['name']}: the compiler process ended with {reply['crash']}")
    return reply


def _running() -> subprocess.Popen:
    global _process, _owner
    if _process is None or _process.poll() is not None or _owner != os.getpid():
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        command = [sys.executable, "-P", str(WORKER)]
        _process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        _owner = os.getpid()
        atexit.register(stop)
    return _process


def _read(pipe: subprocess.Popen, count: int, end: float) -> bytes:
    """Exactly ``count`` bytes. Raises TimeoutError after ``end``, EOFError if the process has gone."""
    data = b""
    with selectors.DefaultSelector() as ready:
        ready.register(pipe.stdout, selectors.EVENT_READ)
        while len(data) < count:
            if not ready.select(max(0.0, end - time.monotonic())):
                raise TimeoutError
            part = pipe.stdout.read(count - len(data))
            if not part:
                raise EOFError
            data += part
    return data


def stop() -> int | None:
    """End the process, if this one started it; its exit code."""
    global _process
    process, _process = _process, None
    if process is None or _owner != os.getpid():
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the fork that may be compiling
    process.stdin.close()
    process.stdout.close()
    return process.wait()
