"""Facts about each simulated GPU, with their sources: public ones, and recorded answers of real drivers.

Nothing here is read from the simulated driver.

A row is what `nvidia-smi mig -lgip` prints of one profile: GiB of memory as printed, SMs, copy engines, decoders,
encoders, JPEG and OFA engines, instances; the placements are those of `-lgipp`. The driver reports memory in MiB and
nvidia-smi rounds it to two decimals, so 4.75 GiB is 4864 MiB and 9.62 GiB is 9856 MiB.

`unknown` names the figures for which no public source was found: the driver's are derived, and the tests check them
only so that they do not change unnoticed. `differs` says where sources disagree and which one is followed.
"""

from __future__ import annotations

from dataclasses import dataclass

GUIDE = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html"
RECORDED = "driver 580.159.04, recorded (tests/support/recorded)"
START = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/getting-started-with-mig.html"


@dataclass(frozen=True)
class Row:
    """One GPU instance profile of one GPU model."""

    name: str
    id: int
    enum: int
    slices: int
    gib: float
    sms: int
    copy: int
    decoders: int
    encoders: int
    jpegs: int
    ofas: int
    most: int
    starts: tuple[int, ...]
    size: int
    sources: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    differs: str = ""


@dataclass(frozen=True)
class Facts:
    """One GPU model."""

    name: str
    sms: int  # usable without MIG
    mig_sms: int  # in the largest profile
    memory_mib: int
    compute_capability: tuple[int, int]
    pci_device_id: int
    sources: tuple[str, ...]
    rows: tuple[Row, ...]
    unknown: tuple[str, ...] = ()


SEVEN = (0, 1, 2, 3, 4, 5, 6)
EVEN = (0, 2, 4, 6)
PAIRS = (0, 2, 4)
HALVES = (0, 4)
ONLY = (0,)

# -- A30 -----------------------------------------------------------------------------------------------------------

A30_GUIDE = f"{GUIDE}#a30-mig-profiles"
A30_LISTING = "nvidia-smi mig -lgip of an A30, two public notebooks without an address that lasts"
A30_DECODERS = "the guide says 0 decoders, the listings 1; the guide is followed"
A30_MEMORY = "23.44 GiB in one listing, 23.50 in the other, which is followed"
A30 = Facts(
    "NVIDIA A30",
    56,
    56,
    24576,
    (8, 0),
    0x20B7,
    (
        "https://github.com/NVIDIA/mig-parted/issues/157 (PCI id 0x20B710DE)",
        "https://developer.nvidia.com/cuda-gpus (compute capability)",
        "https://www.nvidia.com/en-us/data-center/products/a30-gpu/ (24 GB; 3584 cores are 56 SMs)",
    ),
    (
        Row(
            "1g.6gb", 14, 0, 1, 5.81, 14, 1, 0, 0, 0, 0, 4, (0, 1, 2, 3), 1, (A30_GUIDE, A30_LISTING), (), A30_DECODERS
        ),
        Row("1g.6gb+me", 21, 7, 1, 5.81, 14, 1, 1, 0, 1, 1, 1, (0, 1, 2, 3), 1, (A30_GUIDE, A30_LISTING)),
        Row("2g.12gb", 5, 1, 2, 11.69, 28, 2, 2, 0, 0, 0, 2, (0, 2), 2, (A30_GUIDE, A30_LISTING)),
        Row("2g.12gb+me", 6, 8, 2, 11.69, 28, 2, 2, 0, 1, 1, 1, (0, 2), 2, (A30_GUIDE, A30_LISTING)),
        Row("4g.24gb", 0, 3, 4, 23.5, 56, 4, 4, 0, 1, 1, 1, ONLY, 4, (A30_GUIDE, A30_LISTING), (), A30_MEMORY),
    ),
)

# -- A100 ----------------------------------------------------------------------------------------------------------

A100_GUIDE = f"{GUIDE}#a100-mig-profiles"
A100_LISTING = f"{START} (List GPU Instance Profiles: -lgip and -lgipp of an A100-SXM4-40GB)"
A100_BOTH = (A100_LISTING, A100_GUIDE)
A100_40 = Facts(
    "NVIDIA A100-SXM4-40GB",
    108,
    98,
    40960,
    (8, 0),
    0x20B0,
    (
        "https://github.com/NVIDIA/mig-parted/blob/main/deployments/systemd/config-default.yaml (PCI ids)",
        "NVIDIA A100 Tensor Core GPU Architecture whitepaper (108 SMs, 40 GB)",
        "https://developer.nvidia.com/cuda-gpus (compute capability)",
    ),
    (
        Row("1g.5gb", 19, 0, 1, 4.75, 14, 1, 0, 0, 0, 0, 7, SEVEN, 1, A100_BOTH),
        Row("1g.5gb+me", 20, 7, 1, 4.75, 14, 1, 1, 0, 1, 1, 1, SEVEN, 1, A100_BOTH),
        Row("1g.10gb", 15, 9, 1, 9.62, 14, 1, 1, 0, 0, 0, 4, EVEN, 2, A100_BOTH),
        Row("2g.10gb", 14, 1, 2, 9.62, 28, 2, 1, 0, 0, 0, 3, PAIRS, 2, A100_BOTH),
        Row("3g.20gb", 9, 2, 3, 19.5, 42, 3, 2, 0, 0, 0, 2, HALVES, 4, A100_BOTH),
        Row("4g.20gb", 5, 3, 4, 19.5, 56, 4, 2, 0, 0, 0, 1, ONLY, 4, A100_BOTH),
        Row("7g.40gb", 0, 4, 7, 39.25, 98, 7, 5, 0, 1, 1, 1, ONLY, 8, A100_BOTH),
    ),
)

A100_80_DEVICES = "https://github.com/XuehaiPan/nvitop/pull/8 (nvidia-smi of an A100-SXM4-80GB: 19968 MiB in 2g.20gb)"
A100_80_LISTING = "nvidia-smi mig -lgip of an A100-SXM4-80GB in a public listing: 9.50, 19.50, 39.25, 79.00 GiB"
A100_80_MEMORY = "78.75 to 79.25 GiB for 7g, 39.25 and 39.50 for 3g and 4g, by driver release"
A100_80_BOTH = (A100_80_LISTING, A100_GUIDE, A100_80_DEVICES)
A100_80 = Facts(
    "NVIDIA A100-SXM4-80GB",
    108,
    98,
    81920,
    (8, 0),
    0x20B2,
    (
        "https://github.com/NVIDIA/mig-parted/issues/31 (nvidia-smi: name, 81920 MiB)",
        "https://github.com/NVIDIA/mig-parted/blob/main/deployments/systemd/config-default.yaml (PCI ids)",
        "NVIDIA A100 Tensor Core GPU Architecture whitepaper (108 SMs)",
    ),
    (
        Row("1g.10gb", 19, 0, 1, 9.5, 14, 1, 0, 0, 0, 0, 7, SEVEN, 1, A100_80_BOTH),
        Row("1g.10gb+me", 20, 7, 1, 9.5, 14, 1, 1, 0, 1, 1, 1, SEVEN, 1, A100_80_BOTH),
        Row("1g.20gb", 15, 9, 1, 19.5, 14, 1, 1, 0, 0, 0, 4, EVEN, 2, A100_80_BOTH),
        Row("2g.20gb", 14, 1, 2, 19.5, 28, 2, 1, 0, 0, 0, 3, PAIRS, 2, A100_80_BOTH),
        Row("3g.40gb", 9, 2, 3, 39.25, 42, 3, 2, 0, 0, 0, 2, HALVES, 4, A100_80_BOTH, (), A100_80_MEMORY),
        Row("4g.40gb", 5, 3, 4, 39.25, 56, 4, 2, 0, 0, 0, 1, ONLY, 4, A100_80_BOTH, (), A100_80_MEMORY),
        Row("7g.80gb", 0, 4, 7, 79.0, 98, 7, 5, 0, 1, 1, 1, ONLY, 8, A100_80_BOTH, (), A100_80_MEMORY),
    ),
)

# -- H100, H200 ----------------------------------------------------------------------------------------------------

H100_GUIDE = f"{GUIDE}#h100-mig-profiles"
H100_LISTING = "https://jbarrow.ai/field_notes/nvidia-mig/ (-lgip of an H100 80GB HBM3)"
H100_PLACES = "https://github.com/NVIDIA/go-nvml/issues/146 (-lgi: 2g at 0:2 and 2:2, 3g at 4:4)"
H100_BOTH = (RECORDED, H100_LISTING, H100_GUIDE, H100_PLACES)
H100 = Facts(
    "NVIDIA H100 80GB HBM3",
    132,
    132,
    81559,
    (9, 0),
    0x2330,
    (
        RECORDED,
        "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html (name)",
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper (132 SMs, compute capability)",
        "https://github.com/NVIDIA/mig-parted/blob/main/deployments/systemd/config-default.yaml (PCI ids)",
    ),
    (
        Row("1g.10gb", 19, 0, 1, 9.75, 16, 1, 1, 0, 1, 0, 7, SEVEN, 1, H100_BOTH),
        Row("1g.10gb+me", 20, 7, 1, 9.75, 16, 1, 1, 0, 1, 1, 1, SEVEN, 1, H100_BOTH),
        Row("1g.20gb", 15, 9, 1, 19.62, 26, 1, 1, 0, 1, 0, 4, EVEN, 2, H100_BOTH),
        Row("2g.20gb", 14, 1, 2, 19.62, 32, 2, 2, 0, 2, 0, 3, PAIRS, 2, H100_BOTH),
        Row("3g.40gb", 9, 2, 3, 39.5, 60, 3, 3, 0, 3, 0, 2, HALVES, 4, H100_BOTH),
        Row("4g.40gb", 5, 3, 4, 39.5, 64, 4, 4, 0, 4, 0, 1, ONLY, 4, H100_BOTH),
        Row("7g.80gb", 0, 4, 7, 79.25, 132, 8, 7, 0, 7, 1, 1, ONLY, 8, H100_BOTH),
    ),
)

H200_GUIDE = f"{GUIDE}#h200-mig-profiles"
H200_LISTING = "https://github.com/NVIDIA/mig-parted/issues/120 (-lgip of an H200)"
H200_PLACES = "https://github.com/openshift/instaslice-operator test/utils/emulated.go (placements)"
H200_MEMORY = "32.25, 69.50 and 139.75 GiB in the listing (an older driver); the recorded driver is followed"
H200_BOTH = (RECORDED, H200_LISTING, H200_GUIDE, H200_PLACES)
H200 = Facts(
    "NVIDIA H200",
    132,
    132,
    143771,
    (9, 0),
    0x2335,
    (
        RECORDED,
        "https://github.com/NVIDIA/mig-parted/issues/120 (name, PCI id 0x233510DE)",
        "NVIDIA H200 datasheet (141 GB; the GH100 of the H100 SXM)",
    ),
    (
        Row("1g.18gb", 19, 0, 1, 16.0, 16, 1, 1, 0, 1, 0, 7, SEVEN, 1, H200_BOTH),
        Row("1g.18gb+me", 20, 7, 1, 16.0, 16, 1, 1, 0, 1, 1, 1, SEVEN, 1, H200_BOTH),
        Row("1g.35gb", 15, 9, 1, 32.5, 26, 1, 1, 0, 1, 0, 4, EVEN, 2, H200_BOTH, (), H200_MEMORY),
        Row("2g.35gb", 14, 1, 2, 32.5, 32, 2, 2, 0, 2, 0, 3, PAIRS, 2, H200_BOTH, (), H200_MEMORY),
        Row("3g.71gb", 9, 2, 3, 69.75, 60, 3, 3, 0, 3, 0, 2, HALVES, 4, H200_BOTH, (), H200_MEMORY),
        Row("4g.71gb", 5, 3, 4, 69.75, 64, 4, 4, 0, 4, 0, 1, ONLY, 4, H200_BOTH, (), H200_MEMORY),
        Row("7g.141gb", 0, 4, 7, 140.0, 132, 8, 7, 0, 7, 1, 1, ONLY, 8, H200_BOTH, (), H200_MEMORY),
    ),
)

# -- B200 ----------------------------------------------------------------------------------------------------------

B200_GUIDE = f"{GUIDE}#b200-mig-profiles"
B200_LISTING = "https://github.com/NVIDIA/mig-parted/pull/187 (-lgip of a B200, driver of March 2025)"
B200_BOTH = (B200_LISTING, B200_GUIDE)
B200_MEMORY = "22.00 GiB in https://github.com/NVIDIA/mig-parted/pull/166 (driver of January 2025), 20.50 later"
B200_ENGINES = "the guide has 1 decoder and 1 JPEG engine and 3 copy engines in 2g, the listing 2, 2 and 4"
B200_TABLE = (
    "the guide has 1 decoder and 1 JPEG engine in every profile; engines go by slice here as in the listing's 2g"
)
B200_REST = ("gib", "sms", "decoders", "jpegs", "starts")
B200 = Facts(
    "NVIDIA B200",
    148,
    148,
    183359,
    (10, 0),
    0x2901,
    (
        "https://github.com/NVIDIA/TensorRT-LLM/issues/10278 (nvidia-smi: name, 183359 MiB, driver 580.95.05)",
        "https://github.com/pytorch/ao/pull/4002 (148 SMs, compute capability 10.0)",
        "https://github.com/NVIDIA/gpu-operator/pull/1242 (PCI id 0x2901)",
    ),
    (
        Row("1g.23gb", 19, 0, 1, 20.5, 18, 2, 1, 0, 1, 0, 7, SEVEN, 1, B200_BOTH, ("starts",), B200_MEMORY),
        Row("1g.23gb+me", 20, 7, 1, 20.5, 18, 2, 1, 0, 1, 1, 1, SEVEN, 1, B200_BOTH, ("starts",), B200_MEMORY),
        Row("1g.45gb", 15, 9, 1, 44.25, 30, 2, 1, 0, 1, 0, 4, EVEN, 2, B200_BOTH, ("starts",)),
        Row("2g.45gb", 14, 1, 2, 44.25, 36, 4, 2, 0, 2, 0, 3, PAIRS, 2, B200_BOTH, ("starts",), B200_ENGINES),
        Row("3g.90gb", 9, 2, 3, 89.0, 68, 6, 3, 0, 3, 0, 2, HALVES, 4, (B200_GUIDE,), B200_REST, B200_TABLE),
        Row("4g.90gb", 5, 3, 4, 89.0, 72, 8, 4, 0, 4, 0, 1, ONLY, 4, (B200_GUIDE,), B200_REST, B200_TABLE),
        Row("7g.180gb", 0, 4, 7, 178.5, 148, 16, 7, 0, 7, 1, 1, ONLY, 8, (B200_GUIDE,), B200_REST, B200_TABLE),
    ),
)

# -- RTX PRO 6000 --------------------------------------------------------------------------------------------------

RTX_GUIDE = f"{GUIDE}#rtx-pro-6000-blackwell-mig-profiles"
RTX_LISTING = "https://github.com/GoogleCloudPlatform/container-engine-accelerators/pull/564 (-lgip)"
RTX_OTHER = "https://github.com/bigstack-oss/cubecos/issues/312 (-lgip)"
RTX_BOTH = (RTX_LISTING, RTX_GUIDE, RTX_OTHER)
RTX_MEMORY = (
    "23.62, 47.38 and 95.12 GiB in the first listing, 23.12, 46.50 and 93.38 in the other; the first is followed"
)
QUARTERS = (0, 3, 6, 9)
RTX = Facts(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    188,
    188,
    97887,
    (12, 0),
    0x2BB5,
    (
        "https://github.com/NVIDIA/mig-parted/blob/main/deployments/systemd/config-default.yaml (PCI id 0x2BB5)",
        "NVIDIA RTX Blackwell PRO GPU Architecture whitepaper (188 SMs, 96 GB, compute capability)",
    ),
    (
        Row("1g.24gb", 14, 0x0, 1, 23.62, 46, 1, 1, 1, 1, 0, 4, QUARTERS, 3, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("1g.24gb+me", 21, 0x7, 1, 23.62, 46, 1, 1, 1, 1, 1, 1, QUARTERS, 3, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("1g.24gb+gfx", 47, 0xA, 1, 23.62, 46, 1, 1, 1, 1, 0, 4, QUARTERS, 3, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("1g.24gb+me.all", 65, 0xF, 1, 23.62, 46, 1, 4, 4, 4, 1, 1, QUARTERS, 3, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("1g.24gb-me", 67, 0xD, 1, 23.62, 46, 1, 0, 0, 0, 0, 4, QUARTERS, 3, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("2g.48gb", 5, 0x1, 2, 47.38, 94, 2, 2, 2, 2, 0, 2, (0, 6), 6, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("2g.48gb+gfx", 35, 0xB, 2, 47.38, 94, 2, 2, 2, 2, 0, 2, (0, 6), 6, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("2g.48gb+me.all", 64, 0x10, 2, 47.38, 94, 2, 4, 4, 4, 1, 1, (0, 6), 6, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("2g.48gb-me", 66, 0xE, 2, 47.38, 94, 2, 0, 0, 0, 0, 2, (0, 6), 6, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("4g.96gb", 0, 0x3, 4, 95.12, 188, 4, 4, 4, 4, 1, 1, ONLY, 12, RTX_BOTH, ("starts",), RTX_MEMORY),
        Row("4g.96gb+gfx", 32, 0xC, 4, 95.12, 188, 4, 4, 4, 4, 1, 1, ONLY, 12, RTX_BOTH, ("starts",), RTX_MEMORY),
    ),
    ("memory_mib",),
)

FACTS: dict[str, Facts] = {
    "a30": A30,
    "a100-40gb": A100_40,
    "a100-80gb": A100_80,
    "h100-80gb": H100,
    "h200": H200,
    "b200": B200,
    "rtx-pro-6000": RTX,
}
