"""Programs that are compiled while others run."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any


class Ahead:
    """Compiles in two threads what is called later, on cores that a search leaves free.

    >>> import equinox as eqx
    >>> double = eqx.filter_jit(lambda x: 2 * x)
    >>> with Ahead() as ahead:
    ...     ahead(double, 1.0)
    ...     ahead.join()

    What fails to compile is an error where it is called, not here.
    """

    def __enter__(self) -> "Ahead":
        self._threads = ThreadPoolExecutor(2)
        self._begun: list[Future] = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def __call__(self, function: Any, *arguments: Any) -> None:
        """Compile an `equinox.filter_jit` for arguments of these shapes."""
        self._begun.append(self._threads.submit(lambda: function.lower(*arguments).compile()))

    def join(self) -> None:
        """Wait for all, so that no call compiles the same again."""
        wait(self._begun)
