"""Rules by which a request's key is found and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.keys import KeyReader, check_source, format_hash, hash_key, normalise


def read(sources: list[str], headers: dict[str, bytes], max_bytes: int = 256) -> tuple[bytes | None, str]:
    return KeyReader(tuple(check_source(s) for s in sources), max_bytes).read(headers)


@pytest.mark.parametrize(
    ("sources", "headers", "key"),
    [
        (["X-Tenant-Id"], {"x-tenant-id": b"acme"}, b"acme"),
        (["x-tenant-id"], {"x-tenant-id": b" \tAcme "}, b"Acme"),
        (["x-a", "x-b"], {"x-b": b"b"}, b"b"),
        (["x-a", "x-b"], {"x-b": b"b", "x-a": b"a"}, b"a"),
        (["x-a", "x-b"], {"x-a": b"  ", "x-b": b"b"}, b"b"),
        ([":authority"], {":authority": b"Acme.Example.COM.:8443"}, b"acme.example.com"),
        ([":authority"], {":authority": b"acme.example.com"}, b"acme.example.com"),
        ([":authority"], {":authority": b"[FD00::1]:80"}, b"fd00::1"),
        ([":path/2"], {":path": b"/tenants/acme/v1/chat?x=/y/z"}, b"acme"),
        ([":path/2"], {":path": b"//tenants//a%20b"}, b"a b"),
        ([":path/1"], {":path": b"/only#frag/two"}, b"only"),
        ([":path/3", "x-a"], {":path": b"/one/two", "x-a": b"a"}, b"a"),
        (["x-a"], {}, None),
        (["x-a"], {"x-a": "straße".encode()}, "straße".encode()),
    ],
)
def test_where_a_key_comes_from(sources: list[str], headers: dict[str, bytes], key: bytes | None) -> None:
    """The first source with a value that is not empty gives the key, in the form the rules say."""
    assert read(sources, headers) == (key, "")


@pytest.mark.parametrize(
    ("value", "cause"), [(b"x" * 257, "too_long"), (b"x" * 65536, "too_long"), (b"\xff\xfe", "not_utf8")]
)
def test_a_key_that_cannot_be_used_hides_the_next_source(value: bytes, cause: str) -> None:
    """A value too long or not UTF-8 is no key and says why; nobody else's header is asked instead."""
    assert read(["x-a", "x-b"], {"x-a": value, "x-b": b"b"}) == (None, cause)


def test_a_path_segment_is_bounded_after_decoding() -> None:
    """What is bounded is the key as it is hashed, so escapes neither hide nor add length."""
    assert read([":path/1"], {":path": b"/" + b"%41" * 256})[0] == b"A" * 256
    assert read([":path/1"], {":path": b"/%ff"}) == (None, "not_utf8")


@pytest.mark.parametrize("bad", ["", "x y", ":method", ":path", ":path/0", ":path/65", ":path/x", "a=b", "a/b"])
def test_a_source_that_is_none_is_refused(bad: str) -> None:
    """What is neither a header's name nor one of the two forms is told at the start."""
    with pytest.raises(ValueError, match=r"is (not|neither)"):
        check_source(bad)


@given(st.binary(max_size=400), st.sampled_from(["x-a", ":authority", ":path/1", ":path/3"]))
def test_any_bytes_are_a_key_or_none(value: bytes, source: str) -> None:
    """No value raises; a key is never empty, never too long and always text; reading it again changes nothing."""
    key, cause = read([source], {source.partition("/")[0]: value}, max_bytes=64)
    assert cause in {"", "too_long", "not_utf8"}
    if key is not None:
        assert cause == ""
        assert 0 < len(key) <= 64
        key.decode()
        if source == "x-a":
            assert normalise(key) == key


def test_the_hash_is_stable() -> None:
    """Plans outlive processes: the hash of a key is the same for good, and another one with a salt."""
    assert format_hash(hash_key(b"acme")) == "49de86402fafe4df"
    assert hash_key(b"acme", b"0123456789abcdef") != hash_key(b"acme")
