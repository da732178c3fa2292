"""What a job asks for: hints, buckets, and the catalog of what the site has."""
