"""Generators: what is fine-tuned."""

from genrl.generators.base import Cond, Generator, Noise, TrainableWeights
from genrl.generators.diffusers import DiffusersGenerator
from genrl.generators.digits import DigitPrompts, DigitsGenerator, DigitsPart, DigitsSplit, load_digits_split
from genrl.generators.lora import LoraSettings, LoraWeights
from genrl.generators.moving_digits import MOTIONS, MovingDigitPrompts, moving_digits
from genrl.generators.real_videos import RealMovingDigits
from genrl.generators.shapes import ShapePrompts, ShapesGenerator
from genrl.generators.text import RenderedTextGenerator, TextPrompts
from genrl.generators.video import VideoGenerator

__all__ = [
    "MOTIONS",
    "Cond",
    "DiffusersGenerator",
    "DigitPrompts",
    "DigitsGenerator",
    "DigitsPart",
    "DigitsSplit",
    "Generator",
    "LoraSettings",
    "LoraWeights",
    "MovingDigitPrompts",
    "Noise",
    "RealMovingDigits",
    "RenderedTextGenerator",
    "ShapePrompts",
    "ShapesGenerator",
    "TextPrompts",
    "TrainableWeights",
    "VideoGenerator",
    "load_digits_split",
    "moving_digits",
]
