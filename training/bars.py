"""Progress on standard error."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gammaray.training.loop import Step


class Bars:
    """A bar for each thing that is done. Off a terminal it is only lines."""

    def __init__(self, hidden: bool = False) -> None:
        self._console = Console(stderr=True, quiet=hidden)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total} {task.fields[said]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def note(self, what: str, done: float, total: float, said: str = "") -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, said=said)
        self._progress.update(self._tasks[what], completed=done, total=total, said=said)

    def step(self, step: Step, steps: int) -> None:
        self.note("steps", step.done * steps, steps, f"loss {step.loss:.3f}")
        if step.figures:
            self._console.print(f"step {step.number}: loss {step.loss:.3f}, held out {told(step.figures)}")


def told(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
