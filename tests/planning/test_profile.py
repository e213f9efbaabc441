"""Costs of a step: what is called when, what crosses a cut, what is kept, and how long it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.planning.cost_model import Machine, Segment
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.planning.planner import NothingToCutError, ranked_plans
from lightning_pipeline.planning.profile import Profile, between
from lightning_pipeline.planning.rebalance import rebalance
from lightning_pipeline.planning.restoring import left_as_it_was
from lightning_pipeline.planning.timing import time_step
from lightning_pipeline.planning.tracing import DeviceSpeed, estimate_step, trace_step
from lightning_pipeline.schedules import Simulation, build
from lightning_pipeline.schedules.recorded_costs import Costs

SPEED = DeviceSpeed(flops=1e9, memory_bytes=1e15)
ROWS, WIDTH = 4, 8
SIZE = ROWS * WIDTH * 4


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width, bias=False)
        self.second = nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Net(nn.Module):
    """Four layers, of which the third is large; the first one's output is used again after the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer(64), Layer()])
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.layers[0](x)
        x = self.layers[2](self.layers[1](x))
        return self.head(self.layers[3](x + skip)).square().mean()


def traced(net: nn.Module, x: Tensor | None = None) -> Profile:
    return trace_step(net, net, torch.ones(ROWS, WIDTH) if x is None else x, SPEED)


def best_plan(*args: Any) -> tuple[StagePlan, Simulation]:
    return next(ranked_plans(*args))


def outermost(profile: Profile) -> list[str]:
    """Names of the candidates of which none is inside of another."""
    return [call.name for call in profile.candidates(2.0)]


def by_name(profile: Profile, state_bytes: float = 0.0) -> dict[str, Segment]:
    segments = profile.segments(profile.candidates(2.0)[1:], lambda name: state_bytes)
    return {segment.name: segment for segment in segments}


def test_what_crosses_a_cut_is_what_is_used_behind_it() -> None:
    costs = traced(Net())
    calls = costs.candidates(2.0)
    assert outermost(costs) == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    received = {s.name: s.received for s in costs.segments(calls[1:], lambda name: 0.0)}
    assert received == {"": 0.0, "layers.1": SIZE, "layers.2": 2 * SIZE, "layers.3": SIZE, "head": SIZE}
    assert [s.messages for s in costs.segments(calls[1:], lambda name: 0.0)] == [0, 1, 2, 1, 1]
    assert [s.returned for s in costs.segments(calls[1:], lambda name: 0.0)] == list(received.values())


def test_work_is_counted_where_it_is_done_in_both_directions() -> None:
    costs = traced(Net())
    segments = by_name(costs, state_bytes=4.0)
    product = 2 * ROWS * WIDTH * 64  # of one of the two matrices of the large layer
    assert segments["layers.2"].flops == 2 * product * 3
    assert segments["layers.2"].backward == pytest.approx(2 * segments["layers.2"].forward)
    assert segments["layers.2"].state == {"layers.2.first.weight": 4.0, "layers.2.second.weight": 4.0}
    assert segments[""].flops == 2 * (2 * ROWS * WIDTH * WIDTH) * 3 - 2 * ROWS * WIDTH * WIDTH  # x needs no gradient


def test_an_estimate_on_fake_tensors_counts_the_same() -> None:
    real, x = Net(), torch.ones(ROWS, WIDTH)
    fake = Net().to("meta")
    estimated = estimate_step(fake, fake, x, SPEED)
    assert all(parameter.is_meta for parameter in fake.parameters())
    found, expected = estimated.positions, traced(real).positions
    assert estimated.values == traced(real).values
    assert [replace(position, forward=0, backward=0) for position in found] == [
        replace(position, forward=0, backward=0) for position in expected
    ]
    assert [p.forward for p in found] == pytest.approx([p.forward for p in expected], rel=1e-3)


def test_no_stage_begins_inside_of_a_layer_that_may_be_left_out() -> None:
    costs = traced(Net())
    assert "layers.2.second" in [call.name for call in costs.candidates(0.1)]
    costs = replace(costs, optional={"layers.1"})
    assert [call.name for call in costs.candidates(0.1)] == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]


class Wide(nn.Module):
    """Its forward takes four times what it is given, for a moment, and keeps nothing of that."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.ones(4 * ROWS, WIDTH).sum()
        return x * 2


def test_peaks_are_what_is_alive_at_once() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Wide(), nn.Linear(WIDTH, WIDTH, bias=False))
    positions = trace_step(net, lambda x: net(x).square().sum(), torch.ones(ROWS, WIDTH)).positions
    batch, number = SIZE, 4
    # The batch and the first layer's result, then Wide's moment on top, then what two layers keep and the loss.
    assert [p.forward_peak for p in positions[1:3]] == [2 * batch, 2 * batch + 4 * SIZE + number]
    assert [p.kept for p in positions[1:]] == [batch, 0, 2 * SIZE]
    # Backward of the last layer: batch, its input and output, two gradients and the one of its weight.
    weight = WIDTH * WIDTH * 4
    assert positions[3].backward_peak >= 3 * SIZE + SIZE + weight
    assert positions[1].backward_peak <= batch + SIZE + weight + 3 * number


def test_measuring_leaves_gradients_and_their_hooks_alone() -> None:
    net, called = Net(), []
    weight = net.head.weight
    weight.grad = torch.full_like(weight, 3.0)
    weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter))
    costs = traced(net)
    time_step(net, torch.ones(ROWS, WIDTH), costs, torch.device("cpu"))
    assert not called
    assert weight.grad.eq(3.0).all() and net.layers[0].first.weight.grad is None
    net(torch.ones(ROWS, WIDTH)).backward()
    assert called == [weight]


def test_large_modules_are_replaced_by_those_inside() -> None:
    costs = traced(Net())
    assert [c.name for c in costs.candidates(0.9)] == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert [c.name for c in costs.candidates(0.4)] == [
        "layers.0", "layers.1", "layers.2.first", "layers.2.second", "layers.3", "head",
    ]  # fmt: skip


class Repeats(Net):
    """The second layer is called twice, the first one from within a part that it is not inside of."""

    def __init__(self) -> None:
        super().__init__()
        self.borrows = _Borrows(self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.borrows(x)
        x = self.layers[1](self.layers[2](self.layers[1](x)))
        return self.head(self.layers[3](x)).square().mean()


class _Borrows(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self._layer = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return self._layer[0](self.own(x))


class Backwards(Net):
    """Elements of a list are called last to first."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x).square().mean()


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: nn.Module) -> Tensor:
        return net(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class InFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.head(self.layers[3](_Doubles.apply(x, self.layers[1]))).square().mean()


def test_only_what_a_stage_can_begin_with_is_a_candidate() -> None:
    assert outermost(traced(Repeats())) == ["borrows", "layers.2", "layers.3", "head"]
    # A stage that began with layers.2 would have layers.3 carry that stage as its lowest; one inside of it does not.
    assert outermost(traced(Backwards()))[:3] == ["layers.3", "layers.2.first", "layers.2.second"]
    assert outermost(traced(InFunction())) == ["layers.0", "layers.3", "head"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_is_not_kept_and_is_computed_twice(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            x = checkpoint(self.layers[2], x, use_reentrant=reentrant)
            return self.head(self.layers[3](x)).square().mean()

    plain, spared = by_name(traced(Net())), by_name(traced(Checkpointed()))
    assert spared["layers.2"].kept < plain["layers.2"].kept / 4
    assert spared["layers.2"].flops == plain["layers.2"].flops * 7 / 6  # the last product is not needed again
    assert spared["layers.3"].flops == plain["layers.3"].flops


def test_times_are_of_the_parts_they_are_measured_in() -> None:
    class Slow(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    net = nn.Sequential(Slow(256), Slow(256), Slow(256), nn.Linear(256, 256), nn.Linear(256, 1))
    x = torch.ones(512, 256)

    def step(batch: Tensor) -> Tensor:
        return net(batch).mean()

    costs = time_step(step, x, trace_step(net, step, x), torch.device("cpu"))
    assert costs.is_measured
    segments = [*by_name(costs).values()]
    assert len(segments) == 5
    assert segments[1].forward == segments[2].forward  # of equal structure
    assert 0 < segments[4].forward < segments[1].forward
    assert segments[1].backward > segments[1].forward / 2
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_plan_names_modules_and_a_fault_leads_to_another() -> None:
    costs = traced(Net())
    plan, simulation = best_plan(costs, [build("1f1b", 2, 4)], Machine(), lambda name: 1.0)
    assert list(plan.stage_config.values()) == [1]
    assert plan.step_seconds == simulation.makespan
    seen: list[str] = []

    def fault_of(found: Any) -> str:
        seen.extend(found.stage_config)
        return "" if len(seen) > 1 else "it does not run"

    schedules = [build("1f1b", 2, 4)]
    second, _ = next(ranked_plans(costs, schedules, Machine(), lambda name: 1.0, fault_of=fault_of))
    assert list(second.stage_config) == [seen[1]]
    with pytest.raises(ValueError, match=r"cannot be cut automatically, .*: it never runs"):
        next(ranked_plans(costs, schedules, Machine(), lambda name: 1.0, fault_of=lambda plan: "it never runs"))


def test_other_plans_come_after_the_best_one() -> None:
    costs = traced(_mean_of(*(Layer(width) for width in (37, 26, 37))))
    schedules = [build("1f1b", 2, 16), build("gpipe", 2, 16)]
    plans = [plan for plan, _ in ranked_plans(costs, schedules, Machine(), lambda name: 1.0)]
    assert plans[0] == best_plan(costs, schedules, Machine(), lambda name: 1.0)[0]
    by_size = {plan.schedule: [p.stage_config for p in plans if p.schedule == plan.schedule] for plan in plans}
    assert by_size.keys() == {"1f1b", "gpipe"}
    for cuts in by_size.values():  # inside of a layer and between two, each once
        assert sorted(next(iter(cut)).count(".") > 0 for cut in cuts) == [False, True], cuts


def test_the_next_best_cut_at_the_same_modules_comes_second() -> None:
    costs = traced(_mean_of(*(Layer(width) for width in (30, 30, 1, 30, 30))))
    plans = [plan for plan, _ in ranked_plans(costs, [build("1f1b", 2, 16)], Machine(), lambda name: 1.0, most=2)]
    assert {*plans[0].stage_config, *plans[1].stage_config} == {"2", "3"}  # on either side of the small one


def test_the_same_place_by_another_name_is_no_other_plan() -> None:
    costs = traced(_mean_of(Layer(30), nn.Sequential(Layer(20), Layer(10))))
    plans = [plan for plan, _ in ranked_plans(costs, [build("1f1b", 2, 16)], Machine(), lambda name: 1.0)]
    assert [plan.stage_config for plan in plans] == [{"1": 1}]  # and not also where its first layer begins


@pytest.mark.parametrize(
    ("widths", "is_finer"),
    [
        ((37, 26, 37), True),  # half of the layer between them for each: 9 % faster
        ((33, 1, 33), False),  # next to nothing is
    ],
)
def test_smaller_modules_have_to_be_worth_it(widths: list[int], is_finer: bool) -> None:
    costs = traced(_mean_of(*(Layer(width) for width in widths)))
    plan, _ = best_plan(costs, [build("1f1b", 2, 16)], Machine(), lambda name: 1.0)
    assert (next(iter(plan.stage_config)).count(".") > 0) == is_finer, plan


def _mean_of(*layers: nn.Module) -> nn.Module:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    return Net(*layers)


def test_too_little_memory_says_how_much_is_missing() -> None:
    message = r"for 2 stages, rank \d needs 1.\d* GiB and has 1, so 0.\d* GiB are missing.*use more stages"
    with pytest.raises(ValueError, match=message):
        best_plan(traced(Net()), [build("1f1b", 2, 4)], Machine(memory=2**30), lambda name: 2.0**28)


def test_too_few_places_to_cut() -> None:
    with pytest.raises(NothingToCutError, match=r"Net is to be cut into 20 stages.* use devices=\d+"):
        best_plan(traced(Net()), [build("1f1b", 20, 20)], Machine(), lambda name: 0.0)


def test_costs_between_two_sizes_of_a_micro_batch() -> None:
    small, large = traced(Net(), torch.ones(2, WIDTH)), traced(Net(), torch.ones(6, WIDTH))
    middle = between(small, large, 0.5)
    expected = traced(Net(), torch.ones(4, WIDTH))
    assert [position.kept for position in middle.positions] == [position.kept for position in expected.positions]
    assert middle.seconds == pytest.approx((small.seconds + large.seconds) / 2)


def test_a_slow_stage_gives_a_part_away() -> None:
    net = nn.Sequential(*(Layer() for _ in range(10)))

    def step(batch: Tensor) -> Tensor:
        return net(batch).mean()

    costs = trace_step(net, step, torch.ones(ROWS, WIDTH), SPEED)
    measured = Costs([1.0, 3.0], [1.0, 3.0], [1.0, 3.0], 0.0, [2.0, 6.0])
    found = rebalance(costs, {"5": 1}, measured, build("1f1b", 2, 8))
    assert found.now.stage_config == {"5": 1}
    assert found.moves == [("5", "6", 1, 0)]
    assert found.better.stage_config == {"7": 1}
    assert 0.1 < found.gain < 0.35
    assert "move 5 to 6 from stage 1 to stage 0" in str(found)
    level = Costs([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], 0.0, [2.0, 2.0])
    assert "as good as any" in str(rebalance(costs, {"5": 1}, level, build("1f1b", 2, 8)))
    with pytest.raises(ValueError, match="begins 3 stages"):
        rebalance(costs, {"5": 1, "6": 2}, level, build("1f1b", 2, 8))


def test_what_a_slow_rank_takes_is_quicker_elsewhere() -> None:
    """The second rank is four times as slow, and has eight layers: of ten it should have two."""
    net = nn.Sequential(*(Layer() for _ in range(10)))

    def step(batch: Tensor) -> Tensor:
        return net(batch).mean()

    costs = trace_step(net, step, torch.ones(ROWS, WIDTH), SPEED)
    measured = Costs([2.0, 32.0], [2.0, 32.0], [2.0, 32.0], 0.0, [4.0, 64.0])
    schedule = build("1f1b", 2, 32)
    assert rebalance(costs, {"2": 1}, measured, schedule).better.stage_config == {"6": 1}
    found = rebalance(costs, {"2": 1}, measured, schedule, speeds=(1.0, 0.25))
    assert found.better.stage_config == {"8": 1}
    assert found.now.step_seconds == pytest.approx(rebalance(costs, {"2": 1}, measured, schedule).now.step_seconds)


def test_a_stage_may_begin_inside_of_a_module_that_begins_another() -> None:
    net = nn.Sequential(Layer(), nn.Sequential(*(Layer() for _ in range(4))))

    def step(batch: Tensor) -> Tensor:
        return net(batch).mean()

    costs = trace_step(net, step, torch.ones(ROWS, WIDTH), SPEED)
    level = Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, 0.0, [2.0] * 3)
    found = rebalance(costs, {"1": 1, "1.2": 2}, level, build("1f1b", 3, 8))
    assert [stage.first for stage in found.now.stages[1:]] == ["1", "1.2"]


def test_running_a_step_leaves_the_module_as_it_was() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.total = torch.zeros(())
            self.seen: list[int] = []
            self.tables = {"a": [1]}
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.seen.append(self.count)
            self.tables["b"] = [2]
            self.total += 1
            self.mask = x > 0
            self.register_buffer("made", x.detach())
            return self.norm(x)

    module = Keeps()
    total, seen = module.total, module.seen
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with left_as_it_was(module):
        module(torch.rand(4, WIDTH))
        assert module.count == 1
    assert (module.count, module.seen, module.tables) == (0, [], {"a": [1]})
    assert module.total is total and module.seen is seen and float(total) == 0
    assert not hasattr(module, "mask") and not hasattr(module, "made")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_step_without_a_place_to_cut() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x + 1)

    assert outermost(traced(Twice())) == []
