"""The pictures of the documentation match the output of `tools/pictures.py`."""

import re
import xml.etree.ElementTree as ElementTree

import pictures
import pytest


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn(name):
    """To update them: python tools/pictures.py"""
    drawn = str(pictures.PICTURES[name]())
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn
    ElementTree.fromstring(drawn)


def test_every_picture_is_shown():
    files = {path.stem for path in pictures.FOLDER.iterdir()}
    pages = [*pictures.ROOT.glob("*.md"), *pictures.ROOT.glob("docs/**/*.md")]
    shown = {
        name for page in pages for name in re.findall(r"pictures/(\w+)\.svg", page.read_text())
    }
    assert files == shown == pictures.PICTURES.keys()
