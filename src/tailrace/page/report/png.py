"""An indexed image as PNG, small enough to embed in a page. No dependency: Pillow is optional."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np


def png(indices: np.ndarray, palette: np.ndarray) -> bytes:
    """A PNG file.

    Args:
        indices: [rows, columns] of palette indices; the last index is transparent.
        palette: [256, 3].

    >>> png(np.zeros((2, 3), np.uint8), np.zeros((256, 3), np.uint8))[1:4]
    b'PNG'
    """
    rows, columns = indices.shape
    # 8 bits per pixel, colour type 3 (palette); the rest are the only values that PNG allows, and no
    # interlacing.
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    raw = np.zeros((rows, columns + 1), np.uint8)  # each row begins with its filter type
    raw[:, 1:] = indices
    # The alpha of each palette entry: the last one, for missing values, shows the background.
    opaque = bytes([255] * 255 + [0])
    parts = {
        b"IHDR": header,
        b"PLTE": palette.astype(np.uint8).tobytes(),
        b"tRNS": opaque,
        b"IDAT": zlib.compress(raw.tobytes(), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts.items())


def data_address(indices: np.ndarray, palette: np.ndarray) -> str:
    """The PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png(indices, palette)).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
