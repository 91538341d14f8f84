"""XXH3-64 checksums of whole KV blocks on the device: the same numbers that xxhash gives for these
bytes, so that what a device wrote can be compared with what a host read, and the reverse.

XXH3 is made for one core that reads from start to end, but only a little of it is a chain: bytes
are added up by pieces of 1,024, in any order, and one pass over the pieces' sums ties them
together. So all bytes are read in parallel, and the chain is 64 bytes for each 1,024.

No state; any thread.
"""

from __future__ import annotations

import functools

import torch

from baton_kernels.dispatch import Backend, runs_triton

LEAST_BYTES = 241
"""Fewest bytes that can be checksummed: XXH3 has other formulas for shorter inputs, which are not
implemented."""

PIECE_WORDS = 128
STRIPE_WORDS = LANES = 8
STRIPES = PIECE_WORDS // STRIPE_WORDS

_PRIMES32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
PRIME32, PRIME64, PRIME_END = _PRIMES32[0], _PRIMES64[0], 0x165667919E3779F9
STARTS = (_PRIMES32[2], *_PRIMES64[:4], _PRIMES32[1], _PRIMES64[4], _PRIMES32[0])
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SCRAMBLE_KEYS, LAST_KEYS, MERGE_KEYS = 24, 32, 40
"""Indices in `keys` where the words for scrambling, the last stripe and the final merge begin;
those of stripe s begin at s."""


def block_checksums(
    cache: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Compute the XXH3-64 of each block's bytes.

    Args:
        cache: [num_blocks, E], each block dense, of at least LEAST_BYTES bytes, a multiple of 8.
        block_ids: [n] int32.
        out: [n] int64.
        sums: scratch of `room(n, bytes of a block)` int64; None: allocated here.
    Returns: [n] int64: the checksums, as unsigned 64-bit numbers reinterpreted.
    Raises: ValueError naming what does not fit.
    """
    words = _as_words(cache)
    num_blocks = block_ids.shape[0]
    if block_ids.dtype != torch.int32 or block_ids.ndim != 1:
        raise ValueError(f"block_ids: [n] int32, got {list(block_ids.shape)} {block_ids.dtype}")
    if out is None:
        out = torch.empty(num_blocks, dtype=torch.int64, device=cache.device)
    if out.shape != (num_blocks,) or out.dtype != torch.int64 or not out.is_contiguous():
        raise ValueError(f"out: [{num_blocks}] int64, got {list(out.shape)} {out.dtype}")
    if num_blocks == 0:
        return out
    if not runs_triton(backend, cache):
        return out.copy_(_reference(words[block_ids.long()]))
    wanted = room(num_blocks, words.shape[1] * 8)
    if sums is None:
        sums = torch.empty(wanted, dtype=torch.int64, device=cache.device)
    if sums.ndim != 1 or sums.dtype != torch.int64 or sums.shape[0] < wanted:
        raise ValueError(f"sums: room for {wanted} int64, got {list(sums.shape)} {sums.dtype}")
    from baton_kernels import block_checksums_triton

    block_checksums_triton.checksums(words, block_ids, out, sums, keys(cache.device))
    return out


def fits(block_bytes: int) -> bool:
    """Return whether blocks of this size in bytes can be checksummed."""
    return block_bytes >= LEAST_BYTES and block_bytes % 8 == 0


def room(num_blocks: int, block_bytes: int) -> int:
    """Return the number of int64 elements of `sums` for blocks of this number and size in bytes."""
    return num_blocks * (num_pieces(block_bytes // 8) + 1) * LANES


def num_pieces(num_words: int) -> int:
    """Return the number of whole 1,024-byte pieces, which the serial chain goes through; at least
    one byte is left after them."""
    return (num_words * 8 - 1) // (PIECE_WORDS * 8)


def num_rest_stripes(num_words: int) -> int:
    """Return the number of whole 64-byte stripes after the last piece; at least one byte is left
    after these, too."""
    return (num_words * 8 - 1 - num_pieces(num_words) * PIECE_WORDS * 8) // (STRIPE_WORDS * 8)


@functools.cache
def keys(device: torch.device) -> torch.Tensor:
    """Return the words of the XXH3 secret that the kernels use, [48] int64: for stripes, between
    pieces, for the last stripe and for the final merge."""
    starts = [*range(0, 192, 8), *range(128, 192, 8), *range(121, 185, 8), *range(11, 75, 8)]
    words = [int.from_bytes(_SECRET[at : at + 8], "little", signed=True) for at in starts]
    return torch.tensor(words, dtype=torch.int64, device=device)


@functools.cache
def length_term(num_words: int, device: torch.device) -> torch.Tensor:
    """Return what a block's length adds at the end, [1] int64."""
    return _int64((num_words * 8 * PRIME64 % 2**64,), device)


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """View the cache as [num_blocks, words] int64."""
    if cache.ndim != 2 or cache.stride(1) != 1:
        raise ValueError(f"cache: [num_blocks, E] of dense blocks, got {list(cache.shape)}")
    if not fits(cache.shape[1] * cache.element_size()):
        raise ValueError(
            f"cache: blocks of {cache.shape[1] * cache.element_size()} bytes; they must have a "
            f"multiple of 8, and at least {LEAST_BYTES}"
        )
    if cache.data_ptr() % 8 or cache.stride(0) * cache.element_size() % 8:
        raise ValueError("cache: blocks must begin at multiples of 8 bytes")
    return cache.view(torch.int64)


# -- plain torch: int64 wraps as unsigned numbers do; only shifts and halves need care


def _reference(words: torch.Tensor) -> torch.Tensor:
    """Compute checksums [n] int64 of blocks given as words [n, words] int64, in plain torch."""
    num_blocks, num_words = words.shape
    table = keys(words.device)
    count, rest = num_pieces(num_words), num_rest_stripes(num_words)
    stripes = words[:, : count * PIECE_WORDS + rest * STRIPE_WORDS].view(num_blocks, -1, LANES)
    order = torch.arange(STRIPES, device=words.device)[:, None] + torch.arange(
        LANES, device=words.device
    )
    stripe_keys = table[order]
    added = _mixed(stripes, stripe_keys.repeat(count + 1, 1)[: stripes.shape[1]])
    sums = added[:, : count * STRIPES].view(num_blocks, count, STRIPES, LANES).sum(2)
    scramble_keys = table[SCRAMBLE_KEYS : SCRAMBLE_KEYS + LANES]
    state = _int64(STARTS, words.device).expand(num_blocks, LANES)
    for piece in range(count):
        state = state + sums[:, piece]
        state = (state ^ _shifted(state, 47) ^ scramble_keys) * PRIME32
    state = state + added[:, count * STRIPES :].sum(1)
    last = words[:, None, -LANES:]
    state = state + _mixed(last, table[LAST_KEYS : LAST_KEYS + LANES][None])[:, 0]
    pairs = (state ^ table[MERGE_KEYS : MERGE_KEYS + LANES]).view(num_blocks, LANES // 2, 2)
    length = length_term(num_words, words.device)
    end = length + _folded(pairs[..., 0], pairs[..., 1]).sum(1)
    end = (end ^ _shifted(end, 37)) * PRIME_END
    return end ^ _shifted(end, 32)


def _mixed(stripes: torch.Tensor, stripe_keys: torch.Tensor) -> torch.Tensor:
    """Compute what stripes [n, S, lanes] add to the accumulators."""
    mixed = stripes ^ stripe_keys
    swapped = stripes.view(*stripes.shape[:2], LANES // 2, 2).flip(-1).reshape(stripes.shape)
    return swapped + (mixed & 0xFFFFFFFF) * _shifted(mixed, 32)


def _folded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """XOR the two halves of the 128-bit product of `a` and `b`."""
    low_a, high_a, low_b, high_b = a & 0xFFFFFFFF, _shifted(a, 32), b & 0xFFFFFFFF, _shifted(b, 32)
    one, other = high_a * low_b, low_a * high_b
    carry = _shifted(low_a * low_b, 32) + (one & 0xFFFFFFFF) + (other & 0xFFFFFFFF)
    high = high_a * high_b + _shifted(one, 32) + _shifted(other, 32) + _shifted(carry, 32)
    return (a * b) ^ high


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 words right logically: zeros come in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _int64(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    signed = [number - (1 << 64) if number >> 63 else number for number in numbers]
    return torch.tensor(signed, dtype=torch.int64, device=device)
