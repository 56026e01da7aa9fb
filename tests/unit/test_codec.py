"""Block quantization: the bound, element by element, for every dtype, block and odd size."""

import pytest
import torch

from zerobench.probes import allocator
from zerobench.zero.comm.quantize import CHUNKS, LEVELS, RESERVED_BYTES, Codec

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


def test_payloads_have_room_for_the_bytes_that_are_said() -> None:
    assert Codec(8, 256).payload_bytes(1024) == 1024 + 4 * 4 + 48  # 8 of them reserved
    assert Codec(4, 256).payload_bytes(1024) == 512 + 4 * 4 + 48
    for bits in LEVELS:
        codec, slices = Codec(bits, 64), torch.randn(2, 1000)
        payloads = torch.empty(2, codec.payload_bytes(1000), dtype=torch.uint8)
        codec.encode(slices, payloads)
        assert payloads.shape[1] % 64 == 0
        assert payloads[0, -RESERVED_BYTES:].tolist() == [0] * RESERVED_BYTES


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
