"""How each case is run; without what only the packages' environments have."""

CONFIGURATIONS = ("plain", "whole", "one", "auto", "key")
"""Without the strategy; one stage with the batch as its one micro-batch; one stage; two with the automatic cut, and two
with the case's `stage_config`."""
