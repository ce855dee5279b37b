"""CUDA C++ -> cubins on disk -> kernels on a device: NVRTC and the driver through `cuda-core`.

No toolkit, include file or GPU is needed to compile. Cubins are entries of `store`.
"""

import ctypes
import io
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

import torch

from openrnn import elf, store
from openrnn.errors import OpenRNNError
from openrnn.native.device import current_stream
from openrnn.native.recording import CURRENT

STANDARD = "c++17"
OPTIONS = (f"--std={STANDARD}",)
FORMAT = "3"  # of an entry in the cache
CONFIGS = 1024  # launch configurations that a kernel caches


class CompileError(OpenRNNError, RuntimeError):
    """A kernel that NVRTC does not take: the message has its name, the options and the log."""


class DriverError(OpenRNNError, RuntimeError):
    """A call that the CUDA driver refuses: the message says of what, and its status."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of each thread.

    Args:
        registers: their number.
        spilled: bytes of stack; our kernels ask for none, so what is there holds spilled registers.
    """

    registers: int
    spilled: int


@dataclass(frozen=True, eq=False)
class Binary:
    """A compiled kernel of one architecture."""

    name: str
    arch: str
    code: bytes
    resources: Resources


def absent() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings")):
        try:
            if find_spec(module) is None:
                return f"package {package} is not installed"
        except ModuleNotFoundError:
            return f"package {package} is not installed"
    return None


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture that a compute capability is compiled for; 9.0 with what only it has."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


@lru_cache(maxsize=1)
def _version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


class KernelSource(NamedTuple):
    """The source of one kernel, and what it is compiled for.

    Args:
        text: CUDA C++ without includes.
        name: of the `extern "C"` function.
        arch: such as `sm_90`.
        title: what the kernel is, for messages.
    """

    text: str
    name: str
    arch: str
    title: str

    @property
    def path(self) -> Path:
        """Where the cache has its binary."""
        words = FORMAT, self.text, self.name, self.arch, *OPTIONS, _version()
        return store.path_of("cubin", words)


def binary(source: KernelSource) -> Binary:
    """The kernel, from the cache or compiled."""

    def make() -> bytes:
        made = _compile(source)
        return json.dumps(asdict(made.resources)).encode() + b"\n" + made.code

    head, _, code = store.kept(source.path, make, source.title).partition(b"\n")
    return Binary(source.name, source.arch, code, Resources(**json.loads(head)))


def prepare() -> None:
    """Imports the compiler, which two threads must not do at the same time."""
    from cuda.core import Program, ProgramOptions  # noqa: F401


def _compile(source: KernelSource) -> Binary:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(arch=source.arch, std=STANDARD)
    try:
        code = Program(source.text, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise CompileError(
            f"{source.title} does not compile for {source.arch} "
            f"({' '.join(OPTIONS)}, NVRTC {_version()}):\n{error}\n{log.getvalue()}"
        ) from error
    return Binary(source.name, source.arch, bytes(code), _resources(bytes(code)))


# attributes in a cubin's section .nv.info: symbol and value, 4 bytes each, behind a 4-byte head
_REGISTERS, _FRAME, _PAIR = 0x2F, 0x11, 4


def _resources(code: bytes) -> Resources:
    """The registers and spills of a cubin's one kernel.

    NVRTC's log has them, too, but not where NVRTC took the cubin from its cache.
    """
    found = {}
    for section in elf.sections(code):
        if section.name != ".nv.info":
            continue
        at = section.start
        while at < section.start + section.size:
            form, attribute, extent = struct.unpack_from("<BBH", code, at)
            at += 4
            if form == _PAIR:
                if attribute in (_REGISTERS, _FRAME):
                    found[attribute] = struct.unpack_from("<II", code, at)[1]
                at += extent
    return Resources(found[_REGISTERS], found.get(_FRAME, 0))


class Parameter:
    """Memory for the struct of a launch: its words, and the address that a launch takes."""

    def __init__(self, count: int) -> None:
        self.words: Any = (ctypes.c_int64 * count)()
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.words))
        self.address = ctypes.addressof(self._pointer)


class CudaKernel:
    """A kernel loaded on one device, ready to be launched.

    Args:
        made: the binary; cluster: blocks of a cluster; threads: of a block.
        shared: bytes of shared memory of a block.
        cooperative: all blocks of a launch must be resident at once.
        overlaps: its blocks may begin before the launch before has ended, and wait for its end
            themselves (programmatic dependent launch; in CUDA graphs from CUDA 12.3 on).
    """

    def __init__(
        self,
        made: Binary,
        cluster: int,
        threads: int,
        shared: int,
        device: int,
        cooperative: bool = False,
        overlaps: bool = False,
    ) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self.made, self.cluster, self.threads, self.shared = made, cluster, threads, shared
        self.device, self.cooperative, self.overlaps = device, cooperative, overlaps
        self._module = ObjectCode.from_cubin(made.code)
        self._kernel = self._module.get_kernel(made.name)
        self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
        if cluster > 8:
            self._set("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        self._function = driver.CUfunction(int(self._kernel.handle))
        self._launch = driver.cuLaunchKernelEx  # looked up once: half a us a launch
        self._parameter = local()  # a launch copies it before it returns
        self._configs: dict[tuple[int, int, int], Any] = {}  # by clusters, stream and event

    def _set(self, attribute: str, value: int) -> None:
        from cuda.bindings import driver

        name = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        handle = driver.CUkernel(int(self._kernel.handle))
        (status,) = driver.cuKernelSetAttribute(name, value, handle, driver.CUdevice(self.device))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"kernel {self.made.name}: {attribute} {value}: {status.name}")

    @cached_property
    def max_clusters(self) -> int:
        """How many clusters are resident at once, as the driver says."""
        from cuda.bindings import driver

        self.enter()
        done = driver.CUresult.CUDA_SUCCESS
        status, function = driver.cuKernelGetFunction(driver.CUkernel(int(self._kernel.handle)))
        found = 0
        if status == done and self.cluster > 1:
            status, found = driver.cuOccupancyMaxActiveClusters(function, self._config(1, 0, 0))
        elif status == done:
            ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            status, found = ask(function, self.threads, self.shared)
            found *= torch.cuda.get_device_properties(self.device).multi_processor_count
        if status != done:
            raise DriverError(f"kernel {self.made.name}: occupancy: {status.name}")
        return int(found)

    def launch(self, clusters: int, words: Sequence[int], launch_event: int = 0) -> None:
        """Starts the kernel on torch's current stream.

        Args:
            words: the fields of the struct that is its only parameter, of 8 bytes each.
            launch_event: an event that is recorded once all blocks have begun, or 0.
        """
        if CURRENT.recording is not None:
            CURRENT.recording.launch(self, clusters, words, launch_event)
            return
        try:
            found = self._parameter.found
        except AttributeError:  # this thread's first launch
            found = self._parameter.found = Parameter(len(words))
            self.enter()
        found.words[:] = words
        self.launch_at(found.address, clusters, current_stream(self.device), launch_event)

    def launch_at(self, parameter: int, clusters: int, stream: int, launch_event: int = 0) -> None:
        """Launches on any stream, with arguments in memory: `parameter` is its address."""
        key = clusters, stream, launch_event
        config = self._configs.get(key) or self._new_config(key)
        (status,) = self._launch(config, self._function, parameter, 0)
        if status:
            raise DriverError(
                f"kernel {self.made.name}: {clusters} clusters of {self.cluster} blocks of "
                f"{self.threads} threads, {self.shared} bytes shared: {status.name}"
            )

    def enter(self) -> None:
        """Makes the device's context current in a thread that has none, such as one of autograd."""
        from cuda.bindings import driver

        if not int(driver.cuCtxGetCurrent()[1]):
            _, context = driver.cuDevicePrimaryCtxRetain(driver.CUdevice(self.device))
            driver.cuCtxSetCurrent(context)

    def _new_config(self, key: tuple[int, int, int]) -> Any:
        if len(self._configs) == CONFIGS:
            self._configs.clear()
        found = self._configs[key] = self._config(*key)
        return found

    def _config(self, clusters: int, stream: int, launch_event: int) -> Any:
        """The driver's launch configuration."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = clusters * self.cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared, driver.CUstream(stream)
        kinds, attributes = driver.CUlaunchAttributeID, []
        if self.cluster > 1:
            shape = driver.CUlaunchAttribute()
            shape.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = shape.value.clusterDim
            size.x, size.y, size.z = self.cluster, 1, 1
            attributes.append(shape)
        if self.cooperative:
            cooperative = driver.CUlaunchAttribute()
            cooperative.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            cooperative.value.cooperative = 1
            attributes.append(cooperative)
        if self.overlaps:
            early = driver.CUlaunchAttribute()
            early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        if launch_event:
            completion = driver.CUlaunchAttribute()
            completion.id = kinds.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
            completion.value.launchCompletionEvent.event = driver.CUevent(launch_event)
            attributes.append(completion)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


_LOCK = Lock()
_LOADED: dict[tuple[int, int, int, int, bool, bool], CudaKernel] = {}


def loaded(
    made: Binary, cluster: int, threads: int, shared: int, device: int, cooperative: bool = False,
    overlaps: bool = False,
) -> CudaKernel:  # fmt: skip
    """The binary as a kernel on a device, loaded once."""
    key = id(made), cluster, shared, device, cooperative, overlaps
    with _LOCK:
        if key not in _LOADED:
            _LOADED[key] = CudaKernel(made, cluster, threads, shared, device, cooperative, overlaps)
        return _LOADED[key]
