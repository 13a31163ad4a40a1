"""Specs: sizes by hand-computed numbers, and every refusal with its message."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jaxkv.spec import GQA, MAX_ROWS, CacheSpec


def _make_kv(**changes) -> GQA:
    """24 elements a token: 2 heads of 8 key and 4 value elements."""
    return GQA(**{"num_kv_heads": 2, "head_dim": 8, "v_head_dim": 4} | changes)


def _make_spec(**changes) -> CacheSpec:
    """144 bytes a token, 576 a page, in bfloat16."""
    return CacheSpec(
        **{
            "num_layers": 3,
            "kv": _make_kv(),
            "page_size": 4,
            "pages_per_shard": 5,
            "dtype": "bfloat16",
        }
        | changes
    )


def test_sizes_of_gqa():
    assert _make_kv().value_dim == 4
    assert _make_kv().elements_per_token == 24
    assert _make_kv(v_head_dim=None).value_dim == 8
    assert _make_kv(v_head_dim=None).elements_per_token == 32


def test_sizes_of_a_spec():
    spec = _make_spec()
    assert spec.usable_pages == 4
    assert spec.bytes_per_token == 144
    assert spec.page_bytes == 576
    assert spec.pool_bytes() == 2880
    assert spec.pool_bytes(head_shards=2) == 1440


def test_sizes_of_a_thirty_layer_float32_model():
    spec = CacheSpec(
        num_layers=30,
        kv=GQA(num_kv_heads=3, head_dim=64),
        page_size=16,
        pages_per_shard=101,
        dtype="float32",
    )
    assert spec.bytes_per_token == 46_080
    assert spec.page_bytes == 737_280
    assert spec.pool_bytes() == 74_465_280
    # two slots of (1024 + 256 + 16) rows of 1536 bytes
    assert spec.scratch_bytes(1024, 256) == 3_981_312


def test_scratch_is_two_slots_of_prefix_chunk_and_trash():
    spec = _make_spec()
    assert spec.scratch_bytes(max_prefix_tokens=32, chunk_tokens=8) == 4224
    assert spec.scratch_bytes(32, 8, head_shards=2) == 2112
    assert spec.scratch_bytes(0, 0) == 384
    assert _make_spec(num_layers=1).scratch_bytes(32, 8) == 4224
    assert _make_spec(dtype="float32").scratch_bytes(32, 8) == 8448


def test_pages_for_charges_the_scratch_first():
    spec = _make_spec()
    sizes = {"max_prefix_tokens": 32, "chunk_tokens": 8}
    assert spec.pages_for(576 * 7) == 7
    assert spec.pages_for(576 * 8 - 1) == 7
    assert spec.pages_for(4224 + 576 * 7, **sizes) == 7
    assert spec.pages_for(4224 + 576 * 8 - 1, **sizes) == 7
    assert spec.pages_for(4224 + 576 * 8, **sizes) == 8
    assert spec.pages_for(2112 + 288 * 7, **sizes, head_shards=2) == 7
    assert spec.pages_for(2112 + 288 * 8 - 1, **sizes, head_shards=2) == 7


def test_pages_for_charges_the_chunk_alone_where_nothing_is_assembled():
    # two slots of (8 + 4) rows of 48 bytes
    assert _make_spec().pages_for(1152 + 576 * 3, chunk_tokens=8) == 3


@pytest.mark.parametrize("head_shards", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pages_for_is_the_most_that_fits(dtype, head_shards):
    spec = _make_spec(dtype=dtype)
    scratch = spec.scratch_bytes(16, 4, head_shards)
    for budget in range(16_000, 19_000, 97):
        pages = spec.pages_for(
            budget, max_prefix_tokens=16, chunk_tokens=4, head_shards=head_shards
        )

        def total(pages):
            sized = dataclasses.replace(spec, pages_per_shard=pages)
            return sized.pool_bytes(head_shards) + scratch

        assert total(pages) <= budget < total(pages + 1)


def test_pages_for_refuses_a_budget_of_less_than_two_pages():
    spec = _make_spec()
    sizes = {"max_prefix_tokens": 32, "chunk_tokens": 8}
    assert spec.pages_for(4224 + 576 * 2, **sizes) == 2
    with pytest.raises(
        ValueError,
        match=r"memory_budget=5375 bytes leaves 1 pages after 4224 bytes of scratch; "
        r"at least 2 pages of 576 bytes",
    ):
        spec.pages_for(4224 + 576 * 2 - 1, **sizes)
    with pytest.raises(ValueError, match=r"memory_budget=100 bytes leaves 0 pages"):
        spec.pages_for(100, **sizes)
    with pytest.raises(ValueError, match=r"leaves 1 pages after 0 bytes of scratch"):
        spec.pages_for(576)


def test_pipeline_stages_hold_consecutive_layers():
    stages = [_make_spec(num_layers=3, first_layer=3 * stage) for stage in range(4)]
    assert [list(stage.layers) for stage in stages] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    assert list(_make_spec(num_layers=2, first_layer=5).layers) == [5, 6]
    assert {stage.pool_bytes() for stage in stages} == {2880}
    assert len(set(stages)) == 4


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _make_kv().head_dim = 16  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        _make_spec().page_size = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_specs_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        GQA(2, 8)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="positional"):
        CacheSpec(3, _make_kv(), 4, 5)  # pyright: ignore[reportCallIssue]


def test_equal_specs_are_one_key():
    assert _make_spec() == _make_spec()
    assert hash(_make_spec()) == hash(_make_spec())
    assert hash(_make_kv()) == hash(_make_kv())
    changed = [
        _make_spec(num_layers=4),
        _make_spec(kv=_make_kv(head_dim=16)),
        _make_spec(page_size=8),
        _make_spec(pages_per_shard=6),
        _make_spec(dtype="float16"),
        _make_spec(first_layer=1),
    ]
    assert len({_make_spec(), *changed}) == 7


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", ml_dtypes.bfloat16),
        ("bfloat16", np.dtype("bfloat16")),
        ("float32", np.float32),
        ("float32", "f4"),
        ("float16", np.float16),
    ],
)
def test_spellings_of_a_dtype_are_one_spec(name, dtype):
    spec = _make_spec(dtype=dtype)
    assert spec == _make_spec(dtype=name)
    assert hash(spec) == hash(_make_spec(dtype=name))
    assert spec.dtype == np.dtype(name)


def test_a_spec_of_numpy_sizes_is_the_spec_of_ints():
    spec = _make_spec(num_layers=np.int64(3), page_size=np.int32(4))
    assert spec == _make_spec()
    assert hash(spec) == hash(_make_spec())


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "v_head_dim"])
def test_gqa_refuses_sizes_under_one(name, size):
    with pytest.raises(ValueError, match=rf"{name}={size} must be at least 1"):
        _make_kv(**{name: size})


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["num_layers", "page_size", "pages_per_shard"])
def test_spec_refuses_sizes_under_one(name, size):
    with pytest.raises(ValueError, match=rf"{name}={size} must be at least 1"):
        _make_spec(**{name: size})


@pytest.mark.parametrize("size", [1.0, "4", True, None, np.float32(4)])
@pytest.mark.parametrize("name", ["num_layers", "page_size", "pages_per_shard"])
def test_spec_refuses_sizes_that_are_not_ints(name, size):
    with pytest.raises(TypeError, match=rf"^{name}=.* must be an int") as raised:
        _make_spec(**{name: size})
    assert repr(size) in str(raised.value)


@pytest.mark.parametrize("size", [1.0, "4", True])
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "v_head_dim"])
def test_gqa_refuses_sizes_that_are_not_ints(name, size):
    with pytest.raises(TypeError, match=rf"{name}={size!r} must be an int"):
        _make_kv(**{name: size})


def test_spec_refuses_a_pool_of_reserved_pages_only():
    with pytest.raises(
        ValueError, match=r"pages_per_shard=1 must be at least 2: .*reserved"
    ):
        _make_spec(pages_per_shard=1)
    assert _make_spec(pages_per_shard=2).usable_pages == 1


def test_spec_refuses_a_negative_first_layer():
    with pytest.raises(ValueError, match="first_layer=-1 must be at least 0"):
        _make_spec(first_layer=-1)


def test_spec_refuses_what_is_no_kv_spec():
    with pytest.raises(TypeError, match=r"kv=\(2, 8\) must be a jaxkv.GQA"):
        _make_spec(kv=(2, 8))


def test_spec_refuses_more_rows_than_int32_addresses():
    assert MAX_ROWS == 31 * 2**13 * 2**13
    sizes = {"num_layers": 31, "page_size": 2**13, "pages_per_shard": 2**13}
    _make_spec(**sizes)
    sizes["pages_per_shard"] += 1
    with pytest.raises(
        ValueError, match=rf"rows={MAX_ROWS + 31 * 2**13} .*at most {MAX_ROWS}"
    ):
        _make_spec(**sizes)


@pytest.mark.parametrize("dtype", ["float64", "int8", "int32", "float8_e4m3fn", "bool"])
def test_spec_refuses_element_types_without_a_pool(dtype):
    with pytest.raises(
        ValueError, match=rf"dtype={dtype} is not one of float32, bfloat16, float16"
    ):
        _make_spec(dtype=dtype)


def test_spec_refuses_a_name_of_no_dtype():
    with pytest.raises(TypeError, match="nonsense"):
        _make_spec(dtype="nonsense")


def test_numpy_sizes_do_not_overflow():
    spec = CacheSpec(
        num_layers=np.int32(80),
        kv=GQA(num_kv_heads=np.int32(64), head_dim=np.int32(512)),
        page_size=np.int32(256),
        pages_per_shard=2,
    )
    assert spec.page_bytes == 80 * 64 * 2 * 512 * 256 * 2


@pytest.mark.parametrize("first_layer", [1.5, True, "a"])
def test_a_first_layer_that_is_no_int_is_refused(first_layer):
    with pytest.raises(TypeError, match=r"first_layer=.* must be an int"):
        CacheSpec(
            num_layers=1,
            kv=GQA(num_kv_heads=1, head_dim=1),
            page_size=1,
            pages_per_shard=2,
            first_layer=first_layer,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_shards": 0}, "head_shards=0 does not divide num_kv_heads=2"),
        ({"head_shards": 3}, "head_shards=3 does not divide num_kv_heads=2"),
        ({"max_prefix_tokens": -1}, "max_prefix_tokens=-1 and chunk_tokens=0 must be"),
    ],
)
def test_pages_for_refuses_what_cannot_be(options, message):
    kv = GQA(num_kv_heads=2, head_dim=4)
    spec = CacheSpec(num_layers=1, kv=kv, page_size=1, pages_per_shard=2)
    with pytest.raises(ValueError, match=message):
        spec.pages_for(10_000, **options)


def test_pages_for_gives_no_more_than_a_spec_takes():
    kv = GQA(num_kv_heads=1, head_dim=1)
    spec = CacheSpec(num_layers=30, kv=kv, page_size=1, pages_per_shard=2)
    pages = spec.pages_for(80 * 2**30)
    assert dataclasses.replace(spec, pages_per_shard=pages).pages_per_shard == pages
