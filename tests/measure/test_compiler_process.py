"""The compiler's process: kept for the next kernel, replaced when it hangs or dies."""

import os
import signal

import pytest

from labkit.errors import LabError
from labkit.measure import compiler_process
from labkit.measure.compiler_process import ask

REQUEST = {"name": "k", "path": [], "files": {}, "module": "no_such_module"}


@pytest.fixture(autouse=True)
def own_process():
    compiler_process.stop()
    yield
    compiler_process.stop()


def test_one_process_answers_request_after_request():
    first = ask(REQUEST)
    process = compiler_process._process.pid
    assert "no_such_module" in first["error"]["message"] and ask(REQUEST) == first
    assert compiler_process._process.pid == process


def test_a_process_that_died_is_replaced():
    ask(REQUEST)
    os.kill(compiler_process._process.pid, signal.SIGKILL)
    compiler_process._process.wait()
    assert "error" in ask(REQUEST)


def crash(text):
    return REQUEST | {"module": "crashes", "files": {"crashes": text}}


def test_a_crash_is_told_and_the_next_kernel_compiles():
    with pytest.raises(LabError, match=r"k: the compiler process ended with code 3: the last words"):
        ask(crash("import os\nos.write(2, b'the last words')\nos._exit(3)"))
    with pytest.raises(LabError, match=r"ended with code -11"):
        ask(crash("import os\nos.kill(os.getpid(), 11)"))
    assert "error" in ask(REQUEST)


def test_a_compiler_that_hangs_is_ended():
    with pytest.raises(LabError, match="took more than 2 s; take smaller blocks"):
        ask(crash("import time\ntime.sleep(60)"), timeout_s=2)
    assert "error" in ask(REQUEST)


def test_what_the_compiler_prints_does_not_reach_the_reply():
    assert "error" in ask(crash("import os\nprint('noise')\nos.write(1, b'more noise')\nraise ValueError('told')"))
