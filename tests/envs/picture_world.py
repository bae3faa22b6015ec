"""A scene of a few shapes whose pictures are known."""

from __future__ import annotations

import mujoco

from genrl.envs.rendering import Scene

SIZE = (96, 96)
# A floor, a red box right of the middle, a green ball above it, and a goal marker; seen from the south.
WORLD = """
<mujoco>
  <visual><global offwidth="64" offheight="64"/><map znear="0.01" zfar="50"/></visual>
  <worldbody>
    <light pos="0 -1 3" dir="0 0.3 -1"/>
    <geom name="floor" type="plane" size="5 5 .1" rgba="0.3 0.3 0.9 1"/>
    <geom name="box" type="box" pos="0.4 0 0.2" size=".2 .2 .2" rgba="0.9 0.1 0.1 1"/>
    <geom name="ball" type="sphere" pos="0.4 0 0.9" size=".2" rgba="0.1 0.9 0.1 1"/>
    <geom name="unseen" type="box" pos="0 -1 0.5" size="2 .01 2" rgba="1 1 1 0" contype="0" conaffinity="0"/>
    <geom name="hidden" type="box" pos="0 -1 0.5" size="2 .01 2" rgba="1 1 1 1" group="4" contype="0" conaffinity="0"/>
    <site name="goal" type="{site}" pos="-0.5 0 0.5" size="{size}" euler="20 40 10" rgba="1 1 0 1"/>
    <site name="ghost" type="sphere" pos="0 -1 0.5" size="0.3" rgba="1 1 0 -1"/>
    <camera name="south" pos="0 -3 0.6" xyaxes="1 0 0 0 0 1"/>
    <camera name="flipped" pos="0 -3 0.6" xyaxes="-1 0 0 0 0 -1"/>
    <camera name="above" pos="0 0 4" xyaxes="1 0 0 0 1 0"/>
    <camera name="inside" pos="0.4 0 0.2" xyaxes="1 0 0 0 0 1"/>
  </worldbody>
</mujoco>
"""


def world(site="sphere", size="0.1 0.1 0.1", camera="south"):
    model = mujoco.MjModel.from_xml_string(WORLD.format(site=site, size=size))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return Scene(model, data, camera, upside_down=frozenset({"flipped"}))
