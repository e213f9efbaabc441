"""All that this package imports from Lightning, under whichever of its two names is in use.

Classes for a Trainer exist once for each name: the files of `accelerators`, `checkpoint` and `strategy` are imported a
second time below `lightning_pipeline.pytorch_lightning`. So they import this file and one another relatively, and
nothing else names Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_pipeline._names import PYTORCH_LIGHTNING, installed

NAMES = PYTORCH_LIGHTNING if __package__ == PYTORCH_LIGHTNING.floor else installed()[0]

if TYPE_CHECKING:
    import lightning.fabric as _fabric
    import lightning.pytorch as _pytorch
    import lightning.pytorch.overrides.distributed as _overrides
    import lightning.pytorch.plugins.io.wrapper as _wrapper
    import lightning.pytorch.trainer.connectors.accelerator_connector as _connector
    from lightning.pytorch.trainer.connectors import data_connector
else:
    _pytorch, _fabric = import_module(NAMES.pytorch), import_module(NAMES.fabric)
    _connector = import_module(f"{NAMES.pytorch}.trainer.connectors.accelerator_connector")
    _overrides = import_module(f"{NAMES.pytorch}.overrides.distributed")
    _wrapper = import_module(f"{NAMES.pytorch}.plugins.io.wrapper")
    data_connector = import_module(f"{NAMES.pytorch}.trainer.connectors.data_connector")

Callback = _pytorch.Callback
LightningDataModule = _pytorch.LightningDataModule
LightningModule = _pytorch.LightningModule
Trainer = _pytorch.Trainer
Accelerator = _pytorch.accelerators.Accelerator
AcceleratorRegistry = _pytorch.accelerators.AcceleratorRegistry
BaseFinetuning = _pytorch.callbacks.BaseFinetuning
BasePredictionWriter = _pytorch.callbacks.BasePredictionWriter
BatchSizeFinder = _pytorch.callbacks.BatchSizeFinder
ModelPruning = _pytorch.callbacks.ModelPruning
ProgressBar = _pytorch.callbacks.ProgressBar
_configure_optimizers = _pytorch.core.optimizer._configure_optimizers
LightningOptimizer = _pytorch.core.optimizer.LightningOptimizer
DummyLogger = _pytorch.loggers.logger.DummyLogger
Logger = _pytorch.loggers.Logger
ClosureResult = _pytorch.loops.optimization.automatic.ClosureResult
_IndexBatchSamplerWrapper = _overrides._IndexBatchSamplerWrapper
AsyncCheckpointIO = _pytorch.plugins.AsyncCheckpointIO
DoublePrecision = _pytorch.plugins.DoublePrecision
HalfPrecision = _pytorch.plugins.HalfPrecision
LayerSync = _pytorch.plugins.LayerSync
MixedPrecision = _pytorch.plugins.MixedPrecision
Precision = _pytorch.plugins.Precision
_WrappingCheckpointIO = _wrapper._WrappingCheckpointIO
ThroughputMonitor = _pytorch.callbacks.ThroughputMonitor
PyTorchProfiler = _pytorch.profilers.PyTorchProfiler
DDPStrategy = _pytorch.strategies.DDPStrategy
ParallelStrategy = _pytorch.strategies.ParallelStrategy
SingleDeviceStrategy = _pytorch.strategies.SingleDeviceStrategy
Strategy = _pytorch.strategies.Strategy
StrategyRegistry = _pytorch.strategies.StrategyRegistry
_MultiProcessingLauncher = _pytorch.strategies.launchers.multiprocessing._MultiProcessingLauncher
_SubprocessScriptLauncher = _pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher
call = _pytorch.trainer.call
compile_of = _pytorch.utilities.compile
trainer_of = _pytorch.trainer.trainer
_AcceleratorConnector = _connector._AcceleratorConnector
TrainerFn = _pytorch.trainer.states.TrainerFn
TrainerStatus = _pytorch.trainer.states.TrainerStatus
MisconfigurationException = _fabric.utilities.exceptions.MisconfigurationException
SIGTERMException = _pytorch.utilities.exceptions.SIGTERMException
is_overridden = _pytorch.utilities.model_helpers.is_overridden
rank_zero_info = _pytorch.utilities.rank_zero.rank_zero_info
rank_zero_only = _pytorch.utilities.rank_zero.rank_zero_only
rank_zero_warn = _pytorch.utilities.rank_zero.rank_zero_warn
is_param_in_hook_signature = _pytorch.utilities.signature_utils.is_param_in_hook_signature
CheckpointIO = _fabric.plugins.CheckpointIO
ClusterEnvironment = _fabric.plugins.ClusterEnvironment
TorchCheckpointIO = _fabric.plugins.TorchCheckpointIO
LightningEnvironment = _fabric.plugins.environments.LightningEnvironment
sized_len = _fabric.utilities.data.sized_len
_DeviceDtypeModuleMixin = _fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin
_destroy_dist_connection = _fabric.utilities.distributed._destroy_dist_connection
_InfiniteBarrier = _fabric.utilities.distributed._InfiniteBarrier
_init_dist_connection = _fabric.utilities.distributed._init_dist_connection
_set_num_threads_if_needed = _fabric.utilities.distributed._set_num_threads_if_needed
ReduceOp = _fabric.utilities.types.ReduceOp
