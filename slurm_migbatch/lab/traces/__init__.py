"""Read traces, one module for each source. All return a `trace.Trace`."""
