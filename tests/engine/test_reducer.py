"""PipelineGradReducer on real replicas: what one process computes on the whole batch, whatever is ready first."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.engine.reducer import PipelineGradReducer
from lightning_pipeline.recording.split_backward import SplitBackward
from tests.launching import PATIENCE_S, launch

WORLD = 4
TIMEOUT = timedelta(seconds=PATIENCE_S)
Check = Callable[["Replica"], None]


class Replica:
    """A process as one of the replicas: all four, or the two of its pair."""

    def __init__(self) -> None:
        self.rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("gloo", timeout=TIMEOUT, rank=self.rank, world_size=WORLD)
        pairs = [dist.new_group([first, first + 1], timeout=TIMEOUT) for first in (0, 2)]
        self.pair = pairs[self.rank // 2]
        self.place = self.rank % 2
        self.store = dist.distributed_c10d._get_default_store()

    def groups(self) -> list[dist.ProcessGroup]:
        return [self.pair, dist.group.WORLD]

    def meet(self) -> None:
        dist.barrier()


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17, bias=False), nn.Tanh(), nn.Linear(17, 3)]
    return nn.Sequential(*layers).to(dtype)


def samples(num_replicas: int) -> Tensor:
    return torch.randn(8 * num_replicas, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expected_gradients(num_replicas: int, *, mean: bool) -> list[Tensor]:
    """Of one process on all samples."""
    model = network()
    losses = model(samples(num_replicas)).square().sum(1)
    (losses.mean() if mean else losses.sum()).backward()
    return gradients_of(model)


def accumulate(model: nn.Module, group: dist.ProcessGroup, *, mean: bool, scale: float = 1.0) -> None:
    """This replica's backwards, on four micro-batches."""
    own = samples(dist.get_world_size(group)).chunk(dist.get_world_size(group))[dist.get_rank(group)]
    for microbatch in own.chunk(4):
        losses = model(microbatch).square().sum(1)
        (scale * (losses.mean() / 4 if mean else losses.sum())).backward()


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def parameters_of(*values: Tensor) -> list[nn.Parameter]:
    """A parameter like each of the values, which is its gradient."""
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value
    return parameters


# -- checks, each on all processes -------------------------------------------------------------------------------------


def equals_one_process(replica: Replica) -> None:
    for group in replica.groups():
        for mean in (True, False):
            for scale in (1.0, 1024.0, torch.tensor([3.0])):
                model = network()
                reducer = PipelineGradReducer(
                    model.parameters(), scale, group=group, gradients_mean=mean, bucket_bytes=1000
                )
                accumulate(model, group, mean=mean, scale=float(scale))
                reducer()
                close(gradients_of(model), expected_gradients(dist.get_world_size(group), mean=mean))


def same_bits_everywhere_and_again(replica: Replica) -> None:
    found = []
    for _ in range(2):
        value = torch.randn(10_001, generator=torch.Generator().manual_seed(replica.rank))
        PipelineGradReducer(own := parameters_of(value))()
        found.append(own[0].grad)
    every = [torch.empty(10_001) for _ in range(WORLD)]
    dist.all_gather(every, found[1])
    assert all(torch.equal(other, found[0]) for other in every)


def mean_of_two_is_half_the_sum(replica: Replica) -> None:
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(place)) for place in range(2)]
    (own,) = parameters_of(values[replica.place])
    PipelineGradReducer([own], group=replica.pair)()
    assert torch.equal(own.grad, (values[0] + values[1]) / 2)


def scale_tensor_is_read_at_every_step(replica: Replica) -> None:
    scale = torch.ones(())
    (own,) = parameters_of(torch.full((3,), 8.0))
    reducer = PipelineGradReducer([own], scale, group=replica.pair)
    for factor in (2.0, 4.0):
        own.grad = torch.full((3,), 8.0)
        scale.fill_(factor)
        reducer()
        assert own.grad.tolist() == [8.0 / factor] * 3


def unused_parameters(replica: Replica) -> None:
    one, nowhere, everywhere = (nn.Parameter(torch.zeros(5)) for _ in range(3))
    for bucket_bytes in (1, 1 << 20):
        reducer = PipelineGradReducer([one, nowhere, everywhere], gradients_mean=False, bucket_bytes=bucket_bytes)
        one.grad = torch.full((5,), 7.0) if replica.rank == 1 else None
        everywhere.grad = torch.full((5,), 1.0)
        reducer()
        assert nowhere.grad is None
        assert one.grad is not None and one.grad.tolist() == [7.0] * 5
        assert everywhere.grad.tolist() == [4.0] * 5
        one.grad = None
    alone = nn.Parameter(torch.zeros(5))  # none in the whole bucket
    assert PipelineGradReducer([alone])() == (None,)
    alone.grad = torch.zeros(5)  # a gradient of zeros is one
    assert PipelineGradReducer([alone])()[0] is not None


def frozen_midway(replica: Replica) -> None:
    for group in replica.groups():
        model = network()
        reducer = PipelineGradReducer(model.parameters(), group=group, bucket_bytes=1000)
        accumulate(model, group, mean=True)
        reducer()
        stale = torch.full_like(model[2].weight, float(replica.rank))
        model.zero_grad()
        model[2].weight.requires_grad_(False)
        model[2].weight.grad = stale
        accumulate(model, group, mean=True)
        reducer()
        assert model[2].weight.grad is stale and stale.eq(replica.rank).all()
        model[2].weight.grad = None
        wanted = expected_gradients(dist.get_world_size(group), mean=True)
        close(gradients_of(model), [*wanted[:2], *wanted[3:]])
        model.zero_grad()
        model[2].weight.requires_grad_(True)
        accumulate(model, group, mean=True)
        reducer()
        close(gradients_of(model), wanted)


def dtypes_and_memory_formats(replica: Replica) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64, torch.float32]
    values = [torch.full((3, 2), float(replica.place), dtype=dtype) for dtype in dtypes]
    values.append(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last))
    values.append(torch.tensor(4.0 * replica.place))
    values.append(torch.empty(0, 3))
    values.append(torch.full((3, 2), float(replica.place)))
    own = parameters_of(*values)
    other = [torch.empty_like(values[6]) for _ in range(2)]
    dist.all_gather(other, values[6], group=replica.pair)
    own[9].grad = torch.full((2, 3), float(replica.place)).t()  # of another memory format than its parameter
    PipelineGradReducer(own, group=replica.pair, bucket_bytes=64)()
    for parameter, value in zip(own, values, strict=True):
        assert parameter.grad.dtype == value.dtype and parameter.grad.stride() == value.stride()
    assert all(parameter.grad.eq(0.5).all() for parameter in [*own[:6], own[9]])
    assert torch.equal(own[6].grad, (other[0] + other[1]) / 2)
    assert own[7].grad == 2.0


def range_of_float16(replica: Replica) -> None:
    (own,) = parameters_of(torch.full((3,), 40_000.0, dtype=torch.float16))
    PipelineGradReducer([own], group=replica.pair)()
    assert own.grad.tolist() == [40_000.0] * 3
    PipelineGradReducer([own], torch.tensor([80_000.0]), group=replica.pair)()
    assert own.grad.tolist() == [0.5] * 3


def any_order_of_ready(replica: Replica) -> None:
    values = [torch.arange(1.0, size + 1.0) * (replica.rank + 1) for size in range(1, 13)]
    sums = [torch.arange(1.0, size + 1.0) * 10 for size in range(1, 13)]
    own = parameters_of(*values)
    reducer = PipelineGradReducer(own, gradients_mean=False, bucket_bytes=40)
    for groups in (None, [own[8:], own[:4]], [own[4:], [*own[:4], own[11]]], []):
        for parameter, value in zip(own, values, strict=True):
            parameter.grad = value.clone()
        reducer.begin(groups)
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(replica.rank)).tolist()
        for place in order[: 12 - 3 * replica.rank]:  # some are never said to be ready
            reducer.ready([own[place]])
            reducer.ready([own[place]])
        reducer.finish()
        assert all(torch.equal(parameter.grad, total) for parameter, total in zip(own, sums, strict=True))


def bucket_waits_for_all_of_its_parameters(replica: Replica) -> None:
    first, second = own = parameters_of(*torch.ones(2, 4))
    reducer = PipelineGradReducer(own, group=replica.pair)
    reducer.begin()
    reducer.ready([second])
    first.grad += 1.0
    assert second.grad is not None
    reducer.ready([first])
    assert first.grad is second.grad is None
    reducer.finish()
    assert first.grad.tolist() == [2.0] * 4


def shared_by_groups_waits_for_finish(replica: Replica) -> None:
    first, both, second = own = parameters_of(*torch.ones(3, 4))
    reducer = PipelineGradReducer(own, group=replica.pair)
    reducer.begin([[second, both], [both, first]])
    reducer.ready([second, both])
    assert second.grad is None and both.grad is not None
    both.grad += 2.0  # by another stage's backward
    reducer.ready([both, first])
    assert first.grad is None
    reducer.finish()
    assert [parameter.grad[0].item() for parameter in own] == [1.0, 3.0, 1.0]


def ready_does_not_wait_and_finish_does(replica: Replica) -> None:
    early, late = own = parameters_of(torch.ones(1000), torch.ones(1000))
    reducer = PipelineGradReducer(own, group=replica.pair)
    key = f"ready returned {replica.rank // 2}"
    reducer.begin([[early], [late]])
    if replica.place == 0:
        reducer.ready([early])
        replica.store.set(key, "")
        began = time.perf_counter()
        reducer.finish()
        assert time.perf_counter() - began > 0.15
    else:
        replica.store.wait([key], TIMEOUT)
        time.sleep(0.2)
        reducer.finish()


def buckets_travel_between_ready_and_finish(replica: Replica) -> None:
    early, late = own = parameters_of(torch.ones(100_000), torch.ones(1000))
    spans: dict[int, tuple[float, float]] = {}
    reducer = PipelineGradReducer(own)
    reducer.observe = lambda number, start, end: spans.update({number: (start, end)})
    replica.meet()
    reducer.begin([[early], [late]])
    reducer.ready([early])
    time.sleep(0.5)
    computed = time.perf_counter()
    reducer.ready([late])
    reducer.finish()
    assert spans[0][0] < spans[0][1] < computed < spans[1][0] < spans[1][1]


def split_backwards(replica: Replica) -> None:
    """The gradients of a stage's weights come in W, those of what it received in I."""
    for group in replica.groups():
        model, num_replicas = network(), dist.get_world_size(group)
        stages = [model[:2], model[2:]]
        reducer = PipelineGradReducer(model.parameters(), group=group, bucket_bytes=1000)
        reducer.begin([list(stages[1].parameters()), list(stages[0].parameters())])
        weights = []
        for microbatch in samples(num_replicas).chunk(num_replicas)[dist.get_rank(group)].chunk(4):
            hidden = stages[0](microbatch)
            received = hidden.detach().requires_grad_()
            loss = stages[1](received).square().sum(1).mean() / 4
            split = SplitBackward([loss], [None], [torch.autograd.graph.get_gradient_edge(received)])
            hidden.backward(split.input_gradients()[0])
            weights.append(split)
        for split in weights:
            split.weight_gradients()
        reducer.ready(stages[1].parameters())
        reducer.finish()
        close(gradients_of(model), expected_gradients(num_replicas, mean=True))


def called_on_gradients(replica: Replica) -> None:
    own = [nn.Parameter(torch.zeros(4), requires_grad=place != 1) for place in range(3)]
    given = [torch.full((4,), float(replica.place)), torch.full((4,), 2.0), None]
    reducer = PipelineGradReducer(own, 2.0, group=replica.pair)
    first, frozen, unused = reducer(given)
    assert first.tolist() == [0.25] * 4 and frozen.tolist() == [1.0] * 4 and unused is None
    assert given[0].eq(replica.place).all() and all(parameter.grad is None for parameter in own)
    with pytest.raises(ValueError, match="got 2 gradients for 3 parameters"):
        reducer(given[:2])
    with pytest.raises(ValueError, match=r"parameter 2 has shape \(5,\)"):
        reducer([None, None, torch.zeros(5)])


def errors(replica: Replica) -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of tok\.weight is sparse .*sparse=False"):
        PipelineGradReducer(embedding.parameters(), names=["tok.weight"])()
    (own,) = parameters_of(torch.ones(2))
    reducer = PipelineGradReducer([own], names=["fc.bias"])
    reducer.begin()
    reducer.ready([own])
    own.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"gradient of fc\.bias after ready\(\)"):
        reducer.finish()


def replica_that_does_not_come(replica: Replica) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if replica.rank == 0:
        own = parameters_of(*torch.ones(6, 2))
        reducer = PipelineGradReducer(own, group=group, names=[f"layer{n}.bias" for n in range(6)], bucket_bytes=40)
        reducer.begin()
        reducer.ready(own)
        with pytest.raises(RuntimeError, match=r"2 replicas failed at bucket 1 of 2 \(layer5\.bias, .* and 1 more\)"):
            reducer.finish()
        with pytest.raises(RuntimeError, match=r"call begin\(\) before"):
            reducer.finish()
    replica.meet()


CHECKS: list[Check] = [
    equals_one_process,
    same_bits_everywhere_and_again,
    mean_of_two_is_half_the_sum,
    scale_tensor_is_read_at_every_step,
    unused_parameters,
    frozen_midway,
    dtypes_and_memory_formats,
    range_of_float16,
    any_order_of_ready,
    bucket_waits_for_all_of_its_parameters,
    shared_by_groups_waits_for_finish,
    ready_does_not_wait_and_finish_does,
    buckets_travel_between_ready_and_finish,
    split_backwards,
    called_on_gradients,
    errors,
    replica_that_does_not_come,
]


def run_checks() -> dict[str, str]:
    """Errors by check. After one, the others are not tried, as the replicas may be apart."""
    replica = Replica()
    found: dict[str, Any] = {}
    for check in CHECKS:
        try:
            check(replica)
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
            break
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return launch(run_checks, world=WORLD)


@pytest.mark.multiprocess
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_replicas(check: str, outcomes: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcomes):
        assert found.get(check, "not reached") == "", f"rank {rank}: {found.get(check, 'not reached')}"


# -- one process -------------------------------------------------------------------------------------------------------


def test_without_replicas() -> None:
    own, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    own.grad = given = torch.full((3,), 8.0)
    reducer = PipelineGradReducer([own, unused])
    assert reducer.num_replicas == 1
    reducer.begin([[own]])
    reducer.ready([own])
    reducer.finish()
    assert own.grad is given and unused.grad is None
    PipelineGradReducer([own, unused], torch.tensor(4.0))()
    assert own.grad.tolist() == [2.0] * 3
    (result,) = PipelineGradReducer([own], 2.0)([given])
    assert result.tolist() == [4.0] * 3 and given.tolist() == [8.0] * 3


def test_refused_arguments() -> None:
    own = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"PipelineStrategy\(data_parallel=\"zero1\"\)"):
        PipelineGradReducer([own], opt_shard=True)
    PipelineGradReducer([own], 1.0, False)
    with pytest.raises(ValueError, match="of 2 parameters only 1 are different"):
        PipelineGradReducer([own, own])
    with pytest.raises(ValueError, match="scale_sense must be positive and finite, got 0"):
        PipelineGradReducer([own], 0.0)
    with pytest.raises(ValueError, match=r"one element, got a tensor of shape \(2,\)"):
        PipelineGradReducer([own], torch.ones(2))
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        PipelineGradReducer([own], bucket_bytes=0)
    with pytest.raises(ValueError, match="2 names for 1 parameters"):
        PipelineGradReducer([own], names=["a", "b"])
    for call in (PipelineGradReducer([own]).finish, lambda: PipelineGradReducer([own]).ready([own])):
        with pytest.raises(RuntimeError, match="outside of a step"):
            call()
