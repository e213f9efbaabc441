"""The strategy's processes: environment, rendezvous, agreement, collectives."""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.partition.placeholder import in_hook
from lightning_pipeline.runtime import backends
from lightning_pipeline.runtime.agreement import SAME, Agreement
from lightning_pipeline.runtime.backends import backend_for
from lightning_pipeline.runtime.failure import FailureNotice, waiting_for
from lightning_pipeline.runtime.log import set_up_log
from lightning_pipeline.runtime.rendezvous import meet
from lightning_pipeline.runtime.replicas import Replicas, all_gather
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.topology import Topology

from .._lightning import (
    NAMES,
    ClusterEnvironment,
    LightningModule,
    ParallelStrategy,
    Precision,
    ReduceOp,
    Trainer,
    rank_zero_only,
)
from ..accelerators.npu import warn_of_unused_npus
from ..accelerators.rank_table_environment import RankTableEnvironment, check_processes, with_rank_table
from ..accelerators.single_npu import fit_to_device
from .dataloading import has_length
from .launcher import ForkLauncher, PipelineLauncher
from .lightning_private import connect_processes, wait_for_data_within
from .summary import is_for_set_up

SETTINGS = (
    "num_nodes",
    "precision",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "num_sanity_val_steps",
    "val_check_interval",
    "check_val_every_n_epoch",
    "overfit_batches",
    "reload_dataloaders_every_n_epochs",
)
"""Arguments of a Trainer that decide what its loops do, and so for what ranks wait."""


def versions() -> dict[str, str]:
    """Of what the ranks' messages depend on."""
    return {
        "lightning_pipeline": version("lightning-pipeline"),
        "lightning": version(NAMES.distribution),
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def settings_of(trainer: Trainer) -> dict[str, str]:
    """What a Trainer was asked to do."""
    assert trainer.state.fn is not None
    # These wait for all ranks; other callbacks may well be there on one rank only.
    together = [callback.state_key for callback in (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks)]
    return {
        "the Trainer's function": str(trainer.state.fn.value),
        # A Trainer that validates by the clock has no val_check_interval.
        **{name: repr(getattr(trainer, name, None)) for name in SETTINGS},
        "callbacks": ", ".join(sorted(together)) or "none",
    }


def parts_of(module: LightningModule) -> dict[str, str]:
    """A model as far as its stages have to fit each other."""
    # Not buffers: a stage may have added some of its own in an earlier run.
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters(remove_duplicate=False)]
    checksum = zlib.crc32(repr(shapes).encode())
    numbers = sum(torch.Size(shape).numel() for _, shape, _ in shapes)
    return {
        "LightningModule": type(module).__qualname__,
        "parameters": f"{len(shapes)} of {numbers} numbers (names, shapes and dtypes: {checksum:08x})",
    }


def training_of(trainer: Trainer) -> dict[str, str]:
    """What a training loop sets out from, a checkpoint that was restored included."""
    schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    return {
        "training batches": str(trainer.num_training_batches),
        "global step": str(trainer.global_step),
        "epoch": str(trainer.current_epoch),
        "optimizers": ", ".join(map(_describe, trainer.optimizers)) or "none",
        "lr schedulers": ", ".join(schedulers) or "none",
        # Lightning's samplers share out the samples by it, and whoever gives ranks seeds of their own does not get what
        # one process would have made of any of them.
        "seed_everything": os.environ.get("PL_GLOBAL_SEED", "not called"),
    }


def evaluation_of(kind: str, num_batches: list[int | float], replica: int) -> dict[str, str]:
    """What an evaluation loop sets out from: batches of each loader. Replicas may have more or fewer of them."""
    return {
        f"{kind} loaders": str(len(num_batches)),
        f"{kind} batches of replica {replica}": ", ".join(map(str, num_batches)),
    }


def _describe(optimizer: Optimizer) -> str:
    numbers = {name: value for name, value in optimizer.defaults.items() if isinstance(value, (int, float, tuple))}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value}' for name, value in numbers.items())})"


EVEN = (
    "give all ranks the same seed, data, checkpoint and optimizers; replicas that read data of their own may need "
    "limit_train_batches"
)


class ProcessStrategy(ParallelStrategy):
    """Starts the processes, connects them, and speaks for all of them at once.

    Args, beside those of any strategy:
        process_group_backend: default: what the device has, hccl for npu, nccl for cuda and gloo for cpu (see
            `backend_for`).
        start_method: how this machine's processes start: "popen" runs the script again for each, "fork" forks this
            process, as a notebook has to.
        timeout: the longest that a collective waits.
    """

    def __init__(
        self,
        *args: Any,
        process_group_backend: str | None,
        start_method: str,
        timeout: timedelta | float,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.start_method = start_method
        self.process_group_backend = process_group_backend
        self.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        self.topology: Topology | None = None
        self.replicas: Replicas | None = None
        """The ranks that run this rank's stages on other samples; None if there are none, or before setup."""
        self.num_nodes = 1
        """Number of machines."""
        self._notice: FailureNotice | None = None
        self._failed = False
        self._agreement: Agreement | None = None
        self._started: set[str] = set()

    @property
    def _module(self) -> LightningModule:
        """The user's, in a run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _is_alone(self) -> bool:
        """Whether there is one process, which can leave most of what a run is to Lightning."""
        return self.num_nodes == 1 and self._parallel_devices is not None and len(self._parallel_devices) == 1

    # SLURM's environment knows of ranks only where srun has started the process; one that is alone need not ask.
    # A hook that asks may do something else on each rank.

    @property
    @override
    def global_rank(self) -> int:
        in_hook.note_rank()
        return 0 if self._is_alone else super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        in_hook.note_rank()
        return 0 if self._is_alone else super().local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self._is_alone else super().node_rank

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        environment = self.cluster_environment
        if environment is not None and self.local_rank >= self.num_processes:
            environment.validate_settings(self.num_processes, self.num_nodes)  # says how many there have to be
        device = self.parallel_devices[self.local_rank]
        return environment.device(device) if isinstance(environment, RankTableEnvironment) else device

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Who started the processes. The Trainer sets it when it has found none or one that it knows."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = with_rank_table(environment)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if self.accelerator is not None:
            fit_to_device(precision_plugin, self.accelerator.name())
        self._precision_plugin = precision_plugin

    @property
    @override
    def world_size(self) -> int:
        """Number of processes; of replicas, to the user's hooks that set data up."""
        size = 1 if self._is_alone else super().world_size
        return self._num_replicas(size) if size > 1 and is_for_set_up("world_size") else size

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine; of replicas, to the user's hooks that set data up."""
        number = len(self.parallel_devices) if self.parallel_devices is not None else 0
        return self._num_replicas_here(number) if number > 1 and is_for_set_up("num_processes") else number

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """Those of this machine's processes; one for each replica, to ``trainer.num_devices`` in such a hook."""
        devices = self._parallel_devices
        if devices is not None and len(devices) > 1 and is_for_set_up("device_ids", "num_devices"):
            return devices[: self._num_replicas_here(len(devices))]
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    def _num_replicas(self, world_size: int) -> int:
        """As many as there will be, as far as it is known before the pipeline is set up."""
        raise NotImplementedError

    def _num_replicas_here(self, num_processes: int) -> int:
        return max(1, num_processes * self._num_replicas(super().world_size) // super().world_size)

    @property
    def is_distributed(self) -> bool:
        """Whether several replicas see different data, so that Lightning shares it out and reduces over them."""
        return self.topology is not None and self.topology.data_parallel_size > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        assert self.topology is not None
        return {"num_replicas": self.topology.data_parallel_size, "rank": self.topology.replica}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.start_method == "fork":
            if not self.cluster_environment.creates_processes_externally:
                self._launcher = ForkLauncher(self, "fork")
            return
        # Whoever starts the processes: the launcher also compares the Trainer's devices and nodes with theirs.
        self._launcher = PipelineLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell an environment that does not know it from others this process's rank; a Trainer asks for it early."""
        if self.cluster_environment is not None and not self._is_alone:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = _NotedRank(self.global_rank)  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._failed = False  # whatever became of an earlier run
        set_up_log(self.global_rank)
        warn_of_unused_npus(self.root_device)
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        table = check_processes(environment, self.root_device)
        store = self._meet(environment) if self.world_size > 1 else None
        self._agreement = None
        if store is not None:
            self._watch_over(store)
        self._started = set()
        trainer = self._module.trainer
        if store is not None:
            self.agree("the start of the run", {**versions(), **settings_of(trainer), **self.settings(), **table})
        if store is None:
            backend_for(self.root_device, self.process_group_backend)  # which may be none
            return
        with store.asked(), waiting_for("all ranks to connect"):
            self._connect(store)

        @contextmanager
        def told() -> Iterator[None]:
            with store.asked(), waiting_for("the rank that prepares data"):
                yield

        wait_for_data_within(trainer, told)

    def _connect(self, store: BoundedStore | None = None) -> None:
        """Make the default process group, which one process needs for folders of checkpoints only."""
        assert self.cluster_environment is not None
        self.process_group_backend = connect_processes(
            self.cluster_environment,
            self.root_device,
            self.process_group_backend,
            self.timeout,
            store=None if store is None else store.torch,
        )

    # -- agreement --------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, str]:
        """What this strategy was asked for, as far as all ranks have to be asked for the same."""
        return {
            "device": self.root_device.type,
            "process_group_backend": str(self.process_group_backend),
            "timeout": str(self.timeout),
        }

    def agree(self, place: str, facts: Mapping[str, str], *, way_out: str = SAME, is_last: bool = False) -> None:
        """Raise on all ranks if they do not come to the same place with the same facts (`Agreement.check`)."""
        if self._agreement is not None and not self._failed:
            self._agreement.check(place, facts, way_out=way_out, is_last=is_last)

    def agree_on_loader(self, dataloader: object) -> None:
        """Before a loop asks for its length, where it has one."""
        stage = self._module.trainer.state.stage
        assert stage is not None
        length = "known" if has_length(dataloader) else "unknown"
        self.agree(f"the {stage.dataloader_prefix}_dataloader", {"length of the data": length})

    @override
    def on_train_start(self) -> None:
        self._agree_once("training", training_of(self._module.trainer), way_out=EVEN)

    def agree_on_evaluation(self, kind: str, num_batches: list[int | float]) -> None:
        """Before its first batch."""
        assert self.topology is not None
        self._agree_once(kind, evaluation_of(kind, num_batches, self.topology.replica))

    def _agree_once(self, kind: str, facts: Mapping[str, str], *, way_out: str = SAME) -> None:
        """At the first start of a loop in a run: a fit starts validation many times, on the same data."""
        if kind not in self._started:
            self._started.add(kind)
            self.agree(f"the start of {kind}", facts, way_out=way_out)

    def _watch_over(self, store: BoundedStore) -> None:
        """From now on, let the ranks know of one another's failures and agree."""
        rank, world_size = self.global_rank, self.world_size
        self._notice = FailureNotice.shared(store.torch, rank=rank, world_size=world_size, timeout=self.timeout)
        self._notice.is_strict = self._notice.is_watching = True
        self._agreement = Agreement(store, rank, world_size, self.timeout, self._notice)
        if isinstance(self._launcher, PipelineLauncher):
            self._launcher.tell_of_failures(self._notice.report)

    def _let_processes_end(self) -> None:
        """From now on, let processes end without a failure."""
        if self._notice is not None:
            self._notice.is_watching = False
        if isinstance(self._launcher, PipelineLauncher):
            self._launcher.end_run()

    def _meet(self, environment: ClusterEnvironment) -> BoundedStore:
        """The store that all processes share, once they are there."""
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            return BoundedStore(store, rank=self.global_rank, limit=self.timeout)
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        way_out = environment.way_out if isinstance(environment, RankTableEnvironment) else ""
        children = self.launcher.children if isinstance(self.launcher, PipelineLauncher) else None
        return meet(self.global_rank, self.world_size, self.timeout, way_out=way_out, started=children)

    # -- collectives ------------------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Over replicas: within a pipeline every rank has the same value."""
        if self.replicas is None or not isinstance(tensor, Tensor):
            return tensor
        with waiting_for("a reduction over replicas"):
            return backends.reduce(tensor, reduce_op, self.replicas.group)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not dist.is_initialized() or self.world_size == 1:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        with waiting_for("a decision of all ranks"):
            dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over replicas: [num_replicas, ...], or the tensor as it is where there is one."""
        if self.replicas is None:
            return tensor
        return all_gather(tensor, self.replicas.group, sync_grads=sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        # One process alone may have had others in an earlier run, whose group is still there.
        if dist.is_initialized() and not (self._failed or self._is_alone):
            with waiting_for(f"all ranks at the barrier {name!r}" if name else "all ranks at a barrier"):
                dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self.world_size == 1 or self._failed:
            return obj
        objects = [obj]
        with waiting_for(f"what rank {src} tells all ranks"):
            dist.broadcast_object_list(objects, src)
        return objects[0]


class _NotedRank(int):
    """A rank of which it is noted that somebody compares it, as `rank_zero_only` does."""

    def __eq__(self, other: object) -> bool:
        in_hook.note_rank()
        return int.__eq__(self, other) is True

    __hash__ = int.__hash__
