"""Readers of traces, one module for each source. `trace.Trace` is what all of them return."""
