"""Every operator over its cases on the GPU, checked against the definition: what compute-sanitizer runs.

compute-sanitizer --tool memcheck python -m tests.kernels.sanitize [operator …]
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.kernels.harness import all_ops, compare


def run(names: list[str]) -> int:
    """Compare each case in fp16, or in the operator's first dtype without it; how many were run."""
    done = 0
    for name, op in all_ops().items():
        if names and name not in names:
            continue
        dtype = torch.float16 if torch.float16 in op.dtypes else op.dtypes[0]
        for case in op.cases:
            with pytest.MonkeyPatch.context() as patch:
                compare(op, case, dtype, "cuda", patch)
            done += 1
    return done


if __name__ == "__main__":
    print(run(sys.argv[1:]), "cases ran")
