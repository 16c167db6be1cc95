"""A handle on one GPU's counters that never raises: an absent counter reads as ``None``, with the reason kept."""

from __future__ import annotations


class NvmlDevice:
    """One GPU as NVML sees it. ``problem``: a sentence if NVML is not to be had at all. ``missing``: name -> reason."""

    def __init__(self, module=None, handle=None, problem: str | None = None):
        self.module, self.handle, self.problem = module, handle, problem
        self.missing: dict[str, str] = {}

    def ask(self, function: str, *args, on_device: bool = True):
        """Call an NVML function; a string argument that starts with NVML_ names a constant. ``None`` if it fails."""
        if self.module is None or (on_device and self.handle is None):
            return None
        try:
            values = [getattr(self.module, a) if isinstance(a, str) and a.startswith("NVML_") else a for a in args]
            call = getattr(self.module, function)
            value = call(self.handle, *values) if on_device else call(*values)
        except Exception as error:  # NVMLError, or AttributeError from a binding older than the counter
            self.missing[function] = str(error) or type(error).__name__
            return None
        return value.decode() if isinstance(value, bytes) else value

    def close(self) -> None:
        """Give back this handle's share of NVML; it counts its initialisations."""
        if self.module is not None and self.problem is None:
            self.ask("nvmlShutdown", on_device=False)
        self.module = self.handle = None


def open_device(index: int = 0, nvml=None, uuid=None) -> NvmlDevice:
    """NVML's view of a GPU. CUDA_VISIBLE_DEVICES renumbers CUDA's devices but not NVML's, hence ``uuid`` goes first."""
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return NvmlDevice(problem="NVML's Python binding is not installed: pip install nvidia-ml-py.")
    try:
        nvml.nvmlInit()
    except Exception as error:
        return NvmlDevice(
            problem=f"NVML does not start ({error}): there is no NVIDIA driver here, or it cannot be reached."
        )
    device = NvmlDevice(nvml)
    if uuid is not None:
        text = str(uuid)
        device.handle = device.ask(
            "nvmlDeviceGetHandleByUUID", text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}", on_device=False
        )
    if device.handle is None:
        device.handle = device.ask("nvmlDeviceGetHandleByIndex", index, on_device=False)
    device.missing.clear()
    if device.handle is None:
        device.close()
        return NvmlDevice(problem=f"NVML has no GPU {index}.")
    return device
