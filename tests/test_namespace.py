"""Namespaces: values that only equal themselves."""

import dataclasses
import hashlib

import pytest

from jaxkv.host.namespace import DEFAULT_NAMESPACE, Namespace

_UNLIKE = [
    Namespace(),
    Namespace(salt=""),
    Namespace(salt="a"),
    Namespace(adapter_id="a"),
    Namespace(multimodal_hash="a"),
    Namespace(multimodal_hash=b"a"),
    Namespace(multimodal_hash="61"),
    Namespace(adapter_id=1),
    Namespace(adapter_id="1"),
    Namespace(salt="a", adapter_id="b"),
    Namespace(salt="a,b"),
    Namespace(salt="b", adapter_id="a"),
    Namespace(salt="\ud800"),
]


def test_equal_fields_are_equal_and_others_are_not():
    assert len(set(_UNLIKE)) == len(_UNLIKE)
    assert len({space.digest() for space in _UNLIKE}) == len(_UNLIKE)
    for space in _UNLIKE:
        twin = dataclasses.replace(space)
        assert twin == space
        assert twin.digest() == space.digest()
    assert Namespace() == DEFAULT_NAMESPACE


def test_digests_do_not_change_from_one_version_to_the_next():
    namespace = Namespace(salt="é", adapter_id=7, multimodal_hash=b"\x01")
    text = rb'[["str", "\u00e9"], ["int", 7], ["bytes", "01"]]'
    assert namespace.digest() == hashlib.sha256(text).digest()
    assert namespace.digest().hex()[:16] == "b34d9dbb4d51a947"


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="tenant"):
        Namespace(tenant="a")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        Namespace("a")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("salt", b"a", "salt=b'a' must be str or None"),
        ("salt", 1, "salt=1 must be str or None"),
        ("adapter_id", True, r"adapter_id=True must be int \| str or None"),
        ("adapter_id", 1.0, r"adapter_id=1.0 must be int \| str or None"),
        ("multimodal_hash", ["a"], r"multimodal_hash=\['a'\] must be bytes \| str"),
    ],
)
def test_a_field_of_another_type_is_refused(field, value, message):
    with pytest.raises(TypeError, match=message):
        Namespace(**{field: value})


def test_a_namespace_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_NAMESPACE.salt = "a"  # pyright: ignore[reportAttributeAccessIssue]
