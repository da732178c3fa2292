"""Requests of jobs: hints, buckets, and a site's catalog."""
