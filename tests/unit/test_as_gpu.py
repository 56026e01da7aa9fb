"""Fake tensors that act as a GPU's: collectives, kernels and memory that a GPU would have; peaks beside FSDP2's."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cells import cell
from zerobench import zero
from zerobench.commands import estimate as command
from zerobench.config import schema_memory, schema_training
from zerobench.fake import world_of_tensors
from zerobench.fake.as_gpu import BLAS_WORKSPACE, Allocations, as_gpu
from zerobench.fake.as_gpu.kernels import KernelRefusalError, attend
from zerobench.fake.observers import Growth, IntervalMark
from zerobench.predict.estimate import estimate
from zerobench.simulation.execute import CPU, CUDA, Execution, Target, execute


def executed(target: Target, strategy: str, world_size: int = 4, **more: Any) -> Execution:
    """One cell, executed; it must go well."""
    found = execute(cell(strategy, world_size, target=target.kind, **more).config, target=target)
    assert not found.problem
    return found


def most(found: Execution, category: str) -> int:
    """The most bytes of a category on the device in a step."""
    rows = [row for row in found.record.memory if (row.phase, row.tier, row.category) == ("step", "device", category)]
    return rows[0].max_bytes


@pytest.mark.parametrize(
    "given", [{"kind": "tpu"}, {"kind": "cuda", "attention": "fast"}, {"attention": "flash"}, {"architecture": "z"}]
)
def test_an_unknown_target_is_named_in_a_sentence(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="use"):
        Target(**given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_reduction_on_a_gpu_copies_no_input() -> None:
    """gloo's reduce-scatter sums in a copy; the largest is of the root's gradients."""
    on_cpu, on_gpu = executed(CPU, "fsdp2", model="wide"), executed(CUDA, "fsdp2", model="wide")
    root = 4 * (256 * 320 + 321 * 256)
    assert most(on_gpu, "temporary") < root < most(on_cpu, "temporary")


STATES: list[tuple[str, int, dict[str, Any]]] = [
    ("zero1", 4, {}),
    ("zero2", 2, {"offload": schema_memory.CpuOffload(), "precision": schema_training.Bf16()}),
    ("zero2", 2, {"arena": True}),
    ("zero3", 8, {"node_size": 4, "zeropp": schema_memory.AllOfZeropp()}),
    ("zero2", 8, {"shard_group": 4}),
    ("zero1", 4, {"optimizer": schema_training.Muon()}),
    ("zero3", 4, {"offload": schema_memory.CpuOffload(fraction=0.5), "accumulation": 2}),
    ("zero2", 4, {"offload": schema_memory.CpuOffload(), "arena": True}),
    ("zero2", 4, {"offload": schema_memory.CpuOffload(), "optimizer": schema_training.Muon()}),
    ("zero1", 2, {"offload": schema_memory.NvmeOffloadConfig(path="/tmp"), "precision": schema_training.Bf16()}),
]


@pytest.mark.slow
@pytest.mark.shown(2)
@pytest.mark.parametrize(("strategy", "ranks", "more"), STATES)
def test_states_on_a_gpu_are_those_that_theory_predicts_for_one(
    strategy: str, ranks: int, more: dict[str, Any]
) -> None:
    """To the byte: no receive slots, and gradients that stay until their copy to host memory has read them."""
    config = cell(strategy, ranks, target="cuda", **more).config
    found = execute(config, target=CUDA)
    assert not found.problem
    assert found.states_bytes == estimate(replace(config, device="cuda")).states_bytes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_whole_gradients_that_fsdp2_accumulates_in_fp32_are_gradients(ranks: int) -> None:
    """4ψ at any N, and in bf16 the gradients of one block and those of the root, which come before the blocks'."""
    more = {"precision": schema_training.Bf16(wire_dtype="fp32"), "strategy": {"accumulate": "last"}}
    found = execute(cell("fsdp2", ranks, "untied", target="cuda", accumulation=3, **more).config, target=CUDA)
    psi, block, head_and_norm = 111_024, 28_272, 12_384
    assert most(found, "gradients") == 4 * psi + 2 * (block + head_and_norm)


@pytest.mark.slow
def test_memory_under_the_allocator_is_the_ledgers_in_blocks_of_512_bytes() -> None:
    for strategy in ("ddp", "zero3", "fsdp2"):
        found = executed(CUDA, strategy)
        of_storages = found.allocated_bytes - 2 * BLAS_WORKSPACE["hopper"]
        low, high = found.reserved_bytes
        living = sum(row.storages for row in found.record.lines if row.at == "peak")  # type: ignore[union-attr]
        assert found.allocated_bytes % 512 == 0
        assert found.peak_bytes <= of_storages <= found.peak_bytes + 512 * (living + 64)
        assert found.allocated_bytes <= low <= high < 2 * found.allocated_bytes
        causes = found.reserved.causes  # type: ignore[union-attr]
        assert sum(causes.values()) == found.reserved.reserved_by_default  # type: ignore[union-attr]
        assert low - found.allocated_bytes <= sum(causes.values()) - causes["requested"] - causes["rounding"]
    assert executed(CPU, "ddp").allocated_bytes is None


@pytest.mark.thorough
def test_workspaces_are_the_architectures_and_one_per_thread() -> None:
    sizes = {one: executed(Target("cuda", architecture=one), "ddp").allocated_bytes for one in BLAS_WORKSPACE}
    assert sizes["hopper"] - sizes["ampere"] == 2 * (BLAS_WORKSPACE["hopper"] - BLAS_WORKSPACE["ampere"])  # type: ignore[operator]


# -- what backward keeps -------------------------------------------------------------------------------

S, B, H, A = 64, 2, 96, 4
"""Sequence, batch, hidden, heads of a layer: the letters of arXiv 2205.05198, section 4.1."""


class Layer(nn.Module):
    """The transformer layer that arXiv 2205.05198 counts: two norms, three dropouts, GELU. `attention`: (q, k, v)."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.LayerNorm(H), nn.LayerNorm(H)])
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.drops = nn.ModuleList([nn.Dropout(0.1), nn.Dropout(0.1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(B, S, 3, A, H // A).permute(2, 0, 3, 1, 4)
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(B, S, H)
        x = x + self.drops[0](self.out(mixed))
        return x + self.drops[1](self.down(F.gelu(self.up(self.norms[1](x)))))  # type: ignore[no-any-return]


def spelled_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention as that paper counts it: in the model's own dtype."""
    return F.dropout(((q @ k.transpose(-2, -1)) * 0.2).softmax(-1), 0.1) @ v


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by whichever kernel is chosen."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def kept_bytes(attention: Callable[..., torch.Tensor], kernel: str | None, dtype: torch.dtype) -> int:
    """Bytes that the layer's forward on a GPU keeps for its backward, which must run, without the parameters."""
    with world_of_tensors(fake=True), as_gpu(kernel, 0):
        layer = Layer(attention).to(dtype)
        own = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(torch.empty(B, S, H, dtype=dtype, requires_grad=True))
        out.backward(torch.empty_like(out))
        assert all(parameter.grad is not None for parameter in layer.parameters())
        return sum(storage.nbytes() for number, storage in saved.items() if number not in own)


STATISTICS = 2 * 2 * 4 * S * B
"""Bytes of the two norms' means and deviations, which the paper leaves out."""

RANDOM_STATE = 2 * 8 + 8
"""Bytes of flash attention's generator state."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_keeps_what_the_published_formula_says(dtype: torch.dtype) -> None:
    """s b h (34 + 5 a s / h), arXiv 2205.05198, equation 1, for plain operators in half precision."""
    assert kept_bytes(spelled_out, None, dtype) == S * B * H * 34 + 5 * A * S * S * B + STATISTICS


def test_kernels_of_attention_keep_what_their_descriptions_say() -> None:
    """Flash: 34 s b h, and 4 a s b of logarithms; torch's math kernel works in fp32: 6 s b h more, and 9 bytes a score;
    memory-efficient attention in fp32: 34 s b h twice, less what is no float: two masks.
    """
    half, full = torch.bfloat16, torch.float32
    flash = S * B * H * 34 + 4 * A * S * B + STATISTICS + RANDOM_STATE
    assert kept_bytes(by_torch, "flash", half) == kept_bytes(by_torch, None, half) == flash
    assert kept_bytes(by_torch, "efficient", half) == flash - 8
    assert kept_bytes(by_torch, "math", half) == S * B * H * 40 + 9 * A * S * S * B + STATISTICS
    efficient = S * B * H * (2 * 34 - 2) + 4 * A * S * B + STATISTICS + 16
    assert kept_bytes(by_torch, "efficient", full) == kept_bytes(by_torch, None, full) == efficient


def test_the_math_kernels_operators_compute_what_torchs_do() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for more in ({"is_causal": True}, {"attn_mask": torch.rand(16, 16) > 0.4}, {"scale": 0.3}):
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **more)  # type: ignore[arg-type]
        assert torch.equal(attend("math", q, k, v, enable_gqa=True, **more), expected), more  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "more", "words"),
    [
        ("flash", (1, 2, 8, 16), torch.float32, {}, "takes fp16 and bf16, .*float32; use attention=efficient or math"),
        ("flash", (1, 2, 8, 264), torch.float16, {}, "up to 256, and they have 264"),
        ("flash", (1, 2, 8, 16), torch.float16, {"attn_mask": torch.ones(8, 8)}, "takes no mask"),
        ("efficient", (1, 2, 8, 12), torch.float16, {}, "a multiple of 8, .* 12 here; use attention=flash or math"),
        ("efficient", (8, 16), torch.float16, {}, "here have 2 dimensions"),
    ],
)
def test_a_kernel_refuses_what_cuda_refuses(
    kernel: str, shape: tuple[int, ...], dtype: torch.dtype, more: dict[str, Any], words: str
) -> None:
    query = torch.empty(shape, dtype=dtype)
    with pytest.raises(KernelRefusalError, match=words):
        attend(kernel, query, query, query, **more)


def test_a_refusal_is_the_sentence_of_an_execution() -> None:
    config = cell("zero3", 4, target="cuda").config
    assert execute(config, target=Target("cuda", "flash")).problem.startswith("attention=flash: this kernel takes fp16")


@pytest.mark.slow
def test_of_building_a_peer_nothing_stays_but_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied when all is built: what lives then, the whole model say, would keep its memory reserved."""
    logs: list[Allocations] = []
    summed = Allocations.memory
    monkeypatch.setattr(Allocations, "memory", lambda self, settings: (logs.append(self), summed(self, settings))[1])
    found = executed(CUDA, "fsdp2", model="untied")
    heard = [one for one, _ in logs[0].log]
    built = heard.index(IntervalMark("end", "init"))
    living = sum(one.grown for one in heard[:built] if isinstance(one, Growth))
    whole = sum(shape.numel for shape in found.record.schedule.shapes) * 4
    assert whole / 4 <= living < 1.1 * whole / 4


@pytest.mark.slow
def test_a_peer_in_bf16_attends_by_flash_though_its_module_is_in_fp32() -> None:
    """Nothing beside the rank's own steps is run: the model alone, whose queries are fp32, would be refused."""
    found = executed(Target("cuda", "flash"), "fsdp2", precision=schema_training.Bf16())
    assert found.record.own_activation_bytes is None


def test_every_table_of_the_engine_by_device_has_a_gpu_s_entry() -> None:
    """A table that is left out makes the GPU work in a CPU's pieces: thousands of small kernels where it has few."""
    names = [module.name for module in walk_packages(zero.__path__, "zerobench.zero.")]
    names.remove("zerobench.zero.optim.adam_kernel")  # imports Triton, and runs on a GPU alone
    tables = [
        (module.__name__, name, table)
        for module in map(import_module, names)
        for name, table in vars(module).items()
        if isinstance(table, dict) and isinstance(table.get("cpu"), int)
    ]
    assert len(tables) >= 4
    before = [table["cpu"] for *_, table in tables]
    with as_gpu(None, 0):
        alike = [one[:2] for one, size in zip(tables, before, strict=True) if one[2]["cpu"] == size]
    assert alike == []


KEYS = ("precision=bf16", "sequence=1024", "micro_batch=8", "strategy=zero3,fsdp2")
PEAKS = [("gpt2_124m", "8"), ("gpt2_124m", "1,64"), ("gpt2_1_5b", "1,8,64"), ("gpt_7b", "1,8,64")]


def estimated(folder: Path, *keys: str) -> list[dict[str, Any]]:
    """The estimates of a command, in the order of its cells."""
    out = folder / "estimates.json"
    assert command.estimate([*KEYS, *keys, "--format", "json", "--out", str(out), "--jobs", "1"]) == 0
    return json.loads(out.read_text())["estimates"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.shown(1)
@pytest.mark.parametrize(("model", "ranks"), PEAKS)
def test_the_peak_is_at_most_that_of_fsdp2(tmp_path: Path, model: str, ranks: str, thorough: bool) -> None:
    """On 1, 8 and 64 ranks, with and without recomputation, under the ledger and under the allocator."""
    policies = ("none", "checkpoint") if thorough else ("checkpoint",)
    found = estimated(tmp_path, f"model={model}", f"world_size={ranks}", f"activation={','.join(policies)}")
    half = len(found) // 2
    pairs = zip(found[:half], found[half:], strict=True)  # one strategy's cells after the other's
    assert half == len(policies) * len(ranks.split(","))
    for ours, theirs in pairs:
        assert (ours["strategy"], theirs["strategy"]) == ("zero3", "fsdp2")
        for figure in ("peak_bytes", "allocated_bytes", "reserved_low_bytes"):
            assert ours[figure] <= theirs[figure], (ours["name"], figure)
