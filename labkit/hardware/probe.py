"""The GPU in this machine: what torch and NVML report, laid over the catalogue, with the differences kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from labkit.errors import LabError
from labkit.hardware import catalogue
from labkit.hardware.nvml import open_device
from labkit.hardware.spec import DeviceSpec

# FP32 lanes per SM by compute capability, for GPUs outside the catalogue (CUDA C++ Programming Guide, "Arithmetic
# instructions", throughput of 32-bit floating-point add, multiply, multiply-add).
_FP32_LANES = {"7.0": 64, "7.5": 64, "8.0": 64, "8.7": 128, "10.3": 128, "11.0": 128, "12.1": 128}

# Driver and ECC reserve part of the memory, so its size differs a little on every machine.
_MEMORY_TOLERANCE = 0.02
_BANDWIDTH_TOLERANCE = 0.01


@dataclass(frozen=True)
class Difference:
    """A figure for which catalogue and machine disagree. ``used`` says which of the two the merged spec holds."""

    what: str
    catalogue: float
    machine: float
    unit: str
    reported_by: str
    used: str

    def __str__(self) -> str:
        values = f"catalogue {self.catalogue:g}{self.unit}, {self.reported_by} {self.machine:g}{self.unit}"
        return f"{self.what}: {values} (used: {self.used})"


@dataclass(frozen=True)
class Probe:
    """``spec``: catalogue and machine merged. ``unknown``: fields that neither knows. ``notes``: sentences."""

    spec: DeviceSpec
    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]
    in_catalogue: bool
    driver: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            str(self.spec),
            *(f"  differs  {d}" for d in self.differences),
            *(f"  note     {n}" for n in self.notes),
        ]
        if self.unknown:
            lines.append(f"  unknown  {', '.join(self.unknown)}")
        return "\n".join(lines)


def probe(index: int = 0, torch=None, nvml=None) -> Probe:
    """Look at CUDA device ``index``. ``torch`` and ``nvml`` may be given (tests do); the real ones are the default.

    What the machine reports wins for counts, sizes, clock and power limit; the documents win for bandwidth and
    tensor rates, which no interface reports. Works without NVML, knowing less. Raises LabError if there is no GPU.
    """
    if torch is None:
        import torch
    if not torch.cuda.is_available():
        raise LabError("probe: torch finds no CUDA GPU here; use catalogue.find(name) for a GPU you do not have.")
    properties = torch.cuda.get_device_properties(index)
    seen, notes = _from_torch(properties), []
    gpu = open_device(index, nvml=nvml, uuid=getattr(properties, "uuid", None))
    if gpu.problem:
        notes.append(gpu.problem)
    seen |= _from_nvml(gpu)
    try:
        base = catalogue.find(properties.name)
    except LabError:
        base = None
        notes.append(f"{properties.name} is not in the catalogue: tensor rates and other document figures are unknown.")
    if " MIG " in properties.name:
        notes.append("This is a MIG slice: the catalogue's bandwidth and tensor rates are those of the whole GPU.")
    notes += _link_notes(gpu, seen)
    spec, differences = _merge(base, properties.name, seen)
    driver = gpu.ask("nvmlSystemGetDriverVersion", on_device=False)
    gpu.close()
    return Probe(
        spec=spec,
        differences=tuple(differences),
        unknown=tuple(
            f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) is None or _empty_rates(spec, f)
        ),
        in_catalogue=base is not None,
        driver=driver,
        notes=tuple(notes),
    )


def _empty_rates(spec: DeviceSpec, field) -> bool:
    return field.name == "tensor_tflops" and not spec.tensor_tflops


def _from_torch(properties) -> dict:
    """Field of DeviceSpec -> value. Every attribute is optional: they came to torch one by one."""
    seen = {"compute_capability": f"{properties.major}.{properties.minor}"}
    names = {
        "sms": "multi_processor_count",
        "memory_bytes": "total_memory",
        "l2_bytes": "L2_cache_size",
        "shared_per_sm_bytes": "shared_memory_per_multiprocessor",
        "shared_per_block_bytes": "shared_memory_per_block_optin",
        "registers_per_sm": "regs_per_multiprocessor",
    }
    seen |= {field: value for field, name in names.items() if (value := getattr(properties, name, None))}
    if threads := getattr(properties, "max_threads_per_multi_processor", None):
        seen["max_warps_per_sm"] = threads // 32
    return seen


def _from_nvml(gpu) -> dict:
    seen = {
        "boost_mhz": gpu.ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
        "memory_bus_bits": gpu.ask("nvmlDeviceGetMemoryBusWidth"),
        "pcie_generation": gpu.ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_lanes": gpu.ask("nvmlDeviceGetMaxPcieLinkWidth"),
    }
    limit_mw = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    memory_mhz = gpu.ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM")
    seen["tdp_w"] = limit_mw / 1000 if limit_mw else None
    # NVML's memory clock is half the data rate per pin for every memory in the catalogue, HBM and GDDR alike.
    seen["memory_gbps_per_pin"] = 2 * memory_mhz / 1000 if memory_mhz else None
    return {field: value for field, value in seen.items() if value}


_LABELS: dict[str, tuple[str, str, Callable[[float], float]]] = {
    "sms": ("SMs", "", float),
    "boost_mhz": ("maximum SM clock", " MHz", float),
    "memory_bytes": ("memory", " GiB", lambda b: round(b / 2**30, 1)),
    "memory_bus_bits": ("memory bus", " bit", float),
    "l2_bytes": ("L2 cache", " MiB", lambda b: round(b / 2**20, 1)),
    "shared_per_sm_bytes": ("shared memory per SM", " B", float),
    "shared_per_block_bytes": ("shared memory per block", " B", float),
    "registers_per_sm": ("registers per SM", "", float),
    "max_warps_per_sm": ("warps per SM", "", float),
    "pcie_generation": ("PCIe generation of slot and GPU", "", float),
    "pcie_lanes": ("PCIe lanes", "", float),
    "tdp_w": ("power limit", " W", float),
}
_NVML_FIELDS = ("boost_mhz", "memory_bus_bits", "pcie_generation", "pcie_lanes", "tdp_w")


def _merge(base: DeviceSpec | None, name: str, seen: dict) -> tuple[DeviceSpec, list[Difference]]:
    if base is None:
        capability = seen["compute_capability"]
        known = {"fp32_lanes_per_sm": _FP32_LANES.get(capability), **catalogue.limits(capability), **seen}
        spec = DeviceSpec(name=name, origin="probed", source="torch and NVML on this machine", **known)
        return dataclasses.replace(spec, bandwidth_gb_s=spec.derived_bandwidth_gb_s), []
    differences = []
    for field, (label, unit, scale) in _LABELS.items():
        ours, theirs = getattr(base, field), seen.get(field)
        if ours is None or theirs is None:
            continue
        tolerance = _MEMORY_TOLERANCE if field == "memory_bytes" else 0.0
        if abs(theirs - ours) > tolerance * ours:
            by = "NVML" if field in _NVML_FIELDS else "torch"
            differences.append(Difference(label, scale(ours), scale(theirs), unit, by, f"{by}'s"))
    merged = dataclasses.replace(base, origin="probed", **seen)
    derived = merged.derived_bandwidth_gb_s
    if derived and base.bandwidth_gb_s and abs(derived / base.bandwidth_gb_s - 1) > _BANDWIDTH_TOLERANCE:
        differences.append(
            Difference(
                "memory bandwidth", base.bandwidth_gb_s, round(derived), " GB/s", "NVML bus x clock", "catalogue's"
            )
        )
    return merged, differences


def _link_notes(gpu, seen: dict) -> list[str]:
    generation = gpu.ask("nvmlDeviceGetCurrPcieLinkGeneration")
    lanes = gpu.ask("nvmlDeviceGetCurrPcieLinkWidth")
    notes = []
    if generation and generation < seen.get("pcie_generation", 0):
        best = seen["pcie_generation"]
        notes.append(
            f"The PCIe link runs at generation {generation} now, of {best} possible; an idle GPU slows its link."
        )
    if lanes and lanes < seen.get("pcie_lanes", 0):
        notes.append(f"The PCIe link uses {lanes} lanes of {seen['pcie_lanes']}; check the slot and its bifurcation.")
    return notes
