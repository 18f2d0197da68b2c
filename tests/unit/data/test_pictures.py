"""One file to RGB pixels: every mode a classifier's images come in, and files that are none."""

import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from letkd.data.pictures import centred, read_picture
from letkd.errors import DataError

RED = (200, 30, 10)


def pixels(path) -> np.ndarray:
    picture = read_picture(path)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def test_grey_palette_transparent_and_black_and_white(tmp_path):
    red = Image.new("RGB", (5, 3), RED)
    palette = red.convert("P", palette=Image.Palette.ADAPTIVE)
    see_through = palette.copy()
    see_through.info["transparency"] = bytes([0] * 256)
    under = Image.new("RGBA", (5, 3), (*RED, 0))
    grey = Image.new("L", (5, 3), 77)
    cases = {"p.png": (palette, RED), "pt.png": (see_through, RED), "a.png": (under, RED), "l.png": (grey, (77,) * 3)}
    cases |= {"la.png": (Image.new("LA", (5, 3), (77, 9)), (77,) * 3), "b.png": (Image.new("1", (5, 3), 1), (255,) * 3)}
    cases |= {"g.gif": (palette, RED), "t.tif": (red, RED), "p.ppm": (red, RED), "w.bmp": (red, RED)}
    for name, (picture, colour) in cases.items():
        picture.save(tmp_path / name)
        got = pixels(tmp_path / name)
        assert got.shape == (3, 5, 3), name
        assert (got == colour).all(), (name, got[0, 0])


def test_cmyk_jpeg(tmp_path):
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "x.jpg", quality=100)
    assert np.abs(pixels(tmp_path / "x.jpg")[8, 8].astype(int) - (255, 0, 0)).max() <= 3


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    values = np.array([[0, 128, 257, 32768, 65535]], np.uint16)
    for name in ("x.png", "x.tif", "x.pgm"):
        Image.fromarray(values).save(tmp_path / name)
        assert pixels(tmp_path / name)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def a_tiff(path, pixels: bytes, *, bits: int, photometric: int, width: int = 2) -> None:
    """One uncompressed row of grey values."""
    tags = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8 + 2 + 9 * 12 + 4, 277: 1, 278: 1, 279: len(pixels)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels)


@pytest.mark.parametrize(
    ("bits", "photometric", "content", "grey"),
    [
        (12, 1, b"\xff\xf8\x00", [255, 128]),
        (16, 1, b"\xff\xff\x00\x80", [255, 128]),
        (16, 0, b"\xff\xff\x00\x80", [0, 127]),
    ],
)
def test_black_and_white_of_a_tiff_are_those_of_its_tags(tmp_path, bits, photometric, content, grey):
    a_tiff(tmp_path / "x.tif", content, bits=bits, photometric=photometric)
    assert pixels(tmp_path / "x.tif")[0, :, 0].tolist() == grey


def test_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, (0, 0, 255))]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    assert (pixels(tmp_path / "x.gif") == RED).all()


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp", "x.tif"])
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_upright_as_pillow_does(tmp_path, name, orientation):
    picture = Image.open(noise(tmp_path / "plain.png", (4, 8)))
    exif = picture.getexif()
    exif[0x0112] = orientation
    picture.save(tmp_path / name, exif=exif)
    with Image.open(tmp_path / name) as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    assert np.array_equal(pixels(tmp_path / name), np.asarray(expected))
    assert expected.size == ((4, 8) if orientation in (5, 6, 7, 8) else (8, 4))


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "CMYK", "P", "I;16"])
def test_tiffs_of_every_mode_are_turned_upright(tmp_path, mode, orientation):
    values = np.random.RandomState(0).randint(0, 256, (4, 7)).astype(np.uint8)
    picture = Image.fromarray(values.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(values).convert(mode)
    for name, exif in (("upright.tif", {}), ("turned.tif", {0x0112: orientation})):
        picture.save(tmp_path / name, tiffinfo=exif)
    upright = pixels(tmp_path / "upright.tif")
    mirrored = upright.transpose(1, 0, 2)  # along the diagonal
    expected = {5: mirrored, 6: np.rot90(upright, -1), 7: np.rot90(mirrored, 2), 8: np.rot90(upright)}[orientation]
    assert np.array_equal(pixels(tmp_path / "turned.tif"), expected)


@pytest.mark.parametrize("exif", [b"Exif\0\0MM", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0" + b"\xff" * 50])
def test_damaged_exif_costs_no_picture(tmp_path, exif):
    Image.new("RGB", (8, 4), RED).save(tmp_path / "x.png", exif=exif)
    assert (pixels(tmp_path / "x.png") == RED).all()


def test_a_strip_that_scaling_would_blow_up_is_refused_by_name(tmp_path):
    """65500x1, scaled to 256 on its shorter side, would be 16.8 million pixels long."""
    Image.new("RGB", (65500, 1), RED).save(tmp_path / "x.jpg")
    with pytest.raises(
        DataError, match=r"x\.jpg cannot be decoded \(65500x1 pixels: one side is more than 200 times the other\)"
    ):
        read_picture(tmp_path / "x.jpg")
    Image.new("RGB", (2, 400), RED).save(tmp_path / "y.png")
    assert pixels(tmp_path / "y.png").shape == (400, 2, 3)


def test_messages_hold_no_control_characters(tmp_path):
    path = tmp_path / "a\x1b[31m\n$x [bold]\udcff.png"
    path.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        read_picture(path)
    assert r"a\x1b[31m\n$x [bold]\udcff.png cannot be decoded" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (40, 24), (7, 5)])
@pytest.mark.parametrize("resize", [None, 40])
def test_the_view_of_evaluation_covers_and_centres(size, resize):
    """Against the definition: the smallest scaling that covers the size and its margin, proportions kept, then the centre."""
    for w, h in ((90, 60), (60, 90), (33, 32), (48, 48)):
        picture = Image.fromarray(np.random.RandomState(w).randint(0, 256, (h, w, 3)).astype(np.uint8))
        margin = (resize or round(min(size) * 8 / 7)) / min(size)
        factor = max(round(size[0] * margin) / h, round(size[1] * margin) / w)
        scaled = picture.resize((int(w * factor + 1e-9), int(h * factor + 1e-9)), Image.Resampling.BILINEAR)
        left, top = round((scaled.width - size[1]) / 2), round((scaled.height - size[0]) / 2)
        expected = scaled.crop((left, top, left + size[1], top + size[0]))
        assert np.array_equal(np.asarray(centred(picture, size, resize)), np.asarray(expected))


def test_a_picture_of_the_size_is_its_own_view_unless_scaling_is_asked_for():
    picture = Image.fromarray(np.random.RandomState(0).randint(0, 256, (32, 32, 3)).astype(np.uint8))
    assert np.array_equal(np.asarray(centred(picture, (32, 32))), np.asarray(picture))
    zoomed = picture.resize((37, 37), Image.Resampling.BILINEAR).crop((2, 2, 34, 34))
    assert np.array_equal(np.asarray(centred(picture, (32, 32), 37)), np.asarray(zoomed))


def test_what_a_file_is_its_content_tells(tmp_path):
    Image.new("RGB", (4, 4), RED).save(tmp_path / "x.png")
    (tmp_path / "x.png").rename(tmp_path / "x.JPEG")
    assert (pixels(tmp_path / "x.JPEG") == RED).all()


def noise(path, size=(64, 64)):
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (*size, 3)).astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.gif", "x.bmp", "x.webp"])
def test_a_file_cut_short_is_refused_by_name(tmp_path, name):
    path = noise(tmp_path / name)
    content = path.read_bytes()
    for share in (0, 0.01, 0.5, 0.9):
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(DataError, match=rf"{name} cannot be decoded \("):
            read_picture(path)


def test_foreign_content_missing_files_and_folders(tmp_path):
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(DataError, match=r"x\.png cannot be decoded \(it is not an image in one of the formats JPEG, .*\)"):
        read_picture(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"gone\.png cannot be decoded \(.*No such file"):
        read_picture(tmp_path / "gone.png")
    with pytest.raises(DataError, match="cannot be decoded"):
        read_picture(tmp_path)


def test_thirty_two_bits_are_refused(tmp_path):
    Image.fromarray(np.zeros((3, 3), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(DataError, match="grey values of 32 bits"):
        read_picture(tmp_path / "x.tif")


def test_a_picture_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for size in ((40, 40), (80, 80)):
        with pytest.raises(DataError, match=r"cannot be decoded \(.*exceeds limit"):
            read_picture(noise(tmp_path / "x.png", size))
