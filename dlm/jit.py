"""Compiles kernels, and caches them between processes.

`kernel` and `inlined` replace numba's decorators in every file of kernels. numba's own cache
compares a kernel only with the file that defines it, but a kernel also contains code inlined from
other files. So this cache keeps kernels in a folder named after a hash of all kernels' source.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from dlm.files import claim, evict, locked, scratch_file, scratch_folder, write_whole
from dlm.progress import compiling_notice

PACKAGE = Path(__file__).parent
# The files whose code is in compiled kernels: kernels, and the modules whose constants they use.
SOURCES = (
    "kernels.py",
    "*_kernels.py",
    "jit.py",
    "units.py",
    "index/search/view.py",
    "index/packed/columns.py",
    "index/packed/low.py",
    "index/packed/tree.py",
)
KEPT = 3  # folders of other versions that are kept
_DIGEST_BYTES = 16
_FOLDER = rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}"


def kernel(types: str | Callable[..., Any], *, nogil: bool = True) -> Any:
    """Compiles a function on its first call, to run without the GIL, and caches the result.

    Args    nogil  False holds the GIL, for kernels that take a microsecond: releasing the GIL takes
                   as long, and data shared by threads needs no lock
            types  argument types, such as "uint32[:], out int64[:, :], bool": arrays in C order,
                   writable if marked `out`. The kernel is then compiled once, other arguments raise
                   TypeError, and it can be compiled ahead. Without `types`, it is compiled for each
                   kind of argument; read-only and writable arrays are different kinds
    Raises  TypeError  the function is defined inside another: the cache names a kernel by module,
                       name and types, so it could not tell kernels of one factory apart
    """
    if callable(types):
        return _kept(_compiled(types))
    text = types
    for_builtin = text == BUILTIN and not nogil
    return lambda function: _declared(
        _kept(_compiled(function, nogil=nogil, no_cfunc_wrapper=not for_builtin)), text
    )


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    return numba.njit(**{"nogil": True, "no_cfunc_wrapper": True, **options})(function)


def _declared(dispatcher: Any, text: str) -> Any:
    compile_for = getattr(dispatcher, "compile", None)
    if compile_for is None:  # compilation is disabled
        return dispatcher

    def compile_once(_: object = None) -> Any:
        with global_compiler_lock:
            if not dispatcher.overloads:
                compile_for(_types(text))
                dispatcher.disable_compile()
            (result,) = dispatcher.overloads.values()
            return result.entry_point

    def first_call(*_: object, **__: object) -> Any:
        compile_once()
        return dispatcher  # numba then calls the dispatcher, which checks the arguments

    dispatcher.compile, dispatcher._compile_for_args = compile_once, first_call
    dispatcher._cache.types = text
    return dispatcher


_TYPE = re.compile(r"(out )?(\w+)(\[:(?:, :)*\])?(?:, )?")


@lru_cache
def _types(text: str) -> tuple[Any, ...]:
    found = []
    end = 0
    while end < len(text):
        match = _TYPE.match(text, end)
        assert match is not None, text
        out, name, axes = match.groups()
        scalar = numba.types.boolean if name == "bool" else getattr(numba.types, name)
        ndim = axes.count(":") if axes else 0
        found.append(numba.types.Array(scalar, ndim, "C", readonly=not out) if axes else scalar)
        end = match.end()
    return tuple(found)


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_FASTCALL = 0x80  # METH_FASTCALL
BUILTIN = "int64, int64, int64"


@lru_cache
def builtin(dispatcher: Any) -> Callable[..., Any]:
    """Returns a kernel as a built-in function; a call takes half the time of one through numba.

    Use it if the kernel takes less time than a call. The kernel has the types `BUILTIN`, holds the
    GIL, and follows CPython's calling convention: its arguments are 0, the address of the pointers
    to the Python arguments, and their number; it returns a new reference. It must not fail.
    """
    dispatcher.compile()
    (result,) = dispatcher.overloads.values()
    address = result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)
    made = _MethodDef(dispatcher.__name__.encode(), address, _FASTCALL, None)
    _builtins.append(made)  # CPython keeps a pointer to it
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p,) * 3
    function: Callable[..., Any] = new(ctypes.addressof(made), None, None)
    return function


_builtins: list[_MethodDef] = []


def inlined(function: Callable[..., Any]) -> Any:
    """Inlines a function into the kernels that call it; Python runs the function as written. No
    entry point for Python is compiled, which saves a third of a small function's compile time."""
    dispatcher = _compiled(function, forceinline=True, no_cpython_wrapper=True)

    def add_overload(result: Any) -> None:
        """Records the result without a Python entry point, since none was compiled."""
        dispatcher.overloads[tuple(result.signature.args)] = result

    if not config.DISABLE_JIT:
        dispatcher.add_overload = add_overload
        dispatcher._compile_for_args = lambda *_, **__: function
    return _kept(dispatcher)


def _kept(dispatcher: Any) -> Any:
    name = getattr(dispatcher, "py_func", dispatcher).__qualname__
    if "<locals>" in name:  # the cache could not tell a factory's kernels apart
        raise TypeError(
            f"{name} is defined inside a function; move the kernel to the top level of its module"
        )
    if not config.DISABLE_JIT:
        dispatcher._cache = _Kernels(dispatcher.py_func)
    return dispatcher


class _Kernels(NullCache):  # type: ignore[misc]
    """The compiled forms of one function, one file each; numba looks here before it compiles."""

    def __init__(self, function: Any) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        self.types = ""  # the types declared; empty if none are

    @property
    def cache_path(self) -> str:
        return os.fspath(folders()[-1])

    def file(self, signature: Any, context: Any) -> str:
        arguments, result = normalize_signature(signature)
        key = repr((str(arguments), str(result), context.codegen().magic_tuple()))
        return f"{self._name}-{_digest(key.encode())}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        name = self.file(sig, target_context)
        for folder in folders():
            with contextlib.suppress(FileNotFoundError):
                data = (folder / name).read_bytes()
                if _digest(data[_DIGEST_BYTES:]) == data[:_DIGEST_BYTES].hex():
                    parts = pickle.loads(data[_DIGEST_BYTES:])
                    return CompileResult._rebuild(target_context, *parts)
        compiling_notice.begin()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        compiling_notice.end()
        if data.lifted or data.library.has_dynamic_globals:
            return  # lifted loops and dynamic globals bind code to this process
        content = dumps(data._reduce())
        name = self.file(sig, data.target_context)
        # If the disk is full or the folder was removed, the process continues with its own
        # compiled code.
        with contextlib.suppress(OSError):
            write_whole(folders()[-1] / name, bytes.fromhex(_digest(content)) + content)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


@lru_cache(1)
def version() -> str:
    """Returns a hash of the exact source of all kernels, and of everything else that affects their
    compilation."""
    paths = sorted({path for name in SOURCES for path in PACKAGE.rglob(name)})
    text = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.version_info[:3])
    options = (config.OPT, config.BOUNDSCHECK, config.DEBUGINFO_DEFAULT)
    text.update(repr((versions, sys.implementation.cache_tag, options)).encode())
    for path in paths:
        data = path.read_bytes()
        text.update(f"{path.relative_to(PACKAGE).as_posix()} {len(data)}\n".encode())
        text.update(data)
    return text.hexdigest()


_private = contextlib.ExitStack()  # closed when the interpreter exits


@lru_cache(1)
def folders() -> Sequence[Path]:
    """Returns the folders to search for kernels; new kernels are written to the last one.

    That is the first writable folder; earlier ones may be part of an image. If none is writable, it
    is a private folder that this process removes: in a shared one, others could change the code.
    """
    found: list[Path] = []
    for place in _places():
        folder = place / version()
        found.append(folder)
        with contextlib.suppress(OSError):
            _claim(folder)
            return found
    with contextlib.suppress(OSError):  # if nothing can be written, kernels are not cached
        private = _private.enter_context(scratch_folder(None, "dlm-kernels"))
        os.environ["NUMBA_CACHE_DIR"] = os.fspath(private)
        found.append(next(_places()) / version())
        found[-1].mkdir(parents=True)
    return found


def _places() -> Iterator[Path]:
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(named) / "dlm"
    yield PACKAGE / "__pycache__" / "kernels"
    user = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    yield Path(user) / "dlm" / "kernels"


def _claim(folder: Path) -> None:
    """Marks a folder as in use while this process lives; if it is new, removes old folders."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    os.close(scratch_file(folder))  # tries to write: permission bits alone can mislead
    claim(folder)
    if is_new:
        evict(folder.parent, _FOLDER, most=KEPT + 1)


# A helper's program: it reads its parent's sys.path, then compiles the kernel that each line names.
_HELPER = """
import gc, importlib, json, sys
gc.set_threshold(50_000)
sys.path[:] = json.loads(sys.stdin.readline())
for line in sys.stdin:
    module, name = line.split()
    getattr(importlib.import_module(module), name).compile()
    sys.stdout.write("compiled\\n")
    sys.stdout.flush()
"""
HELPERS = 3  # at most: each takes 150 MB, and fewer processors may be usable than are counted

Tell = Callable[[int, int], None]


def declared_kernels() -> list[Any]:
    """All kernels of dlm whose types are declared, so that they can be compiled ahead."""
    paths = sorted({path for name in SOURCES[:2] for path in PACKAGE.rglob(name)})
    parts = [path.relative_to(PACKAGE).with_suffix("").parts for path in paths]
    modules = [importlib.import_module(".".join([PACKAGE.name, *names])) for names in parts]
    found = [kernel for module in modules for kernel in vars(module).values()]
    declared = [one for one in found if getattr(getattr(one, "_cache", None), "types", "")]
    return list(dict.fromkeys(declared))


def compile_ahead(kernels: Sequence[Any], tell: Tell | None = None) -> int:
    """Compiles those kernels that are not cached, in parallel processes; returns their number.

    numba compiles one function at a time in a process. Of several processes that need the same
    kernels, one compiles them and the others wait for it. All in `kernels` have declared types, and
    slow ones come first. `tell` gets, in any thread, the numbers of kernels done (from 0) and to
    compile in all; it is not called if all kernels are cached.
    """
    missing = [] if config.DISABLE_JIT else [k for k in dict.fromkeys(kernels) if _is_missing(k)]
    if not missing:
        return 0
    if tell is None:
        with compiling_notice.compiling(len(missing)) as count:
            return _compile_missing(missing, count)
    with compiling_notice.hidden():
        return _compile_missing(missing, tell)


def load(kernels: Sequence[Any]) -> None:
    """Prepares this process to run the kernels; compiles those that are not cached."""
    compile_ahead(kernels)
    for kernel in () if config.DISABLE_JIT else kernels:
        kernel.compile()


def _compile_missing(missing: Sequence[Any], tell: Tell) -> int:
    of, telling = len(missing), threading.Lock()
    tell(0, of)
    with _compiling_alone(), _rare_collections():
        left = _Left([kernel for kernel in missing if _is_missing(kernel)])
        compiled = len(left.kernels)
        done = of - compiled
        if not compiled:
            tell(of, of)
            return 0

        def work(compile_one: Callable[[Any], None]) -> None:
            nonlocal done
            while (kernel := left.take()) is not None:
                try:
                    compile_one(kernel)
                except OSError:  # the helper ended; this process does the helper's work
                    left.put_back(kernel)
                    return
                left.compiled(kernel)
                with telling:
                    done += 1
                    tell(done, of)

        def compile_here(kernel: Any) -> None:
            kernel.compile()

        count = min(HELPERS, config.NUMBA_DEFAULT_NUM_THREADS - 1, compiled - 1)
        with contextlib.ExitStack() as stack:
            helpers = [stack.enter_context(_helper()) for _ in range(count)]
            threads = [threading.Thread(target=work, args=(helper,)) for helper in helpers]
            for thread in threads:
                thread.start()
            work(compile_here)
            for thread in threads:
                thread.join()
        work(compile_here)
        return compiled


class _Left:
    """The kernels that no process is compiling yet. If two processes compile kernels with the same
    functions in them, these functions are compiled twice; so the next kernel is the one that shares
    the fewest functions with the kernels being compiled."""

    def __init__(self, kernels: list[Any]) -> None:
        self.kernels = kernels
        self._parts = {kernel: _parts(kernel) for kernel in kernels}
        self._compiling: list[Any] = []
        self._compiled: set[Any] = set()
        self._lock = threading.Lock()

    def take(self) -> Any | None:
        with self._lock:
            if not self.kernels:
                return None
            busy = set().union(*(self._parts[one] for one in self._compiling)) - self._compiled
            kernel = min(self.kernels, key=lambda one: len(self._parts[one] & busy))
            self.kernels.remove(kernel)
            self._compiling.append(kernel)
            return kernel

    def compiled(self, kernel: Any) -> None:
        with self._lock:
            self._compiling.remove(kernel)
            self._compiled |= self._parts[kernel]

    def put_back(self, kernel: Any) -> None:
        with self._lock:
            self._compiling.remove(kernel)
            self.kernels.append(kernel)


def _parts(kernel: Any) -> set[Any]:
    found, todo = {kernel}, [kernel]
    while todo:
        function = todo.pop().py_func
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        new = {one for one in named if isinstance(one, Dispatcher)} - found
        found |= new
        todo += new
    return found


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes Python collect garbage less often: numba creates millions of objects, and most stay."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _is_missing(kernel: Any) -> bool:
    kept: _Kernels = kernel._cache
    if kernel.overloads:
        return False
    kernel.targetctx.refresh()
    name = kept.file(_types(kept.types), kernel.targetctx)
    return not any((folder / name).exists() for folder in folders())


@contextlib.contextmanager
def _compiling_alone() -> Iterator[None]:
    """Waits until no other process compiles ahead into the same folder."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # fails if there is nowhere to write, or no locks
            stack.enter_context(locked(folders()[-1] / ".compiling"))
        yield


@contextlib.contextmanager
def _helper() -> Iterator[Callable[[Any], None]]:
    """A process that compiles kernels into the folder where this process looks for them. It ends at
    the end of this block, or with this process, since its input is then closed."""
    process = subprocess.Popen(
        # -P: a module in the current folder, such as a json.py, is not run.
        [sys.executable, "-P", "-c", _HELPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # this process repeats failed work, and shows the error
        text=True,
        start_new_session=True,  # Ctrl-C reaches only this process, which ends the helper
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def say(line: str) -> None:
        stdin.write(line + "\n")
        stdin.flush()

    def compile_there(kernel: Any) -> None:
        if not started:
            say(json.dumps(sys.path))
            started.append(True)
        say(f"{kernel.py_func.__module__} {kernel.py_func.__qualname__}")
        if stdout.readline() != "compiled\n":
            raise ChildProcessError(process.pid)

    started: list[bool] = []
    try:
        yield compile_there
    finally:
        process.kill()
        process.wait()
        stdout.close()
        with contextlib.suppress(OSError):  # the input was not read to its end
            stdin.close()
