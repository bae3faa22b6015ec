"""What a policy sees of a scene, and the frames of videos."""

from __future__ import annotations

from typing import Any

import numpy as np

from genrl.envs.pointcloud import crop_mask, sample_points
from genrl.envs.rendering import Renderer, Scene, make_renderer
from genrl.envs.settings import EnvError, EnvSettings, picture_of


class Pictures:
    """Image, depth and point observations of one environment. The renderer is made at the first of them.

    Args:
        settings: sizes, camera, crop and renderer.
    """

    def __init__(self, settings: EnvSettings) -> None:
        self.settings = settings
        self._renderer: Renderer | None = None
        self._cloud: np.ndarray | None = None  # the last, which stands in when nothing is seen
        self._size = (settings.image_size, settings.image_size)

    @property
    def renderer(self) -> Renderer:
        """Made when first asked for."""
        if self._renderer is None:
            seen = [picture_of(name) for name in self.settings.observations]
            colours = any(
                kind == "image" or (kind == "points" and self.settings.point_colors) for kind, _ in filter(None, seen)
            )
            self._renderer = make_renderer(self.settings.renderer, colours, self.settings.sites)
        return self._renderer

    def image(self, scene: Scene, camera: str | None = None) -> np.ndarray:
        """[3, H, W] uint8, of a camera or of the settings' one."""
        picture = self.renderer.rgb(scene, camera or self.settings.camera, self._size)
        return np.ascontiguousarray(picture.transpose(2, 0, 1))

    def depth(self, scene: Scene, camera: str | None = None) -> np.ndarray:
        """[1, H, W] uint8: `depth_range` in 255 steps; nearer is 0, farther or nothing is 255."""
        near, far = self.settings.depth_range or scene.depth_range
        metres = self.metres(scene, camera)
        steps = np.clip(np.nan_to_num((metres - near) / (far - near), posinf=1.0), 0, 1) * 255
        return np.round(steps).astype(np.uint8)[None]

    def metres(self, scene: Scene, camera: str | None = None) -> np.ndarray:
        """Depth [H, W] float32 in metres, infinite where nothing is."""
        return self.renderer.depth(scene, camera or self.settings.camera, self._size)

    def points(self, scene: Scene, seed: int, step: int) -> np.ndarray:
        """[N, 3 or 6] float32: positions in world coordinates (metres), and colours in [0, 1].

        Args:
            scene: what is seen.
            seed: of the episode; with the step it decides which points are taken.
            step: steps since the episode's start; at 0 something must be seen, later the last cloud stands in.

        Raises:
            EnvError: at the start of an episode the camera sees nothing in the crop.
        """
        camera = self.settings.camera
        depth = self.metres(scene)
        positions = scene.last_camera.points(depth)  # type: ignore[union-attr]
        crop = self.settings.crop or scene.crop
        inside = crop_mask(positions, crop)
        if not inside.any():
            if step == 0 or self._cloud is None:
                raise EnvError(
                    f"{self.settings.id}: camera {camera or scene.camera!r} sees nothing in crop {crop}; "
                    "choose another camera or a larger crop"
                )
            return self._cloud.copy()
        found = positions[inside]
        if self.settings.point_colors:
            found = np.concatenate([found, self.renderer.rgb(scene, camera, self._size)[inside] / 255.0], 1)
        rng = np.random.default_rng([seed, step])
        self._cloud = sample_points(found, self.settings.points, rng, self.settings.point_method).astype(np.float32)
        return self._cloud.copy()

    def frame(self, scene: Scene) -> np.ndarray:
        """Frame of a video [H, W, 3] uint8."""
        size = (self.settings.render_size, self.settings.render_size)
        return self.renderer.rgb(scene, self.settings.camera, size)

    def name(self) -> str:
        """Of the renderer in use."""
        return self.renderer.name

    def close(self) -> None:
        """Free the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


def shrunk(picture: Any, size: int) -> np.ndarray:
    """A simulator's own picture [H, W, 3] at size x size, each pixel the mean of the area it covers."""
    from PIL import Image

    picture = np.asarray(picture, np.uint8)
    if picture.shape[:2] == (size, size):
        return picture
    return np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BOX))
