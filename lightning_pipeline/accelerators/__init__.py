"""Support for particular accelerators: Ascend NPUs and their rank tables.

Nothing is imported here, as the command line reads rank tables where neither torch nor Lightning is installed.
"""
