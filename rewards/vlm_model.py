"""Any transformers vision-language model as a function of frames that gradients pass.

A processor of transformers prepares images with torchvision, on tensors, and asks only that they not be uint8 files. So
the frames are handed to the processor itself as float tensors in [0, 1] with `do_rescale=False`: its own resizing,
normalising, splitting and patch layout run, and the graph back to the frames survives. No layout is written twice.
`prepare` tries it on one image; a processor that leaves tensors (PIL, numpy) gets 8-bit images and no gradients.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.progress import loading

from .encoders import explained

Inputs = dict[str, Any]


@dataclass(frozen=True)
class VLMOptions:
    """How a vision-language model is loaded and run.

    Args:
        dtype: of the weights; ``"auto"`` is that of the checkpoint.
        device: where the model lies, such as ``"cuda:1"``; None is the device of the run.
        batch_size: questions in one forward pass. Without gradients this bounds the memory.
        frames: videos are reduced to this many evenly spaced frames, the first and the last among them.
        fps: frames a second of the videos; some models are told the time between frames.
        checkpointing: recompute the layers in the backward pass instead of keeping their activations.
        plain_format: the text that is sent when the processor has no chat template, with ``{image}`` and
            ``{question}``, such as ``"USER: {image}\\n{question} ASSISTANT:"``.
        system: a system message of the chat.
        chat: variables for the chat template, such as ``{enable_thinking: false}`` for models that think first.
        prefix: how the model's answer is made to begin, such as ``"Final Score: "``.
        attention: ``attn_implementation`` of transformers, such as ``"flash_attention_2"``.
        processor: settings for ``AutoProcessor.from_pretrained``, such as ``{max_pixels: 200704}``.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    batch_size: int = 4
    frames: int = 8
    fps: float = 8.0
    checkpointing: bool = False
    plain_format: str | None = None
    system: str | None = None
    chat: dict[str, Any] | None = None
    prefix: str = ""
    attention: str | None = None
    processor: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "frames", "fps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0.")
        if self.plain_format is not None:
            for field in ("{image}", "{question}"):
                if field not in self.plain_format:
                    raise ValueError(f"plain_format {self.plain_format!r} has no {field}; it says where that goes.")

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Options that suit a tiny model on a CPU."""
        own = dict.fromkeys(("device", "plain_format", "attention", "processor"))
        return {**arguments, **own, "dtype": "float32", "frames": 2}


class VisionLanguageModel:
    """Log-likelihoods of answers, and hidden states, given frames and a question.

    Args:
        model: hub id or folder, for `AutoModelForImageTextToText` and `AutoProcessor`.
        options: see `VLMOptions`.
        owner: name of the reward, for messages.

    `differentiable` is True until `prepare` has found that the processor cuts the graph; `obstacle` then says how.
    """

    def __init__(self, model: str, options: VLMOptions, owner: str = "the reward") -> None:
        self.id, self.options, self.owner = str(model), options, owner
        self.differentiable, self.obstacle = True, ""
        self._model: Any = None
        self._processor: Any = None
        self._causal = False

    # ------------------------------------------------------------------------------------------------ loading

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model, once, and find out whether gradients pass its processor.

        Raises:
            OSError: it cannot be found or read, or lacks weights.
            ValueError: the processor has no chat template and there is no `plain_format`, or `checkpointing` is not
                possible.
        """
        device = torch.device(self.options.device or device)
        if self._model is None:
            with explained(self.owner, self.id):
                self._processor = _load_processor(self.id, self.options.processor or {})
            if self.chat_template is None and self.options.plain_format is None:
                raise ValueError(
                    f"the processor of {self.id} has no chat template; say what the model is sent, e.g. "
                    'options.plain_format: "{image}{question}\\n".'
                )
            self._find_out_about_gradients()
            with explained(self.owner, self.id), loading(f"loading {self.id}", progress, "transformers"):
                self._shared = _shared_model(self.id, self.options, device)
            self._model = self._shared.model
        self._model.to(device)

    @property
    def loaded(self) -> bool:
        return self._model is not None

    @property
    def chat_template(self) -> Any:
        return getattr(self._processor, "chat_template", None)

    @property
    def tokenizer(self) -> Any:
        return self._processor.tokenizer

    @property
    def hidden_size(self) -> int:
        return self._model.get_input_embeddings().weight.shape[1]

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _find_out_about_gradients(self) -> None:
        frames = torch.full((1, 3, 64, 64), 0.5, requires_grad=True)
        with torch.enable_grad():
            try:
                inputs = self.inputs(frames, ["?"])
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                self.obstacle = f"it takes no float tensors ({type(error).__name__}: {error})"
            else:
                pixels = [value for name, value in inputs.items() if name.startswith("pixel_values")]
                if not any(isinstance(value, Tensor) and value.requires_grad for value in pixels):
                    self.obstacle = "its result has no graph back to the frames"
        self.differentiable = not self.obstacle
        if self.obstacle:  # what fails with an 8-bit image too is no matter of gradients
            self.inputs(frames.detach(), ["?"])

    # ------------------------------------------------------------------------------------------------ inputs

    def frame_indices(self, count: int) -> list[int]:
        """Which of `count` frames the model is shown."""
        return torch.linspace(0, count - 1, min(count, self.options.frames)).round().long().tolist()

    def inputs(self, media: Tensor, questions: Sequence[str]) -> Inputs:
        """What the model is called with, padded on the left, for media [B, C, H, W] or [B, F, C, H, W].

        Raises:
            ValueError: neither 1 nor 3 channels.
            RuntimeError: a gradient is asked for that the processor cannot give.
        """
        frames, rate = self._shown(media)
        text = [self._text(question, frames) for question in questions]
        visual = list(frames) if self.differentiable else [_as_8_bit(sample) for sample in frames]
        given: Inputs = {"do_rescale": False} if self.differentiable else {}
        if frames.dim() == 4:
            given["images"] = [[image] for image in visual]
        elif self._takes_videos:
            facts = {"fps": rate, "total_num_frames": frames.shape[1], "frames_indices": list(range(frames.shape[1]))}
            given |= {"videos": visual, "do_sample_frames": False, "video_metadata": [dict(facts) for _ in visual]}
        else:
            given["images"] = [list(video) for video in visual]
        inputs = dict(self._processor(text=text, return_tensors="pt", padding=True, **given))
        inputs.pop("labels", None)  # some make them, and the model would then compute a loss
        return inputs

    def _shown(self, media: Tensor) -> tuple[Tensor, float]:
        """Three channels, on the model's device, videos reduced to `frame_indices`; frames a second of what is left."""
        if media.shape[-3] not in (1, 3):
            raise ValueError(
                f"media has {media.shape[-3]} channels; vision-language models take 1 (grey) or 3 (RGB). Convert first."
            )
        if torch.is_grad_enabled() and media.requires_grad and not self.differentiable:
            raise RuntimeError(
                f"the processor of {self.id} ({type(self._processor).__name__}) passes no gradients to frames: "
                f"{self.obstacle}. Use a model whose image processor runs on torchvision, or an algorithm that needs "
                "no gradient of the reward."
            )
        rate = self.options.fps
        if media.dim() == 5:
            indices = self.frame_indices(media.shape[1])
            rate *= (len(indices) - 1) / (media.shape[1] - 1) if len(indices) > 1 else 1.0
            media = media[:, indices]
        if self._model is not None:
            media = media.to(self.device)
        return media.expand(*media.shape[:-3], 3, -1, -1), rate

    @property
    def _takes_videos(self) -> bool:
        return getattr(self._processor, "video_processor", None) is not None

    def _text(self, question: str, frames: Tensor) -> str:
        """The question as the model is sent it, with a mark where the picture goes, up to where an answer starts."""
        if frames.dim() == 4:
            seen = ["image"]
        else:
            seen = ["video"] if self._takes_videos else ["image"] * frames.shape[1]
        if self.chat_template is None:
            marks = "".join(getattr(self._processor, f"{kind}_token", f"<{kind}>") for kind in seen)
            text = str(self.options.plain_format).replace("{image}", marks).replace("{question}", question)
            return text + self.options.prefix
        content = [*({"type": kind} for kind in seen), {"type": "text", "text": question}]
        chat: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.options.system is not None:
            chat.insert(0, {"role": "system", "content": [{"type": "text", "text": self.options.system}]})
        variables = self.options.chat or {}
        start = self._processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **variables)
        return start + self.options.prefix

    def answer_ids(self, question: str, answer: str, media: Tensor) -> list[int]:
        """The tokens that `answer` adds to the question: a tokenizer may join it to what stands before it.

        Raises:
            ValueError: the answer is no token at all.
        """
        before = self._text(question, media)
        prompt, whole, alone = (
            self.tokenizer(text, add_special_tokens=False).input_ids for text in (before, before + answer, answer)
        )
        ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else alone
        if not ids:
            raise ValueError(f"the answer {answer!r} has no token in the vocabulary of {self.id}; give another one.")
        return ids

    # ------------------------------------------------------------------------------------------------ outputs

    def log_likelihoods(
        self, media: Tensor, questions: Sequence[str], answers: Sequence[Sequence[str]], about: Sequence[int]
    ) -> Tensor:
        """log p(answer | media, question), teacher-forced, summed over the answer's tokens: [N, K] float32.

        Args:
            media: [B, C, H, W] or [B, F, C, H, W] in [0, 1].
            questions: N texts.
            answers: K candidates for each question.
            about: the sample that each question is about.
        """
        parts = []
        for rows in chunks(len(questions), self.options.batch_size):
            inputs = self.inputs(media[about[rows]], questions[rows])
            parts.append(self._chunk_likelihoods(inputs, media, questions[rows], answers[rows]))
        return torch.cat(parts)

    def last_hidden(self, media: Tensor, questions: Sequence[str], tokens: Sequence[int] = ()) -> Tensor:
        """Hidden states after the last layer, [B, K, D]: at each of `tokens`, or at the end of the prompt (K = 1).

        Raises:
            ValueError: a token does not stand exactly once in a prompt.
        """
        parts = []
        for rows in chunks(len(questions), self.options.batch_size):
            inputs = self.inputs(media[rows], questions[rows])
            states = self._call(self._model.base_model, inputs).last_hidden_state  # [b, L, D]
            if not tokens:
                parts.append(states[:, -1:])
                continue
            at = inputs["input_ids"].to(states.device)[:, None] == torch.tensor(tokens, device=states.device)[:, None]
            if not bool((at.sum(-1) == 1).all()):  # [b, K, L]
                names = self.tokenizer.convert_ids_to_tokens(list(tokens))
                raise ValueError(f"each of {names} must stand once in a prompt, as one token; put it in the template.")
            parts.append(torch.einsum("bkl,bld->bkd", at.to(states.dtype), states))
        return torch.cat(parts)

    def _chunk_likelihoods(
        self, inputs: Inputs, media: Tensor, questions: Sequence[str], answers: Sequence[Sequence[str]]
    ) -> Tensor:
        ids = [
            [self.answer_ids(question, answer, media) for answer in row]
            for question, row in zip(questions, answers, strict=True)
        ]
        first: Tensor | None = None
        columns = []
        for column in zip(*ids, strict=True):  # one candidate of every row
            if max(map(len, column)) > 1:
                columns.append(self._continued(inputs, column))
                continue
            if first is None:  # what follows the prompt, for all answers of one token
                first = self._log_probs(inputs, 1)[:, 0]  # [b, V]
            columns.append(first.gather(1, torch.tensor(column, device=first.device))[:, 0])
        return torch.stack(columns, dim=1)

    def _continued(self, inputs: Inputs, answers: Sequence[list[int]]) -> Tensor:
        """[b] summed log-probabilities of answers of several tokens, each given the ones before it."""
        length = max(map(len, answers))
        filler = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*answer, *[filler] * (length - len(answer))] for answer in answers])  # [b, n]
        real = torch.tensor([[i < len(answer) for i in range(length)] for answer in answers])
        if not self._causal:
            self._check_causality(inputs, ids, real)
        log_probs = self._log_probs(_extended(inputs, ids[:, :-1], real[:, :-1]), length)
        chosen = log_probs.gather(2, ids.to(log_probs.device)[..., None])[..., 0]
        return (chosen * real.to(log_probs.device)).sum(1)

    @torch.no_grad()
    def _check_causality(self, inputs: Inputs, ids: Tensor, real: Tensor) -> None:
        """A model that reads its prompt in both directions would see the answer that it is asked for."""
        one, another = (
            self._log_probs(_extended(inputs, tokens, real[:, :-1]), ids.shape[1])[:, 0]
            for tokens in (ids[:, :-1], ids[:, 1:])
        )
        if not torch.allclose(one, another, rtol=0, atol=1e-4):
            raise ValueError(
                f"{self.id} sees an answer while it predicts it: it attends in both directions. Use answers of one "
                "token, such as 'yes' and 'no'."
            )
        self._causal = True

    def _log_probs(self, inputs: Inputs, last: int) -> Tensor:
        """[b, last, V] float32 of the tokens after each of the last positions."""
        keep = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(self._model.forward).parameters else {}
        logits = self._call(self._model, inputs, **keep).logits
        return logits[:, -last:].float().log_softmax(-1)

    def _call(self, module: Any, inputs: Inputs, **options: Any) -> Any:
        """The output for inputs on the model's device, pixels in its dtype; values do not depend on the caller."""
        device, dtype = self.device, self._model.dtype
        ready = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        ready = {n: v.to(dtype) if n.startswith("pixel_values") else v for n, v in ready.items()}
        # Others call a shared model from other threads, and some models write to themselves in a forward.
        with self._shared.lock, torch.autocast(device.type, enabled=False):
            return module(**ready, use_cache=False, **options)


def chunks(count: int, size: int) -> Iterator[slice]:
    """0 to count in slices of a size."""
    return (slice(i, i + size) for i in range(0, count, size))


def _extended(inputs: Inputs, ids: Tensor, real: Tensor) -> Inputs:
    """Inputs with tokens [b, n] after the prompt."""
    shape = inputs["input_ids"].shape
    more = {"input_ids": ids, "attention_mask": real}
    longer = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == shape:  # token types: 0 is text
            tail = more.get(name, torch.zeros_like(ids))
            longer[name] = torch.cat([value, tail.to(value.device, value.dtype)], dim=1)
    return longer


def _as_8_bit(sample: Tensor) -> Any:
    """One image [3, H, W] as PIL image, or a video [F, 3, H, W] as a list of them."""
    from PIL import Image

    if sample.dim() == 4:
        return [_as_8_bit(frame) for frame in sample]
    pixels = (sample.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def _load_processor(model: str, settings: dict[str, Any]) -> Any:
    processor = _transformers().AutoProcessor.from_pretrained(model, **settings)
    processor.tokenizer.padding_side = "left"  # answers then start in the same column
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


def _load_model(model: str, options: VLMOptions) -> Any:
    attention = {} if options.attention is None else {"attn_implementation": options.attention}
    loaded, facts = _transformers().AutoModelForImageTextToText.from_pretrained(
        model, dtype=options.dtype, output_loading_info=True, **attention
    )
    if facts["missing_keys"]:
        missing = sorted(facts["missing_keys"])
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}; they would stay random")
    return loaded


@dataclass
class _Shared:
    """A frozen model for all who load the same with the same settings, such as a reward and its credit maps."""

    model: Any
    lock: Any


_SHARED: weakref.WeakValueDictionary[tuple[Any, ...], _Shared] = weakref.WeakValueDictionary()


def _shared_model(name: str, options: VLMOptions, device: torch.device) -> _Shared:
    key = (name, options.dtype, options.attention, options.checkpointing, str(device))
    shared = _SHARED.get(key)
    if shared is None:
        model = _load_model(name, options)
        if options.checkpointing:
            _checkpoint_layers(model)
        shared = _Shared(model.eval().requires_grad_(False), threading.RLock())
        _SHARED[key] = shared
    return shared


def _checkpoint_layers(model: Any) -> None:
    """Recompute every layer in the backward pass.

    transformers' own switch acts in training mode only, which would turn dropout on.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers to checkpoint; set options.checkpointing: false.")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _transformers() -> Any:
    try:
        import torchvision  # noqa: F401  the processors' tensor path
        import transformers
    except ImportError as error:
        raise ImportError(
            'vision-language rewards need transformers and torchvision: pip install "genrl[rewards]"'
        ) from error
    return transformers
