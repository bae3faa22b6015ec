"""Generators: what is fine-tuned."""

from genrl.generators.base import Cond, Generator, Noise
from genrl.generators.digits import DigitPrompts, DigitsGenerator, DigitsPart, DigitsSplit, load_digits_split

__all__ = [
    "Cond",
    "DigitPrompts",
    "DigitsGenerator",
    "DigitsPart",
    "DigitsSplit",
    "Generator",
    "Noise",
    "load_digits_split",
]
