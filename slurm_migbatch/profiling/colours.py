"""Define the colours of curves and chart segments."""

from __future__ import annotations

from typing import Final

#: distinguishable with any colour vision (Okabe and Ito), with grey instead of black for dark pages
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c6d31")
