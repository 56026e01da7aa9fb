"""Columns of a run on memory by category and tier, as the ledger of the accounted pass has it."""

from __future__ import annotations

from dataclasses import dataclass

from .run_setting import RunSetting


@dataclass
class RunMemory(RunSetting):
    """Bytes on the rank where they are largest, in the measured steps; what could not be measured is None."""

    peak_bytes: int | None = None
    """Largest sum of live bytes at any instant of the measured steps, on the rank where it is largest."""
    peak_parameters_bytes: int | None = None
    """Parameters at the instant of peak_bytes; the eight parts add up to it."""
    peak_gradients_bytes: int | None = None
    """Gradients at the instant of peak_bytes."""
    peak_master_bytes: int | None = None
    """fp32 master weights at the instant of peak_bytes."""
    peak_optimizer_bytes: int | None = None
    """Optimizer states at the instant of peak_bytes."""
    peak_communication_bytes: int | None = None
    """Communication buffers at the instant of peak_bytes."""
    peak_activations_bytes: int | None = None
    """Activations at the instant of peak_bytes."""
    peak_inputs_bytes: int | None = None
    """Batches and the model's buffers at the instant of peak_bytes."""
    peak_temporary_bytes: int | None = None
    """All else at the instant of peak_bytes: results that nothing keeps, scratch."""
    max_parameters_bytes: int | None = None
    """Parameters at their own maximum over the measured steps and the ranks."""
    max_gradients_bytes: int | None = None
    """Gradients at their own maximum."""
    max_master_bytes: int | None = None
    """fp32 master weights at their own maximum."""
    max_optimizer_bytes: int | None = None
    """Optimizer states at their own maximum."""
    max_communication_bytes: int | None = None
    """Communication buffers at their own maximum."""
    max_activations_bytes: int | None = None
    """Activations at their own maximum."""
    max_inputs_bytes: int | None = None
    """Batches and the model's buffers at their own maximum."""
    max_temporary_bytes: int | None = None
    """All else at its own maximum."""
    between_steps_parameters_bytes: int | None = None
    """Parameters that live when a measured step ends, at most over the steps and the ranks."""
    between_steps_gradients_bytes: int | None = None
    """Gradients that live when a measured step ends."""
    between_steps_master_bytes: int | None = None
    """fp32 master weights that live when a measured step ends."""
    between_steps_optimizer_bytes: int | None = None
    """Optimizer states that live when a measured step ends."""
    between_steps_communication_bytes: int | None = None
    """Communication buffers that live when a measured step ends."""
    between_steps_activations_bytes: int | None = None
    """Activations that live when a measured step ends: the loss, and outputs that a module keeps."""
    between_steps_inputs_bytes: int | None = None
    """Batches and the model's buffers that live when a measured step ends."""
    between_steps_temporary_bytes: int | None = None
    """All else that lives when a measured step ends."""
    forward_peak_bytes: int | None = None
    """Largest sum of live bytes at any instant of the measured steps' forwards, on the rank where it is largest."""
    backward_peak_bytes: int | None = None
    """Largest sum of live bytes in their backwards."""
    update_peak_bytes: int | None = None
    """Largest sum of live bytes in their updates."""
    predicted_activations_bytes: int | None = None
    """Of max_activations_bytes: the part that the model needs without an engine; None where it cannot be predicted."""
    growth_bytes: int | None = None
    """Live bytes on the device after the measured steps less those before them, on the rank where it is largest; the
    table of lines says what has grown. In a loop that leaks nothing it is 0."""
    states_bytes: int | None = None
    """Maximum over time of the sum of parameters, gradients, masters, optimizer states and communication, on the rank
    where it is largest."""
    predicted_states_bytes: int | None = None
    """states_bytes as the theory has it, with what is in flight."""
    floor_states_bytes: int | None = None
    """The paper's formula alone, without what is in flight."""
    formulas: str | None = None
    """The formulas of the states' categories, of their sum and of the volume, JSON: to each its equation, its value in
    bytes or elements, the numbers in it, and the terms that may be in flight beside it."""
    host_peak_bytes: int | None = None
    """Largest sum of live bytes in host memory at any instant of the measured steps, on the rank where it is largest;
    the columns before are the device's. On a machine without a GPU both are one memory, told apart by the engine's
    labels."""
    host_peak_all_bytes: int | None = None
    """The sum of such peaks over the ranks of a node, of the fullest node: what a host needs at most, for its ranks'
    peaks need not be at one instant. A node is `node_size` ranks, without that key all ranks of a machine."""
    host_states_bytes: int | None = None
    """states_bytes in host memory."""
    predicted_host_states_bytes: int | None = None
    """host_states_bytes as the theory has it."""
    nvme_bytes: int | None = None
    """Bytes in files at their peak, on the rank where it is largest."""
    predicted_nvme_bytes: int | None = None
    """nvme_bytes as the theory has it."""
    down_bytes: int | None = None
    """Bytes of one step from devices to host memory, over all ranks."""
    up_bytes: int | None = None
    """Bytes of one step from host memory to devices, over all ranks."""
    read_bytes: int | None = None
    """Bytes of one step from files to host memory, over all ranks."""
    write_bytes: int | None = None
    """Bytes of one step from host memory to files, over all ranks."""
    predicted_down_bytes: int | None = None
    """down_bytes as the theory has it; None where it says nothing."""
    predicted_up_bytes: int | None = None
    """up_bytes as the theory has it."""
    predicted_read_bytes: int | None = None
    """read_bytes as the theory has it."""
    predicted_write_bytes: int | None = None
    """write_bytes as the theory has it."""
