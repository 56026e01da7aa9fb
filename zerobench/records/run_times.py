"""Columns of a run on time, arithmetic and the state of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .run_traffic import RunTraffic


@dataclass
class RunTimes(RunTraffic):
    """Medians over the measured steps of the timed pass, the slowest rank of each step."""

    step_s: float | None = None
    """Median step of the timed pass, the slowest rank of each step; without the drawing of batches, and without
    garbage collection, which comes between steps."""
    step_s_low: float | None = None
    """Lower end of the 95 % confidence interval of step_s."""
    step_s_high: float | None = None
    """Upper end of the 95 % confidence interval of step_s."""
    forward_s: float | None = None
    """Median time of a step's forwards."""
    backward_s: float | None = None
    """Median time of a step's backwards."""
    update_s: float | None = None
    """Median time of a step's update, with what it waits for."""
    wall_s: float | None = None
    """From the begin of the first measured step to the end of the last, with what comes between; the slowest rank's."""
    tokens_per_s: float | None = None
    """Tokens of all measured steps over wall_s; samples where the data have no sequence."""
    others_cores: float | None = None
    """CPU cores that other processes of the machine kept busy during the timed pass, on average; None in a joined job,
    and of older runs."""
    sm_clock_mhz: int | None = None
    """CUDA: the lowest SM clock of two readings, right before and right after the measured steps, over all ranks."""
    sm_clock_max_mhz: int | None = None
    """CUDA: the highest SM clock that the GPU has; of several GPUs the lowest."""
    gpu_temperature_c: int | None = None
    """CUDA: the higher of both readings; of several GPUs the highest."""
    gpu_power_w: float | None = None
    """CUDA: the higher of both readings; of several GPUs the highest."""
    throttle: str | None = None
    """CUDA: reasons that held clocks down, of both readings and all ranks; empty for none, None where unknown."""
    traced_step_s: float | None = None
    """Traced pass, which the profiler slows down: median step of the rank where it is longest; communication_s and
    exposed_s are medians over the steps of that rank."""
    communication_s: float | None = None
    """Traced pass: time of a step in which a collective is in flight or running."""
    exposed_s: float | None = None
    """Traced pass: the part of communication_s in which nothing is computed."""
    overlap: float | None = None
    """1 - exposed_s / communication_s: the fraction of communication behind which something is computed."""
    model_flops: int | None = None
    """Floating-point operations of one rank's matrix products in a step, none counted twice."""
    hardware_flops: int | None = None
    """model_flops with what is recomputed."""
    mfu: float | None = None
    """model_flops over what the device could do in a step's time; None where its peak is not known, and on a CPU."""
    hfu: float | None = None
    """hardware_flops over what the device could do in a step's time."""
