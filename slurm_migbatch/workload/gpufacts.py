"""List the speed of whole GPUs by name, for the physical prior: dense 16-bit matrix rate and memory bandwidth.

Figures are from NVIDIA's data sheets (without sparsity, SXM parts unless the name says PCIe or NVL). MIG geometry never
comes from here. A site corrects or adds models in [gpus.<name>] of migbatch.toml.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NamedTuple


class GpuModelFacts(NamedTuple):
    """`tflops`: 10^12 dense 16-bit operations a second; `bandwidth_gbs`: 10^9 bytes a second; `sm_count`: all SMs;
    `memory_slices`: MIG memory slices of the whole GPU; `mib`: memory of the whole GPU without MIG as nvidia-smi prints
    it (of GH200 144G: as its name says), 0 if unknown.
    """

    tflops: float
    bandwidth_gbs: float
    sm_count: int = 0
    memory_slices: int = 8
    mib: int = 0

    @property
    def compute_slices(self) -> int:
        """MIG compute slices of the whole GPU."""
        return {2: 2, 4: 4, 12: 4}.get(self.memory_slices, 7)


#: the first pattern found in the name applies: in lower case, with blanks between words, and sizes as in `80gb`
_KNOWN = (
    (r"\ba30\b", GpuModelFacts(165, 933, 56, 4, 24576)),
    (r"\ba[18]00\b.*\b40(gb)?\b", GpuModelFacts(312, 1555, 108, mib=40960)),
    (r"\ba[18]00\b.*(pcie.*80gb|80gb.*pcie)", GpuModelFacts(312, 1935, 108, mib=81920)),
    (r"\ba[18]00\b", GpuModelFacts(312, 2039, 108, mib=81920)),
    (r"\bh20\b.*(\b3e\b|141gb)", GpuModelFacts(148, 4800, 78, mib=143771)),
    (r"\bh20\b", GpuModelFacts(148, 4000, 78, mib=97871)),
    (r"\bgh200\b.*144gb\b", GpuModelFacts(990, 4900, 132, mib=147456)),
    (r"\bgh200\b", GpuModelFacts(990, 4000, 132, mib=97871)),
    (r"\bh200\b.*nvl", GpuModelFacts(835, 4800, 132, mib=143771)),
    (r"\bh200\b", GpuModelFacts(989, 4800, 132, mib=143771)),
    (r"\bh[18]00\b.*nvl", GpuModelFacts(835, 3938, 132, mib=95830)),
    (r"\bh[18]00\b.*pcie", GpuModelFacts(756, 2039, 114, mib=81559)),
    (r"\bh[18]00\b", GpuModelFacts(989, 3352, 132, mib=81559)),
    (r"\bgb300\b", GpuModelFacts(2500, 8000, 148, mib=284208)),
    (r"\bb300\b", GpuModelFacts(2500, 8000, 148, mib=275040)),
    (r"\bgb200\b", GpuModelFacts(2250, 8000, 148, mib=189471)),
    (r"\bb200\b", GpuModelFacts(2250, 8000, 148, mib=183359)),
    # of the Server Edition; the Workstation Edition's are 503 and 1792
    (r"rtx pro 6000", GpuModelFacts(480, 1597, 188, 12, 97887)),
    # two instances at most; the placements of their memory are not published
    (r"rtx pro 5000\b.*\b72gb", GpuModelFacts(258, 1344, 110, 2, 73415)),
    (r"rtx pro 5000", GpuModelFacts(258, 1344, 110, 2, 48935)),
    # the bandwidth of the Server Edition; the other one's is 896
    (r"rtx pro 4500", GpuModelFacts(211, 800, 82, 2, 32623)),
)
FORM = re.compile(r"[ -](pcie|nvl)\b")
LESS = 0.9
"""Largest share of a listed GPU's memory that makes another variant of it: names round."""
LEAST_SHARE = 0.5
"""Smallest share; less is that of a slice."""
ALIKE = 0.9
"""Ratio of speeds from which two forms of a GPU are one model: an A100 80GB is one with either connector."""


def facts_of(name: str) -> GpuModelFacts | None:
    """Return the facts of the GPU that NVML calls `name`, or that has this short name.

    A variant whose name states less memory than the listed ones has fewer or slower memory stacks; its bandwidth is
    reduced in proportion.
    """
    text = _words(name)
    facts = next((facts for pattern, facts in _KNOWN if re.search(pattern, text)), None)
    stated = 0 if facts is None else 1024 * _stated_gb(text)
    if facts is None or not facts.mib or not LEAST_SHARE * facts.mib <= stated <= LESS * facts.mib:
        return facts
    return facts._replace(bandwidth_gbs=facts.bandwidth_gbs * stated / facts.mib, mib=stated)


def guess(sm_count: int, memory_gb: int) -> GpuModelFacts:
    """Estimate an unlisted GPU: per SM and per GB as on an A100, on the low side."""
    return GpuModelFacts(2.9 * max(sm_count, 1), 25.0 * max(memory_gb, 1), sm_count)


def short_name(name: str, memory_gb: int) -> str:
    """Return the site's short name: "NVIDIA H100 80GB HBM3" with 80 GB is "h100-80gb"."""
    return f"{model_of(name)}-{memory_gb}gb"


@lru_cache(maxsize=256)
def model_of(name: str) -> str:
    """Return a GPU's model without its memory: "h100"; but "h100-pcie", because that variant has a different speed."""
    text = re.sub(r"^(nvidia|tesla|quadro) | [0-9]+gb$", "", _words(name))
    if "rtx pro" in text:
        return "-".join(text.split()[:3])
    match = re.search(r"\b(g?[abhlr]\d{2,3}[a-z]?)\b", text)
    if match is None:
        return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "gpu"
    form = FORM.search(text)
    if form is None or _are_similar(facts_of(text), facts_of(FORM.sub("", text))):
        return match[1]
    return f"{match[1]}-{form[1]}"


def memory_gb_of(name: str) -> int:
    """Return the GB of a whole GPU, by its name, as stated in the name of its full profile; 0 if unknown.

    The GB in a name with a Grace CPU (GH200 480GB) are the CPU's.
    """
    facts = facts_of(name)
    return _stated_gb(_words(name)) or (math.ceil(facts.mib / 1024) if facts is not None else 0)


def _stated_gb(text: str) -> int:
    """Return the GB in the words of a name, 0 if none; the GB of a MIG profile (1g.10gb) do not count."""
    stated = None if re.search(r"\bg[hb][0-9]", text) else re.search(r"(?<![.0-9])([0-9]{2,3}) ?gb\b", text)
    return 0 if stated is None else int(stated[1])


def _are_similar(one: GpuModelFacts | None, other: GpuModelFacts | None) -> bool:
    if one is None or other is None:
        return True
    return all(ALIKE <= a / b <= 1 / ALIKE for a, b in zip(one[:2], other[:2], strict=True))


def _words(name: str) -> str:
    words = re.sub(r"[ _-]+", " ", name.lower())
    words = re.sub(r"\b([0-9]{2,3}) ?gb?\b", r"\1gb", words)  # 40G, 40 GB
    words = re.sub(r"\brtx ?(?:pro ?([0-9]{4})|([0-9]{4}) ?pro)\b", r"rtx pro \1\2", words)  # as people write it
    return re.sub(r"\b(h[18]00) (94gb)", r"\1 nvl \2", words)  # only NVL has 94 GB; stored measurements lack "nvl"
