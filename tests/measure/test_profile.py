"""Reading ncu: its CSV, its refusals, and on a GPU its counts beside the models' predictions."""

import subprocess

import pytest

from labkit.analysis import bank_access, coalescing, column_access, padded, strided
from labkit.errors import LabError
from labkit.measure import profile
from labkit.measure.profile import COUNTERS, ncu, parse

CSV = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","_k","dram__bytes_read.sum","Mbyte","1,234.5"
"0","1","_k","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","32"
"1","1","_k","dram__bytes_read.sum","Kbyte","2"
"""


def test_a_launch_becomes_a_dict_in_bytes():
    metrics = {COUNTERS[k]: k for k in ("DRAM bytes read", "load requests")}
    assert parse(CSV, metrics) == [{"DRAM bytes read": 1234.5e6, "load requests": 32}, {"DRAM bytes read": 2000}]
    assert parse("no table", metrics) == []


def test_what_keeps_ncu_from_counting_is_named(monkeypatch):
    monkeypatch.setattr(profile.shutil, "which", lambda _: None)
    with pytest.raises(LabError, match="ncu is not on the PATH"):
        ncu("", ["load requests"], "k")
    monkeypatch.setattr(profile.shutil, "which", lambda _: "ncu")
    for said, text in (("ERR_NVGPUCTRPERM", "may not read"), ("==WARNING== No kernels were profiled.", "No kernels")):
        done = subprocess.CompletedProcess([], 0, stdout=said, stderr="")
        monkeypatch.setattr(profile.subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(LabError, match=text):
            ncu("", ["load requests"], "k")


SCRIPT = """
import torch
from kernels.access import strided_gluon, turn_gluon
x = torch.randn(2**22, device="cuda")
for stride in (1, 2, 8): strided_gluon(x, stride)
for variant in ("plain", "padded", "swizzled"): turn_gluon(x[:1024].view(1, 32, 32), 1, variant)
"""


@pytest.mark.gpu
def test_the_models_agree_with_the_counters():
    names = ["load requests", "load sectors", "shared load wavefronts", "shared load conflicts"]
    found = ncu(SCRIPT, names, "_strided_kernel|_turn_kernel")
    for counted, stride in zip(found[:3], (1, 2, 8), strict=True):
        predicted = coalescing([strided(stride=stride)]).sectors
        assert counted["load sectors"] / counted["load requests"] == predicted
    for counted, pad in zip(found[3:5], (0, 1), strict=True):
        predicted = bank_access(column_access(padded(32, pad), c, 32) for c in range(32))
        assert counted["shared load wavefronts"] == predicted.wavefronts
        assert counted["shared load conflicts"] == predicted.conflicts
    assert found[5]["shared load conflicts"] == 0
