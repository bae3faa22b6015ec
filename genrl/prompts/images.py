"""Folders of images as conditions: for editing, image-to-image and image-to-video."""

from __future__ import annotations

from pathlib import Path

from .base import Prompt
from .files import existing_image, place_in, read_json_lines, read_lines
from .split import split_prompts

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
METADATA = "metadata.jsonl"


class ImageFolder:
    """Images with what is to be done with them; the generator finds the path under `metadata["image"]`.

    Where a prompt comes from, in this order: a file `metadata.jsonl` in the folder (`{"file_name": "a.png", "prompt":
    ...}`, further keys are metadata, several lines an image are several prompts; images without a line are not used);
    a text file beside the image (`a.txt` for `a.png`, one prompt a line); the template.

    Args:
        path: a folder; its subfolders are searched too.
        prompt: template for images without a text, such as "a photo of {name} in the snow": `{name}` is the file's
            name without ending and with spaces for underscores, `{folder}` that of its folder.
        held_out: share of the images that is held out (below 1) or their number (from 1), by a hash of their paths in
            the folder.
        key: name of the prompt in `metadata.jsonl`.
        max_train, max_held_out: keep the first so many; null keeps all.

    Raises:
        FileNotFoundError: the folder or an image does not exist.
        ValueError: no image, an image without a prompt, or a side of the split is empty.
    """

    def __init__(
        self,
        path: str,
        prompt: str | None = None,
        held_out: int | float = 0.05,
        key: str = "prompt",
        max_train: int | None = None,
        max_held_out: int | None = None,
    ) -> None:
        self.path, self.prompt, self.key = path, prompt, key
        self.folder = Path(path).expanduser()
        if not self.folder.is_dir():
            raise FileNotFoundError(f"image folder {path!r} is no folder; it is looked for from {Path.cwd()}")
        listed = self.folder / METADATA
        found = self._from_list(listed) if listed.is_file() else self._from_files()
        self.train, self.held_out = split_prompts(found, held_out, max_train, max_held_out, path, self._place)

    def _place(self, prompt: Prompt) -> str:
        return place_in(self.folder, prompt.metadata["image"])

    def _from_list(self, file: Path) -> list[Prompt]:
        found = []
        for where, record in read_json_lines(file):
            for name in ("file_name", self.key):
                if not isinstance(record.get(name), str):
                    raise ValueError(f"{where} has no text under {name!r}; its keys are {', '.join(record) or 'none'}")
            rest = {k: v for k, v in record.items() if k not in ("file_name", self.key)}
            image = existing_image(self.folder, record["file_name"], where)
            found.append(Prompt(record[self.key], {**rest, "image": image}))
        return found

    def _from_files(self) -> list[Prompt]:
        images = sorted(file for file in self.folder.rglob("*") if file.suffix.lower() in IMAGES and file.is_file())
        if not images:
            raise ValueError(f"{self.path} holds no image ({', '.join(IMAGES)})")
        return [Prompt(text, {"image": str(image)}) for image in images for text in self._texts(image)]

    def _texts(self, image: Path) -> list[str]:
        beside = image.with_suffix(".txt")
        if beside.is_file():
            lines = read_lines(beside)
            if lines:
                return lines
        if self.prompt is None:
            raise ValueError(
                f"{image} has no prompt: no {beside.name} with a line of text beside it, no {METADATA} in "
                f"{self.path}. Write one, or give a template as `prompt`."
            )
        try:
            return [self.prompt.format(name=image.stem.replace("_", " "), folder=image.parent.name)]
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"prompt = {self.prompt!r} is no template ({error!r}); it may use {{name}} and {{folder}}"
            ) from error
