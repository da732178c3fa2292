"""The colours of curves and of parts in pictures."""

from __future__ import annotations

from typing import Final

#: distinguishable by people with any colour vision (Okabe and Ito), grey in the place of black: also on a dark page
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c6d31")
