"""What `tune doctor` makes of the facts: findings, which are wrong, and advice, which is not."""

from collections.abc import Iterator
from typing import Any

from recipe_lib.cli.doctor_probes import LOW_PRECISION, RANGES, in_range
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.units import GIB, MIB, format_bytes, format_seconds

# {"name": to look up in docs/doctor.md, "line": what is so, "remedy": what to do about it; each one line}
Finding = dict[str, str]

IN_USE = GIB  # of a GPU by others; a desktop takes less
SLOW_GPU = 0.8  # of the fastest like it
SLOW_MATMUL = 0.4  # of the data sheet's rate; kernels reach 0.65
SHARED_MEMORY = 512 * MIB  # for NCCL among GPUs that cannot reach each other
MEMORY = 2 * GIB  # of the host, for torch alone
DISK = 5 * GIB
SLOW_DISK = 100e6  # bytes/second
SLOW_COPY = 6e9  # bytes/second: a quarter of what PCIe 4 gives with 16 lanes
SAVED = 15 * GIB  # of 8B parameters in bf16


def findings(facts: dict[str, Any]) -> list[Finding]:
    """What is wrong; {"name", "line", "remedy"} each."""
    looks = (_packages, _gpus, _speed, _peers, _links, _host, _folders, _unexplained)
    return [each for look in looks for each in look(facts)]


def _finding(name: str, line: str, remedy: str) -> Finding:
    return {"name": name, "line": line, "remedy": remedy}


def _gpus_of(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return facts["steps"].get("torch", {}).get("gpus", [])


def _unexplained(facts: dict[str, Any]) -> list[Finding]:
    """Steps that failed and are no finding of their own."""
    known = ("torch", "torchao", *(f"{name} matmuls" for name in LOW_PRECISION))
    failed = {name: why for name, why in facts["failed"].items() if name not in known and " GPU " not in name}
    remedy = "try again; if it stays, what else is found here may be why"
    return [_finding("not-measured", f"{name}: {why}", remedy) for name, why in failed.items()]


def _packages(facts: dict[str, Any]) -> Iterator[Finding]:
    """Versions of torch and torchao, and whether the pair works."""
    packages = facts["machine"]["packages"]
    for name, ((major, minor), (above, after)) in RANGES.items():
        expected = f"expected {name}>={major}.{minor},<{above}.{after}"
        if packages[name] is None:
            yield _finding("package-missing", f"{name}: not installed, {expected}", f"pip install {name}")
        elif not in_range(name, packages[name]):
            remedy = f"pip install '{name}>={major}.{minor},<{above}.{after}'"
            yield _finding("package-version", f"{name}: found {packages[name]}, {expected}", remedy)
    if "torchao" in facts["failed"]:
        line = f"torchao {packages['torchao']} cannot be imported with torch {packages['torch']}"
        remedy = "install the torchao that its release notes name for this torch, or the newest in the range"
        yield _finding("torchao", f"{line} ({facts['failed']['torchao']})", remedy)


def _gpus(facts: dict[str, Any]) -> Iterator[Finding]:
    """GPUs that torch does not see, has no kernels for, or shares with other programs."""
    seen, listed, gpus = facts["steps"].get("torch", {}), facts["machine"]["listed_gpus"], _gpus_of(facts)
    if facts["machine"]["driver"] == "does not answer":
        yield _finding("driver", "nvidia-smi does not answer", "restart the machine, or look into `dmesg`")
    if "torch" in facts["failed"]:
        line = f"torch cannot be used: {facts['failed']['torch']}"
        remedy = "install it anew, and restart the machine if its driver does not answer"
        yield _finding("torch-broken", line, remedy)
    if listed and not gpus and seen:
        count = f"the driver lists {len(listed)} GPU{'s' * (len(listed) > 1)}, torch {seen['version']} sees none"
        if seen["cuda"] is None:
            remedy = "this torch is built without CUDA: install one with it, see pytorch.org/get-started"
        else:
            remedy = (
                f"it says: {seen['error'] or 'nothing'}; install a driver for CUDA {seen['cuda']}, or an older torch"
            )
        yield _finding("gpu-unseen", count, remedy)
    for number, gpu in enumerate(gpus):
        major, minor = gpu["capability"]
        if not gpu["supported"]:
            built = ", ".join(seen["built_for"]) or "none"
            line = f"GPU {number} ({gpu['name']}) is sm_{major}{minor}; torch {seen['version']} has kernels for {built}"
            yield _finding("gpu-architecture", line, "install a torch built for it")
        elif (major, minor) < (8, 0):
            line = f"GPU {number} ({gpu['name']}, sm_{major}{minor}) computes bf16 slowly or not at all"
            yield _finding("gpu-bf16", line, "set dtype=fp32, or use a card of capability 8.0 or more")
        used = gpu["memory"] - gpu["free"]
        if used > IN_USE:  # without what this process holds of it, some hundred MiB
            line = f"GPU {number}: {format_bytes(used)} of {format_bytes(gpu['memory'])} are in use"
            remedy = "end the programs that `nvidia-smi` shows, or plan with `tune plan --reserve-gib`"
            yield _finding("gpu-in-use", line, remedy)


def _speed(facts: dict[str, Any]) -> Iterator[Finding]:
    """GPUs that are slower than others like them, or than their data sheet; GPUs that could not be measured."""
    gpus = _gpus_of(facts)
    rates = {}
    for number in range(len(gpus)):
        for name in (f"matmuls of GPU {number}", f"copies of GPU {number}"):
            if name in facts["failed"]:
                remedy = "look for its errors in `dmesg`, and leave it out with CUDA_VISIBLE_DEVICES"
                yield _finding("gpu-broken", f"{name}: {facts['failed'][name]}", remedy)
        if f"matmuls of GPU {number}" in facts["steps"]:
            rates[number] = facts["steps"][f"matmuls of GPU {number}"]
    for number, rate in rates.items():
        name = gpus[number]["name"]
        best = max(rates[other] for other in rates if gpus[other]["name"] == name)
        remedy = "look at its clocks, temperature and power limit (`nvidia-smi -q -d PERFORMANCE`)"
        if rate < SLOW_GPU * best:
            line = f"GPU {number}: bf16 matmuls at {rate / 1e12:.0f} TFLOP/s, another {name} here at"
            line += f" {best / 1e12:.0f}; all ranks wait for the slowest"
            yield _finding("gpu-slow", line, remedy)
            continue
        try:
            known = find_hardware(name)
        except ConfigError:
            continue
        if rate < SLOW_MATMUL * known.rate("bf16"):
            line = f"GPU {number}: bf16 matmuls at {rate / 1e12:.0f} TFLOP/s, the data sheet of {known.name} says"
            yield _finding("gpu-slow", f"{line} {known.rate('bf16') / 1e12:.0f}", remedy)


def _peers(facts: dict[str, Any]) -> Iterator[Finding]:
    """Copies between GPUs that deliver something else, or nothing."""
    wrong = [way for way in facts["peers"] if way["wrong"]]
    if wrong:
        first = wrong[0]
        both = " both ways at once" if first["both"] else ""
        line = f"copies between GPUs arrive wrong, {len(wrong)} of {len(facts['peers'])} ways; GPU {first['from']} to"
        line += f" GPU {first['to']}{both}: {first['wrong'][0]}"
        if any(way.get("access") for way in wrong):
            line += "; the driver reports peer access all the same"
        remedy = "set NCCL_P2P_DISABLE=1 for every run (ranks then exchange through host memory)"
        yield _finding("peer-copies-wrong", line, remedy)
    for name, why in facts["failed"].items():
        if name.startswith(("copies from GPU", "copies between GPU")):
            remedy = "set NCCL_P2P_DISABLE=1; switch the IOMMU off in the BIOS where the machine is your own"
            yield _finding("peer-copies-hang", f"{name}: {why}", remedy)


def _links(facts: dict[str, Any]) -> Iterator[Finding]:
    """Collectives that hang, break or give wrong numbers."""
    links, second = facts["links"], facts["links_without_p2p"]
    if links is None:
        return
    remedy = _link_remedy(links, second)
    warned = f"; NCCL says: {links['said'][0]}" if links["said"] else ""
    if links["failed"]:
        # of ranks that ended because of another one, the cause is not theirs
        causes = [line for line in links["failed"] if not line.endswith("another rank had failed")]
        name = "collectives-hang" if links["hung"] else "collectives-fail"
        line = f"collectives among {links['ranks']} ranks ({links['backend']}): {(causes or links['failed'])[0]}"
        yield _finding(name, f"{line}{warned}", remedy)
    wrong = [row for row in links["points"] if row["wrong"]]
    if wrong:
        line = f"{wrong[0]['operation']} of {format_bytes(wrong[0]['bytes'])} among {links['ranks']} ranks gives"
        yield _finding("collectives-wrong", f"{line} {wrong[0]['wrong']} wrong numbers{warned}", remedy)


def _link_remedy(links: dict[str, Any], second: dict[str, Any] | None) -> str:
    """What to set, by what has been tried."""
    if second is not None:
        bad = second["failed"] or any(row["wrong"] for row in second["points"]) or not second["points"]
        if not bad:
            return "with NCCL_P2P_DISABLE=1 they are right: set it for every run"
        return "the same with NCCL_P2P_DISABLE=1: run with NCCL_DEBUG=INFO, and try NCCL_SHM_DISABLE=1, or fewer GPUs"
    if links["backend"] == "gloo":
        return "see that the machine's name leads to one of its addresses (/etc/hosts), or set GLOO_SOCKET_IFNAME=lo"
    return "run with NCCL_DEBUG=INFO to see what NCCL waits for"


def _host(facts: dict[str, Any]) -> Iterator[Finding]:
    """Host memory and the limits on it."""
    memory, shared, locked = (facts["machine"][name] for name in ("memory", "shared_memory", "locked_memory"))
    if memory["free"] is not None and memory["free"] < MEMORY:
        line = f"host memory: {format_bytes(memory['free'])} {memory['what']}, torch alone takes about as much a rank"
        yield _finding("host-memory", line, "end other programs, or raise the container's limit")
    many = len(_gpus_of(facts)) > 1
    if many and (shared is None or shared["free"] < SHARED_MEMORY):
        size = format_bytes(shared["free"]) if shared else "nothing"
        remedy = "start the container with --shm-size=8g or --ipc=host"
        yield _finding("shared-memory", f"/dev/shm: {size} is free, NCCL exchanges through it", remedy)
    if facts["machine"]["infiniband"] and locked is not None and locked < GIB:
        line = f"locked memory is limited to {format_bytes(locked)}, InfiniBand cards register buffers under that limit"
        yield _finding("locked-memory", line, "set `ulimit -l unlimited` (docker: --ulimit memlock=-1)")


def _folders(facts: dict[str, Any]) -> Iterator[Finding]:
    """Folders that cannot be written to, or are nearly full."""
    for folder in facts["machine"]["folders"]:
        place = f"{folder['use']} ({folder['path']})"
        remedy = _ELSEWHERE[folder["use"]]
        if folder["fault"]:
            yield _finding("folder-unwritable", f"{place}: {folder['fault']}", f"make it writable, or {remedy}")
        elif folder["free"] < DISK:
            line = f"{place}: {format_bytes(folder['free'])} are free; a saved 8B model takes {format_bytes(SAVED)}"
            yield _finding("disk-full", line, f"free some space, or {remedy}")


_ELSEWHERE = {
    "output_dir": "set output_dir to another folder",
    "models": "set HF_HUB_CACHE to another folder",
    "data.cache_dir": "set data.cache_dir to another folder",
}


def advice(facts: dict[str, Any]) -> list[Finding]:
    """What is as it should be and yet worth knowing; the same three words each."""
    return [*_unlike(facts), *_slow(facts), *_limited(facts)]


def _unlike(facts: dict[str, Any]) -> Iterator[Finding]:
    """Advice about versions and GPUs."""
    machine, gpus = facts["machine"], _gpus_of(facts)
    if gpus and facts["torchao_said"]:  # a CPU build of torch cannot load kernels for GPUs, nor need it
        line = f"torchao {machine['packages']['torchao']} does not fit torch {machine['packages']['torch']} wholly"
        remedy = "its Python parts work; install the torchao of this torch for its compiled kernels"
        yield _finding("torchao-pair", f"{line}: {show(facts['torchao_said'][0], 160)}", remedy)
    slower = "kernels are not fused, and QLoRA is much slower"
    if gpus and machine["packages"]["triton"] is None:
        yield _finding("not-fused", f"triton is not installed: {slower}", "pip install triton")
    elif gpus and machine["compiler"] is None:
        remedy = "install gcc or clang, or name one in CC"
        yield _finding("not-fused", f"Triton finds no C compiler: {slower}", remedy)
    if not gpus and facts["links"] is None:
        line = "there is no GPU, so nothing was exchanged"
        yield _finding("no-links", line, "--nproc_per_node 2 times collectives of gloo on the CPU")
    if len({gpu["name"] for gpu in gpus}) > 1:
        line = "the GPUs are not alike: ranks share evenly, so the slowest and the smallest decide"
        yield _finding("gpus-unlike", line, "choose with CUDA_VISIBLE_DEVICES which take part")
    for name in LOW_PRECISION:
        if f"{name} matmuls" in facts["failed"]:
            line = f"{name} matmuls do not run here: {facts['failed'][f'{name} matmuls']}"
            yield _finding("low-precision", line, f"leave matmul_dtype={name} out")


def _slow(facts: dict[str, Any]) -> Iterator[Finding]:
    """Advice about links and copies."""
    ways = [way for way in facts["peers"] if not way["both"]]
    if ways and not any(way["access"] for way in ways):
        line = "GPUs cannot read each other's memory, so exchange goes through the host"
        remedy = "`tune plan --search` tries parallel.pipeline, which sends the least"
        yield _finding("no-peer-access", line, remedy)
    elif ways and facts["machine"]["environment"].get("NCCL_P2P_DISABLE") == "1" and not any(w["wrong"] for w in ways):
        line = "NCCL_P2P_DISABLE=1 is set though copies between GPUs arrive whole"
        yield _finding("p2p-disabled", line, "unset it and look again: links may be faster")
    copies = [rate for name, rate in facts["steps"].items() if name.startswith("copies of GPU")]
    slowest = min((min(each.values()) for each in copies), default=SLOW_COPY)
    if slowest < SLOW_COPY:
        line = f"copies to or from the host at {slowest / 1e9:.1f} GB/s make offloading slow"
        remedy = "see that all lanes of its slot are in use (`nvidia-smi -q`), or leave memory.*_offload out"
        yield _finding("slow-copies", line, remedy)


def _limited(facts: dict[str, Any]) -> Iterator[Finding]:
    """Advice about memory and disks."""
    memory = facts["machine"]["memory"]
    if "group" in memory["what"]:
        line = f"of the machine's {format_bytes(memory['total'])} of memory {format_bytes(memory['free'])} are"
        remedy = "what takes more is killed: raise the limit, or keep to it with memory.host_memory_limit_gib"
        yield _finding("memory-limit", f"{line} {memory['what']}", remedy)
    for folder in facts["machine"]["folders"]:
        rate, rows = folder["write_rate"], folder["use"] == "data.cache_dir"
        if rate and rate < SLOW_DISK and not rows:
            line = f"{folder['use']} ({folder['path']}): the disk takes {rate / 1e6:.0f} MB/s, an 8B model in bf16"
            yield _finding("slow-disk", f"{line} {format_seconds(SAVED / rate)}", _ELSEWHERE[folder["use"]])
        if folder["shared"] and rows:
            line = f"data.cache_dir ({folder['path']}) is on a shared file system, {folder['file_system']}"
            yield _finding("shared-cache", line, "set data.cache_dir to a local disk, which is read faster")
