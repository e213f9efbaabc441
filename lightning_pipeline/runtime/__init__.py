"""Processes of a pipeline: rendezvous, topology, transport, failures."""
