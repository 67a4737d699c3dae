"""Display of a run: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from jax_te.config.internal import require_extra
from jax_te.metrics.throughput import StepWork


@runtime_checkable
class Progress(Protocol):
    """Display of a training loop's progress. `make_progress` returns one that suits the output."""

    def facts(self, rows: Mapping[str, str]) -> None:
        """Show named facts about the run, one line each."""
        ...

    def note(self, text: str) -> None:
        """Show one line."""
        ...

    def text(self, title: str, body: str) -> None:
        """Show a block of text."""
        ...

    def start(self, first: int, steps: int, work: StepWork) -> None:
        """Begin the display; ``first`` of ``steps`` steps, each of this work, are done already."""
        ...

    def update(self, step: int, loss: float, *, line: bool) -> None:
        """Report that a step is done.

        Args:
            step: the step's number.
            loss: the step's loss.
            line: print a line for it if there is no live display.
        """
        ...

    def stop(self) -> None:
        """End the live display, if there is one."""
        ...


class Speed:
    """Tokens per second and time left, measured from the end of the first step on."""

    def __init__(self, first: int, steps: int, work: StepWork):
        self.steps, self.work = steps, work
        self._begin: tuple[int, float] | None = None
        self._now = (first, time.perf_counter())

    def update(self, step: int) -> None:
        """Record that a step ended now."""
        self._now = (step, time.perf_counter())
        # The first step compiles, which may take longer than all others together.
        if self._begin is None:
            self._begin = self._now

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the steps so far, or None before the second."""
        if self._begin is None or self._now[0] <= self._begin[0]:
            return None
        return (self._now[1] - self._begin[1]) / (self._now[0] - self._begin[0])

    @property
    def eta(self) -> str:
        """Time left as ``m:ss`` or ``h:mm:ss``."""
        seconds = self.seconds_per_step
        return "-:--" if seconds is None else clock(seconds * (self.steps - self._now[0]))

    @property
    def rate(self) -> str:
        """Tokens per second as text, with those of a device and the MFU where there are several and it is known."""
        seconds = self.seconds_per_step
        rates = self.work.rates(seconds) if seconds else {}
        text = f"{rates['tokens_per_second']:,.0f} tokens/s" if rates else "… tokens/s"
        if rates and self.work.devices > 1:
            text += f" ({rates['tokens_per_second_per_device']:,.0f} a device)"
        return text + (f"  {rates['mfu']:.1%} MFU" if "mfu" in rates else "")


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, seconds = divmod(round(seconds), 60)  # rounded first: 59.7 s is 1:00, not 0:60
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class PlainProgress:
    """Lines of plain text, for logs and pipes."""

    def __init__(self) -> None:
        self._speed: Speed | None = None

    def facts(self, rows: Mapping[str, str]) -> None:
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            print(f"{name:<{width}}  " + value.replace("\n", "\n" + " " * (width + 2)))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        print(text, flush=True)

    def text(self, title: str, body: str) -> None:
        print(f"--- {title} ---\n{body}\n---", flush=True)

    def start(self, first: int, steps: int, work: StepWork) -> None:
        self._speed = Speed(first, steps, work)

    def update(self, step: int, loss: float, *, line: bool) -> None:
        speed = self._speed
        assert speed is not None
        speed.update(step)
        if line:
            print(f"step {step}/{speed.steps}  loss {loss:.4f}  {speed.rate}  ETA {speed.eta}", flush=True)

    def stop(self) -> None:
        sys.stdout.flush()


class RichProgress:
    """A live bar with step, loss, tokens/s and time left."""

    def __init__(self) -> None:
        # highlight would colour every number and path in the run's own text.
        self._console = require_extra("rich.console").Console(highlight=False)
        self._bar: Any = None
        self._task: Any = None
        self._speed: Speed | None = None

    def facts(self, rows: Mapping[str, str]) -> None:
        grid = require_extra("rich.table").Table.grid(padding=(0, 2))
        grid.add_column(style="bold cyan", no_wrap=True)
        grid.add_column()
        escape = require_extra("rich.markup").escape  # a path may hold brackets, which rich reads as markup
        for name, value in rows.items():
            grid.add_row(name, escape(value))
        self._console.print(grid)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)  # a path may hold brackets, which rich reads as markup

    def text(self, title: str, body: str) -> None:
        plain = require_extra("rich.text").Text(body)
        self._console.print(require_extra("rich.panel").Panel(plain, title=title, title_align="left", expand=False))

    def start(self, first: int, steps: int, work: StepWork) -> None:
        rich = require_extra("rich.progress")
        self._speed = Speed(first, steps, work)
        self._bar = rich.Progress(
            rich.TextColumn("[bold]{task.completed}[/]/{task.total}"),
            rich.BarColumn(bar_width=None),
            rich.TextColumn("{task.fields[status]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first, status="compiling …")
        self._bar.start()

    def update(self, step: int, loss: float, *, line: bool) -> None:
        speed = self._speed
        assert speed is not None
        speed.update(step)
        status = f"loss [bold green]{loss:.4f}[/]  {speed.rate}  ETA {speed.eta}"
        self._bar.update(self._task, completed=step, status=status)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextlib.contextmanager
def counting(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the number of parts that are done and of all, which shows a bar, or ten lines at most."""
    # A log of a thousand parameters has ten lines.
    if not sys.stdout.isatty():

        def line(done: int, count: int) -> None:
            if done * 10 // count > (done - 1) * 10 // count:
                print(f"{title} {done}/{count}", flush=True)

        yield line
        return
    rich = require_extra("rich.progress")
    with rich.Progress(transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, count: bar.update(task, completed=done, total=count)


def make_progress() -> Progress:
    """Return a live display if stdout is a terminal, else plain lines."""
    return RichProgress() if sys.stdout.isatty() else PlainProgress()
