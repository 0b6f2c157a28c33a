"""Rates from files and from windows: what is read, and what is refused with file, line, column, value and remedy."""

from pathlib import Path
from random import Random

import pytest

from planner.rates import KeyRates, read_csv
from service.errors import InvalidInput
from service.keys import hash_key


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "rates.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def as_dict(rates: KeyRates) -> dict[int, float]:
    return dict(zip(rates.key_hashes.tolist(), rates.rates_rps.tolist(), strict=True))


@pytest.mark.parametrize(
    "content",
    [
        "key,rate_rps\nacme,2.5\nzoë,0\n",
        "\ufeffkey,rate_rps\r\nacme,2.5\r\nzoë,0\r\n",
        'rate_rps, prefix_tokens ,key,note\n2.5,100,acme,"a, b\nc"\n\n 0 ,,zoë,\n',
        "key,rate_rps\nzoë,0e5\nacme,+2.50",
    ],
)
def test_columns_are_found_by_name(tmp_path: Path, content: str) -> None:
    """Order of columns and rows, further columns, empty lines, line ends and a byte order mark make no difference."""
    rates = read_csv(written(tmp_path, content))
    assert as_dict(rates) == {hash_key(b"acme"): 2.5, hash_key("zoë".encode()): 0.0}
    assert rates.total_rps == 2.5
    assert rates.key_hashes.tolist() == sorted(rates.key_hashes.tolist())


def test_keys_are_hashed_with_the_salt(tmp_path: Path) -> None:
    """The salt is that of the services' hashes."""
    assert as_dict(read_csv(written(tmp_path, "key,rate_rps\na,1\n"), salt=b"s")) == {hash_key(b"a", b"s"): 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["is empty"]),
        ("\n \n", ["is empty"]),
        ("key,rate_rps\n", ["no rows", "one line for each key"]),
        ("tenant,rate_rps\na,1\n", ["line 1", "no column 'key'", "'tenant'"]),
        ("key;rate_rps\na;1\n", ["line 1", "no column 'key'", "comma"]),
        ("key,rate_rps,key\na,1,b\n", ["line 1", "2 columns 'key'"]),
        ("key,rate_rps\na,1\nb,fast\n", ["line 3", "'rate_rps'", "'fast'", "not a number", "2.5"]),
        ("key,rate_rps\na,1\nb,\n", ["line 3", "'rate_rps'", "''", "not a number"]),
        ("key,rate_rps\na,1_000\n", ["line 2", "'1_000'", "not a number"]),
        ("key,rate_rps\na,1\n\nb,-1\n", ["line 4", "'rate_rps'", "'-1'", "negative"]),
        ("key,rate_rps\na,nan\n", ["line 2", "'nan'", "not finite"]),
        ("key,rate_rps\na,1e999\n", ["line 2", "'1e999'", "not finite"]),
        ("key,rate_rps\na,1e30\n", ["line 2", "'1e30'", "above 1e+12"]),
        ("key,rate_rps\na,1\nb,2\na,3\n", ["line 4", "'key'", "'a'", "line 2"]),
        ("key,rate_rps\n,1\n", ["line 2", "'key'", "empty"]),
        ("key,rate_rps\na ,1\n", ["line 2", "'key'", "blanks"]),
        ("key,rate_rps\na,1\nb\n", ["line 3", "1 columns", "2"]),
        ("key,rate_rps\na,b,1\n", ["line 2", "3 columns", "quote"]),
        ('key,rate_rps,x\na,1,"two\nlines"\nb,oops,\n', ["line 4", "'oops'"]),
        ('key,rate_rps\n"a,1\nb,2\n', ["line 3", "quotes"]),
        (b"key,rate_rps\na,1\nb\xff,2\n", ["line 3", "0xff", "UTF-8"]),
    ],
)
def test_a_fault_is_told_with_its_place_and_remedy(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    """The message names file, line, column and value of the first fault and what to do; the exit code is 2."""
    path = written(tmp_path, content)
    with pytest.raises(InvalidInput) as caught:
        read_csv(path)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert all(word in message for word in [str(path), *words]), message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and a folder are named with the system's own words."""
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(InvalidInput, match=str(path)):
            read_csv(path)


def test_the_order_of_rows_changes_nothing() -> None:
    """Canonical order and an exactly rounded sum: shuffled rows give the same rates to the last bit."""
    rng = Random(0)
    rows = [(rng.getrandbits(64), rng.lognormvariate(0, 5)) for _ in range(1000)]
    one = KeyRates.of(*zip(*rows, strict=True))
    rng.shuffle(rows)
    two = KeyRates.of(*zip(*rows, strict=True))
    assert (one.key_hashes.tobytes(), one.rates_rps.tobytes(), one.total_rps) == (
        two.key_hashes.tobytes(),
        two.rates_rps.tobytes(),
        two.total_rps,
    )
