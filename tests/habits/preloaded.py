"""Imports every habit: for the server that the ranks of a launch are forked from."""

from tests.habits.table import load

load()
