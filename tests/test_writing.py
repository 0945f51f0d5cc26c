"""Files appear as a whole, and nothing is written through a link."""

import os

import pytest

from block_recurrent.writing import replacing, write_bytes, write_text


def test_a_file_takes_the_place_of_a_link_and_leaves_what_it_led_to(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "report.html").symlink_to(tmp_path / "precious")
    (tmp_path / "same").hardlink_to(tmp_path / "precious")
    for name in ("report.html", "same"):
        write_text(tmp_path / name, "page")
        assert (tmp_path / name).read_text() == "page" and not (tmp_path / name).is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_link_with_the_name_of_a_partial_file_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".file.partial").symlink_to(tmp_path / "precious")
    write_text(tmp_path / "file", "new")
    assert (tmp_path / "precious").read_text() == "mine"


def test_an_interrupted_file_leaves_the_old_one_and_nothing_beside(tmp_path):
    write_bytes(tmp_path / "file", b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file") as stream:
        stream.write(b"half of the n")
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"old"


def test_a_device_is_written_to_and_stays(tmp_path):
    write_text("/dev/null", "nothing")
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as error:
        write_text(tmp_path / "file" / "inside", "text")
    assert error.value.filename == str(tmp_path / "file" / "inside")
