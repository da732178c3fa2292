"""Model jobs' requests: hints, buckets, and a site's catalog."""
