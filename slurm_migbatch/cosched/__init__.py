"""The co-scheduler: training jobs on slices that inference does not need, and their return when it does."""
