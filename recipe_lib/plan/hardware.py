"""Describe the devices that a run can be planned for: memory, rates and links, with sources.

`find_hardware(name)` returns a device for `tune plan --device` in any spelling, `parse_fit` one for
`--fit`; `_CARDS` is the table of known GPUs. Imports no torch.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from recipe_lib.config.suggest import find_nearest, quote
from recipe_lib.errors import ConfigError
from recipe_lib.units import GIB

TERA = 1e12
GIGA = 1e9
EIGHT_BITS = ("int8", "fp8")  # dtypes of matmuls whose operands have 8 bits


@dataclass(frozen=True)
class Link:
    """A link between the ranks of a machine."""

    # `nvlink`, `pcie_p2p`, `pcie_no_p2p` (through host memory) or `host`.
    kind: str
    # Bus bandwidth of a large collective as nccl-tests counts it, bytes per second.
    bandwidth: float
    # Seconds that each step of a ring collective takes besides its bytes.
    latency: float


# Latencies: the ring with the Simple protocol in NCCL's src/graph/tuning.cc, 3.4 us over NVLink and
# 5.7 us over PCIe. Bandwidths but the first are figures in common use, not measured here. NVLink 4:
# 350 GB/s, NCCL's author in github.com/NVIDIA/nccl/issues/986.
NVLINK4 = Link("nvlink", 350e9, 3.4e-6)
NVLINK3 = Link("nvlink", 230e9, 3.4e-6)
NVLINK5 = Link("nvlink", 700e9, 3.4e-6)  # twice NVLink 4, as its specification says
PCIE4 = Link("pcie_p2p", 20e9, 5.7e-6)
PCIE5 = Link("pcie_p2p", 40e9, 5.7e-6)  # twice PCIe 4, as its specification says
NO_P2P = Link("pcie_no_p2p", 10e9, 5.7e-6)  # torch/_inductor/comm_analysis.py has the same for PCIe
HOST = Link("host", 2e9, 20e-6)  # gloo over loopback; a guess

# Network between machines, bytes/second for one rank of a machine.
NDR = 45e9  # InfiniBand of 400 Gb/s, one card for each GPU, at the bus bandwidth commonly seen
HDR = 22e9  # the same of 200 Gb/s
ETHERNET_100 = 1.5e9  # 100 Gb/s shared by eight GPUs
ETHERNET_10 = 0.15e9  # 10 Gb/s likewise

# The host's memory, bytes/second, of one rank's optimizer: DeepSpeed's CPU Adam takes 8.2 s for
# 11.6e9 parameters at 28 bytes each (microsoft/DeepSpeed pull request 735).
HOST_MEMORY_OF_ONE = 40e9
# The same of all ranks of a machine: eight channels of DDR4-3200, of whose 205 GB/s four fifths are
# taken to come through. A desktop's two channels give a quarter of that.
HOST_MEMORY = 160e9


@dataclass(frozen=True)
class Hardware:
    """A device and what it is linked with."""

    # Name in the table `_CARDS`, or a size as typed.
    name: str
    # `sm80` ... `sm120`, or `cpu`.
    architecture: str
    # Total bytes of memory, as CUDA reports them.
    memory: int
    # Dtype, such as `bf16` -> dense operations per second; `get_rate` reads it.
    flops: Mapping[str, float]
    # Bandwidth of its memory, bytes per second.
    bandwidth: float
    # Link between the ranks of a machine.
    link: Link
    # Bytes per second that the network has for each rank of a machine.
    inter_node_bandwidth: float
    # Other spellings, the one that CUDA reports among them.
    aliases: tuple[str, ...] = ()
    # GPUs of a machine, which share `link`.
    ranks_per_node: int = 8
    # Name of the device whose rates are taken, if only a size of memory is known; else empty.
    rates_of: str = ""
    # Ranks of the planned run on one machine, which share the host's memory.
    ranks_here: int = 1
    # Seconds of a step of a ring over the network, as `Link.latency`: NCCL's src/graph/tuning.cc,
    # ring, Simple.
    inter_node_latency: float = 14e-6

    @property
    def host_bandwidth(self) -> float:
        """Return the bytes per second of a large copy to or from pinned host memory, one way.

        All ranks of the machine are taken to copy at the same time.
        """
        # What 16 lanes of PCIe 4 commonly give (24.8 GB/s by nvbandwidth on an A100,
        # forums.developer.nvidia.com 352186). Hopper (sm90) and Blackwell have PCIe 5, twice as
        # fast.
        has_pcie5 = self.architecture != "cpu" and int(self.architecture.removeprefix("sm")) >= 90
        pcie_bandwidth = 50e9 if has_pcie5 else 25e9
        # Two A100s, which alone have this link, share a PCIe switch. All ranks share host memory.
        ranks_on_switch = min(self.ranks_here, 2) if self.link == NVLINK3 else 1
        return min(pcie_bandwidth / ranks_on_switch, HOST_MEMORY / self.ranks_here)

    @property
    def host_memory_bandwidth(self) -> float:
        """Return the bytes per second of a rank's optimizer on the CPU while all ranks step."""
        return min(HOST_MEMORY_OF_ONE, HOST_MEMORY / self.ranks_here)

    def get_rate(self, dtype: str) -> float:
        """Return dense operations per second in `dtype`; in fp32 for a dtype that is not listed."""
        # Eight bits are twice bf16 where they are not listed, as the specifications have it: int8
        # from Ampere on, fp8 from Ada on. int8 of GeForce cards is faster still by theirs.
        if dtype in EIGHT_BITS and self.architecture != "cpu":
            return self.flops.get(dtype, 2 * self.flops["bf16"])
        return self.flops.get(dtype, self.flops["fp32"])

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the compute capability; None: a CPU."""
        if self.architecture == "cpu":
            return None
        return divmod(int(self.architecture.removeprefix("sm")), 10)


def _make_card(
    name: str,
    architecture: str,
    gibibytes: float,
    *,
    rates: tuple[float, float, float],
    bandwidth: float,
    link: Link,
    network: float,
    aliases: tuple[str, ...] = (),
) -> Hardware:
    """Return an entry of the table `_CARDS`.

    rates: TFLOP/s in (bf16, tf32, fp32). bandwidth: of its memory, GB/s. network: bytes per second
    for each rank. aliases: as `_normalize` returns them.
    """
    bf16, tf32, fp32 = (rate * TERA for rate in rates)
    return Hardware(
        name=name,
        architecture=architecture,
        memory=int(gibibytes * GIB),
        flops={"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32},
        bandwidth=bandwidth * GIGA,
        link=link,
        inter_node_bandwidth=network,
        aliases=aliases,
    )


# Memory is what CUDA reports as the total (`torch.cuda.mem_get_info()[1]`, the "total capacity" of
# torch's out-of-memory message). nvidia-smi shows more: the driver keeps some, and 1/16 goes to
# error correction where it is on. It differs by driver version: "OOM" names the smallest total, in
# GiB, in out-of-memory messages of public issues and logs.
#
# Rates are dense ones, without structured sparsity, with sums in fp32 as torch computes. GeForce
# cards do that at half the rate that their specification gives for sums in fp16. Figures in
# parentheses are TFLOP/s in bf16 / tf32 / fp32, and GB/s or TB/s of memory.
_CARDS = (
    # NVIDIA Turing whitepaper (T4: 65 in fp16, no bf16 or tf32 / 8.1, 320 GB/s). With error
    # correction: OOM 14.56.
    _make_card(
        "t4",
        "sm75",
        14.56,
        rates=(65, 8.1, 8.1),
        bandwidth=320,
        link=NO_P2P,
        network=ETHERNET_100,
        aliases=("teslat4",),
    ),
    # NVIDIA Ampere GA102 whitepaper 2.0 (3090: 71 / 35.6 / 35.6, 936 GB/s). OOM 23.56. nvidia-smi
    # 24576 MiB.
    _make_card(
        "rtx3090",
        "sm86",
        23.56,
        rates=(71, 35.6, 35.6),
        bandwidth=936,
        link=NO_P2P,
        network=ETHERNET_10,
        aliases=("3090",),
    ),
    # Rates of the 3090 by cores and boost clock (10752 x 1.86 GHz); NVIDIA's page: 1008 GB/s.
    # Memory as the 3090.
    _make_card(
        "rtx3090ti",
        "sm86",
        23.56,
        rates=(80, 40, 40),
        bandwidth=1008,
        link=NO_P2P,
        network=ETHERNET_10,
        aliases=("3090ti",),
    ),
    # NVIDIA Ada whitepaper 2.0 (165.2 / 82.6 / 82.6, 1008 GB/s). OOM 23.52 (23.64 by older
    # drivers); nvidia-smi 24564.
    _make_card(
        "rtx4090",
        "sm89",
        23.52,
        rates=(165.2, 82.6, 82.6),
        bandwidth=1008,
        link=NO_P2P,
        network=ETHERNET_10,
        aliases=("4090",),
    ),
    # NVIDIA RTX Blackwell whitepaper (209.5 / 104.8 / 104.8, 1792 GB/s). OOM 31.36. nvidia-smi
    # 32607 MiB.
    _make_card(
        "rtx5090",
        "sm120",
        31.36,
        rates=(209.5, 104.8, 104.8),
        bandwidth=1792,
        link=NO_P2P,
        network=ETHERNET_10,
        aliases=("5090",),
    ),
    # Datasheets of the RTX A5000 (222.2 with sparsity, 27.8, 768 GB/s) and A6000 (309.7, 38.7, 768
    # GB/s); their error correction is off as delivered. OOM 47.40; the A5000 as the 3090, with the
    # same chips.
    _make_card(
        "a5000",
        "sm86",
        23.56,
        rates=(111.1, 55.6, 27.8),
        bandwidth=768,
        link=PCIE4,
        network=ETHERNET_10,
        aliases=("rtxa5000",),
    ),
    _make_card(
        "a6000",
        "sm86",
        47.40,
        rates=(154.8, 77.4, 38.7),
        bandwidth=768,
        link=PCIE4,
        network=ETHERNET_10,
        aliases=("rtxa6000",),
    ),
    # Datasheets of the RTX 5000 Ada (1044.4 in fp8 with sparsity, 65.3, 576 GB/s) and 6000 Ada
    # (1457, 91.1, 960 GB/s). With error correction: OOM 44.39 (46068 MiB); the 5000 Ada by the same
    # share of 32760 MiB. Without: 6 % more.
    _make_card(
        "rtx5000ada",
        "sm89",
        29.50,
        rates=(261.1, 130.6, 65.3),
        bandwidth=576,
        link=PCIE4,
        network=ETHERNET_10,
        aliases=("rtx5000adageneration",),
    ),
    _make_card(
        "rtx6000ada",
        "sm89",
        44.39,
        rates=(364.2, 182.1, 91.1),
        bandwidth=960,
        link=PCIE4,
        network=ETHERNET_10,
        aliases=("rtx6000adageneration",),
    ),
    # NVIDIA RTX Blackwell PRO whitepaper, Workstation Edition (503.8 / 251.9 / 126, 1792 GB/s). OOM
    # 94.96.
    _make_card(
        "rtxpro6000",
        "sm120",
        94.96,
        rates=(503.8, 251.9, 126.0),
        bandwidth=1792,
        link=PCIE5,
        network=ETHERNET_100,
        aliases=(
            "pro6000",
            "rtxpro6000blackwell",
            "rtxpro6000blackwellworkstationedition",
        ),
    ),
    # Datasheet of the A10 (125 / 62.5 / 31.2, 600 GB/s); the A10G is its variant for AWS g5 (70 /
    # 35 / 35, as AWS and Baseten say). With error correction: OOM 21.95. nvidia-smi 23028 MiB.
    _make_card(
        "a10",
        "sm86",
        21.95,
        rates=(125, 62.5, 31.2),
        bandwidth=600,
        link=NO_P2P,
        network=ETHERNET_100,
    ),
    _make_card(
        "a10g", "sm86", 21.95, rates=(70, 35, 35), bandwidth=600, link=NO_P2P, network=ETHERNET_100
    ),
    # Datasheets with sparsity halved: L4 (242 / 120 / 30.3, 300 GB/s; OOM 21.95), A40 (149.7 dense
    # / 74.8 / 37.4, 696 GB/s), L40 (362 / 181 / 90.5, 864 GB/s), L40S (733 / 366 / 91.6, 864 GB/s).
    # The last three: OOM 44.34.
    _make_card(
        "l4", "sm89", 21.95, rates=(121, 60, 30.3), bandwidth=300, link=NO_P2P, network=ETHERNET_100
    ),
    _make_card(
        "a40",
        "sm86",
        44.34,
        rates=(149.7, 74.8, 37.4),
        bandwidth=696,
        link=PCIE4,
        network=ETHERNET_100,
    ),
    _make_card(
        "l40",
        "sm89",
        44.34,
        rates=(181, 90.5, 90.5),
        bandwidth=864,
        link=PCIE4,
        network=ETHERNET_100,
    ),
    _make_card(
        "l40s",
        "sm89",
        44.34,
        rates=(362, 183, 91.6),
        bandwidth=864,
        link=PCIE4,
        network=ETHERNET_100,
    ),
    # Datasheet of the A100 (312 / 156 / 19.5; 1555, 2039 and, PCIe with 80 GB, 1935 GB/s). OOM
    # 39.38 and 79.14.
    _make_card(
        "a100-40gb",
        "sm80",
        39.38,
        rates=(312, 156, 19.5),
        bandwidth=1555,
        link=NVLINK3,
        network=HDR,
        aliases=("a100sxm440gb",),
    ),
    _make_card(
        "a100-80gb",
        "sm80",
        79.14,
        rates=(312, 156, 19.5),
        bandwidth=2039,
        link=NVLINK3,
        network=HDR,
        aliases=(
            "a100sxm480gb",
            "a100sxm80gb",
        ),
    ),
    _make_card(
        "a100-40gb-pcie",
        "sm80",
        39.38,
        rates=(312, 156, 19.5),
        bandwidth=1555,
        link=PCIE4,
        network=ETHERNET_100,
        aliases=("a100pcie40gb",),
    ),
    _make_card(
        "a100-80gb-pcie",
        "sm80",
        79.14,
        rates=(312, 156, 19.5),
        bandwidth=1935,
        link=PCIE4,
        network=ETHERNET_100,
        aliases=("a100pcie80gb",),
    ),
    # Datasheet of the H100 with sparsity halved: SXM (1979 / 989 / 67, 3.35 TB/s), PCIe (1513 / 756
    # / 51, 2 TB/s), NVL (1671 / 835 / 60, 3.9 TB/s). OOM 79.14 and 93.00.
    _make_card(
        "h100",
        "sm90",
        79.14,
        rates=(989.4, 494.7, 66.9),
        bandwidth=3350,
        link=NVLINK4,
        network=NDR,
        aliases=(
            "h100sxm",
            "h100-80gb",
            "h10080gbhbm3",
        ),
    ),
    _make_card(
        "h100-pcie",
        "sm90",
        79.14,
        rates=(756, 378, 51),
        bandwidth=2000,
        link=PCIE5,
        network=ETHERNET_100,
    ),
    _make_card(
        "h100-nvl",
        "sm90",
        93.00,
        rates=(835, 417.5, 60),
        bandwidth=3900,
        link=PCIE5,
        network=ETHERNET_100,
    ),
    # Datasheet of the H200 SXM: rates of the H100, 4.8 TB/s, sold as 141 GB. OOM 139.80.
    _make_card(
        "h200",
        "sm90",
        139.80,
        rates=(989.4, 494.7, 66.9),
        bandwidth=4800,
        link=NVLINK4,
        network=NDR,
        aliases=("h200sxm",),
    ),
    # Datasheet of the HGX B200, an eighth of eight GPUs: 36 PFLOP/s in bf16 with sparsity (2250
    # dense), 18 in tf32, 600 TFLOP/s in fp32, 62 TB/s. OOM 178.35.
    _make_card(
        "b200", "sm100", 178.35, rates=(2250, 1125, 75), bandwidth=7750, link=NVLINK5, network=NDR
    ),
)

HARDWARE = {card.name: card for card in _CARDS}  # by name, without aliases

# Maker -> regular expression for the beginning of its devices' names, as `_normalize` returns them.
_OTHER_MAKERS = {
    "AMD": r"amd|radeon|rx\d|\d{4}(xt|gre)|gfx\d|instinct|mi\d|w[67]\d00",
    "Intel": r"intel|arc|gaudi",
    "Apple": r"apple|mps|m\d($|pro|max|ultra)",
    "Google": r"google|tpu",
    "Huawei": r"huawei|ascend",
}

# A card sold as so many GB holds so many GiB, of which CUDA reports this share or more where no
# error correction is on (RTX 4090 23.52 of 24, RTX 5090 31.36 of 32).
SHARE_REPORTED = 0.98

# (largest GiB, card): a size of memory gets the rates of the slowest common card of that size.
_TYPICAL = (
    (24, "rtx3090"),
    (32, "rtx5090"),
    (48, "a6000"),
    (80, "a100-80gb"),
    (141, "h200"),
    (float("inf"), "b200"),
)

_SIZE = re.compile(r"(\d{1,5}(?:\.\d+)?) ?(gb|gib|g)", re.IGNORECASE)  # such as `24GB`
_FIT = re.compile(r"(\d{1,6}) ?[x*] ?(.+)", re.IGNORECASE)  # ranks and a device, such as `4x24GB`


def find_hardware(name: str) -> Hardware:
    """Return the device of a name in any spelling: `rtx4090`, `NVIDIA GeForce RTX 4090`.

    `24GB` is a card sold as one of 24 GB, whose CUDA total is 98 % of 24 GiB (cards with error
    correction have 6 % less: name them); `24GiB` is a CUDA total of exactly 24 GiB. Their rates are
    those of a common card. `cpu` has this machine's memory. Raises ConfigError for other names.
    """
    if hardware := _find(name):
        return hardware
    normalized_name = _normalize(name)
    nearest_name = find_nearest(normalized_name, [_normalize(spelling) for spelling in HARDWARE])
    suggestions = [
        card
        for card in HARDWARE
        if normalized_name and _normalize(card).startswith(normalized_name)
    ]
    # Names that begin as the given one come first: `a100` has four.
    suggestions = suggestions or [card for card in HARDWARE if _normalize(card) == nearest_name]
    hint = f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""
    maker = next(
        (maker for maker, pattern in _OTHER_MAKERS.items() if re.match(pattern, normalized_name)),
        None,
    )
    if maker and not suggestions:
        raise ConfigError(
            f"device: {quote(name)} is {maker}'s, whose kernels and rates are not known here: runs"
            " and plans are for NVIDIA's GPUs and for CPUs; give a size as 24GB for a plan as if"
            " NVIDIA had made it"
        )
    raise ConfigError(
        f"device: {quote(name)} is not known; expected one of {', '.join(HARDWARE)}, cpu, or a size"
        f" as 24GB{hint}"
    )


def _find(name: str) -> Hardware | None:
    """Return the device of a name or size; None for an unknown name.

    Raises ConfigError for a size that no device has.
    """
    if size := _SIZE.fullmatch(name.strip()):
        return _make_sized_card(name.strip(), float(size[1]), exact=size[2].lower() == "gib")
    normalized_name = _normalize(name)
    if normalized_name == "cpu":
        return Hardware(
            name="cpu",
            architecture="cpu",
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            # Guesses for a few cores.
            flops=dict.fromkeys(("bf16", "fp16", "tf32", "fp32"), 0.1 * TERA),
            bandwidth=10 * GIGA,
            link=HOST,
            inter_node_bandwidth=ETHERNET_10,
        )
    return next(
        (card for card in _CARDS if normalized_name in map(_normalize, (card.name, *card.aliases))),
        None,
    )


def find_reported_hardware(name: str, memory: int) -> Hardware:
    """Return the device that CUDA calls `name`, with `memory` bytes."""
    # Rates of one that is not in the table are those of a common card of that size.
    return replace(_find(name) or _make_sized_card(name, memory / GIB, exact=True), memory=memory)


def parse_fit(text: str) -> tuple[int, Hardware]:
    """Return (number of ranks, device) of a text such as `4x24GB`; 1 rank without a number.

    Raises ConfigError for an unknown device or no ranks.
    """
    match = _FIT.fullmatch(text.strip())
    # A text that is a device's name as a whole names no number of ranks.
    if not match or _find(text):
        return 1, find_hardware(text)
    ranks = int(match[1])
    if ranks < 1:
        raise ConfigError(
            f"fit: {quote(text)} names {ranks} devices; expected at least one, such as 4x24GB"
        )
    return ranks, find_hardware(match[2])


def _normalize(name: str) -> str:
    """Return a name in lowercase letters and digits, without `nvidia` and `geforce` in front."""
    return re.sub("[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")


def _make_sized_card(name: str, size: float, exact: bool) -> Hardware:
    """Return a device of which only the memory is known. Raises ConfigError for a wrong size.

    size: GiB. exact: the size is what CUDA reports; otherwise the card is sold with it.
    """
    if not 1 <= size <= 4096:
        raise ConfigError(
            f"device: {quote(name)} is no size of a device's memory; expected 1GB to 4096GB"
        )
    typical = HARDWARE[next(card for limit, card in _TYPICAL if size <= limit)]
    return Hardware(
        name=name,
        architecture=typical.architecture,
        memory=int(size * GIB * (1.0 if exact else SHARE_REPORTED)),
        flops=typical.flops,
        bandwidth=typical.bandwidth,
        link=typical.link,
        inter_node_bandwidth=typical.inter_node_bandwidth,
        rates_of=typical.name,
    )
