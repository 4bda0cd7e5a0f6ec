"""A progress bar where tqdm is installed, and silence where it is not."""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any


class Progress:
    """`update` counts steps, `show` words beside the bar."""

    def __init__(self, bar: Any = None):
        """Wrap a bar of tqdm, or nothing."""
        self.bar = bar

    def __bool__(self) -> bool:
        """Whether there is anything to be seen."""
        return self.bar is not None

    def update(self, count: int) -> None:
        """Count some steps."""
        if self.bar is not None:
            self.bar.update(count)

    def show(self, words: Mapping[str, str]) -> None:
        """Replace the words beside the bar."""
        if self.bar is not None:
            self.bar.set_postfix(words)


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool) -> Iterator[Progress]:
    """A bar of `total` steps for the time of a `with` block."""
    if not wanted or importlib.util.find_spec("tqdm") is None:
        yield Progress()
        return
    from tqdm import tqdm

    with tqdm(total=total) as bar:
        yield Progress(bar)
