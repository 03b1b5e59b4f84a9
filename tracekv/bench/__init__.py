"""Benchmarks: each compares in one run, interleaved, prints medians and spread, and writes its part of ``docs/performance.md``."""
