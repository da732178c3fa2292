"""The names of the migration steps; `history` has their functions."""

#: In order; a released one is never changed, removed or moved.
STEPS = (
    "0001 first tables",
    "0002 measurements",
    "0003 what runs achieved",
    "0004 loans and actions",
    "0005 which database this is",
    "0006 recurring jobs",
    "0007 which migbatchd is active",
    "0008 what was removed for its age",
    "0009 served language models",
    "0010 what accounting asks of runs",
    "0011 how language models were trained",
    "0012 what users ask of runs",
    "0013 when runs were suspended",
    "0014 whether Slurm had placed runs",
)
