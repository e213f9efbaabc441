"""Cutting the user's own step into stages: stage_config, rehearsal and replay, micro-batch split."""
