"""Requests for jobs, checked against SLURM before any is submitted: programs, partition, nodes, CPUs, the rest.

`sbatch --test-only` has the last word: on accounts, time limits, features and memory SLURM itself decides. Where it
says that resources are taken or down at the moment, a job waits for them, and that is no problem.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.launcher import GROUP, SETTINGS, LauncherChoice, Resources
from ..sizes import show_count

PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "sinfo")

FLAGS = {
    "partition": "partition", "qos": "qos", "account": "account", "constraint": "constraint", "exclude": "exclude",
    "gres": "gres", "timeout_min": "time", "mem_gb": "mem", "mem_per_cpu": "mem-per-cpu",
    "mem_per_gpu": "mem-per-gpu", "gpus_per_task": "gpus-per-task", "cpus_per_gpu": "cpus-per-gpu",
}  # fmt: skip
"""Setting of the plugin -> flag of sbatch."""

PASSING = ("busy", "not available now", "down, drained or reserved")
"""Words of a refusal that is one of the moment."""

ANSWER_S = 60.0


@dataclass
class Partition:
    """A partition as sinfo lists it. `cpus`: of its largest nodes."""

    nodes: int = 0
    cpus: int = 0
    is_default: bool = False


def problems_of(choice: LauncherChoice, wanted: Sequence[Resources]) -> list[str]:
    """Returns a sentence for each kind of job that SLURM would refuse."""
    for name in PROGRAMS:
        if shutil.which(name) is None:
            where = "start the sweep on a machine of the cluster from which jobs are submitted"
            return [f"{GROUP}={choice.name}: {name} is not on this machine; {where}"]
    try:
        partitions = ask_partitions()
        return _problems(choice, sorted(set(wanted), key=str), partitions)
    except subprocess.CalledProcessError as error:
        return [f"{GROUP}={choice.name}: SLURM does not answer: {_words(error.stderr)}"]
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{GROUP}={choice.name}: SLURM does not answer: {error}"]


def _problems(choice: LauncherChoice, wanted: Sequence[Resources], partitions: Mapping[str, Partition]) -> list[str]:
    names = str(choice.settings.get("partition") or "").split(",")
    if names == [""]:
        names = [name for name, one in partitions.items() if one.is_default]
    if absent := [name for name in names if name not in partitions]:
        known = ", ".join(partitions) or "none"
        return [f"{SETTINGS}.partition={absent[0]}: SLURM has no such partition; it has {known}"]
    problems = [_too_large(one, names, partitions) or refusal(choice, one) for one in wanted]
    return [problem for problem in dict.fromkeys(problems) if problem]


def ask_partitions() -> dict[str, Partition]:
    """Returns SLURM's partitions by name. Raises OSError or subprocess.SubprocessError."""
    found: dict[str, Partition] = {}
    for line in _run("sinfo", "--noheader", "--format=%P|%D|%c").splitlines():
        name, nodes, cpus = line.split("|")
        one = found.setdefault(name.rstrip("*"), Partition())
        one.nodes += int(nodes)
        one.cpus = max(one.cpus, int(cpus.rstrip("+")))
        one.is_default |= name.endswith("*")
    return found


def _too_large(wanted: Resources, names: Sequence[str], partitions: Mapping[str, Partition]) -> str:
    """Returns a sentence on a job for which no partition of `names` has enough nodes, or CPUs in one."""
    where = f"partition {' or '.join(names)}"
    nodes = max((partitions[name].nodes for name in names), default=wanted.nodes)
    if wanted.nodes > nodes:
        return f"{SETTINGS}.nodes: a job needs {show_count(wanted.nodes, 'node')}, and {where} has {nodes}"
    cpus = wanted.tasks_per_node * wanted.cpus_per_task
    most = max((partitions[name].cpus for name in names), default=cpus)
    if cpus > most:
        needs = f"{show_count(wanted.tasks_per_node, 'task')} of {show_count(wanted.cpus_per_task, 'CPU')} on a node"
        return f"{SETTINGS}.cpus_per_task: a job needs {needs}, and a node of {where} has {show_count(most, 'CPU')}"
    return ""


def refusal(choice: LauncherChoice, wanted: Resources) -> str:
    """Returns the sentence of a request that sbatch refuses, in its own words; "" where it takes it."""
    try:
        _run("sbatch", "--test-only", *flags(choice.settings, wanted), "--wrap=true")
    except subprocess.CalledProcessError as error:
        words = _words(error.stderr)
        if any(passing in words for passing in PASSING):
            return ""
        nodes, tasks = show_count(wanted.nodes, "node"), show_count(wanted.tasks_per_node, "task")
        return f"{GROUP}={choice.name}: sbatch refuses a job of {nodes} with {tasks} each: {words}"
    return ""


def flags(settings: Mapping[str, Any], wanted: Resources) -> list[str]:
    """Returns the flags of sbatch for a request, as submitit writes them."""
    given = {flag: settings[key] for key, flag in FLAGS.items() if settings.get(key) is not None}
    if "mem" in given:
        given["mem"] = f"{float(given['mem']) * 1024:.0f}M"
    given |= {"nodes": wanted.nodes, "ntasks-per-node": wanted.tasks_per_node, "cpus-per-task": wanted.cpus_per_task}
    if wanted.gpus_per_node is not None:
        given["gpus-per-node"] = wanted.gpus_per_node
    given |= {key.replace("_", "-"): value for key, value in (settings.get("additional_parameters") or {}).items()}
    return [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in given.items()]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout


def _words(said: str) -> str:
    """Returns SLURM's last line without its prefixes."""
    last = (said.strip().splitlines() or ["no message"])[-1]
    for prefix in ("sbatch: ", "error: ", "allocation failure: ", "Batch job submission failed: "):
        last = last.removeprefix(prefix)
    return last
