"""Build, keep and enter a virtual environment that holds the real engine on a CPU.

The tests and the demo run the engine's own code, but the engine's requirement list wants several GB of CUDA
packages and a GPU. What its DeepSeek-V4 model needs on a CPU is far less, and has to be put together with
care: a CPU build of torch first, then sglang and torchvision without their requirements, then the one thing
that torchvision misses beside a CPU torch. That takes minutes, too long for each call. So:

    engine_venv.py [--engine VERSION] [MODULE ARG …]

makes sure that the environment exists and is current, then becomes ``python -m MODULE ARG …`` in it. The
environment is a tree of its own, ``<venv>.d/<key>``, where the key is a hash of all that went in; its stamp
is written last, and only then does the link ``<venv>`` turn to it. A build that was interrupted has no stamp:
it is never taken as done and never spoils the one before. Another engine version is a folder that goes in
front on PYTHONPATH.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "engine-cpu.txt"
ENGINE = "0.5.23"
TORCHVISION = "0.28.0"
STAMP = "complete.stamp"
SHIM = Path(__file__).with_name("torchvision_beside_cpu_torch.py")

CHECK = """
import torch, torchvision, sglang.srt.plugins, sglang.srt.models.deepseek_v4
from importlib.metadata import version
print("sglang", version("sglang"), "| torch", torch.__version__, "| torchvision", torchvision.__version__)
"""


class BuildError(RuntimeError):
    """A step failed; the message says which and what to do."""


def say(text: str) -> None:
    print(f"engine venv: {text}", file=sys.stderr, flush=True)


def digest(*parts: object) -> str:
    """A short key of ``parts``."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def stamped(tree: Path, key: str) -> bool:
    """Whether ``tree`` was built to the end from what ``key`` stands for."""
    try:
        return (tree / STAMP).read_text() == key
    except OSError:
        return False


def clean_environment() -> dict[str, str]:
    """The environment without what would let another Python's packages in."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER")
    return {name: value for name, value in os.environ.items() if name not in foreign}


def attempt(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it prints."""
    return subprocess.run([str(c) for c in command], env=clean_environment(), cwd=ROOT, text=True, capture_output=True)


def step(what: str, *command: object) -> str:
    """Run one step of a build; what it prints is shown only if it fails.

    Raises:
        BuildError: if it fails.
    """
    start = time.monotonic()
    done = attempt(*command)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise BuildError(f"{what}: failed, see above")
    say(f"{what} ({time.monotonic() - start:.0f} s)")
    return done.stdout.strip()


def pip(python: Path, *arguments: object) -> list[object]:
    quiet = ("--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")
    return [python, "-m", "pip", "install", *quiet, *arguments]


class Environment:
    """The environment at one place. Does not lock: see ``locked``."""

    def __init__(self, link: Path) -> None:
        self.link = link
        self.trees = link.with_name(link.name + ".d")

    @property
    def python(self) -> Path:
        return self.link / "bin" / "python"

    @property
    def key(self) -> str:
        """Stands for what is installed, from what, by which Python, where."""
        sources = [path.read_text() for path in (REQUIREMENTS, Path(__file__), SHIM)]
        return digest(*sources, sys.version, sys.base_prefix, platform.machine(), self.link)

    def make_current(self) -> None:
        """Build the environment unless it is there and complete, and install the project in it.

        Raises:
            BuildError: if a step fails; the environment that was there before is still there then.
        """
        tree = self.trees / self.key
        if self.link.exists() and not self.link.is_symlink():
            raise BuildError(f"{self.link} is not this script's: remove it or set DSV4_GRAPHS_VENV")
        if not stamped(tree, self.key):
            say(f"building {tree} (a few minutes, about 2.5 GB; kept for next time)")
            shutil.rmtree(tree, ignore_errors=True)
            self.build(tree)
            (tree / STAMP).write_text(self.key)
        if not self.link.is_symlink() or self.link.resolve() != tree.resolve():
            self.turn_link_to(tree)
        self.install_project(tree)

    def build(self, tree: Path) -> None:
        """Fill ``tree`` with a virtual environment, the engine, and what both need."""
        python = tree / "bin" / "python"
        if attempt(sys.executable, "-c", "import ensurepip").returncode:
            raise BuildError(f"{sys.executable} makes no environments with pip: install its venv package")
        step("create", sys.executable, "-m", "venv", tree)
        self.install_torch(python)
        step("install the engine's requirements", *pip(python, "-r", REQUIREMENTS))
        pinned = (f"torchvision=={TORCHVISION}", f"sglang=={ENGINE}")
        step("install sglang " + ENGINE, *pip(python, "--no-deps", *pinned))
        self.mend_torchvision(python)
        say(step("import the engine's DeepSeek-V4 model", python, "-c", CHECK))

    def install_torch(self, python: Path) -> None:
        """Install the pinned torch, its CPU build if pip can find one."""
        pinned = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
        start = time.monotonic()
        if attempt(*pip(python, pinned + "+cpu")).returncode == 0:
            say(f"install {pinned}, CPU build ({time.monotonic() - start:.0f} s)")
            return
        if sys.platform == "linux" and platform.machine() == "x86_64":
            say("pip sees no CPU build of torch; the default one brings several GB of CUDA packages.")
            say("To avoid them, set PIP_EXTRA_INDEX_URL to the CPU index that PyTorch's install page names.")
        step(f"install {pinned}", *pip(python, pinned))

    def mend_torchvision(self, python: Path) -> None:
        """Define torchvision's operators where its extension cannot (see ``SHIM``)."""
        if attempt(python, "-c", "import torchvision").returncode == 0:
            return
        where = attempt(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        shutil.copy(SHIM, where)
        (Path(where) / f"{SHIM.stem}.pth").write_text(f"import {SHIM.stem}\n")

    def turn_link_to(self, tree: Path) -> None:
        """Point the link at ``tree`` in one step and remove the trees that it replaces."""
        fresh = self.link.with_name(self.link.name + ".new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(tree, target_is_directory=True)
        fresh.replace(self.link)
        for other in self.trees.iterdir():
            if other != tree:
                shutil.rmtree(other, ignore_errors=True)

    def install_project(self, tree: Path) -> None:
        """Install this checkout, editable, with its tools, unless its metadata is what was installed last."""
        record, key = tree / "project.stamp", digest((ROOT / "pyproject.toml").read_text(), ROOT)
        if record.exists() and record.read_text() == key:
            return
        record.unlink(missing_ok=True)
        held = ("--constraint", REQUIREMENTS)
        python = tree / "bin" / "python"
        # The build backend first, so that the project itself needs no download of its own.
        step("install the build backend", *pip(python, *held, "hatchling>=1.27", "editables>=0.5"))
        editable = ("--no-build-isolation", "--editable", f"{ROOT}[dev,bench]")
        step("install the project and its tools", *pip(python, *held, *editable))
        record.write_text(key)

    def overlay(self, version: str) -> Path:
        """The folder that holds engine ``version`` alone, made if need be."""
        folder = self.link.parent / f"engine-{version}"
        key = digest(version, sys.version, folder)
        if not stamped(folder, key):
            unfinished = folder.with_name(folder.name + ".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            arguments = ("--no-deps", "--target", unfinished, f"sglang=={version}")
            step(f"install sglang {version} beside it", *pip(self.python, *arguments))
            (unfinished / STAMP).write_text(key)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        return folder


@contextlib.contextmanager
def locked(link: Path) -> Iterator[None]:
    """Let one process at a time build at ``link``."""
    link.parent.mkdir(parents=True, exist_ok=True)
    with link.with_name(link.name + ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def enter(environment: Environment, overlay: Path | None, command: list[str]) -> None:
    """Replace this process by ``python -m command`` in the environment."""
    environ = clean_environment()
    environ["VIRTUAL_ENV"] = str(environment.link)
    environ["PATH"] = f"{environment.python.parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    if overlay is not None:
        environ["PYTHONPATH"] = str(overlay)
    os.execve(environment.python, [str(environment.python), "-m", *command], environ)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--engine", default=ENGINE, metavar="VERSION", help=f"default {ENGINE}")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="MODULE ARG …", help="run as python -m")
    options = parser.parse_args()
    place = os.environ.get("DSV4_GRAPHS_VENV") or ROOT / ".cache" / "engine-venv"
    environment = Environment(Path(place).expanduser().absolute())
    try:
        with locked(environment.link):
            environment.make_current()
            overlay = environment.overlay(options.engine) if options.engine != ENGINE else None
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.command:
        enter(environment, overlay, options.command)
    say(f"ready: {environment.link}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
