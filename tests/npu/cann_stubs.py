"""Stand-ins for the libraries of CANN, so that `import torch_npu` works where CANN is not.

    python tests/npu/cann_stubs.py FOLDER

The shared objects of the torch_npu wheel want symbols of libraries that only CANN brings. Which
ones is read from the wheel itself, so another version gets other stubs: what its objects leave
undefined and no library here defines becomes a C function that returns NULL, all of them in
`libascendcl.so`; the other libraries are empty. No operator can run on these, and none is meant
to: they let the real schemas, Meta kernels and Python of torch_npu be imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

# Functions whose result is used during the import, where NULL would not do.
RESULTS = {"aclrtGetSocName": ("const char *", '"Ascend910B1"')}


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def run(*command: object, **options: object) -> str:
    text = [str(word) for word in command]
    return subprocess.run(text, check=True, capture_output=True, text=True, **options).stdout  # type: ignore[call-overload,no-any-return]


def symbols(library: Path, kind: str) -> set[tuple[str, str]]:
    """Name and type of each dynamic symbol that is `defined` or `undefined`."""
    lines = run("nm", "-D", "-P", f"--{kind}-only", library).splitlines()
    return {(line.split()[0].split("@")[0], line.split()[1]) for line in lines}


def dependencies(libraries: list[Path], search: str) -> tuple[set[Path], set[str]]:
    """Libraries that the loader finds for `libraries`, and names of those that it does not."""
    found, missing = set(), set()
    for library in libraries:
        environment = os.environ | {"LD_LIBRARY_PATH": search}
        for line in run("ldd", library, env=environment).splitlines():
            name, _, place = line.strip().partition(" => ")
            path = (place or name).split(" (")[0]
            if place == "not found":
                missing.add(name)
            elif path.startswith("/"):
                found.add(Path(path))
    return found, missing


def build(folder: Path) -> None:
    """Write and compile the stubs that the installed torch_npu needs into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, torch_libraries = package("torch_npu"), package("torch") / "lib"
    objects = [*(wheel / "lib").glob("*.so"), *wheel.glob("_C*.so")]
    python = Path(sys.executable).resolve()
    found, missing = dependencies([*objects, python], f"{torch_libraries}:{wheel / 'lib'}")
    wanted = {name for each in objects for name, kind in symbols(each, "undefined") if kind == "U"}
    given = {name for each in [*objects, *found, python] for name, _ in symbols(each, "defined")}
    source = ["#include <stddef.h>"]
    for name in sorted(wanted - given):
        kind, value = RESULTS.get(name, ("void *", "NULL"))
        source.append(f"{kind}{name}(void) {{ return {value}; }}")
    (folder / "ascendcl.c").write_text("\n".join(source) + "\n")
    (folder / "empty.c").write_text("")
    for name in sorted(missing):
        stub = "ascendcl.c" if name == "libascendcl.so" else "empty.c"
        run("cc", "-shared", "-fPIC", "-w", "-o", folder / name, folder / stub)
    print(f"{len(source) - 1} symbols, {len(missing)} libraries in {folder}")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
