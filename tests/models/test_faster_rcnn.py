"""The geometry of Faster R-CNN: boxes, anchors and regions."""

import numpy as np

from models import faster_rcnn
from models.faster_rcnn import align, decode, encode, iou, make_anchors


def boxes(seed: int, *shape: int) -> np.ndarray:
    """Boxes of 2 to 12 pixels inside 16 x 16, f32[..., 4]."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(2, 12, (*shape, 2))
    start = rng.random((*shape, 2)) * (16 - size)
    return np.concatenate([start, start + size], axis=-1).astype(np.float32)


def test_regions_of_a_linear_image_are_their_own_positions():
    """Bilinear interpolation is exact on an image whose pixels are their own centers, away from its edge."""
    places = np.stack(np.meshgrid(np.arange(16), np.arange(16), indexing="ij"), axis=-1)[None] + 0.5
    found = align(np.float32(places), boxes(0, 1, 7), 4)
    cell = (np.arange(4) + 0.5) / 4
    top, left, bottom, right = np.moveaxis(boxes(0, 7), -1, 0)
    rows = np.clip(top[:, None] + (bottom - top)[:, None] * cell, 0.5, 15.5)
    columns = np.clip(left[:, None] + (right - left)[:, None] * cell, 0.5, 15.5)
    want = np.stack(np.broadcast_arrays(rows[:, :, None], columns[:, None, :]), axis=-1)
    np.testing.assert_allclose(found[0], want, atol=1e-5)


def test_moves_are_undone():
    a, b = boxes(1, 5), boxes(2, 5)
    np.testing.assert_allclose(decode(encode(b, a), a), b, atol=1e-4)


def test_overlap_is_counted_in_pixels():
    a, b = np.float32([[0, 0, 4, 4]]), np.float32([[0, 0, 4, 4], [2, 1, 6, 3], [4, 4, 8, 8]])
    np.testing.assert_allclose(iou(a, b), [[1, 4 / 20, 0]])


def test_anchors_cover_every_cell():
    config = faster_rcnn.SIZES["full"]
    anchors = make_anchors(config)
    assert anchors.shape == (38 * 50 * 9, 4)
    height, width = anchors[:9, 2] - anchors[:9, 0], anchors[:9, 3] - anchors[:9, 1]
    np.testing.assert_allclose(np.sqrt(height * width), np.repeat([128, 256, 512], 3))
    np.testing.assert_allclose(height / width, [0.5, 1, 2] * 3)
    np.testing.assert_allclose((anchors[-1, :2] + anchors[-1, 2:]) / 2, [600, 792])
