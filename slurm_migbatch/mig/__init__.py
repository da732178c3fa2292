"""Model MIG geometry as values: profiles, placements, layouts, slot planning, and the NVML adapter."""
