"""Run commands at the same time, show what each printed in one piece, and say how each ended.

The test runs of the two engine versions keep one core busy each and share nothing, so beside each other they take as
long as the longer one. Their lines must not mix, and neither may hide the other's failure. So:

    side_by_side.py TITLE COMMAND [TITLE COMMAND …]

runs every COMMAND (words as a shell would split them, without a shell). The first prints as it goes; the output of the
others follows when all have ended. A command that fails ends none of the others. The last lines give each one's result,
and the exit status is 0 only if every command's was.

Standard library only.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

POLL_S = 0.1
# How long a command may take to end when it is told to.
GRACE_S = 10


def say(text: str) -> None:
    print(text, flush=True)


@dataclass
class Run:
    """A command under way. ``output`` keeps what it prints, None if that goes straight to ours."""

    title: str
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    start: float
    seconds: float = 0.0

    @classmethod
    def begin(cls, title: str, command: str, *, keep: bool) -> Run:
        """Start ``command``, in our process group, so that whoever ends that ends it, too."""
        output = tempfile.TemporaryFile() if keep else None  # noqa: SIM115  (closed in ``show``)
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if keep else None,
        )
        return cls(title, process, output, time.monotonic())

    def ended(self) -> bool:
        if self.process.poll() is None:
            self.seconds = time.monotonic() - self.start
            return False
        return True

    def end(self) -> None:
        """End it, first in a way that lets it clean up."""
        for signum in (signal.SIGINT, signal.SIGKILL):
            self.process.send_signal(signum)
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            return

    def show(self) -> None:
        """Print what was kept."""
        if self.output is None:
            return
        say(f"== {self.title}")
        self.output.seek(0)
        sys.stdout.buffer.write(self.output.read())
        sys.stdout.flush()
        self.output.close()

    @property
    def result(self) -> str:
        code = self.process.returncode
        return f"== {self.title}: {f'FAILED, exit status {code}' if code else 'passed'} ({self.seconds:.0f} s)"


def run(commands: Sequence[tuple[str, str]]) -> int:
    """Run every (title, command) and return the exit status."""
    runs: list[Run] = []
    say(f"== {commands[0][0]}")
    for title, _ in commands[1:]:
        say(f"== {title}: at the same time, shown when all have ended")
    try:
        for title, command in commands:
            runs.append(Run.begin(title, command, keep=bool(runs)))
        while [r for r in runs if not r.ended()]:
            time.sleep(POLL_S)
    finally:
        for r in runs:
            r.end()
            r.show()
    for r in runs:
        say(r.result)
    return int(any(r.process.returncode for r in runs))


def main(arguments: Sequence[str]) -> int:
    if not arguments or len(arguments) % 2:
        print(__doc__, file=sys.stderr)
        return 2

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    # Sent by whoever limits the time of all this: what was printed until then must not be lost.
    signal.signal(signal.SIGTERM, stop)
    try:
        return run(list(zip(arguments[::2], arguments[1::2], strict=True)))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
