"""Compile the stand-ins for NVIDIA's libraries into the folder where a CUDA build of torch looks for them.

``python build.py`` in the environment that holds torch. It needs g++, nm and the headers of the wheel
nvidia-cuda-runtime. The libraries of that wheel are replaced.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])
SOURCES = Path(__file__).parent
COMPILER = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w"]

# Libraries that torch links, but that nothing here may need: each of their functions returns 0. The versions in the
# names are those of CUDA 13.
STUBS = {
    "cublas": "libcublas.so.13",
    "cublasLt": "libcublasLt.so.13",
    "cudnn": "libcudnn.so.9",
    "cufft": "libcufft.so.12",
    "cuFile": "libcufile.so.0",
    "cupti": "libcupti.so.13",
    "curand": "libcurand.so.10",
    "cusolver": "libcusolver.so.12",
    "cusparse": "libcusparse.so.12",
    "cusparseLt": "libcusparseLt.so.0",
    "nvrtc": "libnvrtc.so.13",
    "nvshmem": "libnvshmem_host.so.3",
}
# Functions of these libraries that must do more than return 0, because torch reads what they write.
BODIES = {
    "cublasCreate_v2": "(void** handle) { *handle = (void*)1; return 0; }",
    "cublasLtCreate": "(void** handle) { *handle = (void*)1; return 0; }",
    "cudnnGetVersion": "() { return 92000; }",
    "cuptiGetVersion": "(unsigned* version) { *version = 26; return 0; }",
    "cuptiSubscribe": "() { return 15; }",  # not initialized: the profiler then records the CPU alone
}
NOT_SUPPORTED = 801  # cudaErrorNotSupported
INVALID_USAGE = 5  # ncclInvalidUsage


def build(site: Path) -> Path:
    """Compile all libraries. Return their folder."""
    folder = site / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("lib*.so*"):
        old.unlink()
    needed = needed_symbols(site / "torch" / "lib")
    runtime = [SOURCES / name for name in ("record.cpp", "runtime.cpp", "memory.cpp", "streams.cpp")]
    include = f"-I{folder.parent / 'include'}"
    names = [name for name, library in needed.items() if library == "libcudart.so.13"]
    compile_with_rest(folder / "libcudart.so.13", runtime, names, NOT_SUPPORTED, include, version="libcudart.so.13")
    names = [name for name in needed if re.match("p?nccl[A-Z]", name)]
    links = [f"-L{folder}", "-l:libcudart.so.13"]
    compile_with_rest(folder / "libnccl.so.2", [SOURCES / "nccl.cpp"], names, INVALID_USAGE, *links)
    run(*COMPILER, include, SOURCES / "driver.cpp", "-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # the name with which Triton links its launcher
    for prefix, library in STUBS.items():
        compile_stub(folder / library, {name: of for name, of in needed.items() if belongs(name, of, prefix, library)})
    return folder


def needed_symbols(libraries: Path) -> dict[str, str]:
    """Return the functions that torch wants of NVIDIA's libraries, each with its version, which may be empty."""
    found = {}
    for library in sorted(libraries.glob("lib*.so")):
        for line in run("nm", "-D", "--undefined-only", "--with-symbol-versions", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if re.match(r"(__)?cu|p?nccl|nvrtc|nvshmem", name):
                found[name] = version.lstrip("@")
    return found


def belongs(name: str, version: str, prefix: str, library: str) -> bool:
    """Return whether a library must define a function: by the version, or else by the prefix of its name."""
    if version:
        return version == library or (version == "NVSHMEM" and prefix == "nvshmem")
    return re.match(rf"{prefix}[A-Z]", name) is not None


def compile_with_rest(
    library: Path, sources: list[Path], names: Iterable[str], code: int, *flags: str, version: str = ""
) -> None:
    """Compile sources. Add functions that return an error code for the names that the sources do not define."""
    command: list[str | Path] = [*COMPILER, *flags, *sources, "-o", library, f"-Wl,-soname,{library.name}"]
    run(*command)
    defined = {line.split()[-1].partition("@")[0] for line in run("nm", "-D", "--defined-only", library).splitlines()}
    rest = library.with_suffix(".cpp")
    rest.write_text("".join(f'extern "C" int {name}() {{ return {code}; }}\n' for name in names if name not in defined))
    run(*command, rest, *versioned(library, version))
    rest.unlink()


def compile_stub(library: Path, names: Mapping[str, str]) -> None:
    source = library.with_suffix(".cpp")
    source.write_text("".join(f'extern "C" long {name}{BODIES.get(name, "() { return 0; }")}\n' for name in names))
    version = next(filter(None, names.values()), "")
    run(*COMPILER, source, "-o", library, f"-Wl,-soname,{library.name}", *versioned(library, version))
    source.unlink()


def versioned(library: Path, version: str) -> list[str]:
    """Return the linker's flag that gives all symbols of a library one version. torch asks for it by name."""
    if not version:
        return []
    script = library.with_suffix(".map")
    script.write_text(f"{version} {{ global: *; }};\n")
    return [f"-Wl,--version-script={script}"]


def run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    print(f"simulated CUDA libraries: {build(SITE)}")
