"""The shadows follow a sample when they cannot keep up, and all again when they clearly could."""

from collections.abc import Iterator

from engine_patch.load import BUSY, HOLD_S, LAG_S, Load


class Clocked(Load):
    """A load with a time of its own."""

    now = 0.0

    def ticks(self, seconds: int, lag_s: float, busy: float, blocks: int) -> Iterator[float]:
        """Take a batch a second."""
        for _ in range(seconds):
            self.now += 1.0
            yield self.took(self.now, lag_s, busy, blocks, False)


def test_sampling_starts_when_behind_and_ends_when_calm() -> None:
    """Late, busy or losing shadows follow a sample; all again only after HOLD_S and at a much lower need."""
    for lag_s, busy in ((LAG_S + 1, 0.0), (0.0, BUSY + 0.1)):
        assert list(Clocked(0.0).ticks(25, lag_s, busy, 100_000))[-1] == 0.05
    assert Clocked(0.0).took(1.0, 0.0, 0.0, 0, True) == 0.05
    load = Clocked(0.0)
    assert set(load.ticks(100, 0.1, 0.3, 300_000)) == {1.0}
    list(load.ticks(20, LAG_S + 1, 0.3, 300_000))
    assert set(load.ticks(600, 0.1, 0.02, 300_000)) == {0.05}  # all would need 0.3 of a core
    load = Clocked(0.0)
    list(load.ticks(100, 0.1, 0.3, 300_000))
    list(load.ticks(5, LAG_S + 1, 0.3, 300_000))
    calm = list(load.ticks(600, 0.1, 0.01, 100_000))
    assert calm[-1] == 1.0
    assert calm.index(1.0) >= HOLD_S - 20
