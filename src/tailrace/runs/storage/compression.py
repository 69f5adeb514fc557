"""The compression of a run's chunks, in the one thread that encodes them.

Zarr's own codec hands each chunk to a pool with four more threads than the machine has processors. The
C library keeps what a thread has freed, in a pool of memory of its own: a process that trains for hours
would grow by its largest chunk for each of those threads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import zarr
from zarr.codecs import BloscCodec, Crc32cCodec


class InlineBlosc(BloscCodec):
    """Zarr's `blosc` codec, which encodes in the calling thread; the files are the same."""

    # Versions of Zarr without these functions use their own threads.

    async def _encode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        encode = getattr(self, "_encode_sync", None)
        if encode is None:
            return await super()._encode_single(chunk_bytes, chunk_spec)
        return encode(chunk_bytes, chunk_spec)

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        decode = getattr(self, "_decode_sync", None)
        if decode is None:
            return await super()._decode_single(chunk_bytes, chunk_spec)
        return decode(chunk_bytes, chunk_spec)


def codecs() -> list[Any]:
    """The compression of chunks: fast, since it runs during training, and with a checksum."""
    return [InlineBlosc(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()]


def reopened(array: Any) -> Any:
    """An existing array, to be appended to: all its chunks are written, and compressed here."""
    own = tuple(
        InlineBlosc.from_dict(codec.to_dict()) if isinstance(codec, BloscCodec) else codec
        for codec in array.metadata.codecs
    )
    metadata = dataclasses.replace(array.metadata, codecs=own)
    config: Any = {"write_empty_chunks": True}
    return zarr.Array(zarr.AsyncArray(metadata, array.store_path, config))
