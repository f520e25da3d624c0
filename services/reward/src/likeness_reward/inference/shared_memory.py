"""System shared memory between this process and a Triton on the same host.

A region holds the inputs of one request and, behind them, its outputs. A request that failed may still be read or
written by Triton, so its region is never used again: its memory goes once Triton lets go of it.
"""

import atexit
import contextlib
import logging
import re
import secrets
import shutil
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from likeness_reward.errors import InferenceServerUnavailable

SharedMemoryMode = Literal["auto", "on", "off"]

NAME_PREFIX = "likeness-"
DEVICE = Path("/dev/shm")
TIMEOUT_S = 2.0
PROBE_BYTES = 4096
LEAST_VERSION = (2, 50)
"""The first Triton that refuses to unmap a region which a request still uses, instead of crashing."""
logger = logging.getLogger(__name__)


class Region:
    """A piece of shared memory that Triton knows by `name`."""

    def __init__(self, client: InferenceServerClient, byte_size: int, timeout_s: float) -> None:
        """Creates and registers it. Raises InferenceServerException or OSError."""
        if shutil.disk_usage(DEVICE).free < 2 * byte_size:  # writing to more than there is kills the process
            raise OSError(f"{DEVICE} has no room for {byte_size} bytes")
        self.name = NAME_PREFIX + secrets.token_hex(8)
        self.byte_size = byte_size
        self._memory = SharedMemory(self.name, create=True, size=byte_size)
        try:
            client.register_system_shared_memory(self.name, f"/{self.name}", byte_size, client_timeout=timeout_s)
        except InferenceServerException:
            self.release()
            raise

    def write(self, values: NDArray[Any], offset: int) -> None:
        """Copies an array to a byte offset."""
        np.ndarray(values.shape, values.dtype, buffer=self._memory.buf, offset=offset)[...] = values

    def read(self, shape: tuple[int, ...], offset: int) -> NDArray[np.float32]:
        """Returns a copy of the float32 array at a byte offset."""
        return np.ndarray(shape, np.float32, buffer=self._memory.buf, offset=offset).copy()

    def release(self) -> None:
        """Gives up this process's hold on the memory and its name."""
        self._memory.unlink()
        self._memory.close()


class RegionPool:
    """Regions of one Triton; each serves one request at a time."""

    def __init__(self, client: InferenceServerClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._free: list[Region] = []

    def take(self, byte_size: int, timeout_s: float) -> Region:
        """Returns a region of at least so many bytes. Raises InferenceServerException or OSError."""
        with self._lock:
            region = self._free.pop() if self._free else None
        if region is not None and region.byte_size >= byte_size:
            return region
        if region is not None:
            region.release()
        forget_lost_regions(self._client, timeout_s)
        return Region(self._client, byte_size, timeout_s)

    def give_back(self, region: Region) -> None:
        """Takes back a region whose request is done."""
        with self._lock:
            self._free.append(region)

    def clear(self) -> None:
        """Releases every region that is not taken."""
        with self._lock:
            regions, self._free = self._free, []
        for region in regions:
            region.release()

    def close(self) -> None:
        """Releases every region that is not taken, here and in Triton."""
        atexit.unregister(self.close)
        self.clear()
        with contextlib.suppress(InferenceServerException):
            forget_lost_regions(self._client, TIMEOUT_S)


def open_pool(client: InferenceServerClient, mode: SharedMemoryMode) -> RegionPool | None:
    """Returns a pool when Triton sees this host's shared memory, else None ("auto") or an error ("on").

    Raises InferenceServerUnavailable.
    """
    if mode == "off":
        return None
    try:
        version = client.get_server_metadata(client_timeout=TIMEOUT_S).version
        if version_of(version) < LEAST_VERSION:
            raise OSError(f"Triton {version} is older than {'.'.join(map(str, LEAST_VERSION))}")
        pool = RegionPool(client)
        pool.give_back(pool.take(PROBE_BYTES, TIMEOUT_S))
    except (InferenceServerException, OSError) as error:
        if mode == "on":
            raise InferenceServerUnavailable(f"no shared memory with Triton: {error}") from error
        logger.info("no shared memory with Triton, sending bytes: %s", error)
        return None
    atexit.register(pool.close)
    return pool


def version_of(text: str) -> tuple[int, ...]:
    """Returns (2, 51) of "2.51.0"."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def forget_lost_regions(client: InferenceServerClient, timeout_s: float) -> None:
    """Lets Triton unmap the regions of this service whose memory has no name any more, and that no request uses."""
    registered = client.get_system_shared_memory_status(client_timeout=timeout_s).regions
    for name in registered:
        if name.startswith(NAME_PREFIX) and not (DEVICE / name).exists():
            with contextlib.suppress(InferenceServerException):  # a request uses it: next time
                client.unregister_system_shared_memory(name, client_timeout=timeout_s)
