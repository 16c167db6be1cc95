"""What a GPU is, in numbers with units, and what follows from them by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.errors import LabError

# Payload per lane and direction in GB/s: transfer rate in GT/s, times the line code's efficiency, over 8 bits.
# 3.0 to 5.0 carry 128 payload bits in 130, 6.0 carries 242 payload bytes in a 256-byte flit (PCI Express Base
# Specification 6.0).
_PCIE_LANE_GB_S = {
    3: 8.0 * 128 / 130 / 8,
    4: 16.0 * 128 / 130 / 8,
    5: 32.0 * 128 / 130 / 8,
    6: 64.0 * 242 / 256 / 8,
}
_DTYPES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def dtype_key(dtype) -> str:
    """The catalogue's word for a dtype: ``torch.bfloat16``, ``"bfloat16"`` and ``"bf16"`` are all ``"bf16"``."""
    name = str(dtype).removeprefix("torch.").lower()
    if name.startswith("float8"):
        return "fp8"
    return _DTYPES.get(name, name)


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU. Units are in the names: MHz, bytes, GB/s (10^9 bytes), TFLOP/s (10^12), W. ``None`` means unknown.

    ``tensor_tflops`` holds dense tensor-core rates by dtype (fp16, bf16, tf32, fp8 with fp32 accumulation; int8 in
    TOP/s with int32 accumulation). GeForce cards run fp16 and fp8 faster when they accumulate in fp16: those rates
    stand apart, in ``tensor_tflops_fp16_accumulate``. ``origin`` is "catalogue" or "probed"; ``remarks`` are a probe's:
    where the machine reports something else than the catalogue, both values. The dicts are read-only
    by convention.
    """

    name: str
    compute_capability: str | None = None
    sms: int | None = None
    fp32_lanes_per_sm: int | None = None
    boost_mhz: float | None = None
    stated_fp32_tflops: float | None = None
    tensor_tflops: dict[str, float] = field(default_factory=dict, hash=False)
    tensor_tflops_fp16_accumulate: dict[str, float] = field(default_factory=dict, hash=False)
    memory_type: str | None = None
    memory_bytes: int | None = None
    bandwidth_gb_s: float | None = None
    memory_bus_bits: int | None = None
    memory_gbps_per_pin: float | None = None
    l2_bytes: int | None = None
    shared_per_sm_bytes: int | None = None
    shared_per_block_bytes: int | None = None
    registers_per_sm: int | None = None
    max_warps_per_sm: int | None = None
    max_blocks_per_sm: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    nvlink_gb_s: float | None = None
    tdp_w: float | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()
    origin: str = "catalogue"
    remarks: tuple[str, ...] = ()

    @property
    def fp32_tflops(self) -> float | None:
        """CUDA-core FP32 rate: SMs x lanes x 2 (a fused multiply-add is two FLOPs) x clock."""
        if None in (self.sms, self.fp32_lanes_per_sm, self.boost_mhz):
            return None
        return self.sms * self.fp32_lanes_per_sm * 2 * self.boost_mhz * 1e6 / 1e12

    @property
    def derived_bandwidth_gb_s(self) -> float | None:
        """Bus width in bits x data rate per pin in Gbit/s, over 8 bits a byte."""
        if None in (self.memory_bus_bits, self.memory_gbps_per_pin):
            return None
        return self.memory_bus_bits * self.memory_gbps_per_pin / 8

    @property
    def pcie_gb_s(self) -> float | None:
        """PCIe payload bandwidth in one direction, after line coding and before packet headers."""
        if self.pcie_generation not in _PCIE_LANE_GB_S or self.pcie_lanes is None:
            return None
        return _PCIE_LANE_GB_S[self.pcie_generation] * self.pcie_lanes

    @property
    def max_threads_per_sm(self) -> int | None:
        return None if self.max_warps_per_sm is None else 32 * self.max_warps_per_sm

    @property
    def arch(self) -> str | None:
        """Compilation target, such as "sm_90"."""
        return None if self.compute_capability is None else "sm_" + self.compute_capability.replace(".", "")

    def tflops(self, dtype) -> float:
        """Peak rate for a dtype: CUDA cores for fp32, dense tensor cores otherwise. Raises LabError if unknown."""
        key = dtype_key(dtype)
        rate = self.fp32_tflops if key == "fp32" else self.tensor_tflops.get(key)
        if rate is None:
            known = ", ".join([*(["fp32"] if self.fp32_tflops is not None else []), *self.tensor_tflops]) or "none"
            raise LabError(f"{self.name}: no peak rate is known for {key}; known are {known}. Give the rate yourself.")
        return rate

    def ridge(self, dtype) -> float:
        """Arithmetic intensity in FLOP per byte at which memory and arithmetic take equally long."""
        if self.bandwidth_gb_s is None:
            raise LabError(f"{self.name}: its memory bandwidth is unknown, so it has no ridge; measure a copy first.")
        return self.tflops(dtype) * 1e12 / (self.bandwidth_gb_s * 1e9)

    def __str__(self) -> str:
        parts = [
            self.name,
            self.arch,
            _text(self.sms, "{} SMs"),
            _text(self.memory_bytes, "{:.0f} GiB", 2**30),
            _text(self.bandwidth_gb_s, "{:.0f} GB/s"),
            _text(self.tensor_tflops.get("bf16"), "{:.0f} TFLOP/s bf16"),
        ]
        return ", ".join(part for part in parts if part)

    def table(self) -> str:
        """The specification with fixed rounding, one line a row, so that a notebook can compare it as text."""
        rows = [
            ("GPU", f"{self.name} ({self.arch or 'architecture unknown'})"),
            ("SMs x FP32 lanes", _text(self.sms, "{} x ") + _text(self.fp32_lanes_per_sm, "{}")),
            ("boost clock", _text(self.boost_mhz, "{:.0f} MHz")),
            ("FP32 (CUDA cores)", _text(self.fp32_tflops, "{:.1f} TFLOP/s")),
            *((f"{key} tensor, dense", _rate(key, rate)) for key, rate in self.tensor_tflops.items()),
            *((f"{k} tensor, fp16 acc.", _rate(k, r)) for k, r in self.tensor_tflops_fp16_accumulate.items()),
            ("memory", _text(self.memory_bytes, "{:.0f} GiB ", 2**30) + (self.memory_type or "")),
            ("memory bandwidth", _text(self.bandwidth_gb_s, "{:.0f} GB/s")),
            ("L2 cache", _text(self.l2_bytes, "{:.0f} MiB", 2**20)),
            ("shared memory per SM", _text(self.shared_per_sm_bytes, "{:.0f} KiB", 2**10)),
            ("shared memory per block", _text(self.shared_per_block_bytes, "{:.0f} KiB", 2**10)),
            ("registers per SM", _text(self.registers_per_sm, "{}")),
            ("warps, blocks per SM", _text(self.max_warps_per_sm, "{}, ") + _text(self.max_blocks_per_sm, "{}")),
            ("PCIe, one direction", _text(self.pcie_gb_s, "{:.1f} GB/s")),
            ("NVLink, both directions", "none" if self.nvlink_gb_s == 0 else _text(self.nvlink_gb_s, "{:.0f} GB/s")),
            ("power limit", _text(self.tdp_w, "{:.0f} W")),
        ]
        lines = [f"{name:<24}{value.strip() or 'unknown'}" for name, value in rows]
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])


def _text(value, form: str, unit: float = 1) -> str:
    return "" if value is None else form.format(value if unit == 1 else value / unit)


def _rate(key: str, rate: float) -> str:
    return f"{rate:.0f} {'TOP/s' if key.startswith('int') else 'TFLOP/s'}"
