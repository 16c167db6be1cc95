"""Benchmarks of the whole: the engine beside its ceiling and beside transformers, in one process. See ``engine``."""
