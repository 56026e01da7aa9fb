"""The hardware of a published run, and how its engine differs from the one that is simulated in its place.

given      device, network and precision from the row's columns
assumed    facts that no column gives; a short description of each, which the predictions carry
refused    a device or a system that is not described (NotGivenError)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from zerobench.simulation import hardware
from zerobench.simulation.costs import GpuCosts
from zerobench.simulation.timeline import PLAIN, Declared

from .rows import NotGivenError, PublishedRun

CLUSTERS = (
    ("V100", 0, "jean-zay-v100"), ("A100-PCIe", 0, "a100-pcie-100"), ("A100", 40, "a100-40gb-1600"),
    ("A100", 0, "a100-80gb-1600"), ("H100", 0, "h100-3200"), ("H200", 0, "h200-3200"), ("B200", 0, "b200-3200"),
    ("L40S", 0, "l40s-400"),
)  # fmt: skip
"""(beginning of a published GPU name, GiB or 0 for any) -> its cluster, in the order in which they are tried."""

SPECIAL = re.compile(r"500W|power-limited|MIG|H100-(?:PCIe|NVL)")
"""Parts whose rates differ from their type's."""

DECLARED: dict[tuple[str, str], Declared] = {
    ("nanotron", "ddp"): Declared(gradient_factor=2.0),
    ("nanotron", "zero1"): Declared(reduces_after_backward=True),
}
"""(system, strategy) -> its schedule, if it differs from the simulated one. nanotron: gradients in fp32, which DDP here
does not have; ZeRO-1 reduces after the backward (nanotron issue 261)."""

BUS = {"AR": "all_reduce", "AG": "all_gather", "RS": "reduce_scatter"}


@dataclass(frozen=True)
class RunHardware:
    """Costs and declared schedule of a run. `spans_nodes`: its ranks are on several nodes; `assumed`: in words."""

    costs: GpuCosts
    declared: Declared
    spans_nodes: bool
    assumed: tuple[str, ...]


def hardware_of(run: PublishedRun) -> RunHardware:
    """Returns the hardware of a run. Raises NotGivenError, with the reason, if it is not described."""
    sized = (name for begin, size, name in CLUSTERS if run.gpu.startswith(begin) and size in (0, run.gpu_mem_gib))
    if (name := next(sized, None)) is None:
        raise NotGivenError(f"gpu={run.gpu or 'not given'}: no device of that name is described")
    cluster, assumed = hardware.cluster(name), list[str]()
    device = hardware.device(cluster.device)
    if special := SPECIAL.search(run.gpu):
        raise NotGivenError(f"gpu={run.gpu}: the rates of this part ({special[0]}) are not published")
    per_node = run.gpus_per_node or min(run.gpus or 1, cluster.devices_per_node)
    if run.gpus_per_node is None:
        assumed.append(f"{per_node} GPUs per node")
    cluster = replace(cluster, devices_per_node=per_node)
    spans = (run.gpus or 1) > per_node
    # bandwidths that a job measured over all its ranks
    probed = re.search(r"probe: ((?:[A-Z]{2} [\d.]+ ?)+)GB/s over all ranks", run.notes)
    pairs = re.findall(r"([A-Z]{2}) ([\d.]+)", probed[1]) if probed else []
    bus = {BUS[kind]: float(rate) for kind, rate in pairs if kind in BUS}
    if spans and not bus:
        if found := re.search(r"([\d.]+) (?:Gb/s|Gbit/s|Gbps) per (node|GPU)", run.interconnect):
            cluster = replace(cluster, node_gbit_s=float(found[1]) * (per_node if found[2] == "GPU" else 1))
        else:
            assumed.append(f"{cluster.node_gbit_s:g} Gbit/s per node")
    declared = DECLARED.get((run.system, run.strategy), PLAIN)
    return RunHardware(GpuCosts(device, cluster, bus), declared, spans, tuple(assumed))
