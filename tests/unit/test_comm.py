"""Parts of collectives: block quantization with its bound; checksums by which ranks that are out of step are told."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerobench.probes import allocator
from zerobench.zero.comm.base import Comm
from zerobench.zero.comm.gloo import tag_of
from zerobench.zero.comm.out_of_step import ComparedLaunches
from zerobench.zero.comm.quantize import CHUNKS, LEVELS, Codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def round_trip(codec: Codec, slices: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    payloads = torch.full((len(slices), codec.payload_bytes(slices.shape[1])), 0xAA, dtype=torch.uint8)
    codec.encode(slices, payloads)
    decoded = torch.empty(slices.shape, dtype=dtype)
    codec.decode(payloads, decoded)
    return decoded


def bounds(codec: Codec, slices: torch.Tensor) -> torch.Tensor:
    """Half a step of each element's block, as the docstring has it."""
    found = torch.empty_like(slices)
    for row in range(len(slices)):
        for start in range(0, slices.shape[1], codec.block):
            block = slices[row, start : start + codec.block]
            found[row, start : start + codec.block] = block.abs().max() / (2 * LEVELS[codec.bits]) * (1 + 2**-14)
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_element_is_off_by_more_than_half_a_step(bits: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bits)
    for numel in (1, 7, 8, 33, 256, 257, 1000, 4099):
        for block in (8, 17, 256, 2048):
            codec = Codec(bits, block)
            magnitudes = 10.0 ** torch.randint(-6, 4, (3, numel), generator=generator)
            slices = (torch.randn(3, numel, generator=generator) * magnitudes).to(dtype)
            exact = slices.float()
            off = (round_trip(codec, slices) - exact).abs()
            assert (off <= bounds(codec, exact)).all(), (numel, block)
            assert torch.equal(round_trip(codec, slices, dtype), round_trip(codec, slices).to(dtype))
            rows = torch.cat([round_trip(codec, slices[row : row + 1]) for row in range(3)])
            assert torch.equal(rows, round_trip(codec, slices))  # rows know nothing of one another


def test_whole_multiples_of_the_scale_come_back_to_the_bit() -> None:
    for bits, most in LEVELS.items():
        values = torch.arange(-most, most + 1).float()[None] * 0.5
        assert torch.equal(round_trip(Codec(bits, values.numel()), values), values)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_or_next_to_nothing(bits: int) -> None:
    slices = torch.ones(1, 64)
    slices[0, 3], slices[0, 20] = torch.nan, -torch.inf
    slices[0, 32:48], slices[0, 48:] = 0.0, 1e-37
    decoded = round_trip(Codec(bits, 16), slices)[0]
    assert decoded[:32].isnan().all()  # a block each
    assert torch.equal(decoded[32:], torch.zeros(32))
    assert torch.equal(round_trip(Codec(bits, 16), torch.full((1, 16), 3e38)), torch.full((1, 16), 3e38))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coding_takes_no_memory_for_the_whole(dtype: torch.dtype) -> None:
    """By the allocator's word: multiplying integers by fp32 makes copies of both inside of the operator."""
    hook = allocator.install_hook()
    if hook is None:
        pytest.skip("no C++ compiler here")
    codec, numel = Codec(8, 256), 4 * 2**20
    slices = torch.randn(1, numel).to(dtype)
    payloads = torch.empty(1, codec.payload_bytes(numel), dtype=torch.uint8)
    codec.encode(slices, payloads)
    expected = slices.clone()
    codec.decode(payloads, expected)
    before = hook.live_bytes()
    hook.take_peak()
    codec.decode(payloads, slices)
    assert hook.take_peak() - before <= 4 * CHUNKS["cpu"] + 64
    codec.encode(slices, payloads)
    assert hook.take_peak() - before <= numel + 5 * 4 * CHUNKS["cpu"]  # the integers, and temporaries of a chunk
    assert torch.equal(slices, expected)


FLAGS = [1, 0, 0, 1, 0]
GATHERS = ("gather", "bucket 0"), ("gather", "bucket 1")


class Together(Comm):
    """Takes the maximum with all flags that were sent before."""

    def __init__(self, sent: list[torch.Tensor]) -> None:
        self.sent = sent

    def maximum(self, flags: torch.Tensor) -> None:
        self.sent.append(flags.clone())
        flags.copy_(torch.stack(self.sent).amax(0))


def launches_of(launched: tuple[tuple[str, str], ...], watch: Any, by_unit: bool) -> ComparedLaunches:
    launches = ComparedLaunches(watch, by_unit)
    for kind, unit in launched:
        launches.add(kind, unit)
    return launches


def agree(
    ranks: list[tuple[tuple[str, str], ...]], asks: tuple[str, str] = ("step", "step"), by_unit: bool = True
) -> list[list[int]]:
    """Each rank's reading of the maximum of all flags, after the collectives that it has launched."""
    sent: list[torch.Tensor] = []
    watch: Any = SimpleNamespace(launched={}, differ=lambda what, asked: RuntimeError(f"the ranks: {what}, {asked}"))

    def agreed() -> list[list[int]]:
        return [
            launches_of(launched, watch, by_unit).agree(
                Together(sent), torch.tensor(FLAGS, dtype=torch.int32), torch.zeros(len(FLAGS), dtype=torch.int32), what
            )
            for launched, what in zip(ranks, asks, strict=True)
        ]

    with suppress(RuntimeError):  # the flags of both ranks are sent before they are compared
        agreed()
    return agreed()


def test_ranks_that_launched_the_same_agree_and_the_order_counts_where_collectives_pair_by_it() -> None:
    for by_unit in (True, False):
        assert agree([GATHERS, GATHERS], by_unit=by_unit) == [FLAGS, FLAGS]
    assert agree([GATHERS, GATHERS[::-1]], by_unit=True) == [FLAGS, FLAGS]
    with pytest.raises(RuntimeError, match="the ranks"):
        agree([GATHERS, GATHERS[::-1]], by_unit=False)


@pytest.mark.parametrize(
    "other",
    [(GATHERS[0],), (GATHERS[0], GATHERS[0]), (GATHERS[0], ("reduction", "bucket 1")), (*GATHERS, GATHERS[1])],
    ids=["fewer", "another unit", "another kind", "more"],
)
def test_ranks_that_did_not_are_told(other: tuple[tuple[str, str], ...]) -> None:
    for ranks in ([GATHERS, other], [other, GATHERS]):
        for by_unit in (True, False):
            with pytest.raises(RuntimeError, match="the ranks"):
                agree(ranks, by_unit=by_unit)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    with pytest.raises(RuntimeError, match="the ranks"):
        agree([GATHERS, GATHERS], ("step", "clip_grad_norm_"))


def test_transfers_of_different_collectives_have_different_tags() -> None:
    """Where their sizes are equal, too: they must not be paired with one another."""
    kinds, units, sizes = ("gather", "reduction"), ("bucket 0", "bucket 1"), (64, 128)
    tags = [tag_of(kind, unit, size) for kind in kinds for unit in units for size in sizes]
    assert len(set(tags)) == len(tags)
    assert tags == [tag_of(kind, unit, size) for kind in kinds for unit in units for size in sizes]
