"""Probing merges catalogue and machine, keeps both values where they differ, and says what nobody knows."""

from __future__ import annotations

import pytest

import labkit.hardware as hardware
from labkit.errors import LabError
from labkit.hardware import catalogue, probe
from tests.hardware.fakes import FakeNvml, NVMLError, fake_torch


def test_agreeing_machine_differs_in_nothing():
    found = probe(torch=fake_torch(), nvml=FakeNvml())
    assert found.differences == ()
    assert found.in_catalogue and found.driver == "580.65.06" and found.unknown == () and found.notes == ()
    assert found.spec.origin == "probed" and found.spec.memory_bytes == 150_110_011_392
    assert found.spec.bandwidth_gb_s == 4800 and found.spec.tflops("bf16") == 989.4


def test_bandwidth_from_bus_and_clock_is_shown_beside_the_data_sheet_s():
    found = probe(torch=fake_torch(), nvml=FakeNvml(nvmlDeviceGetMaxClockInfo={1: 1980, 2: 2619}))
    # 6016 bit * 2 * 2.619 GHz / 8 = 3939 GB/s
    expected = "memory bandwidth: catalogue 4800 GB/s, NVML bus x clock 3939 GB/s (used: catalogue's)"
    assert list(map(str, found.differences)) == [expected]


def test_both_values_are_kept_and_the_machine_s_is_used():
    nvml = FakeNvml(
        nvmlDeviceGetMaxClockInfo={1: 1785, 2: 3201},
        nvmlDeviceGetMaxPcieLinkGeneration=4,
        nvmlDeviceGetEnforcedPowerLimit=500_000,
    )
    found = probe(torch=fake_torch(multi_processor_count=130, L2_cache_size=50 * 2**20), nvml=nvml)
    text = [str(d) for d in found.differences]
    assert "maximum SM clock: catalogue 1980 MHz, NVML 1785 MHz (used: NVML's)" in text
    assert "PCIe generation of slot and GPU: catalogue 5, NVML 4 (used: NVML's)" in text
    assert "power limit: catalogue 700 W, NVML 500 W (used: NVML's)" in text
    assert "SMs: catalogue 132, torch 130 (used: torch's)" in text
    assert "L2 cache: catalogue 60 MiB, torch 50 MiB (used: torch's)" in text
    assert found.spec.fp32_tflops == pytest.approx(130 * 128 * 2 * 1785e6 / 1e12)
    assert found.spec.pcie_gb_s == pytest.approx(31.5, abs=0.05)


def test_memory_kept_by_ecc_is_a_difference_and_the_driver_s_share_is_not():
    l4 = dict(name="NVIDIA L4", minor=9, major=8, multi_processor_count=58, L2_cache_size=48 * 2**20)
    found = probe(torch=fake_torch(**l4, total_memory=int(22.0 * 2**30)), nvml=FakeNvml())
    assert "memory: catalogue 24 GiB, torch 22 GiB (used: torch's)" in map(str, found.differences)
    assert "memory" not in [d.what for d in probe(torch=fake_torch(), nvml=FakeNvml()).differences]


def test_idle_link_is_a_note_not_a_difference():
    nvml = FakeNvml(nvmlDeviceGetCurrPcieLinkGeneration=1, nvmlDeviceGetCurrPcieLinkWidth=8)
    found = probe(torch=fake_torch(), nvml=nvml)
    assert "generation 1 now, of 5" in found.notes[0] and "8 lanes of 16" in found.notes[1]
    assert found.spec.pcie_generation == 5


def test_without_nvml_torch_and_catalogue_still_answer():
    found = probe(torch=fake_torch(), nvml=FakeNvml(start_error=NVMLError("Driver Not Loaded")))
    assert found.spec.boost_mhz == 1980 and found.spec.sms == 132 and found.driver is None
    assert "Driver Not Loaded" in found.notes[0]


@pytest.mark.parametrize("how", ["broken", "absent"])
def test_one_missing_counter_leaves_the_rest(how):
    nvml = FakeNvml(**{how: ["nvmlDeviceGetMemoryBusWidth"]})
    found = probe(torch=fake_torch(), nvml=nvml)
    assert found.spec.memory_bus_bits == 6016 and found.spec.boost_mhz == 1980


def test_unknown_gpu_is_built_from_what_it_reports_and_names_the_rest():
    mystery = dict(name="NVIDIA X1000", major=8, minor=9, multi_processor_count=20, total_memory=8 * 2**30)
    nvml = FakeNvml(nvmlDeviceGetMaxClockInfo={1: 2000, 2: 7001}, nvmlDeviceGetMemoryBusWidth=128)
    found = probe(torch=fake_torch(**mystery), nvml=nvml)
    assert not found.in_catalogue and found.spec.name == "NVIDIA X1000" and found.spec.arch == "sm_89"
    assert found.spec.fp32_tflops == pytest.approx(20 * 128 * 2 * 2000e6 / 1e12)
    assert found.spec.bandwidth_gb_s == pytest.approx(128 * 2 * 7.001 / 8)  # 224 GB/s
    assert found.spec.max_blocks_per_sm == 24  # the architecture's, from the catalogue
    assert {"tensor_tflops", "nvlink_gb_s", "stated_fp32_tflops"} <= set(found.unknown)
    assert "NVIDIA X1000 is not in the catalogue" in found.notes[0]
    assert "unknown" in str(found) and found.spec.tensor_tflops == {}


def test_unknown_gpu_of_an_unknown_architecture_without_nvml():
    future = dict(name="NVIDIA Z1", major=42, minor=0)
    found = probe(torch=fake_torch(**future), nvml=FakeNvml(start_error=NVMLError("no")))
    assert {"fp32_lanes_per_sm", "boost_mhz", "bandwidth_gb_s", "max_blocks_per_sm"} <= set(found.unknown)
    assert found.spec.fp32_tflops is None


def test_old_torch_without_the_newer_attributes():
    torch = fake_torch()
    properties = torch.cuda.get_device_properties(0)
    for name in ("uuid", "L2_cache_size", "shared_memory_per_block_optin", "regs_per_multiprocessor"):
        delattr(properties, name)
    assert probe(torch=torch, nvml=FakeNvml()).spec.l2_bytes == 60 * 2**20


def test_nvml_is_asked_about_cuda_s_device_not_the_same_index():
    """With CUDA_VISIBLE_DEVICES=1, CUDA's device 0 is NVML's device 1."""
    asked = []

    class Recording(FakeNvml):
        def nvmlDeviceGetHandleByUUID(self, uuid):
            asked.append(uuid)
            return super().nvmlDeviceGetHandleByUUID(uuid)

    probe(torch=fake_torch(uuid="bbbb"), nvml=Recording())
    assert asked == ["GPU-bbbb"]


def test_mig_slice_says_that_bandwidth_is_the_whole_gpu_s():
    mig = dict(name="NVIDIA H200 MIG 1g.18gb", multi_processor_count=16, total_memory=16 * 2**30)
    found = probe(torch=fake_torch(**mig), nvml=FakeNvml())
    assert any("MIG slice" in note for note in found.notes) and found.spec.sms == 16


def test_no_gpu():
    with pytest.raises(LabError, match="no CUDA GPU"):
        probe(torch=fake_torch(available=False), nvml=FakeNvml())


class TestDevice:
    def test_recorded_default(self, monkeypatch):
        monkeypatch.delenv("LABKIT_RECORDED_GPU", raising=False)
        monkeypatch.setattr(hardware, "is_live", lambda: False)
        assert hardware.device() is catalogue.find("NVIDIA H200")

    def test_other_recording(self, monkeypatch, tmp_path):
        monkeypatch.setattr(hardware, "is_live", lambda: False)
        monkeypatch.setattr(hardware, "RECORDINGS", tmp_path)
        monkeypatch.setenv("LABKIT_RECORDED_GPU", "rtx 4090")
        with pytest.raises(LabError, match=r"no recording nvidia-geforce-rtx-4090.json; recordings here: none"):
            hardware.device()
        (tmp_path / "nvidia-geforce-rtx-4090.json").write_text("{}")
        assert hardware.device().name == "NVIDIA GeForce RTX 4090"

    @pytest.mark.parametrize("name", ["Voodoo 2", "unknown", "H100"])
    def test_unknown_recording(self, monkeypatch, tmp_path, name):
        (tmp_path / "nvidia-h200.json").write_text("{}")
        (tmp_path / "nvidia-l4.json").write_text("{}")
        monkeypatch.setenv("LABKIT_RECORDED_GPU", name)
        says = f"LABKIT_RECORDED_GPU is '{name}', .* catalogue; recordings here: nvidia-h200, nvidia-l4. Set it to one"
        with pytest.raises(LabError, match=says):
            hardware.recorded_gpu(tmp_path)

    def test_live(self, monkeypatch):
        monkeypatch.setattr(hardware, "is_live", lambda: True)
        monkeypatch.setattr(hardware, "_live_spec", lambda: "probed")
        assert hardware.device() == "probed"


def test_the_device_shows_both_values_where_machine_and_catalogue_differ(monkeypatch):
    nvml = FakeNvml(nvmlDeviceGetMaxClockInfo={1: 1785, 2: 3201})
    found = probe(torch=fake_torch(), nvml=nvml)
    monkeypatch.setattr(hardware, "probe", lambda: found)
    monkeypatch.setattr(hardware, "is_live", lambda: True)
    hardware._live_spec.cache_clear()
    try:
        table = hardware.device().table()
    finally:
        hardware._live_spec.cache_clear()
    assert "note: maximum SM clock: catalogue 1980 MHz, NVML 1785 MHz (used: NVML's)" in table
