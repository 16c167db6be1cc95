"""The first call of every notebook: choose the tier, seed the generators, set the look, say so in one line."""

from __future__ import annotations

import os
import random
import sys

from labkit.errors import LabError
from labkit.hardware.tier import is_live


def setup(seed: int = 0) -> None:
    """Choose the tier, print it, and seed Python, numpy and torch with ``seed``.

    Without a GPU, Triton's interpreter is switched on. That must come before any kernel is imported, because
    ``triton.jit`` decides when it decorates. Raises LabError if it is too late.
    """
    import numpy as np
    import torch

    from labkit.course.style import apply_style

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    apply_style()
    if is_live():
        name = torch.cuda.get_device_name()
        print(f"tier: live | {name} | kernels and measurements run here")
        return
    late = [m for m in sys.modules if m.startswith("kernels.") and m != "kernels.op"]
    if late and os.environ.get("TRITON_INTERPRET") != "1":
        raise LabError(
            f"{late[0]} was imported before lab.setup(), so its kernels are not made for the interpreter: "
            "restart the notebook's kernel and run lab.setup() first."
        )
    os.environ["TRITON_INTERPRET"] = "1"
    from labkit.measure import recorded_gpu

    how = "kernels run in Triton's interpreter, measurements are replayed from"
    print(f"tier: interpreted and recorded | no GPU: {how} {recorded_gpu()}")
