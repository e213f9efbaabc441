"""Modules with the habits of real users come out on stages as in one process, or end in an error that says what to do.

`python -m tests.habits` runs chosen ones, and shows more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.habits.driver import PATIENCE_S, WRONG, judge, run_configuration
from tests.habits.harness import CONFIGURATIONS
from tests.habits.table import HABITS, load
from tests.launching import PRELOADED

pytestmark = pytest.mark.multiprocess

load()
PRELOADED.append("tests.habits.preloaded")  # a launch takes a fifth of the time

REPLICATED = "2x2-1f1b"
"""What these come to, and where they share parameters or states out, shared_out.py tells."""
SLICED = "2x2-1f1b-fsdp"
SHARED_OUT = (REPLICATED, SLICED, "2x2-1f1b-zero1")
ONE_IN = 16
"""Of these, the slow tests take so many habits; `python -m tests.habits --configuration 2x2-1f1b-fsdp` takes all."""
REVERSED = ("2-1f1b-reversed", "3-1f1b-reversed")
BY_DEFAULT = {
    "2-1f1b": """
        TokensUnpadded KLFromSecondEpoch OwnEntriesInCheckpoint ListsForEpochEnd StatisticsOnFirstRank
        HiddenWrittenByIndex TwoValidationLoaders LogsWithEveryOption SavedInStep GrowsInSecondEpoch
        AdamMomentsChanged WGANWithPenalty ClipsByTorch DatasetCounts GathersOverRanksByName
        TeacherMadeInFirstStep MixedByThePlugin GoesOnWithWhatAHookFound HookedAndUsedWithoutGradients
        HookTakesGradientsOfWeights PositionsMovedLater PositionsGivenByTheStep PositionsGivenAfterwards
        DefaultDtypeChangesNumbers AverageByData AverageByParts AsksForGradientsOfBuffers NeuralODE
        NeuralODEOfTheStage BufferMovedByAHook BufferMovedByAHookAndTheStep WayOfALengthOfItsOwn LookaheadInState
        OrderOfNamesChanges AttributeOfArgumentChanges AttributeOfWeightChanges NotesDefaultDtypeByClosure
        FollowsByRowsAndParts UnfrozenBesideRates RateFoundBesideFirstRank UnfrozenOfSameValues FunctionPutsByData
        FunctionMovesBufferByData ViewsOfWeightsReadAfterUpdate ViewsOfBuffersReadAfterStep ViewsKeptOverSteps
        ViewOfWeightWrittenInNextStep WeighsByRecordsOfDataset UpdatesByListsThroughViews LayersMovedToTheData
        ScriptedFunctionOfOneStage
        HistogramsInHooks
        ReadsInInferenceMode BatchPlusLateValue ClosureNormsGradients DetectsObjects RowOfBufferAddedTo
        WrittenThroughViewsAroundReads ScaleAssignedOnFirstRank BranchesOnItsRank CountOfANormUsedLater
        BuffersReplaced CopyOfALayer TypeOfOutputIsTensor TypesOfParametersInHooks
        BufferByEpoch ScheduledByNumpy FunctionsReplaced UntiedInSecondEpoch TiedHeadReplaced
        TargetCopiedAtStart PartsKept OddSamples SlicesOfLatents AdaptersFromSecondEpoch LayersInserted
        PrunedByLightning EpisodesExchanged ObserversByChannel OddPartsRead LargeOddTargets
        SharpnessAwareByHand KeepsReplacedLayers MinesInInferenceMode KeepsThatItIsFirst ShowsNormInBar
        AttributesOfFeatures AsksAgainOnFirstRank PairKeptOnSelf
        FeaturesCollectedByHooks SetByAHook SumsAndOwnNumbers TogglesBetweenForwardAndBackward OneOfTwoResultsUnused
        StatesOfTheGeneratorSet BySignatureOfForward NotesKinds WaitsForFirstRank WaitsOnFirstRank
        DrawsOnFirstRankInEarlierHook ModeOverTraining LastBatchIsSmallerThanItsNumberOfFields EmptyWhereUnread
        LogsOnAllWhatFirstRankComputed StopsInStepOnFirstRank FolderOfLogsInSetup RateForOneUpdateOnFirstRank
        OptimizesNothingAndIsSaved AveragesWeightsAndNorms MixedAttention OneSequenceByHand SameCombinedLoaderAgain
        LooksBeforeAndAfter MultipliesAndAdds AveragesByTorch Spectral UpdatesByGradients CountsOfTheBatch
        ChangesByMicroBatch
    """,
    "2-zero_bubble": "ParameterHooks CheckpointWithDropout AdversarialAcrossStages",
    "2-interleaved_1f1b": "SkipFromSecondEpoch CrossAttention CountOfANormKept",
    "3-1f1b": """
        RecurrentLayerOnTwoStages CountsBeforeLayersOfAnotherVisit HaltsByData LateTwiceThenEarly
        ViewsOfEveryKindWritten
    """,
    "2-auto": """
        FunctionOfParameters LBFGS NormedBlocks DividedByItsCount GathersOverRanksByName ModulesPickledInStep
        Wasserstein""",
    "4-1f1b": "Siamese ComparesWithMicrobatchBefore",
    REPLICATED: """
        FitsAfterNormsWereAdapted SparseBuffers LogsOnFirstRank StopsOnFirstRankAfterValidation
        SkipsRestOfEpochOnFirstRank ScaleWrittenOnFirstRank
    """,
    SLICED: """
        CrossAttention MixtureDensity StateDictSavedInStep WeightsGoBackInStep ValidatesWithShadowSwapped
        SavesBestByHand LayersCopiedInEachStep TeacherCopiedLater RewoundToSnapshot ChannelsLastBatch CopyOfALayer
        KeepsReplacedLayers ViewsKeptBeyondTheirLoop LogsTwiceOnFirstRank DatasetUsesLayer CodebookOfNewParameters
    """,
    REVERSED[0]: "LongBatchPlusLateValueUnseen ScalesDataOnFirstRank",
    REVERSED[1]: "NormShared",
}
"""What runs by default, where it shows most: of each kind about one. An error ends a launch, so it comes last."""


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Names of the habits that this session tests, by configuration."""
    found: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            parameters = item.callspec.params
            found.setdefault(parameters["configuration"], []).append(parameters["name"])
    return found


@pytest.fixture(scope="module")
def reference(asked: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what came of every habit in one process."""
    folder = tmp_path_factory.mktemp("habits")
    names = {name for each in asked.values() for name in each}
    list(run_configuration([habit for habit in HABITS.values() if habit.name in names], "1", folder, 3 * PATIENCE_S))
    return folder


@pytest.fixture(scope="module")
def launched() -> set[str]:
    """Configurations that have been launched: all of their habits at once."""
    return set()


@pytest.fixture
def folder(configuration: str, asked: dict[str, list[str]], reference: Path, launched: set[str]) -> Path:
    """The same with what came of them under this configuration."""
    if configuration not in launched:
        launched.add(configuration)
        list(
            run_configuration([HABITS[name] for name in asked[configuration]], configuration, reference, 3 * PATIENCE_S)
        )
    return reference


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Habits by configuration: what is launched together follows one another, and what is not by default is slow.

    Where slow tests are left out, those are not made at all: seven thousand take ten seconds to collect.
    """
    configurations = CONFIGURATIONS_OF[metafunc.function]
    defaults = {configuration: names.split() for configuration, names in BY_DEFAULT.items()}
    defaults["plain"] = [name for name in defaults["2-1f1b"] if HABITS[name].plain]
    applies = {"plain": lambda habit: habit.plain, "without": lambda habit: habit.without is not None}
    with_slow = metafunc.config.option.markexpr != "not slow"
    found = []
    for configuration in configurations:
        first = defaults.get(configuration, [])
        has_others = with_slow and configuration not in REVERSED
        taken = list(HABITS)[:: ONE_IN if configuration in SHARED_OUT else 1]
        others = [name for name in taken if name not in first] if has_others else []
        for name in (*first, *others):
            if applies.get(configuration, lambda _: True)(HABITS[name]):
                marks = [pytest.mark.slow] * (name not in first)
                found.append(pytest.param(name, configuration, id=f"{configuration}-{name}", marks=marks))
    metafunc.parametrize(("name", "configuration"), found)


def test_stages_come_to_what_one_process_does(name: str, configuration: str, folder: Path) -> None:
    habit = HABITS[name]
    verdict = judge(habit, configuration, folder)
    assert verdict.is_as_told, f"{verdict.outcome}, expected {habit.expected_of(configuration)}\n" + "\n".join(
        verdict.differences
    )


def test_one_process_has_the_bits_of_plain_lightning(name: str, configuration: str, folder: Path) -> None:
    verdict = judge(HABITS[name], configuration, folder)
    assert verdict.is_as_told, f"{verdict.outcome}\n" + "\n".join(verdict.differences)


@pytest.mark.slow
def test_what_is_compared_shows_the_habit(name: str, configuration: str, folder: Path) -> None:
    verdict = judge(HABITS[name], configuration, folder)
    assert verdict.outcome == WRONG, f"{verdict.outcome}\n" + "\n".join(verdict.differences)


CONFIGURATIONS_OF: dict[object, Sequence[str]] = {
    test_stages_come_to_what_one_process_does: (*CONFIGURATIONS, *SHARED_OUT, *REVERSED),
    test_one_process_has_the_bits_of_plain_lightning: ("plain",),
    test_what_is_compared_shows_the_habit: ("without",),
}
