"""What planning does while it takes long: a bar on a terminal after a second, a line in a log every ten seconds.

    with shown("planning train_step"):
        stage("mesh (x=4, y=2)")
        stage("rewritten programs", 3, 32)

on a terminal shows, and takes away when it is done,

    planning train_step ━━━━╺━━━━━━━━━━━━━━━ 0:00:07 rewritten programs, 3 of 32

All of it goes to stderr, and nothing of it into the plan. Only the first process of several shows anything, and one
plan at a time; `UNITY_JAX_PROGRESS=0` silences it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

BAR_AFTER = 1.0
"""Seconds until a terminal shows a bar."""

LINE_EVERY = 10.0
"""Seconds from line to line in a log."""

TICK = 0.25
"""Seconds from look to look."""


class Reporter:
    """Shows one title and the stage that was set last.

    **Arguments:** `stream`: where to; `clock`: seconds, from any time on; `terminal`: whether a bar can be drawn there
    (default: what the stream says).
    """

    def __init__(
        self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic, terminal: bool | None = None
    ) -> None:
        self.title, self.stream, self.clock = title, stream, clock
        self.terminal = stream.isatty() if terminal is None else terminal
        self.start = self.told = clock()
        self.now: tuple[str, int, int | None] = ("", 0, None)  # read by another thread: replaced as one
        self.bar: Progress | None = None

    def tick(self) -> None:
        """Look at the clock, and show what is due."""
        now = self.clock()
        if self.terminal:
            if now - self.start >= BAR_AFTER:
                self._draw()
        elif now - self.told >= LINE_EVERY:
            self.told = now
            self.stream.write(f"unity_jax: {self.title}, {now - self.start:.0f} s: {self._text()}\n")
            self.stream.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()

    def _text(self) -> str:
        text, done, total = self.now
        return text if total is None else f"{text}, {done} of {total}"

    def _draw(self) -> None:
        _, done, total = self.now
        if self.bar is None:
            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(20),
                TimeElapsedColumn(),
                TextColumn("{task.fields[at]}", markup=False),
                console=Console(file=self.stream, force_terminal=True),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                get_time=self.clock,
            )
            self.bar.add_task(self.title, total=None, at="")
            self.bar.tasks[0].start_time = self.start
            self.bar.start()
        (task,) = self.bar.task_ids
        self.bar.update(task, total=total, completed=done, at=self._text())
        self.bar.refresh()


_current: ContextVar[Reporter | None] = ContextVar("unity_jax_progress", default=None)
_busy = threading.Lock()


def stage(text: str, done: int = 0, total: int | None = None) -> None:
    """Say what is done now, and how much of it; nothing where nothing is shown."""
    reporter = _current.get()
    if reporter is not None:
        reporter.now = (text, done, total)


def tell(text: str) -> None:
    """One line to stderr, about what a user should know though all goes well."""
    if _is_wanted():
        with contextlib.suppress(OSError, ValueError):
            print(f"unity_jax: {text}", file=sys.stderr)


@contextlib.contextmanager
def shown(title: str) -> Iterator[None]:
    """Show the stages within, if they take long. A second one at the same time shows nothing."""
    if not _is_wanted() or not _busy.acquire(blocking=False):
        yield
        return
    reporter, ended = Reporter(title, sys.stderr), threading.Event()
    ticking = threading.Thread(target=_tick, args=(reporter, ended), name="unity_jax progress", daemon=True)
    token = _current.set(reporter)
    try:
        ticking.start()
        yield
    finally:
        _current.reset(token)
        ended.set()
        ticking.join()
        _busy.release()


def _tick(reporter: Reporter, ended: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream that is closed costs the bar, not the plan
        while not ended.wait(TICK):
            reporter.tick()
    with contextlib.suppress(OSError, ValueError):
        reporter.close()


def _is_wanted() -> bool:
    if os.environ.get("UNITY_JAX_PROGRESS") == "0" or sys.stderr is None:
        return False
    return not jax.distributed.is_initialized() or jax.process_index() == 0
