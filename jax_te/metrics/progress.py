"""Display of a run: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from jax_te._validation import require_extra
from jax_te.metrics.throughput import Speed


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

    def start(self, first: int, steps: int, speed: Speed) -> None:
        """Begin the display; ``first`` of ``steps`` steps are done already.

        Args:
            first: steps done before.
            steps: steps of the whole run.
            speed: speed that the loop measures, for tokens per second and the time left.
        """
        ...

    def update(self, step: int, values: Mapping[str, float], *, line: bool) -> None:
        """Report that a step is done.

        Args:
            step: the step's number.
            values: the step's metrics, of which the ``"loss"`` is shown, and those of `make_train_step` of experts.
            line: whether to print a line for it if there is no live display.
        """
        ...

    def stop(self) -> None:
        """End the live display, if there is one."""
        ...


def _started(speed: Speed | None) -> Speed:
    """Return the speed that `Progress.start` was given; raise ValueError if it was not called."""
    if speed is None:
        raise ValueError("update shows the steps of a run that has begun; call start(first, steps, speed) before it")
    return speed


def _status(speed: Speed, steps: int) -> str:
    """Return tokens per second, those of a device and the MFU where known, and the time left of so many steps."""
    seconds, left = speed.seconds_per_step, speed.seconds_left(steps)
    if not seconds or left is None:
        return "… tokens/s  ETA -:--"
    rates = speed.work.rates(seconds)
    text = f"{rates['tokens_per_second']:,.0f} tokens/s"
    if speed.work.devices > 1:
        text += f" ({rates['tokens_per_second_per_device']:,.0f} a device)"
    mfu = f"  {rates['mfu']:.1%} MFU" if "mfu" in rates else ""
    return f"{text}{mfu}  ETA {clock(left)}"


def _experts(values: Mapping[str, float]) -> list[str]:
    """Return the routers' losses, the largest load over the mean one, and the share of dropped choices if any were."""
    overall = {name.removeprefix("experts/"): value for name, value in values.items() if name.startswith("experts/")}
    shown = [f"{name} {value:.4f}" for name, value in overall.items() if name.endswith("_loss") and "/" not in name]
    if "max_over_mean_load" in overall:
        shown.append(f"max/mean load {overall['max_over_mean_load']:.2f}")
    if overall.get("dropped_share"):
        shown.append(f"dropped {overall['dropped_share']:.2%}")
    return shown


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
        self._steps = 0

    def facts(self, rows: Mapping[str, str]) -> None:
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            print(f"{name:<{width}}  " + value.replace("\n", "\n" + " " * (width + 2)))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        print(text, flush=True)

    def text(self, title: str, body: str) -> None:
        print(f"--- {title} ---\n{body}\n---", flush=True)

    def start(self, first: int, steps: int, speed: Speed) -> None:
        del first
        self._steps, self._speed = steps, speed

    def update(self, step: int, values: Mapping[str, float], *, line: bool) -> None:
        speed = _started(self._speed)
        if line:
            shown = [f"loss {values['loss']:.4f}", *_experts(values), _status(speed, self._steps - step)]
            print(f"step {step}/{self._steps}  {'  '.join(shown)}", flush=True)

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
        self._steps = 0

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

    def start(self, first: int, steps: int, speed: Speed) -> None:
        rich = require_extra("rich.progress")
        self._steps, self._speed = steps, speed
        self._bar = rich.Progress(
            rich.TextColumn("[bold]{task.completed}[/]/{task.total}"),
            rich.BarColumn(bar_width=None),
            rich.TextColumn("{task.fields[status]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first, status="compiling …")
        self._bar.start()

    def update(self, step: int, values: Mapping[str, float], *, line: bool) -> None:
        speed = _started(self._speed)
        loss = f"loss [bold green]{values['loss']:.4f}[/]"
        shown = [loss, *_experts(values), _status(speed, self._steps - step)]
        self._bar.update(self._task, completed=step, status="  ".join(shown))

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
