"""What is made at run time and kept on disk: one folder of files that are whole, checked or gone.

An entry's name is a digest of all that made it. It begins with a digest of its name and content, so
that a damaged or a foreign file is made anew. Nothing here is ever run before that digest fits, and
nothing that fails to read or write costs more than time.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from threading import get_ident

from openrnn.progress import LOG, Job, told

BOUND = 1 << 30  # bytes that the folder may hold
ROOM = BOUND // 8  # bytes that are free again once it held more
WAIT = 300.0  # seconds for which another process that makes an entry is waited for
POLL = 0.02  # seconds between two looks whether it is there
STALE = 3600.0  # seconds after which a half-written file or a lock belongs to nobody
KEPT_APART = (".json",)  # small files of other writers, never evicted

_MAGIC = b"openrnn entry 1\n"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size

_told = False  # that nothing is kept


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where everything is kept: `~/.cache/openrnn`, else among temporary files.

    Only one that nobody else can write is taken. Where there is none, the path is one at which
    nothing can be read or written.
    """
    for path in _candidates():
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(path):
            return path
    return Path(os.devnull) / "openrnn"


def sources(package: str, other: str) -> list[bytes]:
    """The modules of a package of ours and another file of `openrnn`, in the order of names."""
    found = [entry for entry in files(package).iterdir() if entry.name.endswith(".py")]
    found.append(files("openrnn") / other)
    return [entry.read_bytes() for entry in sorted(found, key=lambda entry: entry.name)]


def path_of(kind: str, made_of: Iterable[str | bytes]) -> Path:
    """Where an entry is kept that is made of these texts, all of them in this order."""
    digest = hashlib.sha256()
    for each in (kind, *made_of):
        data = each.encode() if isinstance(each, str) else each
        digest.update(b"%d " % len(data) + data)
    return folder() / f"{digest.hexdigest()[:40]}.{kind}"


def kept(path: Path, make: Callable[[], bytes], what: str = "an entry") -> bytes:
    """The content of an entry, from disk or made; of processes that want the same one makes it.

    Args:
        what: is made, for a line about it, such as "cell lstm for float32".
    """
    found = read(path)
    if found is not None:
        return found
    where = f", once: it is kept in {path.parent}" if path.parent.is_dir() else ""
    with told(f"compiling {what}{where}") as job, _alone(path, job):
        found = read(path)
        if found is None:
            found = make()
            try:
                write_whole(path, _MAGIC + _digest(path, found) + found)
            except OSError as error:
                _tell_that_nothing_is_kept(path.parent, error.strerror or str(error))
            else:
                _evict(path)
    return found


def _tell_that_nothing_is_kept(path: Path, why: str) -> None:
    """Once in a process; on stderr, unless the program has its own handlers of logs."""
    global _told  # noqa: PLW0603
    if _told:
        return
    _told = True
    LOG.warning(
        "openrnn: compiled kernels cannot be kept in %s (%s): each process compiles them anew, for "
        "seconds. Make room there, or give this user a writable ~/.cache/openrnn", path, why,
    )  # fmt: skip


def read(path: Path) -> bytes | None:
    """The content of an entry, or None; what is there and damaged is deleted."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        whole = b""
    content = whole[_HEAD:]
    if whole[:_HEAD] == _MAGIC + _digest(path, content):
        with suppress(OSError):
            os.utime(path)  # the oldest by last use are evicted
        return content
    with suppress(OSError):
        path.unlink()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    return None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file by a rename, however many processes and threads write the same one.

    Raises:
        OSError: the system refuses; nothing is left behind then.
    """
    half = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        half.write_bytes(data)
        half.replace(path)
    except OSError:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        raise


def _candidates() -> Iterator[Path]:
    with suppress(RuntimeError):  # no home
        yield Path.home() / ".cache" / "openrnn"
    with suppress(OSError):  # no place for temporary files
        user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
        yield Path(tempfile.gettempdir()) / f"openrnn{user}"


def _is_ours(path: Path) -> bool:
    """Whether a folder can be written, and by nobody else: machine code is loaded from it."""
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode) and path.parent.name == ".cache":
            about = path.stat()  # a link in one's own home
        if not stat.S_ISDIR(about.st_mode):
            return False
        if hasattr(os, "getuid"):
            if about.st_uid != os.getuid():
                return False
            if stat.S_IMODE(about.st_mode) & 0o077:
                path.chmod(0o700)  # of an earlier version
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _digest(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + content).digest()


@contextmanager
def _alone(path: Path, job: Job) -> Iterator[None]:
    """Nobody else makes this entry meanwhile, where the system has locks and patience lasts."""
    lock = path.with_name(f"{path.name}.lock")
    held = None
    until = time.monotonic() + WAIT
    while held is None and time.monotonic() < until:
        try:
            held = _lock(lock)
        except (OSError, ImportError):
            break  # a folder that cannot be written, a system without locks
        if held is None:
            job.doing = job.doing.replace("compiling", "another process compiles")
            time.sleep(POLL)
            if path.exists():
                break
    try:
        yield
    finally:
        if held is not None:
            with suppress(OSError):
                lock.unlink()
            os.close(held)


def _lock(lock: Path) -> int | None:
    """The descriptor of a lock that is now ours, or None where it is another's."""
    import fcntl

    held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the one before may have deleted the file that was opened here
        if os.path.samestat(os.fstat(held), lock.stat()):
            return held
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(held)
        raise
    os.close(held)
    return None


def _evict(but: Path) -> None:
    """Deletes what was not used for longest until the folder is within its bound, and litter."""
    now, files = time.time(), []
    for parent, _, names in os.walk(folder()):
        for name in names:
            path = Path(parent) / name
            with suppress(OSError):
                about = path.stat()
                if path.suffix in (".tmp", ".lock"):
                    if now - about.st_mtime > STALE:
                        path.unlink()
                elif path.suffix not in KEPT_APART:
                    files.append((about.st_mtime_ns, about.st_size, path))
    held = sum(size for _, size, _ in files)
    if held <= BOUND:
        return
    for _, size, path in sorted(files):
        if held <= BOUND - ROOM:
            return
        if path != but:
            with suppress(OSError):
                path.unlink()
                held -= size
