"""Sizes of steps that a GPU is ready for: graphs, or packed launches."""

from __future__ import annotations

from functools import partial

import numpy as np

from pegainfer.ops.tensor import Kind
from pegainfer.runner.buckets import Bucket, Buckets
from pegainfer.runner.parts import Parts, Work
from pegainfer.runtime.cuda.graph import Graph

NO_ROWS = np.zeros(0, np.int64)
PLAIN = {"J": 0, "E": 0, "U": 0, "O": 0}  # sampling without biases, masks and banned tokens


class ReadySizes:
    """Makes each bucket ready once, the likeliest first. A bucket that is made ready runs once, on padding.

    Its graph is made then only with `at_once`. Most sizes never occur: a graph that is not made costs no
    memory, and the first step that would replay it some milliseconds.
    """

    def __init__(self, parts: Parts, buckets: Buckets) -> None:
        self.buckets = buckets
        self._parts = parts
        self._coming = buckets.all(
            adapted=parts.adapted is not None
        )  # not ready yet, but for some that a step made ready
        self._ready: set[Bucket] = set()
        self._batches: set[int] = set()  # rows that the sampler is ready for
        # A decode step with its sampling, by rows and whether one of them has an adapter.
        self._whole: dict[tuple[int, bool], Graph] = {}

    def __len__(self) -> int:
        return len(self._ready)

    def make_next(self, at_once: bool) -> bool:
        """False where all are ready."""
        for bucket in self._coming:
            if bucket not in self._ready:
                self.make(bucket, at_once)
                return True
        return False

    def make(self, bucket: Bucket, at_once: bool = False) -> None:
        """Empties the batch on the device, if the bucket is one of decode steps and was not ready."""
        if bucket not in self._ready:
            with self._parts.stream.cold():
                self._make(bucket, at_once)

    def _make(self, bucket: Bucket, at_once: bool) -> None:
        make_inputs = None
        forward = self._parts.forward_of(bucket.adapted)
        if bucket.decode:
            # It runs once, on the batch on the device, whose positions it would advance and whose cache it
            # would write.
            self._parts.state.enter_batch(NO_ROWS, NO_ROWS, NO_ROWS)
            self.make_sampler(bucket.rows)
            sampling = {"L": bucket.rows, **PLAIN}
            counters = [self._parts.sampler.input_address(n, sampling) for n in ("history_lens", "draws")]
            make_inputs = partial(
                self._parts.state.decode_inputs, bucket.rows, counters=counters,
                inputs=frozenset(t.name for t in forward.program.tensors(Kind.INPUT)),
            )  # fmt: skip
        forward.capture(
            bucket.env, bucket.decode, graph=bucket.graph, at_once=at_once, make_inputs=make_inputs
        )
        self._ready.add(bucket)

    def make_sampler(self, rows: int) -> None:
        """Makes the sampler ready for that many rows without biases, masks and banned tokens."""
        batch = self.buckets.batch(rows)
        if batch not in self._batches:
            with self._parts.stream.cold():
                self._parts.sampler.capture({"L": batch, **PLAIN}, False)
            self._batches.add(batch)

    def joined(self, rows: int, adapted: bool, place: tuple[int, int, int]) -> Graph:
        """A decode step and its sampling in one graph. Making it takes milliseconds, once for each size.

        Args:
            rows: of a step that is ready.
            adapted: whether one of them has an adapter.
            place: where drawn tokens are written, see ResidentState.publish; always the same.
        """
        rows = self.buckets.batch(rows)
        key = rows, adapted
        if key not in self._whole:
            env, sampling = Bucket(rows, rows, True).env, {"L": rows, **PLAIN}
            drawn = self._parts.sampler.outputs(sampling)
            work: list[Work] = [
                *self._parts.forward_of(adapted).launches(env, True),
                *self._parts.sampler.launches(sampling),
                self._parts.state.publish(drawn["tokens"].address, drawn["status"].address, rows, place),
            ]

            def body() -> None:
                for launch in work:
                    launch(self._parts.stream)

            self._whole[key] = Graph(self._parts.stream, body, f"decode and sampling of {rows} rows")
        return self._whole[key]
