"""The GGUF header parser against the gguf package's own reader, and against damage."""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.gguf_header import GgufError, SkippedArray, load_header, packed_block_bytes, parse_header


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file with every kind of value and three types of tensor."""
    file = tmp_path_factory.mktemp("gguf") / "file.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -3)
    writer.add_uint16("a.uint16", 60000)
    writer.add_int16("a.int16", -4)
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int32("a.int32", -5)
    writer.add_float32("a.float32", 0.5)
    writer.add_uint64("a.uint64", 2**40)
    writer.add_int64("a.int64", -(2**40))
    writer.add_float64("a.float64", 0.25)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.strings", ["x", "yy"])
    writer.add_array("a.many_strings", ["piece"] * 3000)
    writer.add_array("a.many_numbers", list(range(3000)))
    writer.add_tensor("one.weight", np.ones((3, 5), np.float32))
    writer.add_tensor("two.weight", np.ones((2, 4, 8), np.float16))
    quantised = np.zeros((2, 20), np.uint8)  # two rows of one Q4_1 block: 32 elements in 20 bytes
    writer.add_tensor("three.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_values_are_those_that_the_gguf_package_reads(path):
    metadata = load_header(path).metadata
    for name, field in gguf.GGUFReader(path).fields.items():
        if not name.startswith("GGUF.") and "many" not in name:
            assert metadata[name] == field.contents()


def test_a_long_array_is_skipped_and_its_length_kept(path):
    metadata = load_header(path).metadata
    assert metadata["a.many_strings"] == SkippedArray(3000)
    assert metadata["a.many_numbers"] == SkippedArray(3000)


def test_tensors_lie_where_the_gguf_package_finds_them(path):
    tensors = load_header(path).tensors
    reader = gguf.GGUFReader(path)
    assert [t.name for t in reader.tensors] == list(tensors)
    for tensor in reader.tensors:
        entry = tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.offset_bytes, entry.n_bytes, entry.type) == (
            tensor.data_offset, tensor.n_bytes, tensor.tensor_type,
        )  # fmt: skip


def test_what_kept_blocks_take_is_told_a_block_and_nothing_if_none_is_quantised(path, tmp_path):
    assert packed_block_bytes(load_header(path), 2) == 0
    writer = gguf.GGUFWriter(tmp_path / "packed.gguf", "llama")
    rows = np.ones((4, 64), dtype=np.float32)
    for block in range(2):
        writer.add_tensor(
            f"blk.{block}.ffn_up.weight",
            gguf.quantize(rows, gguf.GGMLQuantizationType.Q4_0),
            raw_dtype=gguf.GGMLQuantizationType.Q4_0,
        )
        writer.add_tensor(f"blk.{block}.ffn_down.weight", rows)
        writer.add_tensor(f"blk.{block}.ffn_norm.weight", rows[0])
    writer.add_tensor("token_embd.weight", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Rows of two blocks of 18 bytes; what is not quantised is unpacked to two bytes a number; norms are not maps.
    assert packed_block_bytes(load_header(tmp_path / "packed.gguf"), 2) == 4 * 2 * 18 + 4 * 64 * 2


def test_every_shorter_file_is_refused(path):
    data = path.read_bytes()
    whole = parse_header(data)
    end = max(entry.offset_bytes + entry.n_bytes for entry in whole.tensors.values())
    for length in range(0, end, 17):
        with pytest.raises(GgufError):
            parse_header(data[:length])


@given(position=st.integers(0, 1200), value=st.integers(0, 255))
def test_a_damaged_byte_is_read_or_refused_but_never_crashes(path, position, value):
    data = bytearray(path.read_bytes())
    data[position] = value
    with contextlib.suppress(GgufError):
        parse_header(bytes(data))


def test_a_claim_of_many_strings_is_refused_without_walking_beyond_the_end():
    pair = (4).to_bytes(8, "little") + b"many" + (9).to_bytes(4, "little")
    array = (8).to_bytes(4, "little") + (2**62).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    with pytest.raises(GgufError, match="truncated"):
        parse_header(head + pair + array)


def test_another_version_of_the_format_is_refused():
    with pytest.raises(GgufError, match="version 9 is not supported"):
        parse_header(b"GGUF" + (9).to_bytes(4, "little") + bytes(16))
