"""`DigitsGenerator`: a text-conditional generator of handwritten 8x8 digits that trains its own base in seconds."""

from __future__ import annotations

from genrl.generators.digits_data import DigitsPart, DigitsSplit, load_digits_split

__all__ = ["DigitsPart", "DigitsSplit", "load_digits_split"]
