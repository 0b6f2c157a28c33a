"""Our histogram of plain numbers against the client library's own."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from service.telemetry import PICK_BUCKETS_S, Durations


@given(st.lists(st.sampled_from(PICK_BUCKETS_S) | st.floats(0, 1)))
def test_it_is_exported_like_a_histogram(values: list[float]) -> None:
    """The same observations give the same lines, bucket by bucket, values on a bucket's end included."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Durations("d_seconds", "Some time.", PICK_BUCKETS_S)
    ours.register(durations)
    histogram = Histogram("d_seconds", "Some time.", buckets=PICK_BUCKETS_S, registry=theirs)
    for value in values:
        durations.observe(value)
        histogram.observe(value)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected
