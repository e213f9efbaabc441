"""A strategy's processes: how they are started, numbered and connected, and their collectives."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_pipeline import _torch
from lightning_pipeline.engine.collectives import over_replicas_in_hooks
from lightning_pipeline.engine.replica_collectives import World, all_reduced
from lightning_pipeline.engine.types_told import types_told
from lightning_pipeline.partition import users_code
from lightning_pipeline.partition.replaced_functions import functions_as_torch_has_them
from lightning_pipeline.partition.users_code import asks_for_rank, is_asked_in_run
from lightning_pipeline.runtime import backends
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.log import set_up_log
from lightning_pipeline.runtime.rendezvous import meet
from lightning_pipeline.runtime.replicas import Replicas, all_gather
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.topology import ReplicaRank, Topology

from .._lightning import ClusterEnvironment, LightningModule, ParallelStrategy, Precision, ReduceOp, rank_zero_only
from ..accelerators.npu import warn_of_unused_npus
from ..accelerators.rank_table_environment import RankTableEnvironment, check_processes, with_rank_table
from ..accelerators.single_npu import fit_to_device
from .launcher import ForkLauncher, PipelineLauncher
from .lightning_private import asks_for_log_dir, connect_processes, is_before_setup, wait_for_data_within
from .peers import Peers, settings_of, versions
from .rank_zero import NotedRank, begin_run, note_rank


class ProcessStrategy(ParallelStrategy):
    """Starts processes, connects them, and runs collectives over them, whatever each of them computes.

    Args, beside those of any strategy:
        process_group_backend: default: what the device has (see `backend_for`).
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
        self.num_nodes = 1
        self.peers = Peers()
        self.told_replicas: int | None = None
        """The number of replicas that hooks were told before set-up, in this run."""
        self._in_run = ExitStack()
        self._is_preparing = False  # code that runs is `prepare_data`, for which the other ranks wait
        self._log_dirs: dict[Any, Any] = {}  # that the first rank has told in this run, by this rank's own

    @property
    def module(self) -> LightningModule:
        """The user's module, during a run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def is_single_process(self) -> bool:
        """Whether there is one process, which leaves most of a run to Lightning."""
        return self.num_nodes == 1 and self._parallel_devices is not None and len(self._parallel_devices) == 1

    # SLURM's environment knows ranks only if srun has started the process, so a single process does not ask it.
    # A hook that asks for its rank may act differently on each rank, so that is noted.

    @property
    @override
    def global_rank(self) -> int:
        note_rank(asks_for_rank())
        if self.is_single_process:
            return 0
        rank = super().global_rank
        return ReplicaRank(self.topology_in_run().replica, rank) if is_asked_in_run("global_rank") else rank

    @property
    @override
    def local_rank(self) -> int:
        note_rank(asks_for_rank())
        return 0 if self.is_single_process else super().local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self.is_single_process else super().node_rank

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
        """The launcher's environment. The Trainer sets the one that it has detected."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = with_rank_table(environment)

    @property
    def environment(self) -> ClusterEnvironment:
        """The same, once the Trainer has set it."""
        assert self.cluster_environment is not None
        return self.cluster_environment

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if self.accelerator is not None:
            fit_to_device(precision_plugin, self.accelerator.name())
        self._precision_plugin = precision_plugin

    # Steps and hooks of the user's see the number of replicas instead of processes (`is_asked_in_run`): with it they
    # divide, and share samples out.

    @property
    @override
    def world_size(self) -> int:
        """Number of processes; of replicas, to the user's steps and hooks."""
        size = 1 if self.is_single_process else super().world_size
        return self._told_replicas() if size > 1 and is_asked_in_run("world_size") else size

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine; of replicas, to the user's steps and hooks."""
        number = len(self.parallel_devices) if self.parallel_devices is not None else 0
        return self._num_replicas_here(number) if number > 1 and is_asked_in_run("num_processes") else number

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """Those of this machine's processes; one for each replica, to ``trainer.num_devices`` in such a hook."""
        devices = self._parallel_devices
        if devices is not None and len(devices) > 1 and is_asked_in_run("device_ids", "num_devices"):
            return devices[: self._num_replicas_here(len(devices))]
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    @abstractmethod
    def replicas(self) -> Replicas | None:
        """The ranks that run the same as this one on other samples; None if there are none, or before set-up."""

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """Which rank holds which stage; None before set-up."""

    @abstractmethod
    def topology_in_run(self) -> Topology:
        """The topology as far as known: before set-up, it follows from what is known of the stages then."""

    def _told_replicas(self) -> int:
        """The number of replicas, which is not to change once the user's code knows it."""
        self.told_replicas = self.topology_in_run().data_parallel_size
        return self.told_replicas

    def _num_replicas_here(self, num_processes: int) -> int:
        return max(1, num_processes * self._told_replicas() // super().world_size)

    @override
    def _configure_launcher(self) -> None:
        if self.start_method == "fork":
            if not self.environment.creates_processes_externally:
                self._launcher = ForkLauncher(self, "fork")
            return
        # Also where somebody else starts the processes: it checks the Trainer's devices and nodes.
        self._launcher = PipelineLauncher(self.environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment this process's rank, which Trainers ask for early, if it does not know it."""
        if self.cluster_environment is not None and not self.is_single_process:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = NotedRank(self.global_rank)  # type: ignore[attr-defined]

    # -- connection -------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.peers = Peers()  # whatever became of an earlier run
        self._in_run.close()
        self._log_dirs.clear()
        begin_run(self.module.trainer)
        self._in_run.enter_context(functions_as_torch_has_them())
        self._in_run.enter_context(types_told())
        set_up_log(self.global_rank)
        warn_of_unused_npus(self.root_device)
        self.set_world_ranks()
        table = check_processes(self.environment, self.root_device)
        if self.world_size == 1:
            backends.backend_for(self.root_device, self.process_group_backend)  # raises where there is none
            return
        store = self._meet()
        self.peers.watch(store, self.global_rank, self.world_size, self.timeout)
        if isinstance(self._launcher, PipelineLauncher):
            self._launcher.tell_of_failures(self.peers.notice.report)
        trainer = self.module.trainer
        self.peers.agree("the start of the run", {**versions(), **settings_of(trainer), **self.settings(), **table})
        with store.asked(), waiting_for("all ranks to connect"):
            self.connect_processes(store)

        @contextmanager
        def waiting_for_data() -> Iterator[None]:
            with store.asked(), waiting_for("the rank that prepares data"):
                yield

        @contextmanager
        def preparing() -> Iterator[None]:
            self._is_preparing = True
            try:
                yield
            finally:
                self._is_preparing = False

        wait_for_data_within(trainer, waiting_for_data, preparing)
        self._in_run.enter_context(over_replicas_in_hooks(self._world_in_hooks))

    def _world_in_hooks(self) -> World | None:
        topology = self.topology_in_run()
        if topology.num_stages == 1:
            return None
        if self.topology is None:
            self._told_replicas()
        return World(topology, self.replicas, is_known=self.topology is not None)

    def _meet(self) -> BoundedStore:
        """The store that all processes share, once all of them have come."""
        if dist.is_initialized():
            store = _torch.default_store()
            return BoundedStore(store, rank=self.global_rank, limit=self.timeout)
        environment = self.environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        way_out = environment.way_out if isinstance(environment, RankTableEnvironment) else ""
        children = self.launcher.children if isinstance(self.launcher, PipelineLauncher) else None
        return meet(self.global_rank, self.world_size, self.timeout, way_out=way_out, started=children)

    def connect_processes(self, store: BoundedStore | None = None) -> None:
        """Make the default process group, which one process needs for folders of checkpoints only."""
        self.process_group_backend = connect_processes(
            self.environment,
            self.root_device,
            self.process_group_backend,
            self.timeout,
            store=None if store is None else store.torch,
        )

    def settings(self) -> dict[str, str]:
        """The options that all ranks must agree on."""
        return {
            "device": self.root_device.type,
            "process_group_backend": str(self.process_group_backend),
            "timeout": str(self.timeout),
        }

    def let_processes_end(self) -> None:
        """At the end of a run: from now on a process may end without having failed."""
        self._in_run.close()
        self.peers.notice.is_watching = False
        if isinstance(self._launcher, PipelineLauncher):
            self._launcher.end_run()
        self.peers.agree("the end of the run", {}, is_last=True)

    # -- collectives ------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether several replicas see different data, so that Lightning shares it out and reduces over them."""
        return self.replicas is not None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Over replicas: within a pipeline every rank has the same value."""
        if self.replicas is None or not isinstance(tensor, Tensor):
            return tensor
        if users_code.step_runs():  # a stage may not have computed it yet
            assert self.topology is not None
            return all_reduced(World(self.topology, self.replicas), tensor, reduce_op)
        with waiting_for("a reduction over replicas"):
            return backends.reduce(tensor, reduce_op, self.replicas.group)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over replicas: [num_replicas, ...], or the tensor as it is where there is one."""
        if self.replicas is None:
            return tensor
        return all_gather(tensor, self.replicas.group, sync_grads=sync_grads)

    @property
    def _waits_for_all(self) -> bool:
        """Whether there are other ranks at the same call."""
        # A single process may have had others in an earlier run, whose group is still there.
        return dist.is_initialized() and not (self.is_single_process or self._is_preparing)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._waits_for_all:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        with waiting_for("a decision of all ranks", is_for_all=True):
            dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._waits_for_all and not self.peers.has_failed:
            what = f"all ranks at the barrier {name!r}" if name else "all ranks at a barrier"
            with waiting_for(what, is_for_all=True):
                dist.barrier()
            if is_before_setup(name):
                _ = self.module.trainer.log_dir  # it is known from here on, where the first rank may ask for it alone

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self._waits_for_all or self.peers.has_failed:
            return obj
        is_log_dir = asks_for_log_dir()
        if is_log_dir and obj in self._log_dirs:
            return self._log_dirs[obj]
        objects = [obj]
        with waiting_for(f"what rank {src} tells all ranks", is_for_all=True):
            dist.broadcast_object_list(objects, src)
        if is_log_dir:
            self._log_dirs[obj] = objects[0]
        return objects[0]
