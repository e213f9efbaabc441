"""Actions print and parse as text and behave as values."""

import copy
import pickle

import pytest

from lightning_pipeline.schedules import Action, Kind, ScheduleError

NOTATION = ["2F0", "2B0", "2I0", "2W0", "2SEND_F0", "3RECV_F0", "2SEND_B0", "1RECV_B0", "12B34"]


@pytest.mark.parametrize("text", NOTATION)
def test_round_trip(text: str) -> None:
    assert str(Action.parse(text)) == text
    assert repr(Action.parse(f" {text} ")) == text


def test_parts() -> None:
    action = Action.parse("3RECV_F12")
    assert (action.kind, action.stage, action.microbatch) == (Kind.RECV_F, 3, 12)
    assert action.kind == "RECV_F"
    assert f"{action.kind}" == "RECV_F"


def test_is_a_value() -> None:
    action = Action("F", 2, 0)  # type: ignore[arg-type]
    assert action == Action(Kind.F, 2, 0)
    assert action.kind is Kind.F
    assert len({action, Action.parse("2F0"), Action.parse("2F1")}) == 2
    assert pickle.loads(pickle.dumps(action)) == copy.deepcopy(action) == action
    with pytest.raises(AttributeError):
        action.stage = 3  # type: ignore[misc]


def test_compute_and_communication() -> None:
    assert [kind for kind in Kind if kind.is_compute] == ["F", "B", "I", "W"]


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "F0", "2X0", "2F0 2F1", "2SEND0", "-1F0", "2UNSHARD", "(0F1;1B0)OVERLAP_F_B"]
)
def test_unreadable(text: str) -> None:
    with pytest.raises(ScheduleError, match="such as 2F0") as error:
        Action.parse(text)
    assert repr(text) in str(error.value)


def test_invalid() -> None:
    with pytest.raises(ScheduleError, match="'X'; the kinds are F, B, I, W, SEND_F"):
        Action("X", 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="stage=-1"):
        Action(Kind.F, -1, 0)
