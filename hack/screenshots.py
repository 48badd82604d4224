#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""screenshots.py FOLDER: pictures of redirector's commands, as SVG, from real runs on a terminal.

It starts the demo with both pods enrolled, runs each command on a pseudo-terminal, and has what they write there drawn. What differs
from run to run and says nothing is not hidden: addresses, times and program ids are those of the run. It needs root, bin/demo and
bin/redirector, and Debian's python3-rich.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 132, 50
REDIRECTOR = "bin/redirector"


def on_a_terminal(argv):
    """Runs a command on a terminal, and returns what it has written there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    env.pop("NO_COLOR", None)
    proc = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    out = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody has it open any more
            break
        if not chunk:
            break
        out += chunk
    os.close(ours)
    if proc.wait() != 0:
        sys.exit(f"{' '.join(argv)} ended with {proc.returncode}:\n{out.decode()}")
    return out.decode().replace("\r\n", "\n").rstrip("\n")


def draw(folder, name, shown, text):
    """Draws a command line and what came of it."""
    lines = text.split("\n")
    width = max(60, *(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines), len(shown) + 2)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False)
    console.print(Text("# " + shown, style="bold"))
    console.print(Text.from_ansi(text), soft_wrap=True)
    file = os.path.join(folder, name + ".svg")
    # The id would change with each run, and with it every line.
    console.save_svg(file, title="redirector " + name, unique_id="redirector-" + name)
    # One of the fonts' sources: the pictures are to load nothing.
    with open(file, encoding="utf-8") as f:
        svg = re.sub(r"\s*@font-face \{.*?\}\n", "\n", f.read(), flags=re.DOTALL)
    with open(file, "w", encoding="utf-8") as f:
        f.write(svg)
    print(file)


class Demo:
    """The demo, held while both of its pods are enrolled."""

    def __enter__(self):
        self.proc = subprocess.Popen(["bin/demo", "-hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        found = {}
        for line in self.proc.stdout:
            if match := re.match(r"\s*([DC])=(\S+)", line):
                found[match[1]] = match[2]
            if "tail -f" in line:
                break
        else:
            sys.exit("the demo has ended early")
        self.dir, self.cgroup = found["D"], found["C"]
        threading.Thread(target=self.proc.stdout.read, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.proc.stdin.write("\n")
        self.proc.stdin.close()
        if self.proc.wait() != 0:
            sys.exit(f"the demo has ended with {self.proc.returncode}")

    def visit(self, client, url):
        """Has a process of a pod fetch a page."""
        subprocess.run(
            ["sh", "-c", f"echo $$ >{self.cgroup}/cgroup.procs; exec nsenter --net={self.dir}/netns/{client} curl -s -m 5 {url}"],
            stdout=subprocess.DEVNULL, check=True)


def main(folder):
    os.makedirs(folder, exist_ok=True)
    with Demo() as demo:
        run_dir = ["--run-dir", demo.dir + "/run"]
        addresses = subprocess.run(["nsenter", f"--net={demo.dir}/netns/web", "hostname", "-I"], capture_output=True, text=True, check=True)
        web = addresses.stdout.split()[0]
        for words in (["status"], ["pods"], ["pod", "web"], ["verify"]):
            name = words[0]
            draw(folder, name, "redirector " + " ".join(words), on_a_terminal([REDIRECTOR, *words, *run_dir]))

        def traffic():
            time.sleep(1)
            for _ in range(3):
                demo.visit("client", f"http://{web}/")
                time.sleep(0.3)

        visits = threading.Thread(target=traffic)
        visits.start()
        text = on_a_terminal([REDIRECTOR, "monitor", "--for", "3s", *run_dir])
        visits.join()
        draw(folder, "monitor", "redirector monitor --for 3s", text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
