"""What the table's habits come to with replicas, and where these share parameters or the optimizer's states out."""

from __future__ import annotations

DIFFERENT_WITH_REPLICAS = """
    MetricOfACallback CountsProcesses CriterionIsAMetric ConfusionMatrixReset MetricsInDictionaries
    MetricsBesideTheModule SeededByItsRank LogsOnAllWhatFirstRankComputed LogsOnAllWhatFirstRankKept
    LogsByRankAtTwoLines GathersOverRanksByName
"""
"""As with DDP: they count samples or processes, draw by the rank, or log other values on other ranks."""

_STATES = r"optimizer\.state is used in a hook .*\.py:\d+.*take it from a checkpoint"
_STATES_IN_STEP = r"\.state is used in training_step .*\.py:\d+.*take it from a checkpoint"
_AS_ONE_VECTOR = r"LBFGS updates all parameters as one vector.*leave data_parallel"
_STATES_ON_FIRST_RANK = r"'state' of a checkpoint is read where only rank 0 has the state.*\.py:\d+.*is_global_zero"

REFUSED: dict[str, dict[str, str]] = {
    "zero1": {
        _STATES: """
            AdamMomentsChanged AveragesByItsOwnMethod GroupsClearedAndAddedAnew LookaheadAroundAdam MomentumForgotten
            MomentumHalved MomentumRead MomentumReadBetweenStepsByHand NotesKindsReadInHooks OptimizerCopied
            OptimizerRewound OptimizerSavedAtTheEnd OptimizerStateDict SharpnessAwareByHand StateOfOnesOwn
            WeightOfAnotherLayer WeightReplacedInItsGroup
        """,
        _STATES_IN_STEP: "MomentsReadInStep MomentumReadByHand",
        _AS_ONE_VECTOR: "DirectionsOfLBFGS LBFGS LBFGSByHand LBFGSOnALine",
        _STATES_ON_FIRST_RANK: "FiltersCheckpoint IteratesOverCheckpoint",
        r"draws random numbers into .* in a step": "InitializedAgainInSteps",
    },
    "fsdp": {
        r"the first rank alone takes a tensor that ranks keep in slices.*\.py:\d+.*clone\(\)": """
            StatisticsOnFirstRank ShowsNormInBar LogsTwiceOnFirstRank HistogramsInHooks OpensOnFirstRank
            SavesStateDictByHand LogsOnFirstRank KeepsThatItIsFirst WaitsOnFirstRank LogsOnAllWhatFirstRankComputed
        """,
        r"gradient of .* is (read|changed) within a step.*\.py:\d+": """
            ScalesGradientsItself LogsGradientNorms NormsAllGradients ScalesByNormOfGradients ReadsWhatItHasCleared
            ReadsBeforeBackward UsesAGradientReadBefore
        """,
        r"has become .* during the run, and with data_parallel='fsdp'.*before the run": """
            PrunedEachEpoch LayersInserted LayersExchanged AdaptersFromSecondEpoch FirstLayerDropped LayerDeleted
            TiedToALaterOne
        """,
        r"ModelPruning renames parameters during the run.*zero1": "PrunedByLightning",
        r"keeps a copy of .* for averaging.*zero1": "AveragesWeights AveragesWeightsAndNorms TestsBestAverage",
        r"a loader computes with a parameter of which replicas keep slices.*\.py:\d+.*zero1": """
            DatasetUsesLayer MinesHardSamples PlaysEpisodes MinesAndDecays MinesWithBatchNorms
        """,
        r"has been replaced, or taken away, .*data_parallel='fsdp'.*copy_": """
            CodebookOfNewParameters MovedAndReplaced ParameterOfDataOfAnotherStage
        """,
        r"state_dict\(\) is not whole on this rank.*call it in a hook": "WholeAfterFit",
    },
}
"""The errors that those configurations end in, by what they have to name, besides what stages refuse anyway."""

DIFFERENT: dict[str, frozenset[str]] = {
    # Each tensor has data of its own after `a.data = b.data`, as under FSDP.
    "fsdp": frozenset(["DataOfAnotherStage"]),
}
"""What comes to something else, as docs/not-supported.md says."""

for pattern in (_STATES, _STATES_IN_STEP, _AS_ONE_VECTOR, _STATES_ON_FIRST_RANK):
    REFUSED["fsdp"][pattern] = REFUSED["zero1"][pattern]
REFUSED["fsdp"][r"draws random numbers into .* in a step"] = "InitializedAgainInSteps"


def refusal(kind: str, name: str) -> str | None:
    """What the error of a habit has to match, where replicas share out what `kind` says."""
    return next((pattern for pattern, names in REFUSED.get(kind, {}).items() if name in names.split()), None)


def differs(kind: str, name: str) -> bool:
    return name in DIFFERENT_WITH_REPLICAS.split() or name in DIFFERENT.get(kind, ())
