"""The dispatch stage: changes of pending jobs, another profile or throttle."""
