"""Several real processes on one file, with real signals and real time."""
