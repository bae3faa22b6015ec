import numpy as np
import pytest
import torch

from genrl.generators.meshes import export_meshes, surface_nets, surface_points, write_ply
from genrl.generators.shapes_data import TRUNCATION, box, cell_centres, sphere


def points(resolution):
    line = cell_centres(resolution)
    return np.meshgrid(line, line, line, indexing="ij")


def media(distance):
    return (1 - np.clip(distance / TRUNCATION, -1, 1)) / 2


def edges(mesh):
    """Directed edges of the quads."""
    return [(int(quad[i]), int(quad[(i + 1) % 4])) for quad in mesh.quads for i in range(4)]


def volume(mesh):
    a, b, c = (mesh.vertices[mesh.triangles[:, i]].astype(np.float64) for i in range(3))
    return np.einsum("ij,ij->", a, np.cross(b, c)) / 6


def test_the_net_of_a_sphere_is_closed_points_outward_and_has_its_volume_and_area():
    mesh = surface_nets(media(sphere(points(48), (0.1, -0.05, 0.0), 0.6)))
    found = edges(mesh)
    assert len(set(found)) == len(found) and set(found) == {(b, a) for a, b in found}  # every edge once each way
    assert len(mesh.vertices) - len(found) / 2 + len(mesh.quads) == 2  # Euler's characteristic of a sphere
    assert volume(mesh) == pytest.approx(4 / 3 * np.pi * 0.6**3, rel=0.02)
    radius = np.linalg.norm(mesh.vertices - [0.1, -0.05, 0.0], axis=1)
    assert np.abs(radius - 0.6).max() < 0.01
    _, area = surface_points(mesh)
    assert area.sum() == pytest.approx(4 * np.pi * 0.36, rel=0.02)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_faces_of_a_box_look_outward_along_every_axis(axis):
    half = [0.3, 0.4, 0.5]
    mesh = surface_nets(media(box(points(48), (0, 0, 0), half)))
    corners = mesh.vertices[mesh.quads].astype(np.float64)
    normal = np.cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1])
    centre = corners.mean(1)
    flat = np.abs(centre[:, axis]) > half[axis] - 0.02
    assert flat.sum() > 8 and (normal[flat, axis] * centre[flat, axis] > 0).all()
    assert volume(mesh) == pytest.approx(8 * np.prod(half), rel=0.06)  # edges and corners are blunt


def test_two_bodies_and_a_ring_have_their_euler_characteristics():
    p = points(48)
    two = surface_nets(media(np.minimum(sphere(p, (-0.5, 0, 0), 0.3), sphere(p, (0.5, 0, 0), 0.3))))
    ring = np.sqrt((np.sqrt(p[0] ** 2 + p[1] ** 2) - 0.5) ** 2 + p[2] ** 2) - 0.2
    for mesh, expected in ((two, 4), (surface_nets(media(ring)), 0)):
        assert len(mesh.vertices) - len(edges(mesh)) / 2 + len(mesh.quads) == expected
    assert volume(surface_nets(media(ring))) == pytest.approx(2 * np.pi**2 * 0.5 * 0.04, rel=0.03)


def test_a_full_grid_gets_flat_ends_and_an_empty_one_nothing():
    full = surface_nets(np.ones((16, 16, 16)))
    assert volume(full) == pytest.approx(8.0, rel=0.02) and np.abs(full.vertices).max() <= 1 + 1e-6
    empty = surface_nets(np.zeros((16, 16, 16)))
    assert len(empty.vertices) == len(empty.quads) == 0
    assert surface_points(empty)[0].shape == (0, 3)


def read_ply(file):
    data = file.read_bytes()
    header, body = data.split(b"end_header\n", 1)
    vertices, faces = (int(line.split()[-1]) for line in header.decode().splitlines() if line.startswith("element"))
    xyz = np.frombuffer(body[: 12 * vertices], "<f4").reshape(-1, 3)
    table = np.frombuffer(body[12 * vertices :], np.dtype([("n", "u1"), ("corners", "<i4", 3)]))
    assert len(table) == faces and (table["n"] == 3).all()
    return xyz, table["corners"]


def test_ply_files_hold_the_mesh(tmp_path):
    mesh = surface_nets(media(sphere(points(16), (0, 0, 0), 0.5)))
    write_ply(mesh, tmp_path / "a.ply")
    xyz, corners = read_ply(tmp_path / "a.ply")
    assert np.array_equal(xyz, mesh.vertices) and np.array_equal(corners, mesh.triangles)


def test_exported_files_have_readable_names_and_none_is_lost(tmp_path):
    grids = torch.zeros(4, 16, 16, 16)
    grids[:3, 4:9, 4:9, 4:9] = 1
    files = export_meshes(grids, tmp_path / "new", ["chair 1", "chair 1", "../up: x", "chair 1"])
    assert [file.name for file in files] == ["chair-1.ply", "chair-1-2.ply", "up-x.ply", "chair-1-3.ply"]
    assert all(file.parent == tmp_path / "new" and file.is_file() for file in files)
    assert len(read_ply(files[0])[1]) > 0 and len(read_ply(files[3])[1]) == 0
