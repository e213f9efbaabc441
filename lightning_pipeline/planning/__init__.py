"""Where to cut: traces, costs, the search for the fastest cut, and plans."""
