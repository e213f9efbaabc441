"""The Lightning side: the strategy, its callbacks and launchers.

What belongs to what, in a run::

    PipelineStrategy      options, and how a session is opened
      SessionStrategy     Lightning's calls, handed on
        ProcessStrategy   processes, connection, collectives

    strategy.peers        agreement of the processes, and news of failures
    strategy.session      a module set up in stages; made in set-up, kept for later runs
      partitioner         where to cut
      stages              this rank's part of the module, its pipeline and gradients (LocalStages)
      runner              runs the user's steps on them (StageRunner, ManualStep)
      optimizers          clip, update and save what is spread over stages (StageOptimizers)
      signals             SIGTERM and requeue, on which all ranks act together
"""

from lightning_pipeline._registration import introduce, register
from lightning_pipeline.engine.reducer import PipelineGradReducer

from .lightning_private import let_modules_be_compiled, say_which_import
from .pipeline import PipelineStrategy
from .rebalance import PipelineRebalance
from .shared_parameters import sync_pipeline_shared_parameters
from .timeline import PipelineTimeline

__all__ = [
    "PipelineGradReducer",
    "PipelineRebalance",
    "PipelineStrategy",
    "PipelineTimeline",
    "sync_pipeline_shared_parameters",
]

register()
introduce(PipelineStrategy)
say_which_import()
let_modules_be_compiled()
