"""Files of arrays: whole or not at all, and refused in words, whatever byte of them is damaged."""

import numpy as np
import pytest

from jaxcomp.files import BROKEN, read_arrays, refusing, write_arrays

ARRAYS = {"header": np.array('{"version": 1}'), "x": np.arange(6.0).reshape(2, 3), "none": np.zeros((0, 4), np.int8)}


def test_arrays_come_back_as_they_were(tmp_path):
    write_arrays(tmp_path / "file", ARRAYS)
    kept = read_arrays(tmp_path / "file")
    assert kept.keys() == ARRAYS.keys()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    for name, array in ARRAYS.items():
        assert kept[name].dtype == array.dtype
        np.testing.assert_array_equal(kept[name], array)


def test_a_file_stays_as_it_was_where_writing_fails(tmp_path):
    write_arrays(tmp_path / "file", ARRAYS)

    class Unwritable:
        def __array__(self, *args, **kwargs):
            raise RuntimeError("no array")

    with pytest.raises(RuntimeError, match="no array"):
        write_arrays(tmp_path / "file", {"x": Unwritable()})
    np.testing.assert_array_equal(read_arrays(tmp_path / "file")["x"], ARRAYS["x"])


def test_damage_is_refused_in_words(tmp_path):
    write_arrays(tmp_path / "file", ARRAYS)
    whole = (tmp_path / "file").read_bytes()
    refused = 0
    for place in range(len(whole)):
        (tmp_path / "file").write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            with refusing("a test"):
                read_arrays(tmp_path / "file")
        except ValueError as error:
            refused += str(error).startswith("a test: ")
    assert refused > len(whole) // 4  # the others change names and times alone
    (tmp_path / "file").write_bytes(whole[:-1])
    with pytest.raises(BROKEN):
        read_arrays(tmp_path / "file")
