"""Where to cut: the profile of a step, the search for the fastest cut, and plans."""
