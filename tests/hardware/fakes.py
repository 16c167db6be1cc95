"""Stand-ins for torch and NVML with the attributes of one GPU, for machines without any."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that labkit calls. ``broken`` functions raise NVMLError; ``absent`` ones do not exist."""

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self, *, broken=(), absent=(), start_error=None, uuids=("GPU-aaaa", "GPU-bbbb"), **values):
        self.broken, self.absent, self.start_error, self.uuids = set(broken), set(absent), start_error, uuids
        self.values = {
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetClockInfo": {1: 1755, 2: 3201},
            "nvmlDeviceGetMemoryBusWidth": 6016,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetTemperature": {0: 45},
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_754_820_096, free=150_000_000_000, used=754_820_096),
            "nvmlDeviceGetTotalEnergyConsumption": 1_000_000,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
            **values,
        }
        self.opened = 0

    def nvmlInit(self):
        if self.start_error:
            raise self.start_error
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.uuids):
            raise NVMLError("Invalid Argument")
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return uuid

    def __getattr__(self, name):
        values = self.__dict__["values"]
        if name in self.__dict__["absent"] or name not in values:
            raise AttributeError(name)

        def call(*args):
            if name in self.broken:
                raise NVMLError("Not Supported")
            value = values[name]
            if callable(value):
                return value()
            return value[args[-1]] if isinstance(value, dict) else value

        return call


H200 = dict(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150_110_011_392,
    L2_cache_size=60 * 2**20,
    shared_memory_per_multiprocessor=233_472,
    shared_memory_per_block_optin=232_448,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    uuid="aaaa",
)


def fake_torch(available=True, **properties):
    found = SimpleNamespace(**{**H200, **properties})
    return SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: available, get_device_properties=lambda index: found)
    )
