"""PipelineGradReducer: averages gradients over replicas in buckets, overlapping with the backward of other stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.engine.buckets import Bucket, BucketReduction, into_buckets
from lightning_pipeline.engine.slices import as_slice, local_gradient, local_part
from lightning_pipeline.runtime.errors import PeerFailedError, PipelineTimeoutError
from lightning_pipeline.runtime.failure import waiting_for

NAMED_IN_ERRORS = 4
"""Number of a bucket's parameters that an error message names."""

Gradients = tuple[Tensor | None, ...]


class PipelineGradReducer:
    """Divides gradients by `scale_sense`, sums them over replicas in buckets, and publishes them in ``.grad``.

        gradient = sum over replicas and micro-batches / scale_sense [/ number of replicas]

    Backward has summed over the micro-batches already. By itself it is called as MindSpore's reducer is::

        reducer = PipelineGradReducer(module.parameters())
        reducer()                       # works on .grad
        gradients = reducer(gradients)  # or on gradients in the order of the parameters; .grad is left alone

    Under a schedule, buckets are reduced as soon as the last backward of their parameters is over::

        reducer.begin([of_stage_3, of_stage_1])  # parameters that become final together, the earliest first
        reducer.ready(of_stage_3)                # after the last backward there
        reducer.ready(of_stage_1)
        reducer.finish()                         # the other parameters, and the results

    All replicas must have the same parameters in the same order, the same ones frozen, and pass the same groups to
    `begin`: collectives then run in one order, whichever parameters are ready first. Replicas may differ in which
    parameters have a gradient: a missing one counts as zeros, and stays None if no replica has it. Sums have the same
    bits on all replicas and in every run. A published gradient is a slice of its bucket, in the parameter's memory
    format. Of a parameter that tensor parallelism splits, each rank reduces its slice with the same ranks of the
    other replicas.

    Args:
        parameters: the parameters of this rank's stages, each once. Those that are frozen, or on the meta device, when
            a step begins are left out of it.
        scale_sense: the factor by which the loss was multiplied. A tensor of one element, on the gradients' device or
            the CPU, is read at every step.
        opt_shard: not supported here; ``PipelineStrategy(data_parallel="zero1")`` shards the optimizer state.
        group: the ranks that hold replicas of these parameters; None for the default group, or for one replica if
            `torch.distributed` is not initialised.
        gradients_mean: whether to average over replicas instead of summing.
        bucket_bytes: size of a bucket in bytes; a larger parameter has a bucket of its own.
        names: names of the parameters for error messages.

    Raises:
        ValueError: a parameter is passed twice, `scale_sense` or `bucket_bytes` is not positive, `opt_shard` is True,
            this rank is not in the group, or the number of names differs from that of parameters.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        scale_sense: float | Tensor = 1.0,
        opt_shard: bool | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        gradients_mean: bool = True,
        bucket_bytes: int = 25 << 20,
        names: Sequence[str] | None = None,
    ) -> None:
        if opt_shard:
            raise ValueError(
                "opt_shard=True is not the reducer's, which gives every replica all gradients: leave it out here, and "
                'set PipelineStrategy(data_parallel="zero1") to shard the optimizer state'
            )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        self.parameters = list(parameters)
        self.names = list(names) if names is not None else [f"parameter {n}" for n in range(len(self.parameters))]
        self.scale_sense = _checked_scale(scale_sense)
        self.gradients_mean = gradients_mean
        self.num_replicas = dist.get_world_size(group) if group is not None or dist.is_initialized() else 1
        self.observe: Callable[[int, float, float], None] | None = None
        """Called in `finish` with each bucket's number, start and end (`time.perf_counter`). On CPU the end is that of
        the collective, elsewhere when the host continued."""
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._places = {parameter: place for place, parameter in enumerate(self.parameters)}
        self._layout: list[Any] = []
        self._buckets: list[Bucket] = []
        self._trained: list[int] = []
        self._early: set[int] = set()
        self._step: _Step | None = None
        if len(self._places) < len(self.parameters):
            raise ValueError(
                f"of {len(self.parameters)} parameters only {len(self._places)} are different; pass each once, as "
                f"module.parameters() does"
            )
        if len(self.names) != len(self.parameters):
            raise ValueError(f"got {len(self.names)} names for {len(self.parameters)} parameters; pass one for each")
        if self.num_replicas < 1:
            raise ValueError("this rank is not in the group; pass the one that holds its replicas")

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor | None] | None = None) -> Gradients:
        """Reduce now. Returns the reduced gradients in the order of the parameters, None where no replica has one.

        Args:
            gradients: one for each parameter, frozen or not; they are not modified. None for those in ``.grad``, where
                the results go as well.

        Raises:
            ValueError: there is not one gradient for each parameter, or one is sparse or differs in shape or dtype.
            RuntimeError: the group failed.
        """
        if gradients is None:
            self.begin()
            self.finish()
            return tuple(parameter.grad for parameter in self.parameters)
        if len(gradients) != len(self.parameters):
            raise ValueError(f"got {len(gradients)} gradients for {len(self.parameters)} parameters; pass one for each")
        reduced: list[Tensor | None] = [None] * len(gradients)
        self._new_step([list(range(len(gradients)))], gradients.__getitem__, reduced.__setitem__).finish()
        return tuple(reduced)

    def begin(self, expected: Sequence[Iterable[nn.Parameter]] | None = None) -> None:
        """Start a step, before its first `ready`. An unfinished step is dropped.

        Args:
            expected: groups of parameters that become final together, in the expected order; the same on every replica.
                A different order costs overlap, not correctness. Parameters in no group, or in several, become final at
                `finish`, whatever `ready` says. None for one group of all.
        """
        self._trained = trained = self._places_trained()
        groups = [set(trained)] if expected is None else [self._places_of(group) for group in expected]
        times = Counter(place for group in groups for place in group)
        early = [[place for place in trained if place in group and times[place] == 1] for group in groups]
        self._early = {place for group in early for place in group}
        rest = [place for place in trained if place not in self._early]
        self._step = self._new_step([*early, rest], self._take, self._publish)

    @torch.no_grad()
    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that gradients are final, and start the next buckets that are complete.

        Returns without waiting for other replicas. Until `finish`, ``.grad`` of what has started is None.

        Raises:
            ValueError: a gradient is sparse.
            RuntimeError: no step has begun, or the group failed.
        """
        self._current("ready").ready(self._places_of(parameters) & self._early)

    @torch.no_grad()
    def finish(self) -> None:
        """Start the remaining buckets, wait for all, and put the results in ``.grad``.

        Raises:
            ValueError: a gradient is sparse.
            RuntimeError: no step has begun, the group failed, or a backward added to a gradient that was final.
        """
        step = self._current("finish")
        self._step = None
        step.finish()
        if late := sorted({*self._places_trained()}.difference(self._trained)):  # the step has unfrozen them
            self._new_step([late], self._take, self._publish).finish()

    # -- details ----------------------------------------------------------------------------------------------------

    def _current(self, called: str) -> _Step:
        if self._step is None:
            raise RuntimeError(f"{called}() was called outside of a step: call begin() before it")
        return self._step

    def _places_trained(self) -> list[int]:
        return [place for place, p in enumerate(self.parameters) if p.requires_grad and not p.is_meta]

    def _places_of(self, parameters: Iterable[nn.Parameter]) -> set[int]:
        return {self._places[parameter] for parameter in parameters if parameter in self._places}

    def _take(self, place: int) -> Tensor | None:
        parameter = self.parameters[place]
        gradient, parameter.grad = local_gradient(parameter), None
        return gradient

    def _publish(self, place: int, gradient: Tensor | None) -> None:
        parameter = self.parameters[place]
        if parameter.grad is not None:
            raise RuntimeError(
                f"a backward added to the gradient of {self.names[place]} after ready() said that it was final: call "
                f"ready() after the last backward that uses it, or leave it to finish()"
            )
        parameter.grad = None if gradient is None else as_slice(parameter, gradient)

    def _new_step(
        self,
        groups: list[list[int]],
        take: Callable[[int], Tensor | None],
        publish: Callable[[int, Tensor | None], None],
    ) -> _Step:
        likes = [local_part(parameter) for parameter in self.parameters]
        layout = [[(place, likes[place].shape, likes[place].dtype, likes[place].device) for place in g] for g in groups]
        if layout != self._layout:
            self._layout, self._buckets = layout, []
            for group in groups:
                group = sorted(group, reverse=True)  # backward reaches the last parameters first
                self._buckets += into_buckets(group, [likes[place] for place in group], self._bucket_bytes)
        return _Step(self, take, publish)


class _Step:
    """Reduces the buckets of one step, in the same order on every replica.

    Args:
        take: returns the gradient at a place, and drops its own reference.
        publish: called with a place and its reduced gradient.
    """

    def __init__(
        self,
        reducer: PipelineGradReducer,
        take: Callable[[int], Tensor | None],
        publish: Callable[[int, Tensor | None], None],
    ) -> None:
        self._reducer = reducer
        self._buckets = reducer._buckets
        self._take, self._publish = take, publish
        self._final: set[int] = set()
        self._sums: list[BucketReduction] = []
        self._is_alone = reducer.num_replicas == 1

    def ready(self, places: set[int]) -> None:
        """Start the next buckets, up to the first one that is incomplete."""
        self._final |= places
        while not self._is_alone and len(self._sums) < len(self._buckets):
            bucket = self._buckets[len(self._sums)]
            if not self._final.issuperset(bucket.places):
                break
            self._start(bucket)

    def finish(self) -> None:
        """Start the remaining buckets, wait for all, divide and publish."""
        if self._is_alone:
            self._divide_own()
            return
        for bucket in self._buckets[len(self._sums) :]:
            self._start(bucket)
        for number, started in enumerate(self._sums):
            self._wait(number, started)
            self._divide(started.values)
        for number, started in enumerate(self._sums):
            for place, gradient in zip(started.bucket.places, started.results(), strict=True):
                self._publish(place, gradient)
            if self._reducer.observe is not None:
                self._reducer.observe(number, started.start, started.end)

    def _start(self, bucket: Bucket) -> None:
        gradients = [self._take(place) for place in bucket.places]
        for place, gradient in zip(bucket.places, gradients, strict=True):
            if gradient is not None:
                self._check(place, gradient)
        divisor = self._reducer.num_replicas if self._divides_before(bucket.dtype) else 1
        timed = self._reducer.observe is not None
        with self._summing(len(self._sums), bucket):
            self._sums.append(BucketReduction(bucket, gradients, self._reducer._group, divisor=divisor, timed=timed))

    def _wait(self, number: int, started: BucketReduction) -> None:
        with self._summing(number, started.bucket):
            started.wait()

    @contextmanager
    def _summing(self, number: int, bucket: Bucket) -> Iterator[None]:
        """Name the bucket in errors of its all-reduce."""
        names = [self._reducer.names[place] for place in bucket.places]
        more = f" and {len(names) - NAMED_IN_ERRORS} more" if len(names) > NAMED_IN_ERRORS else ""
        place = f"bucket {number + 1} of {len(self._buckets)} ({', '.join(names[:NAMED_IN_ERRORS])}{more})"
        try:
            with waiting_for(f"the gradients of other replicas, {place}"):
                yield
        except (PeerFailedError, PipelineTimeoutError):
            self._sums.clear()
            raise
        except RuntimeError as error:
            self._sums.clear()
            raise RuntimeError(
                f"the all-reduce of gradients over {self._reducer.num_replicas} replicas failed at {place}: {error}. A "
                f"replica has ended or is late, or has other parameters or other frozen ones than this"
            ) from error

    def _check(self, place: int, gradient: Tensor) -> None:
        parameter, name = local_part(self._reducer.parameters[place]), self._reducer.names[place]
        if gradient.layout != torch.strided:
            raise ValueError(
                f"the gradient of {name} is sparse ({gradient.layout}), and replicas exchange dense ones only: make "
                f"its layer with sparse=False"
            )
        if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            raise ValueError(
                f"the gradient of {name} has shape {tuple(gradient.shape)} and dtype {gradient.dtype}, the parameter "
                f"{tuple(parameter.shape)} and {parameter.dtype}: they must be the same"
            )

    def _divides_before(self, dtype: torch.dtype) -> bool:
        """Whether to divide before the sum: in float16 the sum may overflow where the mean does not."""
        return self._reducer.gradients_mean and dtype == torch.float16

    def _divide(self, sums: Tensor) -> None:
        divisor = self._reducer.scale_sense
        if self._reducer.gradients_mean and not self._divides_before(sums.dtype):
            divisor = divisor * self._reducer.num_replicas
        if not isinstance(divisor, Tensor):
            if divisor != 1:
                sums.div_(divisor)
        elif sums.dtype.itemsize < 4:  # a large loss scale would be infinite in float16
            sums.copy_(sums.float().div_(divisor))
        else:
            sums.div_(divisor)

    def _divide_own(self) -> None:
        """Divide and publish the gradients of a single replica."""
        scale = self._reducer.scale_sense
        for bucket in self._buckets:
            for place in bucket.places:
                gradient = self._take(place)
                if gradient is not None and (isinstance(scale, Tensor) or scale != 1):
                    gradient = gradient.clone()
                    self._divide(gradient)
                self._publish(place, gradient)


def _checked_scale(scale_sense: float | Tensor) -> float | Tensor:
    if isinstance(scale_sense, Tensor):
        if scale_sense.numel() != 1:
            raise ValueError(f"scale_sense must have one element, got a tensor of shape {tuple(scale_sense.shape)}")
        return scale_sense.detach().reshape(())
    if not (scale_sense > 0 and math.isfinite(scale_sense)):
        raise ValueError(f"scale_sense must be positive and finite, got {scale_sense}")
    return scale_sense
