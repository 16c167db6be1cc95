"""The catalogue's figures agree with each other and with arithmetic, and a GPU is found by any sane name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from labkit.errors import LabError
from labkit.hardware import catalogue
from labkit.hardware.spec import DeviceSpec

SPECS = catalogue.specs()


def by_name(spec: DeviceSpec) -> str:
    return spec.name


@pytest.mark.parametrize("spec", SPECS, ids=by_name)
class TestEveryGpu:
    def test_fp32_rate_follows_from_sms_lanes_and_clock(self, spec):
        assert spec.sms * spec.fp32_lanes_per_sm * 2 * spec.boost_mhz / 1e6 == pytest.approx(
            spec.stated_fp32_tflops, rel=0.02
        )

    def test_bandwidth_follows_from_bus_and_data_rate(self, spec):
        assert spec.derived_bandwidth_gb_s == spec.memory_bus_bits * spec.memory_gbps_per_pin / 8
        assert spec.derived_bandwidth_gb_s == pytest.approx(spec.bandwidth_gb_s, rel=0.01)

    def test_tensor_rates_halve_and_double(self, spec):
        """bf16 runs at twice tf32, eight bits at twice bf16; on GeForce, whose bf16 is halved, int8 at four times."""
        rates = spec.tensor_tflops
        assert rates["fp16"] == rates["bf16"]
        assert rates["bf16"] / rates["tf32"] == pytest.approx(2, rel=0.03)
        if "fp8" in rates:
            assert rates["fp8"] / rates["bf16"] == pytest.approx(2, rel=0.02)
        int8_over_bf16 = 4 if "GeForce" in spec.name else 2
        assert rates["int8"] / rates["bf16"] == pytest.approx(int8_over_bf16, rel=0.02)

    def test_tensor_rates_are_whole_flops_per_sm_and_cycle(self, spec):
        """An SM does a power of two of tensor FLOPs a cycle; Hopper's stated rates hold below its maximum clock."""
        per_cycle = spec.tensor_tflops["bf16"] * 1e12 / (spec.sms * spec.boost_mhz * 1e6)
        steps = {"8.0": 2048, "8.6": 512, "8.9": 1024, "9.0": 4096, "10.0": 8192, "12.0": 512}
        step = 512 if spec.name.endswith("4090") else steps[spec.compute_capability]
        assert 0.9 * step <= per_cycle <= 1.02 * step

    def test_halved_accumulator_doubles_geforce_rates(self, spec):
        for key, rate in spec.tensor_tflops_fp16_accumulate.items():
            assert "GeForce" in spec.name
            assert rate / spec.tensor_tflops[key] == pytest.approx(2, rel=0.01)

    def test_cuda_keeps_one_kibibyte_of_shared_memory_per_block(self, spec):
        assert spec.shared_per_sm_bytes - spec.shared_per_block_bytes == 1024

    def test_has_a_source_and_every_figure(self, spec):
        assert "NVIDIA" in spec.source and len(spec.source) > 30
        assert None not in vars(spec).values()

    def test_its_name_and_aliases_find_it(self, spec):
        for name in (spec.name, spec.name.upper(), spec.name.removeprefix("NVIDIA "), *spec.aliases):
            assert catalogue.find(name) is spec
        assert catalogue.find(catalogue.slug(spec.name)) is spec

    def test_table_is_one_line_a_row_within_a_page(self, spec):
        lines = spec.table().splitlines()
        assert all(len(line) <= 80 and "unknown" not in line and "None" not in line for line in lines)


def test_no_two_gpus_share_a_name():
    keys = [catalogue._key(name) for spec in SPECS for name in {spec.name, *spec.aliases}]
    shared = {key for key in keys if keys.count(key) > 1}
    for key in shared:  # a GPU may repeat itself ("H200", "NVIDIA H200"), two GPUs may not meet
        assert sum(key in map(catalogue._key, (spec.name, *spec.aliases)) for spec in SPECS) == 1, key


def test_the_course_s_gpus_are_there():
    wanted = [
        "3090",
        "4090",
        "5090",
        "A100-SXM4-40GB",
        "A100-SXM4-80GB",
        "L4",
        "L40S",
        "H100 SXM",
        "H100 PCIe",
        "H200",
        "B200",
    ]
    assert len({catalogue.find(name).name for name in wanted}) == len(wanted)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("NVIDIA A100-SXM4-40GB", "bandwidth_gb_s", 1555),
        ("NVIDIA A100-PCIE-40GB", "bandwidth_gb_s", 1555),
        ("NVIDIA A100-SXM4-80GB", "bandwidth_gb_s", 2039),
        ("4090", "bandwidth_gb_s", 1008),
        ("4090", "sms", 128),
        ("4090", "max_warps_per_sm", 48),
        ("4090", "pcie_generation", 4),
        ("4090", "l2_bytes", 72 * 2**20),
        ("H200", "bandwidth_gb_s", 4800),
        ("A100 80GB", "shared_per_block_bytes", 166_912),
        ("3090", "shared_per_block_bytes", 101_376),
        ("5090", "shared_per_block_bytes", 101_376),
        ("B200", "shared_per_block_bytes", 232_448),
    ],
)
def test_figures_the_labs_quote(name, field, value):
    assert getattr(catalogue.find(name), field) == value


def test_4090_fp16_rate_depends_on_the_accumulator():
    spec = catalogue.find("RTX 4090")
    assert round(spec.tflops("fp16")) == 165
    assert round(spec.tensor_tflops_fp16_accumulate["fp16"]) == 330


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_a_sibling_is_not_mistaken_for_the_gpu(name):
    with pytest.raises(LabError, match="nearest"):
        catalogue.find(name)


def test_mig_slice_is_found_by_its_gpu():
    assert catalogue.find("NVIDIA A100-SXM4-40GB MIG 1g.5gb").name == "NVIDIA A100-SXM4-40GB"


def test_unknown_name_lists_the_nearest():
    with pytest.raises(LabError, match=r"'RTX 4080'.*NVIDIA GeForce RTX 4090"):
        catalogue.find("RTX 4080")
    with pytest.raises(LabError, match="nearest"):
        catalogue.find("")


@pytest.mark.parametrize("name", [None, 4090, ["H200"]])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(LabError, match=r"A GPU is asked for by its name, .*; got "):
        catalogue.find(name)


def test_ambiguous_name_lists_the_choices():
    with pytest.raises(LabError, match="NVIDIA H100 PCIe, NVIDIA H100 80GB HBM3"):
        catalogue.find("H100")


def test_slug():
    assert catalogue.slug("NVIDIA H200") == "nvidia-h200"
    assert catalogue.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_limits_of_an_unknown_architecture_are_empty_and_known_ones_are_copies():
    assert catalogue.limits("99.0") == {}
    catalogue.limits("9.0")["max_warps_per_sm"] = 1
    assert catalogue.limits("9.0")["max_warps_per_sm"] == 64


class TestSpec:
    def test_pcie_per_direction(self):
        assert catalogue.find("4090").pcie_gb_s == pytest.approx(31.5, abs=0.05)  # 16 GT/s * 16 * 128/130 / 8
        assert catalogue.find("H200").pcie_gb_s == pytest.approx(63.0, abs=0.05)

    def test_ridge(self):
        assert catalogue.find("H200").ridge("bf16") == pytest.approx(206, abs=0.5)  # 989.4e12 / 4.8e12
        assert catalogue.find("A100 80GB").ridge("bf16") == pytest.approx(153, abs=0.5)  # 312e12 / 2.039e12
        assert catalogue.find("H200").ridge("fp32") == pytest.approx(66.9e12 / 4.8e12, rel=1e-3)

    @pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "BF16", torch.bfloat16, "torch.bfloat16"], ids=str)
    def test_dtype_spellings(self, dtype):
        assert catalogue.find("H200").tflops(dtype) == 989.4

    def test_float8_and_float32_of_torch(self):
        assert catalogue.find("H200").tflops(torch.float8_e4m3fn) == 1978.9
        assert catalogue.find("A100 80GB").tflops(torch.float32) == pytest.approx(19.49, abs=0.01)

    def test_missing_rate_is_named(self):
        with pytest.raises(LabError, match=r"A100-SXM4-80GB: no peak rate is known for fp8; known are fp32, fp16"):
            catalogue.find("A100 80GB").tflops("fp8")

    def test_nothing_known(self):
        spec = DeviceSpec(name="Mystery")
        assert spec.fp32_tflops is spec.pcie_gb_s is spec.derived_bandwidth_gb_s is spec.max_threads_per_sm is None
        assert str(spec) == "Mystery" and spec.table().count("unknown") > 10
        with pytest.raises(LabError, match="known are none"):
            spec.tflops("bf16")
        with pytest.raises(LabError, match="bandwidth is unknown"):
            spec.ridge("bf16")

    def test_text_is_stable(self):
        assert str(catalogue.find("H200")) == "NVIDIA H200, sm_90, 132 SMs, 141 GiB, 4800 GB/s, 989 TFLOP/s bf16"
        assert "memory bandwidth        1008 GB/s" in catalogue.find("4090").table()

    def test_is_frozen_and_hashable(self):
        spec = catalogue.find("H200")
        with pytest.raises(AttributeError):
            spec.sms = 1
        assert len({spec, catalogue.find("nvidia h200")}) == 1


def test_file_is_plain_json_with_units():
    data = json.loads(Path(catalogue._FILE).read_text(encoding="utf-8"))
    assert "GB/s" in data["units"] and "CUDA C++ Programming Guide" in data["architectures_source"]
