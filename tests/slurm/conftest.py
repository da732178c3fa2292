"""The strict fakes of other rooms keep the contract too."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.extend(str(TESTS / room) for room in ("supply", "cosched"))
